"""An engine's events are read from its sockets, whatever happens to it, to us or in between."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

import anyio
import pytest
from tests.conditions import eventually

from dynbus.kvrouter.engine_events import EngineBridge, QuarantineReason
from dynbus.kvrouter.engine_events.zmq_subscriber import ZmqSource, follow_engine, rank_endpoint

from .frames import encode, vllm
from .publishing_engine import PublishingEngine, free_ports, publishing_engine
from .recording_sink import RecordingSink

pytestmark = pytest.mark.anyio


def message(engine_hash: int) -> bytes:
    event = vllm(block_hashes=[engine_hash], token_ids=[engine_hash] * 4)
    return encode([1.5, [event], 0])


class Follower:
    def __init__(self, expire_after: float) -> None:
        self.sink = RecordingSink()
        self.bridge = EngineBridge(self.sink, block_size=4, expire_after=expire_after)

    async def has(self, hashes: Sequence[int], *, dp_rank: int = 0, within: float = 10.0) -> None:
        await eventually(
            lambda: self.sink.engine_hashes(dp_rank) == list(hashes),
            within,
            what=f"rank {dp_rank} has {list(hashes)[:9]}",
        )

    async def is_exact(self) -> None:
        await eventually(lambda: self.bridge.status().state == "exact")


@contextlib.asynccontextmanager
async def following(
    engine: PublishingEngine,
    *,
    replay: bool = True,
    topic: str = "kv@",
    ranks: Sequence[int] | None = None,
    receive_limit: int = 1000,
    replay_timeout: float = 10.0,
    heartbeat_interval: float = 5.0,
    expire_after: float = 30.0,
) -> AsyncGenerator[Follower]:
    follower = Follower(expire_after)
    source = ZmqSource(
        engine.endpoint,
        engine.replay_endpoint if replay else None,
        topic=topic,
        ranks=ranks,
        receive_limit=receive_limit,
        replay_timeout=replay_timeout,
        heartbeat_interval=heartbeat_interval,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow_engine, source, follower.bridge)
        yield follower
        tasks.cancel_scope.cancel()


async def test_events_are_followed_from_before_the_subscription_on() -> None:
    async with publishing_engine() as engine:
        await engine.publish(message(1))
        await engine.publish(message(2))

        async with following(engine) as follower:
            await follower.has([1, 2])
            await engine.publish(message(3))
            await follower.has([1, 2, 3])
            await follower.is_exact()


async def test_events_that_nobody_reads_any_longer_are_not_exact() -> None:
    async with publishing_engine() as engine:
        async with following(engine) as follower:
            await follower.is_exact()

        status = follower.bridge.status()

    assert status.state == "degraded"
    assert status.reason == f"rank 0: nobody reads {engine.endpoint} any longer"
    assert follower.sink.said[-1] == (0, f"degraded (nobody reads {engine.endpoint} any longer)")


async def test_what_an_engine_that_is_gone_held_expires() -> None:
    async with publishing_engine() as engine, following(engine, expire_after=0.5) as follower:
        await engine.publish(message(1))
        await follower.has([1])

        await engine.stop()

        await follower.has([])
        assert "there is no connection" in (follower.bridge.status().reason or "")


async def test_a_replay_with_topics_is_understood() -> None:
    async with publishing_engine() as engine:
        engine.topic_in_replay = True
        await engine.publish(message(1))

        async with following(engine) as follower:
            await follower.has([1])
            await follower.is_exact()


async def test_an_engine_that_comes_later_is_found() -> None:
    async with publishing_engine(started=False) as engine, following(engine) as follower:
        assert follower.bridge.status().state == "degraded"

        engine.start()
        await engine.publish(message(1))

        await follower.has([1])


async def test_dropped_messages_are_replayed() -> None:
    async with publishing_engine() as engine, following(engine) as follower:
        await engine.subscribed()
        await follower.is_exact()
        await engine.publish(message(1))
        for number in range(2, 40):
            await engine.publish(message(number), lost=True)
        await engine.publish(message(40))

        await follower.has(range(1, 41))
        await follower.is_exact()

        status = follower.bridge.status()
        assert (status.gaps, status.lost, status.resets) == (1, 0, 0)


async def test_dropped_messages_without_a_replay_endpoint_reset_the_rank() -> None:
    async with publishing_engine() as engine, following(engine, replay=False) as follower:
        await engine.subscribed()
        await engine.publish(message(1))
        await follower.has([1])

        await engine.publish(message(2), lost=True)
        await engine.publish(message(3))

        await follower.has([3])
        assert follower.sink.resets == [0]
        assert follower.bridge.status().state == "degraded"


async def test_a_replay_that_nobody_answers_is_given_up() -> None:
    async with publishing_engine() as engine:
        engine.answers = False
        async with following(engine, replay_timeout=0.2) as follower:
            await engine.subscribed()
            await eventually(lambda: len(engine.requests) == 1)
            await engine.publish(message(1))
            await follower.has([1])

            await engine.publish(message(2), lost=True)
            await engine.publish(message(3))

            await follower.has([3])
            assert follower.bridge.status().lost == 1


async def test_a_restart_is_noticed_although_the_new_engine_is_silent() -> None:
    async with publishing_engine() as engine, following(engine) as follower:
        await engine.publish(message(1))
        await follower.is_exact()
        await follower.has([1])

        await engine.stop()
        await eventually(lambda: follower.bridge.status().state == "degraded")
        engine.start()

        await eventually(lambda: follower.sink.resets == [0])
        await follower.is_exact()
        assert follower.sink.engine_hashes() == []


@pytest.mark.parametrize("replay", [True, False])
async def test_nothing_of_an_engine_is_left_after_its_restart(replay: bool) -> None:
    async with publishing_engine() as engine, following(engine, replay=replay) as follower:
        await engine.subscribed()
        for number in range(3):
            await engine.publish(message(number + 1))
        await follower.has([1, 2, 3])

        await engine.stop()
        engine.start()
        await engine.subscribed()
        await engine.publish(message(101))
        await engine.publish(message(102))

        await follower.has([101, 102])
        await follower.is_exact()


async def test_the_same_engine_goes_on_after_its_connection_was_cut() -> None:
    async with publishing_engine() as engine, following(engine) as follower:
        await engine.publish(message(1))
        await follower.has([1])
        kept = engine.kept

        await engine.stop()
        await eventually(lambda: follower.bridge.status().state == "degraded")
        engine.start()
        engine.kept = kept | {1: message(2)}

        await follower.has([1, 2])
        assert follower.sink.resets == []


async def test_a_slow_subscriber_loses_nothing_and_never_stops_its_engine() -> None:
    count = 3000
    async with (
        publishing_engine(send_limit=5) as engine,
        following(engine, receive_limit=5) as follower,
    ):
        await engine.subscribed()
        await follower.is_exact()
        # The follower shares this loop and has no turn here: it reads nothing meanwhile.
        with anyio.fail_after(60):
            for number in range(count):
                await engine.publish(message(number))
        await eventually(lambda: follower.sink.engine_hashes() != [])
        await engine.publish(message(count))

        await follower.has(range(count + 1), within=30.0)

        status = follower.bridge.status()
        assert status.gaps >= 1
        assert (status.lost, status.resets, status.state) == (0, 0, "exact")


async def test_each_rank_is_read_at_a_port_of_its_own() -> None:
    first = free_ports(13)
    async with (
        publishing_engine(first) as engine,
        publishing_engine(first + 2) as other,
        following(engine, ranks=(0, 2)) as follower,
    ):
        await engine.publish(message(1))
        await other.publish(message(2))

        await follower.has([1], dp_rank=0)
        await follower.has([2], dp_rank=2)


async def test_messages_of_other_topics_are_not_read() -> None:
    async with publishing_engine() as engine, following(engine, topic="other") as follower:
        await follower.is_exact()
        await engine.publish(message(1))
        await engine.publish_frames([b"other", (0).to_bytes(8, "big"), message(7)])

        await follower.has([7])


async def test_messages_without_a_number_are_counted_and_passed_over() -> None:
    async with publishing_engine() as engine, following(engine) as follower:
        await engine.subscribed()
        await follower.is_exact()
        await engine.publish_frames([b"kv@test", message(7)])
        await engine.publish_frames([b"kv@test", b"first", message(7)])
        await engine.publish(message(1))

        await follower.has([1])

        assert follower.bridge.status().quarantined == {QuarantineReason.MALFORMED: 2}


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://engine-3:5557", 4, "tcp://engine-3:5561"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///tmp/events", 0, "ipc:///tmp/events"),
    ],
)
def test_the_port_of_a_rank_is_counted_from_that_of_rank_0(
    endpoint: str, rank: int, expected: str
) -> None:
    assert rank_endpoint(endpoint, rank) == expected


@pytest.mark.parametrize(
    ("endpoint", "rank", "text"),
    [
        ("tcp://*:5557", 0, "an address to bind to"),
        ("tcp://0.0.0.0:5557", 0, "an address to bind to"),
        ("tcp://127.0.0.1", 0, "no port for rank 0"),
        ("tcp://127.0.0.1:65535", 1, "no port for rank 1"),
        ("ipc:///tmp/events", 1, "no port to count ranks by"),
    ],
)
def test_an_endpoint_that_cannot_be_connected_to_is_refused(
    endpoint: str, rank: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        rank_endpoint(endpoint, rank)
