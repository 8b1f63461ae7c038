"""What an engine's reader on the publisher's loop says reaches routers without a hand-over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from tests.conditions import eventually
from tests.kvrouter.event_bus import EventBus, stored, stored_messages

from dynbus.bus.memory.bus import MemoryBus
from dynbus.kvrouter.events import BlockRemoved, BlockStored, KvEvent, decode_events
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.cache_mirror import CacheMirror
from dynbus.kvrouter.stream.digest import index_digest
from dynbus.kvrouter.stream.event_log import EventLog
from dynbus.kvrouter.stream.event_stream import EpochClock
from dynbus.kvrouter.stream.loop_sink import LoopSink
from dynbus.kvrouter.stream.publisher import KvEventPublisher
from dynbus.testing import run

RANK = Rank("a", 0)


def say(sink: LoopSink, events: Sequence[KvEvent]) -> None:
    """Publish events as an engine's reader does."""
    sink.publish(sink.cache(0).apply(events), dp_rank=0)


def test_what_is_said_on_the_loop_is_what_the_index_holds() -> None:
    async def story() -> tuple[bool, dict[str, int]]:
        at = EventBus()
        async with at.publisher() as publisher, at.follower() as follower:
            sink = publisher.loop_sink()
            say(sink, [stored(1, 2, 3), stored(9, parent=8)])
            say(sink, [BlockRemoved([3]), stored(4, parent=2)])
            await publisher.flush()
            await eventually(lambda: follower.index.statistics().blocks == 3)
            agrees = index_digest(follower.index, RANK) == sink.cache(0).digest()
            return agrees, follower.lookup([1, 2, 4])

    assert run(story()) == (True, {"a": 3})


def test_what_follows_a_reset_in_the_same_turn_is_kept() -> None:
    async def story() -> dict[str, int]:
        at = EventBus()
        async with at.publisher() as publisher, at.follower() as follower:
            sink = publisher.loop_sink()
            say(sink, [stored(1, 2)])
            await publisher.flush()
            sink.reset(0)
            say(sink, [stored(5, 6)])
            await publisher.flush()
            await eventually(lambda: follower.lookup([5, 6]) == {"a": 2})
            return follower.lookup([1, 2])

    assert run(story()) == {}


def test_a_rank_that_was_spoken_of_before_the_publisher_begins_above_its_last_epoch() -> None:
    def log_at(nanoseconds: int) -> Callable[[int], EventLog]:
        return partial(EventLog, epochs=EpochClock(lambda: nanoseconds))

    async def story() -> list[int]:
        at = EventBus()
        connection = await at.bus.connect()
        for clock in (2000, 1000):
            publisher = KvEventPublisher(connection, "demo", "Engine", "a", make_log=log_at(clock))
            unknown = CacheAwareness(AwarenessLevel.DEGRADED, "not connected")
            publisher.loop_sink().set_awareness(unknown, dp_rank=0)
            async with publisher:
                await publisher.flush()
        await connection.close()
        stream = await stored_messages(at.bus)
        return [decode_events(message.data).event_epoch for message in stream]

    assert run(story()) == [2000, 2001]


def test_a_sink_of_a_publisher_that_was_not_entered_refuses_events() -> None:
    async def story() -> None:
        connection = await MemoryBus().connect()
        sink = KvEventPublisher(connection, "demo", "Engine", "a").loop_sink()
        with pytest.raises(RuntimeError, match="was not entered"):
            sink.publish([BlockStored(None, [1], [1])], dp_rank=0)
        await connection.close()

    run(story())


def test_events_after_the_close_are_counted_as_refused() -> None:
    async def story() -> int:
        async with EventBus().publisher() as publisher:
            sink = publisher.loop_sink()
        say(sink, [stored(1)])
        return publisher.status().refused

    assert run(story()) == 1


def test_a_publisher_that_shares_a_cache_later_says_it_whole_and_then_what_follows() -> None:
    async def story() -> bool:
        at = EventBus()
        cache = CacheMirror()
        async with at.publisher("a") as first, at.follower() as follower:
            sinks = [first.loop_sink(cache)]
            say(sinks[0], [stored(7)])
            async with at.publisher("b") as second:
                await second.flush()
                sinks.append(second.loop_sink(cache))
                taken = cache.apply([stored(8, parent=7), BlockRemoved([5])])
                for sink in sinks:
                    sink.publish(taken, dp_rank=0)
                await at.settled(follower)
                return follower.lookup([7, 8]) == {"a": 2, "b": 2}

    assert run(story())
