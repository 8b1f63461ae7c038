"""Whatever happens to either side of a transfer, nobody uses bytes that are not the right ones.

Both sides are processes of their own, which are frozen, killed, restarted and cut off.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.conditions import wait_until
from tests.nixl.peers import (
    QUIET_SECONDS,
    Peer,
    PeerError,
    PeerOptions,
    forwarded,
    joined_namespaces,
    peers,
)

from dynbus.bus.nats.server_process import RunningServer
from dynbus.transfer.layout import BlockLayout

LAYOUT = BlockLayout.packed(
    ("block", "kv", "head", "token"),
    dtype="float32",
    layers=1,
    kv_heads=1,
    head_dim=128,
    block_size=512,
    blocks=128,
)
"""Blocks of 512 KiB: all of them take longer over TCP than it takes to freeze a process."""
ALL = list(range(LAYOUT.blocks))
SOME = ALL[::16]
AT_REST = {"handles": 0, "quarantined": 0}
TOO_LATE = ("DeadlineExceeded", "TransferFailed", "LeaseLost")
"""The errors of a read whose time may be over; the last where it was before the source heard."""
TRANSPORTS = {"default": {}, "tcp": {"TLS": "tcp"}}


@pytest.fixture(scope="module", params=list(TRANSPORTS))
def ucx(request: pytest.FixtureRequest) -> dict[str, str]:
    """The settings of UCX: what it chooses for one machine, and what it would for two."""
    return TRANSPORTS[request.param]


@pytest.fixture(scope="module")
def reader(nats_server: RunningServer, ucx: dict[str, str]) -> Iterator[Peer]:
    """Who reads, for all tests that leave it alive and well."""
    with peers(PeerOptions(nats_server.url, f"reader-{len(ucx)}", LAYOUT, ucx)) as (peer,):
        yield peer


@pytest.fixture
def source(nats_server: RunningServer, ucx: dict[str, str]) -> Iterator[Peer]:
    """Who is read, for one test."""
    with peers(source_options(nats_server, ucx)) as (peer,):
        yield peer


def source_options(server: RunningServer, ucx: dict[str, str]) -> PeerOptions:
    return PeerOptions(server.url, f"source-{len(ucx)}", LAYOUT, ucx, seed=7)


@pytest.fixture
def blank(reader: Peer) -> Peer:
    """The reader with nothing but zeros."""
    reader.ask("fill", 0)
    return reader


def begin(source: Peer, reader: Peer, phase: str, seconds: float = 30.0) -> tuple[bytes, int]:
    """Let a read of everything come to a phase; returns its ticket and its number, or 0."""
    if phase != "granted":
        # Before the grant: the first contact may take longer than that is for.
        transfer(source, reader, SOME)
    ticket = source.ask("grant", ALL, seconds)
    if phase != "in flight":
        return ticket, 0
    number = reader.ask("start", "read", ticket, ALL, ALL, seconds)
    reader.ask("on_its_way", number)
    return ticket, number


def transfer(source: Peer, reader: Peer, blocks: list[int], seconds: float = 30.0) -> None:
    """Read blocks to their end, settle, and compare."""
    ticket = source.ask("grant", blocks, 30.0)
    number = reader.ask("start", "read", ticket, blocks, blocks, seconds)
    reader.ask("result", number)
    assert source.ask("settle", ticket)
    assert reader.ask("checksums", blocks) == source.ask("checksums", blocks)


def end_of(peer: Peer, number: int) -> str:
    """How a transfer ends: "done", or by which of the errors that a deadline may bring."""
    try:
        peer.ask("result", number)
    except PeerError as error:
        if error.kind not in TOO_LATE:
            raise
        return error.kind
    return "done"


def until_noticed(ucx: dict[str, str]) -> tuple[float, tuple[str, ...]]:
    """The deadline of a read whose source dies, in seconds, and how it may end.

    A direct read ends at once. What a source pushes over TCP ends at its deadline: whoever waits
    for it hears of the death of its instance by the bus, and cancels.
    """
    return (2.0, TOO_LATE) if ucx else (30.0, ("TransferFailed",))


def ends_typed(peer: Peer, number: int, *kinds: str) -> None:
    """Wait for the end of a transfer, which is one of these errors, and for its quiet."""
    with pytest.raises(PeerError) as ended:
        peer.ask("result", number)
    assert ended.value.kind in kinds, str(ended.value)
    peer.ask("quiet", number)
    is_at_rest(peer)


def is_at_rest(peer: Peer) -> None:
    held: dict[str, int] = {}

    def rests() -> bool:
        held.update(peer.ask("statistics"))
        return held.items() >= AT_REST.items()

    wait_until(rests, what=lambda: f"{peer!r} holds {held}")


@pytest.mark.parametrize("operation", ["read", "write"])
def test_scattered_blocks_arrive_byte_for_byte(source: Peer, blank: Peer, operation: str) -> None:
    ours, theirs = [99, 3, 4, 5, 0], [7, 21, 22, 120, 2]
    owner, other = (source, blank) if operation == "read" else (blank, source)
    ticket = owner.ask("grant", theirs, 30.0, operation == "write")
    before = blank.ask("checksums", [1, 6, 98, 100])

    number = other.ask("start", operation, ticket, theirs, ours, 30.0)
    other.ask("result", number)

    assert owner.ask("settle", ticket)
    assert owner.ask("checksums", theirs) == other.ask("checksums", ours)
    assert blank.ask("checksums", [1, 6, 98, 100]) == before
    is_at_rest(other)


@pytest.mark.parametrize("phase", ["granted", "linked", "in flight"])
def test_a_source_that_is_killed_ends_the_read_typed(
    source: Peer, blank: Peer, ucx: dict[str, str], phase: str
) -> None:
    seconds, kinds = until_noticed(ucx)
    whole = source.ask("checksums", ALL)
    ticket, number = begin(source, blank, phase, seconds)

    source.kill()

    number = number or blank.ask("start", "read", ticket, ALL, ALL, seconds)
    end = end_of(blank, number)
    if end == "done":
        # The last byte came before the signal: so did all others.
        assert phase == "in flight"
        assert blank.ask("checksums", ALL) == whole
    else:
        assert end in kinds
    blank.ask("quiet", number)
    is_at_rest(blank)


@pytest.mark.parametrize("phase", ["granted", "linked", "in flight"])
def test_a_source_that_is_frozen_ends_the_read_at_its_deadline_and_nothing_arrives_later(
    source: Peer, blank: Peer, ucx: dict[str, str], phase: str
) -> None:
    ticket, number = begin(source, blank, phase, seconds=2.0)

    source.signal(signal.SIGSTOP)
    number = number or blank.ask("start", "read", ticket, ALL, ALL, 2.0)
    # One process can read the memory of another that is frozen.
    is_done = end_of(blank, number) == "done"
    blank.ask("quiet", number)
    is_at_rest(blank)

    # The blocks are somebody else's now.
    blank.ask("fill", 3)
    before = blank.ask("checksums", ALL[1:])
    source.signal(signal.SIGCONT)
    assert is_done or not source.ask("settle", ticket)
    transfer(source, blank, ALL[:1])
    assert blank.ask("checksums", ALL[1:]) == before


def test_a_reader_that_is_frozen_and_wakes_late_is_not_told_that_the_lease_held(
    source: Peer, blank: Peer
) -> None:
    ticket, number = begin(source, blank, "in flight", seconds=1.0)

    blank.signal(signal.SIGSTOP)
    wait_until(lambda: source.ask("blocks_held") == 0)
    source.ask("fill", 8)
    blank.signal(signal.SIGCONT)

    # It may have read all of it before it was frozen.
    end_of(blank, number)
    assert not source.ask("settle", ticket)
    blank.ask("quiet", number)
    is_at_rest(blank)
    transfer(source, blank, SOME)


def test_a_writer_that_is_frozen_and_wakes_late_writes_nothing_that_is_used(
    source: Peer, blank: Peer
) -> None:
    first = blank.ask("grant", SOME, 30.0, True)
    source.ask("result", source.ask("start", "write", first, SOME, SOME, 30.0))
    ticket = blank.ask("grant", ALL, 1.0, True)
    number = source.ask("start", "write", ticket, ALL, ALL, 1.0)
    source.ask("on_its_way", number)

    source.signal(signal.SIGSTOP)
    wait_until(lambda: not blank.ask("is_held", ticket))
    # Its time is over, and it may write still.
    assert blank.ask("blocks_held") == len(ALL)
    source.signal(signal.SIGCONT)
    source.ask("quiet", number)

    assert blank.ask("release", ticket)
    blank.ask("release", first)
    assert blank.ask("blocks_held") == 0


def test_a_reader_that_is_killed_leaves_the_source_its_blocks_and_able_to_serve(
    nats_server: RunningServer, source: Peer, blank: Peer, ucx: dict[str, str]
) -> None:
    with peers(PeerOptions(nats_server.url, f"killed-{len(ucx)}", LAYOUT, ucx)) as (killed,):
        begin(source, killed, "in flight", seconds=1.0)
        killed.kill()

    wait_until(lambda: source.ask("blocks_held") == 0)
    transfer(source, blank, SOME)


def test_a_name_that_is_used_again_is_another_agent(
    nats_server: RunningServer, source: Peer, blank: Peer, ucx: dict[str, str]
) -> None:
    transfer(source, blank, SOME)
    ticket = source.ask("grant", SOME, 30.0)
    source.kill()

    with peers(source_options(nats_server, ucx)) as (again,):
        again.ask("fill", 9)
        fresh = again.ask("grant", SOME, 30.0)
        seconds, kinds = until_noticed(ucx)
        number = blank.ask("start", "read", ticket, SOME, SOME, seconds)
        ends_typed(blank, number, "PeerRestarted", *kinds)
        assert not again.ask("settle", ticket)
        assert again.ask("settle", fresh)
        transfer(again, blank, SOME)

        number = blank.ask("start", "read", ticket, SOME, SOME, 30.0)
        ends_typed(blank, number, "PeerRestarted")


def cut_in_flight(source: Peer, reader: Peer, set_link: Callable[[str], None]) -> bytes:
    """Cut the link under a read, until its deadline ends one; returns the ticket of that."""
    tickets: list[bytes] = []

    def is_cut() -> bool:
        set_link("up")
        ticket, number = begin(source, reader, "in flight", seconds=2.0)
        # It sends no more than the systems have already, however long the cutting takes.
        source.signal(signal.SIGSTOP)
        set_link("down")
        source.signal(signal.SIGCONT)
        end = end_of(reader, number)
        reader.ask("quiet", number)
        is_at_rest(reader)
        tickets.append(ticket)
        # The last byte of some comes first.
        return end == "DeadlineExceeded"

    wait_until(is_cut)
    return tickets[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces")
@pytest.mark.skipif(shutil.which("ip") is None, reason="the program ip is not installed")
@pytest.mark.parametrize("first", ["source", "reader"])
def test_a_link_that_is_cut_ends_the_read_at_its_deadline_and_serves_again_when_it_is_back(
    nats_server: RunningServer, first: str
) -> None:
    """Whichever side breaks off first: what the systems have in their buffers then never lands."""
    with ExitStack() as stack:
        ours, theirs, set_link = stack.enter_context(joined_namespaces())
        both = [
            PeerOptions(
                stack.enter_context(forwarded(namespace, nats_server.port)),
                f"{side}-cut-off",
                LAYOUT,
                {"TLS": "tcp"},
                namespace,
                seed,
                quiet_seconds=QUIET_SECONDS if side == first else 10.0,
            )
            for side, namespace, seed in (("source", theirs, 5), ("reader", ours, 0))
        ]
        source, reader = stack.enter_context(peers(*both))
        ticket = cut_in_flight(source, reader, set_link)
        assert not source.ask("settle", ticket)

        reader.ask("fill", 3)
        before = reader.ask("checksums", ALL)
        set_link("up")
        transfer(source, reader, SOME)
        rest = [block for block in ALL if block not in SOME]
        assert reader.ask("checksums", rest) == [before[block] for block in rest]


def test_a_bus_that_is_away_while_blocks_are_read_costs_no_more_than_that_read(
    own_server: RunningServer, ucx: dict[str, str]
) -> None:
    sides = [
        PeerOptions(own_server.url, f"{side}-apart-{len(ucx)}", LAYOUT, ucx, seed=seed)
        for side, seed in (("source", 5), ("reader", 0))
    ]
    with peers(*sides) as (source, reader):
        _, number = begin(source, reader, "in flight", seconds=2.0)
        own_server.kill()

        # Its end, or the news of it, may be lost with the bus.
        end_of(reader, number)
        reader.ask("quiet", number)
        is_at_rest(reader)
        wait_until(lambda: source.ask("blocks_held") == 0)
        asyncio.run(own_server.restart())

        def reads_again() -> bool:
            try:
                transfer(source, reader, SOME, seconds=1.0)
            except PeerError as error:
                # What was asked of a source that is not back is lost, and ends with its time.
                if error.kind not in ("TransferFailed", "DeadlineExceeded", "Unavailable"):
                    raise
                return False
            return True

        wait_until(reads_again)


def test_transfers_cancelled_at_any_moment_leave_nothing(source: Peer, blank: Peer) -> None:
    cancel_many(source, blank, 150)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_10_000_transfers_cancelled_at_any_moment_leave_nothing(source: Peer, blank: Peer) -> None:
    for _ in range(20):
        cancel_many(source, blank, 500)


def cancel_many(source: Peer, reader: Peer, count: int) -> None:
    ticket = source.ask("grant", ALL, 3600.0)

    ends = reader.ask("cancel_many", "read", ticket, count, 1, 8)

    assert sum(ends.values()) == count
    assert ends["cancelled"] > count / 10
    is_at_rest(reader)
    assert source.ask("settle", ticket)
    transfer(source, reader, SOME)
