"""Spans of a request in an engine: its wait, its prompt and its output.

Spans `queue`, `prefill` and `decode`, as children of the call that asked, and histograms of the
first two. Requests are told of when they come and go, and steps as a whole: without telemetry a
token costs nothing, and without a recorded span next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynbus.spi import InstanceName, Telemetry, monotonic, unix_time

from .interface import EngineRequest, Step

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer


class _Request:
    """A request in the engine. Times are of the monotonic clock.

    Attributes:
        offset: of the wall's clock, which spans have, to that one.
        parent: what its spans are children of; None where no span is recorded.
        began: when what it does now began: to wait, or to be computed.
        tokens, reasons: of its output so far.
        decoding: the span of its output, once that has begun.
    """

    __slots__ = (
        "admitted",
        "began",
        "decoding",
        "last",
        "offset",
        "parent",
        "prompt_tokens",
        "reasons",
        "tokens",
    )

    def __init__(self, parent: Context | None, prompt_tokens: int, now: float) -> None:
        self.parent = parent
        self.prompt_tokens = prompt_tokens
        self.began = self.last = now
        self.offset = unix_time() - now
        self.admitted = False
        self.tokens = 0
        self.reasons: list[str] = []
        self.decoding: Span | None = None

    def unix(self, at: float) -> int:
        """Unix nanoseconds of a time."""
        return int((self.offset + at) * 1e9)


class EngineTrace:
    """Spans and times of an engine's requests.

    Args:
        tracer: of the instance; None for no spans.
    """

    def __init__(self, telemetry: Telemetry, tracer: Tracer | None, name: InstanceName) -> None:
        self._api = telemetry.api
        self._tracer = tracer
        self._labels = {
            "dynbus.namespace": name.namespace,
            "dynbus.component": name.component,
        }
        metrics = telemetry.metrics
        self._queue: Any = None
        self._prefill: Any = None
        if metrics is not None:
            self._queue = metrics.histogram(
                "engine.queue.duration", "Seconds that a request waited in an engine."
            )
            self._prefill = metrics.histogram(
                "engine.prefill.duration", "Seconds from then to its first token."
            )
        self._requests: dict[str, _Request] = {}
        self._recorded = 0

    @classmethod
    def of(cls, telemetry: Telemetry | None, name: InstanceName) -> EngineTrace | None:
        """For the engine of an instance; None where nobody wants any of it."""
        if telemetry is None:
            return None
        spans = telemetry.tracer_provider is not None
        return cls(telemetry, telemetry.tracer_of(name) if spans else None, name)

    def __repr__(self) -> str:
        return f"<EngineTrace [{len(self._requests)} requests, {self._recorded} recorded]>"

    def submitted(self, request_id: str, request: EngineRequest) -> None:
        """A request came, in the task of its call."""
        parent: Context | None = None
        if self._tracer is not None:
            span = self._api.current_span()
            if span.is_recording():
                parent = self._api.with_span(span, self._api.empty)
                self._recorded += 1
        if parent is not None or self._queue is not None:
            self._requests[request_id] = _Request(parent, len(request.token_ids), monotonic())

    def stepped(self, step: Step, began: float) -> None:
        """A step has ended, which began then."""
        requests = self._requests
        for request_id in step.admitted:
            request = requests.get(request_id)
            if request is not None:
                self._admitted(request, max(began, request.began))
        if not step.prefilled and not self._recorded:
            return
        now = monotonic()
        for prefill in step.prefilled:
            request = requests.get(prefill.request_id)
            if request is not None:
                attributes = {
                    "gen_ai.usage.cache_read.input_tokens": prefill.cached_tokens,
                    "dynbus.engine.chunks": prefill.chunks,
                }
                self._prefilled(request, now, attributes)
        if not self._recorded:
            return
        for request_id, item in step.outputs:
            request = requests.get(request_id)
            if request is not None:
                if request.decoding is None:
                    # The engine does not say when its prompt was computed.
                    self._prefilled(request, now, {})
                request.tokens += len(item.token_ids)
                request.last = now
                if item.finish_reason is not None:
                    request.reasons.append(item.finish_reason)

    def ended(self, request_id: str) -> None:
        """A request has ended, or was left."""
        request = self._requests.pop(request_id, None)
        if request is None or request.parent is None:
            return
        self._recorded -= 1
        span = request.decoding
        if span is None:
            # It was left before its first token.
            name = "prefill" if request.admitted else "queue"
            self._span(request, name, request.began, monotonic())
            return
        span.set_attribute("gen_ai.usage.output_tokens", request.tokens)
        if request.reasons:
            span.set_attribute("gen_ai.response.finish_reasons", request.reasons)
        span.end(request.unix(request.last))

    def _admitted(self, request: _Request, now: float) -> None:
        if self._queue is not None:
            self._queue.record(now - request.began, self._labels)
        self._span(request, "queue", request.began, now)
        request.admitted = True
        request.began = now

    def _prefilled(self, request: _Request, now: float, attributes: Mapping[str, int]) -> None:
        if self._prefill is not None and request.admitted:
            self._prefill.record(now - request.began, self._labels)
        self._span(
            request,
            "prefill",
            request.began,
            now,
            {"gen_ai.usage.input_tokens": request.prompt_tokens, **attributes},
        )
        if self._tracer is not None and request.parent is not None:
            at = request.unix(now)
            request.decoding = self._tracer.start_span("decode", request.parent, start_time=at)
            request.decoding.add_event("first_token", timestamp=at)

    def _span(
        self,
        request: _Request,
        name: str,
        began: float,
        ended: float,
        attributes: Mapping[str, int] | None = None,
    ) -> None:
        if self._tracer is None or request.parent is None:
            return
        span = self._tracer.start_span(
            name, request.parent, attributes=attributes, start_time=request.unix(began)
        )
        span.end(request.unix(ended))
