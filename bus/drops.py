"""Why a message was dropped: the closed list behind every counter of drops."""

from __future__ import annotations

from enum import StrEnum


class DropReason(StrEnum):
    """Why a message was not acted upon."""

    CLIENT_ID_TAKEN = "client_id_taken"
    DISCONNECTED = "disconnected"
    MALFORMED = "malformed"
    NO_REPLY = "no_reply"
    READER_GONE = "reader_gone"
    REFUSED = "refused"
    STALE = "stale"
    UNEXPECTED = "unexpected"
    UNSAFE_REPLY = "unsafe_reply"
