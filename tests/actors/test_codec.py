"""Requests and results cross as JSON, validated by the handler's own annotations."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from dynbus import InvalidResponse
from dynbus.actors.declaring.codec import Misfit, codec_for


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


class PackedAnything(msgspec.Struct):
    it: Any = None


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


class Aliased(BaseModel):
    max_tokens: int = Field(alias="maxTokens")
    inner: list[Aliased] = []


class WrittenOtherwise(BaseModel):
    max_tokens: int = Field(serialization_alias="maxTokens")


@pytest.mark.parametrize(
    "value",
    [
        Aliased(maxTokens=1, inner=[Aliased(maxTokens=2)]),
        WrittenOtherwise(max_tokens=1),
    ],
)
def test_a_model_with_aliases_crosses(value: BaseModel) -> None:
    codec = codec_for(type(value))

    assert codec.decode(codec.encode(value)) == value
    assert codec.decode(codec.encoder(InvalidResponse)(value)) == value


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


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (PackedAnything, PackedAnything("\ud800")),
        (Any, {"text": "\ud800"}),
        (Prompt, Prompt.model_construct(text="\ud800")),
    ],
)
def test_text_that_is_no_unicode_is_refused(annotation: Any, value: Any) -> None:
    codec = codec_for(annotation)
    encode_quickly = codec.encoder(InvalidResponse)

    with pytest.raises(Misfit, match="surrogate"):
        codec.encode(value)
    with pytest.raises(InvalidResponse, match="surrogate"):
        encode_quickly(value)


class Nested(BaseModel):
    inner_value: list[Nested] = []


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("wrong", [Unshowable(), _nested(100_000)])
def test_a_wrong_value_that_cannot_be_shown_is_refused_as_any_other(wrong: Any) -> None:
    with pytest.raises(Misfit, match="^text: Input should be a valid string, got "):
        codec_for(Prompt).encode({"text": wrong})


def test_the_place_of_a_deep_mistake_is_short() -> None:
    value: Any = "x"
    for _ in range(100):
        value = {"inner_value": [value]}

    with pytest.raises(Misfit) as caught:
        codec_for(Nested).encode(value)

    assert "inner_value.0: " in str(caught.value)
    assert len(str(caught.value)) < 400


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


KEYS: list[tuple[Any, Callable[[float], Any], str]] = [
    (Any, lambda number: {number: 1}, "the value"),
    (Any, lambda number: {"a": [{(number, 1): 1}]}, "a.0"),
    (dict[float, float], lambda number: {number: 1.0}, "the value"),
    (PackedAnything, lambda number: PackedAnything({number: 1}), "it"),
]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("annotation", "make", "where"),
    KEYS,
)
def test_a_key_that_json_cannot_hold_is_refused_with_its_place(
    annotation: Any, make: Callable[[float], Any], where: str, number: float
) -> None:
    with pytest.raises(Misfit) as caught:
        codec_for(annotation).encode(make(number))

    assert f"{where}: JSON cannot hold the key " in str(caught.value)


@pytest.mark.parametrize("value", [{"None": 1}, {"nan": "inf"}, {2.5: "None"}])
def test_keys_that_look_like_such_a_number_pass(value: Any) -> None:
    codec_for(Any).encode(value)
    codec_for(PackedAnything).encode(PackedAnything(value))


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


@dataclass
class SizeOf:
    area: float | None = None


class Grade(BaseModel):
    kind: Literal["grade"] = "grade"
    values: tuple[float, ...] = ()


class Report(BaseModel):
    kind: Literal["report"] = "report"
    grade: Grade | None = None
    outcome: Grade | float | str | None = None
    by_name: dict[str, Grade] = {}
    pair: tuple[str, float] = ("", 0.0)
    size: SizeOf | None = None
    always_one: float = 1.0


class Tree(BaseModel):
    value: float | None = None
    children: list[Tree] = []


def grade(number: float) -> Grade:
    return Grade(values=(0.5, number))


NESTED: list[tuple[Callable[[float], BaseModel], str]] = [
    (lambda number: Report(grade=grade(number)), "grade.values.1"),
    (lambda number: Report(outcome=grade(number)), "outcome.values.1"),
    (lambda number: Report(outcome=number), "outcome"),
    (lambda number: Report(by_name={"a": grade(number)}), "by_name.a.values.1"),
    (lambda number: Report(pair=("a", number)), "pair.1"),
    (lambda number: Report(size=SizeOf(area=number)), "size.area"),
    (lambda number: Report(always_one=number), "always_one"),
    (lambda number: Tree(children=[Tree(), Tree(value=number)]), "children.1.value"),
]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("make", "where"), NESTED)
def test_such_a_number_is_found_at_any_depth_also_on_the_hot_path(
    make: Callable[[float], BaseModel], where: str, number: float
) -> None:
    value = make(number)
    encode = codec_for(type(value)).encoder(InvalidResponse)

    with pytest.raises(InvalidResponse) as caught:
        encode(value)

    assert str(caught.value) == f"{where}: JSON cannot hold the number {number}"


@pytest.mark.parametrize(("make", "where"), NESTED)
def test_numbers_that_json_can_hold_pass_at_any_depth(
    make: Callable[[float], BaseModel], where: str
) -> None:
    value = make(1.5)
    codec = codec_for(type(value))

    assert codec.decode(codec.encoder(InvalidResponse)(value)) == value


def test_large_numbers_whose_sum_is_infinite_pass() -> None:
    value = Grade(values=(1.7e308, 1.7e308))
    codec = codec_for(Grade)

    assert codec.decode(codec.encoder(InvalidResponse)(value)) == value


# Both sides validate ----------------------------------------------------------------------


class Sheet(msgspec.Struct):
    rows: Annotated[int, msgspec.Meta(ge=1)]
    score: float | None = None


@dataclass
class Area:
    width: Annotated[int, Field(ge=1)]


@pydantic_dataclass
class CheckedArea:
    width: int


class Plan(BaseModel):
    area: Area


WRONG: Any = "wide"

UNFIT: list[tuple[Any, Callable[[], Any], str]] = [
    (Sheet, lambda: Sheet(rows=0), "Expected `int` >= 1 - at `$.rows`"),
    (Sheet, lambda: Sheet(rows=WRONG), "Expected `int`, got `str` - at `$.rows`"),
    (list[Sheet], lambda: [Sheet(rows=0)], "Expected `int` >= 1 - at `$[0].rows`"),
    (Area, lambda: Area(width=0), "width: Input should be greater than or equal to 1, got 0"),
    (list[Area], lambda: [Area(width=0)], "0.width: Input should be greater than or equal to 1"),
    (Plan, lambda: Plan(area=Area(width=0)), "area.width: Input should be greater than"),
    (
        Area,
        lambda: Area(width=WRONG),
        "width: Input should be a valid integer, unable to parse string as an integer, got 'wide'",
    ),
]


@pytest.mark.parametrize(("annotation", "make", "text"), UNFIT)
def test_an_instance_whose_fields_do_not_fit_is_refused_by_whoever_sends_it(
    annotation: Any, make: Callable[[], Any], text: str
) -> None:
    codec = codec_for(annotation)

    with pytest.raises(Misfit) as request:
        codec.encode(make())
    with pytest.raises(InvalidResponse) as result:
        codec.encoder(InvalidResponse)(make())

    assert str(request.value).startswith(text)
    assert str(result.value).startswith(text)


def changed(value: Any, **fields: Any) -> Any:
    for name, field in fields.items():
        setattr(value, name, field)
    return value


@pytest.mark.parametrize(
    "value",
    [
        changed(Prompt(text="a"), limit=WRONG),
        changed(CheckedArea(width=1), width=WRONG),
        Prompt.model_construct(text="a", limit=WRONG),
    ],
)
def test_a_request_that_was_changed_after_it_was_validated_is_refused(value: Any) -> None:
    with pytest.raises(Misfit, match="should be a valid integer, unable to parse string"):
        codec_for(type(value)).encode(value)


def test_a_change_that_the_other_side_takes_is_sent() -> None:
    prompt = changed(Prompt(text="a"), limit="3")

    data = codec_for(Prompt).encode(prompt)

    assert codec_for(Prompt).decode(data) == Prompt(text="a", limit=3)


@pytest.mark.parametrize(("annotation", "value", "data"), VALUES)
def test_the_hot_path_writes_the_same(annotation: Any, value: Any, data: bytes) -> None:
    assert codec_for(annotation).encoder(InvalidResponse)(value) == data


def test_a_value_that_breaks_its_annotation_is_told_on_the_hot_path_as_elsewhere() -> None:
    encode = codec_for(Score).encoder(InvalidResponse)

    with pytest.raises(InvalidResponse, match="Input should be a valid dictionary"):
        encode(3)
    with pytest.raises(InvalidResponse, match="JSON cannot hold the number nan"):
        encode({"value": float("nan")})


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
