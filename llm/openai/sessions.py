"""Announcements of conversations that go on soon, as requests and answers."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from .errors import misfit
from .requests import read_body

SESSION_NAME: Final = r"[\w.:@/-]{1,128}"

_Name = Annotated[str, Meta(min_length=1, max_length=128)]


class AnnounceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The word that a conversation goes on soon.

    Attributes:
        session: its name; None for the conversation of that response.
        previous_response_id: the response that the next one goes on from; None where the
            conversation is known by its name alone.
    """

    model: str
    session: _Name | None = None
    previous_response_id: _Name | None = None


class AnnouncedSession(msgspec.Struct, frozen=True):
    """The part of a conversation that is ready for its next request.

    Attributes:
        cached_tokens: of it that are in the cache of its engine now.
        brought_tokens: how many of them were not before.
    """

    session: str
    cached_tokens: int
    brought_tokens: int
    object: Literal["session.announced"] = "session.announced"


_IS_NAME: Final = re.compile(SESSION_NAME, re.ASCII)
_announce: Final = msgspec.json.Decoder(AnnounceRequest)


def read_announcement(data: bytes) -> AnnounceRequest:
    """The announcement that a body holds.

    Raises:
        BadRequest: it is none.
    """
    request = read_body(_announce, data)
    if request.session is None and request.previous_response_id is None:
        raise misfit("session", "give the name of the conversation, or previous_response_id")
    if request.session is not None and _IS_NAME.fullmatch(request.session) is None:
        raise misfit(
            "session",
            "give 1 to 128 letters, digits or any of -_.:@/, as in Dynbus-Session, without the "
            "seconds there",
        )
    return request
