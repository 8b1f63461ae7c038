"""Spans and metrics of calls, against the SDK's in-memory exporters."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    HistogramDataPoint,
    InMemoryMetricReader,
    NumberDataPoint,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, DEFAULT_ON, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from dynbus.bus.context import Context
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import ConfigError, DynbusError, HandlerError
from dynbus.bus.extras import how_to_install
from dynbus.bus.protocol.headers import encode
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.telemetry.sdk import exporters, is_requested
from dynbus.bus.telemetry.telemetry import MAX_ENDPOINTS, CallObservation, Telemetry
from dynbus.bus.telemetry.trace_context import trace_fields

GENERATE = EndpointName("demo", "Shouter", "generate")
TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"


class Recorder:
    """Telemetry whose spans and measurements can be read back."""

    def __init__(self, sampler: Sampler = DEFAULT_ON) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.telemetry = Telemetry(self.provider, self.meters)

    def client(self, parent: Context | None = None) -> CallObservation:
        return self.telemetry.client_call(
            GENERATE, streaming=True, request_id="request-1", parent=parent
        )

    def server(self, headers: Mapping[str, str]) -> CallObservation:
        return self.telemetry.server_call(
            GENERATE, "instance-1", trace_fields(headers), streaming=True, request_id="request-1"
        )

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def points(self, name: str) -> list[Point]:
        found = self.reader.get_metrics_data()
        assert found is not None
        return [
            Point.of(point)
            for resource in found.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@dataclass
class Point:
    """One measurement: a counter's value, or a histogram's count and sum."""

    labels: dict[str, object]
    value: float
    count: int = 0

    @classmethod
    def of(cls, point: object) -> Point:
        if isinstance(point, HistogramDataPoint):
            return cls(dict(point.attributes or {}), point.sum, point.count)
        assert isinstance(point, NumberDataPoint)
        return cls(dict(point.attributes or {}), point.value)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def events_of(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def test_a_call_is_a_send_span_with_a_process_span_as_its_child(recorder: Recorder) -> None:
    client = recorder.client()
    server = recorder.server(client.trace_headers)
    server.end()
    client.end()

    process, send = recorder.spans()
    assert (send.name, send.kind) == ("send demo.Shouter.generate", SpanKind.PRODUCER)
    assert (process.name, process.kind) == ("process demo.Shouter.generate", SpanKind.CONSUMER)
    assert parent_of(send) is None
    assert parent_of(process) == id_of(send)


def test_spans_carry_the_messaging_attributes(recorder: Recorder) -> None:
    recorder.server({}).end()
    recorder.client().end()

    process, send = recorder.spans()
    assert attributes_of(send) == {
        "messaging.system": "nats",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "demo.Shouter.generate",
        "messaging.message.id": "request-1",
        "dynbus.streaming": True,
    }
    assert attributes_of(process) == {
        "messaging.system": "nats",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "demo.Shouter.generate",
        "messaging.consumer.group.name": "Shouter",
        "messaging.message.id": "request-1",
        "dynbus.instance_id": "instance-1",
        "dynbus.streaming": True,
    }


def test_sub_calls_of_an_active_handler_are_children_of_its_span(recorder: Recorder) -> None:
    server = recorder.server({})
    handler = Context("request-1", trace_headers=server.trace_headers)

    token = server.activate()
    with recorder.provider.get_tracer("user").start_as_current_span("user"):
        recorder.client(handler).end()
    server.deactivate(token)
    server.end()

    send, user, process = recorder.spans()
    assert parent_of(send) == id_of(user)
    assert parent_of(user) == id_of(process)
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_sub_call_without_a_current_span_follows_its_context(recorder: Recorder) -> None:
    recorder.client(Context(trace_headers={"traceparent": SAMPLED})).end()

    (send,) = recorder.spans()
    assert send.context is not None
    assert f"{send.context.trace_id:032x}" == TRACE
    assert f"{parent_of(send):016x}" == "b7ad6b7169203331"


def test_in_a_task_shared_by_requests_the_given_parent_wins(recorder: Recorder) -> None:
    other = Context(trace_headers={"traceparent": SAMPLED})

    with recorder.provider.get_tracer("user").start_as_current_span("another request"):
        recorder.client(other).end()

    send = recorder.spans()[0]
    assert send.context is not None
    assert f"{send.context.trace_id:032x}" == TRACE


def test_a_call_is_no_child_of_what_was_current_where_its_instance_was_started(
    recorder: Recorder,
) -> None:
    with recorder.provider.get_tracer("user").start_as_current_span("main"):
        recorder.server({}).end()

    assert parent_of(recorder.spans()[0]) is None


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "garbage",
        f"ff-{TRACE}-b7ad6b7169203331-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-b7ad6b7169203331-01",
        f"{SAMPLED}-more",
        "00-" + "a" * 100_000,
        "00-é" + SAMPLED,
    ],
)
def test_a_malformed_traceparent_begins_a_new_trace(recorder: Recorder, traceparent: str) -> None:
    recorder.server({"traceparent": traceparent}).end()

    assert parent_of(recorder.spans()[0]) is None


def test_a_traceparent_of_a_later_version_is_understood(recorder: Recorder) -> None:
    recorder.server({"traceparent": f"01{SAMPLED[2:]}-more"}).end()

    assert f"{parent_of(recorder.spans()[0]):016x}" == "b7ad6b7169203331"


def test_header_names_in_http_spelling_are_understood(recorder: Recorder) -> None:
    server = recorder.server({"Traceparent": SAMPLED, "Tracestate": "a=b"})
    server.end()

    assert f"{parent_of(recorder.spans()[0]):016x}" == "b7ad6b7169203331"
    assert server.trace_headers["tracestate"] == "a=b"


def test_state_and_baggage_reach_the_handler_and_its_sub_calls(recorder: Recorder) -> None:
    incoming = {"traceparent": SAMPLED, "tracestate": "vendor=1", "baggage": "tenant=a"}
    server = recorder.server(incoming)
    handler = Context(trace_headers=server.trace_headers)

    token = server.activate()
    seen = baggage.get_baggage("tenant")
    sub_call = recorder.client(handler)
    server.deactivate(token)

    assert seen == "a"
    assert sub_call.trace_headers["tracestate"] == "vendor=1"
    assert sub_call.trace_headers["baggage"] == "tenant=a"


def test_baggage_that_a_handler_adds_is_sent_on(recorder: Recorder) -> None:
    token = context.attach(baggage.set_baggage("tenant", "ä b"))
    sent = recorder.client().trace_headers
    context.detach(token)

    assert sent["baggage"] == "tenant=%C3%A4+b"


@pytest.mark.parametrize("sampler", [DEFAULT_ON, ALWAYS_ON, ALWAYS_OFF])
def test_what_a_caller_puts_into_trace_headers_cannot_break_a_sub_call(sampler: Sampler) -> None:
    recorder = Recorder(sampler)
    hostile = {"traceparent": UNSAMPLED, "tracestate": "a=\n�", "baggage": "ü=\x00;" * 5000}

    server = recorder.server(hostile)
    sub_call = recorder.client(Context(trace_headers=server.trace_headers))

    assert encode(sub_call.trace_headers)


def test_an_error_is_recorded_with_its_code(recorder: Recorder) -> None:
    recorder.client().end(HandlerError("boom"))

    (send,) = recorder.spans()
    assert attributes_of(send)["error.type"] == "HandlerError"
    assert send.status.status_code is StatusCode.ERROR
    assert send.status.description == "boom"
    assert events_of(send) == ["exception"]


def test_an_exception_of_a_handler_is_a_handler_error(recorder: Recorder) -> None:
    recorder.server({}).end(ZeroDivisionError("division by zero"))

    assert attributes_of(recorder.spans()[0])["error.type"] == "HandlerError"


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
def test_cancellation_is_an_event_and_no_error(recorder: Recorder, error: BaseException) -> None:
    server = recorder.server({})
    server.cancelled()
    server.cancelled()
    server.end(error)

    (process,) = recorder.spans()
    assert events_of(process) == ["cancelled"]
    assert process.status.status_code is StatusCode.UNSET
    assert "error.type" not in attributes_of(process)


def test_a_stream_records_its_first_item_and_how_many(recorder: Recorder) -> None:
    client = recorder.client()
    client.first_item()
    client.items(1)
    client.first_item()
    client.items(2)
    client.end()

    (send,) = recorder.spans()
    (first,) = recorder.points("dynbus.call.time_to_first_item")
    (items,) = recorder.points("dynbus.stream.items")
    assert events_of(send) == ["first_item"]
    assert attributes_of(send)["dynbus.stream.items"] == 3
    assert first.count == 1
    assert items.value == 3


def test_a_call_ends_once(recorder: Recorder) -> None:
    client = recorder.client()
    client.end()
    client.end(HandlerError("too late"))

    (send,) = recorder.spans()
    (calls,) = recorder.points("dynbus.calls")
    assert send.status.status_code is StatusCode.UNSET
    assert calls.value == 1


def test_calls_and_durations_are_counted_by_endpoint_side_and_code(recorder: Recorder) -> None:
    recorder.client().end()
    recorder.server({}).end(HandlerError())

    labels = {
        "dynbus.namespace": "demo",
        "dynbus.component": "Shouter",
        "dynbus.endpoint": "generate",
    }
    expected = [
        labels | {"dynbus.side": "client"},
        labels | {"dynbus.side": "server", "error.type": "HandlerError"},
    ]
    durations = recorder.points("dynbus.call.duration")
    assert [point.labels for point in recorder.points("dynbus.calls")] == expected
    assert [point.labels for point in durations] == expected
    assert [point.count for point in durations] == [1, 1]
    assert all(0 <= point.value < 10 for point in durations)


def test_no_label_is_taken_from_a_message(recorder: Recorder) -> None:
    class Strange(DynbusError):
        code = "code-from-the-wire"

    recorder.client().end(Strange())

    (point,) = recorder.points("dynbus.calls")
    assert point.labels["error.type"] == "_OTHER"
    assert not any("wire" in str(value) for value in point.labels.values())


def test_however_many_endpoints_are_called_the_labels_stay_bounded(recorder: Recorder) -> None:
    for number in range(MAX_ENDPOINTS + 100):
        name = EndpointName("demo", "Shouter", f"e{number}")
        recorder.telemetry.client_call(name, streaming=False, request_id="", parent=None).end()

    points = recorder.points("dynbus.calls")
    (rest,) = [point for point in points if point.labels["dynbus.endpoint"] == "_OTHER"]
    assert len(points) == MAX_ENDPOINTS + 1
    assert rest.value == 100


def test_however_many_instances_come_and_go_an_endpoint_keeps_its_labels(
    recorder: Recorder,
) -> None:
    for number in range(MAX_ENDPOINTS + 100):
        recorder.telemetry.server_call(
            GENERATE, f"i{number}", {}, streaming=False, request_id=""
        ).end()

    (calls,) = recorder.points("dynbus.calls")
    assert calls.labels["dynbus.endpoint"] == "generate"
    assert calls.value == MAX_ENDPOINTS + 100


def test_what_happens_outside_of_calls_is_counted(recorder: Recorder) -> None:
    telemetry = recorder.telemetry

    telemetry.credit_stall(GENERATE, 1.5)
    telemetry.reconnect("data")
    for _ in range(3):
        telemetry.drop(DropReason.MALFORMED)
    telemetry.cancellation(GENERATE, "stop")
    telemetry.in_flight(GENERATE, 1)
    telemetry.in_flight(GENERATE, 1)
    telemetry.in_flight(GENERATE, -1)

    (stall,) = recorder.points("dynbus.credit.stall.duration")
    (reconnects,) = recorder.points("dynbus.reconnects")
    (drops,) = recorder.points("dynbus.drops")
    (cancellations,) = recorder.points("dynbus.cancellations")
    (in_flight,) = recorder.points("dynbus.calls.in_flight")
    assert (stall.count, stall.value) == (1, 1.5)
    assert (reconnects.value, reconnects.labels) == (1, {"dynbus.connection": "data"})
    assert (drops.value, drops.labels) == (3, {"dynbus.reason": "malformed"})
    assert cancellations.labels["dynbus.kind"] == "stop"
    assert in_flight.value == 1


def test_a_call_of_an_unsampled_trace_has_no_span_and_stays_unsampled() -> None:
    recorder = Recorder()

    server = recorder.server({"traceparent": UNSAMPLED})
    token = server.activate()
    recorder.provider.get_tracer("user").start_span("user").end()
    client = recorder.client(Context(trace_headers=server.trace_headers))
    server.deactivate(token)
    client.end()
    server.end()

    assert recorder.spans() == []
    assert client.trace_headers["traceparent"] == UNSAMPLED
    assert len(recorder.points("dynbus.calls")) == 2


def test_without_spans_the_trace_headers_pass_through_unchanged() -> None:
    telemetry = Telemetry(None, None)
    incoming = {"traceparent": SAMPLED, "tracestate": "a=b", "baggage": "c=d", "Other": "x"}
    expected = {"traceparent": SAMPLED, "tracestate": "a=b", "baggage": "c=d"}

    server = telemetry.server_call(
        GENERATE, "i", trace_fields(incoming), streaming=False, request_id=""
    )
    parent = Context(trace_headers=server.trace_headers)
    client = telemetry.client_call(GENERATE, streaming=False, request_id="", parent=parent)
    server.deactivate(server.activate())
    server.end()

    assert server.trace_headers == expected
    assert client.trace_headers == expected


@pytest.mark.parametrize(
    ("environment", "traces", "metrics"),
    [
        ({}, (), ()),
        ({"OTEL_TRACES_EXPORTER": "none"}, (), ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, (), ()),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"},
            ("otlp_proto_grpc",),
            ("otlp_proto_grpc",),
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"},
            ("otlp_proto_http",),
            ("otlp_proto_http",),
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc",
            },
            ("otlp_proto_http",),
            ("otlp_proto_grpc",),
        ),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"},
            ("otlp_proto_http",),
            (),
        ),
        ({"OTEL_METRICS_EXPORTER": "console, otlp"}, (), ("console", "otlp_proto_grpc")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, (), ()),
    ],
)
def test_the_standard_variables_choose_the_exporters(
    environment: dict[str, str], traces: tuple[str, ...], metrics: tuple[str, ...]
) -> None:
    assert exporters("traces", environment) == traces
    assert exporters("metrics", environment) == metrics
    assert is_requested(environment) == bool(traces or metrics)


def test_an_unknown_protocol_is_refused_by_name() -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
    }

    with pytest.raises(ConfigError, match="'http/json' is not supported: use one of grpc"):
        exporters("traces", environment)


def python(code: str, **environment: str) -> str:
    """Run `code` in an interpreter of its own, as providers are global; returns its output."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=clean | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_when_nothing_asks_for_telemetry_nothing_of_it_is_imported() -> None:
    output = python(
        "import sys; from dynbus.bus.telemetry.telemetry import Telemetry; "
        "print(Telemetry.from_environment(), "
        "[name for name in sys.modules if name.startswith(('opentelemetry', 'structlog'))])"
    )

    assert output.strip() == "None []"


def test_an_sdk_that_the_program_has_set_up_is_used() -> None:
    output = python(
        "from opentelemetry import trace; from opentelemetry.sdk.trace import TracerProvider; "
        "trace.set_tracer_provider(TracerProvider()); "
        "from dynbus.bus.telemetry.telemetry import Telemetry; "
        "from dynbus.bus.protocol.names import EndpointName; "
        "found = Telemetry.from_environment(); assert found is Telemetry.from_environment(); "
        "call = found.client_call(EndpointName('a', 'b', 'c'), "
        "streaming=False, request_id='', parent=None); "
        "print(int(call.trace_headers['traceparent'][-2:], 16) & 1)"
    )

    assert output.strip() == "1"


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_SAMPLER": "always_off", "OTEL_METRICS_EXPORTER": "none"},
    ],
)
def test_a_disabled_sdk_costs_as_little_as_none(environment: dict[str, str]) -> None:
    output = python(
        "from dynbus.bus.telemetry.telemetry import Telemetry; "
        "print(Telemetry.from_environment(), Telemetry.from_environment())",
        OTEL_TRACES_EXPORTER="console",
        **environment,
    )

    assert output.strip() == "None None"


def test_a_missing_extra_is_named_by_configure_and_does_not_stop_a_runtime() -> None:
    output = python(
        "import sys; sys.modules['opentelemetry.sdk.resources'] = None\n"
        "from dynbus.bus.errors import ConfigError\n"
        "from dynbus.bus.telemetry.telemetry import Telemetry, configure_telemetry\n"
        "print(Telemetry.from_environment())\n"
        "try:\n"
        "    configure_telemetry(service_name='x')\n"
        "except ConfigError as error:\n"
        "    print(error)\n",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1",
    )

    assert "None" in output
    assert f"telemetry needs an extra: {how_to_install('otlp')}" in output


def test_a_collector_that_is_gone_delays_the_end_no_longer_than_allowed() -> None:
    output = python(
        "import time\n"
        "from dynbus.bus.telemetry.telemetry import Telemetry, configure_telemetry\n"
        "from dynbus.bus.protocol.names import EndpointName\n"
        "shutdown = configure_telemetry(service_name='x', otlp_endpoint='127.0.0.1:1')\n"
        "telemetry = Telemetry.from_environment()\n"
        "telemetry.client_call(EndpointName('a', 'b', 'c'), "
        "streaming=False, request_id='', parent=None).end()\n"
        "began = time.monotonic()\n"
        "done = shutdown.shutdown(timeout=0.5)\n"
        "print('took', time.monotonic() - began, 'done', done)\n",
        OTEL_EXPORTER_OTLP_TIMEOUT="600",
    )

    took = float(output.split("took ")[1].split()[0])
    # It would try for 600 s.
    assert took < 60.0
    assert "done False" in output
