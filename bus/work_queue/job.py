"""What a job in a work queue is, and how it can end."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol


class JobEnd(StrEnum):
    """How a job left its queue, or its taker."""

    DONE = "done"
    """Acknowledged, and the server has confirmed it."""
    RETRIED = "retried"
    """Given back after a failure, to be tried again."""
    RETURNED = "returned"
    """Given back by a taker that was leaving; nothing was wrong with it."""
    EXPIRED = "expired"
    """Dropped because its deadline had passed before it was begun."""
    DEAD = "dead"
    """Put among the dead letters: it was tried too often, or its taker refused it for good."""
    MALFORMED = "malformed"
    """Put among the dead letters because it is no job."""


class QueueDepth(NamedTuple):
    """How many jobs a queue holds.

    Attributes:
        waiting: of nobody yet.
        held: with a taker, or given back and waiting to be tried again.
    """

    waiting: int
    held: int

    @property
    def jobs(self) -> int:
        """Both."""
        return self.waiting + self.held


class Job(Protocol):
    """A job that a taker holds. It is kept alive until one of `ack`, `nak` and `bury` is called,
    and goes to another taker when its own is gone or frozen for the queue's `ack_wait`.

    As a context manager it is acknowledged when the block ends, and given back with the error when
    the block raises.

    Attributes:
        job_id: as it was put.
        data: as it was put.
        headers: as they were put.
        tries: how often it was handed out, this time included.
        deadline: on the library's monotonic clock in seconds; None without one.
        queued_at: Unix seconds at which the server stored it.
    """

    job_id: str
    data: bytes
    headers: Mapping[str, str]
    tries: int
    deadline: float | None
    queued_at: float

    async def ack(self) -> None:
        """Say that it is done; on return the server has confirmed that nobody gets it again.

        Raises:
            UnknownOutcome: no confirmation came in time; another taker may get it.
        """
        ...

    async def nak(self, error: BaseException | str = "", *, delay: float | None = None) -> None:
        """Give it back, to be tried again after `delay` seconds (the queue's own pause unless
        told). After the last try it becomes a dead letter with this error."""
        ...

    async def bury(self, error: BaseException | str) -> None:
        """Make it a dead letter now: trying again is of no use."""
        ...

    async def __aenter__(self) -> Job: ...
    async def __aexit__(self, *exception: object) -> None: ...
