"""What a cancel of an operator says, and what is remembered of it."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.protocol.cancellation import (
    JOB_SECONDS,
    KEPT,
    MAX_IDS,
    REQUEST_SECONDS,
    BadCancel,
    Ended,
    EndedCall,
    Tombstones,
    by_request,
    read_ids,
)

IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=128)


@pytest.mark.parametrize(
    ("said", "ids"),
    [
        (b"8c1f0a7be2d94d63", ["8c1f0a7be2d94d63"]),
        (b"8c1f\n", ["8c1f"]),
        (b"12345678901234567890", ["12345678901234567890"]),
        (b"1e5", ["1e5"]),
        (b'"a"', ["a"]),
        (b'["a", "b", "a"]', ["a", "b"]),
        (b'{"request_id": "a"}', ["a"]),
        (b'{"request_ids": ["a", "b"], "more": 1}', ["a", "b"]),
    ],
)
def test_a_cancel_is_an_id_or_json_with_ids(said: bytes, ids: list[str]) -> None:
    assert read_ids(said) == ids


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "is no request id"),
        (b"\xff", "a cancel is text"),
        (b"a\x00b", "is no request id"),
        ("ä".encode(), "is no request id"),
        (b"x" * 129, "is no request id"),
        (b'""', "is no request id"),
        (b"[]", "names 1 to 256"),
        (b"[1]", "is no request id"),
        (b'{"request_id": 3}', "is no request id"),
        (b'{"request_ids": 3}', "is an array"),
        (b"{}", "an object needs request_id"),
        (b'{"request_id": ', "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (json.dumps([str(i) for i in range(MAX_IDS + 1)]).encode(), "not 257"),
    ],
)
def test_what_is_no_cancel_is_told_what_is_wrong(said: bytes, why: str) -> None:
    with pytest.raises(BadCancel, match=why):
        read_ids(said)


@given(st.binary(max_size=300))
def test_whatever_bytes_come_they_are_ids_or_refused(said: bytes) -> None:
    try:
        ids = read_ids(said)
    except BadCancel:
        return
    assert ids
    assert all(1 <= len(one) <= 128 and one.isascii() and one.isprintable() for one in ids)


@given(st.lists(IDS, min_size=1, max_size=20))
def test_any_ids_that_requests_may_have_can_be_cancelled(ids: list[str]) -> None:
    assert read_ids(json.dumps(ids).encode()) == list(dict.fromkeys(ids))


def test_a_request_that_comes_within_a_minute_of_its_cancel_is_known() -> None:
    tombstones = Tombstones()

    tombstones.add("r", 100.0)

    assert tombstones.has_request("r", 100.0 + REQUEST_SECONDS - 0.1)
    assert not tombstones.has_request("r", 100.0 + REQUEST_SECONDS)
    assert not tombstones.has_request("other", 100.0)


def test_a_job_that_was_queued_before_its_cancel_is_known_for_a_day() -> None:
    tombstones = Tombstones()

    tombstones.add("r", 100.0)

    assert tombstones.has_job(("r", ""), -4000.0)
    assert tombstones.has_job(("j", "r"), 100.0 + REQUEST_SECONDS - 0.1)
    assert not tombstones.has_job(("r", ""), 100.0 + REQUEST_SECONDS)
    tombstones.add("later", 100.0 + JOB_SECONDS)
    assert not tombstones.has_job(("r", ""), -4000.0)


def test_a_cancel_costs_as_much_where_many_were_remembered() -> None:
    tombstones = Tombstones()

    def cost(count: int) -> float:
        began = time.thread_time()
        for number in range(count):
            tombstones.add(f"{began} {number}", 0.0)
        return (time.thread_time() - began) / count

    first = min(cost(KEPT // 4) for _ in range(4))
    later = sum(cost(KEPT // 4) for _ in range(16)) / 16

    assert later < 8 * first


def test_the_oldest_of_too_many_cancels_is_forgotten_and_a_repeated_one_is_new() -> None:
    tombstones = Tombstones()
    for number in range(KEPT):
        tombstones.add(str(number), float(number) / KEPT)

    tombstones.add("0", 2.0)
    tombstones.add("one more", 2.0)

    assert len(tombstones) == KEPT
    assert tombstones.has_request("0", 2.0)
    assert not tombstones.has_request("1", 2.0)


def test_what_was_ended_is_told_request_by_request() -> None:
    calls = [
        EndedCall("a", "demo.A@1"),
        EndedCall("b"),
        EndedCall("a", "demo.A@1"),
        EndedCall("a", "demo.A@2"),
    ]

    assert by_request(calls) == {"a": Ended({"demo.A@1": 2, "demo.A@2": 1}), "b": Ended(made=1)}
