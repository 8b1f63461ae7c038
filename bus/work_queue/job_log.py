"""The log of a queue's jobs: how each ended, and what its tries have left for the next one.

An end is written by who runs a job (`actors/serving/job_runner.py`) or cancels it
(`actors/calling/jobs.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from enum import StrEnum
from typing import Final, NamedTuple, TypeVar

import anyio
import msgspec

from dynbus.bus.errors import DynbusError, InvalidRequest
from dynbus.bus.protocol import headers as header_names
from dynbus.bus.protocol.names import (
    SCHEDULE,
    EndpointName,
    job_log_stream,
    job_log_subject,
    job_of_record,
    job_token,
    moves_subject,
)
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.protocol.wire import Failed
from dynbus.bus.transport import (
    JetStream,
    NoStream,
    PublishOptions,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    WrongLastSequence,
)

from .job import Moves, read_moves, with_moves

logger = logging.getLogger(__name__)

T = TypeVar("T")

END_RECORD: Final = "end"
FAILURE_RECORD: Final = "failure"
CLAIM_RECORD: Final = "claim"
STEP_RECORD: Final = "log.step"
RUN_RECORD: Final = "log.run"
SIGNAL_RECORD: Final = "log.signal"
MAX_BYTES: Final = 1024 * 1024 * 1024
FIRST_PAUSE: Final = 0.1
MAX_PAUSE: Final = 5.0
"""Seconds between two tries to store how a job ended; each pause is twice the last."""
FAILURES_KEPT_FOR: Final = 7 * 24 * 3600.0
CLAIMS_KEPT_FOR: Final = 7 * 24 * 3600.0
"""Seconds: longer than a try goes on after another one has taken its job over."""
STEPS_KEPT_FOR: Final = 400 * 24 * 3600.0
"""Seconds: more than a job may be told to wait."""
LOG_TIMEOUT: Final = 5.0


class Outcome(StrEnum):
    """The outcome of a job."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobResult(NamedTuple):
    """The outcome of a job with its data.

    Attributes:
        data: its encoded result; of one that is not done its error, as `Failed` keeps it.
        at: Unix seconds by the server's clock.
        tries: the one in which it ended, from 1; 0 for one that did not begin, and where that is
            not known.
    """

    outcome: Outcome
    data: bytes
    at: float = 0.0
    tries: int = 0

    @classmethod
    def failed(cls, error: DynbusError, outcome: Outcome = Outcome.FAILED) -> JobResult:
        """That of a job that ended with an error."""
        return cls(outcome, msgspec.msgpack.encode(Failed.stored(error)))

    @property
    def error(self) -> DynbusError | None:
        """The error with which the job ended; None for one that is done."""
        if self.outcome is Outcome.DONE:
            return None
        try:
            return msgspec.msgpack.decode(self.data, type=Failed).error
        except msgspec.MsgspecError as error:
            return DynbusError(f"the job {self.outcome}, and its error cannot be read: {error}")


class TryFailure(msgspec.Struct, frozen=True):
    """A try of a job that failed, and is followed by another.

    Attributes:
        tries: which one, from 1.
        error: its type and text.
        instance: where it ran.
    """

    tries: int
    error: str
    instance: str


class RunPhase(StrEnum):
    """The phase of a job that has waited outside of its process."""

    RUNNING = "running"
    WAITING = "waiting"
    """Its message in the queue is handed out when its time has come."""
    WOKEN = "woken"
    """By a signal: it runs by another message than that."""


class RunState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a job that has waited: the message in the queue that runs it.

    Attributes:
        sequence: of the message.
        waits: how often the job has waited so: deliveries that were no failures.
        token: of a message that waits in an ordered queue: where to have it handed out at once.
        signal: the signal that it waits for outside of its process; empty for none.
        until: the time for which it waits so, in Unix seconds by the server's clock.
    """

    phase: RunPhase
    sequence: int
    waits: int
    token: str = ""
    signal: str = ""
    until: float = 0.0


def job_log_config(queue: EndpointName) -> StreamConfig:
    """The stream of the log of a queue's jobs."""
    return StreamConfig(
        job_log_stream(queue),
        (job_log_subject(queue, "*"),),
        # What is there is what jobs go on with: it is never dropped for new records.
        StreamLimits(max_bytes=MAX_BYTES, discard_new=True),
        marker_ttl=0.0,
        description="dynbus: what became of jobs",
    )


class JobLog:
    """The server's log of the jobs of one queue.

    Args:
        replicas: as in `StreamConfig`.
    """

    def __init__(
        self, jetstream: JetStream, queue: EndpointName, replicas: int | None = None
    ) -> None:
        self.queue = queue
        self.stream = job_log_stream(queue)
        self.jetstream = jetstream
        self._replicas = replicas

    def __repr__(self) -> str:
        return f"<JobLog {self.queue}>"

    async def ensure(self) -> None:
        """Make the stream where it is missing.

        Raises:
            ConfigError, PermissionDenied, NoRoom, Unavailable: as of `JetStream.ensure_stream`.
        """
        config = job_log_config(self.queue)._replace(replicas=self._replicas)
        await self.jetstream.ensure_stream(config)

    def end_subject(self, job_id: str) -> str:
        """The subject where the outcome of a job is stored."""
        return self.subject(job_id, END_RECORD)

    def subject(self, job_id: str, record: str) -> str:
        """The subject of a record of a job."""
        return job_log_subject(self.queue, job_token(job_id), record)

    async def knows(self, job_id: str) -> bool:
        """True if there is any record of a job.

        Raises:
            Unavailable: the server does not answer.
        """
        return await self._last_message(job_id, ">") is not None

    async def known(self, job_ids: Collection[str]) -> set[str]:
        """Those of some jobs of which there is any record, in one question.

        Any replica answers: where there are several, `knows` has the leader's word.

        Raises:
            Unavailable: the server does not answer, or finds more than 1,024 records.
        """
        by_token = {job_token(one): one for one in job_ids}
        subjects = [self.subject(one, ">") for one in job_ids]
        try:
            records = await self.jetstream.read_last(self.stream, subjects, timeout=LOG_TIMEOUT)
        except NoStream:
            return set()
        return {by_token[job_of_record(record.subject)] for record in records}

    async def result(self, job_id: str) -> JobResult | None:
        """The outcome of a job; None where it has not ended, or nobody knows it any more.

        Raises:
            Unavailable: the server does not answer.
        """
        message = await self._last_message(job_id, END_RECORD)
        return None if message is None or message.is_marker else _result_of(message)

    async def end(self, job_id: str, result: JobResult, kept_for: float) -> bool:
        """Store how a job ended; False where it had ended before, which stays so.

        Tries until the server has stored it, or the caller is cancelled: a job that is not known to
        have ended would run again.

        Args:
            kept_for: whole seconds for which it is kept.

        Raises:
            PayloadTooLarge: the result does not fit into a message.
        """
        fields = {header_names.JOB_END: str(result.outcome)}
        if result.tries:
            fields[header_names.JOB_TRIES] = str(result.tries)
        subject = self.end_subject(job_id)
        options = PublishOptions(expected_last_subject_sequence=0, ttl=kept_for, headers=fields)
        return await self._store(subject, result.data, options)

    async def claim(self, job_id: str) -> int:
        """Take the steps of a job over: the tries before store none from now on. The claim, which
        `store_step` wants.

        Tries until the server has stored it, or the caller is cancelled.
        """
        subject = self.subject(job_id, CLAIM_RECORD)

        async def store() -> int:
            while True:
                last = await self._last_message(job_id, CLAIM_RECORD)
                with suppress(WrongLastSequence):
                    return await self.jetstream.publish(
                        subject,
                        b"",
                        timeout=LOG_TIMEOUT,
                        expected_last_subject_sequence=0 if last is None else last.sequence,
                        ttl=CLAIMS_KEPT_FOR,
                    )

        return await self._until_stored(subject, store)

    async def store_step(self, job_id: str, number: int, data: bytes, claim: int) -> bool:
        """Store what a step gave, as `end` does; False where another try has claimed the job.

        Args:
            claim: of this try; 0 for the first one, which needs none.

        Raises:
            PayloadTooLarge: it does not fit into a message.
        """
        options = PublishOptions(
            expected_last_subject_sequence=claim,
            expected_subject=self.subject(job_id, CLAIM_RECORD),
            ttl=STEPS_KEPT_FOR,
        )
        return await self._store(self.subject(job_id, f"{STEP_RECORD}.{number}"), data, options)

    async def _store(self, subject: str, data: bytes, options: PublishOptions) -> bool:
        writer = random_id()
        fields = {**(options.get("headers") or {}), header_names.JOB_WRITER: writer}
        options = {**options, "headers": fields}
        return await self._until_stored(
            subject, lambda: self._store_once(subject, data, options, writer)
        )

    async def _until_stored(self, subject: str, store: Callable[[], Awaitable[T]]) -> T:
        """Call `store()` until the server answers; what it gave."""
        pause = FIRST_PAUSE
        while True:
            try:
                return await store()
            except NoStream:
                await self._make_again()
            except DynbusError as error:
                if not error.retryable:
                    raise
                logger.warning("%s is not stored yet: %s", subject, error)
            await anyio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    async def _store_once(
        self, subject: str, data: bytes, options: PublishOptions, writer: str
    ) -> bool:
        try:
            await self.jetstream.publish(subject, data, timeout=LOG_TIMEOUT, **options)
        except WrongLastSequence:
            # It may be our own, of a try that was not answered.
            stored = await self.jetstream.last(self.stream, subject, timeout=LOG_TIMEOUT)
            return stored is not None and stored.headers.get(header_names.JOB_WRITER) == writer
        return True

    async def _make_again(self) -> None:
        try:
            await self.ensure()
        except DynbusError as error:
            logger.warning("the log of %s cannot be made: %s", self.queue, error)

    async def steps(self, job_id: str) -> dict[int, bytes]:
        """The results of the finished steps of a job, by their numbers.

        Raises:
            Unavailable: the server does not answer.
        """
        messages = await self._read(job_id, f"{STEP_RECORD}.*")
        return {int(one.subject.rpartition(".")[2]): one.data for one in messages}

    async def step(self, job_id: str, number: int) -> bytes | None:
        """The result of a finished step of a job, as the leader of the log says; None where it has
        not finished.

        Raises:
            Unavailable: the server does not answer.
        """
        return await self._last(job_id, f"{STEP_RECORD}.{number}")

    async def run_state(self, job_id: str) -> tuple[RunState | None, int]:
        """The run state of a job that has waited, and the sequence of its record; None and 0 for
        any other.

        Raises:
            InvalidRequest: the record cannot be read.
            Unavailable: the server does not answer.
        """
        message = await self._last_message(job_id, RUN_RECORD)
        if message is None:
            return None, 0
        try:
            return msgspec.json.decode(message.data, type=RunState), message.sequence
        except msgspec.MsgspecError as error:
            raise InvalidRequest(
                f"the run state of job {job_id} of {self.queue} cannot be read: {error}"
            ) from None

    async def has_begun(self, job_id: str) -> bool:
        """True if a job has waited, finished a step, or failed in a try.

        Raises:
            Unavailable: the server does not answer.
        """
        state, _ = await self.run_state(job_id)
        return state is not None or bool(await self.steps(job_id) or await self.failures(job_id))

    async def _last(self, job_id: str, record: str) -> bytes | None:
        message = await self._last_message(job_id, record)
        return None if message is None else message.data

    async def _last_message(self, job_id: str, record: str) -> StoredMessage | None:
        try:
            subject = self.subject(job_id, record)
            return await self.jetstream.last(self.stream, subject, timeout=LOG_TIMEOUT)
        except NoStream:
            return None

    async def store_run_state(self, job_id: str, state: RunState, last: int) -> int | None:
        """Store who runs a job where the last record has this sequence, 0 for none; the
        sequence of the new one, None where the last one has another.

        Raises:
            Unavailable: the server does not answer; it may be stored.
        """
        try:
            return await self.jetstream.publish(
                self.subject(job_id, RUN_RECORD),
                msgspec.json.encode(state),
                timeout=LOG_TIMEOUT,
                expected_last_subject_sequence=last,
                ttl=STEPS_KEPT_FOR,
            )
        except WrongLastSequence:
            return None

    def signal_subject(self, job_id: str, name: str) -> str:
        """The subject where the signals of a name for a job are stored."""
        return self.subject(job_id, f"{SIGNAL_RECORD}.{name}")

    async def signals(self, job_id: str, name: str) -> list[StoredMessage]:
        """The signals of a name that a job was sent, oldest first.

        Raises:
            Unavailable: the server does not answer.
        """
        return await self._read(job_id, f"{SIGNAL_RECORD}.{name}")

    async def last_firing(self) -> tuple[float, int]:
        """The last time for which a scheduled handler was submitted, in Unix seconds, and the
        sequence of the record that says so; zeros where there is none. Of a record that cannot be
        read it is the time at which that was stored.

        Raises:
            Unavailable: the server does not answer.
        """
        try:
            message = await self.jetstream.last(
                self.stream, self._firing_subject, timeout=LOG_TIMEOUT
            )
        except NoStream:
            return 0.0, 0
        if message is None:
            return 0.0, 0
        try:
            return msgspec.json.decode(message.data, type=float), message.sequence
        except msgspec.MsgspecError as error:
            # Who may ask the server something may have its answer stored here.
            logger.warning("the last firing of %s cannot be read: %s", self.queue, error)
            return message.time, message.sequence

    async def store_firing(self, due: float, last: int) -> int:
        """Store that time where the last record has this sequence, 0 for none; the sequence of the
        new one, 0 where another process has stored one.

        Raises:
            Unavailable: the server does not answer; it may be stored.
        """
        try:
            stored = await self.jetstream.publish(
                self._firing_subject,
                msgspec.json.encode(due),
                timeout=LOG_TIMEOUT,
                expected_last_subject_sequence=last,
            )
        except WrongLastSequence:
            return 0
        if last:
            await self._forget_firings(last)
        return stored

    async def adopt_firing(self, record: bytes) -> None:
        """Store the last firing of another region, unless the handler was submitted here: what was
        missed since is made up where it is to be.

        Raises:
            Unavailable: the server does not answer; it may be stored.
        """
        with suppress(WrongLastSequence):
            await self.jetstream.publish(
                self._firing_subject, record, timeout=LOG_TIMEOUT, expected_last_subject_sequence=0
            )

    async def _forget_firings(self, up_to: int) -> None:
        """Drop the records of earlier firings: in years they would fill the log."""
        try:
            await self.jetstream.purge(self.stream, self._firing_subject, up_to=up_to)
        except DynbusError as error:
            # The next firing drops them.
            logger.debug("earlier firings of %s stay: %s", self.queue, error)

    @property
    def _firing_subject(self) -> str:
        return job_log_subject(self.queue, SCHEDULE, "last")

    async def moves(self, region: str) -> list[Moves]:
        """The jobs of a region that are done here in its place, or were purged there.

        Raises:
            InvalidRequest: what says so cannot be read.
            Unavailable: the server does not answer.
        """
        return (await self._moves(region))[0]

    async def _moves(self, region: str) -> tuple[list[Moves], int]:
        try:
            subject = moves_subject(self.queue, region)
            message = await self.jetstream.last(self.stream, subject, timeout=LOG_TIMEOUT)
        except NoStream:
            return [], 0
        if message is None:
            return [], 0
        return read_moves(message.data), message.sequence

    async def note_moves(self, region: str, moves: Moves) -> None:
        """Store which jobs of a region are done here from now on, or were purged there.

        Raises:
            InvalidRequest: what says so until now cannot be read.
            NoStream: there is no log.
            Unavailable: the server does not answer; it may be stored.
        """
        while True:
            known, last = await self._moves(region)
            if (all_of := with_moves(known, moves)) == known:
                return
            with suppress(WrongLastSequence):
                await self.jetstream.publish(
                    moves_subject(self.queue, region),
                    msgspec.json.encode(all_of),
                    timeout=LOG_TIMEOUT,
                    expected_last_subject_sequence=last,
                )
                return

    async def last_signal(self, job_id: str, name: str) -> int:
        """The sequence of the last signal of a name that a job was sent, as the leader of the log
        says; 0 for none.

        Raises:
            Unavailable: the server does not answer.
        """
        message = await self._last_message(job_id, f"{SIGNAL_RECORD}.{name}")
        return 0 if message is None else message.sequence

    async def send_signal(self, job_id: str, name: str, data: bytes) -> None:
        """Store a signal for a job.

        Raises:
            NoStream: there is no log.
            Unavailable: the server does not answer; it may be stored.
        """
        subject = self.signal_subject(job_id, name)
        await self.jetstream.publish(
            subject, data, message_id=random_id(), ttl=STEPS_KEPT_FOR, timeout=LOG_TIMEOUT
        )

    async def forget_steps(self, job_id: str, *, up_to: int = 0) -> None:
        """Drop what the tries of a job have left for the next one: it has ended.

        Args:
            up_to: the last sequence that is dropped; 0 for no such limit.
        """
        try:
            await self.jetstream.purge(self.stream, self.subject(job_id, "log.>"), up_to=up_to)
        except DynbusError as error:
            # They expire; nothing reads them before.
            logger.debug("the steps of job %s of %s stay: %s", job_id, self.queue, error)

    async def _read(self, job_id: str, record: str) -> list[StoredMessage]:
        try:
            subject = self.subject(job_id, record)
            return await self.jetstream.read(self.stream, subject, timeout=LOG_TIMEOUT)
        except NoStream:
            return []

    async def note_failure(self, job_id: str, failure: TryFailure) -> None:
        """Keep why a try failed; where that cannot be stored it is logged."""
        try:
            await self.jetstream.publish(
                self.subject(job_id, FAILURE_RECORD),
                msgspec.json.encode(failure),
                timeout=LOG_TIMEOUT,
                ttl=FAILURES_KEPT_FOR,
            )
        except DynbusError as error:
            logger.warning("why job %s of %s failed is not stored: %s", job_id, self.queue, error)

    async def failures(self, job_id: str) -> list[TryFailure]:
        """The tries of a job that failed and were followed by another, oldest first.

        Raises:
            Unavailable: the server does not answer.
        """
        failures: list[TryFailure] = []
        for message in await self._read(job_id, FAILURE_RECORD):
            try:
                failures.append(msgspec.json.decode(message.data, type=TryFailure))
            except msgspec.MsgspecError as error:
                logger.warning("a failure of job %s cannot be read: %s", job_id, error)
        return failures


def _result_of(message: StoredMessage) -> JobResult | None:
    try:
        outcome = Outcome(message.headers.get(header_names.JOB_END, ""))
    except ValueError:
        logger.warning("%s says of no job how it ended", message.subject)
        return None
    tries = message.headers.get(header_names.JOB_TRIES, "")
    known = int(tries) if re.fullmatch("[0-9]{1,9}", tries) else 0
    return JobResult(outcome, message.data, message.time, known)
