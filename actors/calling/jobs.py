"""Jobs of durable handlers, for who submits them and asks what became of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol, TypedDict, TypeVar, Unpack

import anyio
import msgspec

from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.actors.declaring.codec import Misfit
from dynbus.actors.declaring.durable import DEFAULTS, DurableOptions, JobHandle, JobState
from dynbus.actors.declaring.json_object import encode_json
from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    HandlerError,
    InvalidRequest,
    InvalidResponse,
    PayloadTooLarge,
    PermissionDenied,
    Unavailable,
)
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import (
    EndpointName,
    check_token,
    job_cancel_subject,
    job_token,
    lane_of_subject,
)
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.transport import Message, StoredMessage
from dynbus.bus.work_queue import (
    ORDERED_LANES,
    DeadLetter,
    DeadLetters,
    DeathReason,
    JobLog,
    JobResult,
    Outcome,
    RunPhase,
    WorkQueue,
)

from .options import CallOptions, checked_options, combined, inherited

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_PAUSE: Final = 5.0
"""Seconds after which a job that is waited for is looked at again, though nothing was heard."""
FIRST_LOOK: Final = 0.005
FIRST_PAUSE: Final = 0.25
"""Seconds after which a server that did not answer is asked again; each pause is twice the last."""
OUTDATED: Final = 2.0
"""Seconds within which a server that led its cluster learns that another one does."""
SIGNAL_HEADERS: Final = 1024
"""Bytes of a message that a signal leaves to its subject and headers."""
MAX_DELAY: Final = 366 * 24 * 3600.0
A_TIME: Final = "give one with a time zone, as in datetime(2027, 1, 31, 7, 0, tzinfo=UTC)"


class NoJob(DynbusError):
    """Raised when there is no job of an id, or none any more."""

    code = "NoJob"


class JobId(str):
    """The id of a job: `namespace.component.endpoint.name`, of which the name is the queue's."""

    __slots__ = ()

    @classmethod
    def of(cls, endpoint: EndpointName, name: str) -> JobId:
        """The id of a job of an endpoint."""
        return cls(f"{endpoint}.{name}")

    def split_name(self) -> tuple[EndpointName, str]:
        """The endpoint, and the job's name in its queue.

        Raises:
            ConfigError: it is no id of a job.
        """
        *place, name = self.split(".", 3)
        if len(place) != 3 or not name:
            raise ConfigError(
                f"{str(self)[:140]!r} is no job's id: write namespace.component.endpoint.name, as "
                "the handle of a job has it"
            )
        return EndpointName.of(*place), name


class Submission(TypedDict, total=False):
    """The time at which a job is to be done, and its name; see `DurableMethod.submit`."""

    delay: float
    at: datetime | None
    idempotency_key: str | None
    deadline: float | None
    priority: int | None


class JobRequest:
    """A client's request to a durable handler: a call that is stored in place of sent.

    Attributes:
        time_left: seconds in which it is to end, as its options and the running call say; None for
            no limit.
    """

    def __init__(
        self,
        side: Submitter,
        endpoint: EndpointName,
        router: object,
        request: object,
        data: bytes,
        terms: object,
        *,
        options: CallOptions,
        parent: Context | None,
    ) -> None:
        self.side = side
        self.endpoint = endpoint
        self.data = data
        self.options = options
        self.parent = parent or Context.current()
        remaining = None if self.parent is None else self.parent.time_left()
        limits = [one for one in (options.get("timeout"), remaining) if one is not None]
        self.time_left = max(0.0, min(limits)) if limits else None


class Submitter(Protocol):
    """The process that submits jobs."""

    def jobs_of(
        self, endpoint: EndpointName, options: DurableOptions | None = None
    ) -> JobQueue: ...


class JobQueue:
    """The jobs of one durable handler, as its clients see them.

    Args:
        options: of the handler; of one that is not known here the defaults, which count where the
            queue does not exist yet.
    """

    def __init__(
        self, bus: Bus, endpoint: EndpointName, options: DurableOptions = DEFAULTS
    ) -> None:
        self.endpoint = endpoint
        self.options = options
        self.queue = WorkQueue(bus, endpoint, options.queue)
        self.log = JobLog(bus.data.jetstream, endpoint)
        self._bus = bus

    def __repr__(self) -> str:
        return f"<JobQueue {self.endpoint}>"

    async def submit(
        self,
        data: bytes,
        *,
        options: CallOptions,
        parent: Context | None,
        order_key: str | None = None,
        **when: Unpack[Submission],
    ) -> JobId:
        """Have a job stored; see `DurableMethod.submit`.

        Args:
            order_key: of a handler with `ordered_by`.
        """
        priority, own_key = when.get("priority"), when.get("idempotency_key")
        if own_key == "":
            raise InvalidRequest(
                "idempotency_key='' names no job: give a key, or leave it out", started=False
            )
        if priority is not None or own_key is not None:
            given: CallOptions = {"priority": priority, "idempotency_key": own_key}
            options = combined(checked_options(given, "submit(...)"), options)
        if priority and order_key is not None:
            raise InvalidRequest(
                f"priority={priority} would have the job go before others of its key, and "
                f"{self.endpoint} does them in order: leave it out",
                started=False,
            )
        delay = await self._delay(when)
        if order_key is not None and (when.get("delay") or when.get("at")):
            raise InvalidRequest(
                f"a job of {self.endpoint} that waits for its time would have later ones of its "
                "key wait too: submit it when its time has come",
                started=False,
            )
        deadline = when.get("deadline")
        if deadline is not None:
            _check_seconds("deadline", deadline)
            if delay and deadline <= delay:
                raise InvalidRequest(
                    f"deadline={deadline:g} passes before the job may begin, in {delay:g} s: give "
                    "a later one, or leave it out",
                    started=False,
                )
        key = options.get("idempotency_key") or ""
        name = key or random_id()
        job_id = JobId.of(self.endpoint, name)
        fields = call_headers(options, parent)
        if key:
            fields[headers.KEYED] = "1"
            # It may be in another lane, and of a longer time ago than repeats are known.
            if await self.log.result(name) is not None:
                return job_id
            if queued := await self.queue.find(name):
                if queued[0].data != data:
                    logger.warning(
                        "job %s waits with another request than the one that was submitted under "
                        "its key now, and which is left out: give each job a key of its own",
                        job_id,
                    )
                return job_id
        put = partial(
            self.queue.put,
            data,
            job_id=name,
            deadline=None if deadline is None else monotonic() + deadline,
            headers=fields,
            delay=delay,
            key=order_key,
            # An ordered queue keeps its order, whatever the priority of the running call is.
            priority=inherited(options, parent)[1] if order_key is None else 0,
        )
        await put()
        if key:
            try:
                await self._find(name)
            except NoJob:
                # The server knew it from a job that was purged a moment ago, and stored nothing.
                await put(anew=True)
        return job_id

    async def _delay(self, when: Submission) -> float:
        delay, at = when.get("delay", 0.0), when.get("at")
        _check_seconds("delay", delay)
        if at is None:
            return delay
        if not isinstance(at, datetime):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequest(f"at={brief_repr(at)} is no datetime: {A_TIME}", started=False)
        if delay:
            raise InvalidRequest("give delay or at, not both", started=False)
        if at.tzinfo is None:
            raise InvalidRequest(f"at={at.isoformat()} has no time zone: {A_TIME}", started=False)
        left = at.timestamp() - await self.queue.now()
        if left < 0:
            raise InvalidRequest(
                f"at={at.isoformat()} was {-left:.0f} s ago by the server's clock: leave it out "
                "for a job that may begin now",
                started=False,
            )
        if left > MAX_DELAY:
            raise InvalidRequest(
                f"at={at.isoformat()} is more than {MAX_DELAY / 86_400:g} days ahead: submit the "
                "job later, or have another one submit it",
                started=False,
            )
        return left

    async def result(self, name: str, timeout: float | None = None) -> bytes:
        """Wait until a job has ended; its encoded result. See `JobHandle.result`."""
        heard = asyncio.Event()

        def hear(_: Message) -> None:
            heard.set()

        # Heard before it is stored, and also where the server then refuses it.
        subscription = self._bus.data.subscribe(self.log.end_subject(name), hear)
        try:
            with anyio.move_on_after(timeout):
                return await self._read_result(name, heard)
        finally:
            subscription.unsubscribe()
        raise DeadlineExceeded(
            f"job {JobId.of(self.endpoint, name)} has not ended within {timeout:g} s, and goes on"
        )

    async def _read_result(self, name: str, heard: asyncio.Event) -> bytes:
        pause = LOOK_PAUSE
        while True:
            is_looked_for = not heard.is_set() and pause >= LOOK_PAUSE
            if heard.is_set():
                heard.clear()
                pause = FIRST_LOOK
            try:
                if is_looked_for:
                    _, result = await self._find(name)
                else:
                    result = await self.log.result(name)
            except Unavailable as error:
                # The job goes on as soon as its server does, and so does the wait for it.
                logger.debug("job %s of %s is waited for: %s", name, self.endpoint, error)
                result, pause = None, FIRST_PAUSE
            if result is not None:
                return _unwrapped(result)
            with anyio.move_on_after(pause):
                await heard.wait()
            pause = min(2 * pause, LOOK_PAUSE)

    async def _find(self, name: str) -> tuple[list[StoredMessage], JobResult | None]:
        """The messages of a job in its queue, or its outcome.

        Raises:
            NoJob: nobody knows of it.
        """
        is_last = False
        while True:
            result = await self.log.result(name)
            queued = [] if result is not None else await self.queue.find(name)
            if result is None and not queued:
                result = await self._end_without_message(name)
            if queued or result is not None:
                return queued, result
            if is_last or not self._bus.data.has_peers:
                break
            # A server that led its cluster, and was frozen or cut off, answers as it knew.
            await anyio.sleep(OUTDATED)
            is_last = True
        raise NoJob(
            f"there is no job {JobId.of(self.endpoint, name)}: it was not submitted, or ended more "
            "than its handler's result_age ago, or its queue was purged"
        )

    async def _end_without_message(self, name: str) -> JobResult | None:
        """The outcome of a job that is not in its queue, nor known to have ended a moment ago."""
        result = await self.log.result(name)
        if result is not None:
            return result
        letter = await self._letter(name)
        if letter is not None:
            error = HandlerError(f"the job failed for good: {letter.error}")
            return JobResult.failed(error)._replace(tries=self._tries_of(letter))
        return None

    def _tries_of(self, letter: DeadLetter) -> int:
        """The last try of a job that is a dead letter; 0 for one that did not begin."""
        if letter.reason == DeathReason.REFUSED:
            return letter.tries
        if letter.reason == DeathReason.TRIES:
            # One whose taker gave no sign was handed out once more.
            return min(letter.tries, self.options.tries)
        return max(0, letter.tries - 1)

    async def _letter(self, name: str) -> DeadLetter | None:
        letters = DeadLetters(self._bus.data.jetstream, self.endpoint.namespace)
        return await letters.of_job(self.endpoint, name)

    async def state(self, name: str) -> JobState:
        """The state of a job; see `JobHandle.state`."""
        queued, result = await self._find(name)
        failures = tuple(await self.log.failures(name))
        if queued:
            tries = await self._held_in(queued)
            status = "running" if tries else "waiting"
            state, _ = await self.log.run_state(name)
            if state is not None:
                # It goes on with its try after each wait.
                tries = len(failures) + 1
            return JobState(status, tries or len(failures), failures)
        assert result is not None, "it is in its queue, or has ended"
        tries = result.tries or len(failures)
        return JobState(result.outcome.value, tries, failures, error_line(result.error))

    async def _held_in(self, queued: list[StoredMessage]) -> int:
        """The try in which a taker holds one of the messages of a job; 0 where none is known to."""
        try:
            return max([await self.queue.holding(one) for one in queued])
        except PermissionDenied:
            # What takers hold is for takers and operators.
            return 0

    async def cancel(self, name: str) -> bool:
        """Have a job end as cancelled; see `JobHandle.cancel`."""
        queued, ended = await self._find(name)
        if ended is not None:
            return False
        # Who may cancel it may not see who holds it: in which try it was is not known here.
        error = Cancelled("the job was cancelled")
        result = JobResult.failed(error, Outcome.CANCELLED)
        if not await self.log.end(name, result, self.options.result_age):
            return False
        if lane_of_subject(queued[0].subject) in ORDERED_LANES:
            # Others of its lane wait for it.
            await self._wake(name, is_ordered=True)
        self._bus.data.publish(job_cancel_subject(self.endpoint), job_token(name).encode())
        return True

    async def signal(self, name: str, signal: str, value: Any) -> None:
        """Send a signal to a job; see `JobHandle.signal`."""
        check_token("signal", signal)
        data = encode_json(value)
        room = self._bus.data.max_payload - SIGNAL_HEADERS
        if len(data) > room:
            raise PayloadTooLarge(
                f"the value of signal {signal!r} has {len(data)} bytes, and a message of the "
                f"server room for {room}: put it elsewhere, and send its name"
            )
        queued, result = await self._find(name)
        if result is not None:
            raise NoJob(
                f"the job {JobId.of(self.endpoint, name)} has ended ({result.outcome}): it takes "
                "no signal any more"
            )
        await self.log.ensure()
        await self.log.send_signal(name, signal, data)
        is_ordered = lane_of_subject(queued[0].subject) in ORDERED_LANES
        await self._wake(name, is_ordered=is_ordered)

    async def _wake(self, name: str, *, is_ordered: bool) -> None:
        """Have a job that waits outside of its process run now."""
        state, last = await self.log.run_state(name)
        if state is None or state.phase is RunPhase.RUNNING:
            return
        if is_ordered and not state.token:
            # Who gave it back looks for signals once the server has it.
            return
        # Who has woken it may not have put the copy that runs it, which is put once.
        if state.phase is RunPhase.WAITING:
            woken = msgspec.structs.replace(state, phase=RunPhase.WOKEN, token="")
            if await self.log.store_run_state(name, woken, last) is None:
                return
        if is_ordered:
            # A copy would come behind others of its key.
            await self.queue.hand_out(state.token)
            return
        queued = await self.queue.find(name)
        # A copy may wait in the place of the message that the record says.
        waiting = [one for one in queued if one.sequence == state.sequence] or queued
        if waiting:
            await self.queue.wake(waiting[0], name)


class BusJob(JobHandle[T]):
    """A job on the bus."""

    def __init__(self, queue: JobQueue, job_id: JobId, decode: Callable[[bytes], T]) -> None:
        self._queue = queue
        self._id = job_id
        # Who makes a handle has made the id, or checked it.
        self._name = job_id.split(".", 3)[3]
        self._decode = decode

    def __repr__(self) -> str:
        return f"<Job {self._id}>"

    @property
    def id(self) -> str:
        return self._id

    async def result(self, timeout: float | None = None) -> T:
        if timeout is not None:
            _check_seconds("timeout", timeout)
        data = await self._queue.result(self._name, timeout)
        try:
            return self._decode(data)
        except Misfit as error:
            raise InvalidResponse(f"{self._id}: {error}") from None

    async def state(self) -> JobState:
        return await self._queue.state(self._name)

    async def cancel(self) -> bool:
        return await self._queue.cancel(self._name)

    async def signal(self, name: str, value: Any = None, /) -> None:
        await self._queue.signal(self._name, name, value)


def error_line(error: DynbusError | None) -> str:
    """The type and text of what a try raised; empty for None."""
    if error is None or isinstance(error, HandlerError):
        return "" if error is None else error.message
    return f"{error.code}: {error.message}"


def _unwrapped(result: JobResult) -> bytes:
    error = result.error
    if error is not None:
        raise error
    return result.data


def call_headers(options: CallOptions, parent: Context | None) -> dict[str, str]:
    """The fields that a job or an event carries of the call in which it is submitted."""
    metadata, priority = inherited(options, parent)
    fields = {headers.REQUEST_ID: options.get("request_id") or (parent.id if parent else "")}
    if metadata:
        fields[headers.METADATA] = headers.encode_metadata(metadata)
    if priority:
        fields[headers.PRIORITY] = str(priority)
    return {name: value for name, value in fields.items() if value}


def _check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_DELAY:
        raise InvalidRequest(
            f"{name}={brief_repr(value)} is no number of seconds from 0 to {MAX_DELAY:.0f}",
            started=False,
        )
