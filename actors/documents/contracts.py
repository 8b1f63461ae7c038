"""The contract of an endpoint, read from where it is said: a document, a class, an instance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, cast

import msgspec

from dynbus.actors.declaring.schemas import ToldSchemas, canonical_schema
from dynbus.bus.errors import ConfigError

from .asyncapi import MAY_BE_EMPTY, NOTHING, DocumentedActor
from .schemas import COMPONENTS

EXTENSION: Final = "x-dynbus"
EVENT: Final = "event"
"""The kind of a contract of subscribers: the events of a topic that they read."""


class EndpointContract(NamedTuple):
    """The messages that an endpoint reads and writes.

    Attributes:
        kind: `unary`, `stream` or `event`.
        schema_hash: the same for contracts that are the same; empty where it is not known.
        request: the canonical schema of what it reads; None where it takes nothing.
        may_be_empty: whether the request may be left out.
        result: the canonical schema of what it writes.
        durable: whether each call is a job, which may wait in its queue.
    """

    kind: str
    schema_hash: str
    request: Any
    may_be_empty: bool
    result: Any
    durable: bool = False

    @classmethod
    def of_told(cls, kind: str, answer: bytes) -> EndpointContract:
        """The contract in an answer of an instance, as `encode_schemas` writes it.

        Raises:
            ConfigError: it says something else.
        """
        try:
            known = msgspec.json.decode(answer, type=ToldSchemas)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"it does not say what it reads and writes: {error}") from None
        return cls(
            *(kind, known.hash, known.request, known.request_has_default, known.reply),
            durable=known.durable,
        )


def contracts_of_actors(actors: Iterable[DocumentedActor]) -> dict[str, EndpointContract]:
    """The contracts of classes, by their subjects.

    Raises:
        ConfigError: an annotation of a handler cannot be used.
    """
    contracts: dict[str, EndpointContract] = {}
    for one in actors:
        for subject, spec in one.handlers():
            known = spec.schemas
            contracts[subject] = EndpointContract(
                *(spec.kind, known.hash, known.request_read, known.request_has_default),
                *(known.reply_written, spec.durable is not None),
            )
    return contracts


def contracts_of_document(document: Any) -> dict[str, EndpointContract]:
    """The contracts of a document of `asyncapi`, by their subjects.

    Raises:
        ConfigError: it is no such document.
    """
    try:
        components = document["components"]
        rest = json.dumps(components["schemas"]).replace(COMPONENTS, "#/$defs/")
        shared = {name: _modern(one) for name, one in json.loads(rest).items()}
        contracts: dict[str, EndpointContract] = {}
        messages = components["messages"]
        for subject, operation in document["operations"].items():
            extension = operation[EXTENSION]
            if extension["kind"] == EVENT:
                event = f"{extension['topic']}.event"
                read = _schema(messages[event], shared)
                contracts[event] = EndpointContract(EVENT, "", read, False, None)
                continue
            if subject.count(".") != 2:
                continue  # of one instance, or of jobs
            request = messages[f"{subject}.request"]
            result = messages[f"{subject}.{'item' if extension['kind'] == 'stream' else 'reply'}"]
            contracts[subject] = EndpointContract(
                extension["kind"],
                extension["schema-hash"],
                None if request["payload"] == NOTHING else _schema(request, shared),
                request.get("description") == MAY_BE_EMPTY,
                _schema(result, shared),
                durable="durable" in extension,
            )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"it is no document of `dynbus schema write`: {error!r}") from None
    return contracts


def _schema(message: Mapping[str, Any], shared: Mapping[str, Any]) -> Any:
    """The schema of a message as one of its own, with what it refers to."""
    text = json.dumps(message["payload"]).replace(COMPONENTS, "#/$defs/")
    payload = _modern(json.loads(text))
    if isinstance(payload, bool):
        return payload
    return canonical_schema({**payload, "$defs": shared})


def _modern(schema: Any) -> Any:
    """A schema of draft 7 in the words that `compare` reads: positions of a tuple are
    `prefixItems`."""
    if isinstance(schema, list):
        return [_modern(one) for one in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    made = {key: _modern(value) for key, value in cast("dict[str, object]", schema).items()}
    if isinstance(made.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made.pop("additionalItems")
    return made
