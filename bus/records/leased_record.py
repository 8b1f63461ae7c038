"""A record that one process holds while it lives: written with a TTL, renewed, and fenced.

`Lease` decides what a write expects and what an answer means; `LeasedRecord` carries it out. A
record is written with a TTL every time (a write without one would make it immortal) and with the
sequence it expects, so that two holders of one record cannot both live.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Final

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import DynbusError, PermissionDenied, Unavailable
from dynbus.bus.protocol.random_ids import jitter
from dynbus.bus.transport import JetStream, NoStream, StoredMessage, WrongLastSequence

logger = logging.getLogger(__name__)

WRITE_TIMEOUT: Final = 2.0
ANSWER_TIMEOUT: Final = 2.0
WRITES: Final = 4
"""Tries of one write; each learns from the one before what to expect."""
EARLIEST: Final = 0.8
"""The part of the time between two renewals after which the next one may come."""
FIRST_DELAY: Final = 0.25
"""Seconds between a write that failed and the next, which double with each that fails."""


class LeaseState(Enum):
    """The state of a lease."""

    NEW = "new"
    HELD = "held"
    LOST = "lost"
    ENDED = "ended"
    CONFLICT = "conflict"


class Lease:
    """One holder's part in a record that only one may hold, without I/O. Times are of one
    monotonic clock.

    Args:
        name: for people.
        ttl: seconds for which each write lasts.

    Attributes:
        revision: which last sequence of its subject the next write expects.
        written: whether a write was begun, so that the record may be there whatever became of it.
    """

    __slots__ = ("_until", "name", "revision", "state", "ttl", "written")

    def __init__(self, name: str, ttl: float) -> None:
        self.name = name
        self.ttl = ttl
        self.revision = 0
        self.state = LeaseState.NEW
        self.written = False
        self._until = 0.0

    def __repr__(self) -> str:
        return f"<Lease {self.name} [{self.state.value} | rev {self.revision}]>"

    def left(self, now: float) -> float:
        """Seconds for which nobody else can hold the record, if nothing else happens."""
        return max(0.0, self._until - now) if self.state is LeaseState.HELD else 0.0

    def begin(self) -> int:
        """A write begins; returns what it expects."""
        self.written = True
        return self.revision

    def stored(self, sequence: int, begun: float) -> None:
        """The write that was begun at `begun` was stored: the record lasts that long at least."""
        self.revision = sequence
        self.state = LeaseState.HELD
        self._until = begun + self.ttl

    def observe(self, stored: StoredMessage | None, *, is_mine: bool) -> None:
        """Another sequence was there: this is it. The next write expects it.

        A marker, a record of its own, or nothing at all means that the lease expired while its
        holder was away, or that the answer to a write was lost. Another's record is a conflict.
        """
        self.revision = 0 if stored is None else stored.sequence
        taken = stored is not None and not stored.is_marker and not is_mine
        self.state = LeaseState.CONFLICT if taken else LeaseState.LOST


ASKERS: Final = 10
"""About how many of all holders that know each other's number make a bucket again that takes
nothing, at first: mostly its servers elect a leader just then, and have no time for thousands that
ask what became of it. With each try there are half as many more."""

SPREAD: Final = 0.5
"""Seconds; of all who find the stream broken at once one should make it again, not each."""


class StreamRepair:
    """Looks at one stream, and makes it again where that mends it.

    After a full disk nats-server answers no write to a stream, also when there is space again,
    until the stream is made again or the server is restarted. A process that can say again what the
    stream held need not wait for that.

    Args:
        make: makes the stream when it does not exist.
        remake: makes it where it can be written, once it could not.
    """

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        make: Callable[[], Awaitable[None]],
        remake: Callable[[], Awaitable[None]],
    ) -> None:
        self._jetstream = jetstream
        self._stream = stream
        self._make = make
        self._remake = remake
        self._refused = False
        self._replicas = 1

    def __repr__(self) -> str:
        return f"<StreamRepair {self._stream}>"

    def note_replicas(self, replicas: int) -> None:
        """Know how many servers keep the stream, so that those of several need not be asked."""
        self._replicas = replicas

    async def look(self) -> bool:
        """Make the stream again if its store is broken; whether it is another one than before.

        A stream with replicas is left alone: its other servers go on without the broken one, and
        may be electing a leader just now.

        Raises:
            DynbusError: the server does not answer, or refuses.
        """
        if self._refused or self._replicas > 1:
            return False
        try:
            return await self._look()
        except NoStream:
            await self._make()
            return True
        except PermissionDenied as error:
            self._refused = True
            logger.warning(
                "stream %s takes no writes, and whether it must be made again is not for us to "
                "see (%s): restart its server if its disk was full, or allow us to purge and "
                "delete it",
                self._stream,
                error,
            )
            return False

    async def _look(self) -> bool:
        info = await self._jetstream.stream_info(self._stream, timeout=ANSWER_TIMEOUT)
        if info.replicas > 1:
            return False
        why = await self._jetstream.write_error(self._stream, timeout=ANSWER_TIMEOUT)
        if not why:
            return False
        await asyncio.sleep(jitter.uniform(0.0, SPREAD))
        again = await self._jetstream.stream_info(self._stream, timeout=ANSWER_TIMEOUT)
        if again.created == info.created:
            await self._jetstream.delete_stream(self._stream, timeout=ANSWER_TIMEOUT)
            logger.warning("stream %s took no writes and is made again: %s", self._stream, why)
        await self._remake()
        return True


class LeasedRecord:
    """A record of a bucket that is written for as long as no other process holds it.

    Args:
        stream: the bucket's; its subjects keep their last message alone.
        subject: the record's.
        ttl: whole seconds, one at least, after which the record of one that died is gone.
        marker_ttl: seconds for which a record that was withdrawn leaves a marker.
        is_mine: whether a stored record may be written over: it is of this holder, or nobody's.
        make: makes the bucket where there is none.
        remake: makes it again where its server can store nothing in it any more.
    """

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        subject: str,
        ttl: float,
        *,
        marker_ttl: float,
        is_mine: Callable[[StoredMessage], bool],
        make: Callable[[], Awaitable[None]],
        remake: Callable[[], Awaitable[None]],
    ) -> None:
        self.lease = Lease(subject, ttl)
        self.subject = subject
        self._jetstream = jetstream
        self._stream = stream
        self._marker_ttl = marker_ttl
        self._is_mine = is_mine
        self._make = make
        self._repair = StreamRepair(jetstream, stream, make, remake)
        self._share_of_askers = 1.0
        self._logged: set[str] = set()
        self._failures = 0
        self._failed_by: DynbusError | None = None
        self._is_checked = False

    def __repr__(self) -> str:
        return f"<LeasedRecord {self.lease!r}>"

    def pause(self) -> float:
        """Seconds until the next write, a third of the TTL at most.

        They are drawn, so that many holders that were held up together do not write together ever
        after. Failures in a row make them longer each time, from a short one on: a server that has
        too much to do is asked by all holders, and what it refused at once it would refuse again.
        """
        if self._failed_by is None:
            return self.lease.ttl / 3 * jitter.uniform(EARLIEST, 1.0)
        longest = self.lease.ttl / (12 if isinstance(self._failed_by, Unavailable) else 3)
        delay = FIRST_DELAY * 2.0 ** min(self._failures, 30)
        return min(delay, longest) * jitter.uniform(0.5, 1.0)

    def start_anew(self) -> None:
        """Count failures from none on: nothing failed, or something has changed."""
        self._failures = 0
        self._failed_by = None

    @property
    def is_taken(self) -> bool:
        """True if somebody else held the record when it was last looked at."""
        return self.lease.state is LeaseState.CONFLICT

    async def look(self, *, timeout: float = ANSWER_TIMEOUT) -> StoredMessage | None:
        """See who holds the record, and what the next write expects; returns what is stored.

        Raises:
            NoStream: there is no bucket.
            Unavailable: JetStream does not answer.
        """
        stored = await self._jetstream.last(self._stream, self.subject, timeout=timeout)
        self.lease.observe(stored, is_mine=stored is not None and self._is_mine(stored))
        return stored

    async def write(self, data: bytes) -> bool:
        """Write the record; False when another holds it.

        Raises:
            DynbusError: the bucket cannot be made, or refuses the record.
            Unavailable: JetStream does not answer, or has no leader just now.
        """
        lease = self.lease
        if not self._is_checked:
            # One that is there may be another one than is needed, which shows records to others.
            await self._make()
            self._is_checked = True
        was_made = False
        for _ in range(WRITES):
            expected, begun = lease.begin(), monotonic()
            try:
                sequence = await self._jetstream.publish(
                    self.subject,
                    data,
                    ttl=lease.ttl,
                    expected_last_subject_sequence=expected,
                    timeout=min(WRITE_TIMEOUT, lease.ttl / 4),
                )
            except NoStream:
                # Servers that elect a leader take nothing either, and keep what they have: what
                # revision to expect is known when the next write is refused.
                if was_made or jitter.random() >= self._share_of_askers:
                    # Fewer may be there than there were records.
                    self._share_of_askers = min(1.0, 1.5 * self._share_of_askers)
                    raise Unavailable(f"nobody takes {self.subject} just now") from None
                await self._make()
                was_made = True
            except WrongLastSequence:
                await self.look()
                if lease.state is LeaseState.CONFLICT:
                    return False
            else:
                lease.stored(sequence, begun)
                self.start_anew()
                self._logged.clear()
                return True
        raise Unavailable(f"the record {self.subject} changes under every write")

    async def withdraw(self, *, is_connected: bool = True) -> None:
        """Delete the record if it may be there; a failure is logged, it expires by itself then.

        Args:
            is_connected: False where nothing can be sent, so that nothing is waited for.
        """
        lease = self.lease
        if not lease.written or lease.state in (LeaseState.CONFLICT, LeaseState.ENDED):
            return
        # From here on nobody may count on it, since another may hold it before the answer comes.
        lease.state = LeaseState.ENDED
        try:
            if not is_connected:
                raise Unavailable("there is no connection")
            await self._delete()
        except NoStream:
            # Everything in the bucket went with it.
            pass
        except DynbusError as error:
            logger.warning("the record of %s expires by itself: %s", self.subject, error)
        lease.state = LeaseState.ENDED

    async def _delete(self) -> None:
        for _ in range(2):
            try:
                await self._jetstream.publish(
                    self.subject,
                    b"",
                    ttl=self._marker_ttl,
                    deleted=True,
                    expected_last_subject_sequence=self.lease.revision,
                    timeout=WRITE_TIMEOUT,
                )
                return
            except WrongLastSequence:
                # A write was cut off between its sending and its answer.
                await self.look()
                if self.lease.state is LeaseState.CONFLICT:
                    return

    def note_bucket(self, replicas: int, records: int) -> None:
        """Know how many servers keep the bucket, since with several it is never made again for its
        store, and how many records are in it."""
        self._repair.note_replicas(replicas)
        self._share_of_askers = min(1.0, ASKERS / max(1, records))

    async def after_failure(self, error: DynbusError) -> None:
        """Count and log why the record was not written, and mend the bucket if it can take none
        at all."""
        self._failures += 1
        self._failed_by = error
        # Once for each reason, until it is written: it is tried again and again.
        level = logging.DEBUG if str(error) in self._logged else logging.WARNING
        self._logged.add(str(error))
        logger.log(level, "%r was not renewed: %s", self.lease, error)
        if not isinstance(error, Unavailable):
            return
        try:
            await self._repair.look()
        except DynbusError as problem:
            logger.debug("%r: its bucket was not looked at: %s", self.lease, problem)
