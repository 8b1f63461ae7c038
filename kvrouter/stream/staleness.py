"""How old events are when an index has them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW: Final = 4096
"""Messages that are looked back at."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """Seconds from the hand-over to the publisher to the index, over the last messages.

    Clocks of two machines are compared: what they differ by is in it.
    """

    messages: int
    p50: float
    p99: float
    worst: float


class StalenessWindow:
    """The ages of the last messages when they were applied."""

    def __init__(self, messages: int = WINDOW) -> None:
        self._ages: deque[float] = deque(maxlen=messages)

    def add(self, age: float) -> None:
        self._ages.append(age)

    def summary(self) -> Staleness:
        """Percentiles of what is in the window; zeros when it is empty."""
        ages = sorted(self._ages)
        if not ages:
            return Staleness(0, 0.0, 0.0, 0.0)
        last = len(ages) - 1
        return Staleness(len(ages), ages[last // 2], ages[round(last * 0.99)], ages[-1])
