"""The records of instances: the bucket, how a record is read, and who keeps one alive."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Final, NamedTuple

import anyio
import msgspec

from dynbus.bus.background import Background, Work
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError, DynbusError, Unavailable
from dynbus.bus.protocol.names import INSTANCES_BUCKET, TOKEN, InstanceName
from dynbus.bus.protocol.wire import InstanceRecord, decode_record, encode_record
from dynbus.bus.transport import (
    ConnectionState,
    JetStream,
    NoRoom,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamLimits,
)

from .instance_view import EXPIRY_GRACE
from .leased_record import LeasedRecord, LeaseState
from .reading import read_latest

logger = logging.getLogger(__name__)

MARKER_TTL: Final = 120.0
"""Seconds for which an ended lease stays visible; far longer than a watcher's outage."""

MAX_RECORD_BYTES: Final = 64 * 1024
"""Names of some hundred endpoints and all metadata; what is larger is no instance's."""
RETRY_DELAY: Final = 0.25
COUNT_TIMEOUT: Final = 1.0
ANSWER_TIMEOUT: Final = 2.0
ELECTION_SECONDS: Final = 10.0
RENEWALS_PER_COUNT: Final = 10

INSTANCES_STREAM: Final = StreamConfig(
    name=f"KV_{INSTANCES_BUCKET}",
    subjects=(f"$KV.{INSTANCES_BUCKET}.>",),
    limits=StreamLimits(
        max_messages_per_subject=1,
        max_bytes=64 * 1024 * 1024,
        max_message_size=MAX_RECORD_BYTES,
    ),
    marker_ttl=MARKER_TTL,
    description="dynbus: one record per running instance",
)


async def ensure_bucket(
    jetstream: JetStream,
    *,
    in_memory: bool = False,
    timeout: float = 5.0,
) -> None:
    """Make the instances bucket, or give one that exists the replicas that it lacks.

    It is kept in files, and in the server's memory where its disk is full: a process with a record
    in it writes it again when it is lost.

    Args:
        in_memory: make it in memory at once.

    Raises:
        DynbusError: the server does not answer, or refuses.
    """
    if not in_memory:
        try:
            await jetstream.ensure_stream(INSTANCES_STREAM, timeout=timeout)
            return
        except NoRoom as error:
            logger.warning("the instances bucket is made in the server's memory: %s", error)
    await jetstream.ensure_stream(INSTANCES_STREAM._replace(in_memory=True), timeout=timeout)


def record_subject(namespace: str, component: str, instance_id: str) -> str:
    """The subject under which an instance's record is stored."""
    return f"$KV.{INSTANCES_BUCKET}.{namespace}.{component}.{instance_id}"


def instance_at(subject: str) -> InstanceName | None:
    """The instance whose record a subject stores, in the bucket of its region or among those that
    other regions keep; None for any other subject."""
    tokens = subject.split(".")
    if len(tokens) != 5 or not all(map(TOKEN.fullmatch, tokens[1:])):
        return None
    return InstanceName(*tokens[2:])


def record_of(message: StoredMessage) -> InstanceRecord | None:
    """The record in a message; None for one that cannot be read, or that speaks of another
    instance than its subject, which is what permissions are given for."""
    record = decode_record(message.data)
    if record is None or record.name != instance_at(message.subject):
        return None
    return record


async def read_instances(
    jetstream: JetStream, namespace: str = "*", component: str = "*", *, timeout: float
) -> list[InstanceRecord]:
    """The records of the instances of a component that have a lease; `*` for any.

    Raises:
        NoStream: no instance was ever announced on this server.
        Unavailable: not all could be read within `timeout` seconds.
    """
    subject = record_subject(namespace, component, "*")
    messages = await read_latest(jetstream, INSTANCES_STREAM.name, subject, timeout=timeout)
    return [record for one in messages.values() if (record := record_of(one)) is not None]


class Holder(NamedTuple):
    """A process that holds an instance's id.

    Attributes:
        ttl: seconds for which its record was written.
    """

    record: InstanceRecord
    ttl: float


class LeaseKeeper:
    """Keeps an instance's record alive from `announce` to `withdraw`. Lives on the control lane.

    Args:
        background: of the control lane.
        record: what the instance says of itself; its counter grows with each renewal.
        on_state: called on the lane at each change of the lease's state.
        on_count: called on the lane now and then with the number of records, which are about
            as many as instances.
        on_lapse: called on the lane when the record has run out and the server does not take its
            renewal; again after twice as long, if it still does not.
        on_written: called on the lane with the record each time that it was stored, and with
            nothing once it is withdrawn.
    """

    def __init__(
        self,
        jetstream: JetStream,
        background: Background,
        record: InstanceRecord,
        ttl: float,
        on_state: Callable[[LeaseState], None] | None = None,
        on_count: Callable[[int], None] | None = None,
        on_lapse: Callable[[], None] | None = None,
        on_written: Callable[[bytes], object] | None = None,
    ) -> None:
        self._jetstream = jetstream
        self._background = background
        self._record = record
        self._on_state = on_state
        self._on_count = on_count
        self._on_lapse = on_lapse
        self._on_written = on_written
        # When the record will have run out, or it is time to say so again; and after how long.
        self._lapses_at = math.inf
        self._lapse = ttl
        self._leased = LeasedRecord(
            jetstream,
            INSTANCES_STREAM.name,
            record_subject(*record.name),
            ttl,
            marker_ttl=MARKER_TTL,
            is_mine=self._is_mine,
            make=self._make_bucket,
            remake=self._remake_bucket,
        )
        self._gone = ""
        self._until_count = 0
        self._now = asyncio.Event()
        self._paused = False
        self._is_connected = True
        self._work: Work | None = None

    def __repr__(self) -> str:
        return f"<LeaseKeeper {self._leased.lease!r}>"

    @property
    def state(self) -> LeaseState:
        """The state of the lease."""
        return self._leased.lease.state

    @property
    def revision(self) -> int:
        """The sequence of the record in the bucket; 0 before its first write."""
        return self._leased.lease.revision

    def remaining(self) -> float:
        """Seconds for which the record lasts without a renewal; callable from any thread."""
        return self._leased.lease.left(monotonic())

    async def other_holder(self) -> Holder | None:
        """Another process that holds the id, to be asked for before anything is served under it;
        None where there is none.

        Raises:
            Unavailable: JetStream does not answer for as long as a cluster takes to elect leaders.
        """
        ends = monotonic() + ELECTION_SECONDS
        while True:
            try:
                stored = await self._stored_anywhere()
                break
            except NoStream:
                return None
            except Unavailable:
                if monotonic() > ends:
                    raise
                await anyio.sleep(RETRY_DELAY)
        if stored is None or stored.is_marker or self._is_mine(stored):
            return None
        record = record_of(stored)
        return Holder(record, stored.ttl or self._leased.lease.ttl) if record else None

    async def _stored_anywhere(self) -> StoredMessage | None:
        stored = await self._leased.look(timeout=ELECTION_SECONDS)
        if stored is None or self.state is not LeaseState.CONFLICT:
            # Heartbeats and credit name an instance by its id alone, so the bus has it once.
            anywhere = record_subject("*", "*", self._record.instance_id)
            stored = await self._jetstream.last(INSTANCES_STREAM.name, anywhere)
        return stored

    async def outlast(self, other: Holder) -> None:
        """Wait until the record of a process that seems to be gone has expired, for as long as its
        lease at most: a server that was killed may keep a record for ever.

        Raises:
            ConfigError: the record is renewed, so its process is not gone.
            Unavailable: JetStream does not answer.
        """
        with anyio.move_on_after(other.ttl + EXPIRY_GRACE):
            while (held := await self.other_holder()) is not None:
                if held != other:
                    raise self.conflict(held.record)
                await anyio.sleep(RETRY_DELAY)
        self._gone = other.record.incarnation

    def conflict(self, other: InstanceRecord) -> ConfigError:
        """The error that another process holds the id."""
        mine = self._record
        if other.name != mine.name:
            return ConfigError(
                f"instance id {mine.instance_id!r} is in use by {other.name.address}: ids are "
                "unique on the bus, so put the component into it"
            )
        return ConfigError(
            f"instance id {mine.instance_id!r} of {mine.name.address} is in "
            "use by another process: leave the id out, or choose another"
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
            except Unavailable as error:
                if monotonic() > ends:
                    raise
                await self._leased.after_failure(error)
                await anyio.sleep(RETRY_DELAY)
        await self._count()
        self._work = self._background.start(self._keep, name=f"lease of {self._record.instance_id}")

    def describe(
        self,
        metadata: dict[str, str],
        endpoints: dict[str, str],
        schemas: dict[str, str],
        limits: dict[str, int],
    ) -> None:
        """Set what the instance says of itself, from the next write on, which comes at once."""
        self._record = msgspec.structs.replace(
            self._record, metadata=metadata, endpoints=endpoints, schemas=schemas, limits=limits
        )
        if self._work is not None:
            self._now.set()

    def change(self, *, draining: bool) -> None:
        """Say something else from the next write on, which comes at once."""
        self._record = msgspec.structs.replace(self._record, draining=draining)
        self._now.set()

    def connection_changed(self, state: ConnectionState) -> None:
        """Renew at once after a reconnect: the record may be about to expire, or be gone."""
        self._is_connected = state is ConnectionState.CONNECTED
        if state is ConnectionState.CONNECTED:
            # Another server gets its time, whichever process left the one before.
            self._lapses_at = max(self._lapses_at, monotonic() + self._leased.lease.ttl)
            self._now.set()

    def pause(self) -> None:
        """Renew no more: requests cannot reach the instance."""
        self._paused = True

    def resume(self) -> None:
        """Renew at once and from now on: the server knows the instance's subscriptions again."""
        self._paused = False
        self._now.set()

    async def withdraw(self) -> None:
        """Withdraw the record; a failure is logged, the record expires by itself then."""
        if self._work is not None:
            await self._work.end()
        before = self.state
        is_held = before in (LeaseState.HELD, LeaseState.LOST)
        await self._leased.withdraw(is_connected=self._is_connected)
        if is_held and self._on_written is not None:
            self._on_written(b"")
        self._tell(before)

    async def _keep(self) -> None:
        while True:
            with anyio.move_on_after(self._leased.pause()):
                await self._now.wait()
                self._leased.start_anew()
            self._now.clear()
            if self._paused:
                continue
            try:
                await self._renew()
            except ConfigError:
                logger.exception("%r was taken over", self._leased.lease)
                return
            except DynbusError as error:
                is_waiting = isinstance(error, Unavailable)
                if is_waiting:
                    self._note_lapse()
                await self._leased.after_failure(error)
                if is_waiting:
                    # To look for the reason takes seconds where nobody answers.
                    self._note_lapse()
            else:
                await self._count()

    def _note_lapse(self) -> None:
        if not self._is_connected or monotonic() < self._lapses_at:
            return
        # Longer each time: where no server takes records, nothing is won by trying others.
        self._lapse *= 2
        self._lapses_at = monotonic() + self._lapse
        if self._on_lapse is not None:
            self._on_lapse()

    async def _renew(self) -> None:
        before = self.state
        self._record = msgspec.structs.replace(self._record, counter=self._record.counter + 1)
        try:
            data = encode_record(self._record)
            if not await self._leased.write(data):
                raise self.conflict(self._record)
            if self._on_written is not None:
                self._on_written(data)
            self._lapse = self._leased.lease.ttl
            self._lapses_at = monotonic() + self._lapse
        finally:
            self._tell(before)

    async def _make_bucket(self) -> None:
        await ensure_bucket(self._jetstream, timeout=ANSWER_TIMEOUT)

    async def _remake_bucket(self) -> None:
        # The disk that broke it may be full still, with room for a file and not for what follows.
        await ensure_bucket(self._jetstream, in_memory=True)

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
            self._leased.note_bucket(info.replicas, info.messages)
            if self._on_count is not None:
                self._on_count(info.messages)
            if info.in_cluster and info.replicas < self._jetstream.replicas:
                await self._make_bucket()
        except DynbusError as error:
            logger.debug("the instances were not counted: %s", error)
            return
        self._until_count = RENEWALS_PER_COUNT

    def _is_mine(self, stored: StoredMessage) -> bool:
        other = record_of(stored)
        return other is None or other.incarnation in (self._record.incarnation, self._gone)

    def _tell(self, before: LeaseState) -> None:
        if self.state is not before and self._on_state is not None:
            self._on_state(self.state)
