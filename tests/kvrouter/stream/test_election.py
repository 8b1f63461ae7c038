"""Of several candidates one is elected, and another one soon after it is gone."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import anyio
from tests.kvrouter.event_bus import eventually

from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.bus.memory.bus import MemoryBus
from dynbus.kvrouter.names import kv_election_subject
from dynbus.kvrouter.stream.election import ELECTION_STREAM, Election
from dynbus.testing import run

TTL = 3.0


async def candidate(bus: MemoryBus, name: str, exits: AsyncExitStack) -> Election:
    connection = await bus.connect(name=name)
    election = Election(connection.jetstream, "demo", "Engine", name, ttl=TTL)
    return await exits.enter_async_context(election)


async def elected(bus: MemoryBus, exits: AsyncExitStack) -> Election:
    election = await candidate(bus, "a", exits)
    await eventually(lambda: election.is_elected)
    return election


async def lost(election: Election, within: float) -> None:
    """Be cancelled because another one may be elected."""
    with anyio.fail_after(within), election.while_elected():
        await anyio.sleep_forever()


def test_a_candidate_does_not_write_over_another_one_nor_over_what_it_cannot_read() -> None:
    async def story(data: bytes) -> tuple[bytes, bool]:
        bus = MemoryBus()
        async with AsyncExitStack() as exits:
            jetstream = (await bus.connect()).jetstream
            await jetstream.ensure_stream(ELECTION_STREAM)
            await jetstream.publish(kv_election_subject("demo", "Engine"), data)
            election = await candidate(bus, "a", exits)
            await asyncio.sleep(3 * TTL)
            stored = await jetstream.last(ELECTION_STREAM.name, "$KV.>")
            assert stored is not None
            return stored.data, election.is_elected

    for other in (b'{"holder":"b"}', b"\xff"):
        assert run(story(other)) == (other, False)


def test_of_three_candidates_one_is_elected_and_stays_so() -> None:
    async def story() -> list[int]:
        bus = MemoryBus()
        async with AsyncExitStack() as exits:
            elections = [await candidate(bus, name, exits) for name in "abc"]
            counts: list[int] = []
            await eventually(lambda: any(one.is_elected for one in elections))
            for _ in range(200):
                counts.append(sum(one.is_elected for one in elections))
                await asyncio.sleep(0.1)
            return counts

    assert set(run(story())) == {1}


def test_another_one_is_elected_soon_after_the_elected_one_dies() -> None:
    async def story() -> float:
        bus = MemoryBus()
        async with AsyncExitStack() as exits:
            first = await elected(bus, exits)
            second = await candidate(bus, "b", exits)
            bus.connections[0].disconnect()
            took = await eventually(lambda: second.is_elected, within=2 * TTL)
            assert not first.is_elected
            return took

    assert TTL / 2 < run(story()) <= TTL + TTL / 3 + 0.1


def test_one_that_steps_back_makes_room_at_once() -> None:
    async def story() -> float:
        bus = MemoryBus()
        async with AsyncExitStack() as exits:
            first = await elected(bus, exits)
            second = await candidate(bus, "b", exits)
            await first.close()
            return await eventually(lambda: second.is_elected, within=2 * TTL)

    assert run(story()) <= TTL / 3 + 0.1


def test_one_that_is_not_fit_any_longer_steps_back() -> None:
    async def story() -> None:
        bus = MemoryBus()
        fit = True
        connection = await bus.connect()
        async with Election(
            connection.jetstream, "demo", "Engine", "a", ttl=TTL, is_fit=lambda: fit
        ) as election:
            await eventually(lambda: election.is_elected)
            fit = False
            await lost(election, within=TTL)
            assert not election.is_elected
            assert await connection.jetstream.last(ELECTION_STREAM.name, "$KV.>") is not None

    run(story())


def test_the_elected_one_writes_its_record_again_when_everything_stored_is_gone() -> None:
    async def story() -> bytes:
        bus = MemoryBus()
        async with AsyncExitStack() as exits:
            election = await elected(bus, exits)
            bus.jetstream.delete(ELECTION_STREAM.name)
            await asyncio.sleep(TTL)
            assert election.is_elected
            stored = await bus.connections[0].jetstream.last(ELECTION_STREAM.name, "$KV.>")
            assert stored is not None
            return stored.data

    assert run(story()) == b'{"holder":"a"}'


def test_nobody_is_elected_while_its_record_is_being_withdrawn() -> None:
    async def story() -> tuple[bool, bool]:
        bus = MemoryBus()
        connection = await bus.connect()
        election = Election(connection.jetstream, "demo", "Engine", "a", ttl=TTL)
        await election.__aenter__()
        await eventually(lambda: election.is_elected)
        with bus.delay(">", 0.2):
            closing = asyncio.create_task(election.close())
            await asyncio.sleep(0.1)
            during, is_done = election.is_elected, closing.done()
            await closing
        return during, is_done

    assert run(story()) == (False, False)


def test_a_record_that_the_control_lane_renews_needs_nothing_of_the_main_connection() -> None:
    async def story() -> bool:
        memory = MemoryBus()
        connection = await memory.connect()
        bus = await Bus.over(BusConfig(), connection, await memory.connect())
        async with Election(
            connection.jetstream, "demo", "Engine", "a", ttl=TTL, bus=bus
        ) as election:
            await eventually(lambda: election.is_elected)
            connection.disconnect()
            await asyncio.sleep(3 * TTL)
            is_elected = election.is_elected
        await bus.close()
        return is_elected

    assert run(story())


def test_the_bucket_is_made_again_in_memory_after_it_met_a_full_disk() -> None:
    async def story() -> None:
        bus = MemoryBus()
        async with AsyncExitStack() as exits:
            election = await elected(bus, exits)
            jetstream = bus.connections[0].jetstream

            bus.jetstream.break_store(ELECTION_STREAM.name, "no space left on device")
            await asyncio.sleep(3 * TTL)

            config = await jetstream.stream_config(ELECTION_STREAM.name)
            assert config.in_memory
            assert await jetstream.last(ELECTION_STREAM.name, "$KV.>") is not None
            assert election.is_elected

    run(story())
