"""Event epochs are times: nanoseconds of the wall clock, and at most `CLOCK_ALLOWANCE` ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

CLOCK_ALLOWANCE: Final = 24 * 3600 * 10**9
"""Nanoseconds by which an epoch may lie ahead of the time at which the server stored its message.
A clock that is set wrong is seldom off by more, and whoever claims more would never be outdone by
a true epoch."""


def latest_epoch(stored: float) -> int:
    """The highest epoch that a message can have.

    Args:
        stored: Unix seconds at which the server stored it.
    """
    return int(stored * 1e9) + CLOCK_ALLOWANCE


class EpochClock:
    """Event epochs, each above all before in this process.

    What lies ahead of the clock by more than `CLOCK_ALLOWANCE` does not count: no index takes
    an epoch above it.

    Args:
        time_ns: Unix nanoseconds.
    """

    def __init__(self, time_ns: Callable[[], int]) -> None:
        self._time_ns = time_ns
        self._last = 0
        self._lock = threading.Lock()

    def next(self, above: int = 0) -> int:
        """An epoch above `above` and above all that were given out."""
        with self._lock:
            now = self._time_ns()
            known = [one for one in (self._last, above) if one <= now + CLOCK_ALLOWANCE]
            self._last = max([now, *(one + 1 for one in known)])
            return self._last

    def is_credible(self, event_epoch: int) -> bool:
        """Whether an epoch can be the one of a message that is stored by now."""
        return event_epoch <= self._time_ns() + CLOCK_ALLOWANCE
