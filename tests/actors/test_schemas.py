"""The hash of what a handler reads and writes: the same for what fits alike, other for the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from decimal import Decimal
from enum import Enum
from typing import Any, TypedDict

import msgspec
import pytest
from pydantic import BaseModel, Field, GetCoreSchemaHandler, computed_field
from pydantic_core import CoreSchema, core_schema

from dynbus import Actor, handler
from dynbus.actors.declaring.codec import codec_for
from dynbus.actors.declaring.schemas import (
    UNKNOWN,
    canonical_schema,
    encode_schemas,
    schemas_of,
)


def hash_of(annotation: Any) -> str:
    codec = codec_for(annotation)
    return schemas_of(codec, codec, request_has_default=False).hash


def test_a_hash_is_short_and_the_same_in_every_process() -> None:
    program = (
        "from tests.actors.test_schemas import hash_of, Colour\n"
        "print(hash_of(dict[str, tuple[int, Colour | None]]))"
    )
    # This process has another seed, by chance.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()

    assert told == hash_of(dict[str, tuple[int, Colour | None]])
    assert len(told) == 16


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def test_words_about_a_field_and_the_order_of_fields_do_not_change_it() -> None:
    def plain() -> Any:
        class Prompt(BaseModel):
            text: str
            limit: int = 5

        return Prompt

    def described() -> Any:
        class Prompt(BaseModel):
            """What is asked."""

            limit: int = Field(7, description="tokens", title="Limit of tokens", examples=[3])
            text: str = Field(description="the question")

        return Prompt

    assert hash_of(plain()) == hash_of(described())


@pytest.mark.parametrize("field", [(int, ...), (str | None, None), (str, Field(max_length=3))])
def test_what_decides_whether_a_value_fits_changes_it(field: Any) -> None:
    import pydantic

    before = pydantic.create_model("Prompt", text=(str, ...))
    after = pydantic.create_model("Prompt", text=field)

    assert hash_of(before) != hash_of(after)


def test_a_property_that_is_called_like_a_keyword_stays() -> None:
    schema = {
        "type": "object",
        "title": "Page",
        "properties": {"title": {"type": "string", "title": "Title"}, "default": True},
    }

    assert canonical_schema(schema) == {
        "type": "object",
        "properties": {"title": {"type": "string"}, "default": True},
    }


class Sum(BaseModel):
    parts: list[int] = []

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        return sum(self.parts)


def test_what_is_written_has_computed_fields_and_defaults_in_any_case() -> None:
    codec = codec_for(Sum)
    known = schemas_of(codec, codec, request_has_default=False)

    assert known.request_read["properties"].keys() == {"parts"}
    assert "required" not in known.request_read
    assert known.reply_written["required"] == ["parts", "total"]


class Unwritable:
    """A type that can be read and has no JSON schema."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(lambda value: value)


class Moody(BaseModel):
    @classmethod
    def __get_pydantic_json_schema__(cls, *_: Any) -> Any:
        raise LookupError("no schema today")


@pytest.mark.parametrize("annotation", [Unwritable, Moody, list[Moody]])
def test_a_type_without_a_schema_has_no_hash(annotation: Any) -> None:
    codec = codec_for(annotation)

    assert schemas_of(codec, codec_for(int), request_has_default=False) is UNKNOWN


class Point(msgspec.Struct):
    x: int
    near: list[Point] = []


class Named(TypedDict, total=False):
    name: str


@pytest.mark.parametrize(
    "annotation",
    [int, Any, Point, Named, dict[str, Point], Decimal, bytes, msgspec.Raw, Colour, set[int], None],
)
def test_an_instance_says_what_it_reads_and_writes(annotation: Any) -> None:
    codec = codec_for(annotation)
    known = schemas_of(codec, codec, request_has_default=True)

    assert msgspec.json.decode(encode_schemas(known)) == {
        "hash": known.hash,
        "reply": known.reply_written,
        "request": known.request_read,
        "request_has_default": True,
    }


class Speller(Actor, namespace="schemas"):
    @handler
    async def spell(self, text: str, context: Any = None) -> AsyncGenerator[str, None]:
        yield text

    @handler
    async def silent(self) -> None: ...


def test_a_handler_s_context_is_no_part_of_its_schemas() -> None:
    spell, silent = (spec.schemas for spec in Speller.__dynbus_handlers__.values())

    assert (spell.request_read, spell.reply_written) == ({"type": "string"}, {"type": "string"})
    assert silent.request_read is None
