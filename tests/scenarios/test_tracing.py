"""One trace over any depth of calls, with errors and cancellation recorded where they arose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dynbus import Actor, DynbusError, HandlerError, call_options, context, depends, handler
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.testing import TestKit, run


class Leaf(Actor, namespace="trace"):
    @handler
    async def count(self, upto: int) -> AsyncGenerator[int, None]:
        for number in range(upto):
            yield number

    @handler
    async def fail(self) -> None:
        raise ValueError("a leaf fell")

    @handler
    async def forever(self) -> AsyncGenerator[int, None]:
        while True:
            await asyncio.sleep(0.1)
            yield 1


class Middle(Actor, namespace="trace"):
    leaf = depends(Leaf)

    @handler
    async def total(self, upto: int) -> int:
        return sum([number async for number in self.leaf.count(upto)])

    @handler
    async def fail(self) -> None:
        await self.leaf.fail()


class Root(Actor, namespace="trace"):
    middle = depends(Middle)

    @handler
    async def total(self, upto: int) -> dict[str, str | int]:
        headers = context().trace_headers()
        return {
            "total": await self.middle.total(upto),
            "traceparent": headers.get("traceparent", ""),
            "id": context().id,
        }

    @handler
    async def fail(self) -> None:
        await self.middle.fail()


class Observed:
    """A kit whose spans and metrics are kept."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        meters = MeterProvider(metric_readers=[self.reader])
        self.kit = TestKit(telemetry=Telemetry(tracers, meters))

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def span_id(span: ReadableSpan) -> int:
    identity = span.get_span_context()
    assert identity is not None
    return identity.span_id


def test_three_hops_make_one_trace_of_six_spans() -> None:
    observed = Observed()

    async def story() -> dict[str, str | int]:
        async with observed.kit as kit:
            for actor in (Leaf, Middle, Root):
                await kit.start(actor)
            with call_options(request_id="request-1"):
                return await kit.client(Root).total(4)

    answer = run(story())

    spans = observed.spans()
    order = [
        "send trace.Root.total",
        "process trace.Root.total",
        "send trace.Middle.total",
        "process trace.Middle.total",
        "send trace.Leaf.count",
        "process trace.Leaf.count",
    ]
    assert set(spans) == set(order)
    assert len({span.context.trace_id for span in spans.values() if span.context}) == 1
    for parent, child in zip(order, order[1:], strict=False):
        link = spans[child].parent
        assert link is not None
        assert link.span_id == span_id(spans[parent])
    assert spans[order[0]].kind is SpanKind.PRODUCER
    assert spans[order[1]].kind is SpanKind.CONSUMER
    assert answer["total"] == 6
    assert answer["id"] == "request-1"
    assert f"{span_id(spans[order[1]]):016x}" in str(answer["traceparent"])
    attributes = spans[order[5]].attributes or {}
    assert attributes["messaging.system"] == "nats"
    assert attributes["dynbus.stream.items"] == 4


def test_an_error_is_recorded_on_every_hop_that_it_passes() -> None:
    observed = Observed()

    async def story() -> DynbusError:
        async with observed.kit as kit:
            for actor in (Leaf, Middle, Root):
                await kit.start(actor)
            with pytest.raises(HandlerError) as caught:
                await kit.client(Root).fail()
            return caught.value

    error = run(story())

    spans = observed.spans()
    assert len(spans) == 6
    for span in spans.values():
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "HandlerError"
    assert error.hop.startswith("trace.Leaf.fail@")


def test_a_stream_that_its_reader_leaves_is_cancelled_and_no_error() -> None:
    observed = Observed()

    async def story() -> None:
        async with observed.kit as kit:
            await kit.start(Leaf)
            async for _ in kit.client(Leaf).forever():
                break
            await asyncio.sleep(3.0)  # virtual: the far side is killed a second later

    run(story())

    span = observed.spans()["process trace.Leaf.forever"]
    assert "cancelled" in [event.name for event in span.events]
    assert span.status.status_code is not StatusCode.ERROR


def test_calls_items_and_latency_are_counted_with_bounded_labels() -> None:
    observed = Observed()

    async def story() -> None:
        async with observed.kit as kit:
            await kit.start(Leaf)
            for _ in range(3):
                assert [n async for n in kit.client(Leaf).count(5)] == [0, 1, 2, 3, 4]

    run(story())

    data = observed.reader.get_metrics_data()
    assert data is not None
    points: dict[tuple[str, str], Any] = {
        (metric.name, str((point.attributes or {}).get("dynbus.side", ""))): point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    for side in ("client", "server"):
        assert points["dynbus.calls", side].value == 3
        assert points["dynbus.stream.items", side].value == 15
        assert points["dynbus.calls.in_flight", side].value == 0
        assert points["dynbus.call.duration", side].count == 3
        assert points["dynbus.call.time_to_first_item", side].count == 3
    labels: set[str] = set()
    for point in points.values():
        labels.update(point.attributes)
    assert labels == {"dynbus.namespace", "dynbus.component", "dynbus.endpoint", "dynbus.side"}
