"""The path that tells a client of its key, in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dynbus.llm.tenants.limits import COUNTED, Limits

from .operations import Operations
from .schemas import (
    BOOLEAN,
    COUNT,
    INTEGER,
    NUMBER,
    STRING,
    Schema,
    array,
    one_of,
    optional,
    record,
    ref,
)

_STATED: Final = {
    name: array(STRING, 1) if name == "models" else INTEGER for name in Limits.__struct_fields__
}
_USED: Final = record(
    {"limit": COUNT, "used": COUNT, "remaining": COUNT, "resets_at": optional(NUMBER)}
)
_STANDING: Final[Mapping[str, Schema]] = {
    "limits": record({}, _STATED),
    "usage": record({}, dict.fromkeys(COUNTED, _USED)),
    "is_current": BOOLEAN,
}

KEY_SCHEMAS: Final[Mapping[str, Schema]] = {
    "Key": record(
        {
            "object": one_of("key"),
            "id": STRING,
            "name": optional(STRING),
            "expires_at": optional(NUMBER),
            "is_operator": BOOLEAN,
            **_STANDING,
            "tenant": record({"name": STRING, **_STANDING}),
        }
    ),
}
"""The schemas of answers, by name."""

_MEANINGS: Final = {"404": "There are no keys here."}
_REFUSED: Final = ("401", "403", "404", "405", "503")


def key_paths(statuses: Mapping[str, str]) -> dict[str, Any]:
    """The path of a client's own key.

    Args:
        statuses: what each status means.
    """
    operation = Operations({**statuses, **_MEANINGS}, _REFUSED)
    summary = "Tell the limits of the key that asks, what is used of them and what is left."
    return {"/v1/key": {"get": operation(summary, ref("Key"))}}
