"""The records of a stored stream, and the decisions that follow from them, without I/O or clock.

The log of a stream is `Begun`, then `Came` for what its engine made and `Owned` each time that
another front end takes it over. `Over` replaces all of it when it cannot be resumed any more.
Each record is stored only directly after the one that its writer knows as the last, so that there
is one owner at a time: one that was taken for dead writes nothing any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum
from typing import Final

import msgspec

from dynbus import DynbusError
from dynbus.spi import Failed

KEPT_SECONDS: Final = 60.0
"""Seconds for which a stream can be resumed after its last event, or since it was paused."""

MOST_BYTES: Final = 1024 * 1024
"""Of one stream's log, its request included."""

MOST_REQUEST: Final = MOST_BYTES // 2
"""Bytes of a request whose stream is resumable: what the answer has room for is as much."""

ASK_INTERVAL: Final = 0.4
"""Seconds between two questions whether a silent owner lives."""

ASK_AGAIN: Final = 0.1
"""Seconds after which an owner is asked again that could not be."""

READ_INTERVAL: Final = 2.0
"""Seconds between two questions to an owner that is not silent: they tell it of a reader."""

MOST_MISSES: Final = 3
"""Questions without an answer, from which on an owner counts as dead."""

MOST_BOUNCES: Final = 2
"""Questions that nobody could be asked: one that connects again is not there for a moment."""


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """A request whose answer is a resumable stream.

    Attributes:
        owner: the front end that answers.
        path: of the request.
        body: as the client sent it.
        request_id: of the request, and of the stream.
        created: Unix seconds, for the answer to tell.
        seconds: until the deadline of the whole answer, from when this record was stored.
        seed: what the ids of its tool calls are made of, and that of an answer that is kept.
        keeps: whether its answer is to be kept, a response; 0.1.0 kept none.
    """

    owner: str
    path: str
    body: bytes
    request_id: str
    created: float
    seconds: float
    seed: str
    keeps: bool = False


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """The items of the engine's stream for one prompt that came at a time.

    Attributes:
        at: when, in Unix seconds.
        part: the number of the prompt.
        items: as the engine encoded them.
        ended: whether nothing more comes.
        error: how the stream ended, when not well.
    """

    at: float
    part: int
    items: list[bytes]
    ended: bool = False
    error: Failed | None = None


class Came(msgspec.Struct, frozen=True, array_like=True, tag="came"):
    """More of what the engine makes."""

    pieces: list[Piece]


class Owned(msgspec.Struct, frozen=True, array_like=True, tag="owned"):
    """Another front end goes on; an empty name says that the one before has left the stream."""

    owner: str


class Over(msgspec.Struct, frozen=True, array_like=True, tag="over"):
    """The stream cannot be resumed, and why."""

    reason: str


Record = Begun | Came | Owned | Over


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    number: int
    record: Record


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Entry).decode


def log_key(tenant: str, request_id: str) -> str:
    """The name of a stream's log: those of one tenant are out of the reach of all others."""
    identity = f"{tenant}\0{request_id}".encode()
    return hashlib.blake2s(identity, digest_size=16).hexdigest()


def is_over(data: bytes) -> bool:
    """True if a record says that its log cannot be resumed: another may begin in its place."""
    try:
        return isinstance(_decode(data).record, Over)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def failure(error: DynbusError) -> Failed:
    """An error as it is stored."""
    return Failed.stored(error)


def failed_with(piece: Piece) -> DynbusError | None:
    """The error with which an engine's stream ended; None for none."""
    return None if piece.error is None else piece.error.error


class StreamLog:
    """One stream's log, as far as it was read or written.

    Attributes:
        tenant: whose stream it is.
        begun: the request; None before it is known.
        owner: who goes on with it; empty for nobody.
        sequence: of the last record; 0 before the first.
        begun_at: when the request was stored. Times are the server's, in Unix seconds.
        last_at: when the last record was stored.
        size: bytes of all records.
        over: why it cannot be resumed; empty where it can.
    """

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant
        self.begun: Begun | None = None
        self.owner = ""
        self.sequence = 0
        self.begun_at = 0.0
        self.last_at = 0.0
        self.size = 0
        self.over = ""
        self._number = 0

    def __repr__(self) -> str:
        return f"<StreamLog [{self._number} records, {self.size} bytes]>"

    def read(self, data: bytes, sequence: int, at: float) -> Sequence[Piece]:
        """Take the next record; what it says that the engine made.

        One that does not follow from those before, or cannot be read, ends the log.
        """
        if sequence <= self.sequence:
            return ()
        try:
            entry = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.over = "its log cannot be read"
            return ()
        record = entry.record
        is_next = entry.number == self._number
        is_begun = self.begun is not None
        if not isinstance(record, Over) and (not is_next or isinstance(record, Begun) == is_begun):
            self.over = "the beginning of its log is gone"
            return ()
        self.wrote(record, len(data), sequence, at)
        return record.pieces if isinstance(record, Came) else ()

    def encode(self, record: Record) -> bytes:
        """A record as it would be stored next."""
        return _encode(_Entry(self._number, record))

    def has_room(self, size: int) -> bool:
        """True if a record of so many bytes is not too much."""
        return self.size + size <= MOST_BYTES

    def wrote(self, record: Record, size: int, sequence: int, at: float) -> None:
        """A record was stored."""
        self._number += 1
        self.size += size
        self.sequence, self.last_at = sequence, at
        if isinstance(record, Begun):
            self.begun, self.owner, self.begun_at = record, record.owner, at
        elif isinstance(record, Owned):
            self.owner = record.owner
        elif isinstance(record, Over):
            self.over = record.reason or "it is over"


class Next(Enum):
    """The next step for a client that asks for a stream."""

    UNKNOWN = "unknown"
    """There never was one."""
    GONE = "gone"
    """It cannot be resumed any more."""
    WHOLE = "whole"
    """All of it is there."""
    ASK = "ask"
    """Its owner has to be asked whether it lives."""
    FOLLOW = "follow"
    """Its owner goes on with it."""
    TAKE = "take"
    """Its owner is dead: the asker goes on with it."""


def next_step(log: StreamLog, *, is_complete: bool, owner_lives: bool | None, now: float) -> Next:
    """The next step for a reader that has read a log to its end.

    Args:
        is_complete: whether the answer has come to its end.
        owner_lives: None where nobody knows.
        now: Unix seconds by the server's clock.
    """
    if log.over:
        return Next.GONE
    if log.begun is None:
        return Next.UNKNOWN
    is_late = now - log.last_at > KEPT_SECONDS
    if is_complete:
        return Next.GONE if is_late else Next.WHOLE
    if log.owner and owner_lives is None:
        return Next.ASK
    if log.owner and owner_lives:
        return Next.FOLLOW
    return Next.GONE if is_late else Next.TAKE


class OwnerWatch:
    """The watch over the owner of a stream: whether it lives. Times are of one monotonic clock.

    It goes by questions without an answer, not by time: the asker may have been frozen itself.

    Attributes:
        question: the number of the last question as long as it has no answer; for who asks it.
        lives: None where nobody knows.
    """

    def __init__(self) -> None:
        self._asked: float | None = None
        self._misses = 0
        self._bounces = 0
        self.question = ""
        self.lives: bool | None = None

    def due(self, now: float, *, is_silent: bool) -> bool:
        """True if it is time for a question.

        Args:
            is_silent: whether the owner has written nothing of late.
        """
        interval = ASK_INTERVAL if is_silent or self._misses > 1 else READ_INTERVAL
        if self._bounces:
            interval = ASK_AGAIN
        return self._asked is None or now - self._asked >= interval

    def ask(self, now: float) -> None:
        """A question is sent."""
        self._asked = now
        if self._misses >= MOST_MISSES:
            self.lives = False
        self._misses += 1

    def answered(self, *, owns: bool) -> None:
        """The front end answers: it goes on with the stream, or knows nothing of it."""
        self._misses = self._bounces = 0
        self.lives = owns

    def bounced(self) -> None:
        """Nobody was there to be asked."""
        self._misses = 0
        self._bounces += 1
        if self._bounces >= MOST_BOUNCES:
            self.lives = False

    def wrote(self) -> None:
        """The owner has stored something."""
        self._misses = self._bounces = 0
        self.lives = True
