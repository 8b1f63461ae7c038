"""Steps of a durable handler: what a job has finished is not done again by its next try."""

from __future__ import annotations

import asyncio
import logging
import typing
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, ParamSpec, TypeVar, overload

import anyio
import msgspec

from dynbus.actors.calling.jobs import JobQueue
from dynbus.actors.calling.options import call_options, current_options
from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.actors.declaring.codec import AnyCodec, Misfit, codec_for
from dynbus.actors.topics.topic import Topic
from dynbus.bus.bus import Bus
from dynbus.bus.errors import (
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    InvalidRequest,
    InvalidResponse,
    PayloadTooLarge,
)
from dynbus.bus.protocol.names import check_token
from dynbus.bus.transport import Message
from dynbus.bus.work_queue import Job, RunPhase, RunState

from .step_history import (
    SIGNAL,
    SLEEP,
    STEP,
    FinishedStep,
    StepHistory,
    StepMismatch,
    step_label,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_publish: Final[object] = Topic[Any].publish

STAYS: Final = 5.0
"""Seconds for which a job waits in its process; one that waits longer waits in the queue."""
RECHECK: Final = 3600.0
"""Seconds after which a job that waits for a signal looks for it, though nobody has woken it."""
DEADLINE: Final = "deadline of signal"


class JobRun:
    """The present try of a job, as its steps see it.

    Args:
        is_first: whether nothing of the job can have run before.
        has_records: whether the log had records of the job when this try began.
        state: who runs it, where it has waited outside of its process before; None otherwise.
        last: the sequence of that record; 0 for none.

    Attributes:
        tries: which try it is, from 1.
        scope: of the handler; cancelled when it is to wait outside.
        delay: seconds for which it is to wait; None where it is not.
        is_lost: whether another message of the job runs it, or another taker.
        has_ended: whether the job has ended elsewhere.
    """

    def __init__(
        self,
        bus: Bus,
        jobs: JobQueue,
        job: Job,
        state: RunState | None,
        last: int,
        tries: int,
        *,
        is_first: bool,
        has_records: bool = False,
    ) -> None:
        self.tries = tries
        self.scope = anyio.CancelScope()
        self.delay: float | None = None
        self.is_lost = False
        self.has_ended = False
        self._bus = bus
        self._jobs = jobs
        self._job = job
        self._waits = 0 if state is None else state.waits
        self._last = last
        self._is_first = is_first
        self._has_records = has_records
        self._history: StepHistory | None = None
        self._awaited: tuple[str, int] | None = None
        self._waiting: RunState | None = None
        self._loading = asyncio.Lock()
        self._claim = 0
        self._claiming = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<JobRun {self._job.job_id} {self._history!r}>"

    @property
    def has_steps(self) -> bool:
        """True if there may be records of its steps."""
        return self._history is not None or self._has_records

    @property
    def has_waited(self) -> bool:
        """True if it has waited outside of its process, and may have several messages."""
        return self._last > 0

    @property
    def job_id(self) -> str:
        """Its name in its queue."""
        return self._job.job_id

    def event_id(self, place: int) -> str:
        """The id of the event that the step at a place publishes, and no step of another job."""
        name = f"{self._jobs.endpoint}.{self.job_id}.{place}"
        return blake2b(name.encode(), digest_size=16).hexdigest()

    async def reach(self, kind: str, name: str) -> tuple[int, FinishedStep | None]:
        """See `StepHistory.reach`."""
        history = await self._loaded()
        place, step = history.reach(kind, name)
        if step is None and (not self._is_first or self._job.is_doubtful):
            await self._claim_steps()
            await self._look_for(place, history)
            step = history.finished(place, kind, name)
        return place, step

    async def _claim_steps(self) -> None:
        """Have no earlier try store a step from now on: what is not stored then is not finished."""
        async with self._claiming:
            if not self._claim:
                self._claim = await self._jobs.log.claim(self.job_id)

    async def _look_for(self, place: int, history: StepHistory) -> None:
        """Learn whether another try has finished the step at a place, now or a moment ago."""
        # What was read came from any replica; the last of it may have been missing there.
        data = await self._jobs.log.step(self.job_id, place)
        if data is not None:
            history.finish(place, _read_step(data))
        elif await self._jobs.log.result(self.job_id) is not None:
            # Who has ended the job has dropped its steps.
            self.has_ended = True
            await self._lose()

    async def finish(self, place: int, step: FinishedStep) -> None:
        """Have a step stored: no other try does it again."""
        data = msgspec.json.encode(step)
        try:
            is_stored = await self._jobs.log.store_step(self.job_id, place, data, self._claim)
        except PayloadTooLarge:
            raise PayloadTooLarge(
                f"{step_label(step.kind, step.name)} of job {self.job_id} gave {len(data)} bytes, "
                f"which no message of the server has room for ({self._bus.data.max_payload}): put "
                "it elsewhere, and return its name"
            ) from None
        if not is_stored:
            await self._lose()
        (await self._loaded()).finish(place, step)

    async def _loaded(self) -> StepHistory:
        async with self._loading:
            if self._history is None:
                stored = await self._jobs.log.steps(self.job_id)
                self._history = StepHistory({at: _read_step(data) for at, data in stored.items()})
            return self._history

    async def now(self) -> float:
        """Unix seconds by the server's clock."""
        return await self._jobs.queue.now()

    async def sleep(self, until: float) -> None:
        """Wait until a time, in Unix seconds by the server's clock."""
        while (left := until - await self.now()) > 0:
            if left <= STAYS:
                await anyio.sleep(left)
            else:
                await self._wait_outside(left, None)

    async def take_signal(
        self, name: str, until: float | None, decode: Callable[[bytes], object]
    ) -> FinishedStep:
        """Wait for the next signal of a name; one that timed out where none came until then.

        Args:
            decode: reads a value; one for which it raises `Misfit` is left out.
        """
        log = self._jobs.log
        misfits: set[int] = set()
        heard = anyio.Event()

        def hear(_: Message) -> None:
            heard.set()

        subscription = self._bus.data.subscribe(log.signal_subject(self.job_id, name), hear)
        try:
            while True:
                taken = (await self._loaded()).taken_signals(name)
                for message in await log.signals(self.job_id, name):
                    if message.sequence <= taken or message.sequence in misfits:
                        continue
                    try:
                        decode(message.data)
                    except Misfit as error:
                        misfits.add(message.sequence)
                        logger.warning(
                            "job %s leaves a signal %r out, and waits for the next: %s",
                            *(self.job_id, name, error),
                        )
                        continue
                    return FinishedStep(SIGNAL, name, msgspec.Raw(message.data), message.sequence)
                left = RECHECK if until is None else until - await self.now()
                if left <= 0:
                    return FinishedStep(SIGNAL, name, msgspec.Raw(b"null"), timed_out=True)
                with anyio.move_on_after(min(left, STAYS)):
                    await heard.wait()
                if not heard.is_set() and left > STAYS:
                    seen = max(taken, *misfits, 0)
                    await self._wait_outside(min(left - STAYS, RECHECK), (name, seen))
                heard = anyio.Event()
        finally:
            subscription.unsubscribe()

    async def _wait_outside(self, delay: float, signal: tuple[str, int] | None) -> None:
        """End this try, and have another begin after `delay` seconds; go on where a signal has
        come after the one of that sequence meanwhile."""
        log, own = self._jobs.log, self._job.delivery.message.sequence
        if self._waits:
            # What waited the time before, in whose place this try was woken, or would be next time.
            # First, that this try still has the job: another one's message is not to be dropped.
            await self._store_run(RunState(RunPhase.RUNNING, own, self._waits))
            await self._jobs.queue.forget(self.job_id, but=own)
        self._waits += 1
        until = await self.now() + delay
        name = "" if signal is None else signal[0]
        self._waiting = RunState(RunPhase.WAITING, own, self._waits, signal=name, until=until)
        await self._store_run(self._waiting)
        if signal is not None and await log.last_signal(self.job_id, signal[0]) > signal[1]:
            # Its sender may have looked before the job waited.
            await self._store_run(RunState(RunPhase.RUNNING, own, self._waits))
            return
        self.delay, self._awaited = delay, signal
        await self._leave()

    async def wait_in_order(self) -> None:
        """Have a signal hand out the job, which waits and was given back to an ordered queue.

        Only now does the server heed that: before, what gave the job back would have undone it.
        """
        log = self._jobs.log
        assert self._waiting is not None, "it was given back since it waits"
        waiting = msgspec.structs.replace(self._waiting, token=self._job.delivery.token)
        stored = await log.store_run_state(self.job_id, waiting, self._last)
        if stored is None:
            return
        has_come = await log.result(self.job_id) is not None
        if self._awaited is not None and not has_come:
            name, taken = self._awaited
            has_come = await log.last_signal(self.job_id, name) > taken
        if has_come:
            woken = RunState(RunPhase.WOKEN, waiting.sequence, self._waits)
            if await log.store_run_state(self.job_id, woken, stored) is not None:
                await self._jobs.queue.hand_out(waiting.token)

    async def leave_to_next(self, delay: float) -> None:
        """Have the record of a job that has waited say that nobody runs it, before it is given back
        for `delay` seconds: who has it next takes no instance for lost."""
        if not self.has_waited:
            return
        own = self._job.delivery.message.sequence
        try:
            until = await self.now() + delay
            waiting = RunState(RunPhase.WAITING, own, self._waits, until=until)
            await self._jobs.log.store_run_state(self.job_id, waiting, self._last)
        except DynbusError as error:
            logger.info("the end of a try of job %s is not noted: %s", self.job_id, error)

    async def _store_run(self, state: RunState) -> None:
        stored = await self._jobs.log.store_run_state(self.job_id, state, self._last)
        if stored is None:
            await self._lose()
        else:
            self._last = stored

    async def _lose(self) -> None:
        self.is_lost = True
        await self._leave()

    async def _leave(self) -> None:
        self.scope.cancel()
        await anyio.sleep_forever()


_running: ContextVar[JobRun] = ContextVar("dynbus_job_run")


def enter_run(run: JobRun) -> None:
    """Make a run the one whose steps are taken in this task, and in what that begins."""
    _running.set(run)


def _current(what: str) -> JobRun:
    run = _running.get(None)
    if run is None:
        raise ConfigError(f"{what} is for durable handlers: write @handler(durable=True)")
    return run


async def step(
    name: str, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call an async function once in the life of a job, in a durable handler; its result.

    The result is stored before this returns, so that a later try of the job, on any instance, gets
    it without a call. What raises is called again by the next try. A method of a client, and
    `publish` of a topic, are given an idempotency key of the job and the step. Steps are known by
    their order: begin those that run side by side always in the same one.

    Args:
        name: 1 to 63 letters, digits, `_` or `-`.
        function: its result must be what a handler can return, of the type that it is annotated
            with; plain JSON without an annotation.

    Raises:
        StepMismatch: the job had finished another step at this place, or this one with a result
            that does not fit now.
        ConfigError: this is no durable handler, or the name is not usable.
        InvalidResponse: the result does not fit its annotation.
        PayloadTooLarge: it does not fit into a message.
    """
    run = _current("step(...)")
    check_token("step", name)
    codec = _codec_of(function)
    place, finished = await run.reach(STEP, name)
    if finished is not None:
        stored: T = _stored(codec, place, finished)
        return stored
    if getattr(function, "__func__", None) is _publish:
        kwargs.setdefault("idempotency_key", run.event_id(place))
    with _keyed(function, f"{run.job_id}.{place}"):
        result = await function(*args, **kwargs)
    encode = codec.encoder(InvalidResponse)
    await run.finish(place, FinishedStep(STEP, name, msgspec.Raw(encode(result))))
    return result


async def sleep_until(when: datetime | timedelta) -> None:
    """Wait until a time, in a durable handler; longer than some seconds without a place at an
    instance.

    The time of the first try counts: a later one that gives another waits until the first.

    Args:
        when: a time with a time zone, or how long from now on, both by the server's clock.

    Raises:
        ConfigError: this is no durable handler.
        InvalidRequest: the time has no time zone.
        StepMismatch: the job had finished another step at this place.
    """
    run = _current("sleep_until(...)")
    if isinstance(when, timedelta):
        until = await run.now() + when.total_seconds()
    elif when.tzinfo is None:
        raise InvalidRequest(f"sleep_until({when.isoformat()}) has no time zone: give one")
    else:
        until = when.timestamp()
    await run.sleep(await _first_time(run, SLEEP, "", until))


@overload
async def signal(name: str, /, *, timeout: float | None = None) -> Any: ...
@overload
async def signal(name: str, kind: type[T], /, *, timeout: float | None = None) -> T: ...
async def signal(name: str, kind: Any = Any, /, *, timeout: float | None = None) -> Any:
    """Wait for a signal that `JobHandle.signal` sends, in a durable handler; its value.

    Each call takes the next signal of the name, also one that was sent before; one whose value does
    not fit `kind` is left out, with a warning in the log of the process. A job that waits longer
    than some seconds waits without a place at an instance.

    Args:
        name: 1 to 63 letters, digits, `_` or `-`.
        kind: the type of the value; JSON as it is read without one.
        timeout: seconds from the first try's call of this on, by the server's clock.

    Raises:
        DeadlineExceeded: none came in time; later tries get the same answer.
        ConfigError: this is no durable handler, or the name is not usable.
        StepMismatch: the job had finished another step at this place, or taken a value that does
            not fit `kind` now.
    """
    run = _current("signal(...)")
    check_token("signal", name)
    codec = codec_for(kind)
    until = None
    if timeout is not None:
        until = await _first_time(run, DEADLINE, name, await run.now() + timeout)
    place, finished = await run.reach(SIGNAL, name)
    if finished is None:
        finished = await run.take_signal(name, until, codec.decode)
        await run.finish(place, finished)
    if finished.timed_out:
        raise DeadlineExceeded(f"no signal {name!r} came within {timeout:g} s")
    return _stored(codec, place, finished)


def _stored(codec: AnyCodec, place: int, finished: FinishedStep) -> Any:
    """The value of a finished step.

    Raises:
        StepMismatch: it is of another type than is asked for now.
    """
    try:
        return codec.decode(bytes(finished.result))
    except Misfit as error:
        label = step_label(finished.kind, finished.name)
        raise StepMismatch(
            f"step {place + 1} of this job, {label}, was finished with a value that does not fit "
            f"the type that it has now ({error}): let the version that began such jobs end them, "
            "or keep the type, and add a step behind the others"
        ) from None


async def _first_time(run: JobRun, kind: str, name: str, unix: float) -> float:
    """A time in Unix seconds, as the first try of the job had it."""
    place, finished = await run.reach(kind, name)
    if finished is not None:
        return msgspec.json.decode(finished.result, type=float)
    await run.finish(place, FinishedStep(kind, name, msgspec.Raw(msgspec.json.encode(unix))))
    return unix


def _keyed(function: Callable[..., object], key: str) -> Any:
    """Have a call of a client's method carry a key, unless it has one."""
    is_client = hasattr(function, "__dynbus_result__")
    if not is_client or current_options().get("idempotency_key"):
        return nullcontext()
    return call_options(idempotency_key=key)


def _codec_of(function: Callable[..., object]) -> AnyCodec:
    known: AnyCodec | None = getattr(function, "__dynbus_result__", None)
    if known is not None:
        return known
    return _codec_of_function(getattr(function, "__func__", function))


@lru_cache(1024)
def _codec_of_function(function: Callable[..., object]) -> AnyCodec:
    try:
        kind = typing.get_type_hints(function).get("return", Any)
        return codec_for(kind)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"step: what {brief_repr(function)} returns cannot be stored: {error}"
        ) from None


def _read_step(data: bytes) -> FinishedStep:
    return msgspec.json.decode(data, type=FinishedStep)
