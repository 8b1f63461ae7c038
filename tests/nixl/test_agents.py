"""What agents of NIXL do for each other, both in this process."""

from __future__ import annotations

import asyncio
import math
import random
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from tests.conditions import PATIENCE, Stopwatch, eventually
from tests.transfer.kv_blocks import arrays_of, filled, small_layout, tokens_of

from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import Cancelled, ConfigError, DeadlineExceeded, DynbusError, Unavailable
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.transport import Message
from dynbus.transfer import exchange, messages
from dynbus.transfer.agent import TransferAgent, open_agent
from dynbus.transfer.binding import Operation
from dynbus.transfer.config import TransferConfig
from dynbus.transfer.descriptors import AgentDescription, decode, encode
from dynbus.transfer.errors import (
    BadDescription,
    InvalidTransfer,
    LayoutMismatch,
    PeerRestarted,
    TransferFailed,
)
from dynbus.transfer.layout import BlockLayout, KvMemory, Region
from dynbus.transfer.leases import Ticket
from dynbus.transfer.links import Moved
from dynbus.transfer.names import transfer_agent_subject, transfer_subject
from dynbus.transfer.transfers import Transfer

pytestmark = pytest.mark.anyio

TCP = TransferConfig(ucx={"TLS": "tcp"}, quiet_seconds=1.0)
DIRECT_TCP = TransferConfig(ucx={"TLS": "tcp"}, reads="direct")
OTHERS = 1 << 40
"""From here on no transfer of the process has its number."""
CONFIGS = pytest.mark.parametrize(
    "config", [TransferConfig(), TCP, DIRECT_TCP], ids=["default", "tcp", "direct tcp"]
)


@asynccontextmanager
async def on_bus(server: MemoryBus | None = None) -> AsyncGenerator[Bus]:
    server = server or MemoryBus()
    bus = await Bus.over(BusConfig(), await server.connect(), await server.connect())
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def pair(
    ours: KvMemory,
    theirs: KvMemory,
    config: TransferConfig | None = None,
    server: MemoryBus | None = None,
) -> AsyncGenerator[tuple[TransferAgent, TransferAgent]]:
    """An agent, and its peer."""
    async with (
        on_bus(server) as bus,
        open_agent(bus, "ns.Decode.1", ours, config) as decode,
        open_agent(bus, "ns.Prefill.1", theirs, config) as prefill,
    ):
        yield decode, prefill


def lend(agent: TransferAgent, blocks: Sequence[int], **changed: Any) -> Ticket:
    tokens = len(blocks) * agent.memory.layout.block_size
    given: dict[str, Any] = {"tokens": tokens, "seconds": PATIENCE, **changed}
    return agent.grant(blocks, **given)


def begin(
    agent: TransferAgent,
    operation: Operation,
    ticket: Ticket,
    local: Sequence[int],
    **changed: Any,
) -> Transfer:
    tokens = len(local) * agent.memory.layout.block_size
    given: dict[str, Any] = {"tokens": tokens, "deadline": monotonic() + PATIENCE, **changed}
    return agent.start(operation, ticket, ticket.blocks, local, **given)


def at_rest(agent: TransferAgent) -> bool:
    seen = agent.statistics
    return not seen.open_handles and not seen.quarantined_blocks


@CONFIGS
async def test_what_is_read_and_written_is_what_the_other_side_has(config: TransferConfig) -> None:
    layout = small_layout(blocks=64)
    ours, theirs = filled(layout, 1), filled(layout, 2)
    before = [array.copy() for array in arrays_of(ours)]

    async with pair(ours, theirs, config) as (decode, prefill):
        reading = begin(decode, "read", lend(prefill, [9, 3, 4]), [5, 6, 1])
        await reading.result()
        await reading.quiet()
        writing = begin(decode, "write", lend(prefill, [20, 21], writable=True), [40, 8])
        await writing.result()
        seen = decode.statistics

    everything = range(3 * layout.block_size)
    assert tokens_of(ours, [5, 6, 1], everything) == tokens_of(theirs, [9, 3, 4], everything)
    assert tokens_of(theirs, [20, 21], range(8)) == tokens_of(ours, [40, 8], range(8))
    for array, earlier in zip(arrays_of(ours), before, strict=True):
        changed = np.flatnonzero((array != earlier).reshape(-1, layout.strides[0]).any(axis=1))
        assert {int(row) % layout.blocks for row in changed} <= {1, 5, 6}
    assert reading.bytes == 3 * layout.block_bytes
    assert (seen.transfers["read", "done"], seen.transfers["write", "done"]) == (1, 1)
    assert (seen.bytes, seen.links) == (5 * layout.block_bytes, 2 if config is TCP else 1)
    assert (seen.open_handles, seen.quarantined_blocks, seen.destroyed_links) == (0, 0, 0)


@pytest.mark.parametrize("prepared", [0, 1 << 20], ids=["planned", "prepared"])
async def test_tokens_that_do_not_fill_their_last_block_leave_the_rest_of_it_alone(
    prepared: int,
) -> None:
    ours, theirs = filled(small_layout(), 1), filled(small_layout(), 2)
    rest = tokens_of(ours, [5], range(2, 4))

    async with pair(ours, theirs, TransferConfig(prepared=prepared)) as (decode, prefill):
        await begin(decode, "read", lend(prefill, [0, 6]), [2, 5], tokens=6).result()

    assert tokens_of(ours, [2, 5], range(6)) == tokens_of(theirs, [0, 6], range(6))
    assert tokens_of(ours, [5], range(2, 4)) == rest


async def test_blocks_of_two_halves_of_the_heads_and_of_another_size_become_ours() -> None:
    whole = BlockLayout.packed(
        ("block", "kv", "token", "head"),
        dtype="float32",
        layers=2,
        kv_heads=4,
        head_dim=4,
        block_size=8,
        blocks=8,
    )
    ours = filled(whole, 1)
    halves = [
        filled(small_layout(blocks=16, first_head=first, total_heads=4), 2 + first)
        for first in (0, 2)
    ]

    async with on_bus() as bus, open_agent(bus, "ns.Decode.1", ours) as decode:
        for rank, half in enumerate(halves):
            async with open_agent(bus, f"ns.Prefill.{rank}", half) as prefill:
                ticket = lend(prefill, [1, 7, 3])
                await begin(decode, "read", ticket, [5, 0], tokens=11).result()

    for half in halves:
        heads = range(half.layout.first_head, half.layout.first_head + 2)
        assert tokens_of(ours, [5, 0], range(11), heads) == tokens_of(
            half, [1, 7, 3], range(11), heads
        )


@CONFIGS
async def test_a_transfer_that_is_larger_than_a_slice_is_whole(config: TransferConfig) -> None:
    layout = small_layout(("block", "kv", "head", "token"), head_dim=1024, blocks=96)
    ours, theirs = filled(layout, 1), filled(layout, 2)
    small = msgspec.structs.replace(config, slice_bytes=2**16)
    blocks = random.Random(0).sample(range(96), 96)

    async with pair(ours, theirs, small) as (decode, prefill):
        await begin(decode, "read", lend(prefill, blocks), range(96)).result()
        seen = decode.statistics

    assert seen.bytes == 96 * layout.block_bytes > 20 * small.slice_bytes
    for array, source in zip(arrays_of(ours), arrays_of(theirs), strict=True):
        assert np.array_equal(array.reshape(96, -1), source.reshape(96, -1)[blocks])


async def test_a_description_that_outgrows_a_record_is_an_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "MAX_RECORD_BYTES", 64)
    ours, theirs = filled(small_layout(), 1), filled(small_layout(), 2)

    async with pair(ours, theirs) as (decode, prefill):
        await begin(decode, "read", lend(prefill, [1]), [0]).result()

    assert tokens_of(ours, [0], range(4)) == tokens_of(theirs, [1], range(4))


async def test_a_ticket_of_an_earlier_life_is_refused_and_the_next_life_is_met() -> None:
    ours, theirs = filled(small_layout(), 1), filled(small_layout(), 2)

    async with on_bus() as bus, open_agent(bus, "ns.Decode.1", ours) as decode:
        async with open_agent(bus, "ns.Prefill.1", filled(small_layout(), 3)) as prefill:
            old = lend(prefill, [1])
            await begin(decode, "read", old, [0]).result()
        async with open_agent(bus, "ns.Prefill.1", theirs) as prefill:
            await begin(decode, "read", lend(prefill, [1]), [2]).result()
            with pytest.raises(PeerRestarted):
                await begin(decode, "read", old, [3]).result()
            await begin(decode, "read", lend(prefill, [2]), [4]).result()
        await eventually(lambda: decode.statistics.links == 1)

    assert tokens_of(ours, [2, 4], range(8)) == tokens_of(theirs, [1, 2], range(8))


async def test_a_life_that_has_ended_without_another_fails_its_transfers() -> None:
    async with on_bus() as bus, open_agent(bus, "ns.Decode.1", filled(small_layout())) as decode:
        async with open_agent(bus, "ns.Prefill.1", filled(small_layout())) as prefill:
            ticket = lend(prefill, [1])
        transfer = begin(decode, "read", ticket, [0])
        with pytest.raises(TransferFailed, match="there is no agent"):
            await transfer.result()
        await transfer.quiet()
        assert at_rest(decode)


@pytest.mark.parametrize("config", [TransferConfig(), TCP], ids=["default", "tcp"])
async def test_peers_that_are_gone_leave_nothing_once_another_is_met(
    config: TransferConfig,
) -> None:
    layout = small_layout()
    async with on_bus() as bus, open_agent(bus, "ns.Decode.1", filled(layout), config) as decode:
        for life in range(3):
            name = f"ns.Prefill.{life}"
            async with open_agent(bus, name, filled(layout), config) as prefill:
                await begin(decode, "read", lend(prefill, [1]), [2]).result()

                def has_one_link() -> bool:
                    return decode.statistics.links == 1

                await eventually(has_one_link, what="those that are gone have no link")


async def test_a_ticket_with_the_largest_id_is_refused_without_memory_for_all_below(
    opened: tuple[TransferAgent, TransferAgent],
) -> None:
    ours, theirs = opened
    ticket = msgspec.structs.replace(lend(theirs, [1]), blocks=(1, 2**31 - 1))

    tracemalloc.start()
    with suppress(DynbusError):
        await begin(ours, "read", ticket, [3, 4]).result()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 2**24


async def test_what_cannot_become_ours_is_refused() -> None:
    async with pair(filled(small_layout()), filled(small_layout(dtype="int8"))) as (ours, theirs):
        with pytest.raises(LayoutMismatch, match="dtype"):
            await begin(ours, "read", lend(theirs, [0]), [0]).result()
        assert at_rest(ours)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"operation": "copy"}, "a read or a write"),
        ({"operation": "write"}, "for reading"),
        ({"local_blocks": [8]}, "local blocks 8 are not all below 8"),
        ({"local_blocks": [-1]}, "not all below"),
        ({"local_blocks": [1, 1]}, "given twice"),
        ({"local_blocks": []}, "a list of ids"),
        ({"local_blocks": ["1"]}, "a list of ids"),
        ({"local_blocks": [0.5]}, "a list of ids"),
        ({"remote_blocks": [3]}, "not all below 3"),
        ({"remote_blocks": [0]}, "the ticket is not of all of the remote blocks 0"),
        ({"remote_blocks": [2**40]}, "not all below"),
        ({"tokens": 0}, "are no transfer"),
        ({"tokens": 9}, "do not fit"),
        ({"local_start": -1}, "are no transfer"),
        ({"deadline": float("nan")}, "a deadline"),
    ],
)
async def test_a_transfer_that_cannot_be_is_refused_at_once(
    opened: tuple[TransferAgent, TransferAgent], changed: dict[str, Any], told: str
) -> None:
    ours, theirs = opened
    given: dict[str, Any] = {
        "operation": "read",
        "ticket": lend(theirs, [1, 2]),
        "remote_blocks": [1, 2],
        "local_blocks": [3, 4],
        "tokens": 8,
        "deadline": monotonic() + PATIENCE,
        **changed,
    }

    with pytest.raises(InvalidTransfer, match=told):
        ours.start(given.pop("operation"), given.pop("ticket"), **given)


@pytest.fixture(scope="module")
async def opened() -> AsyncGenerator[tuple[TransferAgent, TransferAgent]]:
    async with pair(filled(small_layout()), filled(small_layout())) as agents:
        yield agents


async def test_more_tokens_than_the_peer_has_blocks_for_are_refused_by_its_layout(
    opened: tuple[TransferAgent, TransferAgent],
) -> None:
    ours, theirs = opened

    with pytest.raises(InvalidTransfer, match="remote"):
        await begin(ours, "read", lend(theirs, [1]), [3, 4], tokens=8).result()


@pytest.mark.parametrize("changed", [{"agent": "a b.*"}, {"agent": "x\r\nPUB y"}, {"epoch": "*"}])
async def test_a_ticket_of_a_name_that_is_no_agents_is_refused(
    opened: tuple[TransferAgent, TransferAgent], changed: dict[str, str]
) -> None:
    ours, theirs = opened
    ticket = msgspec.structs.replace(lend(theirs, [1]), **changed)

    with pytest.raises(InvalidTransfer, match="not of an agent"):
        begin(ours, "read", ticket, [3])


@CONFIGS
async def test_a_peer_that_lies_about_its_memory_fails_its_own_transfers_alone(
    config: TransferConfig,
) -> None:
    async with pair(filled(small_layout()), filled(small_layout()), config) as (ours, theirs):
        jetstream = ours.bus.data.jetstream
        told = await jetstream.last(
            exchange.AGENTS_STREAM.name, transfer_agent_subject(theirs.name)
        )
        assert told is not None
        honest = decode(told.data)
        far = [msgspec.structs.replace(one, address=one.address + 2**40) for one in honest.regions]
        lies: list[dict[str, Any]] = [
            {"regions": tuple(far)},
            {"metadata": b"x" * 300},
            {"regions": (Region(4096, 2**30, 0, "VRAM"), *honest.regions[1:])},
        ]
        for number, lie in enumerate(lies):
            name, epoch = f"ns.Liar.{number}", "lie"
            lying = msgspec.structs.replace(honest, agent=name, epoch=epoch, **lie)
            await jetstream.publish(transfer_agent_subject(name), encode(lying))
            transfer = begin(ours, "read", Ticket(name, epoch, 1, (1,), 4, PATIENCE), [3])
            with pytest.raises((TransferFailed, InvalidTransfer)):
                await transfer.result()
            await transfer.quiet()
        await begin(ours, "read", lend(theirs, [1]), [3]).result()
        assert at_rest(ours)


def saying(*kinds: type[messages.AgentMessage]) -> Callable[[Message], bool]:
    return lambda message: isinstance(messages.decode(message.data), kinds)


@pytest.mark.parametrize("lost", [messages.Push, messages.Pushed, messages.Unknown])
async def test_a_message_about_a_push_that_is_lost_costs_a_look_and_not_the_transfer(
    lost: type[messages.AgentMessage],
) -> None:
    server, layout = MemoryBus(), small_layout(blocks=64)
    ours, theirs = filled(layout, 1), filled(layout, 2)

    async with pair(ours, theirs, TCP, server) as (decode, prefill):
        with server.drop("*.*.*._transfer.*", 1, when=saying(lost)) as first:
            if lost is messages.Unknown:
                server.drop("*.*.*._transfer.*", 1, when=saying(messages.Push))
            began = monotonic()
            reading = begin(decode, "read", lend(prefill, [9, 3, 4]), [5, 6, 1])
            await reading.result()
            assert first.hits == 1
        assert monotonic() - began < PATIENCE / 2
        again = begin(decode, "read", lend(prefill, [7]), [2])
        await again.result()
        assert prefill.statistics.transfers["write", "done"] == 2
        assert at_rest(decode)

    everything = range(3 * layout.block_size)
    assert tokens_of(ours, [5, 6, 1], everything) == tokens_of(theirs, [9, 3, 4], everything)


async def test_a_push_that_comes_twice_writes_once() -> None:
    server, layout = MemoryBus(), small_layout(blocks=64)
    ours, theirs = filled(layout, 1), filled(layout, 2)
    async with pair(ours, theirs, TCP, server) as (decode, prefill):
        heard: list[bytes] = []
        keep = saying(messages.Push)
        subscription = decode.bus.data.subscribe(
            "*.*.*._transfer.*", lambda one: heard.append(one.data) if keep(one) else None
        )
        ticket = lend(prefill, [9])
        await begin(decode, "read", ticket, [5]).result()
        await eventually(lambda: len(heard) == 1)
        before = tokens_of(ours, [5], range(4))
        arrays_of(theirs)[0][:] = 7

        decode.bus.data.publish(transfer_subject(prefill.name, prefill.epoch), heard[0])
        await eventually(lambda: len(heard) == 2)
        await begin(decode, "read", lend(prefill, [8]), [6]).result()

        assert prefill.statistics.transfers["write", "done"] == 2
        assert tokens_of(ours, [5], range(4)) == before
        subscription.unsubscribe()


@pytest.mark.parametrize("seconds", [1e300, math.inf, math.nan, -1.0])
async def test_a_push_lasts_no_longer_than_the_lease_of_its_blocks(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, layout = MemoryBus(), small_layout(blocks=64)
    async with pair(filled(layout, 1), filled(layout, 2), TCP, server) as (decode, prefill):
        decode_told: list[messages.Pushed] = []
        written: list[float] = []
        pushes = prefill._pushes  # pyright: ignore[reportPrivateUsage]
        write = pushes._write  # pyright: ignore[reportPrivateUsage]

        def note(landing: AgentDescription, moved: Moved, seconds: float) -> Transfer:
            written.append(seconds)
            return write(landing, moved, seconds)

        monkeypatch.setattr(pushes, "_write", note)

        def hear(message: Message) -> None:
            told = messages.decode(message.data)
            if isinstance(told, messages.Push) and 0 < told.seconds < PATIENCE * 2:
                changed = msgspec.structs.replace(
                    told, number=told.number + OTHERS, seconds=seconds
                )
                to = transfer_subject(prefill.name, prefill.epoch)
                decode.bus.data.publish(to, messages.encode(changed))
            elif isinstance(told, messages.Pushed) and told.number >= OTHERS:
                decode_told.append(told)

        subscription = decode.bus.data.subscribe("*.*.*._transfer.*", hear)
        await begin(decode, "read", lend(prefill, [9]), [5]).result()
        await eventually(lambda: bool(decode_told))

        usable = seconds > 0
        assert decode_told[0].code == ("" if usable else "InvalidTransfer")
        assert not usable or all(0 < one <= PATIENCE for one in written)
        subscription.unsubscribe()


async def test_reads_are_not_pushed_where_a_frozen_peer_would_write_when_it_wakes() -> None:
    async with on_bus() as bus:
        with pytest.raises(ConfigError, match="go on writing when it wakes"):
            async with open_agent(
                bus, "ns.Decode.1", filled(small_layout()), TransferConfig(reads="pushed")
            ):
                pass


async def test_an_agent_has_a_name_that_can_be_a_subject() -> None:
    async with on_bus() as bus:
        for name in ("", "a b", "x." * 200 + "x", "ns.*"):
            with pytest.raises(ConfigError):
                async with open_agent(bus, name, filled(small_layout())):
                    raise AssertionError


async def test_a_record_that_is_damaged_or_of_another_agent_is_refused(
    opened: tuple[TransferAgent, TransferAgent],
) -> None:
    ours, theirs = opened
    jetstream = ours.bus.data.jetstream
    told = await jetstream.last(exchange.AGENTS_STREAM.name, transfer_agent_subject(theirs.name))
    assert told is not None

    for number, data in enumerate((b"nonsense", told.data[:-1], told.data)):
        name = f"ns.Liar.{number}"
        await jetstream.publish(transfer_agent_subject(name), data)
        ticket = Ticket(name, theirs.epoch, 1, (1,), 4, PATIENCE)
        with pytest.raises(BadDescription):
            await begin(ours, "read", ticket, [3]).result()


async def test_a_cancelled_reader_abandons_its_transfer() -> None:
    # Agents that have not met: a link that is there may be done before the next turn.
    async with pair(filled(small_layout()), filled(small_layout())) as (ours, theirs):
        transfer = begin(ours, "read", lend(theirs, [1]), [3])
        waiting = asyncio.ensure_future(transfer.result())
        await asyncio.sleep(0)

        waiting.cancel()

        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(Cancelled):
            await transfer.result()
        await transfer.quiet()
        await eventually(lambda: at_rest(ours))


async def test_a_deadline_that_is_over_ends_the_transfer_in_time(
    opened: tuple[TransferAgent, TransferAgent],
) -> None:
    ours, theirs = opened

    for changed in ({"deadline": monotonic()}, {"deadline": monotonic() - 100.0}):
        transfer = begin(ours, "read", lend(theirs, [1]), [3], **changed)
        with pytest.raises((DeadlineExceeded, Cancelled)):
            await transfer.result()
        await transfer.quiet()
    ticket = lend(theirs, [1], seconds=1e-9)
    with pytest.raises(DeadlineExceeded):
        await begin(ours, "read", ticket, [3]).result()
    await eventually(lambda: at_rest(ours))


@CONFIGS
async def test_transfers_cancelled_at_any_phase_leave_no_block_and_no_handle(
    config: TransferConfig,
) -> None:
    """A soak of 10,000 was run by hand; each phase is met by these as well."""
    layout = small_layout(("block", "kv", "head", "token"), head_dim=2048, blocks=32)
    ours, theirs = filled(layout, 1), filled(layout, 2)
    chance = random.Random(7)
    # No link is destroyed, however long the machine stands still with what was given up.
    small = msgspec.structs.replace(config, slice_bytes=2**16, quiet_seconds=PATIENCE)

    async def one(decode: TransferAgent, ticket: Ticket) -> None:
        count = chance.randint(1, 16)
        operation: Operation = chance.choice(["read", "write"])
        blocks = chance.sample(range(32), count)
        transfer = decode.start(
            operation,
            ticket,
            blocks,
            chance.sample(range(32), count),
            tokens=count * layout.block_size,
            deadline=monotonic() + PATIENCE,
        )
        await asyncio.sleep(chance.choice([0, 0, 1e-4, 1e-3, 3e-3]))
        transfer.cancel()
        with suppress(Cancelled):
            await transfer.result()
        await transfer.quiet()

    async with pair(ours, theirs, small) as (decode, prefill):
        ticket = lend(prefill, range(32), writable=True)
        for _ in range(25):
            await asyncio.gather(*(one(decode, ticket) for _ in range(8)))
        await eventually(lambda: at_rest(decode))
        seen = decode.statistics

    assert sum(seen.transfers.values()) == 200
    assert seen.destroyed_links == 0


async def test_an_agent_that_is_closed_ends_what_goes_on_and_takes_no_more() -> None:
    layout = small_layout(("block", "kv", "head", "token"), head_dim=2048, blocks=64)
    async with AsyncExitStack() as exits:
        decode, prefill = await exits.enter_async_context(
            pair(filled(layout, 1), filled(layout, 2), TCP)
        )
        ticket = lend(prefill, range(64))
        transfers = [begin(decode, "read", ticket, range(64)) for _ in range(8)]
        await asyncio.sleep(0)
        watch = Stopwatch()
        await exits.aclose()
        watch.check(PATIENCE, "closing")

    for transfer in transfers:
        with pytest.raises(DynbusError):
            await transfer.result()
        await transfer.quiet()
    with pytest.raises(Unavailable):
        begin(decode, "read", ticket, range(64))


@CONFIGS
async def test_agents_that_know_each_other_and_have_nothing_to_do_use_no_core(
    config: TransferConfig,
) -> None:
    """Under 1 % of a core for each of several, with their links."""
    async with on_bus() as bus, AsyncExitStack() as exits:
        agents = [
            await exits.enter_async_context(
                open_agent(bus, f"ns.Idle.{number}", filled(small_layout()), config)
            )
            for number in range(4)
        ]
        for reader in agents:
            for source in agents:
                if source is not reader:
                    await begin(reader, "read", lend(source, [1]), [2]).result()
                    ticket = lend(source, [3], writable=True)
                    await begin(reader, "write", ticket, [4]).result()

        async def is_idle() -> bool:
            spent, began = time.process_time(), time.monotonic()
            await asyncio.sleep(0.5)
            took = time.monotonic() - began
            return (time.process_time() - spent) / took < 0.01 * len(agents)

        with anyio.fail_after(60.0):
            while not await is_idle():
                pass
