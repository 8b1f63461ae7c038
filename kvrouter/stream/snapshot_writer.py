"""Snapshots of a follower's index: when one is due (`SnapshotPlan`, without I/O), and who takes it:
one router of all that follow a component (`SnapshotWriter`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import anyio
import anyio.lowlevel

from dynbus import ConfigError, DynbusError
from dynbus.kvrouter.names import kv_event_subject
from dynbus.kvrouter.radix.snapshot import IndexDump
from dynbus.spi import (
    Background,
    Bus,
    JetStream,
    NoStream,
    Openable,
    StreamInfo,
    StreamLimits,
    monotonic,
    random_id,
    unix_time,
)

from .awareness import MAX_BEHIND, AwarenessLevel
from .election import DEFAULT_TTL, Election
from .follower import IndexFollower
from .snapshots import Coverage, SnapshotInfo, SnapshotStore

logger = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 1.0
RETRY_DELAY: Final = 5.0
REST: Final = 4.0
"""Times of what a snapshot took that pass before the next one: a fifth of the time at most goes
there, however small the limits of the stream are."""

_CALM: Final = (AwarenessLevel.EXACT, AwarenessLevel.APPROXIMATE)


class Due(NamedTuple):
    """The reason for which a snapshot is due.

    Attributes:
        is_urgent: the limits come near what the latest one needs of the stream, so that a new
            one cannot wait for better times.
    """

    reason: str
    is_urgent: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """The intervals at which snapshots are taken. Whatever comes first counts.

    Attributes:
        messages, size, seconds: of the stream since the latest one; `size` is in bytes, and an
            estimate from the mean of all messages.
        margin: of what the stream may hold, the part that may be newer than the latest
            snapshot: from there on it is urgent.

    Raises:
        ConfigError: a number is not above 0, or `margin` not below 1.
    """

    messages: int = 100_000
    size: int = 128 * 1024 * 1024
    seconds: float = 600.0
    margin: float = 0.5

    def __post_init__(self) -> None:
        for name in ("messages", "size", "seconds", "margin"):
            # Not a number is not above 0 either.
            if not getattr(self, name) > 0:
                raise ConfigError(f"snapshot plan: {name} = {getattr(self, name)}: give > 0")
        if self.margin >= 1:
            raise ConfigError(
                f"snapshot plan: margin = {self.margin}: give less than 1, or snapshots come "
                "when the limits have cut off what follows the one before"
            )

    def due(
        self, latest: SnapshotInfo | None, stream: StreamInfo, limits: StreamLimits, now: float
    ) -> Due | None:
        """The reason for which a snapshot is due; None while none is.

        Args:
            latest: the newest snapshot of this making of the stream.
            now: Unix seconds.
        """
        if not stream.last_sequence:
            return None
        if latest is None:
            return Due("there is none", is_urgent=True)
        newer = stream.last_sequence - latest.coverage.sequence
        if newer <= 0:
            return None
        urgent = self._urgency(latest, newer, stream, limits, now)
        if urgent:
            return Due(urgent, is_urgent=True)
        size = _newer_size(newer, stream)
        age = now - latest.written
        if newer >= self.messages:
            return Due(f"{newer} messages since the latest")
        if size >= self.size:
            return Due(f"about {size} bytes since the latest")
        if age >= self.seconds:
            return Due(f"{age:.0f} s since the latest")
        return None

    def _urgency(
        self,
        latest: SnapshotInfo,
        newer: int,
        stream: StreamInfo,
        limits: StreamLimits,
        now: float,
    ) -> str:
        """The limit of the stream that comes near the messages the latest snapshot needs; empty for
        none.
        """
        if stream.first_sequence > latest.coverage.sequence + 1:
            return "the limits have cut off what follows the latest"
        is_cut = stream.first_sequence > 1
        if is_cut and newer >= self.margin * stream.messages:
            return f"{newer} of {stream.messages} messages are newer than the latest"
        size = _newer_size(newer, stream)
        if limits.max_bytes is not None and size >= self.margin * limits.max_bytes:
            return f"about {size} of {limits.max_bytes} bytes are newer than the latest"
        if limits.max_messages is not None and newer >= self.margin * limits.max_messages:
            return f"{newer} of {limits.max_messages} messages are newer than the latest"
        if limits.max_age is not None and now - latest.written >= self.margin * limits.max_age:
            return f"{now - latest.written:.0f} s of {limits.max_age:.0f} since the latest"
        return ""


def _newer_size(newer: int, stream: StreamInfo) -> int:
    return stream.size * min(newer, stream.messages) // max(1, stream.messages)


@dataclass(slots=True)
class SnapshotStatus:
    """The state of the snapshots of a component, as one router sees it.

    Attributes:
        is_elected: whether it is this router that takes them.
        written: by this router.
        abandoned: begun, and given up since it was not elected any longer or the stream was
            made again.
        failures: of looks and of writing.
        latest: the newest that this router knows, if it was ever elected.
        seconds: that the last one took it, dump and transfer.
        last_failure: empty for none.
    """

    is_elected: bool = False
    written: int = 0
    abandoned: int = 0
    failures: int = 0
    latest: SnapshotInfo | None = None
    seconds: float = 0.0
    last_failure: str = ""


class SnapshotWriter(Openable):
    """Stands for election, and takes snapshots while elected. Use it with `async with`.

    The follower is asked as before while its index is dumped, and is as much behind after it
    as the dump took.

    Args:
        follower: is entered before and left after this.
        store: where snapshots go; the default one of the namespace unless given.
        ttl: seconds after which another router takes over from one that died.
        bus: see `Election`.
        background: see `Openable`.
    """

    def __init__(
        self,
        jetstream: JetStream,
        follower: IndexFollower,
        *,
        store: SnapshotStore | None = None,
        plan: SnapshotPlan | None = None,
        ttl: float = DEFAULT_TTL,
        bus: Bus | None = None,
        background: Background | None = None,
    ) -> None:
        super().__init__(background)
        self._jetstream = jetstream
        self._follower = follower
        self._store = store or SnapshotStore(jetstream, follower.namespace)
        self._plan = plan or SnapshotPlan()
        self._election = Election(
            jetstream,
            follower.namespace,
            follower.component,
            random_id(),
            is_fit=self._is_fit,
            ttl=ttl,
            bus=bus,
        )
        self._knows_latest = False
        self._is_writing = False
        self._not_before = 0.0
        self._status = SnapshotStatus()

    def __repr__(self) -> str:
        where = f"{self._follower.namespace}.{self._follower.component}"
        return f"<SnapshotWriter {where} [elected: {self._election.is_elected}]>"

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        async with self._election, anyio.create_task_group() as tasks:
            tasks.start_soon(self._run)
            yield
            # A snapshot that is being written is given up.
            tasks.cancel_scope.cancel()

    def status(self) -> SnapshotStatus:
        """Counters of this writer."""
        return replace(
            self._status,
            is_elected=self._election.is_elected,
            failures=self._status.failures + self._election.failures,
        )

    def _is_fit(self) -> bool:
        follower = self._follower
        if self._is_writing:
            return True
        if follower.position.created is None or follower.status().behind > MAX_BEHIND:
            return False
        return follower.awareness().level is not AwarenessLevel.OFF

    @property
    def _is_calm(self) -> bool:
        """True if the index is what the stream says, whatever instances say of themselves."""
        return self._follower.awareness(with_stated=False).level in _CALM

    # The task -------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await anyio.sleep(LOOK_INTERVAL)
            if not self._election.is_elected:
                self._knows_latest = False
                continue
            if monotonic() < self._not_before:
                continue
            try:
                await self._look()
            except DynbusError as error:
                # A look comes every few seconds: what goes on is told once.
                level = (
                    logging.DEBUG if str(error) == self._status.last_failure else logging.WARNING
                )
                logger.log(level, "%r: %s", self, error)
                self._note_failure(error)
            except Exception as error:
                # The stream would go on being cut without a snapshot.
                self._note_failure(error)
                logger.exception("%r: looking whether a snapshot is due failed", self)

    def _note_failure(self, error: Exception) -> None:
        self._status.failures += 1
        self._status.last_failure = str(error)
        self._not_before = monotonic() + RETRY_DELAY

    async def _look(self) -> None:
        """Take a snapshot if one is due."""
        follower = self._follower
        if not self._knows_latest:
            await self._learn()
        stream = await self._jetstream.stream_info(follower.stream.name)
        latest = self._status.latest
        if latest is not None and not latest.fits(stream):
            latest = None
        due = self._plan.due(latest, stream, follower.stream.config.limits, unix_time())
        if due is None or not (due.is_urgent or self._is_calm):
            return
        newest = await self._newest()
        if not due.is_urgent and latest is not None and newest <= latest.coverage.sequence:
            # Only other components were heard since the latest, which is in no danger.
            return
        begun = monotonic()
        self._is_writing = True
        try:
            with self._election.while_elected() as elected:
                await self._write(due, stream, newest)
            if elected.cancelled_caught:
                self._status.abandoned += 1
                logger.warning("%r: a snapshot was given up: another router takes them now", self)
        finally:
            self._is_writing = False
            self._status.seconds = monotonic() - begun
            self._not_before = monotonic() + REST * self._status.seconds

    async def _learn(self) -> None:
        """Learn what others have written."""
        snapshots = await self._store.snapshots(self._follower.component)
        dropped = await self._store.drop_abandoned()
        if dropped:
            logger.info("%r: dropped %d snapshots that were never finished", self, dropped)
        created = self._follower.position.created
        ours = [one for one in snapshots if one.coverage.created == created]
        self._status.latest = ours[-1] if ours else None
        self._knows_latest = True

    async def _newest(self) -> int:
        """The sequence of the newest message of this component; 0 for none."""
        follower = self._follower
        subject = kv_event_subject(follower.namespace, follower.component, "*", "*")
        try:
            stored = await self._jetstream.last(follower.stream.name, subject)
        except NoStream:
            return 0
        return 0 if stored is None else stored.sequence

    async def _write(self, due: Due, stream: StreamInfo, newest: int) -> None:
        follower = self._follower
        async with follower.frozen() as index:
            position = follower.position
            if position.created != stream.created:
                return
            # What other components said since then is covered too.
            is_current = newest <= position.sequence
            sequence = max(position.sequence, stream.last_sequence if is_current else 0)
            latest = self._status.latest
            if latest is not None and latest.coverage == (stream.created, sequence):
                return
            dump = IndexDump(index, sequence)
            for _ in dump.slices():
                await anyio.lowlevel.checkpoint()
            counted = index.statistics()
            was_replaced = follower.index is not index
        if was_replaced:
            self._status.abandoned += 1
            return
        self._status.latest = latest = await self._store.write(
            follower.component,
            Coverage(stream.created, sequence),
            dump.data,
            blocks=counted.blocks,
            instances=counted.instances,
        )
        self._status.written += 1
        logger.info("%r: took %s (%s)", self, latest.name, due.reason)
