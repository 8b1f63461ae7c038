"""Requests are read as they were meant, and whatever cannot be meant is refused."""

from __future__ import annotations

import pytest

from dynbus.bus.context import Context
from dynbus.bus.errors import InvalidRequest
from dynbus.bus.protocol import headers
from dynbus.bus.serving.requests import (
    MAX_HEADER_BYTES,
    PlainCancel,
    read_cancel,
    read_context,
    read_fields,
    read_framing,
    read_part,
    read_reply,
)

SECRET = "000102030405060708090a0b0c0d0e0f"


def read(fields: dict[str, str], *, timeout: float | None = None) -> Context:
    return read_context(fields, timeout=timeout, hop="a.B.c@i1", draining=bool, now=100.0)


def test_a_framing_header_says_secret_window_and_incarnation() -> None:
    assert read_framing(f"1 {SECRET} 262144 1f2e") == (bytes(range(16)), 262144, "1f2e")


def test_words_that_later_versions_add_to_a_framing_header_are_ignored() -> None:
    assert read_framing(f"1 {SECRET} 0 1f2e more") == (bytes(range(16)), 0, "1f2e")


@pytest.mark.parametrize(
    "framing",
    [
        "",
        "1",
        f"2 {SECRET} 262144 1f2e",
        f"1 {SECRET[2:]} 262144 1f2e",
        f"1 {'x' * 32} 262144 1f2e",
        f"1 {SECRET} much 1f2e",
        f"1 {SECRET} 262144",
        f"1 {SECRET} 262144 {'i' * 65}",
    ],
)
def test_a_framing_header_of_another_form_is_refused(framing: str) -> None:
    with pytest.raises(InvalidRequest, match="is not of version 1"):
        read_framing(framing)


def test_a_reply_subject_is_a_base_and_a_number() -> None:
    assert read_reply("_R.-.c1.42") == ("_R.-.c1", 42)


@pytest.mark.parametrize("reply", ["", "_R.-.c1", "_R.-.c1.-4", "_R.-.c1.²", f"_R.-.c1.{10**18}"])
def test_a_reply_subject_without_a_number_is_refused(reply: str) -> None:
    with pytest.raises(InvalidRequest, match="needs a numbered reply"):
        read_reply(reply)


@pytest.mark.parametrize(
    ("timeout", "given", "deadline"),
    [
        (None, None, None),
        (60.0, None, 160.0),
        (None, "1500", 101.5),
        (60.0, "1500", 101.5),
        (1.0, "1500", 101.0),
        (60.0, "0", 100.0),
    ],
)
def test_a_deadline_is_the_earlier_of_the_callers_and_the_endpoints(
    timeout: float | None, given: str | None, deadline: float | None
) -> None:
    fields = {} if given is None else {"Dynbus-Deadline": given}

    context = read(fields, timeout=timeout)

    assert context.deadline == deadline


@pytest.mark.parametrize("deadline", ["", "soon", "-1", "1.5", "²", "1" * 16])
def test_a_deadline_that_is_no_number_is_refused(deadline: str) -> None:
    with pytest.raises(InvalidRequest, match="is no number"):
        read({"Dynbus-Deadline": deadline})


def test_a_context_carries_what_the_caller_sent_along() -> None:
    context = read(
        {
            "Dynbus-Request-Id": "r1",
            "Dynbus-Attempt": "3",
            "Dynbus-Priority": "-2",
            "Dynbus-Idempotency-Key": "k" * 128,
            "traceparent": "00-1-2-01",
            "tracestate": "a=b",
        }
    )

    assert (context.id, context.attempt, context.priority) == ("r1", 3, -2)
    assert context.idempotency_key == "k" * 128
    assert context.hop == "a.B.c@i1"
    assert context.trace_headers() == {"traceparent": "00-1-2-01", "tracestate": "a=b"}


@pytest.mark.parametrize("given", ["", "x" * 129, "a\nb", "ä"])
def test_a_request_id_that_could_not_be_sent_on_is_replaced(given: str) -> None:
    context = read({"Dynbus-Request-Id": given})

    assert context.id != given
    assert len(context.id) == 32


@pytest.mark.parametrize("number", ["", "x", "100000", "1.5", "²", "--1"])
def test_an_attempt_or_priority_that_is_no_small_number_is_the_default(number: str) -> None:
    context = read({"Dynbus-Attempt": number, "Dynbus-Priority": number})

    assert (context.attempt, context.priority) == (1, 0)


@pytest.mark.parametrize("key", ["", "k" * 129, "a\nb", "ä"])
def test_an_idempotency_key_that_cannot_be_kept_whole_is_refused(key: str) -> None:
    # Cut or replaced, the keys of two effects could become one.
    with pytest.raises(InvalidRequest, match="1 to 128 printable ASCII"):
        read({"Dynbus-Idempotency-Key": key})


def test_a_trace_header_that_could_not_be_sent_on_is_left_out() -> None:
    context = read({"traceparent": "00-1-2-01", "tracestate": "a\nb", "baggage": "x" * 8193})

    assert context.trace_headers() == {"traceparent": "00-1-2-01"}


@pytest.mark.parametrize(
    ("fields", "passed_on"),
    [
        ({"Traceparent": "00-1-2-01"}, {"traceparent": "00-1-2-01"}),
        ({"baggage": "c=d"}, {"baggage": "c=d"}),
        (
            {"traceparent": "00-1-2-01", "baggage": "x" * 8192},
            {"traceparent": "00-1-2-01", "baggage": "x" * 8192},
        ),
    ],
)
def test_trace_headers_reach_the_handler_whether_telemetry_is_on_or_not(
    fields: dict[str, str], passed_on: dict[str, str]
) -> None:
    assert read(fields).trace_headers() == passed_on


@pytest.mark.parametrize(("part", "read"), [("1/1", (1, 1)), ("4096/4096", (4096, 4096))])
def test_a_part_header_is_index_and_count(part: str, read: tuple[int, int]) -> None:
    assert read_part(part) == read


@pytest.mark.parametrize("part", ["", "1", "0/2", "3/2", "-1/2", "1/4097", "a/b", "1/2/3"])
def test_a_part_that_cannot_be_is_refused(part: str) -> None:
    with pytest.raises(InvalidRequest):
        read_part(part)


def test_headers_of_more_bytes_than_any_client_needs_are_refused_unread() -> None:
    block = headers.encode({headers.METADATA: "a" * MAX_HEADER_BYTES})

    with pytest.raises(InvalidRequest, match=f"exceed {MAX_HEADER_BYTES}: send less metadata"):
        read_fields(block)


def test_metadata_of_the_largest_size_fits_into_the_headers_of_a_request() -> None:
    metadata = {"k": "\N{GRINNING FACE}" * 8191}

    block = headers.encode({headers.METADATA: headers.encode_metadata(metadata)})

    assert headers.decode_metadata(read_fields(block)[headers.METADATA]) == metadata


@pytest.mark.parametrize(
    ("fields", "cancel"),
    [
        ({headers.CANCEL: "kill", headers.REQUEST_ID: "r"}, PlainCancel("r", kills=True)),
        ({headers.CANCEL: "stop", headers.REQUEST_ID: "r"}, PlainCancel("r", kills=False)),
        ({headers.CANCEL: "perhaps", headers.REQUEST_ID: "r"}, None),
        ({headers.CANCEL: "stop"}, None),
        ({headers.CANCEL: "stop", headers.REQUEST_ID: "r" * 129}, None),
        ({headers.CANCEL: "stop", headers.REQUEST_ID: "r", "X": "x" * MAX_HEADER_BYTES}, None),
    ],
)
def test_a_cancel_of_a_plain_client_names_a_request_id(
    fields: dict[str, str], cancel: PlainCancel | None
) -> None:
    assert read_cancel(headers.encode(fields)) == cancel
