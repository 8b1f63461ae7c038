"""Spans and metrics of calls, by the OpenTelemetry messaging conventions.

A call has two spans of one trace: `send ns.component.endpoint` (PRODUCER) at the caller and
`process ns.component.endpoint` (CONSUMER) at the instance, joined by `traceparent`. The
instance is an attribute of a span, never a part of a name, and no metric carries an id, so
their number stays bounded. The spans of an instance belong to a service of its component's name.

`Telemetry.from_environment` decides once, when a runtime connects. Where it returns None,
nothing of OpenTelemetry is imported and calls pay nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

from dynbus.bus.context import Context, current_instance
from dynbus.bus.drops import DropReason
from dynbus.bus.protocol import headers as h
from dynbus.bus.protocol.names import EndpointName, InstanceName

from .metrics import OTHER, Labels, Metrics, error_code
from .sdk import Shutdown as Shutdown
from .sdk import configure_from_environment as configure_from_environment
from .sdk import configure_telemetry as configure_telemetry
from .sdk import leaves_unsampled, provider_of, providers
from .sdk import measure_process as measure_process
from .trace_context import TraceApi, is_unsampled, joined_trace, trace_fields

if TYPE_CHECKING:
    from opentelemetry.context import Context as OtelContext
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, SpanContext, SpanKind, Tracer, TracerProvider

    from dynbus.bus.transport import Connection

MAX_ENDPOINTS: Final = 1000
"""Endpoints with labels of their own per process; calls to further ones share one label."""

MAX_INSTANCES: Final = 256
"""Instances whose tracers are kept; with more of them at a time they are made anew."""


class _Profile:
    """The attributes that every observation of one endpoint on one side has in common."""

    __slots__ = ("attributes", "kind", "label_map", "labels", "name", "side")

    def __init__(
        self, endpoint: EndpointName, side: str, kind: SpanKind, counted: bool, name: str = ""
    ) -> None:
        operation = "process" if side == "server" else "send"
        self.side = side
        self.kind = kind
        self.name = f"{name or operation} {endpoint}"
        self.attributes: dict[str, str] = {
            "messaging.system": "nats",
            "messaging.operation.name": name or operation,
            "messaging.operation.type": operation,
            "messaging.destination.name": str(endpoint),
        }
        if side == "server":
            self.attributes["messaging.consumer.group.name"] = endpoint.component
        namespace, component, name = endpoint if counted else (OTHER, OTHER, OTHER)
        self.label_map = {
            "dynbus.namespace": namespace,
            "dynbus.component": component,
            "dynbus.endpoint": name,
            "dynbus.side": side,
        }
        self.labels: Labels = tuple(self.label_map.items())


class CallObservation:
    """One side of one call, or of one job of a work queue, from its start to `end`.

    Args:
        counted: whether the metrics of calls are told of it.

    Attributes:
        trace_headers: what the caller sends along, and what the handler's `Context` gets.
    """

    __slots__ = (
        "_cancelled",
        "_context",
        "_ended",
        "_items",
        "_metrics",
        "_profile",
        "_saw_item",
        "_span",
        "_started",
        "_telemetry",
        "trace_headers",
    )

    def __init__(
        self,
        telemetry: Telemetry,
        profile: _Profile,
        span: Span | None,
        context: OtelContext | None,
        trace_headers: Mapping[str, str],
        *,
        counted: bool = True,
    ) -> None:
        self.trace_headers = trace_headers
        self._telemetry = telemetry
        self._metrics = telemetry.metrics if counted else None
        self._profile = profile
        self._span = span if span is not None and span.is_recording() else None
        self._context = context
        self._started = time.perf_counter()
        self._items = 0
        self._saw_item = False
        self._cancelled = False
        self._ended = False

    def first_item(self) -> None:
        """Note that a stream's first item is there; more calls change nothing."""
        if self._saw_item or self._ended:
            return
        self._saw_item = True
        if self._span is not None:
            self._span.add_event("first_item")
        if self._metrics is not None:
            self._metrics.first_item.record(
                time.perf_counter() - self._started, self._profile.label_map, self._context
            )

    def items(self, count: int) -> None:
        """Note that `count` more items were sent or delivered, for the first also when."""
        if not self._items:
            self.first_item()
        self._items += count
        if self._metrics is not None:
            self._metrics.items.add(self._profile.labels, count)

    def cancelled(self) -> None:
        """Note that the call was asked to stop or was killed; more calls change nothing."""
        if self._cancelled or self._ended:
            return
        self._cancelled = True
        if self._span is not None:
            self._span.add_event("cancelled")

    def note(self, name: str, value: str | int) -> None:
        """Set an attribute of the span."""
        if self._span is not None:
            self._span.set_attribute(name, value)

    def migrated(self, error: BaseException) -> None:
        """Note that the call goes on at another instance, since it ended so at this one."""
        reason = error_code(error, self._profile.side)
        if self._span is not None:
            self._span.add_event("migrated", {"error.type": reason})
        if self._metrics is not None:
            self._metrics.migrations.add((*self._profile.labels, ("dynbus.reason", reason)))

    def end(self, error: BaseException | None = None) -> None:
        """End the span and count the call; more calls change nothing.

        A cancelled call is not a failed one: its span has an event and no error status.
        """
        if self._ended:
            return
        code = "" if error is None else error_code(error, self._profile.side)
        if code == "Cancelled":
            self.cancelled()
        self._ended = True
        if self._metrics is not None:
            self._count(self._metrics, code)
        if self._span is not None:
            self._end_span(self._span, error, code)

    def activate(self) -> Token[OtelContext] | None:
        """Make the span current in this task, so that spans of the handler nest in it."""
        return None if self._context is None else self._telemetry.api.attach(self._context)

    def deactivate(self, token: Token[OtelContext] | None) -> None:
        """Undo `activate`, in the same task."""
        if token is not None:
            self._telemetry.api.detach(token)

    def _count(self, metrics: Metrics, code: str) -> None:
        profile = self._profile
        labels, label_map = profile.labels, profile.label_map
        if code:
            labels = (*labels, ("error.type", code))
            label_map = dict(labels)
        metrics.calls.add(labels)
        metrics.duration.record(time.perf_counter() - self._started, label_map, self._context)

    def _end_span(self, span: Span, error: BaseException | None, code: str) -> None:
        if self._items:
            span.set_attribute("dynbus.stream.items", self._items)
        if error is not None and code != "Cancelled":
            api = self._telemetry.api
            span.set_attribute("error.type", code)
            span.record_exception(error)
            span.set_status(api.Status(api.ERROR, str(error)))
        span.end()


class Telemetry:
    """Observes calls with one tracer and one meter; safe to use from several threads.

    Args:
        tracer_provider: None for no spans; trace headers then pass through unchanged.
        meter_provider: None for no metrics.

    Attributes:
        tracer_provider, meter_provider: the same, for spans and figures of other folders.
    """

    trace_fields = staticmethod(trace_fields)

    def __init__(
        self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None
    ) -> None:
        self.api = TraceApi()
        self.metrics = None if meter_provider is None else Metrics(meter_provider)
        self.tracer_provider = tracer_provider
        self.meter_provider = meter_provider
        self._tracer = None if tracer_provider is None else tracer_provider.get_tracer("dynbus")
        self._tracers: dict[InstanceName, Tracer] = {}
        # Then a call that belongs to an unsampled trace needs no span at all, only its headers.
        self._leaves_unsampled = tracer_provider is not None and leaves_unsampled(tracer_provider)
        self._profiles: dict[tuple[EndpointName, str], _Profile] = {}

    @classmethod
    def from_environment(cls) -> Telemetry | None:
        """The telemetry of this process, or None when nothing asks for any.

        An OpenTelemetry SDK that the program has set up before is used as it is. Otherwise
        the standard `OTEL_*` variables decide; where they name an exporter or an endpoint,
        the SDK is set up and flushed at exit.
        """
        configure_from_environment(service_name="dynbus")
        return _shared(*providers())

    def client_call(
        self, endpoint: EndpointName, *, streaming: bool, request_id: str, parent: Context | None
    ) -> CallObservation:
        """Begin to observe a call at its caller.

        It becomes a child of the current span; where that belongs to another trace than
        `parent`, as in a task shared by several requests, `parent` decides.
        """
        profile = self._profile(endpoint, "client")
        attributes: dict[str, str | int] = {**profile.attributes, "dynbus.streaming": streaming}
        return self._sent(profile, attributes, request_id, parent, counted=True)

    def broadcast(
        self, endpoint: EndpointName, *, request_id: str, parent: Context | None
    ) -> CallObservation:
        """Begin to observe the calls of all instances of an endpoint as one: those that are made
        while it is active are its children, and metrics count them and not it."""
        profile = self._profile(endpoint, "client", "broadcast")
        return self._sent(profile, profile.attributes, request_id, parent, counted=False)

    def put_job(
        self, queue: EndpointName, *, job_id: str, parent: Context | None
    ) -> CallObservation:
        """Begin to observe the put of a job, as a call at its caller; metrics of calls do not count
        it. Its trace headers go with the job."""
        profile = self._profile(queue, "client", "put")
        return self._sent(profile, profile.attributes, job_id, parent, counted=False)

    def publish_event(
        self, topic: EndpointName, *, event_id: str, parent: Context | None
    ) -> CallObservation:
        """Begin to observe that an event is published; metrics of calls do not count it. Its trace
        headers go with the event."""
        profile = self._profile(topic, "client", "publish")
        return self._sent(profile, profile.attributes, event_id, parent, counted=False)

    def attempt(
        self, queue: EndpointName, incoming: Mapping[str, str], *, job_id: str, tries: int
    ) -> CallObservation:
        """Begin to observe an attempt at a job, in the trace of its put.

        Args:
            incoming: the trace headers of the job.
            tries: how often it was handed out, this time included.
        """
        profile = self._profile(queue, "server", "attempt")
        attributes: dict[str, str | int] = {**profile.attributes, "dynbus.attempt": tries}
        taker = current_instance()
        if taker is not None:
            attributes["dynbus.instance_id"] = taker.instance_id
        return self._processed(profile, attributes, job_id, incoming, taker, counted=False)

    def batch(self, endpoint: EndpointName, calls: Sequence[Mapping[str, str]]) -> CallObservation:
        """Begin to observe calls that run together: a span in the trace of the first of them that
        is sampled, with a link to that of each; metrics of calls do not count it.

        Args:
            calls: the trace headers of each.
        """
        profile = self._profile(endpoint, "server", "batch")
        instance = current_instance()
        attributes: dict[str, str | int] = {
            **profile.attributes,
            "messaging.batch.message_count": len(calls),
        }
        if instance is not None:
            attributes["dynbus.instance_id"] = instance.instance_id
        links = [link for each in calls if (link := self.api.read(each)) is not None]
        parent = joined_trace(calls)
        return self._processed(
            profile, attributes, "", parent, instance, counted=False, links=links
        )

    def batch_begins(
        self, endpoint: EndpointName, waits: Sequence[float], sizes: Sequence[float]
    ) -> None:
        """Note that calls begin together.

        Args:
            waits: seconds that each has waited for that.
            sizes: how large the request of each is; empty where that is not known.
        """
        if self.metrics is None:
            return
        labels = self._profile(endpoint, "server").label_map
        self.metrics.batch_size.record(len(waits), labels)
        for seconds in waits:
            self.metrics.batch_wait.record(seconds, labels)
        if sizes and max(sizes) > 0:
            share = 1 - sum(sizes) / (len(sizes) * max(sizes))
            self.metrics.batch_padding.record(share, labels)

    def _sent(
        self,
        profile: _Profile,
        attributes: Mapping[str, str | int],
        message_id: str,
        parent: Context | None,
        *,
        counted: bool,
    ) -> CallObservation:
        inherited = parent.trace_headers() if parent is not None else {}
        if self._tracer is None:
            return CallObservation(self, profile, None, None, inherited, counted=counted)
        if self._leaves_unsampled and is_unsampled(inherited.get(h.TRACEPARENT, "")):
            if self.api.all_baggage():
                self.api.baggage.inject(inherited)
            return CallObservation(self, profile, None, None, inherited, counted=counted)
        context = self._client_parent(inherited)
        caller = current_instance()
        tracer = self._tracer if caller is None else self.tracer_of(caller)
        span = self._start(tracer, profile, context, message_id, attributes)
        fields = self.api.write(span.get_span_context())
        if self.api.all_baggage(context):
            self.api.baggage.inject(fields, context)
        elif h.BAGGAGE in inherited:
            fields[h.BAGGAGE] = inherited[h.BAGGAGE]
        within = self.api.with_span(span, context)
        return CallObservation(self, profile, span, within, fields, counted=counted)

    def server_call(
        self,
        endpoint: EndpointName,
        instance_id: str,
        incoming: Mapping[str, str],
        *,
        streaming: bool,
        request_id: str,
    ) -> CallObservation:
        """Begin to observe a call at the instance that carries it out.

        Args:
            incoming: the trace headers of the request, as `trace_fields` reads them; a
                malformed `traceparent` begins a new trace.
        """
        profile = self._profile(endpoint, "server")
        attributes: dict[str, str | int] = {
            **profile.attributes,
            "dynbus.instance_id": instance_id,
            "dynbus.streaming": streaming,
        }
        instance = InstanceName(endpoint.namespace, endpoint.component, instance_id)
        return self._processed(profile, attributes, request_id, incoming, instance, counted=True)

    def _processed(
        self,
        profile: _Profile,
        attributes: Mapping[str, str | int],
        message_id: str,
        incoming: Mapping[str, str],
        instance: InstanceName | None,
        *,
        counted: bool,
        links: Sequence[SpanContext] = (),
    ) -> CallObservation:
        if self._tracer is None:
            return CallObservation(self, profile, None, None, incoming, counted=counted)
        remote = self.api.read(incoming)
        context = self._server_parent(remote, incoming)
        if self._leaves_unsampled and remote is not None and not remote.trace_flags.sampled:
            return CallObservation(self, profile, None, context, incoming, counted=counted)
        tracer = self._tracer if instance is None else self.tracer_of(instance)
        span = self._start(tracer, profile, context, message_id, attributes, links)
        fields = self.api.write(span.get_span_context())
        if h.BAGGAGE in incoming:
            fields[h.BAGGAGE] = incoming[h.BAGGAGE]
        within = self.api.with_span(span, context)
        return CallObservation(self, profile, span, within, fields, counted=counted)

    def credit_stall(self, endpoint: EndpointName, seconds: float) -> None:
        """Note that a stream's writer waited `seconds` for its reader."""
        if self.metrics is not None:
            self.metrics.credit_stall.record(seconds, self._profile(endpoint, "server").label_map)

    def in_flight(self, endpoint: EndpointName, delta: int, *, side: str = "server") -> None:
        """Note that `delta` more (or, below 0, fewer) calls are running."""
        if self.metrics is not None:
            self.metrics.in_flight.add(self._profile(endpoint, side).labels, delta)

    def waiting(self, endpoint: EndpointName, delta: int) -> None:
        """Note that `delta` more (or, below 0, fewer) calls wait for an instance."""
        if self.metrics is not None:
            self.metrics.waiting.add(self._profile(endpoint, "client").labels, delta)

    def cancellation(self, endpoint: EndpointName, kind: Literal["stop", "kill"]) -> None:
        """Note that a call here was told to stop, or was killed."""
        if self.metrics is not None:
            labels = self._profile(endpoint, "server").labels
            self.metrics.cancellations.add((*labels, ("dynbus.kind", kind)))

    def reconnect(self, connection: Literal["data", "control"]) -> None:
        """Note that a connection came back."""
        if self.metrics is not None:
            self.metrics.reconnects.add((("dynbus.connection", connection),))

    def follow_connection(
        self, name: Literal["data", "control"], connection: Connection
    ) -> Callable[[], None]:
        """Measure a connection at each export; what is returned ends that."""
        metrics = self.metrics
        if metrics is None:
            return _nothing
        of_name = ("dynbus.connection", name)

        def at_server() -> Labels:
            return (of_name, ("server.address", connection.server_name))

        ends = [
            metrics.connections.follow(
                lambda: {(*at_server(), ("dynbus.state", connection.state.value)): 1}
            ),
            metrics.round_trip.follow(
                lambda: {at_server(): connection.round_trip} if connection.round_trip else {}
            ),
            metrics.unsent.follow(lambda: {at_server(): connection.backlog}),
        ]

        def end() -> None:
            for each in ends:
                each()

        return end

    def follow_lease(self, remaining: Callable[[], float]) -> Callable[[], None]:
        """Measure how long an instance's record lasts; what is returned ends that."""
        if self.metrics is None:
            return _nothing
        return self.metrics.lease.follow(lambda: {(): remaining()})

    def drop(self, reason: DropReason) -> None:
        """Note a message that was dropped unanswered."""
        if self.metrics is not None:
            self.metrics.drops.add((("dynbus.reason", str(reason)),))

    def tracer_of(self, instance: InstanceName) -> Tracer:
        """The tracer that begins the spans of an instance, where there is a `tracer_provider`."""
        tracer = self._tracers.get(instance)
        if tracer is None:
            assert self.tracer_provider is not None, "there are no spans"
            if len(self._tracers) >= MAX_INSTANCES:
                self._tracers.clear()
            tracer = provider_of(instance, self.tracer_provider).get_tracer("dynbus")
            self._tracers[instance] = tracer
        return tracer

    def _profile(self, endpoint: EndpointName, side: str, name: str = "") -> _Profile:
        key = (endpoint, name or side)
        profile = self._profiles.get(key)
        if profile is None:
            counted = len(self._profiles) < MAX_ENDPOINTS
            kind = self.api.CONSUMER if side == "server" else self.api.PRODUCER
            profile = _Profile(endpoint, side, kind, counted, name)
            if counted:
                self._profiles[key] = profile
        return profile

    def _client_parent(self, inherited: Mapping[str, str]) -> OtelContext | None:
        """The context to begin a client span in; None is the task's own."""
        current = self.api.current_span().get_span_context()
        traceparent = inherited.get(h.TRACEPARENT, "")
        if current.is_valid and (
            not traceparent or traceparent[3:35] == f"{current.trace_id:032x}"
        ):
            return None
        remote = self.api.read(inherited)
        return None if remote is None else self.api.with_span(self.api.RemoteSpan(remote))

    def _server_parent(
        self, remote: SpanContext | None, incoming: Mapping[str, str]
    ) -> OtelContext:
        # Not the task's own context: whatever was current where the instance was started is
        # no parent of its calls.
        context = self.api.empty
        if remote is not None:
            context = self.api.with_span(self.api.RemoteSpan(remote), context)
        if h.BAGGAGE in incoming:
            context = self.api.baggage.extract(incoming, context)
        return context

    def _start(
        self,
        tracer: Tracer,
        profile: _Profile,
        context: OtelContext | None,
        message_id: str,
        attributes: Mapping[str, str | int],
        links: Sequence[SpanContext] = (),
    ) -> Span:
        linked = [self.api.Link(each) for each in links]
        span = tracer.start_span(profile.name, context, profile.kind, attributes, linked)
        if message_id and span.is_recording():
            span.set_attribute("messaging.message.id", message_id)
        return span


def _nothing() -> None:
    """Without metrics there is nothing to end."""


@lru_cache(1)
def _shared(
    tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None
) -> Telemetry | None:
    """One `Telemetry` per pair of providers: an instrument can be made only once."""
    if tracer_provider is None and meter_provider is None:
        return None
    return Telemetry(tracer_provider, meter_provider)
