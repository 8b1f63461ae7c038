"""Taking jobs of a queue, and holding them until they are settled."""

from __future__ import annotations

import asyncio
import logging
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple, Self

import anyio
import anyio.lowlevel

from dynbus.bus.background import Background, Work
from dynbus.bus.clock import monotonic
from dynbus.bus.context import MAX_ID_LENGTH, Context, entered
from dynbus.bus.errors import ConfigError, DynbusError, HandlerError, UnknownOutcome
from dynbus.bus.protocol import headers as header_names
from dynbus.bus.protocol.cancellation import Tombstones
from dynbus.bus.protocol.names import is_copy_subject, work_subject
from dynbus.bus.telemetry.telemetry import CallObservation
from dynbus.bus.telemetry.trace_context import trace_fields
from dynbus.bus.transport import ConnectionState, Delivery, Message, PullReader, Subscription

from .dead_letters import DeadLetters
from .job import (
    LEAST_WAIT,
    DeathReason,
    Disposition,
    Facts,
    JobEnd,
    counted,
    error_text,
    goes_on,
    judge,
    put_at,
)
from .job_stream import JobStream
from .lanes import HIGH, PATIENCE, LaneChoice
from .observing import QueueFigures

logger = logging.getLogger(__name__)

MAX_LIMIT: Final = 4096
KEEP_FRACTION: Final = 4
"""The number of times that a job is kept alive within its `ack_wait`."""
LATE: Final = 0.5
"""The part of its `ack_wait` after which others may have what was on its way here: less than the
whole, since what is known of the server's time is as old as its messages were on their way."""
SETTLE_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 5.0
UNKNOWN_TRIES_DELAY: Final = 1.0
"""Seconds before a job is tried again of which the server does not say how often it was tried."""
REMEMBERED: Final = 4096
"""Settled jobs that are known again when a server that was killed hands them out once more."""

JobKey = tuple[int, float]
"""The sequence of a job and the time at which it was stored: another stream has others."""


class _Ready(NamedTuple):
    """A delivery that may begin, the place of its lane, and when the job was put, on our clock."""

    lane: int
    delivery: Delivery
    queued: float
    returns: int = 0


async def _has_not(_id: str) -> bool:
    return False


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
        lane: the place of its lane in the queue.
        returns: deliveries that were none of its tries, where the queue keeps them: it was given
            back.
        deadline: on the library's monotonic clock in seconds; None without one.
        queued_at: Unix seconds by the server's clock, at which it was put.
        waited: seconds since then, by the server's clock and ours.
        end: what became of it; None until it is settled.
        has_place: whether it counts among the jobs that its taker holds at a time.
        may_have_begun: whether another taker may have begun it before: it was handed out before, or
            was put before this taker was connected, and a server that is killed may forget that, or
            it may have been on its way here for so long that others were handed it.
    """

    def __init__(
        self,
        taker: Taker,
        delivery: Delivery,
        facts: Facts,
        created: float,
        waited: float,
        observation: CallObservation | None = None,
        lane: int = 0,
        returns: int = 0,
        was_long_on_its_way: bool = False,
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
        self.lane = lane
        self.returns = returns
        self.created = created
        self.heard = self._handed_at = monotonic()
        put_here = self._handed_at - waited > taker.watched_since
        self.may_have_begun = (
            self.tries > 1
            or returns > 0
            or not put_here
            or was_long_on_its_way
            or goes_on(delivery.message)
        )
        self._taker = taker
        self._is_settled = False
        self._is_doubted = False
        self.has_place = True
        self._observation = observation
        self._leave: Callable[[], None] | None = None

    def __repr__(self) -> str:
        state = "settled" if self._is_settled else "held"
        return f"<Job {self.job_id} [{state} | tries: {self.tries}]>"

    @property
    def is_settled(self) -> bool:
        """True if `ack`, `nak` or `bury` was called."""
        return self._is_settled

    @property
    def is_doubtful(self) -> bool:
        """True if another taker may have had the job: the server was away since it was handed out,
        or once not heard for `ack_wait`, or another taker took this one for dead.
        """
        was_away = self._taker.watched_since > self._handed_at
        return self._is_doubted or was_away or monotonic() - self.heard > self._taker.ack_wait

    def doubt(self) -> None:
        """Another taker has given it back in the place of this one, or may have."""
        self._is_doubted = True

    def leave_place(self) -> None:
        """Have another job begin in its place: its work is over, and how it ended is to be stored.

        As many jobs as a taker may hold may have left their places."""
        self._taker.free_place(self)

    async def ack(self) -> None:
        """Say that it is done; on return the server has confirmed that nobody gets it again.

        Raises:
            UnknownOutcome: no confirmation came in 30 seconds, or before the bus was closed;
                another taker may get it.
        """
        self._claim()
        await self._taker.finish(self)

    async def nak(self, error: BaseException | str = "", *, delay: float | None = None) -> None:
        """Give it back, to be tried again after `delay` seconds (the queue's own pause unless
        told). After the last try it becomes a dead letter with this error."""

        async def settle(job: Job) -> None:
            await self._taker.retry(job, error, delay)

        await self._settle(settle)

    async def give_back(self, *, delay: float = 0.0, waits: bool = False) -> None:
        """Give it back, to be handed out again after `delay` seconds: nothing was wrong with it, it
        is not for this taker.

        That is no failure, and no try of a durable handler or in an ordered queue. In others it
        uses up a delivery: a job whose deliveries are used up is put in again as a copy; only where
        a full queue has no room for that it becomes a dead letter.

        Args:
            waits: whether it waits by its own will, which it may do for years, again and again:
                that uses up a delivery wherever a copy can go on in its place.
        """

        async def settle(job: Job) -> None:
            await self._taker.give_back(job, delay, waits=waits)

        await self._settle(settle)

    async def bury(self, error: BaseException | str) -> None:
        """Make it a dead letter now: trying again is of no use."""

        async def settle(job: Job) -> None:
            await self._taker.bury(job, error)

        await self._settle(settle)

    def _claim(self) -> None:
        if self._is_settled:
            raise RuntimeError(f"job {self.job_id} was settled before")
        self._is_settled = True

    async def _settle(self, how: Callable[[Job], Awaitable[None]]) -> None:
        self._claim()
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
            try:
                called = Context(request_id[:MAX_ID_LENGTH], trace_headers=fields)
            except ConfigError:
                # Of a plain client. A block that is not entered would never settle its job.
                called = Context(self.job_id, trace_headers=fields)
            left = entered(called)

        def leave() -> None:
            if left is not None:
                left()
            if observation is not None:
                observation.deactivate(token)

        return leave


class Taker:
    """Takes jobs of a queue: iterate over it, or call `begin`. `WorkQueue.take` makes one.

    At most `limit` jobs are held at a time, beside as many that have left their places. No other is
    asked for before one of them is settled or has left its place, so a job never waits behind
    others at a taker while another taker is idle.

    Attributes:
        ended: how many jobs left it, by how they did; shared by the takers of a queue.
        on_change: called when what it holds changes.
        has_begun: asked about a job that was handed out before and whose deadline has passed: one
            that has begun is not dropped. No job has unless given.
        has_ended: asked about a job that was handed out as often as it may be: of one that has
            ended only the word to the queue was lost. No job has unless given.
        on_dropped: called with the id of a job that left the queue without having begun, and how.
        keeps_returns: whether deliveries that were given back are kept in the log of the queue's
            jobs, as none of their tries; so where there is one, and always in order.
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
        self.has_begun: Callable[[str], Awaitable[bool]] = _has_not
        self.has_ended: Callable[[str], Awaitable[bool]] = _has_not
        self.on_dropped: Callable[[str, JobEnd], None] = lambda _id, _end: None
        self._figures = figures
        self._cancelled = cancelled
        self._jobs = jobs
        self._letters = letters
        self._background = background
        self._limit = limit
        self._held: dict[JobKey, Job] = {}
        # By lane, since when deliveries are asked for without a break: none was sent earlier.
        self._asked_at = [0.0] * len(jobs.lanes)
        self._ready: list[_Ready] = []
        self._waiting = 0
        self._gave_up_waiting = False
        self._ordered = self.keeps_returns = jobs.config.ordered
        self._choice = LaneChoice(jobs.waiting, ordered=self._ordered)
        self._settling = 0
        # Those held jobs whose work is over.
        self._over = 0
        self._heard_at = 0.0
        self._patience: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._settled: OrderedDict[JobKey, None] = OrderedDict()
        self._drained = False
        self._changed = asyncio.Event()
        self._keep_now = asyncio.Event()
        self._is_missing = asyncio.Event()
        self._may_be_too_many = asyncio.Event()
        self._stop_listening = jobs.connection.on_state(self._on_state)
        self._readers = [
            jobs.jetstream.pull(
                jobs.stream,
                consumer.name,
                partial(self._receive, lane),
                on_missing=self._is_missing.set,
            )
            for lane, consumer in enumerate(jobs.consumers)
        ]
        has_urgent = HIGH in jobs.lanes
        self._subscription = self._hear_of_urgent_jobs() if has_urgent else None
        self._works: list[Work] = [
            background.start(self._give_back_surplus, name=f"share jobs of {jobs.name}"),
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
    def watched_since(self) -> float:
        """The time at which this taker was last connected, on the library's monotonic clock."""
        return self._jobs.watched_since

    @property
    def held(self) -> int:
        """Jobs that are handed out and not settled."""
        return len(self._held)

    def deliveries(self) -> Iterator[Delivery]:
        """The deliveries that the server has handed out here and is to hear of, oldest first."""
        yield from [job.delivery for job in self._held.values()]
        yield from [ready.delivery for ready in self._ready]

    def doubt(self) -> None:
        """Another taker took this one for dead, and gave back what it held."""
        for job in self._held.values():
            job.doubt()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Job:
        jobs = await self._next(1)
        if not jobs:
            raise StopAsyncIteration
        return jobs[0]

    async def begin(self) -> list[Job]:
        """All jobs that may be held beside those that are, one at least: wait for them; none at the
        end, where an iteration would end."""
        return await self._next(self._limit)

    async def _next(self, most: int) -> list[Job]:
        self._waiting += most
        self._gave_up_waiting = True
        try:
            while True:
                jobs = await self._begin_ready(most)
                if jobs:
                    self._gave_up_waiting = False
                    return jobs
                if self._drained:
                    return []
                self._ask()
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._waiting -= most

    async def drain(self) -> None:
        """Take no more and give back what is not begun; iterations end. Jobs that are held stay so
        until they are settled, or the block of `take` is left."""
        if self._drained:
            return
        self._drained = True
        self._changed.set()
        if self._patience is not None:
            self._patience.cancel()
        if self._subscription is not None:
            self._subscription.unsubscribe()
        async with anyio.create_task_group() as tasks:
            for reader in self._readers:
                tasks.start_soon(reader.stop)
        while self._ready:
            _, delivery, queued, _ = self._ready.pop(0)
            await self._return(delivery, self._judge(delivery, queued).facts.job_id)

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

    def _hear_of_urgent_jobs(self) -> Subscription:
        """Hear of jobs that go before others, which a lane that hands out jobs does not tell."""
        lane = self._jobs.lanes.index(HIGH)

        def hear(_: Message) -> None:
            self._choice.heard_of_job(lane)

        return self._jobs.connection.subscribe(work_subject(self._jobs.name, lane=HIGH), hear)

    def _asked(self) -> list[int]:
        return [reader.wanted for reader in self._readers]

    def _ask(self) -> None:
        needed = self._most_to_begin() - len(self._ready)
        if needed <= 0 or self._drained:
            return
        held: set[int] = set()
        if self._ordered:
            held = {job.lane for job in self._held.values()}
            held.update(ready.lane for ready in self._ready)
        asked, now = self._asked(), monotonic()
        asks = self._choice.pick(needed, asked, held, now)
        for lane, count in asks.counts.items():
            if not asked[lane]:
                self._asked_at[lane] = now
            self._readers[lane].ask(count)
        for lane in asks.surplus:
            reader = self._readers[lane]
            self._background.start(self._withdraw, reader, name="ask a lane no more")
        if asks.counts:
            self._heard_at = now
        # Also where nothing more is asked: others may have taken what a lane was said to have.
        self._be_patient(PATIENCE)

    def _be_patient(self, seconds: float) -> None:
        """See whether a job comes of lanes that are said to have one."""
        if self._patience is None and self._choice.hopes(self._asked()):
            self._patience = self._loop.call_later(seconds, self._lose_patience)

    def _lose_patience(self) -> None:
        self._patience = None
        left = PATIENCE - (monotonic() - self._heard_at)
        if left > LEAST_WAIT:
            self._be_patient(left)
            return
        self._choice.heard_nothing(self._asked())
        self._ask()

    def _receive(self, lane: int, delivery: Delivery) -> None:
        self._choice.delivered(lane, delivery.message.pending)
        self._heard_at = now = monotonic()
        key = _key(delivery)
        queued = self._jobs.queued(delivery, now)
        delivery, delay = counted(delivery, now - queued)
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
        elif self.keeps_returns and delivery.tries > 1:
            self._background.start(self._recall, lane, delivery, name="learn a job's tries")
        else:
            self._admit(_Ready(lane, delivery, queued))

    async def _recall(self, lane: int, delivery: Delivery) -> None:
        """Take a delivery without those that were none of the job's tries."""
        queued = self._jobs.queued(delivery, monotonic())
        job_id = self._judge(delivery, queued).facts.job_id
        try:
            returns = await self._jobs.returns(delivery, job_id)
        except DynbusError as error:
            logger.info("%r: a job waits, its tries are not known: %s", self, error)
            await self._jobs.note_return(delivery, job_id)
            await self._jobs.give_back(delivery, UNKNOWN_TRIES_DELAY)
            return
        counted_less = delivery._replace(tries=max(1, delivery.tries - returns))
        self._admit(_Ready(lane, counted_less, queued, returns))

    def _admit(self, ready: _Ready) -> None:
        if self._ordered:
            self._ready.append(ready)
        else:
            insort(self._ready, ready, key=lambda one: one.lane)
        self._changed.set()
        self.on_change()
        most, ready_now = self._most_to_begin(), len(self._ready)
        # Who waits for one job waits for none when it has got it.
        if ready_now > most or (ready_now == most and any(self._asked())) or self._drained:
            self._may_be_too_many.set()

    def _places(self) -> int:
        """The number of jobs that may begin beside those that are held."""
        held = len(self._held)
        return self._limit - max(held - self._over, held - self._limit)

    def _most_to_begin(self) -> int:
        return min(self._waiting, self._places())

    def _most_to_keep(self) -> int:
        if self._drained:
            return 0
        # Who was cancelled as it waited comes back for what it had asked for.
        is_left = self._gave_up_waiting and self._places() > 0
        return max(self._most_to_begin(), int(is_left))

    async def _give_back_surplus(self) -> None:
        """Hand on what several lanes have handed out here and this taker does not begin."""
        while True:
            await self._may_be_too_many.wait()
            self._may_be_too_many.clear()
            # Who iterates has had the time to take what came, and to wait for more.
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            await self._want_no_more_than_is_waited_for()
            while len(self._ready) > self._most_to_keep():
                lane, delivery, queued, _ = self._ready.pop()
                self._choice.heard_of_job(lane)
                await self._pass_on(delivery, self._judge(delivery, queued).facts.job_id)

    async def _begin_ready(self, most: int) -> list[Job]:
        """The next jobs that may begin, `most` at most; none where there are none."""
        if self._ready:
            await self._read_clock()
            if self._jobs.moves_known_at < self._jobs.watched_since:
                await self._jobs.learn_moves()
        jobs: list[Job] = []
        while self._ready and not self._drained and len(jobs) < most and self._places() > 0:
            ready = self._ready.pop(0)
            disposition = self._judge(ready.delivery, ready.queued)
            if disposition.end is None:
                jobs.append(self._hold(ready, disposition.facts))
            elif jobs:
                # A taker that waits may be cancelled before this one is refused.
                self._ready.insert(0, ready)
                break
            elif await self._goes_on(ready, disposition):
                if self._drained or self._places() <= 0:
                    await self._return(ready.delivery, disposition.facts.job_id)
                else:
                    jobs.append(self._hold(ready, disposition.facts))
            else:
                await self._refuse(ready.delivery, disposition)
        return jobs

    def _hold(self, ready: _Ready, facts: Facts) -> Job:
        lane, delivery, queued, returns = ready
        attempt = self._figures.attempt(facts.headers, facts.job_id, delivery.tries)
        now = monotonic()
        waited = now - queued
        # The server sent it after it was put and asked for: that is long ago for what lay here, or
        # on its way, while this host was frozen or cut off.
        longest = self._jobs.ack_wait * LATE
        is_late = waited > longest and now - self._asked_at[lane] > longest
        job = Job(
            self, delivery, facts, self._jobs.created, waited, attempt, lane, returns, is_late
        )
        self._held[_key(delivery)] = job
        self._figures.taken(waited if delivery.tries == 1 else None)
        return job

    async def _goes_on(self, ready: _Ready, disposition: Disposition) -> bool:
        """True if a job goes to its taker although its deadline has passed, since it has begun, or
        its tries are used up, since it has ended."""
        job_id = disposition.facts.job_id
        if disposition.reason is DeathReason.TRIES:
            return await self._has_ended(job_id)
        if disposition.end is not JobEnd.EXPIRED:
            return False
        delivery = ready.delivery
        is_first = delivery.tries == 1 and not ready.returns
        message = delivery.message
        if is_first and not is_copy_subject(message.subject) and not goes_on(message):
            return False
        try:
            return await self.has_begun(job_id)
        except DynbusError as error:
            # It begins: to drop what has begun loses more than to do what is late.
            logger.info("job %s of %s is late: %s", job_id, self._jobs.name, error)
            return True

    async def _has_ended(self, job_id: str) -> bool:
        try:
            return await self.has_ended(job_id)
        except DynbusError as error:
            # Its letter says that nobody knows: who redrives it looks again.
            logger.info("how job %s of %s ended is not known: %s", job_id, self._jobs.name, error)
            return False

    async def _read_clock(self) -> None:
        try:
            await self._jobs.read_clock()
        except DynbusError as error:
            # What it said before is carried on by our own clock.
            logger.debug("%r: the server's time was not read again: %s", self, error)

    def _judge(self, delivery: Delivery, queued: float) -> Disposition:
        return judge(
            delivery,
            queued,
            monotonic(),
            self._jobs.config,
            self._cancelled,
            self._jobs.default_id(delivery.message),
            self._jobs.moves,
        )

    async def _refuse(self, delivery: Delivery, disposition: Disposition) -> None:
        """Have a job leave the queue that is not to be begun."""
        job_id = disposition.facts.job_id
        if disposition.end is JobEnd.EXPIRED:
            logger.info("job %s of %s is dropped: its deadline passed", job_id, self._jobs.name)
        elif disposition.end is JobEnd.CANCELLED:
            logger.info("job %s of %s is dropped: it was cancelled", job_id, self._jobs.name)
        elif disposition.end is JobEnd.MOVED:
            logger.info("job %s of %s is dropped: it was taken over", job_id, self._jobs.name)
            await self._jobs.forget_moved(job_id)
        elif not await self._write_letter(
            delivery, job_id, disposition.reason or DeathReason.TRIES, disposition.error
        ):
            return
        if await self._drop(delivery, self._jobs.created):
            end = disposition.end or JobEnd.DEAD
            self._figures.left(end, delivery.tries)
            self.on_dropped(job_id, end)

    async def _write_letter(
        self, delivery: Delivery, job_id: str, reason: DeathReason, error: BaseException | str
    ) -> bool:
        """Keep a job as a dead letter; where that fails it is given back."""
        try:
            await self._letters.put(
                self._jobs.name,
                job_id,
                delivery.message,
                reason,
                error,
                delivery.tries,
                lane=self._jobs.lane_of(delivery.message),
                group=self._jobs.group_of(delivery.message),
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

    def free_place(self, job: Job) -> None:
        """See `Job.leave_place`."""
        if job.has_place and self._held.get(_key(job.delivery)) is job:
            job.has_place = False
            self._over += 1
            self._fill_place()

    def _fill_place(self) -> None:
        if self._ready:
            self._changed.set()
        else:
            self._ask()

    def _drop_held(self, job: Job) -> None:
        """Hold a job no more, if it still is."""
        key = _key(job.delivery)
        if self._held.get(key) is job:
            del self._held[key]
            self._over -= not job.has_place

    async def settle(self, job: Job, how: Callable[[Job], Awaitable[None]]) -> None:
        """Carry `how` out in the background, so that nobody who is cancelled stops it halfway, and
        wait for it."""
        outcomes: list[DynbusError | None] = []
        await self._start_settling(job, how, outcomes).wait()
        if not outcomes:
            raise self._unconfirmed(job)
        if outcomes[0] is not None:
            raise outcomes[0]

    def _start_settling(
        self,
        job: Job,
        how: Callable[[Job], Awaitable[None]],
        outcomes: list[DynbusError | None],
    ) -> Work:
        async def run() -> None:
            try:
                await how(job)
            except DynbusError as error:
                outcomes.append(error)
                job.left(JobEnd.RETURNED, error)
            else:
                outcomes.append(None)
            finally:
                self._note_settled(job)

        work = self._background.start(run, name=f"settle job {job.job_id}")
        self._settling += 1
        return work

    def _note_settled(self, job: Job) -> None:
        self._settling -= 1
        self._drop_held(job)
        if self._drained:
            self._changed.set()
        else:
            self._fill_place()
        self.on_change()

    def _unconfirmed(self, job: Job) -> UnknownOutcome:
        return UnknownOutcome(
            f"the bus was closed before the queue {self._jobs.name} had confirmed what became of "
            f"job {job.job_id}: another taker may get it"
        )

    async def finish(self, job: Job) -> None:
        """See `Job.ack`.

        The server confirms almost every job at once, so that is waited for here; only what has to
        be tried again, or that a cancelled caller leaves, takes a task of its own.
        """
        self._settling += 1
        try:
            await self._jobs.acknowledge(job.delivery)
        except DynbusError:
            self._settling -= 1
            if self._background.is_open:
                await self.settle(job, self._finish_in_time)
                return
            raise self._unconfirmed(job) from None
        except BaseException:
            self._settling -= 1
            if self._background.is_open:
                self._start_settling(job, self._finish_in_time, [])
            raise
        self._note_finished(job)
        self._note_settled(job)

    async def _finish_in_time(self, job: Job) -> None:
        if not await self._drop(job.delivery, job.created):
            raise UnknownOutcome(
                f"job {job.job_id} is done, and the queue {self._jobs.name} did not confirm that "
                f"within {SETTLE_SECONDS:g} s: another taker may get it"
            )
        self._note_finished(job)

    def _note_finished(self, job: Job) -> None:
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

    async def give_back(self, job: Job, delay: float, *, waits: bool) -> None:
        """See `Job.give_back`."""
        await self._return(job.delivery, job.job_id, delay, waits=waits)
        job.left(JobEnd.RETURNED)

    async def _return(
        self, delivery: Delivery, job_id: str, delay: float = 0.0, *, waits: bool = False
    ) -> None:
        await self._pass_on(delivery, job_id, delay, waits=waits)
        self._figures.left(JobEnd.RETURNED)

    async def _pass_on(
        self, delivery: Delivery, job_id: str, delay: float = 0.0, *, waits: bool = False
    ) -> None:
        """Have another taker get a job with which nothing is wrong."""
        # The server counts its deliveries, and not what became of them.
        is_last = delivery.tries >= self._jobs.config.tries
        await self._want_no_more_than_is_waited_for()
        if self._ordered or (self.keeps_returns and not waits):
            # A copy would come behind others, and has all its tries again.
            await self._jobs.note_return(delivery, job_id)
        elif is_last and await self._jobs.put_again(delivery, job_id, delay):
            await self._drop(delivery, self._jobs.created)
            return
        await self._hand_back(delivery, delay)

    async def _hand_back(self, delivery: Delivery, delay: float) -> None:
        """Have a job handed out again. It is not held any more from here on: it may come to this
        very taker before the server has confirmed that it has it back."""
        await self._want_no_more_than_is_waited_for()
        job = self._held.get(_key(delivery))
        if job is not None:
            self._drop_held(job)
        await self._jobs.give_back(delivery, delay)

    async def _want_no_more_than_is_waited_for(self) -> None:
        """Withdraw what was asked for where nobody waits for it, or could hold it: a taker that is
        about to leave would be handed what it gives back."""
        if self._most_to_begin() > 0:
            return
        async with anyio.create_task_group() as tasks:
            for reader in self._readers:
                if reader.wanted:
                    tasks.start_soon(self._withdraw_unless_wanted, reader)

    async def _withdraw_unless_wanted(self, reader: PullReader) -> None:
        # A turn of the loop has passed, in which somebody may have begun to wait.
        if self._most_to_begin() <= 0:
            await reader.withdraw()

    async def _withdraw(self, reader: PullReader) -> None:
        """Ask a lane no more, and others where that was needed after all."""
        await reader.withdraw()
        self._ask()

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
        self._figures.left(end, job.tries)
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
                for ready in list(self._ready):
                    tasks.start_soon(self._jobs.keep, ready.delivery)

    async def _keep_job(self, job: Job) -> None:
        asked = monotonic()
        is_heard = await self._jobs.keep(job.delivery)
        if job.is_doubtful:
            # Also once the server is heard again: others may have had the job meanwhile.
            job.doubt()
        if is_heard:
            job.heard = asked
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
