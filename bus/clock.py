"""The clock of the library, and an event loop on which it jumps.

Library code reads time with `monotonic()`. On a `JumpingLoop` that is the loop's virtual time,
which stands still while anything can run and jumps to the next timer when everything waits: a
test of a 30-second lease takes a millisecond, and takes it the same way every time.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, Final, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START: Final = 1000.0
"""Where virtual time begins: not at 0, which reads as "never" in too much code."""

EPOCH: Final = 1_700_000_000.0
"""The Unix time of virtual second 0."""

DEFAULT_LIMIT: Final = 7200.0
"""Virtual seconds after which a run has most likely been forgotten by whatever it waits for.

Heartbeats and leases set timers for ever, so a wait beside them never looks like a deadlock."""

IO_GRACE: Final = 0.01
"""Real seconds that open sockets get before time jumps."""

_read_clock: Callable[[], float] = time.monotonic
_running_loops = 0
_swap = threading.Lock()


def monotonic() -> float:
    """Seconds on the running loop's clock under a `JumpingLoop`, else of `time.monotonic`."""
    return _read_clock()


def unix_time() -> float:
    """Unix seconds; virtual, and the same in every run, under a `JumpingLoop`."""
    loop = _jumping_loop() if _running_loops else None
    return time.time() if loop is None else EPOCH + loop.time()


class Deadlock(RuntimeError):
    """Raised out of a `JumpingLoop` when nothing can ever wake a task again."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` jumps to the next timer when nothing else is left to do.

    Jobs in an executor are waited for in real time, as are open sockets for `IO_GRACE`
    seconds per jump. Other threads may wake the loop with `call_soon_threadsafe`, but time
    does not stand still for them.

    Args:
        start: virtual seconds at which it begins.
        limit: virtual seconds after which `Deadlock` is raised, so that a wait beside a
            heartbeat that never ends is found too.
        patience: real seconds for which a thread is waited for.
    """

    def __init__(
        self, *, start: float = START, limit: float = DEFAULT_LIMIT, patience: float = 5.0
    ) -> None:
        self._virtual = _VirtualSelector(self, start, limit, patience)
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual.now

    def run_forever(self) -> None:
        _install(1)
        try:
            super().run_forever()
        finally:
            _install(-1)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        job = super().run_in_executor(executor, func, *args)
        self._virtual.jobs += 1
        job.add_done_callback(self._job_done)
        return job

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        # The base class waits here for a thread of its own, in 3.12 with a timer of 300 s that
        # would jump; `patience` bounds the wait instead.
        self._virtual.jobs += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._virtual.jobs -= 1

    def _job_done(self, _job: asyncio.Future[Any]) -> None:
        self._virtual.jobs -= 1


class _VirtualSelector(selectors.BaseSelector):
    """A selector that moves a clock instead of waiting on it.

    The loop asks it to wait exactly when no callback is ready: for `timeout` seconds, or for
    ever when no timer is set.
    """

    def __init__(self, loop: JumpingLoop, start: float, limit: float, patience: float) -> None:
        self.now = start
        self.jobs = 0
        self._loop = loop
        self._end = start + limit
        self._limit = limit
        self._patience = patience
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = self._real.select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        events = self._real.select(self._real_wait(timeout))
        if events:
            return events
        if timeout is None:
            raise Deadlock(f"deadlock: every task waits and no timer is set{self._waiting()}")
        self.now += timeout
        if self.now > self._end:
            self._end = self.now + self._limit
            raise Deadlock(
                f"deadlock: only timers ran in {self._limit:g} s of virtual time{self._waiting()}"
            )
        return []

    def _real_wait(self, timeout: float | None) -> float:
        if self.jobs or (timeout is None and threading.active_count() > 1):
            return self._patience
        # One descriptor is the loop's own, by which other threads wake it.
        if len(self._real.get_map()) > 1:
            return self._patience if timeout is None else IO_GRACE
        return 0

    def _waiting(self) -> str:
        lines: list[str] = []
        for task in asyncio.all_tasks(self._loop):
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "?"
            lines.append(f"\n  {task.get_name()} in {task.get_coro()!r} at {where}")
        return "".join(sorted(lines))

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


def run(
    main: Coroutine[Any, Any, T],
    *,
    limit: float = DEFAULT_LIMIT,
    patience: float = 5.0,
    debug: bool | None = None,
) -> T:
    """Run a coroutine on a `JumpingLoop` of its own and return its result.

    Raises:
        Deadlock: nothing could ever have woken it, or `limit` virtual seconds went by.
    """

    def make_loop() -> JumpingLoop:
        return JumpingLoop(limit=limit, patience=patience)

    with asyncio.Runner(debug=debug, loop_factory=make_loop) as runner:
        return runner.run(main, context=contextvars.copy_context())


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
