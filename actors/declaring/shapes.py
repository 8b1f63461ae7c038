"""The shape of a request, for people who sent none: its type, and an example in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

if TYPE_CHECKING:
    from .codec import AnyCodec

MAX_DEPTH: Final = 5
MAX_EXAMPLE: Final = 200
"""Characters; what would be longer is left out."""

_SCALARS: Final[Mapping[str, Any]] = {
    "boolean": True,
    "integer": 1,
    "null": None,
    "number": 1.5,
    "string": "text",
}


def describe_request(codec: AnyCodec) -> str:
    """The type that a codec reads, with an example: `Person as JSON, for example {...}`."""
    annotation = codec.annotation
    if annotation is msgspec.Raw:
        return "JSON of any kind"
    named = isinstance(annotation, type) and annotation.__module__ != "typing"
    name = annotation.__name__ if named else str(annotation).replace("typing.", "")
    try:
        example = msgspec.json.encode(example_of(codec.schema())).decode()
    except (TypeError, ValueError):
        # Some types can be read and have no schema.
        return f"{name} as JSON"
    if len(example) > MAX_EXAMPLE:
        return f"{name} as JSON"
    return f"{name} as JSON, for example {example}"


def example_of(schema: Mapping[str, Any]) -> Any:
    """A value of the shape that a JSON schema describes: required fields, one item per list.

    It shows names and types. Limits and patterns are not obeyed.
    """
    return _example(schema, schema.get("$defs", {}), MAX_DEPTH)


def _example(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> Any:
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("default", "const"):
        if schema.get(key) is not None:
            return schema[key]
    if depth <= 1 and schema.get("type") == "array":
        # Of what holds such a list again, most likely.
        return []
    if depth == 0:
        return {}
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _example(definitions.get(name, {}), definitions, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _example(schema[key][0], definitions, depth)
    kind = schema.get("type")
    if kind == "object":
        fields = cast("Mapping[str, Any]", schema.get("properties", {}))
        required = schema.get("required") or list(fields)[:1]
        return {name: _example(fields[name], definitions, depth - 1) for name in required}
    if kind == "array":
        nothing: Mapping[str, Any] = {}
        items: list[Any] = schema.get("prefixItems") or [schema.get("items") or nothing]
        return [_example(item, definitions, depth - 1) for item in items]
    return _SCALARS.get(kind, {}) if isinstance(kind, str) else {}
