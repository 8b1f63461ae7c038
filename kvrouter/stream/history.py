"""The history of a component's caches: their contents at a point of the stream, and the change
between two.

The stream and the snapshots tell it; nothing else is asked, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynbus import DynbusError
from dynbus.kvrouter.events import Tier
from dynbus.kvrouter.names import kv_event_stream, kv_event_subject
from dynbus.kvrouter.radix.contents import held_names
from dynbus.kvrouter.radix.index import DEFAULT_MAX_BLOCKS, RadixIndex, Rank
from dynbus.spi import JetStream, NoStream, StoredMessage, StreamInfo, monotonic, read_until

from .event_stream import StoredEvents, apply_events, read_events
from .snapshots import SnapshotInfo, SnapshotStore

DEFAULT_TIMEOUT: Final = 60.0


class NoHistory(DynbusError):
    """Raised when what is asked for is not in the stream, nor in a snapshot."""

    code = "NoHistory"


class Point(NamedTuple):
    """A point of a stream: up to a sequence, up to a time (Unix seconds), or its end."""

    sequence: int | None = None
    time: float | None = None

    def is_behind(self, snapshot: SnapshotInfo) -> bool:
        """True if a snapshot covers nothing that came after the point."""
        if self.sequence is not None and snapshot.coverage.sequence > self.sequence:
            return False
        # All that it covers is older than itself.
        return self.time is None or snapshot.written <= self.time


NOW: Final = Point()


@dataclass(frozen=True, slots=True)
class PastIndex:
    """An index as it was.

    Attributes:
        sequence: of the stream, up to which it stands.
        time: Unix seconds, of the last message of the component up to there; None for unknown.
        snapshot: with which reading began; None for the stream's beginning.
        messages: that were read after it.
        first_sequence: from which on the stream still told everything; what was said before it
            and after `snapshot` is missing.
    """

    index: RadixIndex
    sequence: int
    time: float | None
    snapshot: SnapshotInfo | None
    messages: int
    first_sequence: int

    @property
    def is_whole(self) -> bool:
        """True if nothing is missing."""
        covered = 0 if self.snapshot is None else self.snapshot.coverage.sequence
        return self.first_sequence <= covered + 1 and not self.partial

    @property
    def partial(self) -> list[Rank]:
        """Ranks of which blocks may be missing."""
        return [rank for rank, state in self.index.ranks.items() if state.partial]


class RankChange(NamedTuple):
    """The blocks that a rank gained and lost between two points, counted once for each tier."""

    rank: Rank
    gained: int
    lost: int
    blocks_before: int
    blocks_after: int


async def components_of(
    jetstream: JetStream, namespace: str, *, timeout: float = DEFAULT_TIMEOUT
) -> list[str]:
    """The components that have events in a namespace's stream, by name.

    Raises:
        NoStream: there is no stream, so that nothing was ever published.
        Unavailable: JetStream does not answer.
    """
    components: set[str] = set()

    def note(message: StoredMessage) -> bool:
        components.add(message.subject.split(".")[1])
        return False

    await _read(
        jetstream,
        namespace,
        note,
        subject=kv_event_subject(namespace, "*", "*", "*"),
        last_per_subject=True,
        end=monotonic() + timeout,
    )
    return sorted(components)


async def index_at(
    jetstream: JetStream,
    namespace: str,
    component: str,
    point: Point = NOW,
    *,
    store: SnapshotStore | None = None,
    max_blocks: int = DEFAULT_MAX_BLOCKS,
    timeout: float = DEFAULT_TIMEOUT,
) -> PastIndex:
    """The index as it was at a point: from the newest snapshot before it, and the stream from
    there. Instances that died without a word are in it as they were.

    Raises:
        NoHistory: the point lies before what is still known, or ahead of the stream.
        NoStream: there is no stream of events.
        Unavailable: JetStream does not answer, or not in time.
    """
    end = monotonic() + timeout
    try:
        stream = await jetstream.stream_info(kv_event_stream(namespace))
    except NoStream:
        raise no_events(namespace) from None
    if point.sequence is not None and point.sequence > stream.last_sequence:
        raise NoHistory(
            f"sequence {point.sequence} is not there yet: the stream {kv_event_stream(namespace)} "
            f"ends at {stream.last_sequence}"
        )
    store = store or SnapshotStore(jetstream, namespace)
    snapshot, index = await store.read_newest(
        component, stream, max_blocks=max_blocks, timeout=end - monotonic(), counts=point.is_behind
    )
    _check_known(point, kv_event_stream(namespace), stream, snapshot)
    covered = 0 if snapshot is None else snapshot.coverage.sequence
    last = stream.last_sequence if point.sequence is None else point.sequence
    tail = _Tail(index, last, point.time)
    if covered < last:
        await _read(
            jetstream,
            namespace,
            tail.apply,
            subject=kv_event_subject(namespace, component, "*", "*"),
            start_sequence=covered + 1,
            created=stream.created,
            end=end,
        )
        if tail.began_later and snapshot is None and stream.first_sequence > 1:
            raise NoHistory(
                "nothing is known of that time: the stream's oldest message is younger, and so is "
                "every snapshot"
            )
    # What the stream says of other components changes nothing, but is passed all the same.
    reached = last if point.time is None else max(covered, tail.sequence)
    return PastIndex(index, reached, tail.time, snapshot, tail.messages, stream.first_sequence)


def _check_known(
    point: Point, name: str, stream: StreamInfo, snapshot: SnapshotInfo | None
) -> None:
    """Refuse a point before all that is still known.

    Args:
        name: of the stream.
        snapshot: the newest one before the point; None for none.

    Raises:
        NoHistory: it is one, and what is known.
    """
    if point.time is not None and point.time < stream.created:
        raise NoHistory(
            f"nothing is known of {_utc(point.time)}: the stream {name} was made at "
            f"{_utc(stream.created)}"
        )
    if (
        snapshot is None
        and point.sequence is not None
        # Before the very first message nothing was held: that is known.
        and stream.first_sequence > max(1, point.sequence)
    ):
        raise NoHistory(
            f"sequence {point.sequence} is gone: the stream {name} begins at "
            f"{stream.first_sequence}, and no snapshot is as old"
        )


def _utc(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}Z"


def no_events(namespace: str) -> NoStream:
    """The error of a namespace without a stream."""
    return NoStream(f"no KV events in namespace {namespace}: is a publisher running?")


class _Tail:
    """Applies messages up to a point."""

    def __init__(self, index: RadixIndex, last: int, until: float | None) -> None:
        self._index = index
        self._last = last
        self._until = until
        self.sequence = 0
        self.time: float | None = None
        self.messages = 0
        self.began_later = False

    def apply(self, message: StoredMessage) -> bool:
        """Apply a message; returns whether it lies behind the point, or right there."""
        if message.sequence > self._last:
            return True
        if self._until is not None and message.time > self._until:
            self.began_later = not self.messages
            return True
        self.sequence = message.sequence
        self.time = message.time
        self.messages += 1
        events = read_events(message)
        if isinstance(events, StoredEvents):
            apply_events(self._index, events)
        return message.sequence == self._last


async def _read(
    jetstream: JetStream,
    namespace: str,
    take: Callable[[StoredMessage], bool],
    *,
    subject: str,
    end: float,
    start_sequence: int = 1,
    last_per_subject: bool = False,
    created: float | None = None,
) -> None:
    """Read the stream until `take` says that it is enough, or nothing more is there.

    Raises:
        NoStream: there is no stream, or it was made again meanwhile.
        Unavailable: JetStream does not answer, or not before `end`.
    """
    stream = kv_event_stream(namespace)
    try:
        is_whole = await read_until(
            jetstream,
            stream,
            take,
            timeout=max(0.0, end - monotonic()),
            subject=subject,
            start_sequence=start_sequence,
            last_per_subject=last_per_subject,
            created=created,
        )
    except NoStream:
        raise no_events(namespace) from None
    if not is_whole:
        raise NoStream(f"{stream} was made again while it was read")


def changes(before: RadixIndex, after: RadixIndex) -> list[RankChange]:
    """The blocks that each rank gained and lost, by the engine's hashes; ranks without a change are
    left out."""
    rank_changes: list[RankChange] = []
    for rank in sorted(before.ranks.keys() | after.ranks.keys()):
        gained = lost = old = new = 0
        for tier in Tier:
            was, now = _held(before, rank, tier), _held(after, rank, tier)
            old += len(was)
            new += len(now)
            kept = len(np.intersect1d(was, now, assume_unique=True))
            gained += len(now) - kept
            lost += len(was) - kept
        if gained or lost:
            rank_changes.append(RankChange(rank, gained, lost, old, new))
    return rank_changes


def _held(index: RadixIndex, rank: Rank, tier: Tier) -> NDArray[np.uint64]:
    state = index.ranks.get(rank)
    holder = None if state is None else state.holders.get(tier)
    if holder is None:
        return np.empty(0, dtype=np.uint64)
    return held_names(holder)
