"""The jobs of a durable handler at one instance: taken from their queue, run, and ended once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Final

import anyio

from dynbus.actors.calling.jobs import JobQueue, error_line
from dynbus.actors.declaring.durable import DurableOptions, order_key_of
from dynbus.bus.background import Background
from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context, context
from dynbus.bus.errors import (
    Cancelled,
    DeadlineExceeded,
    DynbusError,
    HandlerError,
    InvalidRequest,
    Migrate,
    PayloadTooLarge,
    describe_exception,
    only_cause,
)
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.cancellation import EndedCall
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import (
    InstanceName,
    is_copy_subject,
    job_cancel_subject,
    job_token,
)
from dynbus.bus.transport import Message, Subscription
from dynbus.bus.work_queue import (
    Job,
    JobEnd,
    JobResult,
    Outcome,
    RunPhase,
    RunState,
    Taker,
    TryFailure,
    goes_on,
)

from .handler_runner import MIGRATE_DELAY, NOT_TRIED_AGAIN, TakingRunner
from .step_history import Begin, how_to_begin
from .steps import JobRun, enter_run

logger = logging.getLogger(__name__)

ASKS_AFTER: Final = 30.0
"""Seconds in its queue after which a job is looked up before it begins: who cancelled it may have
done so before this instance could hear it."""
CANCELS_KEPT: Final = 60.0
LEAVE_SECONDS: Final = 1.0
"""Seconds for which an instance that leaves tries to note that a job of its goes on elsewhere."""
WAY_BACK: Final = 0.5
"""Seconds before the deadline of a call that waits for its job, and at most a tenth of what is left
to it, at which it is answered with the name of its job: the caller stops listening at the deadline.
"""


class JobRunner(TakingRunner):
    """Runs the jobs of one durable handler of an instance.

    Args:
        endpoint: of the handler: how its request is read, run and answered.
        options: of the handler.
    """

    _keeps_returns = True

    def __init__(
        self, bus: Bus, instance: InstanceName, endpoint: Endpoint, options: DurableOptions
    ) -> None:
        super().__init__(bus, instance, endpoint)
        self._options = options
        self._jobs = JobQueue(bus, self._name, options)
        self._log = self._jobs.log
        self._running: dict[str, tuple[anyio.CancelScope, Context]] = {}
        self._cancelled: dict[str, float] = {}
        self._asked: list[tuple[str, asyncio.Future[bool]]] = []
        self._subscription: Subscription | None = None

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint for calls of the handler by plain clients: each is a job that is waited
        for.
        """
        decode = self._endpoint.decode

        def checked(data: bytes) -> bytes:
            decode(data)
            return data

        return replace(
            self._endpoint,
            invoke=self._submit_and_wait,
            decode=checked,
            encode=bytes,
            concurrency=None,
        )

    async def _submit_and_wait(self, data: bytes) -> bytes:
        called = context()
        path = self._options.ordered_by
        job_id = await self._jobs.submit(
            data,
            order_key=path and order_key_of(path, self._endpoint.decode(data)),
            options={"idempotency_key": called.idempotency_key or None},
            parent=called,
            deadline=called.time_left(),
        )
        _, name = job_id.split_name()
        left = called.time_left()
        wait = None if left is None else left - min(WAY_BACK, left / 10)
        return await self._jobs.result(name, wait)

    async def start(self, background: Background) -> None:
        await self._once_answered(self._log.ensure)
        await self._once_answered(self._jobs.queue.ensure)
        subject = job_cancel_subject(self._name)
        self._subscription = self._bus.data.subscribe(subject, self._hear_cancel)
        self._bus.cancels.add(self._cancel_requests)
        self._start_work(background, "jobs")

    async def stop(self) -> None:
        if self._subscription is not None:
            self._subscription.unsubscribe()
        self._bus.cancels.remove(self._cancel_requests)
        await super().stop()

    def _taking(self) -> AbstractAsyncContextManager[Taker]:
        return self._jobs.queue.take(limit=self._endpoint.concurrency or 1)

    # Cancels ---------------------------------------------------------------------------

    def _hear_cancel(self, message: Message) -> None:
        token = message.data.decode("utf-8", "replace")[:128]
        now = monotonic()
        for old in [one for one, at in self._cancelled.items() if now - at > CANCELS_KEPT]:
            del self._cancelled[old]
        self._cancelled[token] = now
        self._drop(token)

    def _drop(self, token: str) -> None:
        running = self._running.get(token)
        if running is not None:
            scope, called = running
            called.kill()
            scope.cancel()

    async def _has_begun(self, job_id: str) -> bool:
        return await self._log.has_begun(job_id)

    async def _has_ended(self, job_id: str) -> bool:
        return await self._log.result(job_id) is not None

    def _note_dropped(self, job_id: str, end: JobEnd) -> None:
        """A job left the queue without having begun."""
        if end is JobEnd.EXPIRED:
            error: DynbusError = DeadlineExceeded("the job was not begun by its deadline")
            result = JobResult.failed(error)
        elif end is JobEnd.CANCELLED:
            error = Cancelled("an operator cancelled the job before it began")
            result = JobResult.failed(error, Outcome.CANCELLED)
        else:
            return
        self._start(self._store_end(job_id, result))

    def _cancel_requests(self, namespace: str, ids: AbstractSet[str]) -> list[EndedCall]:
        """End the jobs that run here of requests which an operator has cancelled."""
        if namespace != self._name.namespace:
            return []
        running = [
            (token, called)
            for token, (_, called) in self._running.items()
            if called.id in ids or called.idempotency_key in ids
        ]
        for token, _ in running:
            self._drop(token)
        return [EndedCall(called.id, str(self._instance)) for _, called in running]

    # One job ---------------------------------------------------------------------------

    async def _carry_out(self, job: Job) -> None:
        token = job_token(job.job_id)
        may_be_known = self._may_be_known(job, token)
        is_known = may_be_known and await self._is_known(job.job_id)
        if is_known and await self._has_ended(job.job_id):
            await self._leave_ended(job)
            return
        run = await self._begin(job, is_known=is_known)
        if run is None:
            return
        # An instance that was frozen or cut off meanwhile has answers of before.
        if may_be_known and job.is_doubtful and await self._has_ended(job.job_id):
            await self._leave_ended(job)
            return
        try:
            request = self._endpoint.decode(job.data)
            called = self._context(dict(job.headers), job.job_id, run.tries)
        except InvalidRequest as error:
            await self._fail(job, run, error, is_last=True)
            return
        enter_run(run)
        failure: BaseException | None = None
        data = b""
        try:
            with run.scope:
                self._running[token] = (run.scope, called)
                try:
                    data = self._endpoint.encode(await self._invoke(request, called))
                except Exception as error:  # noqa: BLE001 - what users' handlers raise
                    failure = error
                finally:
                    # A queue that was purged may have handed another job of its key out here.
                    if self._running.get(token) == (run.scope, called):
                        del self._running[token]
        except asyncio.CancelledError:
            # The instance leaves, and gives the job back: no try of it has failed.
            with anyio.move_on_after(LEAVE_SECONDS, shield=True):
                await run.leave_to_next(0.0)
            raise
        if run.has_ended:
            await self._leave_ended(job)
        elif run.is_lost:
            # Who has it keeps it alive; if nobody has, it comes back.
            await job.give_back(delay=self._options.ack_wait)
        elif run.delay is not None:
            await job.give_back(delay=run.delay, waits=True)
            if self._options.ordered_by is not None:
                await run.wait_in_order()
        elif run.scope.cancelled_caught:
            cancelled = Cancelled("the job was cancelled while it ran")
            await self._end(job, run, JobResult.failed(cancelled, Outcome.CANCELLED))
            await job.ack()
        elif failure is not None:
            await self._failed(job, run, failure)
        else:
            await self._end(job, run, JobResult(Outcome.DONE, data))
            await job.ack()

    async def _is_known(self, job_id: str) -> bool:
        """True if the log has a record of a job.

        A server alone is asked in one question about all jobs that begin in a turn of the loop: to
        ask for each costs as much as half of the rest of a short job. Of several the leader is
        asked, for each, since others may not have the last record yet.
        """
        if self._bus.data.has_peers:
            return await self._log.knows(job_id)
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._ask_together)
        is_known: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked.append((job_id, is_known))
        return await is_known

    def _ask_together(self) -> None:
        asked, self._asked = self._asked, []
        self._start(self._answer(asked))

    async def _answer(self, asked: list[tuple[str, asyncio.Future[bool]]]) -> None:
        try:
            known = await self._log.known({job_id for job_id, _ in asked})
        except DynbusError as error:
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(error)
            return
        for job_id, answer in asked:
            if not answer.done():
                answer.set_result(job_id in known)

    async def _leave_ended(self, job: Job) -> None:
        """Drop a message of a job that has ended elsewhere, and what its tries may have left."""
        await job.ack()
        await self._forget_ended(job.job_id)

    async def _forget_ended(self, job_id: str) -> None:
        """Drop what a job that has ended elsewhere had for its tries, unless it has failed: who
        redrives it has it go on with that."""
        result = await self._log.result(job_id)
        if result is not None and result.outcome is not Outcome.FAILED:
            await self._forget(job_id)

    async def _forget(self, job_id: str) -> None:
        await self._log.forget_steps(job_id)
        await self._jobs.queue.forget(job_id)

    async def _begin(self, job: Job, *, is_known: bool) -> JobRun | None:
        """Make this message of a job the one that runs it; None where another one does.

        Args:
            is_known: whether the log has a record of the job.
        """
        is_copy = is_copy_subject(job.delivery.message.subject)
        if not is_copy and not (job.may_have_begun and is_known):
            await self._note_lost(job)
            # A key may have been another job's, whose claim is there still.
            is_first = not job.may_have_begun and not is_known
            return JobRun(self._bus, self._jobs, job, None, 0, job.tries, is_first=is_first)
        own = job.delivery.message.sequence
        while True:
            state, last = await self._log.run_state(job.job_id)
            queued = [one.sequence for one in await self._jobs.queue.find(job.job_id)]
            how = how_to_begin(state, own, queued)
            if how is Begin.DROP:
                await job.ack()
                return None
            if state is None:
                await self._note_lost(job)
                failed = 0
                if is_copy or goes_on(job.delivery.message):
                    failed = len(await self._log.failures(job.job_id))
                tries = max(job.tries, failed + 1)
                return self._again(job, None, 0, tries)
            if how is Begin.CLAIM:
                state = RunState(RunPhase.RUNNING, own, state.waits)
                stored = await self._log.store_run_state(job.job_id, state, last)
                if stored is None:
                    continue
                last = stored
            else:
                # It was running by this very message, and its instance did not say how that ended.
                failed = len(await self._log.failures(job.job_id))
                await self._log.note_failure(job.job_id, _lost(failed + 1))
            # Deliveries may count its waits, too.
            tries = len(await self._log.failures(job.job_id)) + 1
            run = self._again(job, state, last, tries)
            if tries > self._options.tries:
                error = HandlerError(f"its instance was lost in try {tries - 1}")
                await self._fail(job, run, error, is_last=True)
                return None
            return run

    async def _note_lost(self, job: Job) -> None:
        """Keep of the tries before this one that they were lost, where none says how it failed."""
        if job.tries == 1:
            return
        noted = {one.tries for one in await self._log.failures(job.job_id)}
        for tries in range(1, min(job.tries, self._options.tries + 1)):
            if tries not in noted:
                await self._log.note_failure(job.job_id, _lost(tries))

    def _again(self, job: Job, state: RunState | None, last: int, tries: int) -> JobRun:
        return JobRun(
            *(self._bus, self._jobs, job, state, last, tries), is_first=False, has_records=True
        )

    def _may_be_known(self, job: Job, token: str) -> bool:
        """True if the log may have a record of the job: it may have begun before, or ended by a
        cancel.
        """
        if job.may_have_begun or token in self._cancelled:
            return True
        # A plain client names a job by its subject alone, and may do so again.
        is_plain = headers.JOB not in job.delivery.message.headers
        return is_plain or headers.KEYED in job.headers or job.waited >= ASKS_AFTER

    async def _failed(self, job: Job, run: JobRun, raised: BaseException) -> None:
        error = only_cause(raised)
        if isinstance(error, Migrate):
            await run.leave_to_next(MIGRATE_DELAY)
            await job.give_back(delay=MIGRATE_DELAY)
            return
        if not isinstance(error, DynbusError):
            logger.exception(
                "%s raised in try %d of job %s", self._name, run.tries, job.job_id, exc_info=raised
            )
            unknown = HandlerError(describe_exception(error))
            unknown.error_type, error = type(error).__name__, unknown
        is_last = isinstance(error, NOT_TRIED_AGAIN) or run.tries >= self._options.tries
        await self._fail(job, run, error, is_last=is_last)

    async def _fail(self, job: Job, run: JobRun, error: DynbusError, *, is_last: bool) -> None:
        if not is_last:
            failure = TryFailure(run.tries, error_line(error), self._hop)
            await self._log.note_failure(job.job_id, failure)
            pause = self._options.queue.delay_after(run.tries)
            await run.leave_to_next(pause)
            if job.tries < self._options.tries:
                await job.nak(error, delay=pause)
            else:
                # The job has waited: not all of its deliveries were tries.
                await job.give_back(delay=pause)
            return
        if run.has_waited:
            # Before its letter is there: who redrives that puts a message of the job.
            await self._jobs.queue.forget(job.job_id, but=job.delivery.message.sequence)
        if job.tries >= self._options.tries:
            await job.nak(error)
        else:
            await job.bury(error)
        if job.end is JobEnd.DEAD:
            result = JobResult.failed(error)._replace(tries=run.tries)
            await self._store_end(job.job_id, result)

    async def _end(self, job: Job, run: JobRun, result: JobResult) -> None:
        """Store how a job ended that is not tried again, and drop what it had for its tries."""
        # What follows are answers of the server: the next job can begin meanwhile.
        job.leave_place()
        is_first = await self._store_end(job.job_id, result._replace(tries=run.tries))
        if not is_first:
            await self._forget_ended(job.job_id)
        elif run.has_steps:
            await self._forget(job.job_id)

    async def _store_end(self, job_id: str, result: JobResult) -> bool:
        """Store how a job ended; False where it had ended before, which stays so."""
        try:
            is_first = await self._log.end(job_id, result, self._options.result_age)
        except PayloadTooLarge:
            error = PayloadTooLarge(
                f"the result has {len(result.data)} bytes, which no message of the server has room "
                f"for ({self._bus.data.max_payload}): put it elsewhere, and return its name"
            )
            is_first = await self._log.end(
                job_id,
                JobResult.failed(error)._replace(tries=result.tries),
                self._options.result_age,
            )
        if not is_first:
            logger.info("job %s of %s had ended before: its result stays", job_id, self._name)
        return is_first


def _lost(tries: int) -> TryFailure:
    return TryFailure(tries, "its instance was lost", "")
