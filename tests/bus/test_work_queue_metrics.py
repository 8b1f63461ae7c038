"""The metrics of work queues, as they are exported."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from tests.conditions import eventually

from dynbus.bus.bus import Bus
from dynbus.bus.clock import JumpingLoop
from dynbus.bus.config import BusConfig
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.bus.work_queue import WorkQueue, WorkQueueConfig

pytestmark = pytest.mark.anyio

QUEUE = EndpointName("demo", "Printer", "print")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": JumpingLoop}


def exported(reader: InMemoryMetricReader) -> dict[str, dict[str, Any]]:
    """The points of each metric of work queues, by their last label."""
    found: dict[str, dict[str, Any]] = {}
    data = reader.get_metrics_data()
    for resource in data.resource_metrics if data is not None else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                if metric.name.startswith("dynbus.work_queue."):
                    points = found.setdefault(metric.name.removeprefix("dynbus.work_queue."), {})
                    for point in metric.data.data_points:
                        labels = dict(point.attributes or {})
                        place = [labels.pop(f"dynbus.{part}") for part in EndpointName._fields]
                        assert place == list(QUEUE)
                        points[str(next(iter(labels.values()), ""))] = point
    return found


async def test_jobs_are_counted_by_what_became_of_them_and_how_long_they_waited() -> None:
    server, reader = MemoryBus(), InMemoryMetricReader()
    telemetry = Telemetry(
        TracerProvider(shutdown_on_exit=False), MeterProvider([reader], shutdown_on_exit=False)
    )
    bus = await Bus.over(
        BusConfig(), await server.connect(), await server.connect(), telemetry=telemetry
    )
    queue = WorkQueue(bus, QUEUE, WorkQueueConfig(retry_delay=0.0))
    for job_id in ("done", "fails", "refused", "stays", "waits"):
        await queue.put(b"", job_id=job_id)
    await anyio.sleep(3.0)

    async with queue.take(limit=1) as taker:
        await (await anext(taker)).ack()
        failing = await anext(taker)
        await failing.nak("no paper")
        for _ in range(2):
            job = await anext(taker)
            await (job.ack() if job.job_id == "fails" else job.bury("never"))
        held = await anext(taker)

        def depth() -> dict[str, float]:
            points = exported(reader).get("depth", {})
            return {state: point.value for state, point in points.items()}

        await eventually(lambda: depth() == {"waiting": 1, "held": 1}, what="it is measured")
        [age] = exported(reader)["oldest.age"].values()
        await held.give_back()
    after = exported(reader)

    jobs = {result: point.value for result, point in after["jobs"].items()}
    assert jobs == {"put": 5, "taken": 5, "done": 2, "retried": 1, "dead": 1, "returned": 1}
    [waited] = after["wait.duration"].values()
    assert waited.count == 4
    assert waited.min >= 2.5
    # It was put before the three seconds, and measured after them.
    assert age.value >= 3.0
    assert not {"depth", "oldest.age"} & after.keys()
    tries = {result: point.sum for result, point in after["tries"].items()}
    assert tries == {"done": 3, "dead": 1}
    await bus.close()
