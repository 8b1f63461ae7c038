"""A real OTLP receiver, over gRPC and over HTTP, that keeps what it gets."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Generator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """What a receiver was sent so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._services: dict[bytes, dict[str, str]] = {}
        self._metrics: list[Metric] = []
        self.resources: list[dict[str, str]] = []

    def take_traces(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        with self._lock:
            for resource in request.resource_spans:
                attributes = self._note_resource(resource.resource)
                for scope in resource.scope_spans:
                    self._spans.extend(scope.spans)
                    self._services.update({span.span_id: attributes for span in scope.spans})

    def take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        with self._lock:
            for resource in request.resource_metrics:
                self._note_resource(resource.resource)
                for scope in resource.scope_metrics:
                    self._metrics.extend(scope.metrics)

    def _note_resource(self, resource: Any) -> dict[str, str]:
        attributes = {each.key: each.value.string_value for each in resource.attributes}
        self.resources.append(attributes)
        return attributes

    @property
    def spans(self) -> dict[str, Span]:
        return {span.name: span for span in self._spans}

    def resource_of(self, span: str) -> dict[str, str]:
        """The resource that a span of this name came with."""
        return self._services[self.spans[span].span_id]

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
def grpc_receiver(collector: Collector, *, takes_metrics: bool = True) -> Generator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    # The generated functions have no annotations.
    traces: Any = trace_service_pb2_grpc
    metrics: Any = metrics_service_pb2_grpc
    traces.add_TraceServiceServicer_to_server(TraceService(collector), server)
    if takes_metrics:
        metrics.add_MetricsServiceServicer_to_server(MetricsService(collector), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        assert server.stop(grace=1).wait(timeout=60)


@contextmanager
def http_receiver(collector: Collector, *, takes_metrics: bool = True) -> Generator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["Content-Type"] == "application/x-protobuf"
            if self.path == "/v1/traces":
                collector.take_traces(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            elif self.path == "/v1/metrics" and takes_metrics:
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
        thread.join(60)
        server.server_close()


RECEIVERS = {"grpc": grpc_receiver, "http/protobuf": http_receiver}
