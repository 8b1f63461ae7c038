"""Redaction of configured values: no password, token or key is shown, however deep it lies.

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

from dynbus.bus.telemetry.logs import HIDDEN, redact_url

MAX_DEPTH: Final = 16
"""Of values within values; what is deeper, or holds itself, is cut."""

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SECRETS: Final = _words(
    "accesskey apikey authorization bearer cookie cred credential dsn jwt nkey pass passcode "
    "passphrase passwd password privatekey pw pwd secret webhook"
)
"""A name with one of these words, or more of them (`secrets`), is that of a secret."""
ENDINGS: Final = ("apikey", "accesskey", "password", "passwd", "privatekey", "secret", "secretkey")
"""So is one with a word that ends so (`dbpassword`), or in `token` (`hftoken`)."""
PLACES: Final = _words(
    "arn dir directory env environment file filename folder location name path provider ref "
    "reference var variable"
)
"""After the word for a secret, they say that the value tells where it is: `password_file`."""
OFTEN_SECRETS: Final = _words("auth key token")
"""So is one with one of these, unless the words around it say that it is something else."""
MEASURES: Final = _words(
    "bits budget bytes count length limit max min num number per port rate ratio retries "
    "seconds size timeout ttl window"
)
"""Wherever they stand, the value is a measure: `key_size`, `max_tokens`."""
DESCRIPTIONS: Final = _words(
    "column embedding enabled endpoint expiry field format id ids index method mode prefix "
    "type url usage"
)
"""After one of the second kind, they say that the value only describes it: `eos_token_id`."""
VOCABULARY: Final = _words(
    "audio bad bos cls decode draft end eos image input mask output pad prefill prompt sep "
    "special start stop unk video"
)
"""Before `token`, they say that it is one of a model: `pad_token`."""
ORDERINGS: Final = _words(
    "block cache column composite dict field foreign group index join json kv lookup map "
    "order partition primary public route routing row shard sort unique"
)
"""Before `key`, they say that something is found or ordered by it, or that all may know it:
`sort_key`. After anything else (`openai_key`) it is taken for a secret."""

_HARMLESS_BEFORE: Final = {"token": VOCABULARY, "key": ORDERINGS}

_WORD_START: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\s.-]+")

_WRITTEN: Final = (
    *(Decimal, Fraction, PurePath, UUID),
    *(IPv4Address, IPv4Network, IPv6Address, IPv6Network),
)
_URL_MODULES: Final = ("pydantic", "pydantic_core")

# None of these looks at a character more than a few times, however long a text is.
_NAMED: Final = re.compile(r"""(?<![\w.-])-{0,2}(?P<name>[A-Za-z_][\w.-]*+)["']?\s*+[=:]\s*+""")
_GIVEN: Final = re.compile(
    r"""" (?:[^"\\]|\\.)*+ "? | ' (?:[^'\\]|\\.)*+ '?
        | (?: (?i:basic|bearer|token) [ ]++ )? [^\s"'&,;)}\]]++""",
    re.VERBOSE,
)
_QUERIED: Final = re.compile(r"""(?<=[?&\#])(?P<name>[\w.%\[\]-]+)=(?P<value>[^\s"'<>&\#]+)""")
_OPTION: Final = re.compile(
    r"""(?<!\S)(?P<flag>--?[A-Za-z][\w.-]*)(?P<space>[ ]+)
        (?P<value> "[^"]*" | '[^']*' | (?!-)\S+ )""",
    re.VERBOSE,
)
_FLAG: Final = re.compile(r"--?[A-Za-z][\w.-]*")
_BEARER: Final = re.compile(r"\b(?P<scheme>bearer[ ]+)[\w.~+/=-]{8,}", re.IGNORECASE)
_SIGNATURES: Final = ("sig", "signature")


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

    Nothing, a yes or no, and a path are no secret: a path tells where one is.
    """
    if isinstance(value, pydantic.SecretStr | pydantic.SecretBytes):
        return True
    if value is None or isinstance(value, bool | PurePath):
        return False
    words = [word for word in _WORD_START.sub("_", name).lower().split("_") if word]
    singular = [word if word in SECRETS else word.removesuffix("s") for word in words]
    is_measure = not MEASURES.isdisjoint(words)
    is_number = _is_number(value)
    is_told = [PLACES.isdisjoint(words[place + 1 :]) for place in range(len(words))]
    certain = [place for place, word in enumerate(singular) if _is_certain(word) and is_told[place]]
    if certain:
        # A number of them: `secrets=3`; but a password may be digits alone.
        is_plural = all(words[place] != singular[place] for place in certain)
        return not (is_number and (is_measure or is_plural))
    return not is_measure and any(
        word in OFTEN_SECRETS
        and is_told[place]
        and DESCRIPTIONS.isdisjoint(words[place + 1 :])
        and not (place and words[place - 1] in _HARMLESS_BEFORE.get(word, ()))
        and not (is_number and words[place] != word)
        for place, word in enumerate(singular)
    )


def _is_certain(word: str) -> bool:
    return word in SECRETS or word.endswith(ENDINGS) or (word.endswith("token") and word != "token")


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
        named = fields.get("name", fields.get("key"))
        return {
            str(key): _shown(
                named if key == "value" and isinstance(named, str) else str(key), each, depth + 1
            )
            for key, each in fields.items()
        }
    if isinstance(value, list | tuple | deque | AbstractSet):
        elements = list(cast("Iterable[Any]", value))
        first = elements[0] if len(elements) == 2 else None
        if isinstance(first, str) and is_secret(first, elements[1]):
            # A name and its value, as headers are given.
            return [first, HIDDEN]
        return [
            HIDDEN if _is_given_to(before, each) else _shown(name, each, depth + 1)
            for before, each in zip([None, *elements], elements, strict=False)
        ]
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
    text = _QUERIED.sub(_hide_queried, redact_url(text))
    text = _OPTION.sub(_hide_of_option, _BEARER.sub(rf"\g<scheme>{HIDDEN}", text))
    return _without_given(text)


def _is_given_to(before: Any, value: Any) -> bool:
    """Whether an element of a command line is the secret of the flag before it."""
    return (
        isinstance(before, str)
        and _FLAG.fullmatch(before) is not None
        and not (isinstance(value, str) and value.startswith("-"))
        and is_secret(before, value)
    )


def _hide_of_option(found: re.Match[str]) -> str:
    if not is_secret(found["flag"], found["value"]):
        return found[0]
    return f"{found['flag']}{found['space']}{HIDDEN}"


def _hide_queried(found: re.Match[str]) -> str:
    is_signature = found["name"].lower().endswith(_SIGNATURES)
    if not (is_signature or is_secret(found["name"], found["value"])):
        return found[0]
    return f"{found['name']}={HIDDEN}"


def _without_given(text: str) -> str:
    """A text without the values that it gives to names of secrets: `password=...`."""
    kept: list[str] = []
    begin = 0
    while (named := _NAMED.search(text, begin)) is not None:
        kept.append(text[begin : named.end()])
        begin = named.end()
        if not is_secret(named["name"], "of any kind"):
            continue
        given = _GIVEN.match(text, begin)
        if given is None:
            continue
        quote = given[0][:1] if given[0][:1] in ("'", '"') else ""
        if is_secret(named["name"], given[0].strip(quote) if quote else given[0]):
            kept.append(f"{quote}{HIDDEN}{quote}")
            begin = given.end()
    return "".join([*kept, text[begin:]])


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
