"""Of several candidates one is elected, and another one soon after it is gone."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import anyio
from tests.kvrouter.event_bus import eventually

from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.transport import StoredMessage
from dynbus.kvrouter.stream.election import ELECTION_STREAM, Candidacy, Election
from dynbus.testing import run

TTL = 3.0


def record(holder: str, sequence: int) -> StoredMessage:
    return StoredMessage("s", sequence, 0.0, {}, b'{"holder":"%s"}' % holder.encode())


async def candidate(bus: MemoryBus, name: str, exits: AsyncExitStack) -> Election:
    connection = await bus.connect(name=name)
    election = Election(connection.jetstream, "demo", "Engine", name, ttl=TTL)
    return await exits.enter_async_context(election)


async def lost(election: Election, within: float) -> None:
    """Be cancelled because another one may be elected."""
    with anyio.fail_after(within), election.while_elected():
        await anyio.sleep_forever()


def test_a_candidate_is_elected_from_the_beginning_of_its_write_for_the_ttl() -> None:
    candidacy = Candidacy("a", TTL)

    assert candidacy.found(None)
    candidacy.stored(7, begun=10.0)

    assert candidacy.is_elected(12.9)
    assert not candidacy.is_elected(13.0)
    assert candidacy.revision == 7


def test_a_candidate_does_not_write_over_another_one_but_over_itself_and_markers() -> None:
    candidacy = Candidacy("a", TTL)

    assert not candidacy.found(record("b", 4))
    assert candidacy.found(record("a", 5))
    assert candidacy.found(StoredMessage("s", 6, 0.0, {"KV-Operation": "DEL"}, b""))
    assert candidacy.revision == 6
    assert not candidacy.found(StoredMessage("s", 8, 0.0, {}, b"\xff"))


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
            first = await candidate(bus, "a", exits)
            await eventually(lambda: first.is_elected)
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
            first = await candidate(bus, "a", exits)
            await eventually(lambda: first.is_elected)
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


def test_the_elected_one_survives_that_everything_stored_is_gone() -> None:
    async def story() -> float:
        bus = MemoryBus()
        async with AsyncExitStack() as exits:
            election = await candidate(bus, "a", exits)
            await eventually(lambda: election.is_elected)
            bus.jetstream.delete(ELECTION_STREAM.name)
            await lost(election, within=TTL)
            return await eventually(lambda: election.is_elected)

    assert run(story()) <= TTL / 3 + 0.1


def test_one_is_elected_again_after_the_bucket_met_a_full_disk() -> None:
    async def story() -> bool:
        bus = MemoryBus()
        async with AsyncExitStack() as exits:
            election = await candidate(bus, "a", exits)
            await eventually(lambda: election.is_elected)

            bus.jetstream.break_store(ELECTION_STREAM.name, "no space left on device")
            await lost(election, within=2 * TTL)
            await eventually(lambda: election.is_elected, within=2 * TTL)

            config = await bus.connections[0].jetstream.stream_config(ELECTION_STREAM.name)
            return config.in_memory

    assert run(story())
