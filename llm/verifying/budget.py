"""The budget of time: a share of what goes by."""

from __future__ import annotations

from typing import Final

SAVED: Final = 20.0
"""Seconds of work that are saved up at most."""


class TimeBudget:
    """A share of the time, which is saved up and may be overdrawn by the piece of work that
    empties it.

    Args:
        share: of all time, above 0.
        now: seconds on any clock, as in every call.
    """

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._saved = 0.0
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until the next piece may begin; 0 for now."""
        self._save(now)
        return max(0.0, -self._saved) / self._share

    def spend(self, seconds: float, now: float) -> None:
        """A piece has taken so long, and has ended now."""
        self._save(now)
        self._saved -= seconds

    def _save(self, now: float) -> None:
        self._saved = min(SAVED, self._saved + self._share * max(0.0, now - self._at))
        self._at = now
