"""The buffer of KV-cache events from an engine: checked, copied, kept until the loop takes them."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Final, NamedTuple, SupportsIndex

import numpy as np

from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Hashes,
    InvalidEvents,
    KvEvent,
    Tier,
)
from dynbus.spi import brief_repr

from .awareness import CacheAwareness
from .event_log import event_bytes

DEFAULT_HANDED_BYTES: Final = 256 * 1024 * 1024
OBJECT_BYTES: Final = 450
"""Memory of an event of few blocks, about, beside what it adds to a message."""


def own_events(events: Iterable[KvEvent]) -> list[KvEvent]:
    """Events that are known to fit the wire; see `own_event`.

    Raises:
        InvalidEvents: one of them does not fit, and which; or they are no list.
    """
    try:
        given = list(events)
    except TypeError:
        raise InvalidEvents(f"{brief_repr(events)} is not a list of events: give a list") from None
    taken: list[KvEvent] = []
    try:
        taken.extend(map(own_event, given))
    except InvalidEvents as error:
        at = len(taken)
        raise InvalidEvents(f"event {at}, {brief_repr(given[at])}: {error}") from None
    return taken


def own_event(event: object) -> KvEvent:
    """An event that is known to fit the wire, with copies of its hashes.

    Raises:
        InvalidEvents: it does not fit.
    """
    if isinstance(event, AllBlocksCleared):
        return event
    if not isinstance(event, BlockStored | BlockRemoved):
        raise InvalidEvents(
            "it is not an event: give BlockStored, BlockRemoved or AllBlocksCleared"
        )
    tier = _own_tier(event.tier)
    engine_hashes = _own_hashes(event.engine_hashes)
    if isinstance(event, BlockRemoved):
        return BlockRemoved(engine_hashes, tier)
    block_hashes = _own_hashes(event.block_hashes)
    # Of the copies: what was given may change at any time.
    if len(engine_hashes) != len(block_hashes):
        raise InvalidEvents(
            f"{len(engine_hashes)} engine hashes for {len(block_hashes)} "
            "block hashes: each block needs both"
        )
    return BlockStored(_own_parent(event.parent_hash), engine_hashes, block_hashes, tier)


def _own_tier(tier: object) -> Tier:
    if isinstance(tier, int):
        try:
            return Tier(tier)
        except ValueError:
            pass
    raise InvalidEvents(f"{brief_repr(tier)} is not a tier: give a Tier")


def _own_parent(parent: object) -> int | None:
    if parent is None:
        return None
    number = index(parent) if isinstance(parent, SupportsIndex) else -1
    if not 0 <= number < 1 << 64:
        raise InvalidEvents(f"the parent {brief_repr(parent)} is not an unsigned 64-bit number")
    return number


def _own_hashes(hashes: Hashes) -> Hashes:
    if isinstance(hashes, np.ndarray):
        if hashes.dtype.kind != "u" or hashes.ndim != 1:
            raise InvalidEvents(
                f"hashes of {hashes.dtype} with {hashes.ndim} dimensions: give uint64 with one"
            )
        return hashes.astype(np.uint64)
    if isinstance(hashes, bytes | bytearray | str):
        # An array would take them for something else, or for a hash of eight bytes each.
        raise InvalidEvents(f"{type(hashes).__name__} for hashes: give a list or array of numbers")
    try:
        return array("Q", hashes)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidEvents(f"a hash is not an unsigned 64-bit number: {error}") from None


class Handed(NamedTuple):
    """The events that one rank handed over.

    Attributes:
        begins_anew: whether what the rank held before these events is void.
        since: Unix seconds at which the first of them came.
        is_lossy: whether it begins anew because events were dropped.
        awareness: how far the events can be relied on from these on; None for as before.
    """

    dp_rank: int
    begins_anew: bool
    since: float
    events: list[KvEvent]
    is_lossy: bool = False
    awareness: CacheAwareness | None = None


class _Call(NamedTuple):
    since: float
    events: Sequence[KvEvent]
    size: int


@dataclass(slots=True)
class _Waiting:
    begins_anew: bool = False
    is_lossy: bool = False
    awareness: CacheAwareness | None = None
    size: int = 0
    calls: deque[_Call] = field(default_factory=deque[_Call])


class EventBuffer:
    """The events of all ranks of an instance that were not taken in yet. All is thread-safe.

    A rank whose events take more than `max_bytes` of memory begins anew: they are dropped and
    counted, and what the rank held is void, since without them nobody can know it.

    Attributes:
        events: how many wait.
        dropped: how many were dropped.
    """

    def __init__(self, max_bytes: int = DEFAULT_HANDED_BYTES) -> None:
        self.events = 0
        self.dropped = 0
        self._max_bytes = max_bytes
        self._ranks: dict[int, _Waiting] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<EventBuffer [{self.events} events, {self.dropped} dropped]>"

    @property
    def is_empty(self) -> bool:
        return not self._ranks

    def put(self, dp_rank: int, events: Sequence[KvEvent], since: float) -> bool:
        """Take events of a rank; returns whether none had to be dropped for it.

        What comes in one call is taken, whatever its size.
        """
        if not events:
            return True
        size = sum(map(event_bytes, events)) + OBJECT_BYTES * len(events)
        with self._lock:
            waiting = self._ranks.setdefault(dp_rank, _Waiting())
            fits = not waiting.calls or waiting.size + size <= self._max_bytes
            if not fits:
                self.dropped += self._begin_anew(waiting)
                waiting.is_lossy = True
            waiting.calls.append(_Call(since, events, size))
            waiting.size += size
            self.events += len(events)
        return fits

    def reset(self, dp_rank: int) -> None:
        """Void what a rank held, and what it said so far."""
        with self._lock:
            waiting = self._ranks.setdefault(dp_rank, _Waiting())
            self._begin_anew(waiting)
            waiting.is_lossy = False

    def set_awareness(self, dp_rank: int, awareness: CacheAwareness) -> None:
        """Set the degree to which a rank's events can be relied on, behind all that was put so
        far."""
        with self._lock:
            self._ranks.setdefault(dp_rank, _Waiting()).awareness = awareness

    def pop(self, most: int) -> Handed | None:
        """The events that the next rank in turn handed over; None when nothing waits.

        Of a rank with more than `most` events only the first calls, whole.
        """
        with self._lock:
            if not self._ranks:
                return None
            dp_rank = next(iter(self._ranks))
            waiting = self._ranks.pop(dp_rank)
            events: list[KvEvent] = []
            since = waiting.calls[0].since if waiting.calls else 0.0
            while waiting.calls and len(events) < most:
                call = waiting.calls.popleft()
                events += call.events
                waiting.size -= call.size
            self.events -= len(events)
            awareness = waiting.awareness
            if waiting.calls:
                self._ranks[dp_rank] = _Waiting(
                    awareness=awareness, size=waiting.size, calls=waiting.calls
                )
                awareness = None
        return Handed(dp_rank, waiting.begins_anew, since, events, waiting.is_lossy, awareness)

    def _begin_anew(self, waiting: _Waiting) -> int:
        """Drop what waits of a rank; returns how many events that were."""
        dropped = sum(len(call.events) for call in waiting.calls)
        self.events -= dropped
        waiting.begins_anew = True
        waiting.size = 0
        waiting.calls.clear()
        return dropped
