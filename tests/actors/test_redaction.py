"""A configured value is shown in the types of JSON, without what is marked as a secret in it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, PostgresDsn, SecretBytes, SecretStr

from dynbus.actors.declaring.arguments import Text
from dynbus.actors.declaring.redaction import MAX_DEPTH, shown, takes_secret

SECRET = "s3cret"
URL = f"postgres://me:{SECRET}@db/x"


class Database(BaseModel):
    model_config = ConfigDict(extra="allow")
    host: str = "db"
    hidden: str = Field(default=SECRET, repr=False)
    url: PostgresDsn = PostgresDsn(URL)
    also: SecretStr = SecretStr(SECRET)


class Open(BaseModel):
    password: str = "12"
    max_tokens: int = 3


@dataclass
class Options:
    api_key: SecretBytes = SecretBytes(SECRET.encode())
    level: int = 3
    salt: str = field(default=SECRET, repr=False)


@dataclass
class Plain:
    keys: Sequence[str] = ()
    next: Plain | None = None


class Struct(msgspec.Struct):
    key: SecretStr
    size: int = 1


class Pair(NamedTuple):
    secret: SecretStr = SecretStr(SECRET)
    number: int = 1


class Dict(TypedDict):
    key: SecretStr


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize("value", [SecretStr("x"), SecretBytes(b"x")])
def test_what_is_marked_is_not_shown(value: Any) -> None:
    assert shown(value) == "***"


def test_nothing_is_guessed_from_names() -> None:
    assert shown({"password": "12", "api_key": ["a"], "text": "key=b --token c"}) == {
        "password": "12",
        "api_key": ["a"],
        "text": "key=b --token c",
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (f"redis://:{SECRET}@cache:6379/0", "redis://:***@cache:6379/0"),
        (f"me:{SECRET}@host:4222", "me:***@host:4222"),
        (Text(f'{{"url": "{URL}"}}'), '{"url": "postgres://me:***@db/x"}'),
        (f"mysql://me:{SECRET}@db".encode(), "mysql://me:***@db"),
    ],
)
def test_credentials_in_urls_are_taken_out_of_texts(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            Database.model_validate({"more": {"token": SecretStr(SECRET)}}),
            {
                "host": "db",
                "hidden": "***",
                "url": "postgres://me:***@db/x",
                "also": "***",
                "more": {"token": "***"},
            },
        ),
        (Open(), {"password": "12", "max_tokens": 3}),
        (Options(), {"api_key": "***", "level": 3, "salt": "***"}),
        (Struct(SecretStr(SECRET)), {"key": "***", "size": 1}),
        (Pair(), {"secret": "***", "number": 1}),
        ([{"db": Pair()}, (1, 2)], [{"db": {"secret": "***", "number": 1}}, [1, 2]]),
        (deque([{"dsn": SecretStr(SECRET)}]), [{"dsn": "***"}]),
        ({"servers": [f"nats://me:{SECRET}@h:1"]}, {"servers": ["nats://me:***@h:1"]}),
        (Path("a/b"), "a/b"),
        (Colour.RED, "red"),
        (float("inf"), "inf"),
        (timedelta(seconds=90), 90.0),
        (date(2026, 1, 2), "2026-01-02"),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        (Decimal("1.5"), "1.5"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (b"\xff\x00", "/wA="),
        (Colour, "tests.actors.test_redaction:Colour"),
        (object(), "builtins:object object"),
    ],
)
def test_a_value_is_shown_in_the_types_of_json(value: Any, expected: Any) -> None:
    found = shown(value)

    assert found == expected
    assert SECRET not in json.dumps(found)


def test_a_value_that_holds_itself_is_cut() -> None:
    value: dict[str, Any] = {}
    value["again"] = value

    depth, found = 0, shown(value)
    while isinstance(found, Mapping):
        depth, found = depth + 1, found["again"]

    assert (depth, found) == (MAX_DEPTH, "...")


@given(
    st.recursive(
        st.just(SecretStr(SECRET)) | st.just(f"redis://me:{SECRET}@h/1") | st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_no_depth_hides_a_secret_from_being_found(value: Any) -> None:
    assert SECRET not in json.dumps(shown(value))


@pytest.mark.parametrize(
    "annotation",
    [
        SecretStr,
        SecretBytes | None,
        list[SecretStr],
        dict[str, tuple[int, Database]],
        Options,
        Struct,
        Pair,
        Dict,
    ],
)
def test_a_type_that_may_hold_a_secret_is_known_before_a_value_is_read(annotation: Any) -> None:
    assert takes_secret(annotation)


@pytest.mark.parametrize("annotation", [str, int | None, list[Open], Plain, Any, dict[str, Any]])
def test_other_types_hold_none(annotation: Any) -> None:
    assert not takes_secret(annotation)
