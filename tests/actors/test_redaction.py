"""A configured value is shown in the types of JSON, and no secret with it, however deep it lies."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, PostgresDsn, SecretBytes, SecretStr

from dynbus.actors.declaring.arguments import Text
from dynbus.actors.declaring.redaction import MAX_DEPTH, holds_secret, shown
from dynbus.bus.telemetry.logs import HIDDEN

SECRET = "s3cret"
URL = f"postgres://me:{SECRET}@db/x"


class Database(BaseModel):
    model_config = ConfigDict(extra="allow")
    host: str = "db"
    password: str = SECRET
    hidden: str = Field(default=SECRET, repr=False)
    url: PostgresDsn = PostgresDsn(URL)
    also: SecretStr = SecretStr(SECRET)


@dataclass
class Options:
    api_key: str = SECRET
    level: int = 3
    salt: str = field(default=SECRET, repr=False)


class Struct(msgspec.Struct):
    passwd: str = SECRET
    size: int = 1


class Pair(NamedTuple):
    secret: str = SECRET
    number: int = 1


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("password", "x"),
        ("Password", "x"),
        ("password", Text("1234")),
        ("password", 1234),
        ("db_passwd", "x"),
        ("secrets", ["x"]),
        ("api_keys", [1]),
        ("apiKey", "x"),
        ("APIKey", "x"),
        ("api-key", "x"),
        ("openai_apikey", "x"),
        ("api_key_openai", "x"),
        ("hf_token", "x"),
        ("HFToken", "x"),
        ("accessToken", "x"),
        ("id_token", "x"),
        ("token", 1234),
        ("auth_tokens", Text("x")),
        ("dsn", "x"),
        ("sentry_dsn", "x"),
        ("auth", "x"),
        ("auth", {"user": "x"}),
        ("basic_auth", ("a", "b")),
        ("credentials", {"a": 1}),
        ("bearer", "x"),
        ("creds", "x"),
        ("session_cookie", "x"),
        ("webhook", "https://hooks.example/services/T0/B0/x"),
        ("slack_webhook_url", "https://hooks.example/services/T0/B0/x"),
        ("key", "x"),
        ("openai_key", "x"),
        ("ssh_keys", ["x"]),
        ("secret_partition_key", "x"),
        ("secret_name_password", "x"),
        ("secret_id", "x"),
        ("anything", SecretStr("x")),
        ("anything", SecretBytes(b"x")),
    ],
)
def test_a_secret_is_not_shown(name: str, value: Any) -> None:
    assert shown(name, value) == "***"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 1),
        ("max_tokens", 512),
        ("max_tokens", "4k"),
        ("prompt_tokens", "512"),
        ("token_budget", 512),
        ("eos_token_id", 2),
        ("eos_token_ids", [2, 3]),
        ("eos_token", "</s>"),
        ("pad_token", "<pad>"),
        ("stop_tokens", ["</s>"]),
        ("token_type", "byte"),
        ("tokenizer", "t5"),
        ("tokens_per_second", 2.5),
        ("keyboard", "us"),
        ("key_size", 64),
        ("author", "me"),
        ("auth_mode", "basic"),
        ("auth_enabled", True),
        ("password_length", 8),
        ("secrets", 3),
        ("password", None),
        ("sort_key", "name"),
        ("kv_key", "a/b"),
        ("partition_keys", ["day", "tenant"]),
        ("public_key", "ssh-ed25519 AAAA"),
        ("key_column", "id"),
        ("password_file", "/run/secrets/db"),
        ("api_key_env", "OPENAI_API_KEY"),
        ("secret_name", "db"),
        ("credentials_path", "/etc/x.creds"),
        ("session_cookie_name", "sid"),
        ("webhook_timeout", 3),
        ("command", ["--token-type", "byte", "--hf-token", "--verbose"]),
        ("command", "serve --sort-key name - x"),
        ("text", "https://h/?page=2&sort_key=name"),
        ("text", "a@b, c: d"),
        ("text", "https://docs/x@y"),
        ("address", "Me <me@example>"),
    ],
)
def test_what_is_no_secret_is_shown_as_it_is(name: str, value: Any) -> None:
    assert shown(name, value) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (f"redis://:{SECRET}@cache:6379/0", "redis://:***@cache:6379/0"),
        (f"me:{SECRET}@host:4222", "me:***@host:4222"),
        (f"host=db user=me password={SECRET} port=1", "host=db user=me password=*** port=1"),
        (f"https://h/x?size=1&api_key={SECRET}&y=2", "https://h/x?size=1&api_key=***&y=2"),
        (f"https://h/?api_key={SECRET}", "https://h/?api_key=***"),
        (f"https://u:{SECRET}@h/?api_key={SECRET}&x=1", "https://u:***@h/?api_key=***&x=1"),
        (f"https://h/#access_token={SECRET}&x=1", "https://h/#access_token=***&x=1"),
        (f"https://h/o?X-Amz-Signature={SECRET}", "https://h/o?X-Amz-Signature=***"),
        (f"serve --hf-token {SECRET} --port 1", "serve --hf-token *** --port 1"),
        (f"Authorization: Basic {SECRET}", "Authorization: ***"),
        (f"curl -H 'x: Bearer {SECRET}{SECRET}'", "curl -H 'x: Bearer ***'"),
        (f"password: '{SECRET} too', size: 1", "password: '***', size: 1"),
        (f'{{"password": "{SECRET}", "size": 1', '{"password": "***", "size": 1'),
        (Text(f'{{"auth": {{"x": "{SECRET}"}}}}'), '{"auth": "***"}'),
        (f"mysql://me:{SECRET}@db".encode(), "mysql://me:***@db"),
    ],
)
def test_a_secret_inside_a_text_is_taken_out_of_it(value: Any, text: str) -> None:
    assert shown("place", value) == text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            Database.model_validate({"more": {"token": SECRET}}),
            {
                "host": "db",
                "password": "***",
                "hidden": "***",
                "url": "postgres://me:***@db/x",
                "also": "***",
                "more": {"token": "***"},
            },
        ),
        (Options(), {"api_key": "***", "level": 3, "salt": "***"}),
        (Struct(), {"passwd": "***", "size": 1}),
        (Pair(), {"secret": "***", "number": 1}),
        ([{"db": {"password": SECRET}}, (1, 2)], [{"db": {"password": "***"}}, [1, 2]]),
        (
            ["--hf-token", SECRET, f"--api-key={SECRET}", "--port", "1"],
            ["--hf-token", "***", "--api-key=***", "--port", "1"],
        ),
        (deque([{"dsn": SECRET}]), [{"dsn": "***"}]),
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
    found = shown("place", value)

    assert found == expected
    assert SECRET not in json.dumps(found)


def test_a_path_is_shown_whatever_it_leads_to() -> None:
    @dataclass
    class Files:
        tls_key: Path = Path("/etc/tls/key.pem")
        api_keys: Path | None = Path("/etc/keys")
        password: str = "/etc/hidden"

    assert shown("tls_key", Path("/etc/tls/key.pem")) == "/etc/tls/key.pem"
    assert shown("files", Files()) == {
        "tls_key": "/etc/tls/key.pem",
        "api_keys": "/etc/keys",
        "password": HIDDEN,
    }


def test_a_value_that_holds_itself_is_cut() -> None:
    value: dict[str, Any] = {}
    value["again"] = value

    depth, found = 0, shown("x", value)
    while isinstance(found, Mapping):
        depth, found = depth + 1, found["again"]

    assert (depth, found) == (MAX_DEPTH, "...")


def test_it_is_known_whether_something_was_left_out() -> None:
    assert holds_secret("limits", {"deep": [{"password": "x"}]})
    assert not holds_secret("limits", {"deep": [{"size": "x"}]})


@given(
    st.recursive(
        st.just({"password": SECRET}) | st.just(f"redis://me:{SECRET}@h/1") | st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_no_depth_hides_a_secret_from_being_found(value: Any) -> None:
    assert SECRET not in json.dumps(shown("place", value))


def test_long_texts_are_searched_in_no_time() -> None:
    for text in ("a" * 10**6, "a." * 10**6, 'a="' + "\\" * 10**6, "a=" * 10**5, "-a" * 10**6):
        begun = time.process_time()
        shown("text", text)
        # A search that looked at every end for every beginning would take hours.
        assert time.process_time() - begun < 10.0


@pytest.mark.parametrize(
    "given",
    [
        "env: password=hunter2",
        "a=password=hunter2",
        "Authorization: Bearer hunter2",
        [("Authorization", "Bearer hunter2")],
        [{"name": "API_KEY", "value": "hunter2"}],
        {"dbpassword": "hunter2", "hftoken": "hunter2", "jwt": "hunter2", "db_pass": "hunter2"},
    ],
    ids=str,
)
def test_a_secret_is_hidden_wherever_its_name_stands_before_it(given: object) -> None:
    assert "hunter2" not in str(shown("settings", given))
