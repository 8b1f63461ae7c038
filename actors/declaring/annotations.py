"""The annotations of a function of the user's, resolved."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

from dynbus.bus.errors import ConfigError


def resolve_annotations(function: Callable[..., Any], label: str) -> dict[str, Any]:
    """The resolved annotations of a function, by parameter; `return` is that of its result.

    Args:
        label: how the message names the function.

    Raises:
        ConfigError: one of them is a text that is no type here.
    """
    try:
        return typing.get_type_hints(function)
    except Exception as error:  # noqa: BLE001 - annotations written as text are code of users
        raise ConfigError(
            f"{label}: an annotation cannot be resolved: {type(error).__name__}: {error}"
        ) from None
