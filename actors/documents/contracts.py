"""Contracts of endpoints, read from classes and from documents of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from dynbus.actors.compatibility.endpoint_contract import EVENT, EndpointContract
from dynbus.actors.declaring.schemas import canonical_schema
from dynbus.bus.errors import ConfigError

from .asyncapi import MAY_BE_EMPTY, NOTHING, DocumentedActor
from .schemas import COMPONENTS

EXTENSION: Final = "x-dynbus"


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
