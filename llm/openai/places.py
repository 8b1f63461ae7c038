"""Places of a request of another interface, in the chat that was made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .errors import BadRequest
from .fields import items_of


class Place(NamedTuple):
    """The place of a part in a chat, and its place in the request that the chat was made of."""

    in_chat: str
    own: str


class PlacedPart(dict[str, Any]):
    """A part of a chat's message that was made of something in a client's own request.

    Attributes:
        where: the place of that in the request.
    """

    def __init__(self, part: Mapping[str, Any], where: str) -> None:
        super().__init__(part)
        self.where = where


def places_of(messages: Sequence[Mapping[str, Any]]) -> list[Place]:
    """The places of those parts of a chat that know theirs in the request."""
    return [
        Place(f"messages[{at}].content[{place}]", part.where)
        for at, message in enumerate(messages)
        for place, part in enumerate(items_of(message.get("content")))
        if isinstance(part, PlacedPart)
    ]


def at_own_place(error: BadRequest, places: Sequence[Place]) -> BadRequest:
    """A refusal of a part of a chat, for the client whose request has that part elsewhere; another
    one as it is.

    Args:
        places: see `places_of`.
    """
    own = next((one.own for one in places if error.param.startswith(one.in_chat)), None)
    if own is None:
        return error
    # What it names within the part has another name there.
    message = error.message.replace(error.param, own)
    placed = BadRequest(message, param=own, reason=error.reason, status=error.status)
    placed.is_own = True
    return placed
