"""Events belong to the trace of who published them, and are counted."""

from __future__ import annotations

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.conditions import eventually

from dynbus import Actor, Runtime, Topic, subscribe
from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.testing import run

closed = Topic("conversation.closed", int, namespace="desk")
archived = Topic("conversation.archived", int, namespace="desk")


class Cache(Actor, namespace="desk"):
    @subscribe(closed)
    async def forget(self, event: int) -> None:
        if event < 0:
            raise ValueError("no conversation")
        await archived.publish(event)


class Billing(Actor, namespace="desk"):
    @subscribe(closed, group="billing")
    async def bill(self, event: int) -> None: ...


def ids(span: ReadableSpan) -> tuple[int, int, int | None]:
    assert span.context is not None
    parent = None if span.parent is None else span.parent.span_id
    return span.context.trace_id, span.context.span_id, parent


def test_who_hears_an_event_goes_on_in_the_trace_of_who_published_it() -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(provider, MeterProvider([reader], shutdown_on_exit=False))

    def spans(name: str) -> list[ReadableSpan]:
        return [span for span in exporter.get_finished_spans() if span.name == name]

    def counts() -> dict[str, int]:
        found: dict[str, int] = {}
        data = reader.get_metrics_data()
        for resource in data.resource_metrics if data is not None else ():
            for metric in (one for scope in resource.scope_metrics for one in scope.metrics):
                if metric.name == "dynbus.topic.events":
                    for point in metric.data.data_points:
                        kind = str((point.attributes or {})["dynbus.result"])
                        found[kind] = found.get(kind, 0) + int(getattr(point, "value", 0))
        return found

    async def story() -> None:
        server = MemoryBus()
        bus = await Bus.over(
            BusConfig(), await server.connect(), await server.connect(), telemetry=telemetry
        )
        async with await Runtime.over(bus) as runtime:
            await runtime.start(Cache)
            await runtime.start(Billing)
            with provider.get_tracer("user").start_as_current_span("request"):
                await closed.publish(1, runtime=runtime)
            await eventually(lambda: spans("attempt desk.Billing.bill"))
            await eventually(lambda: spans("attempt desk.Cache.forget"))
            await closed.publish(-1, runtime=runtime)
            await eventually(lambda: counts().get("failed"))

    run(story())

    [request] = spans("request")
    published = spans("publish desk._topic.conversation.closed")[0]
    [archiving] = spans("publish desk._topic.conversation.archived")
    heard, failed = spans("attempt desk.Cache.forget")
    billed = spans("attempt desk.Billing.bill")[0]
    trace, request_id, _ = ids(request)
    assert ids(published)[0] == trace
    assert ids(published)[2] == request_id
    for one in (heard, billed):
        assert (ids(one)[0], ids(one)[2]) == (trace, ids(published)[1])
    assert (ids(archiving)[0], ids(archiving)[2]) == (trace, ids(heard)[1])
    assert "no conversation" in (failed.status.description or "")
    assert counts() == {"published": 3, "heard": 1, "failed": 1}
