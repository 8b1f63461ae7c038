"""Configured values as they may be printed: without what is marked as a secret, and without
credentials in URLs.

A secret is marked by its type, pydantic's `SecretStr` or `SecretBytes`, or by `repr=False` of the
field that has it; an argument by `Annotated[str, Field(repr=False)]`. Nothing is guessed from
names.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import math
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import PurePath
from typing import (
    Annotated,
    Any,
    Final,
    TypeAlias,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from uuid import UUID

import msgspec
import pydantic
from pydantic.fields import FieldInfo

from dynbus.bus.telemetry.logs import HIDDEN, redact_url

MAX_DEPTH: Final = 16
"""Of values within values; what is deeper, or holds itself, is cut."""

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

_SECRETS: Final = (pydantic.SecretStr, pydantic.SecretBytes)
_WRITTEN: Final = (
    *(Decimal, Fraction, PurePath, UUID),
    *(IPv4Address, IPv4Network, IPv6Address, IPv6Network),
)
_URL_MODULES: Final = ("pydantic", "pydantic_core")


def shown(value: Any) -> Json:
    """A configured value as it may be printed, in the types of JSON.

    Models, structs and mappings are searched for what is marked. What has no form in JSON is named
    by its type alone, since its `repr` may tell anything.
    """
    return _shown(value, 0)


def is_marked(annotation: Any) -> bool:
    """True if an annotation has a field of pydantic's beside its type that is in no `repr`."""
    return get_origin(annotation) is Annotated and any(
        isinstance(each, FieldInfo) and not each.repr for each in get_args(annotation)[1:]
    )


def takes_secret(annotation: Any) -> bool:
    """True if a value of this type may hold what is marked, before it has been read as that."""
    waiting, seen = [annotation], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        waiting += get_args(one)
        if not isinstance(one, type):
            continue
        kind = cast("type[object]", one)
        fields = _is_shown(kind)
        if issubclass(kind, _SECRETS) or not all(fields.values()):
            return True
        holds_by_name = issubclass(kind, msgspec.Struct | tuple) or is_typeddict(kind)
        if fields or holds_by_name:
            try:
                waiting += get_type_hints(cast("Any", kind)).values()
            except (NameError, TypeError):
                return True  # nobody knows
    return False


def _is_shown(kind: type[Any]) -> dict[str, bool]:
    """The fields of a model or a dataclass, each with whether its class keeps it in its `repr`."""
    if issubclass(kind, pydantic.BaseModel):
        return {name: field.repr for name, field in kind.model_fields.items()}
    if dataclasses.is_dataclass(kind):
        return {field.name: field.repr for field in dataclasses.fields(kind)}
    return {}


def _shown(value: Any, depth: int) -> Json:
    if isinstance(value, _SECRETS):
        return HIDDEN
    if isinstance(value, Enum):
        return _shown(value.value, depth)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return redact_url(str(value))
    if depth == MAX_DEPTH:
        return "..."
    fields = _fields(value)
    if fields is not None:
        return {str(key): _shown(each, depth + 1) for key, each in fields.items()}
    if isinstance(value, list | tuple | deque | AbstractSet):
        return [_shown(each, depth + 1) for each in cast("Iterable[Any]", value)]
    return _shown_other(value)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """The fields of a value by name; None when it has none."""
    if isinstance(value, Mapping):
        return value  # pyright: ignore[reportUnknownVariableType] - of any types
    if isinstance(value, type):
        return None
    marked = _is_shown(cast("type[object]", type(value)))
    if marked or isinstance(value, pydantic.BaseModel):
        declared = {
            name: getattr(value, name, None) if is_shown else HIDDEN
            for name, is_shown in marked.items()
        }
        return declared | (getattr(value, "model_extra", None) or {})
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name, None) for name in value.__struct_fields__}
    as_mapping: Any = getattr(value, "_asdict", None)  # of a named tuple
    if isinstance(value, tuple) and as_mapping is not None:
        return cast("Mapping[str, Any]", as_mapping())
    return None


def _shown_other(value: Any) -> Json:
    """A value that holds nothing by name: how it is written, or else what it is."""
    if isinstance(value, bytes | bytearray):
        try:
            return redact_url(value.decode())
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
