"""Prompts by the work queue: a prefill instance takes a job when it has room, and offers itself to
the decode instance that waits."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import msgspec

from dynbus import DynbusError, Job, NoInstances, StreamLost, Taker, UnknownOutcome, WorkQueue
from dynbus.llm.hand_over.messages import Offer, OfferAnswer, PrefillJob
from dynbus.llm.weights.fingerprint import are_same
from dynbus.spi import Background, Work, task_group

logger = logging.getLogger(__name__)

JOBS_AT_A_TIME: Final = 2
"""Jobs that a prefill instance has at a time: one is computed while another is read."""

LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks at whether prompts go by the queue."""

RETRY_DELAY: Final = 1.0
"""Seconds after which a queue that cannot be taken from is tried again."""

OTHERS_DELAY: Final = 0.2
"""Seconds after which a job for another model may be taken by another instance."""


Offering = Callable[[Offer, str], Awaitable[OfferAnswer]]
"""Offers a decode instance, by its id, to compute the prompt of a job."""


class JobTaker:
    """Takes jobs for a prefill instance, from when prompts go by the queue on.

    Args:
        instance: the id of the prefill instance.
        is_wanted: whether prompts go by the queue.
        model: the fingerprint of the own model; jobs for another one are left to others.
    """

    def __init__(
        self,
        queue: WorkQueue,
        offer: Offering,
        instance: str,
        is_wanted: Callable[[], bool],
        model: str = "",
    ) -> None:
        self._queue = queue
        self._offer_to = offer
        self._instance = instance
        self._is_wanted = is_wanted
        self._model = model
        self._has_told = False
        self._taker: Taker | None = None
        self._retired = anyio.Event()
        self._ended = anyio.Event()

    def __repr__(self) -> str:
        return f"<JobTaker {self._instance}>"

    def start(self, background: Background) -> Work:
        """Begin; ending the work gives back what it has."""
        return background.start(self._run, name=f"{self!r}")

    async def retire(self) -> None:
        """Take no more, and wait until the jobs that it has are over."""
        self._retired.set()
        if self._taker is not None:
            await self._taker.drain()
        await self._ended.wait()

    async def _run(self) -> None:
        try:
            while not self._retired.is_set() and not self._is_wanted():
                with anyio.move_on_after(LOOK_INTERVAL):
                    await self._retired.wait()
            while not self._retired.is_set():
                try:
                    await self._take_jobs()
                except DynbusError as error:
                    logger.warning("no prefill jobs are taken: %s", error)
                    with anyio.move_on_after(RETRY_DELAY):
                        await self._retired.wait()
        finally:
            self._ended.set()

    async def _take_jobs(self) -> None:
        # The jobs end inside of the block that holds them: leaving that one gives them back.
        async with self._queue.take(JOBS_AT_A_TIME) as taker, task_group() as tasks:
            self._taker = taker
            try:
                async for job in taker:
                    tasks.start_soon(self._offer, job)
            finally:
                self._taker = None

    async def _offer(self, job: Job) -> None:
        """Have a job computed; it is done when its prompt is handed over, or nobody waits."""
        try:
            wanted = msgspec.json.decode(job.data, type=PrefillJob)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            await job.bury(f"it is no prefill job: {error}")
            return
        if not are_same(self._model, wanted.model):
            level = logging.DEBUG if self._has_told else logging.WARNING
            self._has_told = True
            logger.log(
                level,
                "%r: prefill jobs for a model of fingerprint %s are left to others: give both the "
                "same files",
                *(self, wanted.model[:8]),
            )
            await job.give_back(delay=OTHERS_DELAY)
            return
        try:
            async with job:
                try:
                    await self._offer_to(Offer(wanted.hand_over, self._instance), wanted.instance)
                except (NoInstances, UnknownOutcome, StreamLost) as error:
                    # Its decode instance is gone, and with it the request.
                    logger.info("the prefill job %s has nobody: %s", wanted.hand_over, error)
        except DynbusError as error:
            logger.warning("the prefill job %s failed: %s", wanted.hand_over, error)
