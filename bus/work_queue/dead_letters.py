"""Jobs that nobody could do: kept with the reason, to be looked at, put back or discarded.

Their stream is made by the first taker, or by `dynbus setup` (`bus/commands/needed.py`); one that
is there is left as it is.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from dynbus.bus.errors import ConfigError, DynbusError, PayloadTooLarge
from dynbus.bus.protocol import headers as header_names
from dynbus.bus.protocol.names import (
    EndpointName,
    check_token,
    dead_letter_stream,
    dead_letter_subject,
    group_at,
    is_lane,
    job_log_stream,
    job_log_subject,
    job_token,
    topic_stream,
    work_subject,
)
from dynbus.bus.transport import (
    JetStream,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamFull,
    StreamLimits,
    SubjectTaken,
)

from .job import DeathReason, error_text, is_reserved, put_at
from .job_log import END_RECORD, FAILURE_RECORD, Outcome

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 256 * 1024 * 1024
MAX_AGE: Final = 14 * 24 * 3600.0
READ_TIMEOUT: Final = 10.0

_LETTER_ID = re.compile(r"[0-9a-f]{16}")


class NoDeadLetter(DynbusError):
    """Raised when there is no dead letter of an id."""

    code = "NoDeadLetter"


class DeadLetter(NamedTuple):
    """A job that was given up.

    Attributes:
        letter_id: 16 hexadecimal digits; the same for the same job of the same queue.
        queue: where the job was.
        error: the last one that is known.
        tries: how often the job was handed out.
        queued_at, died_at: Unix seconds by the server's clock.
        headers, data: as the job was put; empty where they were too many bytes to keep.
        sequence: of the stream of dead letters.
        lost_bytes: of headers and data, which were too many to keep.
        lane: of the queue.
        group: the subject of the group of a topic whose event it is; empty for a job.
    """

    letter_id: str
    queue: EndpointName
    job_id: str
    reason: str
    error: str
    tries: int
    queued_at: float
    died_at: float
    headers: Mapping[str, str]
    data: bytes
    sequence: int
    lost_bytes: int = 0
    lane: str = "normal"
    group: str = ""


def letter_id_of(queue: EndpointName, job_id: str) -> str:
    """The id of the letter that a job becomes."""
    return hashlib.blake2s(f"{queue} {job_id}".encode(), digest_size=8).hexdigest()


def dead_letter_config(namespace: str) -> StreamConfig:
    """The stream of the dead letters of a namespace."""
    limits = StreamLimits(max_bytes=MAX_BYTES, max_age=MAX_AGE, max_messages_per_subject=1)
    return StreamConfig(
        dead_letter_stream(namespace),
        (dead_letter_subject(namespace),),
        limits,
        description="dynbus: jobs that failed for good",
    )


class DeadLetters:
    """The dead letters of a namespace, of all its queues. The newest 256 MiB are kept, for 14 days.

    Args:
        replicas: as in `StreamConfig`.
    """

    def __init__(self, jetstream: JetStream, namespace: str, replicas: int | None = None) -> None:
        self.namespace = check_token("namespace", namespace)
        self._jetstream = jetstream
        self._stream = dead_letter_stream(namespace)
        self._replicas = replicas
        self._is_checked = False

    def __repr__(self) -> str:
        return f"<DeadLetters {self.namespace}>"

    async def put(
        self,
        queue: EndpointName,
        job_id: str,
        message: StoredMessage,
        reason: DeathReason,
        error: BaseException | str,
        tries: int,
        *,
        lane: str,
        group: str = "",
    ) -> None:
        """Keep a job; on return the server has stored it. Its last letter takes the place of an
        earlier one.

        Args:
            lane: of the job in its queue.
            group: the subject below which a group of a topic gets it again; empty for a job.

        Raises:
            Unavailable: the server did not confirm it in time.
        """
        own = header_names.carried(
            {name: value for name, value in message.headers.items() if not is_reserved(name)}
        )
        fields = {
            **own,
            header_names.JOB: error_text(job_id),
            header_names.DEAD_REASON: reason,
            header_names.DEAD_ERROR: error_text(error),
            header_names.DEAD_TRIES: str(tries),
            header_names.DEAD_QUEUED: str(int(put_at(message) * 1000)),
            header_names.DEAD_LANE: lane,
            header_names.DEAD_GROUP: group,
        }
        subject = dead_letter_subject(*queue, letter_id_of(queue, job_id))
        try:
            await self._store(subject, message.data, fields)
        except PayloadTooLarge:
            # Plain NATS clients may leave no room for what a letter says beside its job.
            size = len(message.data) + sum(len(name) + len(own[name]) for name in own)
            fields[header_names.DEAD_ERROR] = error_text(
                f"(its {size} bytes were too many to keep) {error_text(error)}"
            )
            fields[header_names.DEAD_LOST] = str(size)
            await self._store(subject, b"", {**fields, **dict.fromkeys(own, "")})

    async def _store(self, subject: str, data: bytes, fields: Mapping[str, str]) -> None:
        fields = {name: value for name, value in fields.items() if value}
        if not self._is_checked:
            # One that is there may be another one than is needed, which shows jobs to others.
            await self._make()
            self._is_checked = True
        try:
            await self._jetstream.publish(subject, data, headers=fields)
        except NoStream:
            await self._make()
            await self._jetstream.publish(subject, data, headers=fields)

    async def _make(self) -> None:
        config = dead_letter_config(self.namespace)._replace(replicas=self._replicas)
        await self._jetstream.ensure_stream(config)

    async def find(self, component: str = "*", endpoint: str = "*") -> list[DeadLetter]:
        """All letters, or those of a component or of one queue, oldest first."""
        subject = dead_letter_subject(self.namespace, component, endpoint)
        return await self._read(subject)

    async def get(self, letter_id: str) -> DeadLetter:
        """One letter.

        Raises:
            NoDeadLetter: there is none of this id.
        """
        if _LETTER_ID.fullmatch(letter_id):
            letters = await self._read(dead_letter_subject(self.namespace, letter=letter_id))
            if letters:
                return letters[-1]
        raise NoDeadLetter(
            f"{letter_id!r} is no dead letter of {self.namespace}: dynbus queue dead "
            f"{self.namespace} names them"
        )

    async def of_job(self, queue: EndpointName, job_id: str) -> DeadLetter | None:
        """The letter of a job; None for one that is none. It takes the right to read those of its
        queue alone."""
        subject = dead_letter_subject(*queue, letter_id_of(queue, job_id))
        try:
            # The leader says whether there is a stream; what it holds, any replica.
            await self._jetstream.stream_info(self._stream)
            message = await self._jetstream.read_one(self._stream, subject, timeout=READ_TIMEOUT)
        except NoStream:
            return None
        return None if message is None else _letter(message)

    async def redrive(self, letter: DeadLetter) -> None:
        """Put the job into its queue again, without its deadline and with all its tries, and
        discard the letter. In an ordered queue it comes behind those that are there.

        Raises:
            PayloadTooLarge: the letter has not what the job says; it stays.
            ConfigError: it is one of a group that its handler is not in, or has what no header can
                carry; it stays.
            Unavailable: the queue does not exist, or the server does not answer; the letter stays.
            StreamFull: the queue is full; the letter stays.
        """
        if letter.lost_bytes:
            raise PayloadTooLarge(
                f"the dead letter {letter.letter_id} has nothing of job {letter.job_id}: its "
                f"{letter.lost_bytes} bytes were too many to keep; put the job again from where it "
                "came, and discard the letter"
            )
        if letter.group:
            await self._check_group(letter)
        fields = {**letter.headers, header_names.JOB: letter.job_id}
        # Nothing is dropped for a letter that cannot be put.
        header_names.encode(fields)
        # A copy: its taker looks for what the job has done before, the other groups of a topic do
        # not get it, and no earlier message of the job is in its way.
        copy = f"{job_token(letter.job_id)}.{letter.sequence}"
        subject = work_subject(letter.queue, copy, letter.lane)
        if letter.group:
            subject = f"{letter.group}.{copy}"
        if await self._forget_tries(letter):
            await self._put_copy(letter, subject, fields)
        await self.discard(letter)

    async def _put_copy(self, letter: DeadLetter, subject: str, fields: Mapping[str, str]) -> None:
        try:
            await self._jetstream.publish(
                subject,
                letter.data,
                # Of the letter: a process that tries twice puts it once, and its first put is not
                # in the way.
                message_id=f"{letter.letter_id} {letter.sequence}",
                headers=fields,
            )
        except SubjectTaken:
            logger.info("job %s is in the queue %s already", letter.job_id, letter.queue)
        except StreamFull:
            raise StreamFull(f"the queue {letter.queue} is full: try again later") from None

    async def _check_group(self, letter: DeadLetter) -> None:
        """Refuse a letter that would give its own event to a group of others: who takes the jobs of
        one queue writes its letters as it likes, and who redrives them may publish anywhere.

        Raises:
            ConfigError: the handler of the letter is not in the group, or not alone.
        """
        at = group_at(letter.group)
        stream = "" if at is None else topic_stream(at.namespace, at.topic)
        names = () if at is None else (at.group, f"{at.group}+{at.lane}")
        handlers: dict[str, str] = {}
        for name in names:
            with suppress(NoStream):
                handlers[name] = (await self._jetstream.consumer_info(stream, name)).description
        own = str(letter.queue)
        if set(handlers.values()) == {own}:
            return
        others = [name for name, handler in handlers.items() if handler != own]
        if len(others) < len(handlers):
            # A user may make a consumer of its own that is called as one more of the group.
            raise ConfigError(
                f"the dead letter {letter.letter_id} is of {own}, and so is one of the consumers "
                f"of its group {letter.group}; {stream} has {others[0]}, too, which is not: delete "
                "the one that is none of the group's"
            )
        raise ConfigError(
            f"the dead letter {letter.letter_id} is of {own}, which is not in the group that it "
            f"names, {letter.group}: discard it"
        )

    async def _forget_tries(self, letter: DeadLetter) -> bool:
        """Drop the records of how the job and its tries ended: it has not, and has all of them.

        Returns:
            False for a job that was redriven before, without an answer, and is done by now.
        """
        log, token = job_log_stream(letter.queue), job_token(letter.job_id)
        ends = job_log_subject(letter.queue, token, END_RECORD)
        with suppress(NoStream):
            end = await self._jetstream.last(log, ends)
            if end is not None and not end.is_marker:
                if end.headers.get(header_names.JOB_END) != Outcome.FAILED:
                    return False
                await self._jetstream.purge(log, ends, up_to=end.sequence)
            await self._jetstream.purge(log, job_log_subject(letter.queue, token, FAILURE_RECORD))
        return True

    async def discard(self, letter: DeadLetter) -> None:
        """Discard a letter; one that is gone is no error, and a later one of the same job stays."""
        subject = dead_letter_subject(*letter.queue, letter.letter_id)
        await self._jetstream.purge(self._stream, subject, up_to=letter.sequence)

    async def _read(self, subject: str) -> list[DeadLetter]:
        try:
            # Told by any replica, and an empty list where there is no stream at all.
            await self._jetstream.stream_info(self._stream)
            messages = await self._jetstream.read(self._stream, subject, timeout=READ_TIMEOUT)
        except NoStream:
            return []
        return [letter for message in messages if (letter := _letter(message)) is not None]


def _letter(message: StoredMessage) -> DeadLetter | None:
    tokens = message.subject.split(".")
    if len(tokens) != 5 or not _LETTER_ID.fullmatch(tokens[4]):
        return None
    namespace, component, _, endpoint, letter_id = tokens
    fields = message.headers
    lane = fields.get(header_names.DEAD_LANE, "")
    group = fields.get(header_names.DEAD_GROUP, "")
    return DeadLetter(
        letter_id,
        EndpointName(namespace, component, endpoint),
        fields.get(header_names.JOB, ""),
        fields.get(header_names.DEAD_REASON, ""),
        fields.get(header_names.DEAD_ERROR, ""),
        _number(fields.get(header_names.DEAD_TRIES)),
        _number(fields.get(header_names.DEAD_QUEUED)) / 1000,
        message.time,
        {name: value for name, value in fields.items() if not is_reserved(name)},
        message.data,
        message.sequence,
        _number(fields.get(header_names.DEAD_LOST)),
        lane if is_lane(lane) else "normal",
        # Letters are written with others' rights.
        group if group_at(group) is not None else "",
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and re.fullmatch("[0-9]{1,15}", text) else 0
