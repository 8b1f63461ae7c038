"""The reasons for which a message is dropped: the closed list behind every counter of drops."""

from __future__ import annotations

from enum import StrEnum


class DropReason(StrEnum):
    """The reason for which a message was not acted upon.

    Attributes:
        CLIENT_ID_TAKEN: its sender has the client id of another.
        DISCONNECTED: it was published while its connection could not reach the server.
        EXCESS: as much as may be here of its sender, or of all together, is here already.
        FROM_STREAM: a stream delivered it, to a subject that is not its own.
        MALFORMED: it cannot be read.
        NO_REPLY: a request that says nothing of where to answer.
        READER_GONE: a call whose reader does not exist any longer.
        REFUSED: a request that was given up, or cancelled, before it arrived.
        STALE: it speaks of a call that has ended, or of another than its own.
        UNEXPECTED: nobody sends such a thing there.
        UNKNOWN_REQUEST: an operator's cancel of a request of which nothing runs or waits here.
        UNSAFE_REPLY: a request that asks to be answered where we do not answer.
        UNSUBSCRIBED: it was on its way when its subscription ended.
    """

    CLIENT_ID_TAKEN = "client_id_taken"
    DISCONNECTED = "disconnected"
    EXCESS = "excess"
    FROM_STREAM = "from_stream"
    MALFORMED = "malformed"
    NO_REPLY = "no_reply"
    READER_GONE = "reader_gone"
    REFUSED = "refused"
    STALE = "stale"
    UNEXPECTED = "unexpected"
    UNKNOWN_REQUEST = "unknown_request"
    UNSAFE_REPLY = "unsafe_reply"
    UNSUBSCRIBED = "unsubscribed"
