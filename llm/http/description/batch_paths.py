"""The paths of files and batches in the OpenAPI document, for front ends that do batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dynbus.llm.batches.records import ENDPOINTS, PURPOSE, Status

from .operations import AFTER, Operations, limit, path_parameter, query
from .schemas import (
    BOOLEAN,
    COUNT,
    INTEGER,
    OBJECT,
    STRING,
    Schema,
    array,
    one_of,
    optional,
    record,
    ref,
)

_DETAILS: Final = optional(OBJECT)

BATCH_SCHEMAS: Final[Mapping[str, Schema]] = {
    "BatchRequest": record(
        {
            "input_file_id": STRING,
            "endpoint": one_of(*ENDPOINTS),
            "completion_window": {"type": "string", "pattern": "^[1-9][0-9]{0,6}[smhd]$"},
        },
        {
            "metadata": optional(
                {
                    "type": "object",
                    "maxProperties": 16,
                    "propertyNames": {"maxLength": 64},
                    "additionalProperties": {"type": "string", "maxLength": 512},
                }
            ),
            "output_expires_after": {"type": "null"},
        },
    ),
    "Upload": record(
        {"file": {"type": "string", "format": "binary"}, "purpose": one_of(PURPOSE)},
    ),
    "File": record(
        {
            "id": STRING,
            "object": one_of("file"),
            "bytes": COUNT,
            "created_at": INTEGER,
            "expires_at": INTEGER,
            "filename": STRING,
            "purpose": STRING,
            "status": STRING,
        }
    ),
    "DeletedFile": record({"id": STRING, "object": one_of("file"), "deleted": BOOLEAN}),
    "Batch": record(
        {
            "id": STRING,
            "object": one_of("batch"),
            "endpoint": one_of(*ENDPOINTS),
            "input_file_id": STRING,
            "completion_window": STRING,
            "status": one_of(*Status),
            "created_at": INTEGER,
            "expires_at": INTEGER,
            "request_counts": record({"total": COUNT, "completed": COUNT, "failed": COUNT}),
            "errors": optional(record({"object": one_of("list"), "data": array(OBJECT)})),
            "output_file_id": optional(STRING),
            "error_file_id": optional(STRING),
            "metadata": _DETAILS,
            "usage": _DETAILS,
        },
        {
            f"{what}_at": optional(INTEGER)
            for what in (
                "in_progress",
                "finalizing",
                "completed",
                "failed",
                "expired",
                "cancelling",
                "cancelled",
            )
        },
    ),
    **{
        f"{name}List": record(
            {
                "object": one_of("list"),
                "data": array(ref(name)),
                "first_id": optional(STRING),
                "last_id": optional(STRING),
                "has_more": BOOLEAN,
            }
        )
        for name in ("File", "Batch")
    },
}
"""The schemas of requests and answers, by name."""

_MEANINGS: Final = {
    "404": "There is no such file or batch.",
    "409": "A batch that has not ended reads the file.",
}
_REFUSED: Final = ("400", "401", "403", "405", "413", "429", "499", "503", "504")

_ID: Final = path_parameter("id")


def batch_paths(statuses: Mapping[str, str]) -> dict[str, Any]:
    """The paths of files and batches.

    Args:
        statuses: what each status means.
    """

    operation = Operations({**statuses, **_MEANINGS}, _REFUSED)
    return {
        "/v1/files": {
            "get": operation(
                "List files of requests.",
                ref("FileList"),
                parameters=[
                    AFTER,
                    limit(10_000),
                    query("order", one_of("asc", "desc")),
                    query("purpose", STRING),
                ],
            ),
            "post": operation(
                "Keep a file of requests.",
                ref("File"),
                "408",
                body={"multipart/form-data": {"schema": ref("Upload")}},
            ),
        },
        "/v1/files/{id}": {
            "get": operation("Tell of a file.", ref("File"), "404", parameters=[_ID]),
            "delete": operation(
                "Delete a file.", ref("DeletedFile"), "404", "409", parameters=[_ID]
            ),
        },
        "/v1/files/{id}/content": {
            "get": operation(
                "Give the content of a file.",
                {"type": "string", "format": "binary"},
                "404",
                media="application/octet-stream",
                parameters=[_ID],
            )
        },
        "/v1/batches": {
            "get": operation("List batches.", ref("BatchList"), parameters=[AFTER, limit(100)]),
            "post": operation(
                "Have the requests of a file answered.",
                ref("Batch"),
                "404",
                "408",
                body={"application/json": {"schema": ref("BatchRequest")}},
            ),
        },
        "/v1/batches/{id}": {
            "get": operation("Tell of a batch.", ref("Batch"), "404", parameters=[_ID])
        },
        "/v1/batches/{id}/cancel": {
            "post": operation("Cancel a batch.", ref("Batch"), "404", parameters=[_ID])
        },
    }
