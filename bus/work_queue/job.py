"""A job of a work queue, and the decision about its next try. No I/O, no clock."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from dynbus.bus.errors import ConfigError, InvalidRequest, describe_exception
from dynbus.bus.protocol import headers as header_names
from dynbus.bus.protocol.cancellation import Tombstones
from dynbus.bus.protocol.names import job_of_subject
from dynbus.bus.transport import Delivery, StoredMessage

MAX_ERROR_TEXT: Final = 1024
MAX_RETRY_DELAY: Final = 60.0
MIN_ACK_WAIT: Final = 0.2
ROUNDED: Final = 0.001
"""Seconds by which times of the server may be told differently, by a stream and by a consumer."""
LEAST_WAIT: Final = 0.001
"""Seconds before its time from which on a job may begin: times of jobs are in milliseconds."""

COPIED_BY: Final = "dynbus.copied-by."
"""Names in the metadata of a queue's stream: each with a region behind it that copies the queue."""

_KEPT_BY_COPIES: Final = (header_names.DEADLINE, header_names.JOB_BEGINS)
_JOB_ID = re.compile(r"[!-~]{1,128}")
_RESERVED: Final = ("nats-", "dynbus-job", "dynbus-dead", "dynbus-deadline")
_MILLISECONDS = re.compile(r"[0-9]{1,15}")
_NOT_PRINTABLE = re.compile(r"[^ -~]")


class JobEnd(StrEnum):
    """The way in which a job left its taker."""

    DONE = "done"
    """Acknowledged, and the server has confirmed it."""
    RETRIED = "retried"
    """Given back after a failure, to be tried again."""
    RETURNED = "returned"
    """Given back by a taker that was leaving; nothing was wrong with it."""
    EXPIRED = "expired"
    """Dropped because its deadline had passed before it was begun."""
    CANCELLED = "cancelled"
    """Dropped before it was begun, because an operator had cancelled it."""
    DEAD = "dead"
    """Put among the dead letters."""
    MOVED = "moved"
    """Dropped, because another region had taken it over."""


class DeathReason(StrEnum):
    """The reason for which a job is a dead letter."""

    TRIES = "tries"
    """It failed, or its taker went silent, as often as it may be tried."""
    REFUSED = "refused"
    """A taker said that trying again is of no use."""
    MALFORMED = "malformed"
    """Its headers cannot be read, or it is an answer of the server."""
    AGE = "age"
    """It waited for longer than `max_age`."""


class QueueDepth(NamedTuple):
    """The number of jobs in a queue.

    Attributes:
        waiting: of nobody yet.
        held: with a taker, or given back and waiting to be tried again.
    """

    waiting: int
    held: int

    @property
    def jobs(self) -> int:
        """Both."""
        return self.waiting + self.held


class Moves(msgspec.Struct, frozen=True, omit_defaults=True):
    """The jobs of a region that another one does: those of a range of its queue.

    Attributes:
        up_to: the last sequence of the range.
        at: a time in Unix seconds by the clock of that queue's server, before which all of these
            were stored. A queue that was made again has later jobs under the same sequences.
        after: the sequence before the first: of what came before, the copies had nothing any more.
        left: sequences in the range of messages that are not among them.
        is_put: whether all of them are in the queue of the other region. Before that they are done
            nowhere, until it has put them.
    """

    up_to: int
    at: float
    after: int = 0
    left: tuple[int, ...] = ()
    is_put: bool = True

    def have(self, message: StoredMessage) -> bool:
        """True if a message of that queue is of one of these jobs, or of one that had ended."""
        return self._has(message.sequence) and message.time <= self.at + ROUNDED

    def _has(self, sequence: int) -> bool:
        return self.after < sequence <= self.up_to and sequence not in self.left

    def covers(self, other: Moves) -> bool:
        """True if nothing is lost where this takes the place of another one."""
        return (
            self.after <= other.after
            and other.up_to <= self.up_to
            and other.at <= self.at
            and set(self.left) <= set(other.left)
            and self.is_put >= other.is_put
        )

    def joined(self, other: Moves) -> Moves | None:
        """The range of this one and of a later one that goes on where it ends; None where it does
        not, or one of them is not put.
        """
        follows = self.after <= other.after <= self.up_to <= other.up_to and self.at <= other.at
        if not (follows and self.is_put and other.is_put):
            return None
        left = (one for one in (*self.left, *other.left) if not self._has(one))
        return Moves(
            other.up_to, other.at, self.after, tuple(one for one in left if not other._has(one))
        )


def with_moves(known: Sequence[Moves], new: Moves) -> list[Moves]:
    """The ranges of a region with a further one, the latest last."""
    if any(one.covers(new) for one in known):
        return list(known)
    kept = [one for one in known if not new.covers(one)]
    if kept and (joined := kept[-1].joined(new)) is not None:
        return [*kept[:-1], joined]
    return [*kept, new]


def read_moves(data: bytes) -> list[Moves]:
    """The ranges in a record.

    Raises:
        InvalidRequest: it cannot be read.
    """
    try:
        return msgspec.json.decode(data, type=list[Moves])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"a record of jobs that were moved cannot be read: {error}") from None


class WorkQueueConfig(NamedTuple):
    """The settings of a work queue. The process that makes the queue decides; `tries`,
    `retry_delay` and `max_age` are each taker's own.

    Attributes:
        ack_wait: seconds after which a job goes to another taker when its own gives no sign.
        tries: how often a job is handed out before it is a dead letter.
        retry_delay: seconds before a job that failed is tried again; doubled for each failure.
        max_jobs: a put beyond that raises `Overloaded`.
        max_bytes: of all jobs, likewise.
        max_age: seconds after which a job is not begun any more: its taker makes it a dead letter.
            None, the default, for no limit.
        in_memory: lost when the server restarts.
        replicas: how many servers of a cluster keep it at most; None for the `replicas` of the bus.
        ordered: whether jobs that were put with the same `key` are done in order, one at a time.
            Keys share 16 lanes: a job that is to be tried again has its lane wait.
    """

    ack_wait: float = 30.0
    tries: int = 5
    retry_delay: float = 0.5
    max_jobs: int = 10_000
    max_bytes: int = 256 * 1024 * 1024
    max_age: float | None = None
    in_memory: bool = False
    replicas: int | None = None
    ordered: bool = False

    def check(self) -> WorkQueueConfig:
        """Return it when it is usable.

        Raises:
            ConfigError: it is not.
        """
        if not MIN_ACK_WAIT <= self.ack_wait <= 24 * 3600.0:
            raise ConfigError(
                f"ack_wait = {self.ack_wait} is not usable: give {MIN_ACK_WAIT} to 86400 seconds"
            )
        if self.tries < 1:
            raise ConfigError(f"tries = {self.tries} is not usable: give 1 or more")
        if not 0 <= self.retry_delay <= MAX_RETRY_DELAY:
            raise ConfigError(
                f"retry_delay = {self.retry_delay} is not usable: give 0 to {MAX_RETRY_DELAY:g} "
                "seconds"
            )
        for name in ("max_jobs", "max_bytes", "replicas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value} is not usable: give 1 or more")
        if self.max_age is not None and not self.max_age >= 1.0:
            raise ConfigError(
                f"max_age = {self.max_age} is not usable: give 1 second or more, or None for jobs "
                "that stay until they are done"
            )
        return self

    def delay_after(self, tries: int) -> float:
        """Seconds before a job is tried again that has failed `tries` times."""
        return min(self.retry_delay * 2.0 ** min(tries - 1, 30), MAX_RETRY_DELAY)


class Facts(NamedTuple):
    """The facts about a job that its delivery has.

    Attributes:
        headers: those that were put with it, and no others.
        deadline: on the own monotonic clock; None without one.
    """

    job_id: str
    headers: Mapping[str, str]
    deadline: float | None


class Disposition(NamedTuple):
    """The decision on a delivery: begin it where both are None.

    Attributes:
        end: DEAD, EXPIRED, CANCELLED or MOVED.
        reason: of a dead letter.
        error: of a dead letter.
    """

    facts: Facts
    end: JobEnd | None = None
    reason: DeathReason | None = None
    error: str = ""


def job_headers(job_id: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of a job, beside the id by which the server knows a repeat, and its deadline.

    Raises:
        ConfigError: the id is not 1 to 128 printable ASCII characters without spaces, or a header's
            name is reserved.
    """
    if not is_job_id(job_id):
        raise ConfigError(
            f"job id {job_id!r} is not usable: give 1 to 128 printable ASCII characters without "
            "spaces"
        )
    for name in headers or ():
        if is_reserved(name):
            raise ConfigError(f"header {name!r} is not usable: the queue has its own")
    return {**(headers or {}), header_names.JOB: job_id}


def copy_headers(message: StoredMessage, job_id: str, age: float) -> dict[str, str]:
    """The headers of a message that goes on in the place of another one of a job.

    Args:
        age: seconds since the job was put: what counts from then goes on counting.
    """
    own = {
        name: value
        for name, value in message.headers.items()
        if not is_reserved(name) or name in _KEPT_BY_COPIES
    }
    fields = header_names.carried(own)
    fields[header_names.JOB] = job_id
    fields[header_names.JOB_AGE] = milliseconds(age)
    return fields


def copying_regions(metadata: Iterable[tuple[str, str]]) -> list[str]:
    """The regions that copy a queue, as the metadata of its stream say."""
    return sorted(
        name.removeprefix(COPIED_BY) for name, _ in metadata if name.startswith(COPIED_BY)
    )


def goes_on(message: StoredMessage) -> bool:
    """True if a message goes on in the place of another one of its job, here or elsewhere."""
    return header_names.JOB_AGE in message.headers


def milliseconds(seconds: float) -> str:
    """A duration as a header tells it."""
    return str(max(0, math.ceil(seconds * 1000)))


def put_at(message: StoredMessage) -> float:
    """The time at which a job was put, in Unix seconds by the server; of a copy, its first put."""
    text = message.headers.get(header_names.JOB_AGE, "")
    return message.time - (int(text) / 1000 if _MILLISECONDS.fullmatch(text) else 0.0)


def job_id_of(message: StoredMessage, default: str = "") -> str:
    """The id of the job in a message of a queue: a plain NATS client may put jobs without one.

    Args:
        default: of such a job; that of its subject unless given.
    """
    fields = message.headers
    named = fields.get(header_names.JOB) or fields.get(header_names.MESSAGE_ID)
    return named or default or job_of_subject(message.subject)


def is_job_id(text: str) -> bool:
    """True if a job may have this id."""
    return _JOB_ID.fullmatch(text) is not None


def is_reserved(name: str) -> bool:
    """True if a header is the server's or the queue's own."""
    return name.lower().startswith(_RESERVED)


def judge(
    delivery: Delivery,
    queued: float,
    now: float,
    config: WorkQueueConfig,
    cancelled: Tombstones | None = None,
    default_id: str = "",
    moves: Collection[Moves] = (),
) -> Disposition:
    """The decision on a delivery. Times are of the own monotonic clock.

    Args:
        queued: when the job was put.
        default_id: the id of a job whose putter gave it none; that of its subject unless given.
        cancelled: what operators have cancelled: jobs by their ids, or those of their requests.
        moves: what other regions have taken over.
    """
    message = delivery.message
    fields = message.headers
    job_id = job_id_of(message, default_id)
    own = {name: value for name, value in fields.items() if not is_reserved(name)}
    text = fields.get(header_names.DEADLINE)
    readable = text is None or _MILLISECONDS.fullmatch(text) is not None
    deadline = queued + int(text) / 1000 if text is not None and readable else None
    facts = Facts(job_id, own, deadline)
    if header_names.STREAM in fields:
        error = "an answer of the server, which a request named this queue for: nobody has put it"
        return Disposition(facts, JobEnd.DEAD, DeathReason.MALFORMED, error)
    if not readable:
        error = f"{header_names.DEADLINE} is {text!r}, which is no number of milliseconds"
        return Disposition(facts, JobEnd.DEAD, DeathReason.MALFORMED, error)
    if not is_job_id(facts.job_id):
        error = f"the job id {facts.job_id!r} is no printable ASCII without spaces, of 128 at most"
        return Disposition(facts, JobEnd.DEAD, DeathReason.MALFORMED, error)
    if any(one.have(message) for one in moves):
        return Disposition(facts, JobEnd.MOVED)
    if cancelled:
        names = (facts.job_id, fields.get(header_names.REQUEST_ID, ""))
        if cancelled.has_job(names, queued):
            return Disposition(facts, JobEnd.CANCELLED)
    if deadline is not None and now >= deadline and delivery.tries <= config.tries:
        return Disposition(facts, JobEnd.EXPIRED)
    if config.max_age is not None and now - queued > config.max_age:
        error = f"it was not begun within the {config.max_age:g} s of max_age"
        if delivery.tries > 1:
            error = f"it was not done within the {config.max_age:g} s of max_age"
        return Disposition(facts, JobEnd.DEAD, DeathReason.AGE, error)
    if delivery.tries > config.tries:
        error = f"its taker gave no sign on try {delivery.tries - 1} of {config.tries}"
        return Disposition(facts, JobEnd.DEAD, DeathReason.TRIES, error)
    return Disposition(facts)


def counted(delivery: Delivery, age: float) -> tuple[Delivery, float]:
    """A delivery as its job counts it, and the seconds for which it is to be given back at once; 0
    for one that may begin.

    A job that is to begin later waits by its first delivery: a stream hands out what is put at
    once. So does a copy of one that was given back for a while.

    Args:
        age: seconds since the job was put.
    """
    fields = delivery.message.headers
    begins = fields.get(header_names.JOB_BEGINS, "")
    wait = int(begins) / 1000 - age if _MILLISECONDS.fullmatch(begins) else 0.0
    text = fields.get(header_names.JOB_DELAY, "")
    if delivery.tries == 1 and _MILLISECONDS.fullmatch(text):
        wait = max(wait, int(text) / 1000)
    if wait >= LEAST_WAIT:
        return delivery, wait
    if (begins or text) and delivery.tries > 1:
        return delivery._replace(tries=delivery.tries - 1), 0.0
    return delivery, 0.0


def error_text(error: BaseException | str) -> str:
    """An error as a header can carry it."""
    text = error if isinstance(error, str) else describe_exception(error)
    return _NOT_PRINTABLE.sub("?", " ".join(text.split()))[:MAX_ERROR_TEXT]
