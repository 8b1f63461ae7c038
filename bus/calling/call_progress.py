"""The progress of one call at its caller, and the frames, credit among them, that its writer is
due.

A plain object without I/O or clock. `PendingCall` is one with a task that waits for it.
"""

from __future__ import annotations

import math
from typing import Final

from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.random_ids import random_bytes
from dynbus.bus.protocol.stream_reader import StreamReader
from dynbus.bus.protocol.wire import SECRET_BYTES, Cancel, Credit, Resume

STALLED_AFTER: Final = 2.0
"""Seconds for which a stream may lack what its writer says that it has sent, and was asked for."""


class CallProgress:
    """The part of a call that has arrived, and whether that is all that there should be.

    Args:
        number: of the request, unique per client.
        attempt: which attempt at the request it is.
        window: bytes of items that the writer may be ahead of `consume`.
        max_item_bytes: a larger item ends the call with `PayloadTooLarge`.
        now: when it was sent, on the clock of `monotonic`.

    Attributes:
        secret: what every frame of it carries.
        begun_at: when it was sent.
        error: how it ended, where it did not end well.
        behind_since: since when heartbeats have said that more was sent than has come, and nothing
            of it came; infinite where they say so of nothing.
    """

    __slots__ = (
        "_asked_at",
        "_behind_at",
        "_behind_from",
        "_idle_at",
        "_missed",
        "attempt",
        "begun_at",
        "behind_since",
        "error",
        "number",
        "reader",
        "secret",
    )

    def __init__(
        self, number: int, attempt: int, *, window: int, max_item_bytes: int, now: float
    ) -> None:
        self.number = number
        self.attempt = attempt
        self.secret = random_bytes(SECRET_BYTES)
        self.begun_at = now
        self.reader = StreamReader(window=window, max_item_bytes=max_item_bytes)
        self.error: DynbusError | None = None
        self._missed = 0
        self._asked_at = -1
        self._behind_at = -1
        self._behind_from = -1
        self.behind_since = math.inf
        self._idle_at = -1

    @property
    def is_open(self) -> bool:
        return self.error is None and self.reader.terminal is None

    def consume(self, size: int) -> Credit | None:
        """Note that items of `size` bytes were taken; the credit that is to be granted now."""
        granted = self.reader.consume(size)
        if granted is None or not self.is_open:
            return None
        return Credit(self.number, self.secret, self.attempt, granted, self.reader.next_sequence)

    def compare(self, sent: int | None, now: float) -> Credit | Resume | None:
        """A heartbeat says what the writer has sent, or does not know this call (None).

        Acts on the second heartbeat in a row only: frames and heartbeats travel apart.

        Returns:
            What is to be said to the writer, if anything.
        """
        position = self.reader.next_sequence
        if sent is not None and sent <= position:
            self._missed = 0
            self._asked_at = self._behind_at = -1
            self.behind_since = math.inf
            return self._repeated_credit()
        if sent is None:
            self.behind_since = math.inf
        elif self._behind_from != position or self.behind_since == math.inf:
            self._behind_from = position
            self.behind_since = now
        self._missed = self._missed + 1 if self._behind_at == position else 1
        self._behind_at = position
        if self._missed < 2:
            return None
        self._missed = 0
        self._asked_at = position
        return self.resume_frame(now)

    def is_stalled(self, now: float, heard_at: float) -> bool:
        """True if what was sent does not come, although it was asked for.

        Args:
            heard_at: when anything of the instance last came where its results do. As long as
                something does, they may be behind it.
        """
        since = self.behind_since
        return (
            self.is_open
            and max(since, heard_at) + STALLED_AFTER <= now
            and self.reader.next_sequence == self._behind_from
        )

    def ask_once(self, now: float) -> Resume | None:
        """The question that a gap raises, unless it was asked already.

        Every frame behind a gap says so; one question per position is enough, and a lost
        question is asked again at the next heartbeats.
        """
        if self._asked_at == self.reader.next_sequence:
            return None
        self._asked_at = self.reader.next_sequence
        return self.resume_frame(now)

    def resume_frame(self, now: float) -> Resume:
        """The frame that asks the writer to send everything that is not here yet."""
        age = now - self.begun_at
        return Resume(self.number, self.secret, self.attempt, self.reader.next_sequence, age)

    def standing(self, now: float) -> list[Credit | Resume]:
        """The frames for a writer that may have missed all that was said to it lately."""
        granted = self._granted()
        return [self.resume_frame(now)] if granted is None else [self.resume_frame(now), granted]

    def cancel_frame(self, kill_after: float) -> Cancel:
        """The frame that tells the writer to stop, and to drop the call `kill_after` seconds
        later."""
        return Cancel(self.number, self.secret, self.attempt, kill_after)

    def _repeated_credit(self) -> Credit | None:
        """The credit last granted to a writer that sends nothing: it may have missed it."""
        position = self.reader.next_sequence
        was_idle, self._idle_at = self._idle_at == position, position
        return self._granted() if was_idle else None

    def _granted(self) -> Credit | None:
        reader = self.reader
        if reader.granted <= reader.window:
            return None
        position = reader.next_sequence
        return Credit(self.number, self.secret, self.attempt, reader.granted, position)
