"""The jobs of another region as its copies here tell of them, and what to do about them. No I/O, no
clock.

Copies do not know what was acknowledged: a job has ended where its copied log says so. They are
mirrors, whose messages have the sequences and times that they have in their own region.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from dynbus.bus.protocol import headers as header_names
from dynbus.bus.protocol.names import (
    MOVES,
    NO_JOBS,
    SCHEDULE,
    EndpointName,
    copy_stream,
    job_log_stream,
    job_of_record,
    job_of_subject,
    lane_of_subject,
    work_stream,
)
from dynbus.bus.transport import StoredMessage, StreamConfig, StreamLimits, StreamSource

from .dead_letters import MAX_AGE
from .job import Moves, is_job_id, is_reserved, job_id_of, put_at, read_moves
from .job_log import END_RECORD, FAILURE_RECORD, SIGNAL_RECORD, STEP_RECORD, Outcome

MAX_COPY_BYTES: Final = 1024 * 1024 * 1024
SETTLED: Final = 60.0
"""Seconds after the end of a job within which the last message of it has reached its queue."""

_STEP = re.compile(rf"{re.escape(STEP_RECORD)}\.[0-9]+")
_SIGNAL = re.compile(rf"{re.escape(SIGNAL_RECORD)}\.([^.]+)")


def copy_configs(queue: EndpointName, region: str) -> tuple[StreamConfig, StreamConfig]:
    """The streams in which a region keeps copies of the jobs of another one, and of their log.

    Nothing of them expires, so that the word that a job has ended is there for as long as the job.
    """

    def copy_of(stream: str, what: str) -> StreamConfig:
        return StreamConfig(
            copy_stream(stream, region),
            (),
            StreamLimits(max_bytes=MAX_COPY_BYTES),
            description=f"dynbus: copy of {what} of region {region}",
            mirror=StreamSource(region, stream),
        )

    jobs, log = work_stream(queue), job_log_stream(queue)
    return copy_of(jobs, "the jobs"), copy_of(log, "what became of the jobs")


class MovedRecord(NamedTuple):
    """A record of a job to be written into the log of another region.

    Attributes:
        record: what it is of the job, the last tokens of its subject.
        ttl: whole seconds for which it is kept; None for ever.
    """

    record: str
    data: bytes
    headers: Mapping[str, str]
    ttl: float | None


class CopiedJob(NamedTuple):
    """A job of another region that has not ended.

    Attributes:
        token: of its subjects.
        message: as it was put, or the first of the copies that go on in its place.
        sequences: of all its messages.
        records: what its tries have finished, and what it was sent, oldest first.
    """

    token: str
    job_id: str
    lane: str
    message: StoredMessage
    sequences: tuple[int, ...]
    records: Sequence[MovedRecord]

    def hindrance(self, room: int) -> str:
        """The reason why it can be put into no queue; empty where it can.

        Args:
            room: bytes of a message's data and headers.
        """
        if not is_job_id(self.job_id):
            return "its id is no printable ASCII without spaces, of 128 at most"
        message = self.message
        sizes = [_size(message.headers, message.data)]
        sizes += [_size(one.headers, one.data) for one in self.records]
        if max(sizes) > room:
            return f"{max(sizes)} bytes of it do not fit into a message here, which has {room}"
        return ""


class Leftover(NamedTuple):
    """The messages of a copy that nobody needs any more.

    Attributes:
        up_to: all up to this sequence.
        tokens: those of some jobs beside, up to a sequence for each.
    """

    up_to: int
    tokens: Mapping[str, int]


class _End(NamedTuple):
    sequence: int
    time: float
    outcome: str


class CopiedJobs:
    """The copied jobs of a queue: fed with the copied log, then with the copied jobs, then with
    what the log has got meanwhile, each in the order of sequences.

    Args:
        region: that has the queue.
        own: the region that keeps the copies.

    Attributes:
        last: the last message of the queue that was taken in, without its data.
        last_record: the sequence of the last record that was.
        last_firing: the record of the last firing of a scheduled handler; empty for none.
        moved_there: what that region has taken over of the queue of the own one.
    """

    def __init__(self, region: str, own: str = "") -> None:
        self._region = region
        self._own = own
        self._ends: dict[str, _End] = {}
        self._records: defaultdict[str, list[StoredMessage]] = defaultdict(list)
        self._first_records: dict[str, int] = {}
        self._jobs: dict[str, list[StoredMessage]] = {}
        self._purged: Sequence[Moves] = ()
        self.last: StoredMessage | None = None
        self.last_record = 0
        self.last_firing = b""
        self.moved_there: Sequence[Moves] = ()

    def __repr__(self) -> str:
        return f"<CopiedJobs [{len(self._jobs)} jobs | {len(self._ends)} ends]>"

    def add_record(self, message: StoredMessage) -> None:
        """Take the next record of the log."""
        self.last_record = message.sequence
        token = job_of_record(message.subject)
        record = _record_of(message)
        if token in NO_JOBS:
            # The last of them is needed.
            self._first_records[token] = message.sequence
            if (token, record) == (MOVES, self._region):
                self._purged = read_moves(message.data)
            elif (token, record) == (MOVES, self._own):
                self.moved_there = read_moves(message.data)
            elif token == SCHEDULE:
                self.last_firing = message.data
            return
        self._first_records.setdefault(token, message.sequence)
        if record != END_RECORD:
            self._records[token].append(message)
            return
        end = _End(message.sequence, message.time, message.headers.get(header_names.JOB_END, ""))
        self._ends[token] = end
        kept = self._records.pop(token, [])
        if end.outcome == Outcome.FAILED:
            # Who puts its dead letter into the queue again has it go on with its steps.
            self._records[token] = [one for one in kept if _record_of(one) != FAILURE_RECORD]

    def add_job(self, message: StoredMessage) -> None:
        """Take the next message of the queue."""
        self.last = message._replace(data=b"")
        token = job_of_subject(message.subject)
        if self._has_ended(token, message):
            message = self.last
        self._jobs.setdefault(token, []).append(message)

    def _has_ended(self, token: str, message: StoredMessage) -> bool:
        end = self._ends.get(token)
        # A key may have been another job's before, whose end was forgotten in its own region.
        return end is not None and end.time >= put_at(message)

    def is_over(self, message: StoredMessage, moves: Sequence[Moves]) -> bool:
        """True if a message of the queue is of a job that has ended, was purged there, or is put
        here.

        Args:
            moves: what was taken over before.
        """
        gone = (*self._purged, *(one for one in moves if one.is_put))
        has_ended = self._has_ended(job_of_subject(message.subject), message)
        return has_ended or any(one.have(message) for one in gone)

    def unfinished(self, moves: Sequence[Moves]) -> list[CopiedJob]:
        """The jobs that are not over, in the order of their puts.

        Args:
            moves: what was taken over before.
        """
        jobs: list[CopiedJob] = []
        for token, messages in self._jobs.items():
            live = [one for one in messages if not self.is_over(one, moves)]
            if live:
                first = live[0]
                sequences = tuple(one.sequence for one in live)
                records = tuple(_moved(self._records.get(token, ())))
                lane = lane_of_subject(first.subject)
                jobs.append(CopiedJob(token, job_id_of(first), lane, first, sequences, records))
        return sorted(jobs, key=lambda job: job.message.sequence)

    def leftover_jobs(self, moves: Sequence[Moves]) -> Leftover:
        """The messages of jobs that are over."""
        over: dict[str, int] = {}
        needed: list[int] = []
        for token, messages in self._jobs.items():
            for one in messages:
                if self.is_over(one, moves):
                    over[token] = one.sequence
                else:
                    needed.append(one.sequence)
        last = 0 if self.last is None else self.last.sequence
        return _leftover(over, needed, last)

    def leftover_records(self) -> Leftover:
        """The records of jobs that have ended and of which no further message can come: one that is
        on its way still would be of a job that has not."""
        heard = 0.0 if self.last is None else self.last.time
        over = {
            token: end.sequence
            for token, end in self._ends.items()
            if end.time + (MAX_AGE if end.outcome == Outcome.FAILED else SETTLED) < heard
            and all(self._has_ended(token, one) for one in self._jobs.get(token, ()))
            and all(one.sequence < end.sequence for one in self._records.get(token, ()))
        }
        needed = [first for token, first in self._first_records.items() if token not in over]
        return _leftover(over, needed, max(over.values(), default=0))


def _leftover(over: Mapping[str, int], needed: Collection[int], last: int) -> Leftover:
    up_to = min(needed) - 1 if needed else last
    return Leftover(up_to, {token: to for token, to in over.items() if to > up_to})


def _size(headers: Mapping[str, str], data: bytes) -> int:
    return len(data) + sum(len(name) + len(value) + 4 for name, value in headers.items())


def _record_of(message: StoredMessage) -> str:
    return ".".join(message.subject.split(".")[5:])


def _moved(records: Sequence[StoredMessage]) -> Iterable[MovedRecord]:
    """The records with which a job goes on elsewhere.

    Signals have other sequences there, by which a step says which one it took: those that were
    taken are left out, and no step names one.
    """
    steps = {
        one.sequence: _step_of(one.data) for one in records if _STEP.fullmatch(_record_of(one))
    }
    taken: dict[str, int] = {}
    for step in steps.values():
        taken[step.name] = max(taken.get(step.name, 0), step.sequence)
    for one in records:
        record = _record_of(one)
        signal = _SIGNAL.fullmatch(record)
        if one.sequence in steps:
            yield _written(one, record, steps[one.sequence].data)
        elif record == FAILURE_RECORD or (signal and one.sequence > taken.get(signal[1], 0)):
            yield _written(one, record, one.data)


def _written(message: StoredMessage, record: str, data: bytes) -> MovedRecord:
    own = {name: value for name, value in message.headers.items() if not is_reserved(name)}
    return MovedRecord(record, data, header_names.carried(own), message.ttl)


class _Step(NamedTuple):
    """A finished step: the signal that it took, if any, and its record without that."""

    name: str
    sequence: int
    data: bytes


def _step_of(data: bytes) -> _Step:
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(fields.get("name", b'""'), type=str)
        sequence = msgspec.json.decode(fields.pop("sequence", b"0"), type=int)
    except msgspec.MsgspecError:
        # Who goes on with the job says that it cannot be read.
        return _Step("", 0, data)
    return _Step(name, sequence, msgspec.json.encode(fields) if sequence else data)
