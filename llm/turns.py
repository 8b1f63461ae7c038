"""Turns: work that waits is begun by owners (tenants) in turn, so that much of one keeps no
other waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

from dynbus import Context

T = TypeVar("T")


def current_tenant() -> str:
    """The tenant whose key the request has that is being carried out; empty where there are no
    keys."""
    context = Context.current()
    return context.tenant if context is not None else ""


class Turns(Generic[T]):
    """Work that waits, by owner. One owner's comes in its order, and owners come in turn."""

    def __init__(self) -> None:
        # The first one has the next turn.
        self._waiting: dict[str, deque[T]] = {}
        self._count = 0

    def __repr__(self) -> str:
        return f"<Turns [{self._count} of {len(self._waiting)} owners]>"

    def __len__(self) -> int:
        return self._count

    def put(self, owner: str, item: T) -> None:
        """Have something wait for its owner's turn."""
        self._waiting.setdefault(owner, deque()).append(item)
        self._count += 1

    def pop(self, may: Callable[[str], bool] = lambda owner: True) -> tuple[str, T] | None:
        """The next item, and its owner; None where nothing waits of an owner that may."""
        owner = next(filter(may, self._waiting), None)
        if owner is None:
            return None
        waiting = self._waiting.pop(owner)
        item = waiting.popleft()
        if waiting:
            self._waiting[owner] = waiting
        self._count -= 1
        return owner, item


class _Job(NamedTuple):
    function: Callable[[], Any]
    future: Future[Any]


class TenantThreads:
    """Threads that work for the tenants of requests in turn.

    Args:
        threads: that do it; others may use them as well.
        most: how many of them work for one tenant at a time.
    """

    def __init__(self, threads: ThreadPoolExecutor, most: int) -> None:
        self._threads = threads
        self._most = most
        self._lock = threading.Lock()
        self._turns = Turns[_Job]()
        self._working = Counter[str]()

    def __repr__(self) -> str:
        return f"<TenantThreads {self._turns!r}>"

    async def run(self, function: Callable[[], T], tenant: str | None = None) -> T:
        """Call a function in a thread, when it is its tenant's turn.

        One that is cancelled before is not called.

        Args:
            tenant: the current request's unless given.
        """
        future = Future[T]()
        with self._lock:
            owner = current_tenant() if tenant is None else tenant
            self._turns.put(owner, _Job(function, future))
        self._threads.submit(self._work)
        try:
            return await asyncio.wrap_future(future)
        finally:
            # What it raises holds this frame: garbage that only a full collection would find.
            del future

    def _may(self, tenant: str) -> bool:
        return self._working[tenant] < self._most

    def _work(self) -> None:
        with self._lock:
            taken = self._turns.pop(self._may)
            if taken is None:
                # A thread that ends for the same tenant goes on with it.
                return
            tenant, job = taken
            self._working[tenant] += 1
        del taken
        try:
            if job.future.set_running_or_notify_cancel():
                self._carry_out(job)
        finally:
            del job
            with self._lock:
                self._working[tenant] -= 1
                if not self._working[tenant]:
                    del self._working[tenant]
                goes_on = bool(self._turns)
            if goes_on:
                self._threads.submit(self._work)

    def _carry_out(self, job: _Job) -> None:
        try:
            result = job.function()
        except BaseException as error:  # noqa: BLE001 - raised to the asker
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
        finally:
            del job
