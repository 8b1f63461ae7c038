"""The index as it was at a point of the stream, and what changed between two points."""

from __future__ import annotations

import asyncio

import pytest
from tests.kvrouter.event_bus import STREAM, EventBus, event_subject, stored

from dynbus.bus.clock import unix_time
from dynbus.bus.memory.bus import MemoryConnection
from dynbus.bus.transport import NoStream
from dynbus.kvrouter.events import BlockRemoved, KvEvent, encode_events
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.radix.snapshot import dump_index
from dynbus.kvrouter.stream.event_stream import CLOCK_ALLOWANCE
from dynbus.kvrouter.stream.history import (
    NOW,
    NoHistory,
    PastIndex,
    Point,
    changes,
    components_of,
    index_at,
)
from dynbus.kvrouter.stream.snapshots import Coverage, SnapshotStore
from dynbus.testing import run

MESSAGES: list[list[KvEvent]] = [
    [stored(1, 2)],
    [stored(3, parent=2)],
    [BlockRemoved([3])],
    [stored(4, parent=2)],
]


async def told(at: EventBus, messages: list[list[KvEvent]] | None = None) -> MemoryConnection:
    """A stream with these messages of instance `a`, a second between two of them."""
    connection = await at.bus.connect()
    async with at.follower():
        first_id = 0
        for events in MESSAGES if messages is None else messages:
            data = encode_events(events, event_epoch=1, first_id=first_id)
            await connection.jetstream.publish(event_subject("a"), data)
            first_id += len(events)
            await asyncio.sleep(1.0)
    return connection


async def take_snapshot(connection: MemoryConnection, sequence: int) -> None:
    """What a router that has read up to `sequence` would store."""
    past = await index_at(connection.jetstream, "demo", "Engine", Point(sequence))
    created = (await connection.jetstream.stream_info(STREAM)).created
    await SnapshotStore(connection.jetstream, "demo").write(
        "Engine",
        Coverage(created, sequence),
        dump_index(past.index, sequence),
        blocks=past.index.statistics().blocks,
        instances=1,
    )


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [(1, {"a": 2}), (2, {"a": 3}), (3, {"a": 2}), (4, {"a": 2})],
)
def test_the_index_at_a_sequence_is_what_the_stream_said_up_to_there(
    sequence: int, expected: dict[str, int]
) -> None:
    async def story() -> PastIndex:
        connection = await told(EventBus())
        return await index_at(connection.jetstream, "demo", "Engine", Point(sequence))

    past = run(story())

    assert past.index.lookup([1, 2, 3]) == expected
    assert (past.sequence, past.messages, past.is_whole) == (sequence, sequence, True)


def test_the_index_at_a_time_is_what_was_stored_until_then() -> None:
    async def story() -> tuple[PastIndex, PastIndex]:
        at = EventBus()
        async with at.follower():
            await asyncio.sleep(2.0)
        begun = unix_time()
        connection = await told(at)
        js = connection.jetstream
        return (
            await index_at(js, "demo", "Engine", Point(time=begun + 1.5)),
            await index_at(js, "demo", "Engine", Point(time=begun - 1.0)),
        )

    later, earlier = run(story())

    assert (later.sequence, later.index.lookup([1, 2, 3])) == (2, {"a": 3})
    assert (earlier.sequence, earlier.index.lookup([1])) == (0, {})


def test_nothing_is_known_of_a_time_before_the_stream() -> None:
    async def story() -> None:
        at = EventBus()
        begun = unix_time()
        connection = await told(at)
        await index_at(connection.jetstream, "demo", "Engine", Point(time=begun - 1.0))

    with pytest.raises(
        NoHistory, match=rf"nothing is known of .*Z: the stream {STREAM} was made at"
    ):
        run(story())


def test_before_the_first_message_nothing_was_held() -> None:
    async def story() -> PastIndex:
        connection = await told(EventBus())
        return await index_at(connection.jetstream, "demo", "Engine", Point(0))

    past = run(story())

    assert (past.sequence, past.is_whole, past.index.lookup([1])) == (0, True, {})


def test_reading_begins_with_the_newest_snapshot_before_the_point() -> None:
    async def story() -> list[PastIndex]:
        connection = await told(EventBus())
        await take_snapshot(connection, 1)
        await take_snapshot(connection, 3)
        js = connection.jetstream
        return [
            await index_at(js, "demo", "Engine", point)
            for point in (Point(2), Point(3), Point(4), NOW, Point(time=unix_time()))
        ]

    found = run(story())

    assert [one.snapshot and one.snapshot.coverage.sequence for one in found] == [1, 3, 3, 3, 3]
    assert [one.messages for one in found] == [1, 0, 1, 1, 1]
    assert [one.sequence for one in found] == [2, 3, 4, 4, 4]
    assert all(one.is_whole for one in found)


def test_a_point_that_only_a_snapshot_remembers_is_told_from_it() -> None:
    async def story() -> PastIndex:
        at = EventBus()
        connection = await told(at)
        await take_snapshot(connection, 2)
        at.bus.jetstream.streams[STREAM].purge(">")
        return await index_at(connection.jetstream, "demo", "Engine", Point(2))

    past = run(story())

    assert past.index.lookup([1, 2, 3]) == {"a": 3}


def test_what_is_missing_between_snapshot_and_stream_is_said() -> None:
    async def story() -> PastIndex:
        at = EventBus()
        connection = await told(at)
        await take_snapshot(connection, 1)
        await connection.jetstream.purge(STREAM)
        late = encode_events([stored(9)], event_epoch=1, first_id=9)
        await connection.jetstream.publish(event_subject("a"), late)
        return await index_at(connection.jetstream, "demo", "Engine")

    past = run(story())

    assert not past.is_whole
    assert past.partial == [Rank("a", 0)]


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (Point(1), "begins at 5"),
        (Point(time=1.0), "nothing is known of 1970-01-01 00:00:01Z"),
        (Point(0), "sequence 0 is gone"),
        (Point(99), "is not there yet"),
    ],
)
def test_a_point_that_is_not_known_is_refused_with_what_is(point: Point, message: str) -> None:
    async def story() -> None:
        connection = await told(EventBus())
        await connection.jetstream.purge(STREAM)
        late = encode_events([stored(9)], event_epoch=2, first_id=0)
        await connection.jetstream.publish(event_subject("a"), late)
        await index_at(connection.jetstream, "demo", "Engine", point)

    with pytest.raises(NoHistory, match=message):
        run(story())


def test_without_a_stream_it_is_asked_whether_anybody_publishes() -> None:
    async def story() -> None:
        connection = await EventBus().bus.connect()
        await index_at(connection.jetstream, "demo", "Engine")

    with pytest.raises(NoStream, match="no KV events in namespace demo: is a publisher running?"):
        run(story())


def test_the_components_of_a_namespace_are_those_with_events() -> None:
    async def story() -> list[str]:
        connection = await told(EventBus())
        await connection.jetstream.publish("demo.Other._kv.x.0", b"x")
        return await components_of(connection.jetstream, "demo")

    assert run(story()) == ["Engine", "Other"]


def test_what_a_snapshot_says_of_a_time_to_come_gives_way_to_what_follows() -> None:
    async def story() -> PastIndex:
        connection = await told(EventBus())
        future = RadixIndex()
        epoch = int(unix_time() * 1e9) + 2 * CLOCK_ALLOWANCE
        future.apply("a", encode_events([stored(9)], event_epoch=epoch, first_id=0))
        store = SnapshotStore(connection.jetstream, "demo")
        created = (await connection.jetstream.stream_info(STREAM)).created
        await store.write(
            "Engine", Coverage(created, 4), dump_index(future, 4), blocks=1, instances=1
        )
        later = encode_events([stored(7)], event_epoch=2, first_id=0)
        await connection.jetstream.publish(event_subject("a"), later)
        return await index_at(connection.jetstream, "demo", "Engine")

    past = run(story())

    assert past.snapshot is not None
    assert [past.index.lookup([one]) for one in (9, 7)] == [{}, {"a": 1}]


def test_changes_are_counted_for_each_rank_that_has_some() -> None:
    def index(*messages: tuple[str, list[KvEvent]]) -> RadixIndex:
        made = RadixIndex()
        for instance, events in messages:
            made.apply(instance, encode_events(events, event_epoch=1, first_id=0))
        return made

    before = index(("a", [stored(1, 2)]), ("b", [stored(1)]), ("same", [stored(7)]))
    after = index(("a", [stored(2, 3, 4)]), ("c", [stored(1)]), ("same", [stored(7)]))

    found = {(one.rank.instance, one.gained, one.lost) for one in changes(before, after)}

    assert found == {("a", 2, 1), ("b", 0, 1), ("c", 1, 0)}
