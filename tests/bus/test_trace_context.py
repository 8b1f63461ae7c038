"""W3C trace context is read tolerantly, and what is passed on can be sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from dynbus.bus.protocol import headers as h
from dynbus.bus.telemetry.trace_context import (
    MAX_TRACE_HEADER,
    TraceApi,
    is_unsampled,
    trace_fields,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
API = TraceApi()

keys = st.sampled_from(["traceparent", "Traceparent", "tracestate", "Tracestate", "baggage", "x"])
texts = st.one_of(
    st.text(max_size=60),
    st.text("0123456789abcdef-", max_size=60),
    st.text("abc=,;: ", max_size=60),
)


@given(st.dictionaries(keys, texts))
def test_what_is_passed_on_is_what_a_header_may_hold(headers: dict[str, str]) -> None:
    fields = trace_fields(headers)

    assert set(fields) <= {h.TRACEPARENT, h.TRACESTATE, h.BAGGAGE}
    assert h.decode(h.encode(fields)) == {key: value.strip() for key, value in fields.items()}


@given(st.dictionaries(keys, texts))
def test_reading_never_raises(headers: dict[str, str]) -> None:
    found = API.read(headers)

    assert found is None or found.is_valid


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_span_is_read_as_it_was_written(trace_id: int, span_id: int, sampled: bool) -> None:
    state = TraceState([("vendor", "value")])
    written = API.write(SpanContext(trace_id, span_id, False, TraceFlags(sampled), state))

    found = API.read(written)

    assert found is not None
    assert (found.trace_id, found.span_id, found.trace_flags) == (
        trace_id,
        span_id,
        TraceFlags(sampled),
    )
    assert (found.is_remote, found.trace_state) == (True, state)
    assert is_unsampled(written[h.TRACEPARENT]) is not sampled


def test_golden_headers() -> None:
    span = SpanContext(int(TRACE, 16), int(SPAN, 16), False, TraceFlags(1))

    assert API.write(span) == {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("a=b", True),
        ("", False),
        ("x" * MAX_TRACE_HEADER, True),
        ("x" * (MAX_TRACE_HEADER + 1), False),
        ("a=ü", False),
        ("a=b\r\nX: y", False),
        ("a\tb", False),
    ],
)
def test_a_value_that_no_header_may_hold_is_left_out(value: str, kept: bool) -> None:
    assert trace_fields({"baggage": value}) == ({"baggage": value} if kept else {})


def test_the_w3c_spelling_wins_over_that_of_http_libraries() -> None:
    assert trace_fields({"Traceparent": "http", "traceparent": "w3c"}) == {"traceparent": "w3c"}
    assert trace_fields({"Traceparent": "http"}) == {"traceparent": "http"}


@pytest.mark.parametrize(
    ("traceparent", "unsampled"),
    [
        (f"00-{TRACE}-{SPAN}-00", True),
        (f"00-{TRACE}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}-02", True),
        (f"00-{TRACE}-{SPAN}-ff", False),
        (f"00-{TRACE}-{SPAN}-0", False),
        ("", False),
    ],
)
def test_unsampled_is_told_by_the_last_bit(traceparent: str, unsampled: bool) -> None:
    assert is_unsampled(traceparent) is unsampled
