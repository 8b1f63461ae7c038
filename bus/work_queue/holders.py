"""Records of who holds which jobs: those of a process that was killed begin elsewhere at once.

The server knows that a job is held, and not by whom. So each taker stores what it holds, and each
looks at what others have stored: where the server says that nobody listens any more where a taker
would, its jobs are given back in its place, by the one that is first to delete its record.

A taker that is frozen, or whose host is silent, listens as far as the server knows: its jobs wait
for `ack_wait`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec

from dynbus.bus.background import task_group
from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import DynbusError, PermissionDenied
from dynbus.bus.protocol.liveness import GONE_AFTER, RECONNECT_GRACE
from dynbus.bus.protocol.names import (
    HOLDERS_BUCKET,
    REPLY_ROOT,
    EndpointName,
    holder_subject,
    is_safe_reply,
)
from dynbus.bus.protocol.random_ids import jitter, random_id
from dynbus.bus.transport import (
    AckKind,
    Delivery,
    JetStream,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    Subscription,
    WrongLastSequence,
)

from .job_stream import JobStream
from .storing import TRY_SECONDS

logger = logging.getLogger(__name__)

MOST_TOLD: Final = 512
"""Jobs that a record has room for: those that were begun last wait for `ack_wait`."""

TELL_PAUSE: Final = 0.25
"""Seconds between two writes of a record: what takes less is over before anybody could help."""

LOOK_PAUSE: Final = 0.5
"""Seconds between two looks at each holder, by any of the takers."""

MARKER_TTL: Final = 60.0
"""Seconds for which a record that was deleted leaves a marker, by which its taker knows of it."""

HOLDERS_STREAM: Final = StreamConfig(
    name=f"KV_{HOLDERS_BUCKET}",
    subjects=(f"$KV.{HOLDERS_BUCKET}.>",),
    limits=StreamLimits(
        max_messages_per_subject=1, max_bytes=64 * 1024 * 1024, max_message_size=96 * 1024
    ),
    marker_ttl=0.0,
    in_memory=True,
    description="dynbus: which taker of a work queue holds which jobs",
)


class HeldJob(msgspec.Struct, frozen=True, array_like=True):
    """A job that a taker holds: its sequence, how often it was delivered, and where to say what
    becomes of it."""

    sequence: int
    tries: int
    token: str


class Holder(msgspec.Struct, frozen=True):
    """The record of a taker.

    Attributes:
        listens: the subject at which its process listens as long as it lives.
        jobs: oldest first.
    """

    listens: str
    jobs: list[HeldJob]


class StoredHolder(msgspec.Struct, frozen=True):
    """A holder's record, as it is stored."""

    subject: str
    sequence: int
    holder: Holder


async def holders_of(jetstream: JetStream, queue: EndpointName) -> list[Holder]:
    """The takers of a queue that say what they hold.

    Raises:
        PermissionDenied, Unavailable: the server does not tell.
    """
    try:
        records = await jetstream.read(HOLDERS_STREAM.name, holder_subject(queue, "*"))
    except NoStream:
        return []
    return [one.holder for one in read_holders(records, "")]


def read_holders(messages: Iterable[StoredMessage], tokens: str) -> list[StoredHolder]:
    """The records that can be read; others say nothing.

    Args:
        tokens: what the tokens of the queue's jobs begin with, so that nothing else is published.
    """
    holders: list[StoredHolder] = []
    for message in messages:
        if message.is_marker:
            continue
        try:
            holder = msgspec.json.decode(message.data, type=Holder)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        is_safe = is_safe_reply(holder.listens, (f"{REPLY_ROOT}.",))
        if is_safe and all(is_safe_reply(job.token, (tokens,)) for job in holder.jobs):
            holders.append(StoredHolder(message.subject, message.sequence, holder))
    return holders


def orphans(dead: Holder, others: Iterable[Holder]) -> list[HeldJob]:
    """The jobs of one that is dead which nobody else has been handed since."""
    handed: dict[int, int] = {}
    for one in others:
        for job in one.jobs:
            handed[job.sequence] = max(job.tries, handed.get(job.sequence, 0))
    return [job for job in dead.jobs if handed.get(job.sequence, 0) < job.tries]


class Absences:
    """Those that nobody found when they were looked for, and since when. No I/O, no clock.

    One look says little: a process that connects again listens nowhere for a moment.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def is_dead(self, name: str, there: bool | None, now: float) -> bool:
        """True if a holder is gone for good, after one more look.

        Args:
            there: None where nobody knows.
        """
        if there is None or there:
            self._since.pop(name, None)
            return False
        return now - self._since.setdefault(name, now) >= GONE_AFTER

    def keep(self, names: Collection[str]) -> None:
        """Forget all others."""
        for name in self._since.keys() - set(names):
            del self._since[name]

    @property
    def are_any(self) -> bool:
        """True if a holder is to be looked for again soon."""
        return bool(self._since)


class Holders:
    """The record of one taker, kept by it, and those of others, whose jobs it gives back.

    Args:
        held: what it holds at this moment, oldest first.
        doubted: called with what it held when another has taken it for dead.
    """

    def __init__(
        self,
        bus: Bus,
        jobs: JobStream,
        held: Callable[[], Iterable[Delivery]],
        doubted: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._jobs = jobs
        self._jetstream = bus.data.jetstream
        self._held = held
        self._doubted = doubted
        self._subject = holder_subject(jobs.name, random_id())
        self._listens = bus.replies.holder(self._subject.rpartition(".")[2])
        self._ttl = float(max(1, math.ceil(jobs.ack_wait)))
        self._sequence = 0
        self._stored: list[HeldJob] = []
        self._has_stored = False
        self._changed = asyncio.Event()
        self._absences = Absences()

    def __repr__(self) -> str:
        return f"<Holders {self._jobs.name} [stored: {len(self._stored)}]>"

    def changed(self) -> None:
        """Note that other jobs are held than before."""
        self._changed.set()

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
        """Store what is held, and look after that of others, while the block runs; the record is
        withdrawn when it ends."""
        try:
            await self._jetstream.ensure_stream(HOLDERS_STREAM)
            subscription = await self._bus.lane.run(self._listen())
        except DynbusError as error:
            self._go_without(error)
            yield
            return
        works = [
            self._bus.background.start(self._tell, name=f"tell what is held of {self._jobs.name}"),
            self._bus.background.start(self._look, name=f"look after takers of {self._jobs.name}"),
        ]
        try:
            yield
        finally:
            with anyio.move_on_after(TRY_SECONDS, shield=True):
                for work in works:
                    await work.end()
                await self._withdraw()
            self._bus.lane.call(subscription.unsubscribe)

    def _go_without(self, error: DynbusError) -> None:
        logger.warning(
            "where a taker of %s is killed, its jobs wait for ack_wait (%g s): who holds which "
            "cannot be stored, or read: %s",
            *(self._jobs.name, self._jobs.ack_wait, error),
        )

    async def _listen(self) -> Subscription:
        connection = self._bus.lane.connection
        subscription = connection.subscribe(self._listens, lambda _: None)
        await connection.barrier()
        return subscription

    # What is held here ----------------------------------------------------------------------

    async def _tell(self) -> None:
        while True:
            with anyio.move_on_after(self._ttl / 3):
                await self._changed.wait()
            self._changed.clear()
            jobs = [
                HeldJob(one.message.sequence, one.tries, one.token)
                for one, _ in zip(self._held(), range(MOST_TOLD), strict=False)
            ]
            if jobs or self._stored:
                try:
                    await self._store(jobs)
                except PermissionDenied as error:
                    self._go_without(error)
                    return
                except DynbusError as error:
                    logger.debug("%r: not stored: %s", self, error)
                    self._changed.set()
            await anyio.sleep(TELL_PAUSE)

    async def _store(self, jobs: list[HeldJob]) -> bool:
        """Store what is held; False where it has to be tried again, with another sequence."""
        self._has_stored = True
        data = msgspec.json.encode(Holder(self._listens, jobs)) if jobs else b""
        try:
            self._sequence = await self._jetstream.publish(
                self._subject,
                data,
                timeout=TRY_SECONDS,
                ttl=self._ttl if jobs else MARKER_TTL,
                expected_last_subject_sequence=self._sequence,
                deleted=not jobs,
            )
        except WrongLastSequence:
            await self._find_out()
            self._changed.set()
            return False
        self._stored = jobs
        return True

    async def _find_out(self) -> None:
        """Learn what became of the record: the answer to a write was lost, it has expired, or
        another taker has deleted it."""
        stored = await self._jetstream.last(HOLDERS_STREAM.name, self._subject, timeout=TRY_SECONDS)
        self._sequence = 0 if stored is None else stored.sequence
        if stored is not None and stored.is_marker and stored.data:
            logger.warning("%r was taken for dead: others may have its jobs", self)
            self._doubted()

    async def _withdraw(self) -> None:
        # Its last write may have been broken off, and be stored all the same.
        if not self._has_stored:
            return
        try:
            if not await self._store([]):
                await self._store([])
        except DynbusError as error:
            logger.debug("%r: its record expires by itself: %s", self, error)

    # What others hold -----------------------------------------------------------------------

    async def _look(self) -> None:
        holders = 0
        while True:
            # Each holder is looked at as often, however many look.
            pause = LOOK_PAUSE * max(1, holders) * jitter.uniform(0.75, 1.25)
            await anyio.sleep(GONE_AFTER if self._absences.are_any else pause)
            if monotonic() - self._jobs.outage_at < RECONNECT_GRACE:
                # Others connect again too, and are nowhere until then.
                continue
            try:
                holders = await self._look_once()
            except NoStream:
                await self._make_again()
            except PermissionDenied as error:
                self._go_without(error)
                return
            except DynbusError as error:
                logger.debug("%r: others were not looked at: %s", self, error)

    async def _look_once(self) -> int:
        """Look at each of the others; how many there are."""
        every = holder_subject(self._jobs.name, "*")
        messages = await self._jetstream.read(HOLDERS_STREAM.name, every, timeout=TRY_SECONDS)
        holders = read_holders(messages, f"$JS.ACK.{self._jobs.stream}.")
        others = [one for one in holders if one.subject != self._subject]
        self._absences.keep([one.subject for one in others])
        async with task_group() as tasks:
            for one in others:
                tasks.start_soon(self._look_at, one, [of.holder for of in holders if of is not one])
        return len(holders)

    async def _look_at(self, one: StoredHolder, others: list[Holder]) -> None:
        there = await self._bus.questions.is_heard(one.holder.listens)
        if not self._absences.is_dead(one.subject, there, monotonic()):
            return
        try:
            # Of all who find it dead one alone deletes what it has found.
            await self._jetstream.publish(
                one.subject,
                self._subject.encode(),
                timeout=TRY_SECONDS,
                ttl=MARKER_TTL,
                expected_last_subject_sequence=one.sequence,
                deleted=True,
            )
        except WrongLastSequence:
            return
        left = orphans(one.holder, others)
        logger.info("a taker of %s is dead: %d jobs begin elsewhere", self._jobs.name, len(left))
        for job in left:
            await self._jetstream.acknowledge(job.token, AckKind.NAK, timeout=TRY_SECONDS)

    async def _make_again(self) -> None:
        try:
            await self._jetstream.ensure_stream(HOLDERS_STREAM)
        except DynbusError as error:
            logger.debug("%r: the bucket cannot be made: %s", self, error)
        else:
            self._changed.set()
