"""An engine as an actor: what it serves, what it refuses, and what becomes of it when it breaks."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import aclosing
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tests.conditions import eventually
from tests.llm.engine.engines import CountingEngine

from dynbus.bus.errors import ConfigError, HandlerError, InvalidRequest
from dynbus.kvrouter.routing.profiles import read_profile
from dynbus.llm.engine import Engine, EngineWorker, LoadMetrics
from dynbus.llm.garbage import THRESHOLDS
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
from dynbus.llm.mock.worker import MockWorker
from dynbus.testing import Telemetry, TestKit, run


class Worker(EngineWorker, namespace="test"):
    """An engine that computes numbers."""

    engine: CountingEngine

    def make_engine(self) -> Engine:
        self.loaded_in = threading.current_thread()
        self.engine = CountingEngine()
        return self.engine


class Silent(MockWorker, namespace="test"):
    """A mock engine without events."""

    def __init__(self, context_length: int = 0) -> None:
        super().__init__(block_size=16, blocks=64, kv_events=False, context_length=context_length)


async def items_of(client: EngineWorker, request: GenerateRequest) -> list[Generated]:
    return [item async for item in client.generate(request)]


async def engine_of(kit: TestKit) -> CountingEngine:
    [instance] = kit.started.values()
    assert isinstance(instance.actor, Worker)
    return instance.actor.engine


def test_a_worker_serves_its_engine() -> None:
    async def story() -> tuple[list[list[Generated]], bool]:
        async with TestKit() as kit:
            instance = await kit.start(Worker)
            client = kit.client(Worker)
            wanted = GenerateRequest([1, 2, 3], 4, n=2)
            found = await asyncio.gather(*(items_of(client, wanted) for _ in range(3)))
            assert isinstance(instance.actor, Worker)
            return found, instance.actor.loaded_in is threading.current_thread()

    found, loaded_on_the_loop = run(story())

    for items in found:
        for index in range(2):
            mine = [item for item in items if item.index == index]
            assert [token for item in mine for token in item.token_ids] == [0, 1, 2, 3]
            assert mine[-1].finish_reason == "length"
    assert not loaded_on_the_loop


def test_full_collections_are_rare_while_an_engine_is_served() -> None:
    before = gc.get_threshold()

    async def story() -> tuple[int, int, int]:
        async with TestKit() as kit:
            await kit.start(Worker)
            return gc.get_threshold()

    assert run(story()) == THRESHOLDS
    assert gc.get_threshold() == before


def test_an_engine_says_how_busy_it_is() -> None:
    async def story() -> tuple[LoadMetrics, LoadMetrics]:
        async with TestKit() as kit:
            await kit.start(Silent)
            client = kit.client(Silent)
            async with aclosing(client.generate(GenerateRequest([1] * 40, 500))) as stream:
                await anext(stream)
                busy = await client.load_metrics()
            await eventually(lambda: is_idle(client), what="it is idle")
            return busy, await client.load_metrics()

    async def is_idle(client: Silent) -> bool:
        return not (await client.load_metrics()).request_active_slots

    busy, idle = run(story())

    assert (busy.request_active_slots, busy.kv_total_blocks) == (1, 64)
    assert busy.kv_active_blocks >= 3
    assert busy.gpu_cache_usage_perc == busy.kv_active_blocks / 64
    assert (idle.request_active_slots, idle.kv_active_blocks) == (0, 0)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"token_ids": []}, "the prompt is empty"),
        ({"token_ids": [1], "max_tokens": 0}, "max_tokens = 0"),
        ({"token_ids": [1], "n": 500}, "n = 500: ask for 1 to 128"),
        ({"token_ids": [1], "sampling": {"temperature": -1}}, "temperature = -1.0"),
        ({"token_ids": [1] * 90, "max_tokens": 20}, "the context has 100"),
        ({"token_ids": [1 << 32]}, "not from 0 to 2\\^32 - 1"),
        ({"prompt": [1]}, "token_ids"),
    ],
)
def test_a_request_that_is_not_usable_is_refused_with_its_reason(
    body: dict[str, Any], reason: str
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Silent, context_length=100)
            endpoint = await kit.caller.endpoint("test.Silent.generate").client()
            async for _ in endpoint.generate(body):
                pass

    with pytest.raises(InvalidRequest, match=reason):
        run(story())


def test_an_engine_that_raises_breaks_its_worker_and_no_other() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            instance = await kit.start(Worker)
            engine = await engine_of(kit)
            stream = kit.client(Worker).generate(GenerateRequest([1], 1000))
            # A second step takes nothing from what comes after the first item, but waits.
            engine.allowed = threading.Semaphore(1)
            async with aclosing(stream):
                await anext(stream)
                engine.poison = 13
                client = kit.client(Worker, retries=5)
                poisoned = asyncio.create_task(items_of(client, GenerateRequest([13], 5)))
                actor: Any = instance.actor
                runner: object = actor._engine_runner
                await eventually(lambda: "[2 streams]" in repr(runner))
                # From now on it might go elsewhere.
                other = await kit.start(Worker)
                engine.allowed.release(1000)
                with pytest.raises(HandlerError, match="failed with it: .* 13 is poison"):
                    await poisoned
                # What did no harm goes on there.
                assert len([item async for item in stream]) == 999
            await instance.stopped.wait()
            assert not other.broken
            assert len(await items_of(kit.client(Worker), GenerateRequest([1], 3))) == 3
            return instance.broken

    assert "13 is poison" in run(story())


def test_an_engine_that_cannot_be_made_stops_the_start() -> None:
    class Unloadable(Worker, namespace="test"):
        def make_engine(self) -> Engine:
            raise ConfigError("there is no model at /nowhere")

    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Unloadable)

    with pytest.raises(ConfigError, match="/nowhere"):
        run(story())


def test_a_call_that_is_left_frees_its_request() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Worker)
            engine = await engine_of(kit)
            engine.allowed = threading.Semaphore(2)
            stream = kit.client(Worker).generate(GenerateRequest([1], 1000))
            async with aclosing(stream):
                await anext(stream)

            def is_freed() -> bool:
                # The step that waits ends, and the cancellation comes before another.
                engine.allowed.release()
                return not engine.requests

            await eventually(is_freed)
            assert engine.steps < 500

    run(story())


def test_a_drain_lets_requests_finish() -> None:
    async def story() -> list[Generated]:
        async with TestKit() as kit:
            instance = await kit.start(Silent)
            stream = kit.client(Silent).generate(GenerateRequest([1], 100))
            async with aclosing(stream):
                items = [await anext(stream)]
                stopping = asyncio.create_task(instance.stop(grace=60.0))
                items += [item async for item in stream]
                await stopping
                return items

    items = run(story())

    assert len(items) == 100
    assert items[-1].finish_reason == "length"


def test_what_the_engine_is_like_is_announced() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            instance = await kit.start(Silent)
            profile = read_profile("a", instance.actor.instance_metadata())

            assert (profile.block_size, profile.total_blocks) == (16, 64)
            assert not profile.has_events

    run(story())


def test_operators_see_the_load_of_an_engine() -> None:
    reader = InMemoryMetricReader()
    telemetry = Telemetry(None, MeterProvider([reader]))

    async def story() -> str:
        async with TestKit(telemetry=telemetry) as kit:
            instance = await kit.start(Silent)
            client, wanted = kit.client(Silent), GenerateRequest(list(range(40)), 200)
            await items_of(client, wanted)
            stream = client.generate(
                GenerateRequest(list(range(40)), 200, sampling=Sampling(seed=1))
            )
            async with aclosing(stream):
                await anext(stream)
                await asyncio.sleep(1.0)
                status = instance.actor.runtime.bus.status.read()["engine"]
                reader.collect()
                found = values_of(reader)
            assert found["dynbus.engine.requests", "running"] == 1
            assert found["dynbus.engine.tokens", "prompt"] == 80
            assert found["dynbus.engine.tokens", "cached"] == 32
            assert found["dynbus.engine.tokens", "output"] > 200
            assert found["dynbus.engine.blocks", "active"] > 3
            assert found["dynbus.engine.hit_rate", ""] == pytest.approx(0.4)
            assert found["dynbus.engine.preemptions", ""] == 0
            assert found["dynbus.engine.queue.duration", ""] >= 2
            assert found["dynbus.engine.prefill.duration", ""] >= 2
            return status

    status = run(story())

    assert status.startswith("1 running, 0 waiting, ")
    assert status.endswith("of 64 blocks, hit rate 0.40")


def values_of(reader: InMemoryMetricReader) -> dict[tuple[str, str], float]:
    """The metrics of engines, by name and by what they are of."""
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[tuple[str, str], float] = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                if not metric.name.startswith("dynbus.engine."):
                    continue
                for point in metric.data.data_points:
                    labels = dict(point.attributes or {})
                    kind = labels.get("dynbus.state") or labels.get("dynbus.kind") or ""
                    # Of a histogram it is how often that was measured.
                    value: float = getattr(point, "value", getattr(point, "count", 0))
                    found[metric.name, str(kind)] = value
    return found
