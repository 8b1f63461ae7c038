"""Taking jobs of a queue, and holding them until they are settled."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Final, Self

import anyio

from dynbus.bus.background import Background, Work
from dynbus.bus.clock import monotonic
from dynbus.bus.context import MAX_ID_LENGTH, Context, entered
from dynbus.bus.errors import ConfigError, DynbusError, HandlerError, UnknownOutcome
from dynbus.bus.protocol import headers as header_names
from dynbus.bus.protocol.cancellation import Tombstones
from dynbus.bus.telemetry.telemetry import CallObservation
from dynbus.bus.telemetry.trace_context import trace_fields
from dynbus.bus.transport import ConnectionState, Delivery

from .dead_letters import DeadLetters
from .job import DeathReason, Disposition, Facts, JobEnd, counted, error_text, judge, put_at
from .job_stream import CONSUMER, JobStream
from .observing import QueueFigures

logger = logging.getLogger(__name__)

MAX_LIMIT: Final = 4096
KEEP_FRACTION: Final = 4
"""How often a job is kept alive within its `ack_wait`."""
SETTLE_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 5.0
REMEMBERED: Final = 4096
"""Settled jobs that are known again when a server that was killed hands them out once more."""

JobKey = tuple[int, float]
"""The sequence of a job and the time at which it was stored: another stream has others."""


def _key(delivery: Delivery) -> JobKey:
    return delivery.message.sequence, delivery.message.time


class Job:
    """A job that a taker holds. It is kept alive until one of `ack`, `nak` and `bury` is called,
    and goes to another taker when its own is gone or frozen for the queue's `ack_wait`.

    As a context manager it is acknowledged when the block ends. When the block raises, it is given
    back with the error, which goes on; when it is cancelled, it is given back at once.

    Attributes:
        job_id: as it was put.
        data: as it was put.
        headers: as they were put.
        tries: how often it was handed out, this time included.
        deadline: on the library's monotonic clock in seconds; None without one.
        queued_at: Unix seconds by the server's clock, at which it was put.
        waited: seconds since then, by the server's clock and ours.
        end: what became of it; None until it is settled.
    """

    def __init__(
        self,
        taker: Taker,
        delivery: Delivery,
        facts: Facts,
        created: float,
        waited: float,
        observation: CallObservation | None = None,
    ) -> None:
        self.job_id = facts.job_id
        self.data = delivery.message.data
        self.headers: Mapping[str, str] = facts.headers
        self.tries = delivery.tries
        self.deadline = facts.deadline
        self.waited = waited
        self.end: JobEnd | None = None
        self.queued_at = put_at(delivery.message)
        self.delivery = delivery
        self.created = created
        self.heard = monotonic()
        self._taker = taker
        self._is_settled = False
        self._is_doubted = False
        self._observation = observation
        self._leave: Callable[[], None] | None = None

    def __repr__(self) -> str:
        state = "settled" if self._is_settled else "held"
        return f"<Job {self.job_id} [{state} | tries: {self.tries}]>"

    @property
    def is_settled(self) -> bool:
        """Whether `ack`, `nak` or `bury` was called."""
        return self._is_settled

    @property
    def is_doubtful(self) -> bool:
        """Whether another taker may have the job: the server was not heard for so long, or another
        taker took this one for dead."""
        return self._is_doubted or monotonic() - self.heard > self._taker.ack_wait

    def doubt(self) -> None:
        """Another taker has given it back in the place of this one."""
        self._is_doubted = True

    async def ack(self) -> None:
        """Say that it is done; on return the server has confirmed that nobody gets it again.

        Raises:
            UnknownOutcome: no confirmation came in 30 seconds, or before the bus was closed;
                another taker may get it.
        """
        await self._settle(self._taker.finish)

    async def nak(self, error: BaseException | str = "", *, delay: float | None = None) -> None:
        """Give it back, to be tried again after `delay` seconds (the queue's own pause unless
        told). After the last try it becomes a dead letter with this error."""

        async def settle(job: Job) -> None:
            await self._taker.retry(job, error, delay)

        await self._settle(settle)

    async def give_back(self, *, delay: float = 0.0) -> None:
        """Give it back, to be handed out again after `delay` seconds: nothing was wrong with it, it
        is not for this taker.

        That uses up a delivery and is no failure. A job whose deliveries are used up is put in
        again as a copy; only where a full queue has no room for that it becomes a dead letter.
        """

        async def settle(job: Job) -> None:
            await self._taker.give_back(job, delay)

        await self._settle(settle)

    async def bury(self, error: BaseException | str) -> None:
        """Make it a dead letter now: trying again is of no use."""

        async def settle(job: Job) -> None:
            await self._taker.bury(job, error)

        await self._settle(settle)

    async def _settle(self, how: Callable[[Job], Awaitable[None]]) -> None:
        if self._is_settled:
            raise RuntimeError(f"job {self.job_id} was settled before")
        self._is_settled = True
        await self._taker.settle(self, how)

    def left(self, end: JobEnd, error: BaseException | str | None = None) -> None:
        """It is settled: its attempt is over."""
        self.end = end
        if self._observation is not None:
            self._observation.note("dynbus.result", str(end))
            failure = HandlerError(error_text(error)) if isinstance(error, str) else error
            self._observation.end(failure)

    async def __aenter__(self) -> Self:
        self._leave = self._enter_trace()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._leave is not None:
            self._leave()
        if self._is_settled:
            return
        if error is None:
            await self.ack()
        elif isinstance(error, Exception):
            await self.nak(error)
        else:
            await self.give_back()

    def _enter_trace(self) -> Callable[[], None]:
        """Have what the block does belong to the trace of the job; what is returned ends that."""
        observation = self._observation
        token = None if observation is None else observation.activate()
        fields = trace_fields(self.headers) if observation is None else observation.trace_headers
        left = None
        if Context.current() is None:
            request_id = self.headers.get(header_names.REQUEST_ID) or self.job_id
            left = entered(Context(request_id[:MAX_ID_LENGTH], trace_headers=fields))

        def leave() -> None:
            if left is not None:
                left()
            if observation is not None:
                observation.deactivate(token)

        return leave


class Taker:
    """Takes jobs of a queue: iterate over it. `WorkQueue.take` makes one.

    At most `limit` jobs are held at a time; no other is asked for before one of them is settled,
    so a job never waits behind others at a taker while another taker is idle.

    Attributes:
        ended: how many jobs left it, by how they did; shared by the takers of a queue.
        on_change: called when what it holds changes.
        on_dropped: called with the id of a job that left the queue without having begun, and how.
    """

    def __init__(
        self,
        jobs: JobStream,
        letters: DeadLetters,
        background: Background,
        limit: int,
        figures: QueueFigures,
        cancelled: Tombstones,
    ) -> None:
        if not 1 <= limit <= MAX_LIMIT:
            raise ConfigError(f"limit = {limit} is not usable: give 1 to {MAX_LIMIT} jobs")
        self.ended: Counter[JobEnd] = figures.ended
        self.on_change: Callable[[], None] = lambda: None
        self.on_dropped: Callable[[str, JobEnd], None] = lambda _id, _end: None
        self._figures = figures
        self._cancelled = cancelled
        self._jobs = jobs
        self._letters = letters
        self._background = background
        self._limit = limit
        self._held: dict[JobKey, Job] = {}
        self._ready: deque[Delivery] = deque()
        self._waiting = 0
        self._settling = 0
        self._settled: OrderedDict[JobKey, None] = OrderedDict()
        self._drained = False
        self._changed = asyncio.Event()
        self._keep_now = asyncio.Event()
        self._is_missing = asyncio.Event()
        self._stop_listening = jobs.connection.on_state(self._on_state)
        self._reader = jobs.jetstream.pull(
            jobs.stream, CONSUMER, self._receive, on_missing=self._is_missing.set
        )
        self._works: list[Work] = [
            background.start(self._keep, name=f"keep jobs of {jobs.name}"),
            background.start(self._make, name=f"make the queue {jobs.name}"),
        ]

    def __repr__(self) -> str:
        state = "drained" if self._drained else "taking"
        return f"<Taker {self._jobs.name} [{state} | held: {len(self._held)} of {self._limit}]>"

    @property
    def ack_wait(self) -> float:
        """Seconds after which a job of which nothing is heard goes to another taker."""
        return self._jobs.ack_wait

    @property
    def held(self) -> int:
        """Jobs that are handed out and not settled."""
        return len(self._held)

    def deliveries(self) -> Iterator[Delivery]:
        """The deliveries that the server has handed out here and is to hear of, oldest first."""
        yield from [job.delivery for job in self._held.values()]
        yield from list(self._ready)

    def doubt(self) -> None:
        """Another taker took this one for dead, and gave back what it held."""
        for job in self._held.values():
            job.doubt()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Job:
        self._waiting += 1
        try:
            while True:
                job = await self._begin_one()
                if job is not None:
                    return job
                if self._drained:
                    raise StopAsyncIteration
                self._ask()
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._waiting -= 1

    async def drain(self) -> None:
        """Take no more and give back what is not begun; iterations end. Jobs that are held stay so
        until they are settled, or the block of `take` is left."""
        if self._drained:
            return
        self._drained = True
        self._changed.set()
        await self._reader.stop()
        while self._ready:
            delivery = self._ready.popleft()
            await self._return(delivery, self._judge(delivery).facts.job_id)

    async def close(self) -> None:
        """Drain, and give back what is held too."""
        try:
            await self.drain()
            async with anyio.create_task_group() as tasks:
                for job in list(self._held.values()):
                    if not job.is_settled:
                        tasks.start_soon(self._let_go, job)
            while self._settling:
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._stop_listening()
            for work in self._works:
                work.cancel()

    async def _let_go(self, job: Job) -> None:
        try:
            await job.give_back()
        except (DynbusError, RuntimeError) as error:
            # The bus is closed already, and with it what kept the job alive.
            logger.debug("%r was not given back: %s", job, error)

    # Jobs that come --------------------------------------------------------------------

    def _ask(self) -> None:
        room = self._limit - len(self._held)
        count = min(self._waiting, room) - len(self._ready) - self._reader.wanted
        if count > 0:
            self._reader.ask(count)

    def _receive(self, delivery: Delivery) -> None:
        key = _key(delivery)
        delivery, delay = counted(delivery, monotonic() - self._jobs.queued(delivery))
        if (job := self._held.get(key)) is not None:
            # A server that was killed had not kept to itself that we have it, or was not heard for
            # so long that it gave it to us once more.
            job.delivery = delivery
            self._ask()
        elif key in self._settled:
            self._background.start(self._drop_again, delivery, name="settle a job again")
            self._ask()
        elif delay:
            self._background.start(
                self._jobs.give_back, delivery, delay, name="have a job wait that was given back"
            )
            self._ask()
        else:
            self._ready.append(delivery)
            self._changed.set()
            self.on_change()

    async def _begin_one(self) -> Job | None:
        """The next job that may begin; None where there is none."""
        if self._ready:
            await self._read_clock()
        while self._ready and not self._drained and len(self._held) < self._limit:
            delivery = self._ready.popleft()
            disposition = self._judge(delivery)
            if disposition.end is None:
                facts = disposition.facts
                attempt = self._figures.attempt(facts.headers, facts.job_id, delivery.tries)
                waited = monotonic() - self._jobs.queued(delivery)
                job = Job(self, delivery, facts, self._jobs.created, waited, attempt)
                self._held[_key(delivery)] = job
                self._figures.taken(waited if delivery.tries == 1 else None)
                return job
            await self._refuse(delivery, disposition)
        return None

    async def _read_clock(self) -> None:
        try:
            await self._jobs.read_clock()
        except DynbusError as error:
            # What it said before is carried on by our own clock.
            logger.debug("%r: the server's time was not read again: %s", self, error)

    def _judge(self, delivery: Delivery) -> Disposition:
        queued = self._jobs.queued(delivery)
        return judge(delivery, queued, monotonic(), self._jobs.config, self._cancelled)

    async def _refuse(self, delivery: Delivery, disposition: Disposition) -> None:
        """Have a job leave the queue that is not to be begun."""
        job_id = disposition.facts.job_id
        if disposition.end is JobEnd.EXPIRED:
            logger.info("job %s of %s is dropped: its deadline passed", job_id, self._jobs.name)
        elif disposition.end is JobEnd.CANCELLED:
            logger.info("job %s of %s is dropped: it was cancelled", job_id, self._jobs.name)
        elif not await self._write_letter(
            delivery, job_id, disposition.reason or DeathReason.TRIES, disposition.error
        ):
            return
        if await self._drop(delivery, self._jobs.created):
            end = disposition.end or JobEnd.DEAD
            self._figures.left(end)
            self.on_dropped(job_id, end)

    async def _write_letter(
        self, delivery: Delivery, job_id: str, reason: DeathReason, error: BaseException | str
    ) -> bool:
        """Keep a job as a dead letter; where that fails it is given back."""
        try:
            await self._letters.put(
                self._jobs.name, job_id, delivery.message, reason, error, delivery.tries
            )
        except DynbusError as problem:
            logger.warning("job %s of %s cannot die yet: %s", job_id, self._jobs.name, problem)
            await self._hand_back(delivery, self._jobs.config.delay_after(delivery.tries))
            return False
        logger.warning("job %s of %s is a dead letter: %s", job_id, self._jobs.name, error)
        return True

    async def _drop_again(self, delivery: Delivery) -> None:
        await self._drop(delivery, self._jobs.created)

    async def _drop(self, delivery: Delivery, created: float) -> bool:
        return await self._jobs.drop(delivery, created, monotonic() + SETTLE_SECONDS)

    # Jobs that are held ----------------------------------------------------------------

    async def settle(self, job: Job, how: Callable[[Job], Awaitable[None]]) -> None:
        """Carry `how` out in the background, so that nobody who is cancelled stops it halfway, and
        wait for it."""
        outcomes: list[DynbusError | None] = []

        async def run() -> None:
            try:
                await how(job)
            except DynbusError as error:
                outcomes.append(error)
                job.left(JobEnd.RETURNED, error)
            else:
                outcomes.append(None)
            finally:
                self._settling -= 1
                if self._held.get(_key(job.delivery)) is job:
                    del self._held[_key(job.delivery)]
                self._changed.set()
                self.on_change()

        work = self._background.start(run, name=f"settle job {job.job_id}")
        self._settling += 1
        await work.wait()
        if not outcomes:
            raise UnknownOutcome(
                f"the bus was closed before the queue {self._jobs.name} had confirmed what became "
                f"of job {job.job_id}: another taker may get it"
            )
        if outcomes[0] is not None:
            raise outcomes[0]

    async def finish(self, job: Job) -> None:
        """See `Job.ack`."""
        if not await self._drop(job.delivery, job.created):
            raise UnknownOutcome(
                f"job {job.job_id} is done, and the queue {self._jobs.name} did not confirm that "
                f"within {SETTLE_SECONDS:g} s: another taker may get it"
            )
        self._remember(job)
        self._left(job, JobEnd.DONE)

    async def retry(self, job: Job, error: BaseException | str, delay: float | None) -> None:
        """See `Job.nak`."""
        config = self._jobs.config
        if job.tries >= config.tries:
            await self._die(job, DeathReason.TRIES, error)
            return
        pause = config.delay_after(job.tries) if delay is None else delay
        await self._hand_back(job.delivery, pause)
        self._left(job, JobEnd.RETRIED, error)

    async def give_back(self, job: Job, delay: float) -> None:
        """See `Job.give_back`."""
        await self._return(job.delivery, job.job_id, delay)
        job.left(JobEnd.RETURNED)

    async def _return(self, delivery: Delivery, job_id: str, delay: float = 0.0) -> None:
        # The server counts its deliveries, and not what became of them.
        is_last = delivery.tries >= self._jobs.config.tries
        await self._want_no_more_than_is_waited_for()
        if not (is_last and await self._jobs.put_again(delivery, job_id, delay)):
            await self._hand_back(delivery, delay)
        else:
            await self._drop(delivery, self._jobs.created)
        self._figures.left(JobEnd.RETURNED)

    async def _hand_back(self, delivery: Delivery, delay: float) -> None:
        """Have a job handed out again. It is not held any more from here on: it may come to this
        very taker before the server has confirmed that it has it back."""
        await self._want_no_more_than_is_waited_for()
        self._held.pop(_key(delivery), None)
        await self._jobs.give_back(delivery, delay)

    async def _want_no_more_than_is_waited_for(self) -> None:
        """Withdraw what was asked for where nobody waits for it: a taker that is about to leave
        would be handed what it gives back."""
        if not self._waiting and self._reader.wanted:
            await self._reader.withdraw()

    async def bury(self, job: Job, error: BaseException | str) -> None:
        """See `Job.bury`."""
        await self._die(job, DeathReason.REFUSED, error)

    async def _die(self, job: Job, reason: DeathReason, error: BaseException | str) -> None:
        if not await self._write_letter(job.delivery, job.job_id, reason, error):
            self._left(job, JobEnd.RETRIED, error)
            return
        await self._drop(job.delivery, job.created)
        self._remember(job)
        self._left(job, JobEnd.DEAD, error)

    def _left(self, job: Job, end: JobEnd, error: BaseException | str | None = None) -> None:
        self._figures.left(end)
        job.left(end, error)

    def _remember(self, job: Job) -> None:
        self._settled[_key(job.delivery)] = None
        while len(self._settled) > REMEMBERED:
            self._settled.popitem(last=False)

    async def _keep(self) -> None:
        """Tell the server again and again of what is held here."""
        while True:
            with anyio.move_on_after(self.ack_wait / KEEP_FRACTION):
                await self._keep_now.wait()
            self._keep_now.clear()
            async with anyio.create_task_group() as tasks:
                for job in list(self._held.values()):
                    tasks.start_soon(self._keep_job, job)
                for delivery in list(self._ready):
                    tasks.start_soon(self._jobs.keep, delivery)

    async def _keep_job(self, job: Job) -> None:
        if await self._jobs.keep(job.delivery):
            job.heard = monotonic()
        elif job.is_doubtful:
            logger.debug("%r: the server was not heard for %s s", job, self.ack_wait)

    async def _make(self) -> None:
        """Make the queue again where it is gone."""
        while True:
            await self._is_missing.wait()
            self._is_missing.clear()
            try:
                await self._jobs.ensure()
            except DynbusError as error:
                logger.warning("the queue %s cannot be made: %s", self._jobs.name, error)
                await anyio.sleep(1.0)
                self._is_missing.set()

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._keep_now.set()
