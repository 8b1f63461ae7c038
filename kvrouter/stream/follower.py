"""The way of KV-cache events from the stream into a router's index.

`IndexFollower` reads the stream in order and applies each message as it comes. What the index
holds is a function of the messages alone; what it lacks the follower asks the rank for, which
then says it to every follower by the same way. Instances that are gone are removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from dynbus.actors import Runtime
from dynbus.bus import headers
from dynbus.bus.cleanup import finish
from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.errors import ConfigError, DynbusError
from dynbus.bus.names import TOKEN, check_token, kv_event_subject, kv_resync_subject
from dynbus.bus.transport import (
    Connection,
    ConnectionState,
    NoStream,
    OrderedConsumer,
    StoredMessage,
)
from dynbus.kvrouter.events import HEADER, CacheDigest, closing_digest
from dynbus.kvrouter.radix.index import DEFAULT_MAX_BLOCKS, Overlap, RadixIndex, Rank, Verdict

from .awareness import CacheAwareness, Observation, cache_awareness
from .digest import held_blocks, index_digest
from .event_stream import EventStream, ensure_stream
from .follower_status import FollowerStatus, Position
from .membership import QUIET_AFTER, Membership, live_instances
from .resync import ResyncPlan, ResyncRequest, encode_resync
from .staleness import StalenessWindow

__all__ = ["FollowerStatus", "IndexFollower", "Instances", "Position"]

logger = logging.getLogger(__name__)

TICK: Final = 0.1
"""Seconds between two looks at instances and at what is due."""
LOOK_INTERVAL: Final = 1.0
"""Seconds between two looks at the stream itself."""
SECONDS_PER_HELD_BLOCK: Final = 500e-6
"""After a digest of a rank was compared in full, its next one is so much later for each block of
the whole index: a thousandth of the time goes there, and each rank has its turn. The numbers of
blocks are compared always."""
MESSAGES_PER_STEP: Final = 8
"""Messages that waited and are applied in one turn of the loop: a few milliseconds."""
STALE_IN_A_ROW: Final = 3
"""Messages of an old epoch, and none of the current one between them, after which the rank is
told which epoch is known here."""

Instances = Callable[[], Collection[str] | None]
"""The ids of the instances that have a lease; None while that is not known."""


class IndexFollower:
    """An index that follows the events of one component. Use it with `async with`.

    Args:
        connection: belongs to the event loop on which the follower is entered.
        instances: see `Instances`; every instance counts as known unless given.
        stream: the stream's settings; the defaults for this namespace unless given.
        index, position: where to go on from, of a snapshot; an empty index at the beginning of
            the stream unless given.
        plan: who is asked when.
        approximates: whether the router stands in for instances that send no events.

    Attributes:
        index: belongs to the event loop. Another one after the stream was made again.

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
        plan: ResyncPlan | None = None,
        approximates: bool = False,
    ) -> None:
        self._connection = connection
        self.namespace = check_token("namespace", namespace)
        self.component = check_token("component", component)
        self.stream = stream or EventStream(namespace)
        if self.stream.namespace != namespace:
            raise ConfigError(
                f"the events of namespace {namespace} are not in the stream of "
                f"{self.stream.namespace}: give EventStream({namespace!r}, ...)"
            )
        self.index = index or RadixIndex(max_blocks=max_blocks)
        self._max_blocks = max_blocks
        self._instances = instances
        self._position = position
        self._plan = plan or ResyncPlan()
        self._approximates = approximates
        self._members = Membership()
        self._held_back: deque[StoredMessage] | None = None
        self._stale: dict[Rank, int] = {}
        self._staleness = StalenessWindow()
        self._behind = 0
        self._caught_up = False
        self._consumer: OrderedConsumer | None = None
        self._exits = AsyncExitStack()
        self._wake = asyncio.Event()
        self._compare_at: dict[Rank, float] = {}
        self._look_at = 0.0
        self._refused = 0
        self._mismatches = 0
        self._comparisons = 0
        self._recreations = 0
        self._failures = 0

    def __repr__(self) -> str:
        return (
            f"<IndexFollower {self.namespace}.{self.component} "
            f"[at {self._position.sequence} | {self.awareness()}]>"
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
        )

    async def __aenter__(self) -> Self:
        """Begin to read the stream, which is made if there is none.

        Raises:
            ConfigError: the stream is there with other settings.
            Unavailable: JetStream does not answer.
        """
        jetstream = self._connection.jetstream
        await ensure_stream(jetstream, self.stream)
        created = self._position.created
        if created is None:
            created = (await jetstream.stream_info(self.stream.name)).created
            self._position = Position(self._position.sequence, created)
        async with AsyncExitStack() as exits:
            self._consumer = await jetstream.consume(
                self.stream.name,
                self._receive,
                subject=kv_event_subject(self.namespace, self.component, "*", "*"),
                start_sequence=self._position.sequence + 1,
                created=created,
                on_recreated=self._recreated,
                on_caught_up=self._note_caught_up,
            )
            exits.push_async_callback(self._consumer.stop)
            task = asyncio.get_running_loop().create_task(
                self._run(), name=f"kv-index-{self.component}"
            )
            exits.push_async_callback(_end, task)
            self._exits = exits.pop_all()
        self._look_at_instances(monotonic())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await finish(self.close())

    async def close(self) -> None:
        """Stop following; the index stays as it is."""
        self._consumer = None
        await self._exits.aclose()

    # Questions ------------------------------------------------------------------------

    def lookup(self, block_hashes: Sequence[int] | NDArray[np.uint64]) -> dict[str, int]:
        """`RadixIndex.lookup`, for the instances that are known."""
        found = self.index.lookup(block_hashes)
        is_known = self._members.is_known
        return {instance: held for instance, held in found.items() if is_known(instance)}

    def overlaps(self, block_hashes: Sequence[int] | NDArray[np.uint64]) -> dict[Rank, Overlap]:
        """`RadixIndex.overlaps`, for the instances that are known."""
        found = self.index.overlaps(block_hashes)
        is_known = self._members.is_known
        return {rank: overlap for rank, overlap in found.items() if is_known(rank.instance)}

    @property
    def position(self) -> Position:
        """What the index holds is the stream up to here."""
        return self._position

    def awareness(self) -> CacheAwareness:
        """How far routing can rely on the index at this moment."""
        unsettled = [
            rank
            for rank in self._plan.ranks()
            if self._members.is_known(rank.instance) and rank.instance not in self._members.silent
        ]
        troubled = next((rank for rank in unsettled if self._plan.reason(rank)), None)
        return cache_awareness(
            Observation(
                following=self._consumer is not None,
                connected=self._connection.state is ConnectionState.CONNECTED,
                caught_up=self._caught_up,
                behind=self._behind,
                ranks=len(self.index.ranks.keys() | set(unsettled)),
                unsettled=len(unsettled),
                target=f"{self.namespace}.{self.component}",
                instances=None if self._members.known is None else len(self._members.known),
                silent=tuple(self._members.silent),
                evicted=self.index.statistics().evicted,
                approximates=self._approximates,
                trouble=""
                if troubled is None
                else f"{troubled.instance}/{troubled.dp_rank}: {self._plan.reason(troubled)}",
            )
        )

    def ask_resync(self, rank: Rank, reason: str) -> None:
        """Have a rank say again what it holds, since something speaks against what it said."""
        if self._members.is_known(rank.instance):
            self._need(rank, reason, monotonic())

    def status(self) -> FollowerStatus:
        """Counters of this follower."""
        return FollowerStatus(
            self._position,
            self._behind,
            self._staleness.summary(),
            self.awareness(),
            len(self.index.ranks),
            self._refused,
            self._mismatches,
            self._comparisons,
            self._plan.asked,
            self._recreations,
            self._failures,
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
            await finish(self._catch_up())

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
        self._position = Position(message.sequence, self._position.created)
        self._behind = message.pending
        rank = rank_of(message)
        if rank is None:
            # Whoever may publish here speaks for this subject's rank alone.
            self._refused += 1
            return
        event_epoch, first_id = _numbering(message.data)
        before = self.index.ranks.get(rank)
        is_new = before is None or event_epoch > before.event_epoch
        applied = self.index.apply(rank.instance, message.data)
        now = monotonic()
        if applied.verdict is Verdict.MALFORMED:
            self._refused += 1
            return
        if applied.verdict is Verdict.STALE:
            self._note_stale(rank, now)
            return
        self._stale.pop(rank, None)
        self._members.heard(rank, now)
        if is_new and not first_id:
            self._plan.answer(rank)
        elif applied.needs_resync or is_new:
            verdict = "joined late" if is_new else applied.verdict.value.replace("_", " ")
            self._need(rank, verdict, now, is_lost=applied.verdict is Verdict.GAP)
        digest = closing_digest(message.data)
        if digest is not None and applied.verdict is not Verdict.DUPLICATE:
            self._compare(rank, digest, now)
        self._note_staleness(message)

    def _note_stale(self, rank: Rank, now: float) -> None:
        """An old epoch goes on: the rank's clock went back, or another process has its id."""
        self._stale[rank] = count = self._stale.get(rank, 0) + 1
        if count >= STALE_IN_A_ROW:
            del self._stale[rank]
            self._need(rank, "stale", now)

    def _compare(self, rank: Rank, digest: CacheDigest, now: float) -> None:
        state = self.index.ranks[rank]
        if state.partial:
            # Known to differ. After an eviction the instance cannot help.
            if not self.index.statistics().evicted:
                self._need(rank, "partial", now)
            return
        if held_blocks(self.index, rank) == digest.blocks:
            if now < self._compare_at.get(rank, 0.0) and rank not in self._plan:
                return
            self._comparisons += 1
            held = sum(state.blocks for state in self.index.ranks.values())
            self._compare_at[rank] = now + held * SECONDS_PER_HELD_BLOCK
            if index_digest(self.index, rank) == digest:
                self._plan.confirm(rank)
                return
        self._mismatches += 1
        self._need(rank, "digest mismatch", now)

    def _need(self, rank: Rank, reason: str, now: float, *, is_lost: bool = False) -> None:
        if rank not in self._plan:
            logger.info("%s.%s: %s: %s", self.namespace, self.component, rank, reason)
        self._plan.need(rank, reason, now, is_lost=is_lost)
        self._wake.set()

    def _note_staleness(self, message: StoredMessage) -> None:
        published = message.headers.get(headers.PUBLISHED, "")
        if not published or not self._caught_up:
            return
        try:
            self._staleness.add(unix_time() - float(published))
        except ValueError:
            self._refused += 1

    def _note_caught_up(self) -> None:
        self._caught_up = True
        self._behind = len(self._held_back or ())

    def _recreated(self) -> None:
        """The stream is another one: nothing of what was read is in it."""
        logger.warning("stream %s was made again, the index is rebuilt", self.stream.name)
        self._recreations += 1
        now = monotonic()
        if self._held_back is not None:
            self._held_back.clear()
        self._compare_at.clear()
        ranks = list(self.index.ranks)
        self.index = RadixIndex(max_blocks=self._max_blocks)
        self._position = Position()
        self._caught_up = False
        for rank in ranks:
            self._need(rank, "the stream was made again", now)
        self._look_at = now

    # The task -------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TICK):
                    await self._wake.wait()
            except TimeoutError:
                pass
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
                logger.exception("%r: a look at the state failed", self)

    def _look_at_instances(self, now: float) -> None:
        known = self._instances() if self._instances is not None else None
        if known is None or self._held_back is not None:
            return
        present = {rank.instance for rank in self.index.ranks}
        for instance in self._members.update(known, present, now):
            self.index.remove_instance(instance)
            self._plan.forget(instance)
            for of_rank in (self._stale, self._compare_at):
                for rank in [rank for rank in of_rank if rank.instance == instance]:
                    del of_rank[rank]
        for rank in [rank for rank in self._plan.ranks() if not self._members.is_known(rank[0])]:
            if rank not in self.index.ranks:
                self._plan.forget(rank.instance)
        if not self._caught_up or self._connection.state is not ConnectionState.CONNECTED:
            self._members.not_listening()
            return
        for instance in self._members.to_ask(now):
            # Of its ranks, the one that each instance has.
            if (rank := Rank(instance, 0)) not in self._plan:
                self._need(rank, "no events", now)
        for rank in self._members.quiet(self.index.ranks, now):
            if rank not in self._plan:
                self._need(rank, f"nothing heard for {QUIET_AFTER:g} s", now)

    def _ask(self, now: float) -> None:
        if self._connection.state is not ConnectionState.CONNECTED or not self._caught_up:
            return
        self.index.sweep(limit=10_000)
        for rank in self._plan.due(now):
            if not self._members.is_known(rank.instance):
                continue
            state = self.index.ranks.get(rank)
            epoch = state.event_epoch if state is not None else 0
            request = ResyncRequest(epoch, self._plan.reason(rank))
            subject = kv_resync_subject(self.namespace, self.component, rank.instance, rank.dp_rank)
            self._connection.publish(subject, encode_resync(request))

    async def _look_at_stream(self) -> None:
        """See that the stream is there, and of which making."""
        if self._connection.state is not ConnectionState.CONNECTED:
            return
        jetstream = self._connection.jetstream
        try:
            info = await jetstream.stream_info(self.stream.name, timeout=LOOK_INTERVAL)
        except NoStream:
            await ensure_stream(jetstream, self.stream, timeout=LOOK_INTERVAL)
            return
        if self._position.created is None:
            self._position = Position(self._position.sequence, info.created)


def rank_of(message: StoredMessage) -> Rank | None:
    """The rank that a message's subject names, if the message is of that rank."""
    tokens = message.subject.split(".")
    if len(tokens) != 5 or len(message.data) < HEADER.size or not TOKEN.fullmatch(tokens[3]):
        return None
    dp_rank: int = HEADER.unpack_from(message.data)[2]
    return Rank(tokens[3], dp_rank) if tokens[4] == str(dp_rank) else None


def _numbering(data: bytes) -> tuple[int, int]:
    """Epoch and first id of a message."""
    numbers = HEADER.unpack_from(data)
    return numbers[4], numbers[5]


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
