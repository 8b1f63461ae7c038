"""Requests that wait until an instance has room: the most urgent first, then in their order."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_WAITING: Final = 1024


class WaitingQueue(Generic[T]):
    """A bounded queue by priority, then arrival.

    Args:
        limit: how many may wait.
    """

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._arrivals = 0
        self._order: list[tuple[int, int]] = []
        self._waiting: dict[tuple[int, int], T] = {}

    def __repr__(self) -> str:
        return f"<WaitingQueue [{len(self._order)} of {self._limit}]>"

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[T]:
        """Who waits, in the order of service; may be changed meanwhile."""
        return iter([self._waiting[place] for place in self._order])

    @property
    def is_full(self) -> bool:
        return len(self._order) >= self._limit

    def push(self, waiting: T, priority: int) -> tuple[int, int]:
        """Let one wait; returns the place, to be given to `remove`.

        Raises:
            OverflowError: the queue is full.
        """
        if self.is_full:
            raise OverflowError(f"{len(self._order)} requests wait: no more may")
        self._arrivals += 1
        place = (-priority, self._arrivals)
        insort(self._order, place)
        self._waiting[place] = waiting
        return place

    def remove(self, place: tuple[int, int]) -> bool:
        """One waits no longer; False when it did not."""
        if self._waiting.pop(place, None) is None:
            return False
        self._order.remove(place)
        return True

    def has_before(self, priority: int, counts: Callable[[T], bool]) -> bool:
        """Whether a request that arrives now would wait behind one that `counts`."""
        for place in self._order:
            if place[0] > -priority:
                return False
            if counts(self._waiting[place]):
                return True
        return False
