"""An instance's lease: the record in the instances bucket that says it is there.

`Lease` decides what to publish next and what an answer means; `LeaseKeeper` carries it out on
the control lane. A record is written with a TTL every time (a write without one would make
it immortal) and with the sequence it expects, so that two holders of one id cannot both live.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from dynbus.bus.cleanup import end_tasks
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError, DynbusError, Unavailable
from dynbus.bus.protocol.headers import TTL
from dynbus.bus.protocol.names import INSTANCES_BUCKET, TOKEN
from dynbus.bus.protocol.wire import InstanceRecord, decode_record, encode_record
from dynbus.bus.transport import (
    REPLICAS,
    ConnectionState,
    NoRoom,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    WrongLastSequence,
)

from .stream_repair import StreamRepair

if TYPE_CHECKING:
    from dynbus.bus.transport import JetStream

logger = logging.getLogger(__name__)

MARKER_TTL: Final = 120.0
"""Seconds for which an ended lease stays visible; far longer than a watcher's outage."""

RETRY_DELAY: Final = 0.25
COUNT_TIMEOUT: Final = 1.0
ANSWER_TIMEOUT: Final = 2.0
ELECTION_SECONDS: Final = 10.0
RENEWALS_PER_COUNT: Final = 10

_TTL = re.compile(r"([0-9]{1,9})s?")

INSTANCES_STREAM: Final = StreamConfig(
    name=f"KV_{INSTANCES_BUCKET}",
    subjects=(f"$KV.{INSTANCES_BUCKET}.>",),
    limits=StreamLimits(max_messages_per_subject=1, max_bytes=64 * 1024 * 1024),
    marker_ttl=MARKER_TTL,
    description="dynbus: one record per running instance",
)


async def ensure_bucket(
    jetstream: JetStream,
    replicas: int = REPLICAS,
    *,
    in_memory: bool = False,
    timeout: float = 5.0,
) -> None:
    """Make the instances bucket, or give one that exists the replicas that it lacks.

    It is kept in files, and in the server's memory where its disk is full: whoever has a record
    in it writes it again when it is lost.

    Args:
        in_memory: make it in memory at once.

    Raises:
        DynbusError: the server does not answer, or refuses.
    """
    wanted = INSTANCES_STREAM._replace(replicas=replicas)
    if not in_memory:
        try:
            await jetstream.ensure_stream(wanted, timeout=timeout)
            return
        except NoRoom as error:
            logger.warning("the instances bucket is made in the server's memory: %s", error)
    await jetstream.ensure_stream(wanted._replace(in_memory=True), timeout=timeout)


def record_subject(namespace: str, component: str, instance_id: str) -> str:
    """Where an instance's record is stored."""
    return f"$KV.{INSTANCES_BUCKET}.{namespace}.{component}.{instance_id}"


def record_key(subject: str) -> tuple[str, str, str] | None:
    """The namespace, component and instance id of a record's subject; None for any other."""
    tokens = subject.split(".")
    if len(tokens) != 5 or not all(map(TOKEN.fullmatch, tokens[2:])):
        return None
    return tokens[2], tokens[3], tokens[4]


def record_of(message: StoredMessage) -> InstanceRecord | None:
    """The record in a message; None for one that cannot be read, or that speaks of another
    instance than its subject, which is what permissions are given for."""
    record = decode_record(message.data)
    if record is None:
        return None
    told = (record.namespace, record.component, record.instance_id)
    return record if told == record_key(message.subject) else None


def ttl_of(message: StoredMessage) -> float | None:
    """Seconds for which a record was written; None where it does not say that."""
    seconds = _TTL.fullmatch(message.headers.get(TTL, ""))
    return float(seconds[1]) if seconds is not None else None


class LeaseState(Enum):
    """Where a lease stands."""

    NEW = "new"
    HELD = "held"
    LOST = "lost"
    ENDED = "ended"
    CONFLICT = "conflict"


class Write(NamedTuple):
    """What to publish: the record, and the last sequence that its subject must have."""

    record: InstanceRecord
    expected: int


class Lease:
    """The life of one record, without I/O.

    Args:
        record: what the instance says of itself; its counter grows with each write.

    Attributes:
        written: whether a write was begun, so that the record may be there whatever became of it.
    """

    __slots__ = ("_record", "revision", "state", "written")

    def __init__(self, record: InstanceRecord) -> None:
        self._record = record
        self.revision = 0
        self.state = LeaseState.NEW
        self.written = False

    def __repr__(self) -> str:
        return f"<Lease {self._record.instance_id} [{self.state.value} | rev {self.revision}]>"

    @property
    def record(self) -> InstanceRecord:
        return self._record

    def describe(self, metadata: dict[str, str]) -> None:
        """Set what the instance says of itself, before its first write."""
        self._record = msgspec.structs.replace(self._record, metadata=metadata)

    def change(self, *, draining: bool) -> None:
        """Change what the next write says."""
        self._record = msgspec.structs.replace(self._record, draining=draining)

    def write(self) -> Write:
        """The next write; it counts as begun."""
        self.written = True
        self._record = msgspec.structs.replace(self._record, counter=self._record.counter + 1)
        return Write(self._record, self.revision)

    def stored(self, sequence: int) -> None:
        """The write was stored at `sequence`."""
        self.revision = sequence
        self.state = LeaseState.HELD

    def found(self, stored: StoredMessage | None) -> None:
        """Another sequence was there: this is it. The next write expects it.

        A marker, a record of this very process, or nothing at all means that the lease
        expired while we were away. A record of another process is a conflict.
        """
        self.state = LeaseState.LOST
        self.revision = stored.sequence if stored is not None else 0
        if stored is None or stored.is_marker:
            return
        other = record_of(stored)
        if other is not None and other.incarnation != self._record.incarnation:
            self.state = LeaseState.CONFLICT


class LeaseKeeper:
    """Keeps one lease alive from `announce` to `end`. Lives on the control lane.

    Args:
        on_state: called on the lane at each change of the lease's state.
        on_count: called on the lane now and then with the number of records, which are about
            as many as instances.
        replicas: how many servers of a cluster are to keep the bucket, as far as it has them.
    """

    def __init__(
        self,
        jetstream: JetStream,
        record: InstanceRecord,
        ttl: float,
        on_state: Callable[[LeaseState], None] | None = None,
        on_count: Callable[[int], None] | None = None,
        replicas: int = REPLICAS,
    ) -> None:
        self.lease = Lease(record)
        self._jetstream = jetstream
        self._ttl = ttl
        self._on_state = on_state
        self._on_count = on_count
        self._subject = record_subject(record.namespace, record.component, record.instance_id)
        self._until_count = 0
        self._replicas = replicas
        self._kept_by = 1
        self._told = ""
        self._repair = StreamRepair(jetstream, INSTANCES_STREAM.name, self._remake_bucket)
        self._now = asyncio.Event()
        self._paused = False
        self._is_connected = True
        self._task: asyncio.Task[None] | None = None

    async def check_free(self) -> None:
        """Make sure that no other process holds the id, before anything is served under it.

        Raises:
            ConfigError: another process holds it.
            Unavailable: JetStream does not answer.
        """
        try:
            stored = await self._jetstream.last(
                INSTANCES_STREAM.name, self._subject, timeout=ELECTION_SECONDS
            )
        except NoStream:
            return
        self.lease.found(stored)
        if self.lease.state is LeaseState.CONFLICT:
            raise self._conflict()
        await self._check_other_components()

    async def _check_other_components(self) -> None:
        """Heartbeats and credit name an instance by its id alone, so the bus has it once."""
        mine = self.lease.record
        anywhere = record_subject("*", "*", mine.instance_id)
        stored = await self._jetstream.last(INSTANCES_STREAM.name, anywhere)
        other = record_of(stored) if stored is not None else None
        if stored is None or stored.is_marker or other is None or stored.subject == self._subject:
            return
        if other.incarnation != mine.incarnation:
            raise ConfigError(
                f"instance id {mine.instance_id!r} is in use by {other.namespace}."
                f"{other.component}: ids are unique on the bus, so put the component into it"
            )

    async def announce(self) -> None:
        """Write the record for the first time and keep it from then on.

        Raises:
            ConfigError: another process holds the same id.
            Unavailable: JetStream does not answer for as long as a cluster takes to elect leaders.
        """
        ends = monotonic() + ELECTION_SECONDS
        while True:
            try:
                await self._renew()
                break
            except Unavailable:
                if monotonic() > ends:
                    raise
                await self._look_after_bucket()
                await asyncio.sleep(RETRY_DELAY)
        await self._count()
        self._task = asyncio.get_running_loop().create_task(self._keep(), name="lease")

    def connection_changed(self, state: ConnectionState) -> None:
        """Renew at once after a reconnect: the record may be about to expire, or be gone."""
        self._is_connected = state is ConnectionState.CONNECTED
        if state is ConnectionState.CONNECTED:
            self._now.set()

    def pause(self) -> None:
        """Renew no more: requests cannot reach the instance."""
        self._paused = True

    def resume(self) -> None:
        """Renew at once and from now on: the server knows the instance's subscriptions again."""
        self._paused = False
        self._now.set()

    def change(self, *, draining: bool) -> None:
        """Say something else from the next write on, which comes at once."""
        self.lease.change(draining=draining)
        self._now.set()

    async def end(self) -> None:
        """Withdraw the record; a failure is logged, the record expires by itself then."""
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None
        if not self.lease.written or self.lease.state in (LeaseState.CONFLICT, LeaseState.ENDED):
            return
        try:
            if not self._is_connected:
                raise Unavailable("there is no connection")
            await self._delete()
        except NoStream:
            # Everything in the bucket went with it.
            pass
        except DynbusError as error:
            logger.warning("the record of %s expires by itself: %s", self._subject, error)
        before, self.lease.state = self.lease.state, LeaseState.ENDED
        self._tell(before)

    async def _delete(self) -> None:
        for _ in range(2):
            try:
                await self._jetstream.publish(
                    self._subject,
                    b"",
                    ttl=MARKER_TTL,
                    headers={"KV-Operation": "DEL"},
                    expected_last_subject_sequence=self.lease.revision,
                    timeout=2.0,
                )
                return
            except WrongLastSequence:
                # A write was cut off between its sending and its answer.
                self.lease.found(await self._jetstream.last(INSTANCES_STREAM.name, self._subject))
                if self.lease.state is LeaseState.CONFLICT:
                    return

    async def _keep(self) -> None:
        delay = RETRY_DELAY
        while True:
            try:
                async with asyncio.timeout(self._ttl / 3):
                    await self._now.wait()
            except TimeoutError:
                pass
            self._now.clear()
            if self._paused:
                continue
            try:
                await self._renew()
                delay = RETRY_DELAY
                self._told = ""
            except ConfigError:
                logger.exception("%r was taken over", self.lease)
                return
            except Exception as error:  # noqa: BLE001
                # An instance without a keeper would vanish while it works.
                self._log_failure(error)
                if isinstance(error, Unavailable):
                    await self._look_after_bucket()
                else:
                    # What the server refused at once it would refuse at once again.
                    delay = min(2 * delay, self._ttl / 3)
                await asyncio.sleep(delay)
                self._now.set()
            else:
                await self._count()

    def _log_failure(self, error: Exception) -> None:
        if not isinstance(error, DynbusError):
            logger.error("%r was not renewed", self.lease, exc_info=error)
            return
        # Once for each reason, until it is renewed: it is tried again several times a second.
        told, self._told = self._told, str(error)
        level = logging.DEBUG if told == self._told else logging.WARNING
        logger.log(level, "%r was not renewed: %s", self.lease, error)

    async def _look_after_bucket(self) -> None:
        """Find out whether the bucket can take records at all, and mend it if not."""
        if self._kept_by > 1:
            # Its other servers go on without a broken one; they elect a leader just now.
            return
        try:
            await self._repair.look()
        except DynbusError as error:
            logger.debug("the instances bucket was not looked at: %s", error)

    async def _make_bucket(self) -> None:
        await ensure_bucket(self._jetstream, self._replicas, timeout=ANSWER_TIMEOUT)

    async def _remake_bucket(self) -> None:
        # The disk that broke it may be full still, with room for a file and not for what follows.
        await ensure_bucket(self._jetstream, self._replicas, in_memory=True)

    async def _count(self) -> None:
        """Count the records now and then: not often, since every instance does.

        Only the leader of the bucket's servers answers that, and for some seconds nobody does
        while they elect another: the lease does not wait for it.
        """
        self._until_count -= 1
        if self._until_count > 0:
            return
        try:
            info = await self._jetstream.stream_info(INSTANCES_STREAM.name, timeout=COUNT_TIMEOUT)
            self._kept_by = info.replicas
            if self._on_count is not None:
                self._on_count(info.messages)
            if info.in_cluster and info.replicas < self._replicas:
                await self._make_bucket()
        except DynbusError as error:
            logger.debug("the instances were not counted: %s", error)
            return
        self._until_count = RENEWALS_PER_COUNT

    async def _renew(self) -> None:
        lease = self.lease
        before = lease.state
        was_made = False
        for _ in range(4):
            write = lease.write()
            try:
                sequence = await self._jetstream.publish(
                    self._subject,
                    encode_record(write.record),
                    ttl=self._ttl,
                    expected_last_subject_sequence=write.expected,
                    timeout=min(2.0, self._ttl / 4),
                )
                lease.stored(sequence)
                self._tell(before)
                return
            except NoStream:
                # Servers that elect a leader take nothing either, and keep what they have: what
                # revision to expect is known when the next write is refused.
                if was_made:
                    raise Unavailable(f"nobody takes {self._subject} just now") from None
                await self._make_bucket()
                was_made = True
            except WrongLastSequence:
                lease.found(
                    await self._jetstream.last(
                        INSTANCES_STREAM.name, self._subject, timeout=ANSWER_TIMEOUT
                    )
                )
                if lease.state is LeaseState.CONFLICT:
                    self._tell(before)
                    raise self._conflict() from None
        self._tell(before)
        raise Unavailable(f"the record {self._subject} changes under every write")

    def _conflict(self) -> ConfigError:
        record = self.lease.record
        return ConfigError(
            f"instance id {record.instance_id!r} of {record.namespace}.{record.component} is in "
            "use by another process: leave the id out, or choose another"
        )

    def _tell(self, before: LeaseState) -> None:
        if self.lease.state is not before and self._on_state is not None:
            self._on_state(self.lease.state)
