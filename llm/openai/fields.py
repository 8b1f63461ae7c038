"""Fields of JSON that was read without a type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import msgspec

from .errors import misfit

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of reading JSON that somebody else has written."""


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """True if a value is an object."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[object]]:
    """True if a value is an array."""
    return isinstance(value, list)


def fields_of(value: object) -> dict[str, Any]:
    """The fields of an object; none of anything else."""
    return value if is_object(value) else {}


def items_of(value: object) -> list[object]:
    """The items of an array; none of anything else."""
    return value if is_array(value) else []


def text_of(fields: Mapping[str, Any], name: str, where: str) -> str:
    """The text that an object has to have in a field.

    Args:
        where: the object is in the request.

    Raises:
        BadRequest: it has none.
    """
    value = fields.get(name)
    if not isinstance(value, str):
        raise misfit(f"{where}.{name}", "give a string")
    return value
