"""The JSON schemas of a handler, and the hash by which two versions of it are told apart.

A request is written by its client and read by the instance, a reply the other way round. What a
type reads and what it writes may differ: a computed field is written and never read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

if TYPE_CHECKING:
    from .codec import AnyCodec

logger = logging.getLogger(__name__)

HASH_BYTES: Final = 8

SCHEMAS_BY_NAME: Final = frozenset(
    ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
)
"""Keywords whose value has a schema for each name."""

ONE_SCHEMA: Final = frozenset(
    (
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
"""Keywords whose value is a schema."""

ALTERNATIVES: Final = frozenset(("allOf", "anyOf", "oneOf"))
"""Keywords whose value is several schemas in any order."""

_SETS: Final = frozenset(("enum", "required", "type"))
"""Keywords whose value may be a list in any order."""

_PLAIN: Final = frozenset(
    (
        "$ref",
        "const",
        "contentEncoding",
        "contentMediaType",
        "dependentRequired",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "uniqueItems",
    )
)
"""Keywords that say what fits, by a value that is no schema."""


class HandlerSchemas(NamedTuple):
    """The canonical JSON schemas of the messages that an instance reads and writes at an endpoint.

    Attributes:
        hash: the same for handlers that read and write the same, as instances and as clients;
            empty where a type has no schema.
        request_read: None for a handler without a request.
        request_has_default: whether the handler is called without one too.
    """

    hash: str
    request_read: Any = None
    reply_written: Any = None
    request_has_default: bool = False


UNKNOWN: Final = HandlerSchemas("")
"""Of a handler with a type that has no JSON schema."""


def schemas_of(
    request: AnyCodec | None, reply: AnyCodec, *, request_has_default: bool
) -> HandlerSchemas:
    """The schemas of a handler with these codecs; `UNKNOWN` where one of them has none."""
    try:
        canonical = [
            None if codec is None else canonical_schema(codec.schema(written=written))
            for codec in (request, reply)
            for written in (False, True)
        ]
        data = msgspec.json.encode([*canonical, request_has_default], order="sorted")
    except Exception as error:  # noqa: BLE001 - types of users make their schemas themselves
        logger.debug("no schema hash for %r: %s", reply.annotation, error)
        return UNKNOWN
    digest = hashlib.blake2b(data, digest_size=HASH_BYTES).hexdigest()
    request_read, _, _, reply_written = canonical
    return HandlerSchemas(digest, request_read, reply_written, request_has_default)


def schema_of(codec: AnyCodec, *, written: bool = False) -> dict[str, Any]:
    """The JSON schema of a codec's annotation; empty for one that has none.

    Args:
        written: of what the codec writes rather than of what it reads.
    """
    try:
        return codec.schema(written=written)
    except Exception as error:  # noqa: BLE001 - types of users make their schemas themselves
        logger.debug("no JSON schema for %r: %s", codec.annotation, error)
        return {}


class ToldSchemas(msgspec.Struct, omit_defaults=True, frozen=True):
    """An instance's schemas of an endpoint; `request` is absent where it takes none.

    Attributes:
        durable: whether each call is a job.
    """

    hash: str
    reply: Any
    request: Any = None
    request_has_default: bool = False
    durable: bool = False


def encode_schemas(schemas: HandlerSchemas, *, durable: bool = False) -> bytes:
    """The schemas of the messages that an instance reads and writes, as JSON of `ToldSchemas`."""
    report = ToldSchemas(
        *(schemas.hash, schemas.reply_written, schemas.request_read),
        *(schemas.request_has_default, durable),
    )
    return msgspec.json.encode(report, order="sorted")


def canonical_schema(schema: Any) -> Any:
    """A schema with what decides whether a value fits, in one order: no titles, no defaults."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    given = cast("Mapping[str, Any]", schema)
    for keyword in sorted(given):
        value = given[keyword]
        if keyword in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value)
            made[keyword] = {name: canonical_schema(named[name]) for name in sorted(named)}
        elif (keyword in ALTERNATIVES or keyword == "prefixItems") and isinstance(value, list):
            each = [canonical_schema(one) for one in cast("list[object]", value)]
            made[keyword] = each if keyword == "prefixItems" else _sorted(each)
        elif keyword in ONE_SCHEMA:
            made[keyword] = canonical_schema(value)
        elif keyword in _SETS:
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            made[keyword] = _sorted(list(cast("Sequence[Any]", value))) if is_list else value
        elif keyword in _PLAIN or keyword in ALTERNATIVES or keyword == "prefixItems":
            made[keyword] = value
    return made


def _sorted(values: list[Any]) -> list[Any]:
    return sorted(values, key=lambda value: msgspec.json.encode(value, order="sorted"))
