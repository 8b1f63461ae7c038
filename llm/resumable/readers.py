"""`Readers`: who reads a resumable stream, and when it is paused since nobody does."""

from __future__ import annotations

from typing import Final

from .records import READ_INTERVAL

UNREAD_SECONDS: Final = 10.0
"""Seconds that a stream which nobody reads goes on before it is paused: a client whose connection
broke finds it where it would be."""

UNREAD_BYTES: Final = 64 * 1024
"""Bytes of one that are stored in that time, before it is paused earlier."""

SEEN_SECONDS: Final = 2 * READ_INTERVAL
"""Seconds that a reader at another front end counts as one after it has asked."""


class Readers:
    """The known readers of a stream, beside its reader at this front end.

    Times are of one monotonic clock; sizes are bytes of the stream's log.

    Args:
        now, size: when the stream begins here.
    """

    __slots__ = ("_is_asked", "_size", "_until")

    def __init__(self, now: float, size: int) -> None:
        self._is_asked = False
        # Until when somebody is known to have read it, and what was stored of it by then.
        self._until = now
        self._size = size

    def __repr__(self) -> str:
        return f"<Readers [until {self._until:.1f}]>"

    def left(self, now: float, size: int) -> None:
        """The reader at this front end has left, who may come back."""
        self._note(now, size)

    def seen(self, now: float, size: int) -> None:
        """Somebody reads at another front end, or asks for the stream."""
        self._note(now + SEEN_SECONDS, size)

    def ask_to_pause(self) -> None:
        """Others need what works for the stream: it is to be paused unless it is read here."""
        self._is_asked = True

    def are_gone(self, now: float) -> bool:
        """True if it has no known reader any longer, and is not read here."""
        return now >= self._until

    def have_it_paused(self, now: float, size: int) -> bool:
        """True if a stream that is not read here is to be paused."""
        if self._is_asked or not self.are_gone(now):
            return self._is_asked
        return now - self._until > UNREAD_SECONDS or size - self._size > UNREAD_BYTES

    def _note(self, until: float, size: int) -> None:
        self._until = max(self._until, until)
        self._size = size
