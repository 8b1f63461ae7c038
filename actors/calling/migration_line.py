"""The line of streams that have lost their instance: the pace at which they move.

When a part of a fleet dies, all its streams want to go on elsewhere in the same moment, and each
is a prompt to compute for an instance that is busy already. So only a few are sent at a time for
each instance that is left; the next one follows when one of them has its first item. None waits
for longer than `LINE_SECONDS`, however slow that is: where the line does not move by itself, it is
let go evenly over that time.

`MigrationLine` decides and has no clock; `Migrations` has the streams of a process wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from dynbus.bus.clock import monotonic
from dynbus.bus.protocol.names import ComponentName

AT_A_TIME: Final = 8
"""Streams that are on their way at once, for each instance that may be chosen."""
LINE_SECONDS: Final = 1.0
"""Seconds that a stream waits until it is sent, at most."""

T = TypeVar("T", bound=Hashable)


class MigrationLine(Generic[T]):
    """The order in which streams move to other instances: some are on their way, others wait.

    A stream is on its way from when it is sent until its first item. Times are seconds of one
    monotonic clock.
    """

    __slots__ = ("_instances", "_moved_at", "_on_the_way", "_waiting")

    def __init__(self) -> None:
        self._instances = 1
        self._moved_at = 0.0
        self._on_the_way: set[T] = set()
        # When each came, in that order.
        self._waiting: OrderedDict[T, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<MigrationLine [{len(self._on_the_way)} on their way, {len(self._waiting)} wait]>"

    @property
    def is_empty(self) -> bool:
        """True if no stream moves."""
        return not self._on_the_way and not self._waiting

    def join(self, stream: T, instances: int, now: float) -> bool:
        """A stream is to move; True when it goes at once, otherwise `go` returns it later.

        Args:
            instances: how many may be chosen.
        """
        self._instances = max(1, instances)
        if not self._waiting:
            self._moved_at = now
            if self._has_room:
                self._on_the_way.add(stream)
                return True
        self._waiting[stream] = now
        return False

    def leave(self, stream: T) -> None:
        """A stream has its first item, or does not move any longer; more calls change nothing."""
        self._on_the_way.discard(stream)
        self._waiting.pop(stream, None)

    def go(self, now: float) -> list[T]:
        """The streams that waited and go now, in the order in which they came."""
        gone: list[T] = []
        while self._waiting and (self._has_room or self._next_at() <= now):
            stream, _ = self._waiting.popitem(last=False)
            self._on_the_way.add(stream)
            self._moved_at = now
            gone.append(stream)
        return gone

    def next_at(self) -> float | None:
        """The time at which the next stream goes at the latest; None while none waits."""
        return self._next_at() if self._waiting else None

    @property
    def _has_room(self) -> bool:
        return len(self._on_the_way) < AT_A_TIME * self._instances

    def _next_at(self) -> float:
        """Evenly spread until the last one's time is over, and no later than the first one's."""
        first = next(iter(self._waiting.values())) + LINE_SECONDS
        last = next(reversed(self._waiting.values())) + LINE_SECONDS
        return min(first, self._moved_at + max(0.0, last - self._moved_at) / len(self._waiting))


class Migrations:
    """The lines of one process, one for each component whose streams move."""

    def __init__(self) -> None:
        self._lines: dict[ComponentName, _Line] = {}

    def __repr__(self) -> str:
        return f"<Migrations {self._lines}>"

    async def turn(self, component: ComponentName, instances: int) -> Callable[[], None]:
        """Wait until a stream may be sent to another instance of its component, for `LINE_SECONDS`
        at most.

        Args:
            instances: how many may be chosen.

        Returns:
            What says that the stream has its first item, or is not sent after all; to be called,
            once at least.
        """
        line = self._lines.get(component)
        if line is None:
            line = self._lines[component] = _Line()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def leave() -> None:
            line.leave(waiter)
            line.move()
            if line.is_empty and self._lines.get(component) is line:
                del self._lines[component]

        if not line.join(waiter, instances, monotonic()):
            line.move()
            try:
                await waiter
            except BaseException:
                leave()
                raise
        return leave


class _Line(MigrationLine["asyncio.Future[None]"]):
    """A line that moves by itself: one timer for all who wait."""

    __slots__ = ("_timer",)

    def __init__(self) -> None:
        super().__init__()
        self._timer: asyncio.TimerHandle | None = None

    def move(self) -> None:
        """Let those go whose time has come, and look again when the next one's does."""
        now = monotonic()
        for waiter in self.go(now):
            if not waiter.done():
                waiter.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.next_at()
        if at is not None:
            self._timer = asyncio.get_running_loop().call_later(at - now, self.move)
