"""Finding bytes in what is to cross as JSON: pydantic writes them as UTF-8, which few are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec.inspect

from .finite import struct_parts

REMEDY: Final = (
    "JSON has no bytes: put them into a pydantic model with model_config = "
    'ConfigDict(ser_json_bytes="base64", val_json_bytes="base64"), a dataclass with that as its '
    "__pydantic_config__, or a msgspec.Struct; only a whole request, result or item may be bytes"
)

_TEXT_FORMS: Final = ("base64", "hex")


class HoldsBytes(TypeError):
    """Raised for a type whose values hold bytes that JSON would not carry."""


def refuse_bytes(schema: Any) -> None:
    """Check that a pydantic core schema has no bytes but those that are written as text.

    That is what the configuration of the model or dataclass around them may say, or a serializer
    of their own.

    Raises:
        HoldsBytes: it has some; the message says where, and what to do.
    """
    open_parts: list[tuple[Any, bool, str]] = [(schema, False, "")]
    while open_parts:
        part, as_text, place = open_parts.pop()
        if isinstance(part, list | tuple):
            open_parts += [(one, as_text, place) for one in cast("list[Any]", part)]
        if not isinstance(part, dict):
            continue
        keys = cast("dict[str, Any]", part)
        kind = keys.get("type")
        if "serialization" in keys:
            continue
        if kind == "bytes" and not as_text:
            raise HoldsBytes(f"{place or 'it'} is bytes, and {REMEDY}")
        if kind in ("model", "dataclass"):
            # Each has a configuration of its own, never that of what is around it.
            as_text = _writes_text(keys.get("config", {}))
            place = keys["cls"].__name__
        elif kind == "typed-dict":
            place = getattr(keys.get("cls"), "__name__", place)
        elif kind == "dataclass-field":
            place = f"{place}.{keys['name']}"
        for key, value in keys.items():
            if key == "fields" and isinstance(value, dict):
                named = cast("dict[str, Any]", value)
                open_parts += [(one, as_text, f"{place}.{name}") for name, one in named.items()]
            elif key not in ("config", "metadata"):
                open_parts.append((value, as_text, place))


def refuse_bytes_of_msgspec(annotation: Any) -> None:
    """The same for a TypedDict that msgspec reads in place of pydantic, on Python 3.11.

    Raises:
        HoldsBytes: it has some; on other versions of Python they would cross in another form.
    """
    inspect = msgspec.inspect
    kinds = (inspect.BytesType, inspect.ByteArrayType, inspect.MemoryViewType)
    if any(isinstance(part, kinds) for part in struct_parts(annotation)):
        name = getattr(annotation, "__name__", "it")
        raise HoldsBytes(f"a part of {name} is bytes, and {REMEDY}")


def _writes_text(config: Mapping[str, Any]) -> bool:
    written, read = config.get("ser_json_bytes"), config.get("val_json_bytes")
    return written == read and written in _TEXT_FORMS
