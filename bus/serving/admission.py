"""Which calls of one handler run, wait or are refused."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Verdict(Enum):
    """What happens to a call that arrives."""

    RUN = "run"
    WAIT = "wait"
    REFUSE = "refuse"


class Admission(Generic[T]):
    """Counts running calls and keeps the waiting ones in arrival order.

    Args:
        concurrency: calls that may run at a time; None for no limit. 1 makes a mailbox.
        queue: calls that may wait; None for no limit.
    """

    __slots__ = ("_waiting", "concurrency", "queue", "running")

    def __init__(self, concurrency: int | None, queue: int | None) -> None:
        self.concurrency = concurrency
        self.queue = queue
        self.running = 0
        self._waiting: deque[T] = deque()

    def __repr__(self) -> str:
        return f"<Admission [{self.running} running, {len(self._waiting)} waiting]>"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, call: T) -> Verdict:
        """Take in a call; with RUN it counts as running, with WAIT it is queued."""
        if self.concurrency is None or self.running < self.concurrency:
            self.running += 1
            return Verdict.RUN
        if self.queue is None or len(self._waiting) < self.queue:
            self._waiting.append(call)
            return Verdict.WAIT
        return Verdict.REFUSE

    def leave(self) -> T | None:
        """A running call ended; returns the one that runs in its place, if any waits."""
        if self._waiting and (self.concurrency is None or self.running <= self.concurrency):
            return self._waiting.popleft()
        self.running -= 1
        return None

    def withdraw(self, call: T) -> bool:
        """Take a waiting call out of the queue; False when it does not wait."""
        try:
            self._waiting.remove(call)
        except ValueError:
            return False
        return True
