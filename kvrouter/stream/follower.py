"""The way of KV-cache events from the stream into a router's index.

`IndexFollower` reads the stream in order and applies each message as it comes. What the index
holds is a function of the messages alone; what it lacks the follower asks the rank for, which
then says it to every follower by the same way. Instances that are gone are removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Self

import anyio
import numpy as np
from numpy.typing import NDArray

from dynbus import ConfigError, DynbusError, Runtime
from dynbus.kvrouter.names import kv_event_subject, kv_resync_subject
from dynbus.kvrouter.radix.index import DEFAULT_MAX_BLOCKS, Overlap, RadixIndex, Rank
from dynbus.spi import (
    Background,
    Connection,
    NoStream,
    Openable,
    OrderedConsumer,
    StoredMessage,
    check_token,
    monotonic,
    unix_time,
)

from .awareness import CacheAwareness, Observation, cache_awareness
from .event_stream import EventStream, ensure_stream, subject_rank
from .live_index import LiveIndex, Staleness
from .membership import Group, Instances, live_instances
from .resync import ResyncPlan, encode_resync

logger = logging.getLogger(__name__)

TICK: Final = 0.1
"""Seconds between two looks at instances and at what is due."""
LOOK_INTERVAL: Final = 1.0
"""Seconds between two looks at the stream itself."""
SILENCE: Final = 2.5 * LOOK_INTERVAL
"""Seconds without an answer to such a look after which the server is out of reach, whether or not
the connection seems to be there: a link that is cut in silence leaves it as it is."""
MESSAGES_PER_STEP: Final = 8
"""Messages that waited and are applied in one turn of the loop: a few milliseconds."""


class Position(NamedTuple):
    """The position up to which a stream was applied.

    Attributes:
        sequence: of the last message that was applied; 0 for none.
        created: when the stream was made of which that is; None before it was looked at.
    """

    sequence: int = 0
    created: float | None = None


@dataclass(frozen=True, slots=True)
class FollowerStatus:
    """The state of a follower.

    Attributes:
        behind: messages that the stream had for it beyond `position` when that one was sent.
        refused: messages that could not be used: of another rank than their subject names, of an
            epoch too far ahead, or not readable.
        mismatches: digests that differed from the index.
        comparisons: digests that were compared in full.
        requests: resyncs that were asked for.
        recreations: times at which the stream was another one than before.
        failures: of looks at the stream and the instances, and of messages that were held back.
    """

    position: Position
    behind: int
    staleness: Staleness
    awareness: CacheAwareness
    ranks: int
    refused: int
    mismatches: int
    comparisons: int
    requests: int
    recreations: int
    failures: int


class IndexFollower(Openable):
    """An index that follows the events of one component. Use it with `async with`.

    Entering it makes the stream if there is none, and begins to read. It raises `ConfigError` when
    the stream is there with other settings, and `Unavailable` when JetStream does not answer. When
    it is closed the index stays as it is.

    Args:
        connection: belongs to the event loop on which the follower is entered.
        instances: see `Instances`; every instance counts as known unless given.
        stream: the stream's settings; the defaults for this namespace unless given.
        index, position: where to go on from, of a snapshot; an empty index at the beginning of
            the stream unless given.
        group: the instances that it follows; it passes over the events of others. None for all.
        background: see `Openable`.

    Attributes:
        position: what the index holds is the stream up to here.

    Raises:
        ConfigError: a name is not usable, or the stream is another namespace's.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        component: str,
        *,
        instances: Instances | None = None,
        stream: EventStream | None = None,
        index: RadixIndex | None = None,
        position: Position = Position(),  # noqa: B008 - immutable
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        group: Group | None = None,
        background: Background | None = None,
    ) -> None:
        super().__init__(background)
        self._group = group
        self._connection = connection
        self.namespace = check_token("namespace", namespace)
        self.component = check_token("component", component)
        self.stream = stream or EventStream(namespace)
        if self.stream.namespace != namespace:
            raise ConfigError(
                f"the events of namespace {namespace} are not in the stream of "
                f"{self.stream.namespace}: give EventStream({namespace!r}, ...)"
            )
        self._wake = asyncio.Event()
        self._live = LiveIndex(
            f"{namespace}.{component}",
            index or RadixIndex(max_blocks=max_blocks),
            ResyncPlan(),
            self._wake.set,
        )
        self._max_blocks = max_blocks
        self._instances = instances
        self.position = position
        self._held_back: deque[StoredMessage] | None = None
        self._behind = 0
        self._caught_up = False
        self._consumer: OrderedConsumer | None = None
        self._look_at = 0.0
        self._answered_at = 0.0
        self._recreations = 0
        self._failures = 0

    def __repr__(self) -> str:
        return (
            f"<IndexFollower {self.namespace}.{self.component} "
            f"[at {self.position.sequence} | {self.awareness()}]>"
        )

    @classmethod
    def over(
        cls,
        runtime: Runtime,
        namespace: str,
        component: str,
        *,
        stream: EventStream | None = None,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
    ) -> Self:
        """A follower on a runtime's connection, for the instances that its discovery knows."""
        runtime.discovery.begin()
        return cls(
            runtime.bus.data,
            namespace,
            component,
            instances=partial(live_instances, runtime, namespace, component),
            stream=stream,
            max_blocks=max_blocks,
            background=runtime.bus.background,
        )

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        jetstream = self._connection.jetstream
        await ensure_stream(jetstream, self.stream)
        if self.position.created is None:
            created = (await jetstream.stream_info(self.stream.name)).created
            self.position = Position(self.position.sequence, created)
        try:
            await self._read()
            self._answered_at = monotonic()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run)
                self._look_at_instances(monotonic())
                yield
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._stop_reading()
            self._consumer = None

    async def _read(self) -> None:
        """Read the stream from here on; of one that was made again everything."""
        await self._stop_reading()
        self._consumer = await self._connection.jetstream.consume(
            self.stream.name,
            self._receive,
            subject=kv_event_subject(self.namespace, self.component, "*", "*"),
            start_sequence=self.position.sequence + 1,
            created=self.position.created,
            on_recreated=self._recreated,
            on_caught_up=self._note_caught_up,
        )

    async def _stop_reading(self) -> None:
        if self._consumer is not None:
            await self._consumer.stop()

    # Questions ------------------------------------------------------------------------

    @property
    def index(self) -> RadixIndex:
        """Belongs to the event loop. Another one after the stream was made again."""
        return self._live.index

    def lookup(self, block_hashes: Sequence[int] | NDArray[np.uint64]) -> dict[str, int]:
        """`RadixIndex.lookup`, for the instances that are known."""
        held_by = self.index.lookup(block_hashes)
        is_known = self._live.members.is_known
        return {instance: held for instance, held in held_by.items() if is_known(instance)}

    def overlaps(self, block_hashes: Sequence[int] | NDArray[np.uint64]) -> dict[Rank, Overlap]:
        """`RadixIndex.overlaps`, for the instances that are known."""
        overlaps = self.index.overlaps(block_hashes)
        is_known = self._live.members.is_known
        return {rank: overlap for rank, overlap in overlaps.items() if is_known(rank.instance)}

    def awareness(self, *, with_stated: bool = True) -> CacheAwareness:
        """The degree to which routing can rely on the index at this moment.

        Args:
            with_stated: whether it counts too what instances say of their own events. Without
                it this is how far the index is what the stream says.
        """
        live = self._live
        unsettled = live.unsettled
        return cache_awareness(
            Observation(
                following=self._consumer is not None,
                connected=self._is_reached,
                caught_up=self._caught_up,
                behind=self._behind,
                ranks=len(self.index.ranks.keys() | set(unsettled)),
                unsettled=len(unsettled),
                target=f"{self.namespace}.{self.component}",
                instances=None if live.members.known is None else len(live.members.known),
                silent=tuple(live.members.silent),
                evicted=self.index.statistics().evicted,
                trouble=live.trouble,
                refusal=live.refusal,
                stated=live.stated if with_stated else {},
            )
        )

    def ask_resync(self, rank: Rank, reason: str) -> None:
        """Have a rank say again what it holds, since something speaks against what it said."""
        if self._live.members.is_known(rank.instance):
            self._live.need(rank, reason, monotonic())

    def status(self) -> FollowerStatus:
        """Counters of this follower."""
        live = self._live
        return FollowerStatus(
            position=self.position,
            behind=self._behind,
            staleness=Staleness.of(live.ages),
            awareness=self.awareness(),
            ranks=len(self.index.ranks),
            refused=live.refused,
            mismatches=live.check.mismatches,
            comparisons=live.check.comparisons,
            requests=live.plan.asked,
            recreations=self._recreations,
            failures=self._failures,
        )

    # Messages -------------------------------------------------------------------------

    @asynccontextmanager
    async def frozen(self) -> AsyncGenerator[RadixIndex]:
        """The index, which does not change until this is left, unless it is replaced because
        the stream was made again. It can be asked; messages wait, and count as `behind`.

        Raises:
            RuntimeError: it is frozen already.
        """
        if self._held_back is not None:
            raise RuntimeError(f"{self!r} is frozen already")
        self._held_back = deque()
        try:
            yield self.index
        finally:
            with anyio.CancelScope(shield=True):
                await self._catch_up()

    async def _catch_up(self) -> None:
        """Apply what was held back, in steps; what comes meanwhile queues up behind it."""
        while self._held_back:
            for _ in range(min(MESSAGES_PER_STEP, len(self._held_back))):
                try:
                    self._apply(self._held_back.popleft())
                except Exception:
                    # As with any other message: those behind it are still to be applied.
                    self._failures += 1
                    logger.exception("%r: a message could not be applied", self)
            await asyncio.sleep(0)
        self._held_back = None

    def _receive(self, message: StoredMessage) -> None:
        if self._held_back is not None:
            self._held_back.append(message)
            self._behind = len(self._held_back) + message.pending
            return
        self._apply(message)

    def _apply(self, message: StoredMessage) -> None:
        self.position = Position(message.sequence, self.position.created)
        self._behind = message.pending
        if self._group is not None:
            rank = subject_rank(message.subject)
            if rank is not None and not self._group.has(rank.instance):
                return
        self._live.apply(message, monotonic(), unix_time(), is_live=self._caught_up)

    def _note_caught_up(self) -> None:
        self._caught_up = True
        self._behind = len(self._held_back or ())

    def _recreated(self) -> None:
        """The stream is another one: nothing of what was read is in it."""
        logger.warning(
            "stream %s was deleted and made again: the index is rebuilt", self.stream.name
        )
        self._recreations += 1
        now = monotonic()
        if self._held_back is not None:
            self._held_back.clear()
        self.position = Position()
        self._caught_up = False
        self._live.begin_anew(RadixIndex(max_blocks=self._max_blocks), now)
        self._look_at = now

    # The task -------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            with anyio.move_on_after(TICK):
                await self._wake.wait()
            self._wake.clear()
            try:
                now = monotonic()
                self._look_at_instances(now)
                self._ask(now)
                if now >= self._look_at:
                    self._look_at = now + LOOK_INTERVAL
                    await self._look_at_stream()
            except DynbusError as error:
                self._failures += 1
                logger.warning("%r: %s", self, error)
            except Exception:
                # The index would grow old without a word.
                self._failures += 1
                logger.exception("%r: looking at the instances or the stream failed", self)

    @property
    def _is_reached(self) -> bool:
        is_connected = self._connection.is_connected
        return is_connected and monotonic() - self._answered_at <= SILENCE

    @property
    def _can_hear(self) -> bool:
        return self._caught_up and self._connection.is_connected

    def _look_at_instances(self, now: float) -> None:
        known = self._instances() if self._instances is not None else None
        if known is not None and self._held_back is None:
            self._live.look_at_instances(known, now, can_hear=self._can_hear)

    def _ask(self, now: float) -> None:
        if not self._can_hear:
            return
        self.index.sweep(limit=10_000)
        for rank, request in self._live.requests(now):
            subject = kv_resync_subject(self.namespace, self.component, rank.instance, rank.dp_rank)
            self._connection.publish(subject, encode_resync(request))

    async def _look_at_stream(self) -> None:
        """See that the stream is there, and of which making.

        The consumer would notice a loss by itself, after seconds of silence.
        """
        if not self._connection.is_connected:
            return
        jetstream = self._connection.jetstream
        try:
            info = await jetstream.stream_info(self.stream.name, timeout=LOOK_INTERVAL)
        except NoStream:
            await ensure_stream(jetstream, self.stream, timeout=LOOK_INTERVAL)
            info = await jetstream.stream_info(self.stream.name, timeout=LOOK_INTERVAL)
        self._answered_at = monotonic()
        if self.position.created is None:
            self.position = Position(self.position.sequence, info.created)
        elif self.position.created != info.created:
            await self._read()
