"""Admission of the calls of one handler: each runs, waits or is refused."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Any, Final, Generic, NamedTuple, TypeVar

from .durations import KNOWN_RUNS, Durations

T = TypeVar("T")

WAY_BACK: Final = 0.05
"""The share of a call's time that is left for its result to reach the caller."""
CONTINUED: Final = 64
"""Continued calls of one client that may wait beside the queue; further ones are as any other."""


class Admittance(Enum):
    """The decision on a call that arrives."""

    RUN = "run"
    WAIT = "wait"
    FULL = "full"
    """Refused: the queue is full, and this client has as much of it as any other."""
    LATE = "late"
    """Refused: it would probably not be done by its deadline."""


class Entry(NamedTuple, Generic[T]):
    """The decision on a call that arrives.

    Attributes:
        displaced: a call that waited and is refused in its place.
    """

    admittance: Admittance
    displaced: T | None = None


class Turn(NamedTuple, Generic[T]):
    """The calls that go on after one has ended.

    Attributes:
        begins: the call that runs now, if any waits.
        late: calls that waited and have too little time left; they are refused.
    """

    begins: T | None
    late: list[T]


_RUNS: Final[Entry[Any]] = Entry(Admittance.RUN)
_NOBODY: Final[Turn[Any]] = Turn(None, [])


class _Waiting:
    """A call in the queue, as far as it is known."""

    __slots__ = ("arrived", "client", "continued", "deadline")

    def __init__(
        self, client: str, arrived: float, deadline: float | None, *, continued: bool
    ) -> None:
        self.client = client
        self.arrived = arrived
        self.deadline = deadline
        self.continued = continued


class Admission(Generic[T]):
    """Says who runs: the clients by turns, the calls of each in the order of their arrival.

    A call that waits is refused where it would probably not be done by its deadline: when it
    arrives, for the time that those before it will take, and when its turn comes. A call that
    finds a free place begins whatever its deadline: it takes nothing from anybody. Times are of
    the monotonic clock.

    A continued call was admitted by another instance already, and its caller reads it. It takes
    no place of the queue and no turn of its client, and is not refused: it has every second turn,
    or each while nobody else waits. So a client that says of all its calls that they are continued
    gains little, and no more than `CONTINUED` of them wait so.

    Args:
        concurrency: calls that may run at a time; None for no limit. 1 makes a mailbox: its
            calls run in the order of their arrival, of whichever client.
        queue: calls that may wait; None for no limit. When it is full, the newest call of the
            client with the most makes place for a client with fewer.

    Attributes:
        durations: how long the calls ran.
    """

    __slots__ = (
        "_clients",
        "_continued",
        "_continued_by",
        "_ends",
        "_had_turn",
        "_overloaded",
        "_running",
        "_waiting",
        "concurrency",
        "durations",
        "queue",
    )

    def __init__(self, concurrency: int | None, queue: int | None) -> None:
        self.concurrency = concurrency
        self.queue = queue
        self.durations = Durations()
        # When each began, in that order.
        self._running: dict[T, float] = {}
        # All that wait, in the order of their arrival; and by client, in the order of turns.
        self._waiting: OrderedDict[T, _Waiting] = OrderedDict()
        self._clients: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()
        # The continued ones of all, which are in no client's line, and how many each client has.
        self._continued: OrderedDict[T, None] = OrderedDict()
        self._continued_by: dict[str, int] = {}
        # Whether the last turn was that of a continued call.
        self._had_turn = False
        # When places become free, until one is.
        self._ends: tuple[float, list[float]] | None = None
        # Since a call was too late, and until one finds a free place again.
        self._overloaded = False

    def __repr__(self) -> str:
        return f"<Admission [{self.running} running, {self.waiting} waiting]>"

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_place(self) -> bool:
        """True if the next call to enter would begin."""
        return self.concurrency is None or len(self._running) < self.concurrency

    def enter(
        self,
        call: T,
        client: str,
        now: float,
        deadline: float | None,
        *,
        continued: bool = False,
    ) -> Entry[T]:
        """Take in a call; with RUN it counts as running, with WAIT it is queued.

        Args:
            client: whose turn it takes.
            continued: whether it goes on with a stream that another instance has begun.
        """
        if self.concurrency is None or len(self._running) < self.concurrency:
            self._overloaded = False
            self._running[call] = now
            self._ends = None
            return _RUNS
        if continued and (already := self._continued_by.get(client, 0)) < CONTINUED:
            self._waiting[call] = _Waiting(client, now, deadline, continued=True)
            self._continued[call] = None
            self._continued_by[client] = already + 1
            return Entry(Admittance.WAIT)
        waiting = _Waiting(client, now, deadline, continued=False)
        if not self._can_be_done(waiting, now):
            return Entry(Admittance.LATE)
        displaced: T | None = None
        queued = len(self._waiting) - len(self._continued)
        if self.queue is not None and queued >= self.queue:
            displaced = self._newest_of_most(client)
            if displaced is None:
                return Entry(Admittance.FULL)
            self.withdraw(displaced)
        self._waiting[call] = waiting
        self._clients.setdefault(client, OrderedDict())[call] = None
        return Entry(Admittance.WAIT, displaced)

    def leave(self, call: T, now: float, *, whole: bool) -> Turn[T]:
        """A running call ended; returns the one that runs in its place.

        Args:
            whole: whether its handler came to its own end; false when it was cut short.
        """
        self.durations.add(now - self._running.pop(call), whole=whole)
        self._ends = None
        return self._next_turn(now) if self._waiting else _NOBODY

    def skip(self, call: T, now: float) -> Turn[T]:
        """A call whose turn it is does not begin after all; returns the one that runs instead."""
        del self._running[call]
        return self._next_turn(now)

    def _next_turn(self, now: float) -> Turn[T]:
        self._ends = None
        late: list[T] = []
        while self._waiting:
            following = self._next()
            waiting = self._waiting[following]
            self.withdraw(following)
            if not waiting.continued:
                if not self._is_worth_it(waiting, now):
                    late.append(following)
                    continue
                if waiting.client in self._clients:
                    self._clients.move_to_end(waiting.client)
            self._had_turn = waiting.continued
            self._running[following] = now
            return Turn(following, late)
        return Turn(None, late)

    def withdraw(self, call: T) -> bool:
        """Take a waiting call out of the queue; False when it does not wait."""
        waiting = self._waiting.pop(call, None)
        if waiting is None:
            return False
        if waiting.continued:
            del self._continued[call]
            left = self._continued_by.pop(waiting.client) - 1
            if left:
                self._continued_by[waiting.client] = left
            return True
        calls = self._clients[waiting.client]
        del calls[call]
        if not calls:
            del self._clients[waiting.client]
        return True

    def retry_after(self, client: str, now: float, allowed: float | None) -> float:
        """Seconds after which a call like one that was refused would be taken.

        Args:
            allowed: seconds from the arrival of such a call to its deadline; None without one.
        """
        if not self._running:
            return 0.0
        first = max(0.0, self._read_ends(now)[0] - now)
        if allowed is None or not self._is_known():
            return first
        in_time = allowed * (1 - WAY_BACK)
        needed = self.durations.needed(in_time)
        if needed is None:
            # No known run is so short: one begins only where nobody waits.
            return self._wait(len(self._waiting), now)
        return max(first, self._wait(self._ahead(client), now) + needed - in_time)

    def _next(self) -> T:
        """The call whose turn it is."""
        if self.concurrency == 1:
            return next(iter(self._waiting))
        if self._continued and not (self._had_turn and self._clients):
            return next(iter(self._continued))
        return next(iter(next(iter(self._clients.values()))))

    def _newest_of_most(self, client: str) -> T | None:
        """The newest call of the client with the most; None where `client` has about as many."""
        own = len(self._clients.get(client, ()))
        most = max(self._clients.values(), key=len, default=None)
        if most is None or len(most) < own + 2:
            return None
        return next(reversed(most))

    def _is_known(self) -> bool:
        return len(self.durations) >= min(self.concurrency or 1, KNOWN_RUNS)

    def _can_be_done(self, waiting: _Waiting, now: float) -> bool:
        """True if a call that arrives would be done in time if it waited for its turn."""
        if waiting.deadline is None or not self._is_known():
            return True
        return self._is_worth_it(waiting, now + self._wait(self._ahead(waiting.client), now))

    def _is_worth_it(self, waiting: _Waiting, begins: float) -> bool:
        """True if a call should begin at this time, given what is left to it by then."""
        if waiting.deadline is None or not self._is_known():
            return True
        allowed = waiting.deadline - waiting.arrived
        way_back = WAY_BACK * allowed
        left = waiting.deadline - begins
        worth_it = self.durations.is_worth_it(
            left - way_back, allowed - way_back, others=self._overloaded
        )
        self._overloaded |= not worth_it
        return worth_it

    def _ahead(self, client: str) -> int:
        """Calls that run before the next one of a client does."""
        if self.concurrency == 1:
            return len(self._waiting)
        own = len(self._clients.get(client, ()))
        others = (len(calls) for name, calls in self._clients.items() if name != client)
        ahead = own + sum(min(calls, own + 1) for calls in others)
        return ahead + min(len(self._continued), ahead + 1)

    def _wait(self, ahead: int, now: float) -> float:
        """Seconds until the turn of a call with so many before it."""
        places = len(self._running)
        first, ends = self._read_ends(now)
        mean = self.durations.mean_held
        # Places that are taken one by one become free one by one; those that were taken
        # together become free together, and each of them serves one of the calls that wait.
        one_by_one = first + ahead * mean / places
        rounds, place = divmod(ahead, places)
        together = ends[place * len(ends) // places] + rounds * mean
        return max(0.0, min(one_by_one, together) - now)

    def _read_ends(self, now: float) -> tuple[float, list[float]]:
        """The times when a place is probably free, and when each place that is taken is."""
        if self._ends is None:
            ages = [now - began for began in self._running.values()]
            first = now + self.durations.first_end(ages)
            self._ends = first, [now + left for left in self.durations.ends(ages)]
        return self._ends
