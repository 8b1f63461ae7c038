"""What a collector gets: OTLP over gRPC and HTTP, from a process set up by `OTEL_*` variables."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

PROGRAM = """
from dynbus.bus.context import Context
from dynbus.bus.errors import HandlerError
from dynbus.bus.names import EndpointName
from dynbus.bus.telemetry import Telemetry

def call(name, parent, inner, error=None):
    client = telemetry.client_call(name, streaming=True, request_id="request-1", parent=parent)
    server = telemetry.server_call(
        name, "instance-1", client.trace_headers, streaming=True, request_id="request-1"
    )
    token = server.activate()
    inner(Context("request-1", trace_headers=server.trace_headers))
    server.first_item()
    server.items(2)
    server.deactivate(token)
    server.end(error)
    client.end(error)

telemetry = Telemetry.from_environment()
outer, inner = EndpointName("demo", "Outer", "run"), EndpointName("demo", "Inner", "run")
call(outer, None, lambda parent: call(inner, parent, lambda _: None, HandlerError("boom")))
"""


class Collector:
    """What a receiver was sent so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._metrics: list[Metric] = []
        self.resources: list[dict[str, str]] = []

    def take_traces(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        with self._lock:
            for resource in request.resource_spans:
                self._note_resource(resource.resource)
                for scope in resource.scope_spans:
                    self._spans.extend(scope.spans)

    def take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        with self._lock:
            for resource in request.resource_metrics:
                self._note_resource(resource.resource)
                for scope in resource.scope_metrics:
                    self._metrics.extend(scope.metrics)

    def _note_resource(self, resource: Any) -> None:
        self.resources.append({each.key: each.value.string_value for each in resource.attributes})

    @property
    def spans(self) -> dict[str, Span]:
        return {span.name: span for span in self._spans}

    @property
    def metrics(self) -> dict[str, Metric]:
        return {metric.name: metric for metric in self._metrics}


class TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self.collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self.collector.take_traces(request)
        return trace_service_pb2.ExportTraceServiceResponse()


class MetricsService(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self.collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self.collector.take_metrics(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def grpc_receiver(collector: Collector) -> Generator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    # The generated functions have no annotations.
    traces: Any = trace_service_pb2_grpc
    metrics: Any = metrics_service_pb2_grpc
    traces.add_TraceServiceServicer_to_server(TraceService(collector), server)
    metrics.add_MetricsServiceServicer_to_server(MetricsService(collector), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        assert server.stop(grace=1).wait(timeout=5)


@contextmanager
def http_receiver(collector: Collector) -> Generator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["Content-Type"] == "application/x-protobuf"
            if self.path == "/v1/traces":
                collector.take_traces(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            elif self.path == "/v1/metrics":
                collector.take_metrics(
                    metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)
                )
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a request is seen by what the collector holds."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


RECEIVERS = {"grpc": grpc_receiver, "http/protobuf": http_receiver}


def run(program: str, environment: dict[str, str]) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(params=RECEIVERS)
def collector(request: pytest.FixtureRequest) -> Collector:
    """A collector that has got everything that the program sent over one protocol."""
    collector = Collector()
    with RECEIVERS[request.param](collector) as endpoint:
        run(
            PROGRAM,
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                "OTEL_EXPORTER_OTLP_PROTOCOL": request.param,
                "OTEL_SERVICE_NAME": "scenario",
                "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
            },
        )
    return collector


def test_calls_of_any_depth_arrive_as_one_trace(collector: Collector) -> None:
    spans = collector.spans

    chain = [
        "send demo.Outer.run",
        "process demo.Outer.run",
        "send demo.Inner.run",
        "process demo.Inner.run",
    ]
    assert set(spans) == set(chain)
    assert len({span.trace_id for span in spans.values()}) == 1
    assert spans[chain[0]].parent_span_id == b""
    for parent, child in zip(chain, chain[1:], strict=False):
        assert spans[child].parent_span_id == spans[parent].span_id
    assert spans[chain[0]].kind == Span.SPAN_KIND_PRODUCER
    assert spans[chain[1]].kind == Span.SPAN_KIND_CONSUMER


def test_errors_and_stream_events_arrive(collector: Collector) -> None:
    failed = collector.spans["process demo.Inner.run"]
    well = collector.spans["process demo.Outer.run"]

    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert {each.key: each.value.string_value for each in failed.attributes}["error.type"] == (
        "HandlerError"
    )
    assert well.status.code == Status.STATUS_CODE_UNSET
    assert [event.name for event in well.events] == ["first_item"]


def test_metrics_arrive_with_the_resource_of_the_variables(collector: Collector) -> None:
    metrics = collector.metrics

    calls = metrics["dynbus.calls"].sum
    items = metrics["dynbus.stream.items"].sum
    durations = metrics["dynbus.call.duration"].histogram
    assert sum(point.as_int for point in calls.data_points) == 4
    assert sum(point.as_int for point in items.data_points) == 4
    assert sum(point.count for point in durations.data_points) == 4
    assert durations.data_points[0].explicit_bounds[0] == 0.00025
    assert collector.resources
    for resource in collector.resources:
        assert resource["service.name"] == "scenario"
        assert resource["deployment.environment.name"] == "test"


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_an_endpoint_given_to_configure_wins_over_the_variables(protocol: str) -> None:
    collector = Collector()

    with RECEIVERS[protocol](collector) as endpoint:
        run(
            "from dynbus.bus.telemetry import configure\n"
            f"shutdown = configure(service_name='named', otlp_endpoint={endpoint!r}, "
            "instance_id='instance-1')\n" + PROGRAM + "assert shutdown.shutdown()\n",
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
                "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            },
        )

    assert len(collector.spans) == 4
    assert "dynbus.calls" in collector.metrics
    assert collector.resources[0]["service.name"] == "named"
    assert collector.resources[0]["service.instance.id"] == "instance-1"


def test_an_unsampled_trace_is_not_exported_and_its_calls_are_counted() -> None:
    collector = Collector()

    with grpc_receiver(collector) as endpoint:
        run(
            PROGRAM,
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": "0",
            },
        )

    assert collector.spans == {}
    assert "dynbus.calls" in collector.metrics
