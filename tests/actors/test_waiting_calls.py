"""Calls that wait for an instance are told, so that something can start one."""

from __future__ import annotations

import anyio
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import NoOpTracerProvider
from tests.conditions import eventually

from dynbus import Actor, Runtime, call_options, handler
from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.testing import run


class Engine(Actor, namespace="demo"):
    @handler
    async def generate(self, text: str) -> str:
        return text


def test_a_call_that_waits_for_an_instance_is_counted_until_there_is_one() -> None:
    reader = InMemoryMetricReader()
    metrics = MeterProvider([reader], shutdown_on_exit=False)
    telemetry = Telemetry(NoOpTracerProvider(), metrics)

    def waiting() -> dict[str, int]:
        data = reader.get_metrics_data()
        return {
            str((point.attributes or {})["dynbus.component"]): int(getattr(point, "value", 0))
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "dynbus.calls.waiting"
            for point in metric.data.data_points
        }

    async def story() -> None:
        server = MemoryBus()
        bus = await Bus.over(
            BusConfig(), await server.connect(), await server.connect(), telemetry=telemetry
        )
        async with await Runtime.over(bus) as runtime, anyio.create_task_group() as tasks:
            client = runtime.client(Engine)
            with call_options(wait=30.0):
                for _ in range(2):
                    tasks.start_soon(client.generate, "a")
            await eventually(lambda: waiting() == {"Engine": 2})

            await runtime.start(Engine)

            await eventually(lambda: waiting() == {"Engine": 0})

    run(story())
    metrics.shutdown()
