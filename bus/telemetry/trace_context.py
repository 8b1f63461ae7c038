"""W3C trace context: `traceparent`, `tracestate` and `baggage` among a request's headers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from dynbus.bus.protocol import headers as h

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

MAX_TRACE_HEADER: Final = 8192
"""Bytes of a trace header that are passed on: the limit of W3C baggage."""

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SPELLINGS: Final = tuple(
    (key, key.capitalize()) for key in (h.TRACEPARENT, h.TRACESTATE, h.BAGGAGE)
)
_NAMES: Final = frozenset(name for spellings in _SPELLINGS for name in spellings)


def trace_fields(headers: Mapping[str, str]) -> dict[str, str]:
    """The trace headers among a request's headers, under their W3C spelling.

    NATS headers are case-sensitive and Go's HTTP carrier writes `Traceparent`. A value that
    no header of ours may hold is left out: it would make every sub-call fail.
    """
    fields: dict[str, str] = {}
    if _NAMES.isdisjoint(headers):
        return fields
    for key, capitalized in _SPELLINGS:
        value = headers.get(key) or headers.get(capitalized)
        if value and len(value) <= MAX_TRACE_HEADER and value.isascii() and value.isprintable():
            fields[key] = value
    return fields


def is_unsampled(traceparent: str) -> bool:
    """True if a well-formed `traceparent` says that its trace is not recorded."""
    return len(traceparent) == 55 and traceparent[54] in "02468ace"


def joined_trace(calls: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The trace headers of what several calls run as together: those of the first of them that is
    sampled, with baggage where all have the same."""
    sampled = (each for each in calls if not is_unsampled(each.get(h.TRACEPARENT, "")))
    fields = dict(next(sampled, calls[0]))
    if any(each.get(h.BAGGAGE) != fields.get(h.BAGGAGE) for each in calls):
        fields.pop(h.BAGGAGE, None)
    return fields


class TraceApi:
    """The parts of opentelemetry-api that calls use, looked up once: importing it takes 100 ms."""

    def __init__(self) -> None:
        from opentelemetry import baggage, context, trace
        from opentelemetry.baggage.propagation import W3CBaggagePropagator

        self.attach = context.attach
        self.empty = context.Context()
        self.detach = context.detach
        self.all_baggage = baggage.get_all
        self.baggage = W3CBaggagePropagator()
        self.current_span = trace.get_current_span
        self.with_span = trace.set_span_in_context
        self.Link = trace.Link
        self.SpanContext = trace.SpanContext
        self.RemoteSpan = trace.NonRecordingSpan
        self.TraceFlags = trace.TraceFlags
        self.TraceState = trace.TraceState
        self.Status = trace.Status
        self.ERROR = trace.StatusCode.ERROR
        self.PRODUCER = trace.SpanKind.PRODUCER
        self.CONSUMER = trace.SpanKind.CONSUMER

    def read(self, fields: Mapping[str, str]) -> SpanContext | None:
        """The remote span that `traceparent` names; None when it is absent or malformed."""
        parts = _TRACEPARENT.fullmatch(fields.get(h.TRACEPARENT, ""))
        if parts is None or (parts[1] == "00" and parts[5]):
            return None
        state = fields.get(h.TRACESTATE)
        span = self.SpanContext(
            int(parts[2], 16),
            int(parts[3], 16),
            is_remote=True,
            trace_flags=self.TraceFlags(int(parts[4], 16)),
            trace_state=self.TraceState.from_header([state]) if state else None,
        )
        return span if span.is_valid else None

    def write(self, span: SpanContext) -> dict[str, str]:
        fields = {
            h.TRACEPARENT: f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
        }
        if span.trace_state:
            fields[h.TRACESTATE] = span.trace_state.to_header()
        return fields
