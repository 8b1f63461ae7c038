"""The SDK is set up as asked, and its end is bounded.

Which exporters the variables choose, and what costs nothing, is in `test_telemetry.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    DEFAULT_OFF,
    DEFAULT_ON,
    ParentBased,
    Sampler,
    TraceIdRatioBased,
)
from opentelemetry.trace import NoOpTracerProvider

from dynbus.bus.telemetry.sdk import Shutdown, exporters, leaves_unsampled


def test_an_end_without_steps_is_done_and_starts_no_thread() -> None:
    shutdown = Shutdown([])

    assert shutdown.shutdown(timeout=0.0)


def test_the_steps_run_in_order_also_after_one_that_raises() -> None:
    ran: list[str] = []

    def fail() -> None:
        ran.append("fails")
        raise RuntimeError("collector is gone")

    shutdown = Shutdown([lambda: ran.append("first"), fail, lambda: ran.append("last")])
    before = list(ran)
    done = shutdown.shutdown()

    assert (before, done) == ([], True)
    assert ran == ["first", "fails", "last"]


def test_a_second_call_runs_nothing_again() -> None:
    ran: list[str] = []
    shutdown = Shutdown([lambda: ran.append("step")])

    assert shutdown.shutdown()
    assert shutdown.shutdown()
    assert ran == ["step"]


def test_a_step_that_hangs_is_left_behind_in_time() -> None:
    release = threading.Event()
    shutdown = Shutdown([lambda: release.wait(600)])
    began = time.monotonic()

    first = shutdown.shutdown(timeout=0.1)
    took = time.monotonic() - began
    release.set()
    second = shutdown.shutdown(timeout=60.0)

    assert (first, second) == (False, True)
    assert took < 60.0


@pytest.mark.parametrize(
    ("sampler", "never"),
    [
        (DEFAULT_ON, True),
        (DEFAULT_OFF, True),
        (ParentBased(TraceIdRatioBased(0.5)), True),
        (ParentBased(ALWAYS_ON, remote_parent_not_sampled=ALWAYS_ON), False),
        (ParentBased(ALWAYS_ON, local_parent_not_sampled=ALWAYS_ON), False),
        (ALWAYS_ON, False),
        (ALWAYS_OFF, False),
        (TraceIdRatioBased(0.5), False),
    ],
)
def test_only_a_sampler_that_follows_its_parent_leaves_calls_unsampled(
    sampler: Sampler, never: bool
) -> None:
    assert leaves_unsampled(TracerProvider(sampler=sampler, shutdown_on_exit=False)) is never


def test_a_provider_without_a_sampler_is_taken_to_sample() -> None:
    assert not leaves_unsampled(NoOpTracerProvider())


@pytest.mark.parametrize(
    ("endpoint", "exporter"),
    [
        ("http://c:4317", "otlp_proto_grpc"),
        ("http://c:4318", "otlp_proto_http"),
        ("http://c:4318/v1/traces", "otlp_proto_http"),
        ("http://[::1]:4318", "otlp_proto_http"),
        ("http://c:43180", "otlp_proto_grpc"),
        ("http://4318", "otlp_proto_grpc"),
    ],
)
def test_the_port_of_the_endpoint_tells_the_protocol(endpoint: str, exporter: str) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other:1"}

    assert exporters("traces", variables, otlp_endpoint=endpoint) == (exporter,)


def test_a_signal_that_is_switched_off_stays_off_with_an_endpoint() -> None:
    variables = {"OTEL_TRACES_EXPORTER": " none ", "OTEL_METRICS_EXPORTER": "otlp,none"}

    assert exporters("traces", variables, otlp_endpoint="http://c:4317") == ()
    assert exporters("metrics", variables, otlp_endpoint="http://c:4317") == ()


def python(code: str, **environment: str) -> str:
    """Run `code` in an interpreter of its own, as providers are global; returns its output."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=clean | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


CONFIGURE = """
from dynbus.bus.telemetry.sdk import configure_telemetry, installed, providers
shutdown = configure_telemetry(service_name="svc", instance_id="i1", {arguments})
"""


def test_a_signal_that_nothing_asks_for_gets_no_provider() -> None:
    output = python(
        CONFIGURE.format(arguments="")
        + "print(installed(), providers(), shutdown.shutdown(timeout=0.0))"
    )

    assert output.strip() == "(False, False) (None, None) True"


def test_the_resource_names_the_service_unless_the_variables_do() -> None:
    code = CONFIGURE.format(arguments="") + (
        "attributes = providers()[0].resource.attributes\n"
        "print(attributes['service.name'], attributes['service.instance.id'])\n"
        "shutdown.shutdown()\n"
    )

    ours = python(code, OTEL_TRACES_EXPORTER="console")
    theirs = python(
        code, OTEL_TRACES_EXPORTER="console", OTEL_RESOURCE_ATTRIBUTES="service.name=other"
    )

    assert (ours.strip(), theirs.strip()) == ("svc i1", "other i1")


SPANS = """
import json
from opentelemetry import trace
from dynbus.bus.context import Context, inside_instance
from dynbus.bus.protocol.names import EndpointName, InstanceName
from dynbus.bus.telemetry.telemetry import Telemetry
endpoint = EndpointName("demo", "Inner", "run")
telemetry = Telemetry.from_environment()
telemetry.client_call(endpoint, streaming=False, request_id="r", parent=None).end()
with inside_instance(InstanceName("demo", "Outer", "o1")):
    telemetry.client_call(endpoint, streaming=False, request_id="r", parent=None).end()
telemetry.server_call(endpoint, "i2", {}, streaming=False, request_id="r").end()
trace.get_tracer_provider().force_flush()
"""


def services(*setup: str, **environment: str) -> list[tuple[str, str, str, str]]:
    """Of each span: its name, and name, namespace and instance of its service."""
    output = python(
        "\n".join(setup) + SPANS,
        OTEL_TRACES_EXPORTER="console",
        OTEL_METRICS_EXPORTER="none",
        **environment,
    )
    found: list[tuple[str, str, str, str]] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(output):
        span, at = decoder.raw_decode(output, at)
        at += len(output[at:]) - len(output[at:].lstrip())
        given = span["resource"]["attributes"]
        name, namespace, instance = (
            str(given.get(f"service.{key}", "")) for key in ("name", "namespace", "instance.id")
        )
        found.append((span["name"].partition(" ")[0], name, namespace, instance))
    return found


def test_the_spans_of_an_instance_are_those_of_a_service_of_its_component() -> None:
    (send, *of_instances) = services()

    assert send[:3] == ("send", "dynbus", "")
    assert send[3]
    assert of_instances == [("send", "Outer", "demo", "o1"), ("process", "Inner", "demo", "i2")]


def test_a_service_that_the_variables_name_is_that_of_every_span() -> None:
    named = services(OTEL_SERVICE_NAME="mine", OTEL_RESOURCE_ATTRIBUTES="service.namespace=all")

    assert [each[:3] for each in named] == [
        ("send", "mine", "all"),
        ("send", "mine", "all"),
        ("process", "mine", "all"),
    ]
    assert [each[3] for each in named[1:]] == ["o1", "i2"]


def test_of_a_provider_that_the_program_has_installed_the_resource_stays_for_instances() -> None:
    named = services(
        "from opentelemetry import trace",
        "from opentelemetry.sdk.resources import Resource",
        "from opentelemetry.sdk.trace import TracerProvider",
        "from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor",
        "mine = TracerProvider(resource=Resource({'service.name': 'mine'}))",
        "mine.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))",
        "trace.set_tracer_provider(mine)",
    )

    assert [each[1:] for each in named] == [("mine", "", "")] * 3


def test_a_provider_that_the_program_has_installed_stays() -> None:
    output = python(
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "mine = TracerProvider()\n"
        "trace.set_tracer_provider(mine)\n"
        + CONFIGURE.format(arguments="")
        + "print(providers()[0] is mine)\n",
        OTEL_TRACES_EXPORTER="console",
    )

    assert "is set up already" in output
    assert output.splitlines()[0] == "True"


def test_an_exporter_that_is_not_installed_is_named_with_its_remedy() -> None:
    output = python(
        "from dynbus.bus.errors import ConfigError\n"
        "from dynbus.bus.telemetry.sdk import configure_telemetry\n"
        "try:\n"
        "    configure_telemetry(service_name='x')\n"
        "except ConfigError as error:\n"
        "    print(error)\n",
        OTEL_TRACES_EXPORTER="zipkin",
    )

    assert "OTEL_TRACES_EXPORTER 'zipkin' is not installed" in output


def test_prometheus_figures_are_collected_once_however_often_they_are_asked_for() -> None:
    output = python(
        CONFIGURE.format(arguments="prometheus=True")
        + "from prometheus_client import generate_latest\n"
        "providers()[1].get_meter('m').create_counter('figure').add(1)\n"
        "print(generate_latest().decode().count('figure_total{'))\n"
        "shutdown.shutdown()\n",
        OTEL_METRICS_EXPORTER="prometheus",
    )

    assert output.strip() == "1"
