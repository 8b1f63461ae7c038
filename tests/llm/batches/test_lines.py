"""Lines of batches: how files are cut, checked and told."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.batches import lines as module
from dynbus.llm.batches.lines import (
    Answer,
    Chunk,
    LineChecker,
    NoAnswer,
    PartSplitter,
    chunks_of,
    lines_of,
    told_line,
)
from dynbus.llm.openai.errors import BadRequest

CHAT = "/v1/chat/completions"


def line(**fields: Any) -> bytes:
    known = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "tiny"}}
    given = {name: value for name, value in {**known, **fields}.items() if value is not None}
    return json.dumps(given).encode()


@given(st.lists(st.binary(max_size=30)), st.integers(1, 40))
def test_a_file_is_cut_into_whole_lines_however_it_comes(rows: list[bytes], size: int) -> None:
    data = b"\n".join(row.replace(b"\n", b"") for row in rows)
    splitter = PartSplitter()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_BYTES", 16)
        cut = [splitter.add(data[at : at + size]) for at in range(0, len(data), size)]
        parts = [part for one in [*cut, splitter.end()] for part in one]

    assert b"".join(part.data for part in parts) == data
    assert all(part.data.endswith(b"\n") for part in parts[:-1])
    assert [line for part in parts for line in lines_of(part.data)] == lines_of(data)
    assert [part.lines for part in parts] == [len(lines_of(part.data)) for part in parts]


def test_a_line_that_is_too_long_is_refused_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 8)
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 20)
    splitter = PartSplitter()
    splitter.add(b"a\nbb\n" * 3)

    with pytest.raises(BadRequest, match="line 7 has more than 20 bytes"):
        splitter.add(b"c" * 30)


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (line(url=None), "missing_required_parameter", "url"),
        (line(custom_id=7), "invalid_request", None),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id="x" * 600), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "invalid_url", "url"),
        (line(body={"messages": []}), "invalid_request", "body"),
        (line(body="text"), "invalid_request", "body"),
        (line(body={"model": "tiny", "stream": True}), "invalid_request", "body.stream"),
    ],
)
def test_a_line_that_is_no_request_is_an_error(data: bytes, code: str, param: str | None) -> None:
    checker = LineChecker(CHAT)

    checker.add(line(custom_id="first"))
    checker.add(data)
    checker.end()

    [error] = checker.errors
    assert (error.line, error.code, error.param) == (2, code, param)


def test_lines_are_numbered_as_an_editor_numbers_them() -> None:
    checker = LineChecker(CHAT)

    checker.add(b"\n" + line() + b"\n  \r\n" + line() + b"\n\n")
    checker.add(b"\n{")

    assert [error.line for error in checker.errors] == [4, 7]
    assert checker.total == 3


def test_errors_tell_the_beginning_of_what_a_client_wrote() -> None:
    checker = LineChecker(CHAT, ["tiny"])
    long = "\U000e0001" * 400
    for _ in range(2):
        checker.add(line(custom_id=long))
    checker.add(line(custom_id="a", method=long * 9))
    checker.add(line(custom_id="b", url=long * 9))
    checker.add(line(custom_id="c", body={"model": long * 9}))

    assert len(checker.errors) == 4
    assert max(len(error.message) for error in checker.errors) < 1000


def test_a_line_of_any_depth_is_a_request_or_an_error() -> None:
    checker = LineChecker(CHAT)

    for depth in range(500, 1000):
        deep = b"[" * depth + b"]" * depth
        data = line(custom_id=str(depth), body={"model": "tiny", "x": "DEEP"})
        checker.add(data.replace(b'"DEEP"', deep))

    assert checker.errors
    assert {error.message for error in checker.errors} == {"this line is nested too deeply"}


def test_an_id_counts_once_and_errors_are_bounded() -> None:
    checker = LineChecker(CHAT)

    for _ in range(500):
        checker.add(line())

    assert checker.total == 500
    assert len(checker.errors) == module.MAX_ERRORS
    assert {error.code for error in checker.errors} == {"duplicate_custom_id"}


def test_a_file_has_requests_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 2)
    empty, full = LineChecker(CHAT), LineChecker(CHAT)

    empty.end()
    for number in range(5):
        full.add(line(custom_id=str(number)))

    assert [error.code for error in empty.errors] == ["empty_file"]
    assert [(error.line, error.code) for error in full.errors] == [(3, "too_many_requests")]


def test_answers_are_told_as_openai_tells_them() -> None:
    answered = Answer(200, "req", msgspec.Raw(b'{"id": "x"}'))
    refused = NoAnswer("batch_expired", "too late")

    told = [json.loads(told_line("req", "a", one)) for one in (answered, refused)]

    assert told == [
        {
            "id": "req",
            "custom_id": "a",
            "response": {"status_code": 200, "request_id": "req", "body": {"id": "x"}},
            "error": None,
        },
        {
            "id": "req",
            "custom_id": "a",
            "response": None,
            "error": {"code": "batch_expired", "message": "too late"},
        },
    ]


@given(st.lists(st.integers(0, 20)), st.integers(1, 7))
def test_each_line_is_in_one_chunk_in_order(lines: list[int], size: int) -> None:
    chunks = chunks_of(lines, size)

    numbered = [
        (chunk.part, chunk.first + at, chunk.number + at)
        for chunk in chunks
        for at in range(chunk.size)
    ]
    places = [(part, at) for part, count in enumerate(lines) for at in range(count)]
    assert numbered == [(*place, number) for number, place in enumerate(places, 1)]
    assert all(0 < chunk.size <= size for chunk in chunks)
    assert chunks_of([3], 2) == [Chunk(0, 0, 2, 1), Chunk(0, 2, 1, 3)]
