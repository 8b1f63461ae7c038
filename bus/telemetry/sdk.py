"""The OpenTelemetry SDK, set up by the standard `OTEL_*` variables.

Only this file imports the SDK and its exporters, and only inside `configure_telemetry`: they
come with the extras `otlp` and `metrics`.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from dynbus.bus.errors import ConfigError
from dynbus.bus.extras import has_extra, how_to_install
from dynbus.bus.protocol.names import InstanceName

from .export import watch
from .logs import redact_url

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.trace import TracerProvider

Signal = Literal["traces", "metrics"]

SIGNALS: Final[tuple[Signal, ...]] = ("traces", "metrics")
PROTOCOLS: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
HTTP_PORT: Final = 4318
"""The port where collectors listen for OTLP over HTTP; every other port is taken for gRPC."""

logger = logging.getLogger(__name__)


class _Installed(NamedTuple):
    """The tracer provider of `configure_telemetry`, with what those of instances share."""

    provider: SdkTracerProvider
    processor: SynchronousMultiSpanProcessor


_installed: _Installed | None = None
_refused: set[str] = set()


class Shutdown:
    """Ends what `configure_telemetry` began.

    An exporter whose collector is gone retries for longer than anyone wants to wait at exit,
    and takes no deadline. So the end runs on a thread that may be left behind. It is
    started at once and waits, because from Python 3.12 on none can be started at exit.
    """

    def __init__(self, steps: list[Callable[[], object]]) -> None:
        self._steps = steps
        self._asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynbus-telemetry", daemon=True)
        if steps:
            self._thread.start()

    def shutdown(self, timeout: float = 5.0) -> bool:
        """Send what is left and stop, within `timeout` seconds; False when it was not enough.

        A second call only waits for the first.
        """
        self._asked.set()
        if self._steps:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._asked.wait()
        for step in self._steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - the next provider is still to be shut down
                logger.warning("telemetry did not shut down: %s", redact_url(repr(error)))


def is_requested(environment: Mapping[str, str]) -> bool:
    """True if the standard variables name an exporter or an endpoint."""
    return any(exporters(signal, environment) for signal in SIGNALS)


def exporters(
    signal: Signal, environment: Mapping[str, str], *, otlp_endpoint: str | None = None
) -> tuple[str, ...]:
    """The exporters to use for a signal, by their entry-point names; empty for none.

    Raises:
        ConfigError: the OTLP protocol is none that we have.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    upper = signal.upper()
    named = environment.get(f"OTEL_{upper}_EXPORTER", "")
    asked = tuple(name.strip() for name in named.split(",") if name.strip())
    if not asked and (
        otlp_endpoint
        or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or environment.get(f"OTEL_EXPORTER_OTLP_{upper}_ENDPOINT")
    ):
        asked = ("otlp",)
    if "none" in asked:
        return ()
    return tuple(
        _otlp_exporter(upper, environment, otlp_endpoint) if name == "otlp" else name
        for name in asked
    )


def _otlp_exporter(upper: str, environment: Mapping[str, str], otlp_endpoint: str | None) -> str:
    protocol = environment.get(f"OTEL_EXPORTER_OTLP_{upper}_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", ""
    )
    if not protocol:
        endpoint = (
            otlp_endpoint
            or environment.get(f"OTEL_EXPORTER_OTLP_{upper}_ENDPOINT")
            or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
        )
        protocol = "http/protobuf" if re.search(rf":{HTTP_PORT}(/|$)", endpoint) else "grpc"
    if protocol not in PROTOCOLS:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL {protocol!r} is not supported: use one of "
            f"{', '.join(PROTOCOLS)}"
        )
    return PROTOCOLS[protocol]


def installed() -> tuple[bool, bool]:
    """Return two flags: a tracer provider, and a meter provider, other than the API's is set."""
    if "opentelemetry.trace" not in sys.modules and "opentelemetry.metrics" not in sys.modules:
        return False, False
    from opentelemetry import metrics, trace

    return (
        not _is_placeholder(trace.get_tracer_provider()),
        not _is_placeholder(metrics.get_meter_provider()),
    )


def providers() -> tuple[TracerProvider | None, MeterProvider | None]:
    """The providers that are installed in this process and record something."""
    if not any(installed()):
        return None, None
    from opentelemetry import metrics, trace

    tracer_provider = trace.get_tracer_provider()
    meter_provider = metrics.get_meter_provider()
    return (
        None if _never_traces(tracer_provider) else tracer_provider,
        None if _never_measures(meter_provider) else meter_provider,
    )


def _never_traces(provider: TracerProvider) -> bool:
    """True if the provider never makes a span: not set up, disabled, or sampled `always_off`."""
    description = getattr(getattr(provider, "sampler", None), "get_description", None)
    return (
        _is_placeholder(provider)
        or _is_placeholder(provider.get_tracer("dynbus"))
        or (callable(description) and description() == "AlwaysOffSampler")
    )


def leaves_unsampled(provider: TracerProvider) -> bool:
    """True if a call whose caller is not sampled is never sampled: the usual `ParentBased`."""
    description = getattr(getattr(provider, "sampler", None), "get_description", None)
    text = str(description()) if callable(description) else ""
    return (
        text.startswith("ParentBased{")
        and "remoteParentNotSampled:AlwaysOffSampler" in text
        and "localParentNotSampled:AlwaysOffSampler" in text
    )


def _never_measures(provider: MeterProvider) -> bool:
    return _is_placeholder(provider) or _is_placeholder(provider.get_meter("dynbus"))


def _is_placeholder(value: object) -> bool:
    """True if it is one of the API's own no-op or proxy objects."""
    return type(value).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))


def provider_of(instance: InstanceName, provider: TracerProvider) -> TracerProvider:
    """The provider of an instance's spans: a service of its component's name.

    It sends them with `provider`'s exporters, and is `provider` itself where the program has set
    that up: then its resource is the program's affair.
    """
    ours = _installed
    if ours is None or ours.provider is not provider:
        return provider
    from opentelemetry.sdk.trace import TracerProvider

    namespace, component, instance_id = instance
    return TracerProvider(
        sampler=ours.provider.sampler,
        resource=ours.provider.resource.merge(
            _not_given(
                {
                    "service.name": component,
                    "service.namespace": namespace,
                    "service.instance.id": instance_id,
                }
            )
        ),
        shutdown_on_exit=False,
        active_span_processor=ours.processor,
    )


def configure_from_environment(
    *, service_name: str, service_namespace: str = "", instance_id: str = ""
) -> None:
    """Do what `configure_telemetry` does where the standard variables ask, and the rest at exit.

    Nothing is done in a program that has set up an SDK. What keeps telemetry from being set up is
    logged once: a container's `OTEL_*` variables are meant for all its programs, so they must not
    stop one that came without the SDK.

    Raises:
        ConfigError: the OTLP protocol is none that we have.
    """
    if any(installed()) or not is_requested(os.environ):
        return
    try:
        shutdown = configure_telemetry(
            service_name=service_name,
            service_namespace=service_namespace,
            instance_id=instance_id,
        )
    except ConfigError as error:
        if str(error) not in _refused:
            _refused.add(str(error))
            logger.warning("telemetry is off: %s", error)
        return
    atexit.register(shutdown.shutdown)


def configure_telemetry(
    *,
    service_name: str,
    service_namespace: str = "",
    otlp_endpoint: str | None = None,
    prometheus: bool = False,
    instance_id: str = "",
) -> Shutdown:
    """Install the SDK's providers as the standard `OTEL_*` variables say.

    Sampler, resource, headers, intervals and limits are read by the SDK itself. A signal for
    which nothing asks gets no provider, and a provider that the program has installed
    before stays as it is.

    Args:
        service_name, service_namespace: unless `OTEL_SERVICE_NAME` or
            `OTEL_RESOURCE_ATTRIBUTES` has one.
        otlp_endpoint: `http://HOST:PORT` of a collector; wins over the variables. Its port
            tells the protocol (4318 HTTP, else gRPC) where no variable does.
        prometheus: collect metrics for `/metrics` of the health server.
        instance_id: becomes the resource's `service.instance.id`; random unless given.

    Raises:
        ConfigError: an extra is not installed, or a variable has a value that is not usable.
    """
    if otlp_endpoint and "://" not in otlp_endpoint:
        otlp_endpoint = f"http://{otlp_endpoint}"
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    for_traces = exporters("traces", os.environ, otlp_endpoint=otlp_endpoint)
    for_metrics = exporters("metrics", os.environ, otlp_endpoint=otlp_endpoint)
    prometheus = prometheus and not disabled
    has_tracing, has_metrics = installed()
    if has_tracing and for_traces:
        logger.warning("a tracer provider is set up already and stays as it is")
        for_traces = ()
    if has_metrics and (for_metrics or prometheus):
        logger.warning("a meter provider is set up already and stays as it is")
        for_metrics, prometheus = (), False
    if not (for_traces or for_metrics or prometheus):
        return Shutdown([])
    extra = "otlp" if for_traces or for_metrics else "metrics"
    try:
        resource = _resource(service_name, service_namespace, instance_id)
    except ImportError as error:
        raise _missing_extra(extra, error) from error
    steps: list[Callable[[], object]] = []
    if for_traces:
        steps.append(_install_tracing(resource, for_traces, otlp_endpoint))
    if for_metrics or prometheus:
        steps.append(_install_metrics(resource, for_metrics, otlp_endpoint, prometheus))
    return Shutdown(steps)


def measure_process() -> Callable[[], object]:
    """Have `/metrics` show what this process measures, where the extra for it is there; what is
    returned sends the rest of it at the end."""
    if not has_extra("metrics"):
        return lambda: None
    try:
        return configure_telemetry(service_name="dynbus", prometheus=True).shutdown
    except ConfigError as error:
        # Variables that are meant for all programs of a container stop none of them.
        logger.warning("telemetry is off: %s", error)
        return lambda: None


def _missing_extra(extra: str, error: ImportError) -> ConfigError:
    return ConfigError(f"telemetry needs an extra: {how_to_install(extra)} ({error})")


def _resource(service_name: str, service_namespace: str, instance_id: str) -> Resource:
    from opentelemetry.sdk.resources import Resource

    ours = {
        "service.name": service_name,
        "service.namespace": service_namespace,
        "service.instance.id": instance_id or str(uuid.uuid4()),
    }
    return Resource.create(_not_given(ours).attributes)


def _not_given(attributes: Mapping[str, str]) -> Resource:
    """Those of our resource attributes that have a value and that no variable gives."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    given = OTELResourceDetector().detect().attributes
    return Resource({key: value for key, value in attributes.items() if value and key not in given})


def _install_tracing(
    resource: Resource, names: tuple[str, ...], otlp_endpoint: str | None
) -> Callable[[], object]:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    global _installed
    processor = SynchronousMultiSpanProcessor()  # type: ignore[no-untyped-call]
    provider = TracerProvider(
        resource=resource, shutdown_on_exit=False, active_span_processor=processor
    )
    for name in names:
        exporter = _exporter("traces", name, otlp_endpoint)
        watch(exporter, "traces")
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    _installed = _Installed(provider, processor)
    return provider.shutdown


def _install_metrics(
    resource: Resource, names: tuple[str, ...], otlp_endpoint: str | None, prometheus: bool
) -> Callable[[], object]:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

    readers: list[MetricReader] = []
    if prometheus:
        readers.append(_prometheus_reader())
    for name in names:
        if name == "prometheus" and prometheus:
            continue  # it would collect the same figures into the same registry
        exporter = _exporter("metrics", name, otlp_endpoint)
        if isinstance(exporter, MetricReader):
            readers.append(exporter)
        else:
            watch(exporter, "metrics")
            readers.append(PeriodicExportingMetricReader(exporter))
    provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    return provider.shutdown


def _prometheus_reader() -> MetricReader:
    try:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
    except ImportError as error:
        raise _missing_extra("metrics", error) from error
    # Its `target_info` would carry the instance's id, and be a new series at each start.
    return PrometheusMetricReader(disable_target_info=True)


def _exporter(signal: Signal, name: str, otlp_endpoint: str | None) -> Any:
    """Make the exporter that a package has registered under `name`."""
    from importlib.metadata import entry_points

    entries = entry_points(group=f"opentelemetry_{signal}_exporter", name=name)
    if not entries:
        extra = "metrics" if name == "prometheus" else "otlp"
        raise ConfigError(
            f"OTEL_{signal.upper()}_EXPORTER {name!r} is not installed: "
            f"otlp comes with {how_to_install(extra)}"
        )
    try:
        make = next(iter(entries)).load()
    except ImportError as error:
        raise _missing_extra("otlp", error) from error
    if otlp_endpoint and name in PROTOCOLS.values():
        # A base address: only over HTTP does a signal have a path of its own.
        path = f"/v1/{signal}" if name == PROTOCOLS["http/protobuf"] else ""
        return make(endpoint=otlp_endpoint.rstrip("/") + path)
    return make()
