"""Lanes of a queue: which one a job is put into, and which ones its takers ask. No I/O, no clock.

A queue has either three lanes, by priority, or sixteen, each in order. A lane has a consumer of its
own, of which the jobs are asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

HIGH: Final = "high"
NORMAL: Final = "normal"
LOW: Final = "low"
PRIORITY_LANES: Final = (HIGH, NORMAL, LOW)
"""Of a queue that is not ordered, preferred first."""

ORDERED_LANES: Final = tuple(str(number) for number in range(16))

PATIENCE: Final = 0.02
"""Seconds in which a lane that is said to have a job hands one out, unless others took them."""
LOOK_AFTER: Final = 1.0
"""Seconds after which a lane is asked again of which nothing is known, beside those that have
jobs."""


def lanes_of(*, ordered: bool) -> tuple[str, ...]:
    """The lanes of a queue."""
    return ORDERED_LANES if ordered else PRIORITY_LANES


def lane_of_key(key: str) -> str:
    """The lane that puts the jobs of a key in order: by the CRC-32 of its UTF-8 bytes."""
    return ORDERED_LANES[zlib.crc32(key.encode()) % len(ORDERED_LANES)]


def lane_of_priority(priority: int) -> str:
    """The lane of a job with a priority."""
    return HIGH if priority > 0 else LOW if priority < 0 else NORMAL


class Asks(NamedTuple):
    """The requests of a taker to its lanes, by their places.

    Attributes:
        counts: how many jobs, beside those that were asked for.
        surplus: where nothing is wanted any more.
    """

    counts: dict[int, int]
    surplus: list[int]


class LaneChoice:
    """The choice of the lanes that a taker asks, and for how many jobs. Times are those of one
    clock, in seconds.

    A lane is asked on its own where the last delivery said that more jobs are behind it: what
    several lanes hand out at once would be more than is wanted. Where none is known to have one,
    all are asked, and what is too much is given back.

    Args:
        ordered: whether a lane hands out one job at a time; lanes take turns then. Otherwise those
            that come first are preferred.
        waiting: jobs that wait in each lane, as far as it is known.
    """

    def __init__(self, waiting: Sequence[int], *, ordered: bool) -> None:
        self._ordered = ordered
        self._has_jobs = [count > 0 for count in waiting]
        self._asked_at = [float("-inf")] * len(waiting)
        self._turn = 0

    def __repr__(self) -> str:
        known = [place for place, has in enumerate(self._has_jobs) if has]
        return f"<LaneChoice [with jobs: {known}]>"

    def delivered(self, lane: int, pending: int) -> None:
        """A lane handed out a job, with so many behind it."""
        self._has_jobs[lane] = pending > 0
        self._turn = (lane + 1) % len(self._has_jobs)

    def heard_of_job(self, lane: int) -> None:
        """A job was put into a lane, or given back."""
        self._has_jobs[lane] = True

    def heard_nothing(self, asked: Sequence[int]) -> None:
        """Lanes that were said to have jobs have handed out none: others took them."""
        for lane, count in enumerate(asked):
            if count:
                self._has_jobs[lane] = False

    def hopes(self, asked: Sequence[int]) -> bool:
        """True if one of the lanes that was asked is said to have a job."""
        return any(count and has for count, has in zip(asked, self._has_jobs, strict=True))

    def pick(self, needed: int, asked: Sequence[int], held: Collection[int], now: float) -> Asks:
        """Choose the requests by which `needed` jobs come.

        Args:
            asked: how many were asked of each lane and have not come.
            held: the lanes of which the taker has a job.
        """
        if needed <= 0:
            return Asks({}, [])
        free = [one for one in self._in_order() if not (self._ordered and one in held)]
        likely = [lane for lane in free if self._has_jobs[lane]]
        counts: dict[int, int] = {}
        left = self._ask(likely, needed, asked, counts, now)
        surplus: list[int] = []
        others = [lane for lane in free if not self._has_jobs[lane]]
        if left:
            for lane in others:
                self._ask([lane], left, asked, counts, now)
        elif likely:
            if not self._ordered:
                surplus = [lane for lane in free if lane > likely[0] and asked[lane]]
                others = [lane for lane in others if lane < likely[0]]
            for lane in others:
                if now - self._asked_at[lane] >= LOOK_AFTER:
                    self._ask([lane], 1, asked, counts, now)
        return Asks(counts, surplus)

    def _in_order(self) -> list[int]:
        lanes = list(range(len(self._has_jobs)))
        return lanes[self._turn :] + lanes[: self._turn] if self._ordered else lanes

    def _ask(
        self,
        lanes: Sequence[int],
        needed: int,
        asked: Sequence[int],
        counts: dict[int, int],
        now: float,
    ) -> int:
        """Ask lanes in turn until enough is asked for; how many are still needed."""
        for lane in lanes:
            if needed <= 0:
                break
            share = 1 if self._ordered else needed
            self._asked_at[lane] = now
            if share > asked[lane]:
                counts[lane] = share - asked[lane]
            needed -= share
        return needed
