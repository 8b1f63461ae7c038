"""Where a schema says which values are floats, they are looked at instead of the JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    RootModel,
    TypeAdapter,
    computed_field,
)
from typing_extensions import TypedDict

from dynbus.actors.declaring.json_limits.finite import (
    UNSURE,
    NotFinite,
    Total,
    marks_of_floats,
    refuse_non_finite,
    total_of,
)


class Point(BaseModel):
    x: float
    y: float = 0.0
    label: str = ""


class Line(BaseModel):
    name: str
    points: list[Point] = []
    weight: float | None = None


class Words(RootModel[list[float]]):
    pass


class Dot(BaseModel):
    kind: Literal["dot"] = "dot"


class Ring(BaseModel):
    kind: Literal["ring"] = "ring"
    radius: float = 1.0


class Both(BaseModel):
    first: Ring
    second: Ring


@dataclass
class Box:
    sides: tuple[float, ...]
    count: int = 1


class Row(TypedDict):
    score: float


Shape = Annotated[Dot | Ring, Field(discriminator="kind")]


def total(annotation: Any) -> Total:
    made = total_of(TypeAdapter(annotation).core_schema)
    assert made is not None
    return made


CASES: list[tuple[Any, Callable[[float], Any]]] = [
    (float, lambda number: number),
    (Annotated[float, Field(ge=0)], lambda number: number),
    (list[float], lambda number: [1.0, number]),
    (tuple[str, float], lambda number: ("a", number)),
    (tuple[float, ...], lambda number: (1.0, number)),
    (dict[str, float], lambda number: {"a": number}),
    (float | str | None, lambda number: number),
    (Point, lambda number: Point.model_construct(x=1.0, y=number)),
    (Line, lambda number: Line.model_construct(points=[Point(x=1.0, y=number)], weight=None)),
    (Line, lambda number: Line.model_construct(points=[], weight=number)),
    (Words, lambda number: Words([number])),
    (Shape, lambda number: Ring(radius=number)),
    (Both, lambda number: Both(first=Ring(), second=Ring(radius=number))),
    (Box, lambda number: Box(sides=(1.0, number))),
    (Row, lambda number: {"score": number}),
]


@pytest.mark.parametrize(("annotation", "make"), CASES)
def test_a_total_is_finite_exactly_with_all_its_numbers(
    annotation: Any, make: Callable[[float], Any]
) -> None:
    sum_up = total(annotation)

    assert math.isfinite(sum_up(make(2.5)))
    for number in (math.nan, math.inf, -math.inf):
        assert not math.isfinite(sum_up(make(number)))


@given(st.lists(st.floats()))
def test_no_mixture_of_numbers_hides_one_that_is_not_finite(numbers: list[float]) -> None:
    if math.isfinite(total(list[float])(numbers)):
        assert all(math.isfinite(number) for number in numbers)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [(list[float], ["a"]), (Point, Point.model_construct()), (float | str, b"a"), (float, [1.0])],
)
def test_a_value_that_breaks_its_annotation_is_never_taken_for_finite(
    annotation: Any, value: Any
) -> None:
    with pytest.raises(UNSURE):
        math.isfinite(total(annotation)(value))


def test_a_choice_without_numbers_is_finite() -> None:
    assert total(Shape)(Dot()) == 0.0


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    x: float = 0.0


class Computed(BaseModel):
    x: float = 0.0

    @computed_field
    def half(self) -> float:
        return self.x / 2


class Tree(BaseModel):
    value: float = 0.0
    children: list[Tree] = []


class Spelled(BaseModel):
    x: Annotated[float, PlainSerializer(str)] = 0.0


class Partial(TypedDict, total=False):
    score: float


@pytest.mark.parametrize(
    "annotation", [Any, list[Any], Open, Computed, Tree, Spelled, Partial, list[float] | float]
)
def test_a_schema_that_does_not_say_where_its_floats_are_leaves_the_json_to_be_searched(
    annotation: Any,
) -> None:
    schema = TypeAdapter(annotation).core_schema

    assert total_of(schema) is None
    assert marks_of_floats(schema)


@pytest.mark.parametrize("annotation", [str, int, Dot, list[Dot], dict[str, int | None]])
def test_a_schema_without_floats_has_nothing_to_look_for(annotation: Any) -> None:
    assert not marks_of_floats(TypeAdapter(annotation).core_schema)


def test_the_place_of_a_number_is_told() -> None:
    with pytest.raises(NotFinite) as caught:
        refuse_non_finite({"a": [1.0, {"b": (0.0, math.nan)}]})

    assert str(caught.value) == "a.1.b.1: JSON cannot hold the number nan"
