"""The spans of a request, by OpenTelemetry's conventions for HTTP and for generative models.

A request has one trace: `POST /v1/chat/completions` (SERVER), within it `chat MODEL` (CLIENT) from
the tokenizing to the last token, and within that `tokenize`, `route` and the bus's own spans of the
call, in which engines have theirs.
Without telemetry nothing of it is made, and the trace of the client is passed on as it came.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from dynbus import DynbusError
from dynbus.llm.answers import Usage
from dynbus.llm.openai.requests import ChatRequest, CompletionRequest
from dynbus.llm.pipeline.serving import RequestTiming
from dynbus.spi import Telemetry

from .content import Content

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

PROVIDER: Final = "dynbus"


class Work(Protocol):
    """The work of engines for a request."""

    @property
    def answer_id(self) -> str:
        """Of its answer; empty where the engine gives it one."""
        ...

    @property
    def usage(self) -> Usage | None:
        """The tokens so far; None where the engine counts them."""
        ...

    @property
    def finish_reasons(self) -> Sequence[str]:
        """Of the outputs that have ended; empty where they are not read here."""
        ...

    @property
    def instances(self) -> Sequence[str]:
        """The ids of the engines that work for it."""
        ...

    def cancel(self, error: DynbusError | None = None) -> None:
        """Leave it: engines stop, and the sink is told nothing more."""
        ...


class Operation(NamedTuple):
    """The operation that a model is asked for.

    Attributes:
        name: by the conventions, such as `chat`.
        attributes: what is told of the request, by their names after `gen_ai.`.
        streams: whether the answer is to come as a stream.
    """

    name: str
    model: str
    attributes: Mapping[str, Any] = MappingProxyType({})
    streams: bool = False


def completion_operation(request: ChatRequest | CompletionRequest) -> Operation:
    """The operation that a request for a completion asks for."""
    attributes = {
        "stream": True if request.streams else None,
        "max_tokens": request.limit,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "choice.count": request.n if request.choices > 1 else None,
    }
    return Operation(
        "chat" if isinstance(request, ChatRequest) else "text_completion",
        request.model,
        {f"request.{name}": value for name, value in attributes.items() if value is not None},
        request.streams,
    )


class RequestTrace:
    """The trace of one request; without spans it passes on what came.

    Attributes:
        fields: `traceparent` and the like, for calls below and for the answer.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields = fields

    def model_asked(self, asked: Operation) -> None:
        """The request was read: what it asks for is known."""

    def prepared(self, tokens: int | None, begun: float, ended: float) -> None:
        """It was made token ids, between these times of `time.perf_counter`."""

    def sent(self, instances: Sequence[str], begun: float, ended: float) -> None:
        """Engines were found for it, between these times of `time.perf_counter`."""

    def ended(
        self,
        status: int,
        error: DynbusError | None,
        timing: RequestTiming,
        work: Work | None,
        content: Content | None = None,
    ) -> None:
        """The request is over.

        Args:
            work: None when it failed before there was any.
            content: what it said, where that is to be told.
        """


class Tracing:
    """Begins traces.

    Args:
        telemetry: of the runtime; None for no spans.
    """

    def __init__(self, telemetry: Telemetry | None) -> None:
        self._telemetry = telemetry
        self._metrics: _GenAiMetrics | None = None
        self._tracer: Tracer | None = None
        if telemetry is not None:
            if telemetry.tracer_provider is not None:
                self._tracer = telemetry.tracer_provider.get_tracer("dynbus.llm")
            if telemetry.meter_provider is not None:
                self._metrics = _GenAiMetrics(telemetry.meter_provider)

    def begin(self, method: str, path: str, headers: Mapping[str, str]) -> RequestTrace:
        """The trace of a request.

        Args:
            headers: of the request, their names in lower case.
        """
        fields = Telemetry.trace_fields(headers)
        if self._telemetry is None or (self._tracer is None and self._metrics is None):
            return RequestTrace(fields)
        return _Spans(self._telemetry, self._tracer, self._metrics, method, path, fields)


# The bounds that the conventions name.
_DURATION: Final = tuple(0.01 * 2**power for power in range(14))
_FIRST_TOKEN: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_PER_TOKEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS: Final = tuple(4**power for power in range(14))


class _GenAiMetrics:
    """The histograms of the conventions for generative models."""

    def __init__(self, provider: Any) -> None:
        meter = provider.get_meter("dynbus.llm")

        def histogram(name: str, unit: str, bounds: Sequence[float], text: str) -> Any:
            return meter.create_histogram(
                f"gen_ai.{name}",
                unit=unit,
                description=text,
                explicit_bucket_boundaries_advisory=bounds,
            )

        self.duration = histogram(
            "server.request.duration", "s", _DURATION, "Seconds of a request."
        )
        self.first_token = histogram(
            "server.time_to_first_token", "s", _FIRST_TOKEN, "Seconds until the first token."
        )
        self.per_token = histogram(
            "server.time_per_output_token",
            "s",
            _PER_TOKEN,
            "Seconds between two tokens, after the first.",
        )
        self.tokens = histogram("client.token.usage", "{token}", _TOKENS, "Tokens of a request.")


class _Spans(RequestTrace):
    """A trace with spans, or with metrics alone."""

    def __init__(
        self,
        telemetry: Telemetry,
        tracer: Tracer | None,
        metrics: _GenAiMetrics | None,
        method: str,
        path: str,
        fields: Mapping[str, str],
    ) -> None:
        super().__init__(fields)
        self._api = api = telemetry.api
        self._tracer = tracer
        self._metrics = metrics
        self._server: Span | None = None
        self._model: Span | None = None
        self._attributes: dict[str, Any] = {}
        self._streams = False
        # The clock of spans is the wall's.
        self._offset = time.time() - time.perf_counter()
        if tracer is None:
            return
        from opentelemetry.trace import SpanKind

        remote = api.read(fields)
        self._context = api.empty
        if remote is not None:
            self._context = api.with_span(api.RemoteSpan(remote), api.empty)
        self._server = tracer.start_span(
            f"{method} {path}",
            context=self._context,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path, "http.route": path},
        )
        self._context = api.with_span(self._server, self._context)
        self._carry(self._server)

    def model_asked(self, asked: Operation) -> None:
        self._attributes = {
            "gen_ai.operation.name": asked.name,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": asked.model,
        }
        self._streams = asked.streams
        if self._tracer is None:
            return
        from opentelemetry.trace import SpanKind

        request_attributes = {f"gen_ai.{name}": value for name, value in asked.attributes.items()}
        self._model = self._tracer.start_span(
            f"{asked.name} {asked.model}",
            context=self._context,
            kind=SpanKind.CLIENT,
            attributes={**self._attributes, **request_attributes},
        )
        self._context = self._api.with_span(self._model, self._context)
        self._carry(self._model)
        # The task of this request is nobody else's: the spans of its calls nest in this one.
        self._api.attach(self._context)

    def prepared(self, tokens: int | None, begun: float, ended: float) -> None:
        attributes = {} if tokens is None else {"gen_ai.usage.input_tokens": tokens}
        self._part("tokenize", begun, ended, attributes)

    def sent(self, instances: Sequence[str], begun: float, ended: float) -> None:
        self._part("route", begun, ended, {"dynbus.instances": instances})

    def _part(self, name: str, begun: float, ended: float, attributes: Mapping[str, Any]) -> None:
        """A part of the request that has ended, as a span."""
        if self._tracer is None or self._model is None:
            return
        span = self._tracer.start_span(
            name, context=self._context, attributes=attributes, start_time=self._unix(begun)
        )
        span.end(self._unix(ended))

    def ended(
        self,
        status: int,
        error: DynbusError | None,
        timing: RequestTiming,
        work: Work | None,
        content: Content | None = None,
    ) -> None:
        if self._metrics is not None and self._attributes:
            usage = work.usage if work is not None else None
            self._record(self._metrics, error, timing, usage)
        if self._model is not None:
            if work is not None:
                self._model.set_attributes(self._answer_attributes(work))
            if content is not None:
                # Attributes are no objects: the conventions have JSON in that case.
                self._model.set_attribute("gen_ai.input.messages", content.input_messages)
                self._model.set_attribute("gen_ai.output.messages", content.output_messages)
            if timing.first is not None:
                if self._streams:
                    self._model.set_attribute(
                        "gen_ai.response.time_to_first_chunk", timing.first - timing.began
                    )
                self._model.add_event("first_token", timestamp=self._unix(timing.first))
            self._fail(self._model, error)
            self._model.end()
        if self._server is not None:
            self._server.set_attribute("http.response.status_code", status)
            self._fail(self._server, error if status >= 500 else None)
            self._server.end()

    def _answer_attributes(self, work: Work) -> dict[str, Any]:
        """The attributes of an answer."""
        attributes: dict[str, Any] = {}
        if work.finish_reasons:
            attributes["gen_ai.response.model"] = self._attributes["gen_ai.request.model"]
            attributes["gen_ai.response.finish_reasons"] = work.finish_reasons
        if work.answer_id:
            attributes["gen_ai.response.id"] = work.answer_id
        usage = work.usage
        if usage is not None:
            attributes["gen_ai.usage.input_tokens"] = usage.prompt
            attributes["gen_ai.usage.output_tokens"] = usage.completion
            if usage.cached is not None:
                attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached
        return attributes

    def _record(
        self,
        metrics: _GenAiMetrics,
        error: DynbusError | None,
        timing: RequestTiming,
        usage: Usage | None,
    ) -> None:
        attributes = dict(self._attributes)
        if error is not None:
            attributes["error.type"] = error.code
        metrics.duration.record(time.perf_counter() - timing.began, attributes)
        if timing.first is not None:
            metrics.first_token.record(timing.first - timing.began, self._attributes)
        mean_gap = timing.mean_gap
        if mean_gap is not None:
            metrics.per_token.record(mean_gap, self._attributes)
        if usage is not None:
            for kind, count in (("input", usage.prompt), ("output", usage.completion)):
                metrics.tokens.record(count, {**self._attributes, "gen_ai.token.type": kind})

    def _unix(self, at: float) -> int:
        """Unix nanoseconds of a time of `time.perf_counter`."""
        return int((self._offset + at) * 1e9)

    def _fail(self, span: Span, error: DynbusError | None) -> None:
        if error is not None and error.code != "Cancelled":
            span.set_attribute("error.type", error.code)
            span.set_status(self._api.Status(self._api.ERROR, error.code))

    def _carry(self, span: Span) -> None:
        self.fields = {**self.fields, **self._api.write(span.get_span_context())}
