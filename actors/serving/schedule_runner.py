"""The firings of a scheduled handler: submitted as jobs by whichever instance is first."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Final

import anyio

from dynbus.actors.calling.jobs import JobQueue
from dynbus.actors.declaring.handlers import HandlerSpec
from dynbus.actors.declaring.schedule import Schedule, due_times, firing_name
from dynbus.bus.background import Background, Work
from dynbus.bus.bus import Bus
from dynbus.bus.errors import DynbusError, Overloaded
from dynbus.bus.protocol.names import EndpointName

logger = logging.getLogger(__name__)

LONGEST_SLEEP: Final = 30.0
"""Seconds after which the server is asked again what time it is: its clock may have been set."""
RETRY_PAUSE: Final = 1.0
STORED_EVERY: Final = 64
"""Firings that are made up, after which it is stored how far that is."""


class ScheduleRunner:
    """Submits the firings of one scheduled handler.

    Every instance does so at the time that is due, each under the same key: the queue keeps one of
    them. What was last submitted is in the log of the queue, so that an instance that comes later
    knows which firings were missed.
    """

    def __init__(
        self, bus: Bus, endpoint: EndpointName, spec: HandlerSpec, schedule: Schedule
    ) -> None:
        assert spec.durable is not None, "schedules are of durable handlers"
        self._jobs = JobQueue(bus, endpoint, spec.durable)
        self._spec = spec
        self._schedule = schedule
        self._work: Work | None = None
        self._again = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ScheduleRunner {self._jobs.endpoint} {self._schedule}>"

    async def start(self, background: Background) -> None:
        """Begin to submit what becomes due."""
        self._work = background.start(self._run, name=f"schedule of {self._jobs.endpoint}")

    def after(self, unix: float) -> float:
        """The first time after one at which the handler is due; infinity where there is none."""
        return self._schedule.after(unix)

    def look_again(self) -> None:
        """Ask at once what time it is: the server's clock was set."""
        self._again.set()

    async def drain(self, grace: float) -> None:
        """Submit nothing more: other instances do, or the next one."""
        await self.stop()

    async def stop(self) -> None:
        """See `drain`."""
        if self._work is not None:
            await self._work.end()

    async def _run(self) -> None:
        while True:
            try:
                pause = await self._submit_due()
            except Overloaded as error:
                logger.warning("a firing of %s waits: %s", self._jobs.endpoint, error)
                pause = max(RETRY_PAUSE, error.retry_after)
            except DynbusError as error:
                logger.warning("the schedule of %s waits: %s", self._jobs.endpoint, error)
                pause = RETRY_PAUSE
            with anyio.move_on_after(pause):
                await self._again.wait()
            self._again.clear()

    async def _submit_due(self) -> float:
        """Submit what is due; the seconds until something may be due again."""
        now = await self._jobs.queue.now()
        last, sequence = await self._jobs.log.last_firing()
        if not sequence:
            # Nothing was missed before there was a schedule.
            last = now
            sequence = await self._jobs.log.store_firing(last, 0)
        submitted = last
        for count, due in enumerate(due_times(self._schedule, last, now), 1):
            await self._submit(due)
            submitted = due
            if count % STORED_EVERY == 0 and sequence:
                sequence = await self._jobs.log.store_firing(submitted, sequence)
        if submitted > last and sequence:
            # Where another instance was first, it has stored the same.
            await self._jobs.log.store_firing(submitted, sequence)
        left = self._schedule.after(max(now, submitted)) - now
        return min(max(left, 0.0), LONGEST_SLEEP)

    async def _submit(self, due: float) -> None:
        codec = self._spec.request_codec
        data = b"" if codec is None else codec.encode(datetime.fromtimestamp(due, UTC))
        await self._jobs.submit(data, options={}, parent=None, idempotency_key=firing_name(due))
