"""`Timeline`: counts and times of a flight in buckets of time, bounded whatever a flight holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

MOST_BUCKETS: Final = 8192
"""Buckets that are kept; beyond that each two become one that is twice as wide. A day has them of
16 seconds."""
MOST_PLACES: Final = 64
"""Instances that are told apart; the calls of further ones count as those of `OTHERS`."""
OTHERS: Final = "others"
MOST_SPREAD: Final = 512
"""Buckets among which one amount is spread."""

GROWTH: Final = 1.05
"""The ratio of two neighbours among the times that are told apart: a quantile is right within half
of it, as of DDSketch (Masson et al., 2019)."""
_SCALE: Final = 1.0 / math.log(GROWTH)
SHORTEST: Final = 1e-5
"""Seconds; shorter times count as this."""


class Times:
    """Many times, of which quantiles are known within 2.5 %; they are merged without loss."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Times [{self.count}]>"

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    def add(self, seconds: float, count: int = 1) -> None:
        place = math.ceil(math.log(max(seconds, SHORTEST)) * _SCALE)
        self._counts[place] = self._counts.get(place, 0) + count

    def merge(self, other: Times) -> None:
        for place, count in other._counts.items():
            self._counts[place] = self._counts.get(place, 0) + count

    def quantile(self, part: float) -> float | None:
        """The time, in seconds, that a part of them does not exceed; None where there are none."""
        left = math.ceil(part * self.count) or 1
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                # The middle of what counts as this.
                return math.exp((place - 0.5) / _SCALE)
        return None


class Bucket:
    """All that happened in a part of the time.

    Attributes:
        counts: amounts by their names.
        times: durations by their names.
        places: calls that were sent to each instance.
    """

    __slots__ = ("counts", "places", "times")

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}
        self.times: dict[str, Times] = {}
        self.places: dict[str, float] = {}

    def merge(self, other: Bucket) -> None:
        """Have all of another one as well."""
        _add_all(self.counts, other.counts)
        _add_all(self.places, other.places)
        for name, times in other.times.items():
            self.times.setdefault(name, Times()).merge(times)


class Span(NamedTuple):
    """Buckets of one width, without a gap.

    Attributes:
        since: Unix seconds at which the first begins.
        width: seconds of each.
    """

    since: float
    width: float
    buckets: list[Bucket]

    @property
    def until(self) -> float:
        """Unix seconds at which the last ends."""
        return self.since + self.width * len(self.buckets)


class Timeline:
    """Amounts and durations by time.

    Args:
        keep: seconds before the latest bucket of which those may go that have no room.
        most: buckets that are kept.

    Attributes:
        width: seconds of a bucket: a power of two, which grows with the time that is covered.
        totals: of all amounts, by their names.
    """

    def __init__(self, keep: float = math.inf, most: int = MOST_BUCKETS) -> None:
        self.width = 1.0
        self.totals: dict[str, float] = {}
        self._keep = keep
        self._most = most
        self._buckets: dict[int, Bucket] = {}
        self._places: set[str] = set()

    def __repr__(self) -> str:
        return f"<Timeline [{len(self._buckets)} buckets of {self.width:g} s]>"

    @property
    def range(self) -> tuple[float, float] | None:
        """Unix seconds at which the first bucket begins and the last ends; None without any."""
        if not self._buckets:
            return None
        return min(self._buckets) * self.width, (max(self._buckets) + 1) * self.width

    def add(self, time: float, name: str, amount: float = 1.0) -> None:
        """Count an amount at a time."""
        counts = self._bucket(time).counts
        counts[name] = counts.get(name, 0.0) + amount
        self.totals[name] = self.totals.get(name, 0.0) + amount

    def spread(self, since: float, until: float, name: str, amount: float) -> None:
        """Count an amount evenly between two times; over a long one at `MOST_SPREAD` of them."""
        first, last = math.floor(since / self.width), math.floor(until / self.width)
        steps = min(last - first + 1, MOST_SPREAD)
        if steps < 2:
            self.add(until, name, amount)
            return
        length = (until - since) / steps
        for step in range(steps):
            self.add(since + (step + 0.5) * length, name, amount / steps)

    def observe(self, time: float, name: str, seconds: float, count: int = 1) -> None:
        """Have a duration that was known at a time, so many times."""
        self._bucket(time).times.setdefault(name, Times()).add(seconds, count)

    def place(self, time: float, instance: str, count: int = 1) -> None:
        """Count calls that were sent to an instance."""
        if instance not in self._places:
            if len(self._places) >= MOST_PLACES:
                instance = OTHERS
            self._places.add(instance)
        places = self._bucket(time).places
        places[instance] = places.get(instance, 0.0) + count

    def span(self, since: float, until: float, most: int) -> Span:
        """At most so many buckets, of which the first has `since` and the last `until`."""
        width = self.width
        while True:
            first, last = math.floor(since / width), math.ceil(until / width)
            if last - first <= max(1, most):
                break
            width *= 2
        buckets = [Bucket() for _ in range(max(1, last - first))]
        each = round(width / self.width)
        low, high = first * each, (first + len(buckets)) * each
        # Whichever is less to look at.
        keys: Iterable[int] = range(low, high) if high - low < len(self._buckets) else self._buckets
        for key in keys:
            bucket = self._buckets.get(key)
            if bucket is not None and low <= key < high:
                buckets[(key - low) // each].merge(bucket)
        return Span(first * width, width, buckets)

    def _bucket(self, time: float) -> Bucket:
        key = math.floor(time / self.width)
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._most:
                self._widen()
                return self._bucket(time)
            bucket = self._buckets[key] = Bucket()
        return bucket

    def _widen(self) -> None:
        """Let old buckets go, and have the others twice as wide, until a quarter is free."""
        if self._keep < math.inf:
            first = math.floor(max(self._buckets) - self._keep / self.width)
            self._buckets = {key: one for key, one in self._buckets.items() if key >= first}
        while len(self._buckets) > self._most * 3 // 4:
            self.width *= 2
            wider: dict[int, Bucket] = {}
            for key, bucket in self._buckets.items():
                known = wider.get(key // 2)
                if known is None:
                    wider[key // 2] = bucket
                else:
                    known.merge(bucket)
            self._buckets = wider


def _add_all(counts: dict[str, float], others: Mapping[str, float]) -> None:
    for name, amount in others.items():
        counts[name] = counts.get(name, 0.0) + amount
