"""Faults of the in-memory bus: messages lost, delayed and doubled, links cut."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, Self, TypeVar

from dynbus.bus.transport import Message

from .subjects import matches

Action = Callable[[], None]

LEAVING_SECONDS: Final = 0.05
"""Seconds that a connection takes from one server to another."""


class Fault(ABC):
    """A disturbance of messages; it lasts until `remove` or the end of its `with` block.

    Attributes:
        hits: messages that it acted on.
    """

    def __init__(
        self,
        active: list[Fault],
        pattern: str,
        count: int | None = None,
        when: Callable[[Message], bool] | None = None,
    ) -> None:
        self.pattern = pattern
        self.count = count
        self.hits = 0
        self._active = active
        self._when = when

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.pattern} [hits: {self.hits}]>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """End it; more calls change nothing."""
        if self in self._active:
            self._active.remove(self)

    def matches(self, message: Message) -> bool:
        """True if it acts on `message`."""
        return matches(self.pattern, message.subject) and (
            self._when is None or self._when(message)
        )

    def apply(self, actions: list[Action]) -> list[Action]:
        """The actions for the arrivals `actions` of one message."""
        if not actions:
            return actions
        self.hits += 1
        if self.hits == self.count:
            self.remove()
        return self.disturb(actions)

    @abstractmethod
    def disturb(self, actions: list[Action]) -> list[Action]:
        """The actions that replace `actions`."""


class Drop(Fault):
    """Loses messages."""

    def disturb(self, actions: list[Action]) -> list[Action]:
        return []


class Duplicate(Fault):
    """Lets messages arrive twice."""

    def disturb(self, actions: list[Action]) -> list[Action]:
        return [*actions, *actions]


class Delay(Fault):
    """Lets messages arrive later, in their order."""

    def __init__(self, active: list[Fault], pattern: str, seconds: float) -> None:
        super().__init__(active, pattern)
        self._seconds = seconds
        # Timers of one instant fire in any order, hence one queue and one timer at a time.
        self._held: deque[tuple[float, Action]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def disturb(self, actions: list[Action]) -> list[Action]:
        loop = asyncio.get_running_loop()
        due = loop.time() + self._seconds
        self._held.extend((due, action) for action in actions)
        if self._timer is None:
            self._timer = loop.call_at(due, self._release)
        return []

    def lose_held(self) -> None:
        """Forget what it holds back."""
        self._held.clear()

    def _release(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        now = loop.time() + 1e-9
        while self._held and self._held[0][0] <= now:
            self._held.popleft()[1]()
        if self._held:
            self._timer = loop.call_at(self._held[0][0], self._release)


class _Link(Protocol):
    def partition(self, partitioned: bool) -> None: ...
    def take_unsent(self) -> list[Action]: ...
    def lose(self) -> None: ...
    def restore(self) -> None: ...


L = TypeVar("L", bound=_Link)


class Partition:
    """Links that carry nothing; ended by `heal` or the end of its `with` block."""

    def __init__(
        self, links: Sequence[_Link], notice_after: float, *, arrives_late: bool = False
    ) -> None:
        self._links = links
        self._arrives_late = arrives_late
        self._late: list[Action] = []
        for link in links:
            link.partition(True)
        loop = asyncio.get_running_loop()
        self._notice = loop.call_later(notice_after, self._noticed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()

    def heal(self) -> None:
        """End it; more calls change nothing."""
        self._notice.cancel()
        for link in self._links:
            link.partition(False)
            link.restore()
        late, self._late = self._late, []
        for arrive in late:
            arrive()

    def _noticed(self) -> None:
        for link in self._links:
            if self._arrives_late:
                self._late += link.take_unsent()
            link.lose()
            if self._arrives_late:
                link.partition(False)
                link.restore()


class Split(Generic[L]):
    """Two servers that have lost each other; ended by `heal` or the end of its `with` block.

    Links of one group go from one server to the other together, and break while they do.

    Args:
        first, second: the groups at either server.
        stop_reading: called with each link at the second, which has no JetStream.
    """

    def __init__(
        self,
        first: Sequence[Sequence[L]],
        second: Sequence[Sequence[L]],
        stop_reading: Callable[[L], None],
    ) -> None:
        self.is_over = False
        self._groups = [*map(tuple, first), *map(tuple, second)]
        # In an order that is the same in every run.
        self._apart = dict.fromkeys(itertools.chain.from_iterable(second))
        for group in second:
            for link in group:
                stop_reading(link)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()

    def has(self, link: L) -> bool:
        """True if a link is at the second server."""
        return link in self._apart

    def leave(self, link: L) -> None:
        """Have a link go to the other server, with its group."""
        for one in next((group for group in self._groups if link in group), (link,)):
            one.lose()
            if one in self._apart:
                del self._apart[one]
            else:
                self._apart[one] = None
            asyncio.get_running_loop().call_later(LEAVING_SECONDS, one.restore)

    def heal(self) -> None:
        """End it; more calls change nothing. What was at the second server breaks, and is back at
        once."""
        self.is_over = True
        apart, self._apart = self._apart, {}
        for link in apart:
            link.lose()
            link.restore()
