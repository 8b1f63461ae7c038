"""Requests with an `Idempotency-Key`: the same one again gets the answer that was given."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conditions import eventually

from dynbus.llm.http.idempotency import (
    KEPT_SECONDS,
    MAX_ANSWER_BYTES,
    MAX_ANSWERS,
    MAX_BYTES,
    KeptAnswers,
)
from dynbus.llm.openai.errors import BadRequest, IdempotencyConflict

from .served import served
from .test_connections import chat, error_of, exchange, request


def answer(
    kept: KeptAnswers, key: str, size: int = 10, *, now: float = 0.0, tenant: str = "t"
) -> None:
    """Give an answer of so many bytes, whole and well."""
    recording = kept.begin(tenant, key, b"body", now)
    recording.add({"type": "http.response.start", "status": 200, "headers": []})
    recording.add({"type": "http.response.body", "body": b"x" * size, "more_body": False})
    kept.finish(tenant, key, now, well=True)


def is_kept(kept: KeptAnswers, key: str, now: float = 0.0, *, tenant: str = "t") -> bool:
    """Whether the answer is given again."""
    found = kept.begin(tenant, key, b"body", now)
    if found.ended_at is None:
        kept.finish(tenant, key, now, well=False)
    return found.ended_at is not None


def test_an_answer_is_kept_for_ten_minutes_and_for_its_tenant_alone() -> None:
    kept = KeptAnswers()
    answer(kept, "k")

    assert is_kept(kept, "k", KEPT_SECONDS - 1)
    assert kept.begin("other", "k", b"another body", 1.0).ended_at is None
    assert not is_kept(kept, "k", KEPT_SECONDS)
    kept.finish("other", "k", 1.0, well=False)
    assert (len(kept), kept.size) == (0, 0)


def test_while_the_first_is_answered_the_second_is_a_conflict_and_another_body_is_refused() -> None:
    kept = KeptAnswers()
    kept.begin("t", "k", b"body", 0.0)

    with pytest.raises(IdempotencyConflict):
        kept.begin("t", "k", b"body", 0.0)
    with pytest.raises(BadRequest) as refused:
        kept.begin("t", "k", b"other", 0.0)
    assert refused.value.status == 422


@pytest.mark.parametrize("key", ["", " k", "k ", "a\tb", "ä", "x" * 256])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(BadRequest, match="1 to 255 printable"):
        KeptAnswers().begin("t", key, b"", 0.0)


def test_an_answer_that_failed_is_cut_off_or_too_long_is_not_kept() -> None:
    kept = KeptAnswers()
    start: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": []}
    for pieces, well in (
        ([b"whole"], False),
        ([b"x" * MAX_ANSWER_BYTES, b"more"], True),
    ):
        recording = kept.begin("t", "k", b"body", 0.0)
        recording.add(start)
        for piece in pieces:
            recording.add({"type": "http.response.body", "body": piece, "more_body": False})
        kept.finish("t", "k", 0.0, well=well)
    recording = kept.begin("t", "k", b"body", 0.0)
    recording.add({"type": "http.response.body", "body": b"cut", "more_body": True})
    kept.finish("t", "k", 0.0, well=True)

    assert not is_kept(kept, "k")
    assert kept.size == 0


def test_the_oldest_answer_goes_where_there_are_too_many() -> None:
    kept = KeptAnswers()
    for number in range(MAX_ANSWERS + 1):
        answer(kept, str(number))

    assert len(kept) == MAX_ANSWERS
    assert not is_kept(kept, "0")
    assert is_kept(kept, "1")


def test_a_tenant_that_has_much_takes_nothing_from_one_that_has_its_share() -> None:
    kept = KeptAnswers()
    for number in range(10):
        answer(kept, str(number), MAX_ANSWER_BYTES // 2, tenant="small")
    for number in range(2 * MAX_ANSWERS):
        answer(kept, str(number), tenant="many")
    for number in range(200):
        answer(kept, str(number), MAX_ANSWER_BYTES // 2, tenant="large")

    assert all(is_kept(kept, str(number), tenant="small") for number in range(10))
    assert is_kept(kept, str(2 * MAX_ANSWERS - 1), tenant="many")
    assert not is_kept(kept, "0", tenant="many")
    assert is_kept(kept, "199", tenant="large")
    assert not is_kept(kept, "0", tenant="large")
    assert kept.size <= MAX_BYTES


def test_answers_that_one_tenant_is_being_given_take_nothing_from_another() -> None:
    kept = KeptAnswers()
    answer(kept, "k", MAX_ANSWER_BYTES // 2, tenant="small")
    body = {"type": "http.response.body", "body": b"x" * (MAX_ANSWER_BYTES // 2), "more_body": True}

    running = [kept.begin("large", str(number), b"body", 0.0) for number in range(200)]
    for recording in running:
        recording.add(body)

    assert is_kept(kept, "k", tenant="small")
    assert kept.size <= MAX_BYTES
    assert sum(not one.is_too_long for one in running) > 100


@given(st.lists(st.integers(0, 2 * MAX_ANSWER_BYTES), max_size=200))
def test_the_bytes_of_all_answers_are_bounded(sizes: list[int]) -> None:
    kept = KeptAnswers()
    piece = b"x" * MAX_ANSWER_BYTES
    running: list[str] = []
    for number, size in enumerate(sizes):
        recording = kept.begin("t", str(number), b"body", 0.0)
        recording.add({"type": "http.response.start", "status": 200, "headers": []})
        body = piece[: size // 2]
        recording.add({"type": "http.response.body", "body": body, "more_body": True})
        recording.add({"type": "http.response.body", "body": body, "more_body": False})
        running.append(str(number))
        if size % 3:
            kept.finish("t", running.pop(), 0.0, well=True)
        assert kept.size <= MAX_BYTES
    for key in running:
        kept.finish("t", key, 0.0, well=False)
    kept.begin("t", "last", b"", KEPT_SECONDS)
    assert (kept.size, len(kept)) == (0, 0)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_request_again_gets_the_same_answer(stream: bool) -> None:
    body = chat("say some words", stream=stream)
    async with served() as front:
        first = await exchange(front, request(body, Idempotency_Key="k1"))
        again = await exchange(front, request(body, Idempotency_Key="k1", X_Request_Id="mine"))
        other = await exchange(front, request(body, Idempotency_Key="k2"))
        changed = await exchange(front, request(chat("other"), Idempotency_Key="k1"))
        no_key = await exchange(front, request(body, Idempotency_Key="x" * 300))
        texts = len(front.engine.requests)

    assert first[0] == again[0] == other[0] == 200
    assert again[2] == first[2] != other[2]
    assert "idempotent-replayed: true" in again[1]
    assert "idempotent-replayed" not in first[1]
    assert texts == 2
    assert (changed[0], error_of(changed[2])["code"]) == (422, "idempotency_key_reused")
    assert no_key[0] == 400


@pytest.mark.anyio
async def test_one_that_is_answered_still_is_a_conflict_until_its_client_leaves(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice alices-key\nbob bobs-key-too\n")
    body: Any = chat("silent")
    alice = {"Idempotency_Key": "k", "Authorization": "Bearer alices-key"}
    async with served(api_keys=keys) as front:
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request(body, **alice))
        await eventually(lambda: front.engine.running == 1)

        conflict = await exchange(front, request(body, **alice))
        bobs = await exchange(
            front,
            request(chat("word"), Idempotency_Key="k", Authorization="Bearer bobs-key-too"),
        )
        writer.transport.abort()
        await eventually(lambda: front.front_end.shared.metrics.in_flight == 0)
        later = await exchange(front, request(chat("another"), **alice))

    assert (conflict[0], error_of(conflict[2])["code"]) == (409, "idempotency_conflict")
    assert "retry-after: 1" in conflict[1]
    assert (bobs[0], later[0]) == (200, 200)


@pytest.mark.anyio
async def test_an_error_is_not_kept() -> None:
    async with served() as front:
        for word, status in (("overloaded", 429), ("refuse", 400), ("break", 500)):
            body = json.dumps(chat(word)).encode()
            for _ in range(2):
                told = await exchange(front, request(body, Idempotency_Key=word))
                assert told[0] == status
        assert len(front.engine.requests) >= 5
        assert front.front_end.shared.kept_answers.size == 0
