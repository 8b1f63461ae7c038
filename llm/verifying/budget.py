"""The budget of time: a share of what goes by."""

from __future__ import annotations

from typing import Final

SAVED: Final = 20.0
"""Seconds of work that are saved up at most."""


class TimeBudget:
    """A share of the time, which is saved up. A piece of work begins when there is as much as the
    last one took: only one that takes longer overdraws it.

    Args:
        share: of all time, above 0.
        now: seconds on any clock, as in every call.
    """

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._saved = self._last = 0.0
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until the next piece may begin; 0 for now."""
        self._save(now)
        return max(0.0, min(SAVED, self._last) - self._saved) / self._share

    def spend(self, seconds: float, now: float) -> None:
        """A piece has taken so long, and has ended now."""
        self._save(now)
        self._saved -= seconds
        self._last = seconds

    def _save(self, now: float) -> None:
        self._saved = min(SAVED, self._saved + self._share * max(0.0, now - self._at))
        self._at = now
