"""The events that wait at an instance for a method of its own, within bounds."""

from __future__ import annotations

from collections import deque

from dynbus.bus.topics import Event


class EventBacklog:
    """The events that wait for a method, in their order. No I/O.

    Beyond its bounds further events are dropped, and those that wait stay: a method that cannot
    keep up misses what comes then, and has what it gets in order.

    Args:
        events, size: how many wait at most, and bytes of these.
    """

    def __init__(self, events: int, size: int) -> None:
        self._most = events
        self._most_bytes = size
        self._waiting: deque[Event] = deque()
        self._bytes = 0
        self._dropped = 0

    def __repr__(self) -> str:
        return f"<EventBacklog {len(self)} events, {self._bytes} bytes>"

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_behind(self) -> bool:
        """True if it has dropped events, and has not told of them yet."""
        return self._dropped > 0

    def add(self, event: Event) -> bool:
        """Have an event wait; False where it is dropped. One alone always waits."""
        size = _size(event)
        is_full = len(self) >= self._most or self._bytes + size > self._most_bytes
        if self._waiting and is_full:
            self._dropped += 1
            return False
        self._waiting.append(event)
        self._bytes += size
        return True

    def take(self) -> Event:
        """The event that has waited for longest."""
        event = self._waiting.popleft()
        self._bytes -= _size(event)
        return event

    def caught_up(self) -> int:
        """The events that were dropped since this was asked last, if none waits now; else 0."""
        if self._waiting:
            return 0
        dropped, self._dropped = self._dropped, 0
        return dropped


def _size(event: Event) -> int:
    return len(event.data) + sum(len(name) + len(value) for name, value in event.headers.items())
