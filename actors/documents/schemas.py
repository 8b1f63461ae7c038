"""The JSON schemas of a document: each class written once, under a name that nothing else has.

AsyncAPI understands what JSON Schema's draft 7 does; pydantic and msgspec write a later draft.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from dynbus.actors.declaring.codec import AnyCodec
from dynbus.actors.declaring.redaction import shown
from dynbus.actors.declaring.schemas import (
    ALTERNATIVES,
    ONE_SCHEMA,
    SCHEMAS_BY_NAME,
    schema_of,
)
from dynbus.bus.errors import ConfigError

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
COMPONENTS: Final = "#/components/schemas/"
READ: Final = ("request", "event")
"""The roles of what an actor reads."""
_LOCAL: Final = "#/$defs/"
_SCHEMA_LISTS: Final = ALTERNATIVES | {"prefixItems"}


class SchemaUse(NamedTuple):
    """The message in which a schema is used.

    Attributes:
        address: `namespace.component`.
        role: `request`, `event`, `reply` or `item`.
    """

    address: str
    endpoint: str
    role: str

    def __str__(self) -> str:
        return f"{self.address}.{self.endpoint}.{self.role}"


def whole_schema(codec: AnyCodec, place: SchemaUse) -> dict[str, Any]:
    """The schema of a message as a document of its own, without secrets.

    Raises:
        ConfigError: it holds what JSON does not have.
    """
    made = schema_of(codec, written=place.role not in READ)
    try:
        plain = cast("dict[str, Any]", _mapped(json.loads(json.dumps(made)), _public))
        json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: its JSON schema cannot be written: {error}") from None
    return plain


def header_schema(description: str, **more: Any) -> dict[str, Any]:
    """The schema of a header, which is a text."""
    return {"type": "string", "description": description, **more}


def schema_file(schema: Mapping[str, Any]) -> str:
    """A schema as the text of a file."""
    return json_text({"$schema": DRAFT, **schema})


def json_text(value: Any) -> str:
    """JSON for people, in its own order; what is no Unicode is escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()


def _side(place: SchemaUse) -> str:
    return "Input" if place.role in READ else "Output"


_NAMINGS: Final[Sequence[Callable[[str, SchemaUse], str]]] = (
    lambda name, _: name,
    # A field with a default may be left out of what is read, and is always written.
    lambda name, place: f"{name}-{_side(place)}",
    lambda name, place: f"{place.address}.{name}",
    lambda name, place: f"{place.address}.{name}-{_side(place)}",
    lambda name, place: f"{place}.{name}",
)
"""The namings that tell classes of one name apart, the shortest first; the last always does."""


class Components:
    """The schemas of all messages, with their classes apart from them.

    Args:
        schemas: those of the messages, each a document of its own.
        names: what the class of a message's schema is called; missing for one without a class.
    """

    def __init__(
        self, schemas: Mapping[SchemaUse, Mapping[str, Any]], names: Mapping[SchemaUse, str]
    ) -> None:
        self._roots: dict[SchemaUse, Any] = {}
        self._scopes: dict[SchemaUse, dict[str, Any]] = {}
        for place, schema in schemas.items():
            self._add(place, schema, names.get(place, ""))
        self._names = dict(self._named())

    def payload(self, place: SchemaUse) -> Any:
        """The schema of a message, with references to its classes."""
        return self._translated(self._roots[place], place)

    def all(self) -> dict[str, Any]:
        """The classes by name, in order."""
        schemas = {
            self._names[place, name]: self._translated(schema, place)
            for place, scope in self._scopes.items()
            for name, schema in scope.items()
        }
        return dict(sorted(schemas.items()))

    def _add(self, place: SchemaUse, schema: Mapping[str, Any], name: str) -> None:
        root = {key: value for key, value in schema.items() if key != "$defs"}
        scope = dict(schema.get("$defs", {}))
        if name and name not in scope and "$ref" not in root:
            scope[name] = root
            root = {"$ref": _LOCAL + name}
        self._roots[place] = root
        self._scopes[place] = scope

    def _named(self) -> Iterator[tuple[tuple[SchemaUse, str], str]]:
        """The name of each class of each message in the whole document: its own name, and as much
        besides as tells it from others of that name.
        """
        uses: dict[str, list[tuple[SchemaUse, str, str]]] = {}
        for place, scope in self._scopes.items():
            for name in scope:
                uses.setdefault(_legal(name), []).append((place, name, _closure(name, scope)))
        for plain, same_name in uses.items():
            for naming in _NAMINGS:
                keys = [naming(plain, place) for place, _, _ in same_name]
                meanings = {(key, use[2]) for key, use in zip(keys, same_name, strict=True)}
                if len(meanings) == len(set(keys)):
                    yield from (
                        ((place, name), key)
                        for key, (place, name, _) in zip(keys, same_name, strict=True)
                    )
                    break

    def _translated(self, schema: Any, place: SchemaUse) -> Any:
        def translate(given: dict[str, Any]) -> dict[str, Any]:
            return _draft_7(given, lambda name: COMPONENTS + self._names[place, name])

        return _mapped(schema, translate)


def _closure(name: str, scope: Mapping[str, Any]) -> str:
    """The meaning of a name: its schema, and those that it refers to."""
    reached: dict[str, Any] = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one not in reached and one in scope:
            reached[one] = scope[one]
            waiting += _references(scope[one])
    return json.dumps([name, reached], sort_keys=True)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for one in cast("Sequence[Any]", schema):
            yield from _references(one)
    elif isinstance(schema, dict):
        for key, value in cast("dict[str, Any]", schema).items():
            if key == "$ref" and isinstance(value, str) and value.startswith(_LOCAL):
                yield value.removeprefix(_LOCAL)
            else:
                yield from _references(value)


def _mapped(schema: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """A schema with `change` applied to it and to every schema within, the innermost first."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in cast("Mapping[str, Any]", schema).items():
        if keyword in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value)
            if keyword == "properties":
                named = {name: _without_secret(one) for name, one in named.items()}
            made[keyword] = {name: _mapped(one, change) for name, one in named.items()}
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            made[keyword] = [_mapped(one, change) for one in cast("Sequence[Any]", value)]
        elif keyword in ONE_SCHEMA:
            made[keyword] = _mapped(value, change)
        else:
            made[keyword] = value
    return change(made)


def _without_secret(schema: Any) -> Any:
    """The schema of a property, without a default or examples that would tell a secret."""
    if not isinstance(schema, Mapping):
        return schema
    given = dict(cast("Mapping[str, Any]", schema))
    for keyword in ("default", "examples", "const"):
        value = given.get(keyword)
        # Of a `SecretStr`, or with credentials in a URL.
        if value is not None and (given.get("writeOnly") or shown(value) != value):
            del given[keyword]
    return given


def _public(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose defaults are the same each time, and JSON."""
    default = schema.get("default")
    if schema.get("uniqueItems") and isinstance(default, list):
        # It comes from a set, whose order is another in each process.
        schema["default"] = sorted(cast("Sequence[Any]", default), key=json.dumps)
    try:
        json.dumps(default, allow_nan=False)
    except ValueError:
        # A number that is not finite, which JSON does not have.
        del schema["default"]
    return schema


def _draft_7(schema: dict[str, Any], reference: Callable[[str], str]) -> dict[str, Any]:
    """A schema in the words of draft 7.

    Args:
        reference: the reference to a name of the schema's own definitions.
    """
    schema.pop("$defs", None)
    schema.pop("$schema", None)
    if "prefixItems" in schema:
        rest = schema.pop("items", None)
        schema["items"] = schema.pop("prefixItems")
        if rest is not None:
            schema["additionalItems"] = rest
    discriminator = schema.get("discriminator")
    if isinstance(discriminator, Mapping):
        schema["discriminator"] = cast("Mapping[str, Any]", discriminator).get("propertyName", "")
    target = schema.get("$ref")
    if isinstance(target, str):
        if target.startswith(_LOCAL):
            schema["$ref"] = reference(target.removeprefix(_LOCAL))
        if len(schema) > 1:
            # What stands beside a reference is not read there.
            schema["allOf"] = [{"$ref": schema.pop("$ref")}]
    return schema


def _legal(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
