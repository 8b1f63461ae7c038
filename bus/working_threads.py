"""The threads that work for an event loop just now, for which its virtual time stands still.

A thread that waits for another does not work: the thread that is going to wake it does, or none but
the loop's next timer can. Where a thread stands is read off its stack.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.thread
import selectors
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from types import CodeType, FrameType
from typing import Any, Final, TypeVar, TypeVarTuple
from weakref import WeakSet

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def _code_of(owner: Any, function: str) -> CodeType | None:
    code = getattr(getattr(owner, function, None), "__code__", None)
    return code if isinstance(code, CodeType) else None


_WAIT: Final = threading.Condition.wait.__code__
_RESULTS: Final = (
    _code_of(concurrent.futures.Future, "result"),
    _code_of(concurrent.futures.Future, "exception"),
)
_IDLE_IN_POOL: Final = _code_of(concurrent.futures.thread, "_worker")


class Job:
    """The work of an executor for the loop, from its submission to its end.

    Attributes:
        thread: that runs it; None before, and in a process.
    """

    __slots__ = ("_pool", "thread")

    def __init__(self, pool: WeakSet[threading.Thread]) -> None:
        self._pool = pool
        self.thread: threading.Thread | None = None

    def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run the function on this thread."""
        thread = threading.current_thread()
        self._pool.add(thread)
        self.thread = thread
        return function(*args)


class WorkingThreads:
    """The threads that work for one loop. To be made before its first task begins.

    These are the jobs of executors, the worker threads of anyio, and whatever other threads were
    started since, which may be about to wake the loop.
    """

    def __init__(self) -> None:
        self._before = WeakSet(threading.enumerate())
        self._pool: WeakSet[threading.Thread] = WeakSet()
        self._jobs: set[Job] = set()
        self._given_up: WeakSet[threading.Thread] = WeakSet()

    def begin(
        self, executor: Executor | None, function: Callable[[*Ts], T]
    ) -> tuple[Job, Callable[[*Ts], T]]:
        """A job, and the function to submit in place of `function`."""
        job = Job(self._pool)
        self._jobs.add(job)
        if executor is not None and not isinstance(executor, ThreadPoolExecutor):
            # What another process gets has to be pickled.
            return job, function

        def run(*args: *Ts) -> T:
            return job.run(function, *args)

        return job, run

    def finish(self, job: Job) -> None:
        """A job has ended, or was cancelled."""
        self._jobs.discard(job)

    def working(self) -> list[str]:
        """The position of each thread that works for the loop; for people."""
        return [*self._at_jobs(), *(_place(thread) for thread in self._others())]

    def give_up_others(self) -> bool:
        """Count no longer the threads of which nobody said that they work for the loop.

        Returns:
            Whether there was one of them, and no job beside it.
        """
        others = list(self._others())
        if any(_is_anyio_worker(thread) for thread in others) or any(self._at_jobs()):
            return False
        self._given_up.update(others)
        return bool(others)

    def _at_jobs(self) -> Iterator[str]:
        for job in list(self._jobs):
            thread = job.thread
            if thread is None:
                yield "a job of an executor, which no thread has begun"
            elif not _waits(thread, strictly=True):
                yield _place(thread)

    def _others(self) -> Iterator[threading.Thread]:
        alive = threading.enumerate()
        if len(alive) == 1:
            return
        for thread in alive:
            if thread in self._before or thread in self._pool or thread in self._given_up:
                continue
            if thread is threading.current_thread():
                continue
            if not _waits(thread, strictly=_is_anyio_worker(thread)):
                yield thread


def _is_anyio_worker(thread: threading.Thread) -> bool:
    kind = type(thread)
    return kind.__name__ == "WorkerThread" and kind.__module__.startswith("anyio.")


def _frame(thread: threading.Thread) -> FrameType | None:
    return sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]


def _waits(thread: threading.Thread, *, strictly: bool) -> bool:
    """True if a thread waits for others.

    Args:
        strictly: a wait with a time limit, or for a socket, is work: what the loop was
            promised may take that long. Other threads wait so for the next thing to do.
    """
    if thread.ident is None:
        # It is being started, which another one may wait for.
        return False
    frame = _frame(thread)
    if frame is None:
        return True
    code = frame.f_code
    if code is _WAIT:
        values = frame.f_locals
        if values.get("waiter") not in getattr(values.get("self"), "_waiters", ()):
            # It was woken, and has not run since.
            return False
        untimed = "timeout" in values and values["timeout"] is None
        caller = frame.f_back
        for_result = caller is not None and caller.f_code in _RESULTS
        return untimed or for_result or not strictly
    if code is _IDLE_IN_POOL:
        return True
    return not strictly and code.co_filename == selectors.__file__


def _place(thread: threading.Thread) -> str:
    frame = _frame(thread)
    where = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    return f"thread {thread.name!r}{where}"
