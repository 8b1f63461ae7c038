"""The paths of kept responses in the OpenAPI document, for front ends that keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dynbus.llm.responses.stored import MAX_PAGE

from .operations import AFTER, Operations, limit, path_parameter, query
from .schemas import BOOLEAN, OBJECT, STRING, Schema, array, one_of, optional, record, ref

RESPONSE_SCHEMAS: Final[Mapping[str, Schema]] = {
    "DeletedResponse": record({"id": STRING, "object": one_of("response"), "deleted": BOOLEAN}),
    "InputItemList": record(
        {
            "object": one_of("list"),
            "data": array(OBJECT),
            "first_id": optional(STRING),
            "last_id": optional(STRING),
            "has_more": BOOLEAN,
        }
    ),
}
"""The schemas of answers, by name."""

_MEANINGS: Final = {"404": "There is no such response."}
_REFUSED: Final = ("401", "403", "404", "405", "503", "504")

_ID: Final = path_parameter("id")


def response_paths(statuses: Mapping[str, str]) -> dict[str, Any]:
    """The paths of kept responses.

    Args:
        statuses: what each status means.
    """
    operation = Operations({**statuses, **_MEANINGS}, _REFUSED)
    return {
        "/v1/responses/{id}": {
            "get": operation("Tell a response again.", ref("Response"), "400", parameters=[_ID]),
            "delete": operation("Delete a response.", ref("DeletedResponse"), parameters=[_ID]),
        },
        "/v1/responses/{id}/input_items": {
            "get": operation(
                "List the items of the request for a response.",
                ref("InputItemList"),
                "400",
                parameters=[_ID, AFTER, limit(MAX_PAGE), query("order", one_of("asc", "desc"))],
            )
        },
    }
