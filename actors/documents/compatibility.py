"""Changes between two documents of actors, and whether clients of the first can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

from dynbus.actors.declaring.schemas import canonical_schema
from dynbus.bus.errors import ConfigError

from .asyncapi import MAY_BE_EMPTY, NOTHING
from .schema_difference import Fit, compare
from .schemas import COMPONENTS

EXTENSION: Final = "x-dynbus"


class Change(NamedTuple):
    """A change of what an endpoint reads or writes.

    Attributes:
        verdict: `UNCLEAR` where it depends on the values whether a client can go on.
    """

    endpoint: str
    verdict: Fit
    what: str


class _Contract(NamedTuple):
    """A document's contract of an endpoint."""

    kind: str
    schema_hash: str
    request: Any
    may_be_empty: bool
    result: Any


def changes(old: Any, new: Any) -> list[Change]:
    """The changes for clients of `old`, endpoint by endpoint.

    A client may send all that the old document allows, and counts on all that it says of answers.

    Args:
        old, new: documents of `asyncapi`.

    Raises:
        ConfigError: one of them is none.
    """
    before, after = _contracts(old), _contracts(new)
    listed: list[Change] = []
    for endpoint in sorted({*before, *after}):
        if endpoint not in after:
            listed.append(Change(endpoint, Fit.INCOMPATIBLE, "is gone"))
        elif endpoint not in before:
            listed.append(Change(endpoint, Fit.COMPATIBLE, "is new"))
        else:
            listed += _changes_of(endpoint, before[endpoint], after[endpoint])
    return listed


def _changes_of(endpoint: str, before: _Contract, after: _Contract) -> list[Change]:
    if before.kind != after.kind:
        what = f"is {after.kind} now, and was {before.kind}"
        return [Change(endpoint, Fit.INCOMPATIBLE, what)]
    if before.schema_hash == after.schema_hash != "":
        return []
    differences = compare(before.result, after.result, "reply")
    if before.request is not None or not after.may_be_empty:
        differences = [*compare(before.request, after.request, "request"), *differences]
    listed = [Change(endpoint, one.verdict, str(one)) for one in differences]
    if before.may_be_empty and not after.may_be_empty and after.request is not None:
        listed.append(Change(endpoint, Fit.INCOMPATIBLE, "the request may not be left out now"))
    return listed


def _contracts(document: Any) -> dict[str, _Contract]:
    """The endpoints of a document, by their subjects.

    Raises:
        ConfigError: it is no document of actors.
    """
    try:
        components = document["components"]
        rest = json.dumps(components["schemas"]).replace(COMPONENTS, "#/$defs/")
        shared = {name: _modern(one) for name, one in json.loads(rest).items()}
        contracts: dict[str, _Contract] = {}
        for subject, operation in document["operations"].items():
            if subject.count(".") != 2:
                continue  # of one instance
            extension = operation[EXTENSION]
            messages = components["messages"]
            request = messages[f"{subject}.request"]
            result = messages[f"{subject}.{'item' if extension['kind'] == 'stream' else 'reply'}"]
            contracts[subject] = _Contract(
                extension["kind"],
                extension["schema-hash"],
                None if request["payload"] == NOTHING else _schema(request, shared),
                request.get("description") == MAY_BE_EMPTY,
                _schema(result, shared),
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
