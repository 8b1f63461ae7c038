"""Constructor arguments of an actor class: which it takes, and whether values fit them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import pydantic

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError

from .codec import explain
from .handlers import resolve_annotations
from .redaction import holds_secret, shown

_NO_SOURCES: Final[Mapping[str, str]] = MappingProxyType({})
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Text(str):
    """A value from the command line or the environment, still to be read as its parameter's
    type."""

    __slots__ = ()


def build_arguments(
    actor: type[Any],
    given: Mapping[str, Any],
    sources: Mapping[str, str] = _NO_SOURCES,
    *,
    node: str = "",
) -> dict[str, Any]:
    """The validated constructor arguments of an actor class.

    Args:
        sources: where arguments came from, for messages; the actor and its argument unless said.
        node: what the run calls it, for messages; the class name unless given.

    Raises:
        ConfigError: a name the constructor does not have, a missing one, or a value that does
            not fit its annotation.
    """
    called = node or actor.__name__
    taken = parameters_of(actor)
    named = {name: p for name, p in taken.items() if p.kind in _NAMED}
    unknown = [name for name in given if name not in named]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        known = f"it has {', '.join(named)}" if named else "its constructor takes none"
        place = f"{sources[unknown[0]]}: " if unknown[0] in sources else ""
        raise ConfigError(
            f"{place}{actor.__name__} has no argument {unknown[0]!r}"
            f"{suggestion(unknown[0], named)}: {known}"
        )
    missing = [name for name, p in named.items() if p.default is p.empty and name not in given]
    if missing:
        raise ConfigError(
            f"{called} needs {missing[0]!r}: give --{called}.{missing[0]}=VALUE, "
            # A variable's name has no colon.
            + (f"DYNBUS_{called}__{missing[0]}=VALUE, " if ":" not in called else "")
            + f"or a key {missing[0]} under {called} in the YAML file"
        )
    annotations = _annotations(actor)
    return {
        name: _validate(name, value, annotations.get(name), sources.get(name, f"{called}.{name}"))
        for name, value in given.items()
    }


def defaults(actor: type[Any]) -> dict[str, Any]:
    """The constructor arguments that have a default, and it."""
    return {
        name: p.default
        for name, p in parameters_of(actor).items()
        if p.default is not p.empty and p.kind in _NAMED
    }


def parameters_of(actor: type[Any]) -> dict[str, inspect.Parameter]:
    """What the constructor takes, by name."""
    if actor.__init__ is object.__init__:
        return {}
    found = dict(inspect.signature(actor.__init__).parameters)
    found.pop(next(iter(found), ""), None)
    return found


def _annotations(actor: type[Any]) -> dict[str, Any]:
    if actor.__init__ is object.__init__:
        return {}
    return resolve_annotations(actor.__init__, f"{actor.__name__}.__init__")


def _validate(name: str, value: Any, annotation: Any, source: str) -> Any:
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
        raise ConfigError(
            f"{source} = {shown(name, value)!r}: {_remedy(name, value, annotation, error)}"
        ) from None


def _remedy(name: str, value: Any, annotation: Any, error: pydantic.ValidationError) -> str:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    plain = len(details) == 1 and not details[0]["loc"]
    hides = holds_secret(name, value)
    why = details[0]["msg"] if plain and not hides else explain(error, quoting=not hides)
    return f"give {inspect.formatannotation(annotation)}: {why}"


def _read_text(adapter: pydantic.TypeAdapter[Any], text: Text) -> Any:
    """A value written as text: itself where that fits (`,`, `3`, `true`), else JSON (`[1, 2]`),
    else the elements of a list with commas between them (`1,2`)."""
    try:
        return adapter.validate_strings(str(text))
    except pydantic.ValidationError:
        if text[:1] in ("[", "{", '"'):
            return adapter.validate_json(text)
        parts = filter(None, map(str.strip, text.split(",")))
        try:
            return adapter.validate_python(list(parts))
        except pydantic.ValidationError:
            pass
        raise
