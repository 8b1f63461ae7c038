"""What a collector gets: OTLP over gRPC and HTTP, from a process set up by `OTEL_*` variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from dynbus.bus.nats.server_process import RunningServer

from .otlp import RECEIVERS, Collector, grpc_receiver
from .project import project_folder

PROGRAM = """
from dynbus.bus.context import Context
from dynbus.bus.errors import HandlerError
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.telemetry.telemetry import Telemetry

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


def run(program: str, environment: dict[str, str]) -> None:
    assert output_of(program, environment) == ""


def output_of(program: str, environment: dict[str, str]) -> str:
    """What a program that ends well has logged."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module", params=RECEIVERS)
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
            "from dynbus.bus.telemetry.telemetry import configure_telemetry\n"
            f"shutdown = configure_telemetry(service_name='named', otlp_endpoint={endpoint!r}, "
            "instance_id='instance-1')\n" + PROGRAM + "assert shutdown.shutdown()\n",
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
                "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            },
        )

    assert len(collector.spans) == 4
    assert "dynbus.calls" in collector.metrics
    outside = collector.resource_of("send demo.Outer.run")
    assert outside["service.name"] == "named"
    assert outside["service.instance.id"] == "instance-1"


EXPORTING = """
import time
from opentelemetry import metrics, trace
from dynbus.bus.telemetry.telemetry import Telemetry
Telemetry.from_environment()
metrics.get_meter("t").create_counter("jobs").add(1)
for number in range(5):
    trace.get_tracer("t").start_span(f"span {number}").end()
    trace.get_tracer_provider().force_flush()
    metrics.get_meter_provider().force_flush()
"""


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_of_a_receiver_that_takes_traces_only_one_line_tells_how_to_turn_metrics_off(
    protocol: str,
) -> None:
    collector = Collector()

    with RECEIVERS[protocol](collector, takes_metrics=False) as endpoint:
        output = output_of(
            EXPORTING,
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
                # One that is due before the reader is registered tells of that, too.
                "OTEL_METRIC_EXPORT_INTERVAL": "1000",
            },
        )

    (line,) = output.splitlines()
    assert line.startswith("the receiver takes no metrics (Failed to export metrics")
    assert line.endswith("OTEL_METRICS_EXPORTER=none turns metrics off")
    assert len(collector.spans) == 5


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_of_a_receiver_that_is_down_one_line_for_each_signal_tells(protocol: str) -> None:
    output = output_of(
        EXPORTING,
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            # One that is due before the reader is registered tells of that, too.
            "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        },
    )

    told = sorted(line.partition(" (")[0] for line in output.splitlines())
    assert told == ["nobody takes the metrics", "nobody takes the traces"]


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


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(
            ["--in-process"],
            marks=pytest.mark.nightly(
                "tests/bus/test_telemetry_sdk.py::test_the_spans_of_an_instance_are_those_of_a_service_of_its_component"
            ),
        ),
    ],
)
def test_three_actors_and_their_caller_make_one_trace_with_a_service_for_each(
    options: list[str], nats_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Path(__file__).parents[2] / "examples" / "pipeline" / "actors.py"
    collector = Collector()
    with grpc_receiver(collector) as endpoint, project_folder(tmp_path) as project:
        project.url = nats_server.url
        (tmp_path / "actors.py").write_text(example.read_text())
        run = project.start_ready("actors.py", "--otlp-endpoint", endpoint, *options, instances=3)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        call = project.dynbus_in_a_process("call", "pipeline.Numberer.number", '{"text": "a b"}')
        run.terminate()
        run.wait(60)

    order = [
        "send pipeline.Numberer.number",
        "process pipeline.Numberer.number",
        "send pipeline.Shouter.shout",
        "process pipeline.Shouter.shout",
        "send pipeline.Splitter.split",
        "process pipeline.Splitter.split",
    ]
    services = ["dynbus", "Numberer", "Numberer", "Shouter", "Shouter", "Splitter"]
    assert call.returncode == 0, call.stderr
    assert [collector.resource_of(span)["service.name"] for span in order] == services
    for span in order[1::2]:
        resource = collector.resource_of(span)
        attributes = {e.key: e.value.string_value for e in collector.spans[span].attributes}
        assert resource["service.namespace"] == "pipeline"
        assert resource["service.instance.id"] == attributes["dynbus.instance_id"]
    assert set(order) == set(collector.spans)
    assert len({span.trace_id for span in collector.spans.values()}) == 1
    for parent, child in zip(order, order[1:], strict=False):
        assert collector.spans[child].parent_span_id == collector.spans[parent].span_id
    assert "dynbus.call.duration" in collector.metrics
