"""Work that goes on beside its owner: a task group of anyio in a task of its own."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from .errors import Unavailable, describe_exception, only_cause

logger = logging.getLogger(__name__)

T = TypeVar("T")


@asynccontextmanager
async def task_group() -> AsyncGenerator[TaskGroup]:
    """A task group of anyio that raises a single failure as itself, not in a group."""
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        failure = only_cause(group)
    if failure is not None:
        # Out here, so that its context stays what it is.
        raise failure


class Work:
    """One piece of work in a `Background`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._scope = anyio.CancelScope()
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Work {self.name} [{'ended' if self.ended else 'runs'}]>"

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        """Cancel the work; it cleans up in its own task, under a shield of its own."""
        self._scope.cancel()

    async def wait(self) -> None:
        """Wait until the work has ended, however it did."""
        await self._ended.wait()

    async def end(self) -> None:
        """Cancel the work and wait until it has ended.

        A caller that is cancelled while it waits leaves nothing behind: the work ends all the same.
        """
        self.cancel()
        await self._ended.wait()

    async def run(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Carry the work out; `Background` does.

        Raises:
            RuntimeError: what it waited for was cancelled, and it did not expect that.
        """
        try:
            with self._scope:
                await function(*args)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            # A task group would take it for its own end, and end all other work without a word.
            raise RuntimeError(f"what {self.name} waited for was cancelled") from error
        finally:
            self._ended.set()


def is_cancelled() -> bool:
    """True if this task itself is cancelled, rather than what it has waited for."""
    task = asyncio.current_task()
    by_loop = task is not None and task.cancelling() > 0
    return by_loop or anyio.current_effective_deadline() == -math.inf


def _say_asyncio() -> None:
    """Let anyio know of the loop in callbacks too.

    Where `sniffio` is installed, which many a package brings, anyio goes by it, and finds no loop
    where no task runs.
    """
    try:
        library: Any = importlib.import_module("sniffio")
    except ImportError:
        return
    library.current_async_library_cvar.set("asyncio")


class Background:
    """The work of one owner, which ends with it.

    A bare task group belongs to the task that has entered it, so nothing can be started by one task
    and ended by another. This one is entered by a task of its own: `start` and `Work.end` may be
    called from any task of the loop, and nobody but the owner can cancel what it does.

    Work that fails ends all of it: the rest is cancelled, and `failed` is told why.

    Args:
        name: what the task is called.
        failed: the first of `on_failure`.

    Attributes:
        failure: what the work raised; None as long as none has failed.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], object] | None = None) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._listeners = [] if failed is None else [failed]
        self._closing = asyncio.Event()
        self._tasks: TaskGroup | None = None
        self._host: asyncio.Task[None] | None = None
        self._variables = contextvars.copy_context()
        self._variables.run(_say_asyncio)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Take work from now on, until `close`."""
        opened = asyncio.Event()
        # Nobody's deadline or cancellation: work outlives the call that happens to start it.
        self._host = asyncio.get_running_loop().create_task(
            self._run(opened), name=self.name, context=self._variables
        )
        try:
            await opened.wait()
        except asyncio.CancelledError:
            # Nobody closes what they have not got.
            self._closing.set()
            raise

    @property
    def is_open(self) -> bool:
        """True if work can be started."""
        return self._tasks is not None and self.failure is None

    def on_failure(self, listener: Callable[[BaseException], object]) -> None:
        """Call `listener(error)` once, with what the work raised, after the rest has ended."""
        self._listeners.append(listener)

    def fail(self, error: BaseException) -> None:
        """Take no more work, and tell who listens: the work, or its owner itself, has failed."""
        self.failure = error
        for listener in self._listeners:
            listener(error)

    def start(self, function: Callable[..., Awaitable[object]], *args: Any, name: str) -> Work:
        """Start `function(*args)` beside what runs.

        Raises:
            RuntimeError: the owner is closed, or is not open yet.
            Unavailable: other work has failed.
        """
        if self.failure is not None:
            raise Unavailable(
                f"{self.name} has failed: {describe_exception(self.failure)}", started=False
            ) from self.failure
        tasks = self._tasks
        if tasks is None:
            raise RuntimeError(f"{self.name} is not open: {name} cannot be started")

        def begin() -> Work:
            work = Work(name)
            tasks.start_soon(partial(work.run, function, *args), name=name)
            return work

        return self._variables.copy().run(begin)

    async def close(self) -> None:
        """Cancel what is left and wait for its end; more calls change nothing."""
        self._closing.set()
        if self._host is not None:
            await asyncio.wait({self._host})

    async def _run(self, opened: asyncio.Event) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                opened.set()
                await self._closing.wait()
                self._tasks = None
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            self._closing.set()
            error = only_cause(group)
            logger.error("%s: background work failed", self.name, exc_info=error)
            self.fail(error)
        finally:
            self._tasks = None


class Openable:
    """The base of objects that are open from `__aenter__` to `close`, which different tasks may
    call.

    A subclass writes all of its life in `_open`. A task of its own enters that context manager,
    holds it and leaves it, so it may use task groups and cancel scopes of anyio, and a caller that
    is cancelled while it opens or closes it leaves nothing behind.

    Args:
        background: fails with what fails while it is open. Without it nobody knows of that before
            `close` raises it.
    """

    def __init__(self, background: Background | None = None) -> None:
        self._background = background
        self._scope = anyio.CancelScope()
        self._closing = asyncio.Event()
        self._host: asyncio.Task[None] | None = None

    def _open(self) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        self._host = loop.create_task(self._hold(opened), name=repr(self))
        try:
            await asyncio.wait({self._host, opened}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._closing.set()
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({self._host})
            if not self._host.cancelled():
                # It may have failed at that very time, and who would be told has left.
                self._host.exception()
            raise
        if not opened.done():
            self._host.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what was opened and wait for its end; more calls change nothing.

        Raises:
            Exception: what ended it before, or its clean-up.
        """
        if self._host is None:
            return
        self._closing.set()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({self._host})
        self._host.result()

    async def _hold(self, opened: asyncio.Future[None]) -> None:
        try:
            with self._scope:
                async with self._open():
                    if self._background is not None:
                        self._background.start(self._watch, name=f"watch over {self!r}")
                    opened.set_result(None)
                    await self._closing.wait()
        except BaseExceptionGroup as group:
            error = only_cause(group)
            if opened.done():
                logger.error("%r failed", self, exc_info=error)
            raise error from None

    async def _watch(self) -> None:
        assert self._host is not None
        await asyncio.wait({self._host})
        if not self._closing.is_set():
            if not self._host.cancelled():
                self._host.result()
            # Work in it that is cancelled from elsewhere ends its task group without a word.
            raise RuntimeError(f"{self!r} has ended by itself")


async def run_apart(function: Callable[..., Awaitable[T]], *args: Any, name: str) -> T:
    """The result of `function(*args)`, which runs in a task of its own.

    A caller that is cancelled while it waits cancels it, and waits until it has cleaned up under
    its shields. A second `cancel()` of asyncio's, which no shield stops, ends the wait at most.

    Raises:
        Exception: what it raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    async def run() -> None:
        try:
            results.append(await function(*args))
        except Exception as error:  # noqa: BLE001 - raised to the waiting caller
            errors.append(error)

    async with Background(name, errors.append) as background:
        work = background.start(run, name=name)
        try:
            await work.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await work.end()
    if errors:
        raise errors[0]
    return results[0]
