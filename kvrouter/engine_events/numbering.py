"""The numbers of one rank's messages: the next one, missing ones, and news.

An engine numbers its messages from 0 and begins anew when it restarts. It keeps the latest ones
for replay. A reader that asks for a replay asks from the last message that it has: only when the
answer begins with exactly that message is it the same engine, and what follows continues what is
known.
"""

from __future__ import annotations

from enum import Enum, auto

from xxhash import xxh3_128_digest


class Arrival(Enum):
    """The kind of a message, by its number."""

    NEXT = auto()
    """It continues what is known."""

    DUPLICATE = auto()
    """It was taken already."""

    GAP = auto()
    """Messages before it are missing."""

    RESTART = auto()
    """It is of an engine that began anew: what is known is void."""


class Numbering:
    """The numbers of one rank's messages.

    Attributes:
        last: number of the last message taken; -1 before the first.
        confirmed: whether the replay comes from the engine whose messages are known.
        is_same_engine: whether this connection, as far as is known, leads to that engine.
    """

    def __init__(self) -> None:
        self.last = -1
        self._digest = b""
        self._live = -1
        self.confirmed = True
        self.is_same_engine = True

    def begin_anew(self) -> None:
        """Nothing is known any longer; messages are taken from any engine."""
        self.last = -1
        self.confirmed = self.is_same_engine = True

    def connected(self) -> None:
        """A new connection begins: behind it may be another engine."""
        self._live = -1
        self.is_same_engine = self.last < 0

    def arrive(self, number: int) -> Arrival:
        """The kind of a published message, seen in the order of its connection."""
        behind = number <= self._live
        self._live = number
        if behind:
            # One connection delivers in order and once.
            return Arrival.RESTART
        if number <= self.last:
            return Arrival.DUPLICATE
        return Arrival.NEXT if number == self.last + 1 else Arrival.GAP

    def begin_replay(self) -> int:
        """The number from which to ask for a replay."""
        self.confirmed = self.last < 0
        return max(self.last, 0)

    def replay(self, number: int, payload: bytes) -> Arrival:
        """The kind of a replayed message."""
        if not self.confirmed:
            if number != self.last or xxh3_128_digest(payload) != self._digest:
                return Arrival.RESTART
            self.confirmed = self.is_same_engine = True
        if number <= self.last:
            return Arrival.DUPLICATE
        return Arrival.NEXT if number == self.last + 1 else Arrival.GAP

    def mark_used(self, number: int, payload: bytes) -> None:
        """The message is used, whatever was missing before it."""
        self.last = number
        self._digest = xxh3_128_digest(payload)
