"""Constructor arguments of actors: where they come from, and that they fit.

Precedence, highest first: command line, environment (`DYNBUS_Splitter__separator`), YAML, the
constructor's default.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

import pydantic

from dynbus.bus.errors import ConfigError

from .codec import explain


class Text(str):
    """A value from the command line or the environment, still to be read as its parameter's
    type."""

    __slots__ = ()


def build_arguments(actor: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The validated constructor arguments of an actor class.

    Raises:
        ConfigError: a name the constructor does not have, a missing one, or a value that does
            not fit its annotation.
    """
    parameters = _parameters(actor)
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        name: p
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    unknown = [name for name in given if name not in named]
    if unknown and not accepts_any:
        known = f"it has {', '.join(named)}" if named else "its constructor takes none"
        raise ConfigError(f"{actor.__name__} has no argument {unknown[0]!r}: {known}")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in given]
    if missing:
        raise ConfigError(
            f"{actor.__name__} needs {missing[0]!r}: give --{actor.__name__}.{missing[0]}=VALUE, "
            f"or a key {missing[0]} under {actor.__name__} in the YAML file"
        )
    hints = _hints(actor)
    return {name: _validate(actor, name, value, hints.get(name)) for name, value in given.items()}


def _parameters(actor: type[Any]) -> dict[str, inspect.Parameter]:
    if actor.__init__ is object.__init__:
        return {}
    parameters = dict(inspect.signature(actor.__init__).parameters)
    parameters.pop(next(iter(parameters), ""), None)
    return parameters


def _hints(actor: type[Any]) -> dict[str, Any]:
    if actor.__init__ is object.__init__:
        return {}
    try:
        return typing.get_type_hints(actor.__init__)
    except NameError as error:
        raise ConfigError(f"{actor.__name__}.__init__: {error}") from None


def _validate(actor: type[Any], name: str, value: Any, annotation: Any) -> Any:
    if annotation is None or annotation is Any:
        return str(value) if isinstance(value, Text) else value
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)
    except pydantic.PydanticSchemaGenerationError:
        # A type that only code can make, such as a client: given in a program, not as text.
        return value
    try:
        if not isinstance(value, Text):
            return adapter.validate_python(value)
        return _read_text(adapter, value)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{actor.__name__}.{name} = {str(value)!r}: {explain(error)}") from None


def _read_text(adapter: pydantic.TypeAdapter[Any], text: Text) -> Any:
    """A value written as text: itself where that fits (`,`, `3`, `true`), else JSON (`[1, 2]`)."""
    try:
        return adapter.validate_strings(str(text))
    except pydantic.ValidationError:
        if text[:1] in ("[", "{", '"'):
            return adapter.validate_json(text)
        raise
