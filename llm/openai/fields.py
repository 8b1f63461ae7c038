"""What is in JSON that was read without a type."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value is an object."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[object]]:
    """Whether a value is an array."""
    return isinstance(value, list)


def fields_of(value: object) -> dict[str, Any]:
    """The fields of an object; none of anything else."""
    return value if is_object(value) else {}


def items_of(value: object) -> list[object]:
    """The items of an array; none of anything else."""
    return value if is_array(value) else []
