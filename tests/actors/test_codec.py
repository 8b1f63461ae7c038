"""Requests and results cross as JSON, validated by the handler's own annotations."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from dynbus.actors.codec import Misfit, codec_for


class Prompt(BaseModel):
    text: str
    limit: int = Field(default=1, ge=1)


class LongPrompt(Prompt):
    extra: str = "x"


@dataclass
class Size:
    width: int
    height: int = 1


class Row(TypedDict):
    key: str


class Packed(msgspec.Struct):
    numbers: list[int]


VALUES: list[tuple[Any, Any, bytes]] = [
    (Prompt, Prompt(text="a"), b'{"text":"a","limit":1}'),
    (Size, Size(2), b'{"width":2,"height":1}'),
    (Row, {"key": "k"}, b'{"key":"k"}'),
    (Packed, Packed(numbers=[1, 2]), b'{"numbers":[1,2]}'),
    (list[Packed], [Packed(numbers=[1])], b'[{"numbers":[1]}]'),
    (dict[str, Prompt], {"a": Prompt(text="b")}, b'{"a":{"text":"b","limit":1}}'),
    (Prompt | int, 3, b"3"),
    (type(None), None, b"null"),
    (bool, True, b"true"),
    (datetime.date, datetime.date(2026, 1, 2), b'"2026-01-02"'),
    (Any, {"free": [1, None]}, b'{"free":[1,null]}'),
]


@pytest.mark.parametrize(("annotation", "value", "data"), VALUES)
def test_every_kind_of_value_crosses(annotation: Any, value: Any, data: bytes) -> None:
    codec = codec_for(annotation)

    assert codec.encode(value) == data
    assert codec.decode(data) == value


@pytest.mark.parametrize(("annotation", "value", "data"), VALUES)
def test_a_run_of_items_is_read_as_each_of_them(annotation: Any, value: Any, data: bytes) -> None:
    codec = codec_for(annotation)

    assert codec.decode_many([]) == []
    assert codec.decode_many([data]) == [value]
    assert codec.decode_many([data, data, data]) == [value] * 3


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_json_value_crosses_unchanged(value: Any) -> None:
    codec = codec_for(Any)

    assert codec.decode(codec.encode(value)) == value


@given(st.lists(st.builds(Prompt, text=st.text(), limit=st.integers(1, 100))))
def test_decode_many_is_decode_of_each(prompts: list[Prompt]) -> None:
    codec = codec_for(Prompt)

    assert codec.decode_many([codec.encode(prompt) for prompt in prompts]) == prompts


def test_what_fits_is_made_into_the_model() -> None:
    assert codec_for(Prompt).encode({"text": "a"}) == b'{"text":"a","limit":1}'


def test_a_subclass_is_sent_as_what_the_handler_declares() -> None:
    assert codec_for(Prompt).encode(LongPrompt(text="a")) == b'{"text":"a","limit":1}'


@pytest.mark.parametrize(
    ("annotation", "value", "text"),
    [
        (Prompt, {"words": "a"}, "text: Field required, got {'words': 'a'}"),
        (
            Prompt,
            "a b",
            "the value: Input should be a valid dictionary or instance of Prompt, got 'a b'",
        ),
        (
            int,
            "many",
            "the value: Input should be a valid integer, unable to parse string as "
            "an integer, got 'many'",
        ),
        (Packed, {"numbers": ["a"]}, "Expected `int`, got `str` - at `$.numbers[0]`"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_place(
    annotation: Any, value: Any, text: str
) -> None:
    with pytest.raises(Misfit) as caught:
        codec_for(annotation).encode(value)

    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("annotation", "data", "text"),
    [
        (
            Prompt,
            b'{"text":"a","limit":0}',
            "limit: Input should be greater than or equal to 1, got 0",
        ),
        (Packed, b'{"numbers":3}', "Expected `array`, got `int` - at `$.numbers`"),
        (Packed, b"{", "Input data was truncated"),
    ],
)
def test_bytes_that_do_not_fit_are_refused_with_their_place(
    annotation: Any, data: bytes, text: str
) -> None:
    with pytest.raises(Misfit) as caught:
        codec_for(annotation).decode(data)

    assert str(caught.value) == text


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"{}{}", b"[" * 100_000])
@pytest.mark.parametrize("annotation", [Prompt, Packed, Any])
def test_bytes_that_are_no_json_are_refused(annotation: Any, data: bytes) -> None:
    with pytest.raises(Misfit):
        codec_for(annotation).decode(data)


def test_one_bad_item_spoils_a_run() -> None:
    with pytest.raises(Misfit, match="1.text: Field required"):
        codec_for(Prompt).decode_many([b'{"text":"a"}', b"{}"])


def test_an_item_that_is_two_values_is_refused() -> None:
    with pytest.raises(Misfit, match="an item is not one JSON value"):
        codec_for(int).decode_many([b"1,2", b"3"])


def test_many_mistakes_make_one_bounded_line() -> None:
    with pytest.raises(Misfit) as caught:
        codec_for(list[int]).encode(["x" * 1000] * 9)

    assert str(caught.value).endswith("; and 4 more")
    assert len(str(caught.value)) < 1000


def test_a_result_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(Misfit):
        codec_for(Any).encode(object())


class Score(BaseModel):
    name: str | None = None
    value: float | None = None


class Scores(BaseModel):
    best: list[Score] = []


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")


class PackedScore(msgspec.Struct):
    name: str | None = None
    values: list[float] = []


NUMBERS: list[tuple[Any, Callable[[float], Any], str]] = [
    (float, lambda number: number, "the value"),
    (Score, lambda number: Score(value=number), "value"),
    (Scores, lambda number: Scores(best=[Score(), Score(value=number)]), "best.1.value"),
    (Loose, lambda number: Loose.model_validate({"extra": number}), "extra"),
    (dict[str, float], lambda number: {"a": number}, "a"),
    (set[float], lambda number: {number}, "0"),
    (Any, lambda number: {"a": [None, number]}, "a.1"),
    (PackedScore, lambda number: PackedScore(values=[number]), "values.0"),
]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("annotation", "make", "where"),
    NUMBERS,
)
def test_a_number_that_json_cannot_hold_is_refused_with_its_place(
    annotation: Any, make: Callable[[float], Any], where: str, number: float
) -> None:
    with pytest.raises(Misfit) as caught:
        codec_for(annotation).encode(make(number))

    assert str(caught.value) == f"{where}: JSON cannot hold the number {number}"


@pytest.mark.parametrize("value", [Score(), Score(value=1.5), Scores(best=[Score(name="null")])])
def test_none_beside_a_number_is_no_missing_number(value: BaseModel) -> None:
    codec = codec_for(type(value))

    assert codec.decode(codec.encode(value)) == value


def test_a_model_that_writes_such_numbers_as_strings_is_left_alone() -> None:
    class Spelled(BaseModel):
        model_config = ConfigDict(ser_json_inf_nan="strings")
        value: float
        name: str | None = None

    codec = codec_for(Spelled)

    assert codec.decode(codec.encode(Spelled(value=float("inf")))).value == float("inf")


def test_a_model_without_floats_is_encoded_by_pydantic_alone() -> None:
    assert codec_for(Prompt).to_json is not codec_for(Score).to_json
    assert "built-in" in repr(codec_for(Prompt).to_json)


@pytest.mark.parametrize("annotation", [Any, list[Packed]])
def test_a_value_within_itself_is_refused(annotation: Any) -> None:
    value: list[Any] = []
    value.append(value)

    with pytest.raises(Misfit):
        codec_for(annotation).encode(value)


@pytest.mark.parametrize("annotation", [Prompt, Size, Row, Packed])
def test_every_kind_of_annotation_has_a_schema(annotation: Any) -> None:
    assert codec_for(annotation).schema()


def test_a_type_without_json_is_refused() -> None:
    with pytest.raises(TypeError, match="Unable to generate pydantic-core schema"):
        codec_for(Exception)
