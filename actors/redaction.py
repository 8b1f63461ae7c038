"""What may be shown of a configured value: no password, token or key, however deep it lies.

`shown` takes secrets out of a value of any kind, by the names of what it holds and, as `redact_url`
does for every text that is logged or printed, out of the URLs in it.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import PurePath
from typing import Any, Final, TypeAlias, cast
from uuid import UUID

import msgspec
import pydantic

from dynbus.bus.logs import HIDDEN, redact_url

MAX_DEPTH: Final = 16
"""Of values within values; what is deeper, or holds itself, is cut."""

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

SECRETS: Final = frozenset(
    {
        *("accesskey", "apikey", "authorization", "credential", "dsn", "passphrase", "passwd"),
        *("password", "privatekey", "pwd", "secret"),
    }
)
"""A name with one of these words, or more of them (`secrets`), is that of a secret."""
OFTEN_SECRETS: Final = frozenset({"auth", "key", "token"})
"""So is one with one of these, unless the words around it say that it is something else."""
MEASURES: Final = frozenset(
    {
        *("bits", "budget", "bytes", "count", "length", "limit", "max", "min", "num", "number"),
        *("per", "rate", "ratio", "size", "window"),
    }
)
"""Wherever they stand, the value is a measure: `key_size`, `max_tokens`."""
DESCRIPTIONS: Final = frozenset(
    {
        *("embedding", "enabled", "endpoint", "expiry", "file", "id", "ids", "index", "method"),
        *("mode", "name", "path", "provider", "timeout", "ttl", "type", "url", "usage"),
    }
)
"""After the word, they say that the value only describes it: `eos_token_id`, `auth_mode`."""
VOCABULARY: Final = frozenset(
    {
        *("audio", "bad", "bos", "cls", "decode", "draft", "end", "eos", "image", "input", "mask"),
        *("output", "pad", "prefill", "prompt", "sep", "special", "start", "stop", "unk", "video"),
    }
)
"""Before `token`, they say that it is one of a model: `pad_token`."""

_WORD_START: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\s.-]+")

_WRITTEN: Final = (
    *(Decimal, Fraction, PurePath, UUID),
    *(IPv4Address, IPv4Network, IPv6Address, IPv6Network),
)
_URL_MODULES: Final = ("pydantic", "pydantic_core")

_ASSIGNED: Final = re.compile(
    r"""(?P<name> [A-Za-z_][\w.-]* ) (?P<sign> ["']? \s* [=:] \s* )
        (?P<value> "(?:[^"\\]|\\.)*"? | '(?:[^'\\]|\\.)*'? | [^\s"'&,;)}\]]+ )""",
    re.VERBOSE,
)


def shown(name: str, value: Any) -> Json:
    """A configured value as it may be printed, in the types of JSON.

    Models, structs and mappings are searched by the names of what they hold, texts for URLs and
    for `password=...`. What has no form in JSON is named by its type alone, since its `repr` may
    tell anything.
    """
    return _shown(name, value, 0)


def holds_secret(name: str, value: Any) -> bool:
    """Whether something of the value is left out where it is shown."""
    return HIDDEN in json.dumps(shown(name, value))


def is_secret(name: str, value: Any) -> bool:
    """Whether the value of an argument or a key with this name may not be printed.

    Nothing, and a yes or no, is no secret.
    """
    if isinstance(value, pydantic.SecretStr | pydantic.SecretBytes):
        return True
    if value is None or isinstance(value, bool):
        return False
    words = [word for word in _WORD_START.sub("_", name).lower().split("_") if word]
    singular = [word.removesuffix("s") for word in words]
    is_measure = not MEASURES.isdisjoint(words)
    is_number = _is_number(value)
    if not SECRETS.isdisjoint(singular):
        # A number of them: `secrets=3`; but a password may be digits alone.
        is_plural = SECRETS.isdisjoint(words)
        return not (is_number and (is_measure or is_plural))
    return not is_measure and any(
        word in OFTEN_SECRETS
        and DESCRIPTIONS.isdisjoint(words[place + 1 :])
        and not (word == "token" and place and words[place - 1] in VOCABULARY)
        and not (is_number and words[place] != word)
        for place, word in enumerate(singular)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and value.isdigit())


def _shown(name: str, value: Any, depth: int) -> Json:
    if is_secret(name, value):
        return HIDDEN
    if isinstance(value, Enum):
        return _shown(name, value.value, depth)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return _shown_text(str(value), depth)
    if depth == MAX_DEPTH:
        return "..."
    fields = _fields(value)
    if fields is not None:
        return {str(key): _shown(str(key), each, depth + 1) for key, each in fields.items()}
    if isinstance(value, list | tuple | deque | AbstractSet):
        elements = cast("Iterable[Any]", value)
        return [_shown(name, each, depth + 1) for each in elements]
    return _shown_other(value)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """What a value holds by name; None when it holds nothing so.

    A field that its class keeps out of its `repr` is kept out here too.
    """
    if isinstance(value, Mapping):
        return value  # pyright: ignore[reportUnknownVariableType] - of any types
    if isinstance(value, pydantic.BaseModel):
        declared = {
            name: getattr(value, name, None) if field.repr else HIDDEN
            for name, field in type(value).model_fields.items()
        }
        return declared | (value.model_extra or {})
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {
            field.name: getattr(value, field.name, None) if field.repr else HIDDEN
            for field in dataclasses.fields(value)
        }
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name, None) for name in value.__struct_fields__}
    as_mapping: Any = getattr(value, "_asdict", None)  # of a named tuple
    if isinstance(value, tuple) and as_mapping is not None:
        return cast("Mapping[str, Any]", as_mapping())
    return None


def _shown_text(text: str, depth: int) -> str:
    if text[:1] in ("{", "[") and depth < MAX_DEPTH:
        try:
            held = json.loads(text)
        except ValueError:
            pass
        else:
            clean = _shown("", held, depth + 1)
            return text if clean == held else json.dumps(clean)
    return _ASSIGNED.sub(_hide_assigned, redact_url(text))


def _hide_assigned(found: re.Match[str]) -> str:
    quote = found["value"][:1] if found["value"][:1] in ("'", '"') else ""
    if not is_secret(found["name"], found["value"].strip(quote) if quote else found["value"]):
        return found[0]
    return f"{found['name']}{found['sign']}{quote}{HIDDEN}{quote}"


def _shown_other(value: Any) -> Json:
    """A value that holds nothing by name: how it is written, or else what it is."""
    if isinstance(value, bytes | bytearray):
        try:
            return _shown_text(value.decode(), 0)
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, _WRITTEN) or type(value).__module__.partition(".")[0] in _URL_MODULES:
        return redact_url(str(value))
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    what = f"{named.__module__}:{named.__qualname__}"
    return what if named is value else f"{what} object"
