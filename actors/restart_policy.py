"""When an instance that ended is started again: after a pause that doubles, and how often."""

from __future__ import annotations

from typing import Final

MAX_RESTARTS: Final = 5
RESTART_WINDOW: Final = 60.0
FIRST_PAUSE: Final = 0.2
LONGEST_PAUSE: Final = 10.0


class RestartPolicy:
    """Decides whether and when an instance that ended is started again, without clock or I/O."""

    def __init__(self, limit: int = MAX_RESTARTS, window: float = RESTART_WINDOW) -> None:
        self.limit = limit
        self.window = window
        self._ends: list[float] = []

    def __repr__(self) -> str:
        return f"<RestartPolicy [{len(self._ends)} of {self.limit} in {self.window:g} s]>"

    def pause_after(self, now: float, jitter: float) -> float | None:
        """Seconds to wait after an end; None when there were too many.

        Args:
            now: when it ended, in seconds of a monotonic clock.
            jitter: from 0 to 1; the higher, the longer the pause.
        """
        self._ends = [end for end in self._ends if now - end < self.window]
        self._ends.append(now)
        if len(self._ends) > self.limit:
            return None
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (len(self._ends) - 1))
        return pause * (0.5 + jitter / 2)
