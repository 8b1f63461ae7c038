"""The functions that a request offers, and what their parameters are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from .json_text import as_json

ANY: Final = "any"
"""The type of a schema that does not say one."""

_TEXT: Final = frozenset({"string"})

MAX_DEPTH: Final = 16
"""Of schemas within each other that are looked at for a type."""


class Functions:
    """Those of a request's tools. They are looked through when an output has something of the kind
    of a call: most have none, and a request may have many outputs and tools.

    Args:
        tools: of the request, as OpenAI's API has them.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tools = tools
        self._types: dict[tuple[str, str], frozenset[str]] = {}

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """The types that the value of a function's parameter may have, as JSON Schema calls them;
        that of text where nothing says what it is."""
        known = self._types.get((name, parameter))
        if known is None:
            schema = _mapping(_mapping(self._find(name)).get("parameters"))
            properties = _mapping(schema.get("properties"))
            known = _types(properties[parameter], MAX_DEPTH) if parameter in properties else _TEXT
            self._types[name, parameter] = known
        return known

    def _find(self, name: str) -> Mapping[str, Any] | None:
        functions = (_mapping(_mapping(tool).get("function")) for tool in self._tools)
        return next((one for one in functions if one.get("name") == name), None)


def is_text(types: frozenset[str]) -> bool:
    """True if a value is a text, whatever it looks like."""
    return types == _TEXT


def value_as_json(value: str, types: frozenset[str]) -> str:
    """The JSON text of a value that a model wrote as plain text: of the first type that it looks
    like, and otherwise a string."""
    word = value.strip()
    lower = word.lower()
    if lower in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if lower in ("true", "false") and types & {"boolean", ANY}:
        return lower
    try:
        decoded = msgspec.json.decode(word)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return as_json(value)
    if isinstance(decoded, str) and "string" in types:
        # The quotes are part of the text.
        return as_json(value)
    return word if ANY in types or types & _types_of(decoded) else as_json(value)


def _types(schema: object, depth: int) -> frozenset[str]:
    given = _mapping(schema)
    kind = given.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(str(one) for one in cast("list[object]", kind)) or frozenset((ANY,))
    types: frozenset[str] = frozenset()
    for several in (given.get("anyOf"), given.get("oneOf")):
        if isinstance(several, list) and depth:
            for one in cast("list[object]", several):
                types |= _types(one, depth - 1)
    for one in (given["const"],) if "const" in given else _sequence(given.get("enum")):
        types |= _types_of(one)
    return types or frozenset((ANY,))


def _types_of(value: object) -> frozenset[str]:
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("integer", "number") if value.is_integer() else ("number",))
        case str():
            return _TEXT
        case list():
            return frozenset(("array",))
        case _:
            return frozenset(("object",))


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[object]:
    return cast("Sequence[object]", value) if isinstance(value, list) else ()
