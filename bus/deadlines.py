"""Many deadlines on one loop, at the cost of a dictionary entry each.

Nearly every call ends long before its deadline, so arming and disarming must be cheap and
firing need not be exact: a deadline that is far away fires up to twice `SLACK` seconds late.
Near ones get a timer of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from .clock import monotonic

T = TypeVar("T")

logger = logging.getLogger(__name__)

SLACK: Final = 0.1
NEAR: Final = 4.0


class Deadlines(Generic[T]):
    """Ends calls, or what else has a deadline, when their time has come. Lives on one loop.

    Args:
        expire: ends one of them. A function for all: one for each would be one more object to
            look at for the garbage collector, and it runs the more often for it.
    """

    __slots__ = ("_buckets", "_expire", "_loop", "_near", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[T], object]) -> None:
        self._loop = loop
        self._expire = expire
        self._buckets: dict[int, dict[T, None]] = {}
        self._near: dict[T, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._near) + sum(map(len, self._buckets.values()))

    def arm(self, at: float, now: float, call: T) -> int:
        """Have `call` end at `at`, or up to twice `SLACK` later; returns what `disarm` wants."""
        left = at - now
        if left < NEAR:
            self._near[call] = self._loop.call_later(max(0.0, left), self._fire_near, call)
            return 0
        number = int(at / SLACK) + 1
        try:
            self._buckets[number][call] = None
        except KeyError:
            self._buckets[number] = {call: None}
            if self._timer is None:
                self._timer = self._loop.call_later(SLACK, self._tick)
        return number

    def disarm(self, number: int, call: T) -> None:
        """Forget the deadline of a call; one that has passed is no error."""
        if number == 0:
            timer = self._near.pop(call, None)
            if timer is not None:
                timer.cancel()
            return
        try:
            bucket = self._buckets[number]
            del bucket[call]
        except KeyError:
            return
        if not bucket:
            del self._buckets[number]

    def clear(self) -> None:
        """Forget everything."""
        for timer in self._near.values():
            timer.cancel()
        self._near.clear()
        self._buckets.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire_near(self, call: T) -> None:
        if self._near.pop(call, None) is not None:
            self._fire(call)

    def _tick(self) -> None:
        self._timer = None
        now = int(monotonic() / SLACK)
        for number in [number for number in self._buckets if number <= now]:
            for call in list(self._buckets.pop(number)):
                self._fire(call)
        if self._buckets and self._timer is None:
            self._timer = self._loop.call_later(SLACK, self._tick)

    def _fire(self, call: T) -> None:
        try:
            self._expire(call)
        except Exception:
            # Whatever is wrong with one call, the others' deadlines must pass too.
            logger.exception("a deadline could not be carried out")
