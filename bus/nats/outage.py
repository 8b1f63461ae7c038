"""When an operator is told that an outage of the server goes on. No I/O here."""

from __future__ import annotations

from typing import Final

FIRST_REPORT: Final = 5.0
"""Seconds for which an outage is not spoken of: a server that is started again is back by then."""
MAX_PAUSE: Final = 600.0
"""Seconds between two reports of a long outage, at most."""


class Outage:
    """An outage that began at `lost_at`: what is to be said of it while it lasts, and when."""

    def __init__(self, lost_at: float) -> None:
        self._lost_at = lost_at
        self._pause = FIRST_REPORT
        self._next = lost_at + FIRST_REPORT

    def __repr__(self) -> str:
        return f"<Outage [since: {self._lost_at:.3f}, next report: {self._next:.3f}]>"

    def lasted(self, now: float) -> float:
        """Its seconds until now."""
        return now - self._lost_at

    def is_report_due(self, now: float) -> bool:
        """Whether to say that it goes on; each time the pause until the next one doubles."""
        if now < self._next:
            return False
        self._pause = min(self._pause * 2, MAX_PAUSE)
        self._next = now + self._pause
        return True
