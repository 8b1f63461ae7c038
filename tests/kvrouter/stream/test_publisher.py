"""What an engine hands over is stored whole and in order, or said again from the beginning."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import UserList
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.kvrouter.event_bus import (
    STREAM,
    EventBus,
    event_subject,
    eventually,
    publish,
    resync_subject,
    stored,
    stored_messages,
)

from dynbus import Actor, handler
from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError, Unavailable
from dynbus.bus.transport import StoredMessage
from dynbus.kvrouter.engine_events import EngineBridge
from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheDigest,
    InvalidEvents,
    Operation,
    decode_events,
)
from dynbus.kvrouter.stream.awareness import EXACT, AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.event_log import OutgoingBatch
from dynbus.kvrouter.stream.event_stream import EventStream
from dynbus.kvrouter.stream.publisher import KvEventPublisher
from dynbus.kvrouter.stream.resync import ResyncRequest, encode_resync
from dynbus.testing import TestKit, run


async def ask(at: EventBus, known_epoch: int = 0, instance_id: str = "a") -> None:
    """Ask for a resync as a router does."""
    connection = await at.bus.connect()
    connection.publish(
        resync_subject(instance_id), encode_resync(ResyncRequest(known_epoch, "a test"))
    )
    await connection.barrier()
    await connection.close()


def test_events_are_published_for_their_rank_with_ids_that_tell_repeats() -> None:
    async def story() -> list[StoredMessage]:
        at = EventBus()
        async with at.publisher() as publisher:
            await publisher.flush()
            publisher.publish([stored(1, 2)])
            publisher.publish([stored(7)], dp_rank=3)
            await publisher.flush()
            return await stored_messages(at.bus)

    begun, first, of_rank_3 = run(story())

    assert begun.subject == first.subject == event_subject("a")
    assert of_rank_3.subject == event_subject("a", 3)
    ids = [one.headers["Nats-Msg-Id"].rpartition(".") for one in (begun, first)]
    assert [place for place, _, _ in ids] == ["a.0.1.0", "a.0.1.1"]
    assert ids[0][2] != ids[1][2]
    assert decode_events(first.data).engine_hashes == [1, 2]
    assert float(first.headers["Dynbus-Published"]) > 0
    assert decode_events(begun.data).closing_digest is not None


def test_nobody_has_the_server_take_events_to_come_for_repeats_of_its_own() -> None:
    async def story() -> list[str]:
        at = EventBus()
        connection = await at.bus.connect()
        async with at.publisher() as publisher:
            await publisher.flush()
            last = await connection.jetstream.last(STREAM, event_subject("a"))
            assert last is not None
            # Who publishes reads the last message of any subject in the stream.
            read = last.headers["Nats-Msg-Id"]
            guesses = {read.replace("a.0.1.0", f"a.0.1.{first}", 1) for first in range(9)}
            for guess in guesses | {f"a.0.1.{first}" for first in range(9)}:
                other = "demo.Other._kv.o.0"
                await connection.jetstream.publish(other, b"", message_id=guess)
            publisher.publish([stored(1, 2)])
            await publisher.flush()
        await connection.close()
        found = [one for one in await stored_messages(at.bus) if one.subject == event_subject("a")]
        return [one.headers["Nats-Msg-Id"] for one in found]

    begun, first = run(story())

    assert begun.startswith("a.0.1.0.")
    assert first.startswith("a.0.1.1.")


def test_events_of_a_moment_share_a_message() -> None:
    async def story() -> list[StoredMessage]:
        at = EventBus()
        async with at.publisher() as publisher:
            await publisher.flush()
            for number in range(1, 101):
                publisher.publish([stored(number)])
            await publisher.flush()
            return await stored_messages(at.bus)

    _, shared = run(story())

    assert len(decode_events(shared.data)) == 100


def test_any_thread_may_publish() -> None:
    async def story() -> int:
        at = EventBus()
        async with at.publisher() as publisher:

            def engine(first: int) -> None:
                for number in range(first, first + 100):
                    publisher.publish([stored(number)])

            threads = [threading.Thread(target=engine, args=(1000 * n,)) for n in range(1, 5)]
            for thread in threads:
                thread.start()
            await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
            await publisher.flush()
            return publisher.status().ranks[0].blocks

    assert run(story()) == 400


class _Changing(UserList[int]):
    """A list that another thread makes shorter while it is copied."""

    def __iter__(self) -> Iterator[int]:
        yield self.data[0]


@pytest.mark.parametrize(
    "event",
    [
        BlockStored(None, [1, 2], [1]),
        BlockStored(None, [-1], [1]),
        BlockStored(1 << 64, [1], [1]),
        BlockStored(None, np.array([1.5]), [1]),
        BlockRemoved(["one"]),  # type: ignore[list-item]
        BlockStored(3.0, [1], [1]),  # type: ignore[arg-type]
        BlockStored(None, b"12345678", [1] * 8),
        BlockStored(None, b"12345678", b"12345678"),
        BlockStored(None, [1], None),  # type: ignore[arg-type]
        BlockStored(None, [1], [1], []),  # type: ignore[arg-type]
        BlockStored(None, [1], [1], 1.0),  # type: ignore[arg-type]
        BlockStored(None, _Changing([1, 2]), [1, 2]),
        CacheDigest(1, 2),
        None,
    ],
)
def test_what_cannot_be_encoded_is_refused_at_once_and_nothing_of_the_call_is_taken(
    event: Any,
) -> None:
    async def story() -> int:
        at = EventBus()
        async with at.publisher() as publisher:
            with pytest.raises(InvalidEvents):
                publisher.publish([stored(5), event])
            await publisher.flush()
            return publisher.status().ranks[0].blocks

    assert run(story()) == 0


def test_lists_may_be_changed_once_they_were_handed_over() -> None:
    async def story() -> list[int]:
        at = EventBus()
        async with at.publisher() as publisher:
            await publisher.flush()
            hashes = [1, 2, 3]
            publisher.publish([BlockStored(None, hashes, hashes)])
            hashes.clear()
            await publisher.flush()
            return decode_events((await stored_messages(at.bus))[-1].data).engine_hashes

    assert run(story()) == [1, 2, 3]


@pytest.mark.parametrize("dp_rank", [-1, 1 << 16, 1.5, "1", None])
def test_a_rank_that_is_none_is_refused_at_once(dp_rank: Any) -> None:
    async def story() -> None:
        async with EventBus().publisher() as publisher:
            publisher.publish([stored(1)], dp_rank=dp_rank)

    with pytest.raises(ConfigError, match="dp_rank = .*: give a number from 0 to 65535"):
        run(story())


def test_a_resend_lets_the_loop_go_on_after_each_message() -> None:
    async def story() -> tuple[int, int]:
        at = EventBus()
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1

        async with at.publisher(max_batch_bytes=4096) as publisher:
            await publish(publisher, stored(*range(1, 5001)))
            log = at.logs["a", 0]
            made: list[int] = []
            next_batch = log.next_batch

            def noted(now: float) -> OutgoingBatch | None:
                if (batch := next_batch(now)) is not None:
                    made.append(turns)
                    asyncio.get_running_loop().call_soon(turn)
                return batch

            log.next_batch = noted  # type: ignore[method-assign]
            publisher.reset()
            await publish(publisher, stored(*range(1, 5001)))
        return len(made), len(set(made))

    messages_made, turns_taken = run(story())

    assert messages_made == turns_taken > 10


def test_a_publish_whose_acknowledgement_is_lost_is_repeated_and_stored_once() -> None:
    async def story() -> tuple[list[int], int, int]:
        at = EventBus()
        async with at.publisher() as publisher:
            await publisher.flush()
            publisher.publish([stored(1)])
            await asyncio.sleep(0.0015)
            connection = at.bus.connections[0]
            with at.bus.partition(connection, notice_after=0.1):
                publisher.publish([stored(2)])
                await asyncio.sleep(0.2)
            await publisher.flush()
            statistics = publisher.status().ranks[0].statistics
            found = [decode_events(message.data) for message in await stored_messages(at.bus)]
            return [batch.first_id for batch in found], statistics.epochs, statistics.repeats

    first_ids, epochs, repeats = run(story())

    assert first_ids == [0, 1, 2]
    assert epochs == 1
    assert repeats >= 1


def test_while_the_server_is_away_events_wait_and_go_out_in_order() -> None:
    async def story() -> tuple[int, list[int]]:
        at = EventBus()
        async with at.publisher() as publisher:
            await publisher.flush()
            at.bus.stop()
            for number in range(1, 6):
                publisher.publish([stored(number)])
                await asyncio.sleep(1.0)
            at.bus.start()
            await publisher.flush()
            statistics = publisher.status().ranks[0].statistics
            found = [decode_events(message.data) for message in await stored_messages(at.bus)]
            return statistics.epochs, [
                batch.engine_hashes[batch.bounds[event]]
                for batch in found
                for event, operation in enumerate(batch.operations)
                if operation == Operation.STORED
            ]

    assert run(story()) == (1, [1, 2, 3, 4, 5])


def test_when_too_much_waits_a_new_epoch_says_all_that_is_held_instead() -> None:
    async def story() -> tuple[int, int, bool, int]:
        at = EventBus()
        async with at.follower() as follower, at.publisher(max_waiting_bytes=10_000) as publisher:
            await publisher.flush()
            at.bus.stop()
            for number in range(1, 1001):
                publisher.publish([stored(number)])
                if number % 100 == 0:
                    await asyncio.sleep(0.01)
            held_back = publisher.status().ranks[0].waiting_bytes
            publisher.publish([BlockRemoved(list(range(1, 991)))])
            at.bus.start()
            await publisher.flush()
            await at.settled(follower)
            log = publisher.status().ranks[0]
            return log.statistics.overflows, held_back, at.agrees(follower), log.blocks

    overflows, held_back, agrees, blocks = run(story())

    assert overflows == 1
    assert held_back <= 10_000
    assert agrees
    assert blocks == 10


def test_a_stream_made_again_is_told_everything_with_the_next_message() -> None:
    async def story() -> tuple[int, list[int]]:
        at = EventBus()
        async with at.publisher() as publisher:
            await publish(publisher, stored(1, 2))
            at.bus.jetstream.delete(STREAM)
            await publish(publisher, stored(3, parent=2))
            found = [decode_events(message.data) for message in await stored_messages(at.bus)]
            epoch = found[-1].event_epoch
            disorders = publisher.status().ranks[0].statistics.disorders
            return disorders, [
                one for batch in found if batch.event_epoch == epoch for one in batch.engine_hashes
            ]

    disorders, told = run(story())

    assert disorders == 1
    assert told[:3] == [1, 2, 3]


def test_many_requests_for_a_resync_cost_one_resend(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dynbus.kvrouter.stream.publisher")

    async def story() -> tuple[int, int]:
        at = EventBus()
        async with at.publisher() as publisher:
            await publish(publisher, stored(1, 2))
            epoch = publisher.status().ranks[0].event_epoch
            for _ in range(20):
                await ask(at, epoch)
            await publisher.flush()
            statistics = publisher.status().ranks[0].statistics
            return statistics.resyncs, statistics.resyncs + statistics.coalesced

    assert run(story()) == (1, 20)
    # Whose events they are is told as everywhere else.
    asked = [one for one in caplog.messages if "a router has rank 0 of " in one]
    assert len(asked) == 20
    assert not any("(" in one for one in asked)


def test_a_router_that_knows_a_higher_epoch_is_answered_with_one_above_it() -> None:
    async def story() -> int:
        at = EventBus()
        async with at.publisher() as publisher:
            await publisher.flush()
            await ask(at, 1_000_000)
            await eventually(lambda: publisher.status().ranks[0].event_epoch > 1)
            return publisher.status().ranks[0].event_epoch

    assert run(story()) == 1_000_001


def test_a_request_that_is_none_is_counted_and_nothing_is_sent() -> None:
    async def story() -> tuple[int, int]:
        at = EventBus()
        async with at.publisher() as publisher:
            await publisher.flush()
            connection = await at.bus.connect()
            for rank, data in (("0", b"\xff"), ("0", b'{"event_epoch":-1}'), ("9", b"{}")):
                connection.publish(f"demo.Engine._kv_resync.a.{rank}", data)
            await connection.barrier()
            await connection.close()
            await eventually(lambda: publisher.status().malformed_requests == 3)
            status = publisher.status()
            return status.malformed_requests, status.ranks[0].statistics.epochs

    assert run(story()) == (3, 1)


def test_an_instance_that_comes_back_has_a_higher_epoch_whatever_its_clock_says() -> None:
    async def story() -> list[int]:
        first, second = EventBus(), EventBus()
        second.bus = first.bus
        async with first.publisher() as publisher:
            publisher.reset()
            await publisher.flush()
        async with second.publisher() as publisher:
            await publisher.flush()
        return [
            decode_events(message.data).event_epoch for message in await stored_messages(first.bus)
        ]

    epochs = run(story())

    assert epochs == sorted(set(epochs))


def test_a_reset_forgets_what_the_engine_held() -> None:
    async def story() -> bool:
        at = EventBus()
        async with at.follower() as follower, at.publisher() as publisher:
            await publish(publisher, stored(1, 2))
            await eventually(lambda: follower.lookup([1, 2]) == {"a": 2})
            publisher.reset()
            publisher.publish([stored(7)])
            await eventually(lambda: follower.lookup([7]) == {"a": 1})
            return follower.lookup([1, 2]) == {}

    assert run(story())


def test_an_event_that_is_larger_than_a_message_is_cut_into_pieces() -> None:
    async def story() -> bool:
        at = EventBus()
        async with at.follower() as follower, at.publisher(max_batch_bytes=4096) as publisher:
            await publish(publisher, stored(*range(1, 3001)), BlockRemoved(list(range(2000, 3001))))
            await at.settled(follower)
            sizes = [len(message.data) for message in await stored_messages(at.bus)]
            return max(sizes) <= 4096 and follower.lookup(list(range(1, 3001))) == {"a": 1999}

    assert run(story())


def test_a_flush_that_cannot_end_says_why() -> None:
    async def story() -> None:
        at = EventBus()
        async with at.publisher() as publisher:
            await publisher.flush()
            at.bus.jetstream.stall()
            publisher.publish([AllBlocksCleared()])
            try:
                await publisher.flush(3.0)
            finally:
                at.bus.jetstream.stall(False)

    with pytest.raises(Unavailable, match=r"not stored within 3\.0 s: .*did not answer"):
        run(story())


def test_what_comes_after_the_end_is_dropped_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> int:
        at = EventBus()
        async with at.publisher() as publisher:
            await publisher.flush()
        publisher.publish([stored(1)])
        publisher.reset()
        return publisher.status().refused

    refused = run(story())

    said = [one.message for one in caplog.records if "is closed: events" in one.message]
    assert (refused, len(said)) == (2, 1)


def test_a_publisher_that_was_not_entered_takes_nothing_and_says_what_to_do() -> None:
    async def story() -> None:
        connection = await EventBus().bus.connect()
        publisher = KvEventPublisher(connection, "demo", "Engine", "a")

        with pytest.raises(RuntimeError, match="was not entered, .*: enter it with `async with`"):
            publisher.publish([stored(1)])
        with pytest.raises(RuntimeError, match="was not entered"):
            publisher.reset()

    run(story())


def test_a_publisher_that_could_not_be_entered_takes_nothing_and_says_so() -> None:
    async def story() -> int:
        at = EventBus()
        connection = await at.bus.connect()
        publisher = KvEventPublisher(connection, "demo", "Engine", "a")
        at.bus.jetstream.stall()
        with pytest.raises(Unavailable):
            await publisher.__aenter__()

        with pytest.raises(RuntimeError, match="entering it failed, so that nothing would ever"):
            publisher.publish([stored(1)])
        with pytest.raises(RuntimeError, match="entering it failed"):
            publisher.reset()

        at.bus.jetstream.stall(False)
        async with publisher:
            await publish(publisher, stored(1))
            return publisher.status().ranks[0].blocks

    assert run(story()) == 1


def test_what_a_blocked_loop_cannot_take_in_is_bounded_and_the_rank_begins_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> tuple[int, list[int]]:
        at = EventBus()
        connection = await at.bus.connect()
        async with (
            at.follower() as follower,
            KvEventPublisher(
                connection, "demo", "Engine", "a", ranks=(0, 1), max_handed_bytes=10_000
            ) as publisher,
        ):
            publisher.publish([stored(7)], dp_rank=1)
            await publish(publisher, stored(1))
            for number in range(2, 32):  # in one turn of the loop
                publisher.publish([stored(number)])
            await publisher.flush()
            await eventually(lambda: follower.lookup([31]) == {"a": 1})
            assert follower.lookup([1]) == {}
            assert follower.lookup([7]) == {"a": 1}
            status = publisher.status()
            return status.dropped, [one.blocks for one in status.ranks]

    dropped, blocks = run(story())

    assert dropped > 0
    assert blocks == [30 - dropped, 1]
    assert sum("the event loop is blocked" in one.message for one in caplog.records) == 1


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (
            [{"a": 1}],
            "event 0, {'a': 1}: it is not an event: give BlockStored, BlockRemoved or All",
        ),
        ([AllBlocksCleared(), None], "event 1, None: it is not an event"),
        ([BlockStored(None, None, [1])], r"event 0, BlockStored\(.*NoneType"),  # type: ignore[arg-type]
        ([BlockStored("x", [1], [1])], r"event 0, BlockStored\(parent_hash='x'"),  # type: ignore[arg-type]
        (AllBlocksCleared(), r"AllBlocksCleared\(\) is not a list of events"),
    ],
)
def test_what_is_no_event_is_refused_with_its_place(events: Any, message: str) -> None:
    async def story() -> None:
        at = EventBus()
        async with at.publisher() as publisher:
            publisher.publish(events)

    with pytest.raises(InvalidEvents, match=message):
        run(story())


def test_a_stream_of_another_namespace_is_refused() -> None:
    async def story() -> None:
        connection = await EventBus().bus.connect()
        KvEventPublisher(connection, "demo", "Engine", "a", stream=EventStream("other"))

    with pytest.raises(ConfigError, match="namespace demo do not go to the stream of other"):
        run(story())


DEGRADED = CacheAwareness(AwarenessLevel.DEGRADED, "messages lost")


def test_routers_and_operators_see_how_far_an_engine_s_events_can_be_relied_on() -> None:
    async def story() -> tuple[list[str], list[dict[str, str]]]:
        at = EventBus()
        connection, control = await at.bus.connect(), await at.bus.connect()
        bus = await Bus.over(BusConfig(), connection, control)
        status = bus.status
        levels: list[str] = []
        shown: list[dict[str, str]] = []
        publisher = KvEventPublisher(connection, "demo", "Engine", "a", ranks=(0, 1), bus=bus)
        publisher.set_awareness(DEGRADED, dp_rank=1)
        async with at.follower() as follower:

            async def seen(level: AwarenessLevel) -> None:
                await eventually(lambda: follower.awareness().level is level)
                levels.append(str(follower.awareness()))
                shown.append(status.read("demo.Engine"))

            async with publisher:
                await seen(AwarenessLevel.DEGRADED)
                publisher.set_awareness(EXACT, dp_rank=1)
                await seen(AwarenessLevel.EXACT)
                publisher.set_awareness(DEGRADED)
                await seen(AwarenessLevel.DEGRADED)
            shown.append(status.read())
        await bus.close()
        return levels, shown

    levels, shown = run(story())

    assert levels == ["degraded (a/1: messages lost)", "exact", "degraded (a/0: messages lost)"]
    assert shown == [
        {"kv_events": "rank 1: degraded (messages lost)"},
        {},
        {"kv_events": "rank 0: degraded (messages lost)"},
        {},
    ]


def test_a_rank_cannot_be_off() -> None:
    async def story() -> None:
        async with EventBus().publisher() as publisher:
            with pytest.raises(ConfigError, match="give degraded"):
                publisher.set_awareness(CacheAwareness(AwarenessLevel.OFF, "no"))

    run(story())


def test_a_bridge_that_came_late_is_seen_by_routers_until_it_knows_everything() -> None:
    def blocks(number: int) -> bytes:
        event = {
            "type": "BlockStored",
            "block_hashes": [number],
            "parent_block_hash": None,
            "token_ids": [number] * 4,
            "block_size": 4,
        }
        return msgspec.msgpack.encode([1.5, [event], 0])

    async def story() -> list[str]:
        at = EventBus()
        said: list[str] = []
        async with at.publisher() as publisher, at.follower() as follower:
            bridge = EngineBridge(publisher, block_size=4)
            stream = bridge.stream(0)

            async def seen(text: str) -> None:
                await eventually(lambda: text in str(follower.awareness()))
                said.append(text)

            await seen("degraded (a/0: not connected to the engine yet)")
            stream.connected()
            stream.cannot_replay()
            if not stream.apply(7, blocks(7)):
                stream.skip_to(7, blocks(7))
            await seen("degraded (a/0: messages 0 to 6 of the engine are lost")
            stream.apply(8, msgspec.msgpack.encode([1.5, [["AllBlocksCleared"]], 0]))
            await seen("exact")
            stream.disconnected("there is no connection")
            await seen("degraded (a/0: there is no connection)")
            return said

    assert len(run(story())) == 4


class Engine(Actor, namespace="nodes"):
    @handler
    async def ask(self) -> str:
        return "plain"


def test_what_publishes_for_an_instance_does_so_under_its_node() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            instance = await kit.start(Engine, node="prefill", instance_id="a")
            return repr(KvEventPublisher.of(instance.actor))

    assert "nodes.prefill.a" in run(story())
