"""The clock of the library, and an event loop on which it jumps.

Library code reads time with `monotonic()`. On a `JumpingLoop` that is the loop's virtual time,
which stands still while anything can run, threads that work for the loop included, and jumps to
the next timer when everything waits: a test of a 30-second lease takes no longer than what
happens in these seconds, and takes it the same way every time.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Final, TypeVar, TypeVarTuple
from weakref import WeakSet

from .working_threads import WorkingThreads

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START: Final = 1000.0
"""The beginning of virtual time: not 0, which reads as "never" in too much code."""

EPOCH: Final = 1_700_000_000.0
"""The Unix time of virtual second 0."""

DEFAULT_LIMIT: Final = 7200.0
"""Virtual seconds after which a run has most likely been forgotten by whatever it waits for.

Heartbeats and leases set timers for ever, so a wait beside them never looks like a deadlock."""

IO_GRACE: Final = 0.01
"""Real seconds that open sockets get before time jumps."""

DEFAULT_PATIENCE: Final = 60.0
"""Real seconds for which time stands still for a thread."""

STRANGER_PATIENCE: Final = 5.0
"""Real seconds that threads which nobody knows of get where no timer is set at all."""

_MACHINERY: Final = ("asyncio", "anyio", "contextlib")
"""Packages that set timers for their callers."""
_LIBRARY: Final = "dynbus"

_FIRST_LOOK: Final = 0.001
_LAST_LOOK: Final = 0.02
"""Real seconds between two looks at what the threads do: they do not tell when they wait."""

_read_clock: Callable[[], float] = time.monotonic
_running_loops = 0
_swap = threading.Lock()


def monotonic() -> float:
    """Seconds on the running loop's clock under a `JumpingLoop`, else of `time.monotonic`."""
    return _read_clock()


def unix_time() -> float:
    """Unix seconds; virtual, and the same in every run, under a `JumpingLoop`."""
    loop = _jumping_loop() if _running_loops else None
    return time.time() if loop is None else EPOCH + loop.time() + loop.set_forward


class Deadlock(RuntimeError):
    """Raised out of a `JumpingLoop` that nothing can wake, or whose threads work for too long."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` jumps to the next timer when nothing else is left to do.

    Time stands still while a thread works for the loop: a job of an executor, a worker thread of
    anyio, and any other thread that was started meanwhile. One that waits without a limit, for
    the loop to carry out what `run_coroutine_threadsafe` handed back for example, does not
    work. Open sockets are waited for in real time for `IO_GRACE` seconds per jump.

    Args:
        start: virtual seconds at which it begins.
        limit: virtual seconds after which `Deadlock` is raised, so that a wait beside a
            heartbeat that never ends is found too.
        patience: real seconds for which a thread is waited for. Then `Deadlock` is raised for
            a job, and other threads are left alone.
        alone: whether no thread works for it and no socket is open, so that none is looked for.

    Attributes:
        set_forward: seconds by which the time of day was set forward, beyond what has gone by.
    """

    def __init__(
        self,
        *,
        start: float = START,
        limit: float = DEFAULT_LIMIT,
        patience: float = DEFAULT_PATIENCE,
        alone: bool = False,
    ) -> None:
        self._threads = WorkingThreads()
        self._virtual = _VirtualSelector(self, self._threads, start, limit, patience, alone)
        self._foreign: WeakSet[asyncio.TimerHandle] = WeakSet()
        self.set_forward = 0.0
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual.now

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = super().call_at(when, callback, *args, context=context)
        if when < math.inf and not _is_set_by_library():
            self._foreign.add(handle)
        return handle

    def has_foreign_timers(self) -> bool:
        """True if a timer runs that its user set (a `sleep` or timeout), and not the library."""
        now = self.time()
        return any(not one.cancelled() and one.when() > now for one in self._foreign)

    async def everything_waits(self) -> None:
        """Return when everything else waits, before time moves on: what was due at this very
        moment has run then."""
        waiter: asyncio.Future[None] = self.create_future()
        self._virtual.waiters.append(waiter)
        await waiter

    def expect(self, seconds: float) -> None:
        """Let `seconds` go by without counting towards `limit`: somebody waits for just them."""
        self._virtual.expect(seconds)

    def run_forever(self) -> None:
        _install(1)
        try:
            super().run_forever()
        finally:
            _install(-1)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        job, run = self._threads.begin(executor, func)
        try:
            future = super().run_in_executor(executor, run, *args)
        except BaseException:
            self._threads.finish(job)
            raise
        future.add_done_callback(lambda _: self._threads.finish(job))
        return future


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that moves a clock instead of waiting on it.

    The loop asks it to wait exactly when no callback is ready: for `timeout` seconds, or for
    ever when no timer is set.

    Attributes:
        waiters: done when nothing else can run.
    """

    def __init__(
        self,
        loop: JumpingLoop,
        threads: WorkingThreads,
        start: float,
        limit: float,
        patience: float,
        alone: bool,
    ) -> None:
        super().__init__()
        self._alone = alone
        self.now = start
        self._threads = threads
        self._loop = loop
        self._end = start + limit
        self._limit = limit
        self._patience = patience
        self.waiters: list[asyncio.Future[None]] = []

    def expect(self, seconds: float) -> None:
        """See `JumpingLoop.expect`."""
        self._end += seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._alone:
            events = super().select(0)
            if events or (timeout is not None and timeout <= 0):
                return events
            events = self._wait_for_threads() or super().select(self._real_wait(timeout))
            if events:
                return events
        elif timeout is not None and timeout <= 0:
            return []
        if self.waiters:
            waiters, self.waiters = self.waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            return []
        if timeout is None:
            raise Deadlock(f"deadlock: every task waits and no timer is set{self._waiting()}")
        self.now += timeout
        if self.now > self._end:
            self._end = self.now + self._limit
            raise Deadlock(
                f"deadlock: only timers ran in {self._limit:g} s of virtual time{self._waiting()}"
            )
        return []

    def _wait_for_threads(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until no thread works for the loop, or one has woken it: then what it did."""
        end = time.monotonic() + self._patience
        pause = _FIRST_LOOK
        while working := self._threads.working():
            events = super().select(pause)
            if events:
                return events
            pause = min(2 * pause, _LAST_LOOK)
            if time.monotonic() >= end and not self._threads.give_up_others():
                raise Deadlock(
                    f"deadlock: time has stood still for {self._patience:g} s, in which this "
                    f"worked for the loop: {', '.join(working)}; run(..., patience=...) waits "
                    f"longer{self._waiting()}"
                )
        # A thread that stopped working may have woken the loop as its last act.
        return super().select(0)

    def _real_wait(self, timeout: float | None) -> float:
        # One descriptor is the loop's own, by which other threads wake it.
        has_sockets = len(self.get_map()) > 1
        if timeout is None and (has_sockets or threading.active_count() > 1):
            return min(self._patience, STRANGER_PATIENCE)
        return IO_GRACE if has_sockets else 0

    def _waiting(self) -> str:
        lines: list[str] = []
        for task in asyncio.all_tasks(self._loop):
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "?"
            lines.append(f"\n  {task.get_name()} in {task.get_coro()!r} at {where}")
        return "".join(sorted(lines))


def run(
    main: Coroutine[Any, Any, T],
    *,
    limit: float = DEFAULT_LIMIT,
    patience: float = DEFAULT_PATIENCE,
    debug: bool | None = None,
) -> T:
    """Run a coroutine on a `JumpingLoop` of its own and return its result.

    Args:
        limit, patience: see `JumpingLoop`.

    Raises:
        Deadlock: nothing could ever have woken it, `limit` virtual seconds went by, or a thread
            worked for longer than `patience`.
    """

    def make_loop() -> JumpingLoop:
        return JumpingLoop(limit=limit, patience=patience)

    with asyncio.Runner(debug=debug, loop_factory=make_loop) as runner:
        return runner.run(main, context=contextvars.copy_context())


def _is_set_by_library() -> bool:
    """True if the library, and not its user, sets the timer that is being set."""
    frame = inspect.currentframe()
    setter = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    while setter is not None:
        package = str(setter.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _MACHINERY:
            return package == _LIBRARY
        setter = setter.f_back
    return True


def _jumping_loop() -> JumpingLoop | None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop if isinstance(loop, JumpingLoop) else None


def _virtual_monotonic() -> float:
    loop = _jumping_loop()
    return time.monotonic() if loop is None else loop.time()


def _install(count: int) -> None:
    """Look at the running loop only while a `JumpingLoop` runs; it costs more than the clock."""
    global _read_clock, _running_loops
    with _swap:
        _running_loops += count
        _read_clock = _virtual_monotonic if _running_loops else time.monotonic
