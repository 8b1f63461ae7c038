"""A queue of jobs that survives whoever puts and takes them: a JetStream work queue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from dynbus.bus.bus import Bus
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.transport import REPLICAS

from .job import Job, QueueDepth


class WorkQueueConfig(NamedTuple):
    """How a work queue is kept; whoever makes it first decides, except for `tries` and
    `retry_delay`, which are those of each taker.

    Attributes:
        ack_wait: seconds after which a job goes to another taker when its own gives no sign.
        tries: how often a job is handed out before it is a dead letter.
        retry_delay: seconds before a job that failed is tried again; doubled for each failure.
        max_jobs: a put beyond that raises `Overloaded`.
        max_bytes: of all jobs, likewise.
        max_age: seconds after which a job that nobody takes is dropped.
        in_memory: lost when the server restarts.
        replicas: how many servers of a cluster keep it at most.
    """

    ack_wait: float = 30.0
    tries: int = 5
    retry_delay: float = 0.5
    max_jobs: int = 10_000
    max_bytes: int = 256 * 1024 * 1024
    max_age: float = 24 * 3600.0
    in_memory: bool = False
    replicas: int = REPLICAS


class Taker:
    """Takes jobs of a queue, at most `limit` at a time: iterate over it."""

    def __aiter__(self) -> AsyncIterator[Job]:
        raise NotImplementedError

    async def drain(self) -> None:
        """Take no more and give back what is not begun; iterations end. Jobs that are held stay so
        until they are settled, or the taker's block is left."""
        raise NotImplementedError


class WorkQueue:
    """A queue of jobs: each is done by one of its takers, and none is lost.

    A job is handed out at least once, and again until it is acknowledged. After `config.tries` it
    is a dead letter (see `DeadLetters`).

    Args:
        name: the endpoint that it is a queue of.
    """

    def __init__(
        self,
        bus: Bus,
        name: EndpointName,
        config: WorkQueueConfig = WorkQueueConfig(),  # noqa: B008 - a frozen named tuple
    ) -> None:
        self.name = name
        self.config = config
        self._bus = bus

    async def put(
        self,
        data: bytes,
        *,
        job_id: str,
        deadline: float | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 5.0,
    ) -> None:
        """Put a job; on return the server has stored it. One that was put under this id in the
        last two minutes is not put again.

        Args:
            deadline: on the library's monotonic clock in seconds; a job that is not begun by then
                is dropped.
            timeout: seconds to try for; a try that was not answered is repeated.

        Raises:
            Overloaded: the queue is full.
            DeadlineExceeded: it has passed already.
            PayloadTooLarge: it does not fit into a message.
            Unavailable: the server did not confirm it in time; it may be there.
        """
        raise NotImplementedError

    def take(self, limit: int = 1) -> AbstractAsyncContextManager[Taker]:
        """Take jobs, at most `limit` at a time:

            async with queue.take(limit=4) as taker:
                async for job in taker:
                    async with job:
                        ...

        Leaving the block gives back what is not settled.
        """
        raise NotImplementedError

    async def depth(self, *, max_age: float = 0.25) -> QueueDepth:
        """How many jobs there are, as the server said at most `max_age` seconds ago, and what was
        put from here since.

        Raises:
            Unavailable: the server does not say.
        """
        raise NotImplementedError
