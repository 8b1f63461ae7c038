"""Sorted, disjoint, half-open intervals of integers, kept in a plain list."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Interval = tuple[int, int]
Intervals = list[Interval]
"""Sorted, and no two of them touch."""

_BEYOND = 1 << 62


def add(intervals: Intervals, start: int, end: int) -> int:
    """Cover [start, end) as well; returns how many integers of it were covered before."""
    first = bisect_right(intervals, (start, -1))
    if first and intervals[first - 1][1] >= start:
        first -= 1
    last = first
    covered = 0
    low, high = start, end
    while last < len(intervals) and intervals[last][0] <= end:
        a, b = intervals[last]
        covered += max(0, min(b, end) - max(a, start))
        low, high = min(low, a), max(high, b)
        last += 1
    intervals[first:last] = [(low, high)]
    return covered


def discard(intervals: Intervals, position: int) -> bool:
    """Uncover one integer; returns whether it was covered."""
    at = bisect_right(intervals, (position, _BEYOND)) - 1
    if at < 0 or intervals[at][1] <= position:
        return False
    start, end = intervals[at]
    rest = ((start, position), (position + 1, end))
    intervals[at : at + 1] = [interval for interval in rest if interval[0] < interval[1]]
    return True


def end_at(intervals: Iterable[Interval], position: int) -> int | None:
    """The end of the interval that covers `position`, None if none does."""
    for start, end in intervals:
        if start <= position < end:
            return end
    return None


def split(intervals: Intervals, position: int) -> tuple[Intervals, Intervals]:
    """The parts below `position`, and at and above it."""
    below = [(start, min(end, position)) for start, end in intervals if start < position]
    above = [(max(start, position), end) for start, end in intervals if end > position]
    return below, above
