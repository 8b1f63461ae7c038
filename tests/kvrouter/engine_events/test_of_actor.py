"""What an engine says on its sockets reaches routers, with how far it can be relied on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from tests.conditions import eventually

from dynbus import Actor, handler
from dynbus.bus.memory.bus import MemoryBus
from dynbus.kvrouter import open_router
from dynbus.kvrouter.engine_events.of_actor import EngineEvents
from dynbus.kvrouter.engine_events.zmq_subscriber import ZmqSource
from dynbus.kvrouter.stream.awareness import AwarenessLevel
from dynbus.kvrouter.stream.follower import IndexFollower
from dynbus.kvrouter.stream.publisher import KvEventPublisher
from dynbus.testing import TestKit

from .frames import encode, vllm
from .publishing_engine import PublishingEngine, publishing_engine

pytestmark = pytest.mark.anyio


def message(engine_hash: int) -> bytes:
    return encode([1.5, [vllm(block_hashes=[engine_hash], token_ids=[engine_hash] * 4)], 0])


@contextlib.asynccontextmanager
async def published(
    engine: PublishingEngine, *, replay: bool = True
) -> AsyncGenerator[tuple[EngineEvents, IndexFollower]]:
    """The events of an engine, and a router's index of them."""
    bus = MemoryBus()
    at_engine, at_router = await bus.connect(), await bus.connect()
    source = ZmqSource(engine.endpoint, engine.replay_endpoint if replay else None, topic="kv@")
    events = EngineEvents(KvEventPublisher(at_engine, "demo", "Engine", "a"), source, block_size=4)
    try:
        async with events, IndexFollower(at_router, "demo", "Engine") as follower:
            yield events, follower
    finally:
        await at_engine.close()
        await at_router.close()


async def is_at(follower: IndexFollower, level: AwarenessLevel) -> None:
    await eventually(lambda: follower.awareness().level is level, 10.0)


async def test_blocks_of_an_engine_are_known_to_routers() -> None:
    async with publishing_engine() as engine:
        await engine.publish(message(1))

        async with published(engine) as (events, follower):
            await is_at(follower, AwarenessLevel.EXACT)
            await engine.publish(message(2))

            await eventually(lambda: follower.index.statistics().blocks == 2, 10.0)
            assert events.status().state == "exact"
            assert events.report_mode() == "incremental"


async def test_a_router_sees_an_engine_whose_past_is_not_known() -> None:
    async with publishing_engine() as engine:
        await engine.publish(message(1))

        async with published(engine, replay=False) as (events, follower):
            await is_at(follower, AwarenessLevel.DEGRADED)
            await engine.subscribed()
            await engine.publish(message(2))

            lost = "messages 0 to 0 of the engine are lost"
            await eventually(lambda: lost in follower.awareness().reason, 10.0)
            assert events.report_mode() == "full"


async def test_a_router_sees_an_engine_that_is_not_there_yet_and_one_that_is_gone() -> None:
    async with (
        publishing_engine(started=False) as engine,
        published(engine) as (events, follower),
    ):
        await eventually(lambda: "a/0: there is no connection" in str(follower.awareness()), 10.0)

        engine.start()
        await is_at(follower, AwarenessLevel.EXACT)
        await engine.publish(message(1))
        await eventually(lambda: follower.index.statistics().blocks == 1, 10.0)
        await engine.stop()

        await is_at(follower, AwarenessLevel.DEGRADED)
        assert events.status().state == "degraded"


async def test_a_reset_that_is_told_reaches_routers_before_the_engine_says_so() -> None:
    async with publishing_engine() as engine:
        await engine.publish(message(1))
        async with published(engine) as (events, follower):
            await eventually(lambda: follower.index.statistics().blocks == 1, 10.0)

            events.cleared()

            await eventually(lambda: follower.index.statistics().blocks == 0, 10.0)


async def test_an_endpoint_that_nobody_can_connect_to_is_refused_before_anything_starts() -> None:
    connection = await MemoryBus().connect()
    publisher = KvEventPublisher(connection, "demo", "Engine", "a")

    with pytest.raises(ValueError, match="is an address to bind to"):
        EngineEvents(publisher, ZmqSource("tcp://*:5557"), block_size=16)
    by_path = ZmqSource("ipc:///tmp/a", replay_endpoint="ipc:///tmp/b", ranks=(0, 1))
    with pytest.raises(ValueError, match="give each rank's own"):
        EngineEvents(publisher, by_path, block_size=16)

    await connection.close()


class Engine(Actor, namespace="demo"):
    def __init__(self, endpoint: str = "", replay_endpoint: str = "") -> None:
        self.source = ZmqSource(endpoint, replay_endpoint, topic="kv@")

    async def on_start(self) -> None:
        self.events = EngineEvents.of(self, self.source, block_size=4)
        await self.events.__aenter__()

    async def on_stop(self) -> None:
        await self.events.close()

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_events": "true", "kv_block_size": "4"}

    @handler
    async def generate(self, prompt: dict[str, Any]) -> dict[str, Any]:
        return prompt


async def test_an_actor_shows_operators_how_far_its_engine_s_events_can_be_relied_on() -> None:
    async with publishing_engine() as engine, TestKit() as kit:
        instance = await kit.start(
            Engine, endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint
        )
        status = instance.server.bus.status
        async with open_router(kit.caller, Engine) as router:
            await eventually(lambda: router.awareness().level is AwarenessLevel.EXACT, 10.0)
            await eventually(lambda: not status.read(), 10.0)

            await engine.stop()

            await eventually(lambda: "there is no connection" in str(router.awareness()), 10.0)
            shown = status.read("demo.Engine")["kv_events"]

    assert shown == f"rank 0: degraded (there is no connection to {engine.endpoint})"
