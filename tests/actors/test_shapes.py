"""A missing request is answered with what one looks like, in one short line of JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field

from dynbus.actors.declaring.codec import codec_for
from dynbus.actors.declaring.shapes import MAX_EXAMPLE, describe_request, example_of


class Author(BaseModel):
    name: str
    born: int | None = None


class Book(BaseModel):
    title: str
    authors: list[Author]
    rating: float
    lent: bool
    language: Literal["en", "de"]
    size: tuple[int, int]
    pages: int = 100


class Chain(BaseModel):
    following: list[Chain]


class Optional(BaseModel):
    text: str = "hello"


class Packed(msgspec.Struct):
    numbers: list[int]


def test_an_example_has_every_required_field_with_a_value_of_its_type() -> None:
    example = example_of(codec_for(Book).schema())

    assert example == {
        "title": "text",
        "authors": [{"name": "text"}],
        "rating": 1.5,
        "lent": True,
        "language": "en",
        "size": [1, 1],
    }
    Book.model_validate(example)


@pytest.mark.parametrize(
    "annotation", [Book, Author, Optional, Packed, Author | int, dict[str, int], str, None, Chain]
)
def test_an_example_is_a_request_that_is_read(annotation: Any) -> None:
    codec = codec_for(annotation)

    codec.decode(msgspec.json.encode(example_of(codec.schema())))


def test_an_example_of_the_author_s_own_is_preferred() -> None:
    class Own(BaseModel):
        city: str = Field(examples=["Berlin"])

    assert example_of(codec_for(Own).schema()) == {"city": "Berlin"}


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Author, 'Author as JSON, for example {"name":"text"}'),
        (Optional, 'Optional as JSON, for example {"text":"hello"}'),
        (Packed, 'Packed as JSON, for example {"numbers":[1]}'),
        (list[int], "list[int] as JSON, for example [1]"),
        (str, 'str as JSON, for example "text"'),
    ],
)
def test_a_type_is_described_by_name_and_example(annotation: Any, text: str) -> None:
    assert describe_request(codec_for(annotation)) == text


def test_a_long_example_is_left_out() -> None:
    class Wide(BaseModel):
        text: Literal["x" * MAX_EXAMPLE]  # type: ignore[valid-type]

    assert describe_request(codec_for(Wide)) == "Wide as JSON"
