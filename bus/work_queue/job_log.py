"""The log of a queue's jobs: how each ended, and what its tries have left for the next one."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Final, NamedTuple

import anyio
import msgspec

from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol import headers as header_names
from dynbus.bus.protocol.names import (
    EndpointName,
    job_log_stream,
    job_log_subject,
    job_token,
)
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.protocol.wire import Failed
from dynbus.bus.transport import (
    JetStream,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamFull,
    StreamLimits,
    WrongLastSequence,
)

logger = logging.getLogger(__name__)

END_RECORD: Final = "end"
FAILURE_RECORD: Final = "failure"
MAX_BYTES: Final = 1024 * 1024 * 1024
FIRST_PAUSE: Final = 0.1
MAX_PAUSE: Final = 5.0
"""Seconds between two tries to store how a job ended; each pause is twice the last."""
FAILURES_KEPT_FOR: Final = 7 * 24 * 3600.0
LOG_TIMEOUT: Final = 5.0


class Outcome(StrEnum):
    """How a job ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobResult(NamedTuple):
    """How a job ended.

    Attributes:
        data: its encoded result; of one that is not done its error, as `Failed` keeps it.
        at: Unix seconds by the server's clock.
    """

    outcome: Outcome
    data: bytes
    at: float = 0.0

    @classmethod
    def failed(cls, error: DynbusError, outcome: Outcome = Outcome.FAILED) -> JobResult:
        """That of a job that ended with an error."""
        return cls(outcome, msgspec.msgpack.encode(Failed.stored(error)))

    @property
    def error(self) -> DynbusError | None:
        """What the job ended with; None for one that is done."""
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
    """What became of the jobs of one queue, as the server keeps it.

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
        """Where it is stored how a job ended."""
        return self.subject(job_id, END_RECORD)

    def subject(self, job_id: str, record: str) -> str:
        """Where a record of a job is."""
        return job_log_subject(self.queue, job_token(job_id), record)

    async def result(self, job_id: str) -> JobResult | None:
        """How a job ended; None where it has not, or nobody knows it any more.

        Raises:
            Unavailable: the server does not answer.
        """
        try:
            message = await self.jetstream.last(
                self.stream, self.end_subject(job_id), timeout=LOG_TIMEOUT
            )
        except NoStream:
            return None
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
        pause = FIRST_PAUSE
        subject = self.end_subject(job_id)
        writer = random_id()
        while True:
            try:
                await self.jetstream.publish(
                    subject,
                    result.data,
                    timeout=LOG_TIMEOUT,
                    expected_last_subject_sequence=0,
                    ttl=kept_for,
                    headers={header_names.JOB_END: result.outcome, header_names.JOB_WRITER: writer},
                )
                return True
            except WrongLastSequence:
                # It may be our own, of a try that was not answered.
                return await self._is_from(writer, subject)
            except NoStream:
                await self._make_again()
            except (StreamFull, DynbusError) as error:
                if not (error.retryable or isinstance(error, StreamFull)):
                    raise
                logger.warning(
                    "how job %s of %s ended is not stored: %s", job_id, self.queue, error
                )
            await anyio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    async def _is_from(self, writer: str, subject: str) -> bool:
        stored = await self.jetstream.last(self.stream, subject, timeout=LOG_TIMEOUT)
        return stored is not None and stored.headers.get(header_names.JOB_WRITER) == writer

    async def _make_again(self) -> None:
        try:
            await self.ensure()
        except DynbusError as error:
            logger.warning("the log of %s cannot be made: %s", self.queue, error)

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
        try:
            messages = await self.jetstream.read(
                self.stream, self.subject(job_id, FAILURE_RECORD), timeout=LOG_TIMEOUT
            )
        except NoStream:
            return []
        found: list[TryFailure] = []
        for message in messages:
            try:
                found.append(msgspec.json.decode(message.data, type=TryFailure))
            except msgspec.MsgspecError as error:
                logger.warning("a failure of job %s cannot be read: %s", job_id, error)
        return found


def _result_of(message: StoredMessage) -> JobResult | None:
    try:
        outcome = Outcome(message.headers.get(header_names.JOB_END, ""))
    except ValueError:
        logger.warning("%s says of no job how it ended", message.subject)
        return None
    return JobResult(outcome, message.data, message.time)
