"""What engines hand over, from any thread, until the publisher's loop takes it in."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dynbus.kvrouter.events import KvEvent

from .awareness import CacheAwareness
from .pieces import event_bytes

DEFAULT_HANDED_BYTES: Final = 256 * 1024 * 1024
OBJECT_BYTES: Final = 450
"""Memory of an event of few blocks, about, beside what it adds to a message."""


class Handed(NamedTuple):
    """What one rank handed over.

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


class Inbox:
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
        return f"<Inbox [{self.events} events, {self.dropped} dropped]>"

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
        """What a rank held is void, and what it said so far."""
        with self._lock:
            waiting = self._ranks.setdefault(dp_rank, _Waiting())
            self._begin_anew(waiting)
            waiting.is_lossy = False

    def set_awareness(self, dp_rank: int, awareness: CacheAwareness) -> None:
        """How far a rank's events can be relied on, behind all that was put so far."""
        with self._lock:
            self._ranks.setdefault(dp_rank, _Waiting()).awareness = awareness

    def take(self, most: int) -> Handed | None:
        """What the next rank in turn handed over; None when nothing waits.

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
