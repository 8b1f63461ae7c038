"""The control lane: a second connection on a thread and event loop of its own.

Leases, heartbeats, cancels, credit and pings must neither queue behind bulk data nor stop
when a handler blocks the main loop. Whatever runs here sees the main loop only through
`call_soon_threadsafe`. The in-memory bus has no thread to spare and no need for one: its
lane runs inline, on the loop that the test jumps.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from .background import Background
from .errors import Unavailable
from .transport import Connection

logger = logging.getLogger(__name__)

T = TypeVar("T")
ConnectionFactory = Callable[[], Awaitable[Connection]]


class ControlLane(Protocol):
    """The thread and the connection of control traffic."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def connection(self) -> Connection:
        """The lane's connection; to be used on the lane's loop only."""
        ...

    @property
    def background(self) -> Background:
        """Work on the lane's loop, which ends with the lane; to be used on that loop only. It fails
        with the lane itself, too."""
        ...

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run `function(*args)` on the lane soon; callable from any thread."""
        ...

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the lane and await its result from the main loop.

        Raises:
            Unavailable: the lane is closed, or was before the work had ended.
        """
        ...

    async def stop(self) -> None: ...


class InlineLane:
    """A lane on the main loop itself, for the in-memory bus."""

    def __init__(self, connection: Connection) -> None:
        self.loop = asyncio.get_running_loop()
        self.connection = connection
        self.background = Background("control lane")

    async def start(self) -> None:
        await self.background.open()

    def call(self, function: Callable[..., object], *args: object) -> None:
        self.loop.call_soon(function, *args)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await work

    async def stop(self) -> None:
        await self.background.close()
        await self.connection.close()


class ThreadLane:
    """A lane on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.background = Background(name)
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ending = False
        # What is waited for, and the work where it has not begun.
        self._open: dict[concurrent.futures.Future[Any], Coroutine[Any, Any, Any] | None] = {}

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "the lane has not been started"
        return self._loop

    @property
    def connection(self) -> Connection:
        assert self._connection is not None, "the lane has not been started"
        return self._connection

    async def start(self, connect: ConnectionFactory) -> None:
        """Start the thread and open its connection.

        Raises:
            PermissionDenied, Unavailable: what `connect` raised on the lane.
        """
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._main, args=(connect, ready), name=self._name, daemon=True
        )
        self._thread.start()
        await asyncio.wrap_future(ready)

    def call(self, function: Callable[..., object], *args: object) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The lane's loop is closed: the runtime is going away and nobody waits for this.
            logger.debug("the control lane is closed, %s was not run", function)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        # Known before it is queued: a loop that closes in between does not run it.
        self._open[outcome] = work
        try:
            self.loop.call_soon_threadsafe(self._begin, work, outcome)
        except RuntimeError:
            self._open.pop(outcome, None)
            work.close()
            raise _closed() from None
        return await asyncio.wrap_future(outcome)

    def _begin(self, work: Coroutine[Any, Any, T], outcome: concurrent.futures.Future[T]) -> None:
        if self._ending:
            # The tasks of the loop are cancelled already; `_fail_open` answers.
            return
        self._open[outcome] = None
        task = self.loop.create_task(work)
        task.add_done_callback(partial(self._pass_on, outcome))
        outcome.add_done_callback(lambda _: self.call(task.cancel) if outcome.cancelled() else None)

    def _pass_on(self, outcome: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
        """Tell the waiting caller how work ended.

        Not left to `asyncio.run_coroutine_threadsafe`: where nobody waits any longer it does not
        look at a failure, and the loop reports that as an exception that was never retrieved.
        """
        self._open.pop(outcome, None)
        if not task.cancelled():
            error = task.exception()
        elif self._ending:
            error = _closed()
        else:
            outcome.cancel()
            error = None
        if not outcome.set_running_or_notify_cancel():
            if error is not None:
                logger.debug("%r failed when nobody waited for it any longer: %s", task, error)
        elif error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def _fail_open(self) -> None:
        """Answer for the work that the closed loop never came to."""
        while self._open:
            outcome, work = self._open.popitem()
            if work is not None:
                work.close()
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(_closed())

    async def stop(self) -> None:
        if self._thread is None:
            return
        if self._stop is not None:
            self.call(self._stop.set)
        async with asyncio.timeout(10.0):
            await asyncio.shield(asyncio.wrap_future(self._ended))
        self._thread.join(1.0)
        self._thread = None

    def _main(self, connect: ConnectionFactory, ready: concurrent.futures.Future[None]) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._live(connect, ready))
        except BaseException as error:
            if ready.done() and not ready.cancelled():
                logger.exception("the control lane broke")
                self.background.fail(error)
            elif ready.cancelled() or not ready.set_running_or_notify_cancel():
                logger.debug("nobody waited for the control lane any longer: %r", error)
            else:
                ready.set_exception(error)
        finally:
            self._fail_open()
            self._ended.set_result(None)

    async def _live(
        self, connect: ConnectionFactory, ready: concurrent.futures.Future[None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        connecting = asyncio.ensure_future(connect())
        ready.add_done_callback(
            lambda _: self.call(connecting.cancel) if ready.cancelled() else None
        )
        self._connection = await connecting
        try:
            async with self.background:
                if ready.set_running_or_notify_cancel():
                    ready.set_result(None)
                    await self._stop.wait()
        finally:
            self._ending = True
            await self._connection.close()


def _closed() -> Unavailable:
    return Unavailable("the control lane is closed")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new event loop: uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
