"""The loop of a simulation: a seed draws which task runs next, and processes stand still or die.

asyncio runs what is ready in the order in which it became ready. Programs may count on that order
for callbacks (`call_soon`), and on nothing between two tasks, between two connections, or between
two processes. So what is ready stands in lanes: one for each task, one for each connection, and
one for all other callbacks of a process. A lane keeps its order, and a draw says whose turn it is.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import ContextVar
from itertools import count
from typing import Any, Final, TypeVar, TypeVarTuple
from weakref import WeakSet

from dynbus.bus.clock import Deadlock, JumpingLoop
from dynbus.bus.memory.bus import MemoryConnection

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DISORDERS: Final = (0.0, 0.05, 0.3, 1.0)
"""The share of turns that go to any lane, rather than to what has been ready for longest; each
simulation has one of them. Some faults need much disorder, and others the usual order."""

KEEPING_ORDER: Final = (asyncio.Task, MemoryConnection)
"""The owners of callbacks that have a lane of their own."""

LANE: Final = "simulated_lane"
"""The attribute of tasks and connections that has the number of their lane."""

MOST_AT_ONCE: Final = 2**20
"""Callbacks that run at one moment of virtual time, twice as many at most: some ten seconds."""

process: ContextVar[object | None] = ContextVar("simulated_process", default=None)
"""The process that code runs in; None for the story itself, which never stands still."""


class SimulatedLoop(JumpingLoop):
    """A `JumpingLoop` on which tasks run in a drawn order, and which can hold up a process.

    Jobs of executors are carried out at once, on this thread: what a thread does is not repeated
    exactly. Callbacks that go on and on while time stands still end with `Deadlock`.
    """

    def __init__(self, chance: random.Random, *, limit: float) -> None:
        super().__init__(limit=limit, alone=True)
        self._ready = ReadyCallbacks(chance, self.time)
        self._own_thread = threading.get_ident()
        self._tasks: dict[object, WeakSet[asyncio.Task[Any]]] = {}

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        context: contextvars.Context | None = options.get("context")
        of = process.get() if context is None else context.get(process)
        if of is not None:
            self._tasks.setdefault(of, WeakSet()).add(task)
        return task

    def tasks_of(self, of: object) -> list[asyncio.Task[Any]]:
        """The tasks of a process that have not ended, in the order of their creation."""
        return sorted(
            (task for task in self._tasks.get(of, ()) if not task.done()), key=self._ready.number
        )

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        # Whose timer it is is of use to `pass_time` alone.
        return asyncio.SelectorEventLoop.call_at(self, when, callback, *args, context=context)

    def has_foreign_timers(self) -> bool:
        # The nemesis has timers: no hours are leapt over.
        return True

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        # What would wake the selector costs two system calls and a callback.
        if threading.get_ident() == self._own_thread:
            return self.call_soon(callback, *args, context=context)
        return super().call_soon_threadsafe(callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised where the job is awaited
            done.set_exception(error)
        return done

    def hold(self, held: object) -> None:
        """Run nothing of a process until `release`."""
        self._ready.hold(held)

    def release(self, held: object) -> None:
        """Run what a process has to do again, also what came due meanwhile."""
        self._ready.release(held)


class _Nothing:
    """The callback of a loop that is passed over."""

    _cancelled: Final = True


_NOTHING: Final = _Nothing()


class _Lane:
    """The callbacks that keep their order.

    Attributes:
        number: by which lanes are ordered, the same in every run.
        process: that they belong to.
        waiting: each with the number of the turn in which it became ready.
    """

    __slots__ = ("number", "process", "waiting")

    def __init__(self, number: int, of: object | None) -> None:
        self.number = number
        self.process = of
        self.waiting: deque[tuple[int, Any]] = deque()

    def __lt__(self, other: _Lane) -> bool:
        return self.number < other.number


class ReadyCallbacks:
    """The callbacks of a loop that are ready; takes the place of its queue.

    Args:
        chance: draws which of them is next.
        time: virtual seconds.
    """

    def __init__(self, chance: random.Random, time: Callable[[], float]) -> None:
        self._time = time
        self._checked_at = -math.inf
        self._draw = chance.random
        self._disorder = DISORDERS[int(chance.random() * len(DISORDERS))]
        self._numbers = count()
        # One callback may make several ready, in any order where it has them in a set. They came in
        # the same turn, and go by the numbers of their lanes.
        self._turn = 0
        self._processes: dict[object | None, int] = {}
        self._lanes: dict[int, _Lane] = {}
        self._in_order: list[_Lane] = []
        self._held: dict[object, list[Any]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<ReadyCallbacks [{self._count} in {len(self._lanes)} lanes]>"

    def number(self, owner: object) -> int:
        """The number of the lane of a task or a connection: that of its first callback."""
        number: int | None = getattr(owner, LANE, None)
        if number is None:
            number = next(self._numbers)
            setattr(owner, LANE, number)
        return number

    def append(self, handle: Any) -> None:
        """Take in a callback that is ready."""
        of = handle._context.get(process)
        held = self._held.get(of) if self._held else None
        if held is not None:
            held.append(handle)
            return
        owner = _owner(handle)
        if issubclass(type(owner), KEEPING_ORDER):
            number = self.number(owner)
        elif (known := self._processes.get(of)) is not None:
            number = known
        else:
            number = self._processes[of] = next(self._numbers)
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane(number, of)
            insort(self._in_order, lane)
        lane.waiting.append((self._turn, handle))
        self._count += 1

    def popleft(self) -> Any:
        """Take out the callback that is run next.

        Raises:
            Deadlock: too many have run since time last passed.
        """
        self._turn += 1
        if not self._turn % MOST_AT_ONCE:
            self._check_time()
        lanes = self._in_order
        if not lanes:
            # The loop counted what a process has that stands still since this turn.
            return _NOTHING
        if len(lanes) == 1:
            lane = lanes[0]
        elif self._disorder and self._draw() < self._disorder:
            lane = lanes[int(self._draw() * len(lanes))]
        else:
            lane = min(lanes, key=_ready_since)
        _, handle = lane.waiting.popleft()
        if not lane.waiting:
            del self._lanes[lane.number]
            lanes.remove(lane)
        self._count -= 1
        return handle

    def _check_time(self) -> None:
        before, self._checked_at = self._checked_at, self._time()
        if before == self._checked_at:
            waiting = [
                _owner(handle) or handle for one in self._in_order for _, handle in one.waiting
            ]
            raise Deadlock(
                f"{MOST_AT_ONCE:,} callbacks ran at virtual second {before:g}, and time does not "
                f"pass while any is left to run: {waiting}"
            )

    def clear(self) -> None:
        """Forget all."""
        self._lanes.clear()
        self._in_order.clear()
        self._held.clear()
        self._count = 0

    def hold(self, held: object) -> None:
        """Keep back what a process has to do, and what will be."""
        if held in self._held:
            return
        waiting = [pair for lane in self._in_order if lane.process is held for pair in lane.waiting]
        self._held[held] = [handle for _, handle in sorted(waiting, key=_first)]
        self._in_order = [lane for lane in self._in_order if lane.process is not held]
        self._lanes = {lane.number: lane for lane in self._in_order}
        self._count -= len(waiting)

    def release(self, held: object) -> None:
        """The inverse of `hold`."""
        for handle in self._held.pop(held, ()):
            self.append(handle)


def _owner(handle: Any) -> Any:
    return getattr(handle._callback, "__self__", None)


def _ready_since(lane: _Lane) -> int:
    return lane.waiting[0][0]


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]
