"""The expected duration of a handler's runs, estimated from its latest ones."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

KEPT_RUNS: Final = 128
KNOWN_RUNS: Final = 8
STALE_SHARE: Final = 16
"""Of this many runs one may be missing from the figures: they are not sorted after each."""
LEAST_YIELD: Final = 0.8
LEAST_CHANCE: Final = 0.5
GOOD_CHANCE: Final = 0.98
RUNS_AT_A_TIME: Final = 16
"""Runs of those that are under way that are looked at; they stand for the others."""


class Durations:
    """The latest runs of a handler: only the time in which it ran, not what it waited before.

    A run that was cut short, by its deadline or by its caller, says that the handler takes
    longer than this. It counts as long as the known runs that took longer, on average; twice
    its own time where none did. So a handler that became slower is found out although none of
    its runs ends in time, and no number of runs that are given up early makes it look fast.
    """

    __slots__ = ("_held", "_lengths", "_new", "_sorted", "_sums")

    def __init__(self) -> None:
        # The length of each run, and for how long it kept others from running.
        self._lengths: deque[float] = deque(maxlen=KEPT_RUNS)
        self._held: deque[float] = deque(maxlen=KEPT_RUNS)
        self._new = 0
        self._sorted: list[float] = []
        self._sums: list[float] = [0.0]

    def __repr__(self) -> str:
        return f"<Durations [{len(self._lengths)} runs of {self.mean_held:.3g} s]>"

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def mean_held(self) -> float:
        """Seconds for which a run keeps its place, cut short or not; 0 when nothing is known."""
        return sum(self._held) / len(self._held) if self._held else 0.0

    def add(self, seconds: float, *, whole: bool) -> None:
        """Count a run; `whole` is false where it was cut short."""
        length = seconds
        if not whole:
            if not self._lengths:
                return
            self._read()
            longer = bisect_right(self._sorted, seconds)
            count = len(self._sorted) - longer
            length = (self._sums[-1] - self._sums[longer]) / count if count else 2 * seconds
        self._lengths.append(length)
        self._held.append(seconds)
        self._new += 1

    def chance(self, left: float) -> float:
        """The share of runs that take at most `left` seconds."""
        self._read()
        return bisect_right(self._sorted, left) / max(1, len(self._sorted))

    def is_worth_it(self, left: float, allowed: float, *, others: bool) -> bool:
        """True if a call with `left` of its `allowed` seconds should still begin.

        Args:
            others: whether there are others with more time that would begin in its place. Then
                it needs nearly the chance that it had with all its time: few runs are cut
                short, and the long ones not more often than the short.
        """
        chance, best = self.chance(left), self.chance(allowed)
        if chance == 0.0 or chance < (GOOD_CHANCE if others else LEAST_CHANCE) * best:
            return False
        # Of a few short and many long runs the long must not begin only to be cut.
        return chance * self._cost(allowed) >= LEAST_YIELD * best * self._cost(left)

    def needed(self, allowed: float) -> float | None:
        """Seconds that a run needs which takes at most `allowed`; None where none does so."""
        self._read()
        fitting = bisect_right(self._sorted, allowed)
        return self._sorted[round(GOOD_CHANCE * (fitting - 1))] if fitting else None

    def first_end(self, ages: Sequence[float]) -> float:
        """Seconds until the first of several runs probably ends.

        While nothing is known that is as long again as the oldest has been running.

        Args:
            ages: for how long each has been running, the oldest first.
        """
        self._read()
        lengths = self._sorted
        if not lengths:
            return ages[0]
        step = max(1, len(ages) // RUNS_AT_A_TIME)
        looked_at = ages[::step]
        soonest, latest = 0.0, max(lengths[-1], 2 * ages[0])
        # The chance that none has ended falls with time: halve the interval.
        while latest - soonest > 0.02 * latest:
            middle = (soonest + latest) / 2
            none_ended = 1.0
            for age in looked_at:
                none_ended *= self._lasting(age, middle)
            if none_ended**step > 0.5:
                soonest = middle
            else:
                latest = middle
        return latest

    def ends(self, ages: Sequence[float]) -> list[float]:
        """Seconds until each of several runs is expected to end, the next first.

        Of many runs these are a few that stand for all.
        """
        self._read()
        step = max(1, len(ages) // RUNS_AT_A_TIME)
        return sorted(self._left(age) for age in ages[::step])

    def _left(self, age: float) -> float:
        """Seconds for which a run of this age is expected to go on."""
        shorter = bisect_right(self._sorted, age)
        count = len(self._sorted) - shorter
        return (self._sums[-1] - self._sums[shorter]) / count - age if count else age

    def _lasting(self, age: float, seconds: float) -> float:
        """The chance that a run of this age goes on for so long."""
        lengths = self._sorted
        alive = len(lengths) - bisect_right(lengths, age)
        if not alive:
            # It takes longer than any that is known.
            return 1.0 if seconds < age else 0.0
        return (len(lengths) - bisect_right(lengths, age + seconds)) / alive

    def _cost(self, left: float) -> float:
        """Seconds that a run takes on average when it is cut after `left`."""
        shorter = bisect_right(self._sorted, left)
        count = len(self._sorted)
        return (self._sums[shorter] + (count - shorter) * left) / max(1, count)

    def _read(self) -> None:
        """Sort what is known, unless next to nothing is new."""
        if self._new and self._new * STALE_SHARE >= len(self._lengths):
            self._new = 0
            self._sorted = sorted(self._lengths)
            self._sums = list(accumulate(self._sorted, initial=0.0))
