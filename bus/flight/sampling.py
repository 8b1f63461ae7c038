"""The share of requests that is recorded where there are too many, and the times of that in a
flight.

Who keeps one of 2, 4, 8 ... requests chooses them by the digests of their ids, and who keeps fewer
keeps a part of what others keep: a request that is recorded at the smallest share is so everywhere.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from .records import EVENT, Entry, decode_event

SAMPLED: Final = "requests.sampled"
"""The event in which a recorder tells its share, when that changes and each minute."""

WINDOW: Final = 1.0
"""Seconds in which records are counted."""
CALM: Final = 5
"""Windows after which twice as many requests are recorded, if they would be few enough."""
ROOM: Final = 0.4
"""The part of the most records which that many are."""
MOST_TIMES: Final = 1024
"""The latest times that are known of a flight."""
MOST_ONE_IN: Final = 4096
"""Requests of which one is recorded, at least: the rest of the records may be of no request."""


class Sampling:
    """Says which requests a process records: all, or one of so many while there are too many
    records.

    Args:
        most: records a second, beyond which there are too many.

    Attributes:
        one_in: requests of which one is recorded, a power of two.
    """

    __slots__ = ("_calm", "_count", "_most", "_until", "one_in")

    def __init__(self, most: int) -> None:
        self.one_in = 1
        self._most = most
        self._count = self._calm = 0
        self._until = -math.inf

    def __repr__(self) -> str:
        return f"<Sampling of 1 in {self.one_in}>"

    def share(self, digest: int) -> int:
        """The number of requests for which the one with this digest is recorded; 0 where it is
        not."""
        one_in = self.one_in
        return 0 if digest & (one_in - 1) else one_in

    def count(self, records: int, now: float) -> None:
        """So many records are made, by a time of the monotonic clock."""
        if now >= self._until:
            self._turn(now)
        self._count += records
        while self._count > self._most and self.one_in < MOST_ONE_IN:
            # As many as there would have been.
            self.one_in *= 2
            self._count //= 2
            self._calm = 0

    def _turn(self, now: float) -> None:
        """A window is over, and those after it in which nothing was recorded."""
        if self.one_in > 1:
            idle = int((now - self._until) / WINDOW)
            is_calm = self._count <= self._most * ROOM
            self._calm = idle + (self._calm + 1 if is_calm else 0)
            doublings, self._calm = divmod(self._calm, CALM)
            self.one_in = max(1, self.one_in >> doublings)
        self._count = 0
        self._until = now + WINDOW


class SampledTime(NamedTuple):
    """A time in which one of several requests is on record.

    Attributes:
        since, until: Unix seconds.
    """

    since: float
    until: float
    one_in: int


class SampledTimes:
    """The times in which a flight has a share of the requests alone, as its recorders tell."""

    def __init__(self) -> None:
        # Of each recorder that keeps a share: its time so far.
        self._open: dict[str, SampledTime] = {}
        self._over: deque[SampledTime] = deque(maxlen=MOST_TIMES)

    def __repr__(self) -> str:
        return f"<SampledTimes [{len(self._over)} over, {len(self._open)} open]>"

    def take(self, entry: Entry) -> None:
        """Take the next record, each recorder's in their order."""
        known = self._open.get(entry.recorder)
        if known is not None and entry.time > known.until:
            known = self._open[entry.recorder] = known._replace(until=entry.time)
        if entry.kind != EVENT or SAMPLED.encode() not in bytes(entry.body):
            return
        try:
            event = decode_event(entry.body)
        except (msgspec.DecodeError, RecursionError):
            return
        one_in = event.details.get("one_in")
        if event.what != SAMPLED or not isinstance(one_in, int):
            return
        if known is not None and known.one_in != one_in:
            self._over.append(self._open.pop(entry.recorder))
            known = None
        if known is None and one_in > 1:
            self._open[entry.recorder] = SampledTime(entry.time, entry.time, one_in)
            if len(self._open) > MOST_TIMES:
                # Most recorders of so many are of processes that are no more.
                self._over.append(self._open.pop(next(iter(self._open))))

    @property
    def times(self) -> list[SampledTime]:
        """The times in their order, without an overlap: of several recorders the smallest share
        counts."""
        spans = sorted([*self._over, *self._open.values()])
        bounds = sorted({bound for each in spans for bound in each[:2]})
        merged: list[SampledTime] = []
        # Those that have begun, the smallest share first: each is put in and taken out once.
        begun: list[tuple[int, float]] = []
        place = 0
        for since, until in pairwise(bounds):
            while place < len(spans) and spans[place].since <= since:
                heapq.heappush(begun, (-spans[place].one_in, spans[place].until))
                place += 1
            while begun and begun[0][1] <= since:
                heapq.heappop(begun)
            if not begun:
                continue
            one_in = -begun[0][0]
            before = merged[-1] if merged else None
            if before is not None and before.one_in == one_in and before.until == since:
                merged[-1] = before._replace(until=until)
            else:
                merged.append(SampledTime(since, until, one_in))
        return merged
