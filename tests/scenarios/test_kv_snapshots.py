"""Snapshots outlive the router that takes them, and make a new one warm, on a real server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tests.conditions import eventually

from dynbus.bus.nats.connection import NatsConnection, connect
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.records.objects import ObjectBucket
from dynbus.bus.transport import NoStream
from dynbus.kvrouter.events import BlockRemoved, BlockStored, KvEvent
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.stream.awareness import AwarenessLevel
from dynbus.kvrouter.stream.digest import index_digest
from dynbus.kvrouter.stream.event_stream import EventStream
from dynbus.kvrouter.stream.follower import IndexFollower
from dynbus.kvrouter.stream.publisher import KvEventPublisher
from dynbus.kvrouter.stream.snapshot_writer import SnapshotPlan, SnapshotWriter
from dynbus.kvrouter.stream.snapshots import SnapshotStore
from dynbus.kvrouter.stream.warm_start import WarmStart, warm_index

from .processes import Process

pytestmark = pytest.mark.anyio

BUCKET = ObjectBucket("DYNBUS_SNAPSHOTS_demo").stream.name
PROMPT = 64
RANK = Rank("engine", 0)


class Engine:
    """A cache that stores prompts and removes the oldest when it is full."""

    def __init__(self, seed: int, capacity: int) -> None:
        self._chance = random.Random(seed)
        self._capacity = capacity
        self.prompts: list[list[int]] = []

    def step(self) -> list[KvEvent]:
        prompt = [self._chance.randrange(1, 1 << 63) for _ in range(PROMPT)]
        self.prompts.append(prompt)
        events: list[KvEvent] = [BlockStored(None, prompt, prompt)]
        if len(self.prompts) > self._capacity:
            events.append(BlockRemoved(self.prompts.pop(0)[::-1]))
        return events


@pytest.fixture
async def connection(own_server: RunningServer) -> AsyncIterator[NatsConnection]:
    opened = await connect([own_server.url], name="test")
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def engine_publisher(
    connection: NatsConnection, stream: EventStream | None = None
) -> AsyncGenerator[KvEventPublisher]:
    async with KvEventPublisher(
        connection, "demo", "Engine", RANK.instance, stream=stream
    ) as publisher:
        yield publisher


async def begin_warm(
    connection: NatsConnection, exits: AsyncExitStack, stream: EventStream | None = None
) -> tuple[WarmStart, IndexFollower]:
    """A router that has just started."""
    jetstream = connection.jetstream
    start = await warm_index(
        jetstream, "Engine", SnapshotStore(jetstream, "demo"), "DYNBUS_EVENTS_demo"
    )
    follower = IndexFollower(
        connection, "demo", "Engine", stream=stream, index=start.index, position=start.position
    )
    return start, await exits.enter_async_context(follower)


async def settled(
    connection: NatsConnection, *followers: IndexFollower, within: float = 10.0
) -> None:
    """Wait until the followers have applied what the stream has by now.

    That a message is stored tells its publisher only: it may reach the followers later.
    """
    last = (await connection.jetstream.stream_info("DYNBUS_EVENTS_demo")).last_sequence
    await eventually(
        lambda: all(
            one.awareness().level is AwarenessLevel.EXACT and one.position.sequence >= last
            for one in followers
        ),
        within,
    )


def assert_equal(one: IndexFollower, other: IndexFollower, engine: Engine) -> None:
    """Both answer alike for every prompt, and hold the same."""
    assert index_digest(one.index, RANK) == index_digest(other.index, RANK)
    whole = {RANK.instance: PROMPT}
    for number, prompt in enumerate(engine.prompts):
        found = one.lookup(prompt), other.lookup(prompt)
        assert found == (whole, whole), (
            f"prompt {number} of {len(engine.prompts)}, asked of {one!r} and {other!r}"
        )
        assert one.overlaps(prompt) == other.overlaps(prompt)
    ours, theirs = one.index.statistics(), other.index.statistics()
    assert (ours.instances, ours.blocks, ours.detached, ours.runs) == (
        theirs.instances,
        theirs.blocks,
        theirs.detached,
        theirs.runs,
    )


async def has_written(writer: SnapshotWriter, count: int) -> None:
    await eventually(lambda: writer.status().written >= count)


async def chunks(connection: NatsConnection) -> int:
    try:
        return (await connection.jetstream.stream_info(BUCKET)).messages
    except NoStream:
        return 0


async def test_another_router_finishes_what_one_that_was_killed_in_a_snapshot_did_not(
    own_server: RunningServer, connection: NatsConnection, tmp_path: Path
) -> None:
    engine = Engine(1, capacity=400)
    store = SnapshotStore(connection.jetstream, "demo")
    async with AsyncExitStack() as exits:
        publisher = await exits.enter_async_context(engine_publisher(connection))
        for _ in range(300):
            publisher.publish(engine.step())
        await publisher.flush()
        first = Process(
            tmp_path / "router.log",
            "tests.scenarios.snapshot_process",
            *(own_server.url, "demo", "Engine", "64"),
        )
        exits.callback(first.kill)

        async def is_writing() -> bool:
            return await chunks(connection) >= 20

        await eventually(is_writing)
        # To enter the other one takes a second, in which this one could end its snapshot.
        first.kill()
        follower = await exits.enter_async_context(IndexFollower(connection, "demo", "Engine"))
        second = await exits.enter_async_context(
            SnapshotWriter(connection.jetstream, follower, store=store, ttl=2.0)
        )
        assert await store.snapshots() == []
        left_over = await chunks(connection)

        took = await eventually(lambda: second.status().written)

        assert took < 8.0
        start, late = await begin_warm(connection, exits)
        await settled(connection, follower, late)
        latest = second.status().latest
        assert start.snapshot is not None
        assert latest is not None
        assert start.snapshot.coverage == latest.coverage
        assert_equal(follower, late, engine)
        assert late.status().requests == 0
        assert await store.drop_abandoned(older_than=0.0) == 1
        assert await chunks(connection) < left_over


@pytest.mark.nightly(
    "tests/kvrouter/stream/test_warm_start.py::test_a_snapshot_whose_chunks_are_gone_is_skipped_for_the_one_before",
    "tests/contracts/test_object_contract.py::test_an_object_whose_chunks_are_gone_is_said_to_be_damaged",
)
async def test_a_snapshot_of_which_a_chunk_is_gone_is_skipped(connection: NatsConnection) -> None:
    engine = Engine(2, capacity=100)
    store = SnapshotStore(connection.jetstream, "demo", chunk_size=4096)
    async with AsyncExitStack() as exits:
        publisher = await exits.enter_async_context(engine_publisher(connection))
        follower = await exits.enter_async_context(IndexFollower(connection, "demo", "Engine"))
        writer = await exits.enter_async_context(
            SnapshotWriter(
                connection.jetstream,
                follower,
                store=store,
                plan=SnapshotPlan(messages=1),
                ttl=2.0,
            )
        )
        for number in (1, 2):
            for _ in range(50):
                publisher.publish(engine.step())
            await publisher.flush()
            await has_written(writer, number)
        await writer.close()
        older, newest = (await store.snapshots("Engine"))[-2:]
        stored = await connection.jetstream.last(BUCKET, "$O.*.C.>")
        assert stored is not None
        all_but_one = {"filter": stored.subject, "keep": 1}
        await connection.jetstream.api(f"STREAM.PURGE.{BUCKET}", all_but_one, timeout=5.0)

        start, late = await begin_warm(connection, exits)

        assert start.snapshot == older
        assert newest.coverage.sequence > older.coverage.sequence
        await settled(connection, follower, late)
        assert_equal(follower, late, engine)


async def test_after_the_limits_cut_the_stream_a_new_router_is_warm_and_asks_nobody(
    connection: NatsConnection,
) -> None:
    engine = Engine(3, capacity=200)
    limited = EventStream("demo", max_bytes=1024 * 1024)
    async with AsyncExitStack() as exits:
        publisher = await exits.enter_async_context(engine_publisher(connection, limited))
        witness = await exits.enter_async_context(
            IndexFollower(connection, "demo", "Engine", stream=limited)
        )
        writer = await exits.enter_async_context(
            SnapshotWriter(connection.jetstream, witness, ttl=2.0)
        )

        async def is_cut() -> bool:
            for _ in range(10):
                publisher.publish(engine.step())
            await publisher.flush()
            await asyncio.sleep(0.05)
            info = await connection.jetstream.stream_info("DYNBUS_EVENTS_demo")
            return info.first_sequence > 60 and writer.status().written >= 2

        await eventually(is_cut)
        start, late = await begin_warm(connection, exits, limited)
        for _ in range(5):
            publisher.publish(engine.step())
        await publisher.flush()
        await settled(connection, witness, late)

        assert start.snapshot is not None
        assert_equal(witness, late, engine)
        assert late.status().requests == witness.status().requests == 0
        assert publisher.status().ranks[0].statistics.resyncs == 0
