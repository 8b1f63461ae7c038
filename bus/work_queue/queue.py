"""A queue of jobs that survives the processes which put and take them: a JetStream work queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio

from dynbus.bus.bus import Bus
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.transport import StoredMessage

from .dead_letters import DeadLetters
from .holders import Holders, holders_of
from .job import JobEnd, QueueDepth, WorkQueueConfig
from .job_stream import JobStream
from .lanes import lane_of_key, lane_of_priority
from .observing import QueueFigures
from .taker import CLOSE_SECONDS, Taker

DEPTH_AGE: Final = 0.25
"""Seconds for which what the server said of a queue's depth is taken for true."""


@asynccontextmanager
async def taking(
    bus: Bus, jobs: JobStream, limit: int, figures: QueueFigures
) -> AsyncGenerator[Taker]:
    """Take the jobs of a stream while the block runs; see `WorkQueue.take`."""
    jobs.watch_outages()
    await jobs.ensure()
    letters = DeadLetters(bus.data.jetstream, jobs.name.namespace, jobs.config.replicas)
    cancelled = bus.cancels.hear(jobs.name.namespace)
    taker = Taker(jobs, letters, bus.background, limit, figures, cancelled)
    holders = Holders(bus, jobs, taker.deliveries, taker.doubt)
    taker.on_change = holders.changed

    async def depth() -> QueueDepth:
        return await jobs.depth(DEPTH_AGE)

    try:
        measured = figures.measured(bus.background, depth, jobs.oldest_age)
        async with measured, holders.watching():
            yield taker
    finally:
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            await taker.close()


class WorkQueue:
    """A queue of jobs: each is done by one of its takers, and none is lost.

    A job is handed out at least once, and again until it is acknowledged. After `config.tries` it
    is a dead letter (see `DeadLetters`). The queue is made when it is first used.

    Args:
        name: the endpoint that it is a queue of.

    Attributes:
        ended: how many jobs left the takers of this object, by how they did.

    Raises:
        ConfigError: `config` is not usable.
    """

    def __init__(
        self,
        bus: Bus,
        name: EndpointName,
        config: WorkQueueConfig = WorkQueueConfig(),  # noqa: B008 - a frozen named tuple
    ) -> None:
        self.name = name
        self._figures = QueueFigures(bus.telemetry, name)
        self.ended: Counter[JobEnd] = self._figures.ended
        self._bus = bus
        self._jobs = JobStream(bus.data, name, config)

    def __repr__(self) -> str:
        return f"<WorkQueue {self.name}>"

    async def put(
        self,
        data: bytes,
        *,
        job_id: str,
        deadline: float | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 5.0,
        delay: float = 0.0,
        key: str | None = None,
        priority: int = 0,
        anew: bool = False,
    ) -> None:
        """Put a job; on return the server has stored it. One that is in the queue under this id, or
        was put under it in the last two minutes, is not put again.

        Args:
            headers: for its taker. The trace of the caller goes with them.
            job_id: 1 to 128 printable ASCII characters without spaces.
            deadline: on the library's monotonic clock in seconds; a job that is not begun by then
                is dropped. What is left of it counts from when the server has stored the job, by
                the server's clock and no other.
            timeout: seconds to try for; a try that was not answered is repeated.
            delay: seconds before it may begin, by the server's clock.
            key: of an ordered queue, and of no other: the jobs of one key are done in the order in
                which the server has stored them, one at a time.
            priority: jobs above 0 begin before those of 0, and these before those below it, for
                ever where more of them come. A taker that is busy with jobs below 0 learns within
                a second that one of 0 was put.
            anew: put it although one was put under its id in the last two minutes, and is gone.

        Raises:
            ConfigError: the id or a header is not usable, or an ordered queue is given no key, a
                priority or a delay, or another one a key.
            Overloaded: the queue is full.
            DeadlineExceeded: it has passed already.
            PayloadTooLarge: it does not fit into a message.
            Unavailable: the server did not confirm it in time; it may be there.
        """
        lane = self._lane(key, priority, delay)
        with self._figures.putting(job_id) as trace:
            await self._jobs.put(
                *(data, job_id, deadline, {**trace, **(headers or {})}, timeout, delay, lane),
                anew=anew,
            )
        self._figures.put()

    def _lane(self, key: str | None, priority: int, delay: float) -> str:
        if not self._jobs.config.ordered:
            if key is not None:
                raise ConfigError(
                    f"the queue {self.name} is not ordered, and has no keys: leave key={key!r} "
                    "out, or make it with WorkQueueConfig(ordered=True)"
                )
            return lane_of_priority(priority)
        if key is None:
            raise ConfigError(f"the queue {self.name} is ordered: give the key of the job")
        if priority:
            raise ConfigError(
                f"priority={priority} would have a job of the ordered queue {self.name} go before "
                "others of its key: leave it out"
            )
        if delay:
            raise ConfigError(
                f"delay={delay:g} would have all later jobs of its lane wait in the ordered queue "
                f"{self.name}: leave it out, or put the job when its time has come"
            )
        return lane_of_key(key)

    @asynccontextmanager
    async def take(self, limit: int = 1) -> AsyncGenerator[Taker]:
        """Take jobs, and hold at most `limit` at a time:

            async with queue.take(limit=4) as taker:
                async for job in taker:
                    async with job:
                        ...

        Leaving the block gives back what is not settled.

        Raises:
            ConfigError: there is a stream of the queue's name with other subjects.
            Unavailable: the server does not answer.
        """
        async with taking(self._bus, self._jobs, limit, self._figures) as taker:
            yield taker

    async def ensure(self) -> None:
        """Make the queue where it is missing.

        Raises:
            ConfigError, PermissionDenied, NoRoom, Unavailable: as of `JetStream.ensure_stream`.
        """
        await self._jobs.ensure()

    async def pause(self) -> None:
        """Hand out no more jobs, to takers that begin later neither, until `resume`. Jobs that are
        held go on, and jobs may be put.

        Raises:
            ConfigError, PermissionDenied, NoRoom, Unavailable: as of `ensure`.
        """
        await self._jobs.pause(True)

    async def resume(self) -> None:
        """Hand out jobs again; see `pause`."""
        await self._jobs.pause(False)

    async def now(self) -> float:
        """Unix seconds by the server's clock.

        Raises:
            Unavailable: the server does not answer.
        """
        return await self._jobs.now()

    async def find(self, job_id: str) -> list[StoredMessage]:
        """The messages of a job that are in the queue, waiting or held: the job as it was put, and
        copies that go on in its place.

        Raises:
            Unavailable: the server does not answer.
        """
        return await self._jobs.find(job_id)

    async def wake(self, job: StoredMessage, job_id: str) -> None:
        """Put a copy of a job that is to be handed out again later, so that it is handed out now.

        Args:
            job: the message that is to be handed out again.

        Raises:
            Unavailable: the server did not confirm it in time; it may be there.
        """
        await self._jobs.wake(job, job_id)

    async def hand_out(self, token: str) -> None:
        """Have a job of an ordered queue that is to be handed out again later handed out now.

        Raises:
            Unavailable: the server does not answer; it may have heard it.
        """
        await self._jobs.hand_out(token)

    async def forget(self, job_id: str, *, but: int = 0) -> None:
        """Drop what the queue has of a job that has ended, but for the message of a sequence."""
        await self._jobs.forget(job_id, but)

    async def holding(self, job: StoredMessage) -> int:
        """The number of times that a job was handed out to the taker that holds it; 0 where none is
        known to.

        A taker tells what it holds for longer than a quarter of a second.

        Raises:
            Unavailable: the server does not answer.
        """
        holders = await holders_of(self._bus.data.jetstream, self.name)
        held = (one for holder in holders for one in holder.jobs)
        return next((one.tries for one in held if one.sequence == job.sequence), 0)

    async def depth(self, *, max_age: float = DEPTH_AGE) -> QueueDepth:
        """The number of jobs, as the server said at most `max_age` seconds ago, and what was put
        from here since.

        Raises:
            Unavailable: the server does not say.
        """
        return await self._jobs.depth(max_age)
