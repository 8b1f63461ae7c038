"""Operations of the OpenAPI document that have a path and a method, and no stream."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from .schemas import STRING, Schema, ref

Parameter = Mapping[str, Any]


def query(name: str, schema: Schema) -> Parameter:
    """A parameter of the query."""
    return {"name": name, "in": "query", "schema": schema}


def path_parameter(name: str) -> Parameter:
    """A parameter of the path."""
    schema = {**STRING, "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def limit(most: int) -> Parameter:
    """The number of entries of a page."""
    return query("limit", {"type": "integer", "minimum": 1, "maximum": most})


AFTER: Final = query("after", STRING)
"""The entry before a page."""


class Operations:
    """Makes operations.

    Args:
        statuses: what each status means.
        refused: the statuses that each of them may have.
    """

    def __init__(self, statuses: Mapping[str, str], refused: Collection[str]) -> None:
        self._statuses = statuses
        self._refused = refused

    def __call__(
        self,
        summary: str,
        answer: Schema,
        *others: str,
        media: str = "application/json",
        parameters: Sequence[Parameter] = (),
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """An operation.

        Args:
            answer: its schema.
            others: further statuses that it may have.
            media: the type of the answer.
            body: of the request, by its type; None for none.
        """
        refused = {
            status: {
                "description": text,
                "content": {"application/json": {"schema": ref("Error")}},
            }
            for status, text in self._statuses.items()
            if status in (*self._refused, *others)
        }
        answered = {"description": "The answer.", "content": {media: {"schema": answer}}}
        return {
            "summary": summary,
            "parameters": [*parameters],
            **({"requestBody": {"required": True, "content": body}} if body else {}),
            "responses": {"200": answered, **refused},
        }
