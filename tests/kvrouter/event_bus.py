"""A publisher and its followers over a bus in memory, on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from dynbus import Actor, handler
from dynbus.bus.clock import monotonic
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.transport import StoredMessage
from dynbus.kvrouter.events import BlockStored, KvEvent, Tier
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.stream.awareness import AwarenessLevel
from dynbus.kvrouter.stream.digest import index_digest
from dynbus.kvrouter.stream.event_log import EventLog
from dynbus.kvrouter.stream.event_stream import EpochClock
from dynbus.kvrouter.stream.follower import IndexFollower
from dynbus.kvrouter.stream.membership import Instances
from dynbus.kvrouter.stream.publisher import KvEventPublisher

STREAM = "DYNBUS_EVENTS_demo"


def stored(*hashes: int, parent: int | None = None, tier: Tier = Tier.DEVICE) -> BlockStored:
    """Blocks whose engine hash is their block hash."""
    return BlockStored(parent, list(hashes), list(hashes), tier)


def event_subject(instance_id: str, dp_rank: int = 0) -> str:
    return f"demo.Engine._kv.{instance_id}.{dp_rank}"


def resync_subject(instance_id: str, dp_rank: int = 0) -> str:
    return f"demo.Engine._kv_resync.{instance_id}.{dp_rank}"


async def stored_messages(bus: MemoryBus) -> list[StoredMessage]:
    """All that the stream holds."""
    connection = await bus.connect()
    found: list[StoredMessage] = []
    read = asyncio.Event()
    consumer = await connection.jetstream.consume(STREAM, found.append, on_caught_up=read.set)
    await read.wait()
    await consumer.stop()
    await connection.close()
    return found


async def publish(publisher: KvEventPublisher, *events: KvEvent) -> None:
    """Publish events, and wait until the stream has them."""
    publisher.publish(events)
    await publisher.flush()


class Engine(Actor, namespace="demo"):
    """Publishes two blocks from `on_start` on."""

    async def on_start(self) -> None:
        self.events = await KvEventPublisher.of(self).__aenter__()
        self.events.publish([stored(1, 2)])

    async def on_stop(self) -> None:
        await self.events.close()

    @handler
    async def load(self) -> int:
        return 0


class EventBus:
    """The bus, and what was made on it."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.logs: dict[tuple[str, int], EventLog] = {}
        self._ticks = 0
        self._epochs = EpochClock(self._count)

    def _count(self) -> int:
        self._ticks += 1
        return self._ticks

    @asynccontextmanager
    async def publisher(
        self,
        instance_id: str = "a",
        *,
        ranks: Sequence[int] = (0,),
        max_waiting_bytes: int = 1 << 20,
        max_batch_bytes: int = 1 << 18,
    ) -> AsyncGenerator[KvEventPublisher]:
        """A publisher on a connection of its own."""

        def make_log(dp_rank: int) -> EventLog:
            log = EventLog(
                dp_rank,
                self._epochs,
                max_waiting_bytes=max_waiting_bytes,
                max_batch_bytes=max_batch_bytes,
            )
            self.logs[instance_id, dp_rank] = log
            return log

        connection = await self.bus.connect(name=f"publisher {instance_id}")
        try:
            async with KvEventPublisher(
                connection,
                "demo",
                "Engine",
                instance_id,
                ranks=ranks,
                make_log=make_log,
            ) as publisher:
                yield publisher
        finally:
            await connection.close()

    @asynccontextmanager
    async def follower(self, instances: Instances | None = None) -> AsyncGenerator[IndexFollower]:
        """A follower on a connection of its own."""
        connection = await self.bus.connect(name="follower")
        try:
            async with IndexFollower(connection, "demo", "Engine", instances=instances) as follower:
                yield follower
        finally:
            await connection.close()

    def agrees(self, follower: IndexFollower) -> bool:
        """Whether an index holds exactly what each rank's engine does."""
        return all(
            log.is_idle
            and Rank(*rank) in follower.index.ranks
            and index_digest(follower.index, Rank(*rank)) == log.mirror.digest()
            for rank, log in self.logs.items()
        )

    async def settled(self, *followers: IndexFollower, within: float = 2.0) -> float:
        """Wait until every follower agrees and knows it; returns the seconds that it took."""
        return await eventually(
            lambda: all(
                self.agrees(follower) and follower.awareness().level is AwarenessLevel.EXACT
                for follower in followers
            ),
            within,
        )


async def eventually(condition: Callable[[], object], within: float = 2.0) -> float:
    """Wait until `condition()` is true; returns the virtual seconds that it took.

    Raises:
        AssertionError: it still is not after `within` seconds.
    """
    begun = monotonic()
    while not condition():
        assert monotonic() - begun < within, f"not within {within} s: {condition}"
        await asyncio.sleep(0.002)
    return monotonic() - begun
