"""The state of one queue of jobs: its contents, their age and tries, and its movement."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError
from dynbus.bus.nats.api_requests import MESSAGE_NOT_FOUND, JetStreamError, unix_seconds
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import (
    EndpointName,
    dead_letter_stream,
    dead_letter_subject,
    job_of_subject,
    work_stream,
)
from dynbus.bus.transport import NoStream, StoredMessage
from dynbus.bus.work_queue import CONSUMER, holders_of, lanes_of, put_at

from .listing import API_SECONDS, pages, subject_counts

if TYPE_CHECKING:
    from dynbus.bus.nats.jetstream import NatsJetStream


class Lane(NamedTuple):
    """A lane of a queue: jobs that wait, and that are held."""

    waiting: int
    held: int


class Oldest(NamedTuple):
    """The job that has been in a queue for longest.

    Attributes:
        age: seconds since it was put, by the server's clock.
    """

    job: str
    age: float


class Counts(NamedTuple):
    """The counters of a queue, copies that go on in the place of a job counted in.

    Attributes:
        at: when they were read, on the monotonic clock.
        put: jobs that were ever put.
        taken: how often one was handed out.
        left: jobs that have left it.
    """

    at: float
    put: int
    taken: int
    left: int


class Rates(NamedTuple):
    """The movement of a queue, per second; see `Counts`."""

    put: float
    taken: float
    left: float

    @classmethod
    def between(cls, before: Counts, after: Counts) -> Rates:
        """The rates between two looks; a queue that was made anew meanwhile begins at zero."""
        seconds = max(after.at - before.at, 1e-3)
        pairs = zip(before[1:], after[1:], strict=True)
        return cls(*(max(0, new - old) / seconds for old, new in pairs))


class QueueReport(NamedTuple):
    """A queue at one moment.

    Attributes:
        lanes: by their names, preferred first.
        tries: held jobs by the try that they are in, as their takers tell it.
        tried_before: jobs that are held and were handed out more than once.
        takers: those that hold jobs.
        dead: jobs of it that failed for good.
        size: bytes of all jobs.
        oldest: None where there is no job.
    """

    queue: EndpointName
    is_paused: bool
    lanes: Mapping[str, Lane]
    tries: Mapping[int, int]
    tried_before: int
    takers: int
    dead: int
    size: int
    oldest: Oldest | None
    counts: Counts

    @property
    def waiting(self) -> int:
        """Jobs that nobody has yet."""
        return sum(lane.waiting for lane in self.lanes.values())

    @property
    def held(self) -> int:
        """Jobs with a taker, or given back and to be tried again."""
        return sum(lane.held for lane in self.lanes.values())

    def to_json(self, rates: Rates) -> dict[str, Any]:
        """The report for programs; ages in seconds, rates per second."""
        oldest = self.oldest
        return {
            "queue": str(self.queue),
            "paused": self.is_paused,
            "waiting": self.waiting,
            "held": self.held,
            "dead": self.dead,
            "tried_before": self.tried_before,
            "tries": {str(tries): count for tries, count in sorted(self.tries.items())},
            "takers": self.takers,
            "bytes": self.size,
            "oldest": oldest and {"job": oldest.job, "age": round(oldest.age, 3)},
            "lanes": {name: lane._asdict() for name, lane in self.lanes.items()},
            "rates": {name: round(value, 3) for name, value in rates._asdict().items()},
        }


async def read_queue(jetstream: NatsJetStream, name: EndpointName) -> QueueReport:
    """Look at a queue once.

    Raises:
        ConfigError: there is no such queue.
        PermissionDenied, Unavailable: the server does not tell.
    """
    stream = work_stream(name)
    try:
        info = await jetstream.stream_info(stream, timeout=API_SECONDS)
        consumers = await consumers_of(jetstream, stream)
        oldest = None
        if info.messages:
            oldest = await _oldest(jetstream, stream, info.first_sequence, info.now)
    except NoStream:
        dead = await _count_dead(jetstream, name)
        raise ConfigError(
            f"{name} has no queue, only dead letters ({dead}): `dynbus queue dead {name}` lists "
            f"them; {_of_groups(name.namespace)}"
            if dead
            else absent_queue(str(name))
        ) from None
    at = monotonic()
    holders = [one for one in await holders_of(jetstream, name) if one.jobs]
    return QueueReport(
        name,
        any(one.get("paused") for one in consumers.values()),
        {
            _lane(consumer): Lane(one.get("num_pending") or 0, one.get("num_ack_pending") or 0)
            for consumer, one in consumers.items()
        },
        Counter(job.tries for one in holders for job in one.jobs),
        sum(int(one.get("num_redelivered") or 0) for one in consumers.values()),
        len(holders),
        await _count_dead(jetstream, name),
        info.size,
        oldest,
        Counts(
            at,
            put=info.last_sequence,
            taken=sum(one["delivered"]["consumer_seq"] for one in consumers.values()),
            left=info.last_sequence - info.messages,
        ),
    )


def absent_queue(name: str) -> str:
    """The words for a queue that is not there: how to find those that are."""
    namespace = name.partition(".")[0]
    return (
        f"there is no queue {name}: `dynbus queue ls {namespace}` lists those that there are; "
        f"{_of_groups(namespace)}"
    )


def _of_groups(namespace: str) -> str:
    return f"what a group of a topic waits for is in its topic, `dynbus topic ls {namespace}`"


async def consumers_of(jetstream: NatsJetStream, stream: str) -> dict[str, dict[str, Any]]:
    """The consumers of a queue's lanes as the server tells them, by their names.

    Raises:
        NoStream: the queue is gone.
        PermissionDenied, Unavailable: the server does not tell.
    """
    names: list[str] = []
    async for page in pages(jetstream, f"CONSUMER.NAMES.{stream}", {}):
        names += page["consumers"] or ()
    calls = {name: f"CONSUMER.INFO.{stream}.{name}" for name in sorted(names, key=_place)}
    return {
        name: await jetstream.api(call, {}, timeout=API_SECONDS) for name, call in calls.items()
    }


def _place(consumer: str) -> tuple[int, str]:
    """The place of a lane's consumer among the others, preferred first."""
    lane = _lane(consumer)
    places = [*lanes_of(ordered=False), *lanes_of(ordered=True)]
    return places.index(lane) if lane in places else len(places), lane


def _lane(consumer: str) -> str:
    return consumer.removeprefix(f"{CONSUMER}-")


async def _oldest(
    jetstream: NatsJetStream, stream: str, sequence: int, now: float
) -> Oldest | None:
    """The job that was put first of those that are there.

    Args:
        now: Unix seconds by the server's clock.
    """
    asked = {"seq": sequence, "next_by_subj": ">"}
    try:
        answer = await jetstream.api(f"STREAM.MSG.GET.{stream}", asked, timeout=API_SECONDS)
    except JetStreamError as error:
        if error.error_code == MESSAGE_NOT_FOUND:
            return None
        raise
    message = answer["message"]
    fields = headers.decode(base64.b64decode(message.get("hdrs") or ""))
    subject, time = str(message["subject"]), unix_seconds(message["time"])
    stored = StoredMessage(subject, int(message["seq"]), time, fields, b"")
    job = fields.get(headers.JOB) or job_of_subject(subject)
    return Oldest(job, max(0.0, now - put_at(stored)))


async def _count_dead(jetstream: NatsJetStream, name: EndpointName) -> int:
    stream = dead_letter_stream(name.namespace)
    try:
        letters = await subject_counts(jetstream, stream, dead_letter_subject(*name))
    except NoStream:
        return 0
    return sum(letters.values())
