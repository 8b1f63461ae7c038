"""Routers take snapshots in turn, and a new one begins with the newest that can be used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from tests.kvrouter.event_bus import (
    STREAM,
    Engine,
    EventBus,
    event_subject,
    eventually,
    publish,
    stored,
)

from dynbus.bus.memory.bus import MemoryConnection
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.radix.snapshot import dump_index
from dynbus.kvrouter.stream.digest import index_digest
from dynbus.kvrouter.stream.follower import IndexFollower
from dynbus.kvrouter.stream.membership import UNKNOWN_GRACE
from dynbus.kvrouter.stream.snapshot_writer import SnapshotPlan, SnapshotWriter
from dynbus.kvrouter.stream.snapshots import (
    Coverage,
    SnapshotInfo,
    SnapshotStore,
    UnusableSnapshot,
    superseded,
)
from dynbus.kvrouter.stream.warm_start import WarmStart, forget_dead, warm_follower, warm_index
from dynbus.testing import TestKit, run

BUCKET = "OBJ_DYNBUS_SNAPSHOTS_demo"
PLAN = SnapshotPlan(messages=1)


class Router:
    """A follower that stands for taking snapshots."""

    def __init__(
        self,
        connection: MemoryConnection,
        follower: IndexFollower,
        writer: SnapshotWriter,
        store: SnapshotStore,
    ) -> None:
        self.connection = connection
        self.follower = follower
        self.writer = writer
        self.store = store

    async def has_written(self, count: int) -> None:
        await eventually(lambda: self.writer.status().written >= count, within=9.0)

    async def snapshots(self) -> list[int]:
        return [one.coverage.sequence for one in await self.store.snapshots("Engine")]


@asynccontextmanager
async def router(at: EventBus, *, plan: SnapshotPlan = PLAN) -> AsyncGenerator[Router]:
    connection = await at.bus.connect(name="router")
    store = SnapshotStore(connection.jetstream, "demo")
    async with (
        IndexFollower(connection, "demo", "Engine") as follower,
        SnapshotWriter(connection.jetstream, follower, store=store, plan=plan, ttl=3.0) as writer,
    ):
        yield Router(connection, follower, writer, store)


async def warm(at: EventBus) -> WarmStart:
    connection = await at.bus.connect()
    store = SnapshotStore(connection.jetstream, "demo")
    return await warm_index(connection.jetstream, "Engine", store, STREAM)


async def messages(at: EventBus, name: str) -> int:
    return (await (await at.bus.connect()).jetstream.stream_info(name)).messages


def test_a_snapshot_is_taken_and_a_new_router_begins_with_it() -> None:
    async def story() -> tuple[WarmStart, int]:
        at = EventBus()
        async with at.publisher() as publisher, router(at) as one:
            await publish(publisher, stored(1, 2))
            await eventually(lambda: one.writer.status().written, within=5.0)
            return await warm(at), await messages(at, STREAM)

    start, kept = run(story())

    assert start.index.lookup([1, 2]) == {"a": 2}
    assert start.position.sequence == kept


def test_who_died_before_a_router_came_is_not_brought_back_by_a_snapshot() -> None:
    async def story() -> tuple[list[str], list[str], list[str], set[str]]:
        at = EventBus()
        async with at.publisher("a") as one, at.publisher("dead") as other, router(at) as writing:
            one.publish([stored(1, 2)])
            other.publish([stored(1, 2)])
            await one.flush()
            await other.flush()
            await writing.has_written(1)
            start = await warm(at)
        assert start.snapshot is not None
        early = forget_dead(start, ["a"], start.snapshot.written + UNKNOWN_GRACE - 1.0)
        unknown = forget_dead(start, None, start.snapshot.written + 3600.0)
        late = forget_dead(start, ["a"], start.snapshot.written + UNKNOWN_GRACE + 1.0)
        return early, unknown, late, {rank.instance for rank in start.index.ranks}

    early, unknown, late, left = run(story())

    assert (early, unknown, late, left) == ([], [], ["dead"], {"a"})


def test_a_router_that_starts_from_a_snapshot_shows_no_dead_instance_from_the_first_moment() -> (
    None
):
    async def story() -> tuple[set[str], dict[str, int]]:
        async with TestKit() as kit:
            engine = await kit.start(Engine, instance_id="alive")
            dead = await kit.start(Engine, instance_id="dead")
            writing = await kit.runtime()
            async with warm_follower(writing, "demo", "Engine", plan=PLAN) as first:
                await eventually(lambda: first.lookup([1, 2]) == {"alive": 2, "dead": 2}, 9.0)
                store = SnapshotStore(writing.bus.data.jetstream, "demo")
                await asyncio.sleep(9.0)
                assert [one.instances for one in await store.snapshots("Engine")][-1] == 2
            await dead.stop()
            await asyncio.sleep(UNKNOWN_GRACE + 1.0)
            late = await kit.runtime()
            async with warm_follower(late, "demo", "Engine", plan=PLAN) as second:
                seen = {rank.instance for rank in second.index.ranks}
                await eventually(lambda: second.lookup([1, 2]) == {"alive": 2})
                assert engine.actor.instance_id == "alive"
                return seen, second.lookup([1, 2])

    seen, found = run(story())

    assert "dead" not in seen
    assert found == {"alive": 2}


def test_without_a_snapshot_a_new_router_begins_with_the_stream() -> None:
    async def story() -> WarmStart:
        at = EventBus()
        async with at.publisher() as publisher:
            await publish(publisher, stored(1))
            return await warm(at)

    start = run(story())

    assert start.snapshot is None
    assert start.position.sequence == 0


def test_only_the_latest_snapshots_are_kept_and_nothing_of_the_stream_goes() -> None:
    async def story() -> tuple[list[int], int, int]:
        at = EventBus()
        async with at.publisher() as publisher, router(at) as one:
            for number in range(1, 7):
                await publish(publisher, stored(number))
                await one.has_written(number)
            return (
                await one.snapshots(),
                await messages(at, STREAM),
                one.follower.position.sequence,
            )

    sequences, kept, last = run(story())

    assert len(sequences) == 3
    assert sequences[-1] == kept == last


def test_one_of_two_routers_takes_the_snapshots() -> None:
    async def story() -> list[int]:
        at = EventBus()
        async with at.publisher() as publisher, router(at) as one, router(at) as other:
            for number in range(1, 5):
                await publish(publisher, stored(number))
                await asyncio.sleep(3.0)
            return sorted(each.writer.status().written for each in (one, other))

    fewer, more = run(story())

    assert fewer == 0
    assert more >= 4


def test_another_router_takes_over_when_the_elected_one_is_cut_off() -> None:
    async def story() -> int:
        at = EventBus()
        async with at.publisher() as publisher, router(at) as one, router(at) as other:
            publisher.publish([stored(1)])
            await eventually(lambda: one.writer.status().written, within=5.0)
            one.connection.disconnect()
            publisher.publish([stored(2)])
            await eventually(lambda: other.writer.status().written, within=12.0)
            return other.writer.status().written

    assert run(story()) == 1


def test_the_index_can_be_asked_while_it_is_frozen_and_follows_afterwards() -> None:
    async def story() -> tuple[dict[str, int], int, dict[str, int], int]:
        at = EventBus()
        async with at.publisher() as publisher, at.follower() as follower:
            publisher.publish([stored(1)])
            await at.settled(follower)
            async with follower.frozen() as index:
                await publish(publisher, stored(2, parent=1))
                await eventually(lambda: follower.status().behind)
                frozen = index.lookup([1, 2])
                behind = follower.status().behind
            return frozen, behind, follower.lookup([1, 2]), follower.status().behind

    assert run(story()) == ({"a": 1}, 1, {"a": 2}, 0)


def test_a_stream_that_is_made_again_while_the_index_is_frozen_leaves_nothing_of_it() -> None:
    async def story() -> tuple[dict[str, int], dict[str, int]]:
        at = EventBus()
        async with at.publisher() as publisher, at.follower() as follower:
            publisher.publish([stored(1)])
            await at.settled(follower)
            async with follower.frozen() as index:
                await publish(publisher, stored(2, parent=1))
                at.bus.jetstream.delete(STREAM)
                await eventually(lambda: follower.status().recreations == 1, within=5.0)
                old = index.lookup([1, 2])
            await at.settled(follower, within=5.0)
            return old, follower.lookup([1, 2])

    assert run(story()) == ({"a": 1}, {"a": 2})


def test_a_snapshot_whose_chunks_are_gone_is_skipped_for_the_one_before() -> None:
    async def story() -> tuple[WarmStart, list[int]]:
        at = EventBus()
        async with at.publisher() as publisher, router(at) as one:
            for number in (1, 2):
                await publish(publisher, stored(number))
                await one.has_written(number)
            sequences = await one.snapshots()
            chunk = await one.connection.jetstream.last(BUCKET, "$O.*.C.>")
            assert chunk is not None
            await one.connection.jetstream.purge(BUCKET, chunk.subject)
            return await warm(at), sequences

    start, sequences = run(story())

    assert start.position.sequence == sequences[-2]
    assert start.index.lookup([1]) == {"a": 1}


@pytest.mark.parametrize(
    "data", [b"", b"no snapshot at all", bytes(dump_index(RadixIndex(), 3))], ids=len
)
def test_a_snapshot_that_is_not_what_its_name_says_is_not_used(data: bytes) -> None:
    async def story() -> WarmStart:
        at = EventBus()
        async with at.publisher() as publisher:
            await publish(publisher, stored(1))
            connection = await at.bus.connect()
            store = SnapshotStore(connection.jetstream, "demo")
            created = (await connection.jetstream.stream_info(STREAM)).created
            info = await store.write("Engine", Coverage(created, 1), data, blocks=1, instances=1)
            with pytest.raises(UnusableSnapshot, match="Engine/1"):
                await store.read(info, max_blocks=10)
            return await warm(at)

    start = run(story())

    assert start.snapshot is None


def test_a_snapshot_of_a_stream_that_was_deleted_is_not_used_and_goes_with_the_next() -> None:
    async def story() -> tuple[WarmStart, float]:
        at = EventBus()
        async with at.publisher() as publisher, router(at) as one:
            publisher.publish([stored(1, 2)])
            await eventually(lambda: one.writer.status().written, within=5.0)
            before = one.writer.status().latest
            at.bus.jetstream.delete(STREAM)
            await eventually(lambda: one.follower.status().recreations == 1, within=5.0)
            start = await warm(at)
            await eventually(lambda: one.writer.status().latest != before, within=12.0)
            [kept] = await one.store.snapshots("Engine")
            return start, kept.coverage.created

    start, created = run(story())

    assert start.snapshot is None
    assert created == start.position.created


def test_what_other_components_say_is_covered_too() -> None:
    async def story() -> tuple[WarmStart, int]:
        at = EventBus()
        async with at.publisher() as publisher:
            await publish(publisher, stored(1))
            other = await at.bus.connect()
            for _ in range(50):
                await other.jetstream.publish("demo.Other._kv.x.0", b"x")
            async with router(at) as one:
                await eventually(lambda: one.writer.status().written, within=5.0)
            return await warm(at), await messages(at, STREAM)

    start, kept = run(story())

    assert start.position.sequence == kept
    assert start.index.lookup([1]) == {"a": 1}


def test_a_warm_router_and_one_that_saw_everything_hold_the_same() -> None:
    async def story() -> tuple[bool, int]:
        at = EventBus()
        async with at.publisher() as publisher, router(at) as one:
            for number in range(1, 30):
                publisher.publish([stored(number)])
                await asyncio.sleep(0.2)
            await publisher.flush()
            start = await warm(at)
            await publish(publisher, stored(99, parent=1))
            connection = await at.bus.connect()
            async with IndexFollower(
                connection, "demo", "Engine", index=start.index, position=start.position
            ) as late:
                await at.settled(one.follower, late)
                rank = Rank("a", 0)
                equal = index_digest(late.index, rank) == index_digest(one.follower.index, rank)
                return equal, late.status().requests

    assert run(story()) == (True, 0)


def test_the_latest_of_the_current_stream_are_kept_and_none_of_another() -> None:
    def info(created: float, sequence: int) -> SnapshotInfo:
        return SnapshotInfo("Engine", Coverage(created, sequence), 1, 0.0, 0, 0)

    found = [info(1.0, 900), info(2.0, 5), info(2.0, 11), info(2.0, 7), info(2.0, 3)]

    gone = superseded(found, 2.0, keep=2)

    assert sorted(one.coverage for one in gone) == [(1.0, 900), (2.0, 3), (2.0, 5)]


def test_what_a_dead_writer_left_is_dropped_in_time_and_not_before() -> None:
    async def story() -> list[int]:
        at = EventBus()
        connection = await at.bus.connect()
        store = SnapshotStore(connection.jetstream, "demo", chunk_size=8)
        await store.write("Engine", Coverage(1.0, 1), b"x" * 20, blocks=0, instances=0)
        await connection.jetstream.publish("$O.DYNBUS_SNAPSHOTS_demo.C.dead", b"half")
        dropped = [await store.drop_abandoned()]
        await asyncio.sleep(700.0)
        dropped.append(await store.drop_abandoned())
        return [*dropped, await messages(at, BUCKET)]

    assert run(story()) == [0, 1, 4]


def test_events_that_are_no_ones_are_no_reason_to_fail() -> None:
    async def story() -> int:
        at = EventBus()
        connection = await at.bus.connect()
        async with at.publisher() as publisher, router(at) as one:
            await publish(publisher, stored(1))
            await connection.jetstream.publish(event_subject("x"), b"junk")
            await eventually(lambda: one.writer.status().written, within=6.0)
            return one.writer.status().failures

    assert run(story()) == 0
