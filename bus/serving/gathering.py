"""The gathering of calls into batches: who goes together, and when a batch begins."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Final, Generic, TypeVar

T = TypeVar("T")

SHARE_OF_TIME_LEFT: Final = 0.5
"""Of the time that a call has to its deadline, how much it waits for others at most."""


class _Group(Generic[T]):
    """The calls of one key that wait, in the order of their arrival, with when each is due."""

    __slots__ = ("calls", "due")

    def __init__(self) -> None:
        self.calls: dict[T, float] = {}
        self.due = math.inf


class Gathering(Generic[T]):
    """Says when a batch begins, and who is in it. Times are of the monotonic clock.

    Calls of one key go together, in the order of their arrival. A batch begins when it is full or
    its first call is due, and a place is free; of several, the one whose first call came first.

    Args:
        most: calls of one batch.
        wait: seconds that a call waits for others; less where its deadline is near.
        concurrency: batches that run at a time; None for no limit.
    """

    def __init__(self, most: int, wait: float, concurrency: int | None) -> None:
        self.most = most
        self.running = 0
        self._wait = wait
        self._concurrency = concurrency
        self._groups: dict[Hashable, _Group[T]] = {}
        self._keys: dict[T, Hashable] = {}
        self._arrivals: dict[T, int] = {}
        self._arrived = 0

    def __repr__(self) -> str:
        return f"<Gathering [{len(self._keys)} waiting | {self.running} batches running]>"

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[T]:
        return iter(self._keys)

    def add(self, call: T, key: Hashable, now: float, deadline: float | None) -> None:
        """A call waits from now on."""
        wait = self._wait
        if deadline is not None:
            wait = min(wait, max(0.0, SHARE_OF_TIME_LEFT * (deadline - now)))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        group.calls[call] = now + wait
        group.due = min(group.due, now + wait)
        self._keys[call] = key
        self._arrivals[call] = self._arrived
        self._arrived += 1

    def withdraw(self, call: T) -> bool:
        """A call waits no longer; False when it did not wait."""
        if call not in self._keys:
            return False
        self._remove(self._keys[call], [call])
        return True

    def hurry(self) -> None:
        """Nobody else comes: who waits is due, and who comes after all is at once."""
        self._wait = 0.0
        for group in self._groups.values():
            group.calls = dict.fromkeys(group.calls, -math.inf)
            group.due = -math.inf

    def take(self, now: float) -> list[list[T]]:
        """The batches that begin now; they run until `ended` is told of each."""
        batches: list[list[T]] = []
        while self._has_place and (batch := self._first_ready(now)):
            self._remove(self._keys[batch[0]], batch)
            self.running += 1
            batches.append(batch)
        return batches

    def ended(self) -> None:
        """A batch runs no longer."""
        self.running -= 1

    def next_due(self) -> float | None:
        """The time when a batch begins if nothing else happens before; None if none does."""
        if not self._has_place or not self._groups:
            return None
        return min(
            -math.inf if len(group.calls) >= self.most else group.due
            for group in self._groups.values()
        )

    @property
    def _has_place(self) -> bool:
        return self._concurrency is None or self.running < self._concurrency

    def _first_ready(self, now: float) -> list[T]:
        """The calls of the next batch; empty where none is ready."""
        first: list[T] = []
        for group in self._groups.values():
            if group.due > now and len(group.calls) < self.most:
                continue
            calls = list(islice(group.calls, self.most))
            if not first or self._arrivals[calls[0]] < self._arrivals[first[0]]:
                first = calls
        return first

    def _remove(self, key: Hashable, calls: list[T]) -> None:
        group = self._groups[key]
        for call in calls:
            del group.calls[call], self._keys[call], self._arrivals[call]
        if group.calls:
            group.due = min(group.calls.values())
        else:
            del self._groups[key]
