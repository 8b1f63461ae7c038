"""The traces of jobs: a put and each attempt are spans of the caller's trace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dynbus.bus.bus import Bus
from dynbus.bus.clock import JumpingLoop
from dynbus.bus.config import BusConfig
from dynbus.bus.context import Context, context, entered
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.bus.work_queue import DeadLetters, WorkQueue, WorkQueueConfig

pytestmark = pytest.mark.anyio

QUEUE = EndpointName("demo", "Printer", "print")
CONFIG = WorkQueueConfig(retry_delay=0.0)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": JumpingLoop}


class Traced:
    """A process with telemetry, and what it has exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.telemetry = Telemetry(self.provider, meters)
        self.tracer = self.provider.get_tracer("user")

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def metrics(self) -> set[str]:
        data = self.reader.get_metrics_data()
        return {
            metric.name
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


async def process(telemetry: Telemetry | None = None) -> Bus:
    server = MemoryBus()
    return await Bus.over(
        BusConfig(), await server.connect(), await server.connect(), telemetry=telemetry
    )


@pytest.fixture
async def traced() -> Traced:
    return Traced()


@pytest.fixture
async def bus(traced: Traced) -> AsyncIterator[Bus]:
    one = await process(traced.telemetry)
    yield one
    await one.close()


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    assert span.context is not None
    assert parent.context is not None
    return (
        span.parent is not None
        and span.parent.span_id == parent.context.span_id
        and span.context.trace_id == parent.context.trace_id
    )


async def test_a_put_and_each_attempt_are_spans_of_the_caller_s_trace(
    bus: Bus, traced: Traced
) -> None:
    queue = WorkQueue(bus, QUEUE, CONFIG)
    with traced.tracer.start_as_current_span("request"):
        await queue.put(b"page", job_id="one")

    async with queue.take() as taker:
        with pytest.raises(RuntimeError):
            async with await anext(taker):
                raise RuntimeError("no paper")
        async with await anext(taker):
            with traced.tracer.start_as_current_span("work"):
                pass

    [request] = traced.spans("request")
    [put] = traced.spans("put demo.Printer.print")
    first, second = traced.spans("attempt demo.Printer.print")
    [work] = traced.spans("work")
    assert is_child(put, request)
    assert is_child(first, put)
    assert is_child(second, put)
    assert is_child(work, second)
    assert (put.kind, first.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    attempts = [dict(span.attributes or {}) for span in (first, second)]
    assert [one["dynbus.attempt"] for one in attempts] == [1, 2]
    assert [one["dynbus.result"] for one in attempts] == ["retried", "done"]
    assert [one["messaging.message.id"] for one in attempts] == ["one", "one"]
    assert first.status.status_code is StatusCode.ERROR
    assert "no paper" in (first.status.description or "")
    assert second.status.status_code is not StatusCode.ERROR
    assert "dynbus.calls" not in traced.metrics()


async def test_an_attempt_ends_however_its_job_does(bus: Bus, traced: Traced) -> None:
    queue = WorkQueue(bus, QUEUE, CONFIG)
    for job_id in ("acknowledged", "buried", "given back", "left"):
        await queue.put(b"", job_id=job_id.replace(" ", "-"))

    async with queue.take(limit=4) as taker:
        await (await anext(taker)).ack()
        await (await anext(taker)).bury("no such page")
        await (await anext(taker)).give_back(delay=60.0)
        await anext(taker)

    results = [
        dict(span.attributes or {})["dynbus.result"]
        for span in traced.spans("attempt demo.Printer.print")
    ]
    assert results == ["done", "dead", "returned", "returned"]


async def test_a_job_that_is_tried_again_from_a_dead_letter_is_of_its_trace_still(
    bus: Bus, traced: Traced
) -> None:
    queue = WorkQueue(bus, QUEUE, CONFIG)
    await queue.put(b"", job_id="one")
    letters = DeadLetters(bus.data.jetstream, QUEUE.namespace)
    async with queue.take() as taker:
        await (await anext(taker)).bury("no paper")
        [letter] = await letters.find()
        await letters.redrive(letter)

        await (await anext(taker)).ack()

    [put] = traced.spans("put demo.Printer.print")
    first, second = traced.spans("attempt demo.Printer.print")
    assert is_child(first, put)
    assert is_child(second, put)


async def test_without_telemetry_the_trace_of_the_caller_goes_through() -> None:
    bus = await process()
    queue = WorkQueue(bus, QUEUE, CONFIG)
    leave = entered(Context("request-1", trace_headers={"traceparent": TRACEPARENT}))
    await queue.put(b"", job_id="one")
    leave()
    await queue.put(b"", job_id="two")

    async with queue.take() as taker:
        async with await anext(taker):
            assert context().id == "one"
            assert context().trace_headers() == {"traceparent": TRACEPARENT}
        assert Context.current() is None
        async with await anext(taker) as job:
            assert context().trace_headers() == {}
            assert job.headers == {}
    await bus.close()
