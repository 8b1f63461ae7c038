"""Methods of an instance that run without being called: their life, and one run of one of them."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, ClassVar, Final, TypeVar

import anyio

from dynbus.bus.background import Background, Work, is_cancelled
from dynbus.bus.bus import Bus, enter_bus
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context, entered, inside_instance
from dynbus.bus.errors import (
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    InvalidRequest,
    InvalidResponse,
    PayloadTooLarge,
    Unavailable,
)
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import EndpointName, InstanceName
from dynbus.bus.serving.requests import read_context
from dynbus.bus.work_queue import Job, JobEnd, Taker

from .step_history import StepMismatch

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_TIMEOUT: Final = 5.0
"""Seconds for which methods that were cancelled are waited for."""
MIGRATE_DELAY: Final = 0.2
"""Seconds before what a method asked to have run elsewhere is handed out again."""
RETRY_PAUSE: Final = 0.5
"""Seconds after which a server that was lost is asked again."""
START_WAIT: Final = 15.0
"""Seconds for which a start waits for what it takes from: servers of a cluster of which one is lost
have no leader of its streams for 4 to 9 s."""
NOT_TRIED_AGAIN: Final = (
    InvalidRequest,
    InvalidResponse,
    ConfigError,
    PayloadTooLarge,
    StepMismatch,
)
"""The errors of a try that every other try would raise too."""


class HandlerRunner(ABC):
    """Runs one method of an instance with what comes to it beside calls: jobs, or events.

    Args:
        endpoint: of the method: how what comes is read, and run.
    """

    def __init__(self, bus: Bus, instance: InstanceName, endpoint: Endpoint) -> None:
        self._bus = bus
        self._instance = instance
        self._endpoint = endpoint
        self._name = EndpointName(instance.namespace, instance.component, endpoint.name)
        self._hop = self._name.hop(instance.instance_id)
        self._is_draining = False
        self._ended = asyncio.Event()
        self._stopping = anyio.CancelScope()
        self._work: Work | None = None

    def __repr__(self) -> str:
        state = "draining" if self._is_draining else "running"
        return f"<{type(self).__name__} {self._name} [{state}]>"

    @abstractmethod
    async def start(self, background: Background) -> None:
        """Begin to run what comes.

        Raises:
            ConfigError, PermissionDenied, Unavailable: where it comes from is not there, and cannot
                be made.
        """

    @abstractmethod
    async def _run_all(self) -> None:
        """Run what comes until it comes no more."""

    @abstractmethod
    async def _take_no_more(self) -> None:
        """Have nothing more come."""

    async def drain(self, grace: float) -> None:
        """Begin nothing more, and let what runs end within `grace` seconds."""
        self._is_draining = True
        if self._work is None:
            return
        with anyio.move_on_after(grace):
            await self._take_no_more()
            await self._ended.wait()

    async def stop(self) -> None:
        """End what still runs, and begin nothing more."""
        self._is_draining = True
        self._stopping.cancel()
        if self._work is not None:
            await self._work.wait()

    async def _once_answered(self, make: Callable[[], Awaitable[T]]) -> T:
        """The result of `make()`, called again while the server does not answer.

        Raises:
            Unavailable: it did not for `START_WAIT` seconds.
        """
        until = monotonic() + START_WAIT
        while True:
            try:
                return await make()
            except Unavailable as error:
                if monotonic() >= until:
                    raise
                logger.info("%r does not start yet: %s", self, error)
            await anyio.sleep(RETRY_PAUSE)

    def _start_work(self, background: Background, what: str) -> None:
        self._work = background.start(self._live, name=f"{what} of {self._name}")

    async def _live(self) -> None:
        # The background is the runtime's; what the method does is the instance's.
        enter_bus(self._bus)
        try:
            with inside_instance(self._instance), self._stopping:
                await self._run_all()
        finally:
            self._ended.set()

    # One run ---------------------------------------------------------------------------

    def _context(self, fields: dict[str, str], name: str, tries: int) -> Context:
        """The context of a run.

        Args:
            fields: the headers of what is run.
            name: its id.

        Raises:
            InvalidRequest: the headers cannot be read.
        """
        fields.setdefault(headers.REQUEST_ID, name)
        called = read_context(
            fields,
            timeout=self._endpoint.timeout,
            hop=self._hop,
            draining=lambda: self._is_draining,
            now=monotonic(),
        )
        called.attempt = tries
        called.idempotency_key = name
        current = Context.current()
        if current is not None:
            called.set_trace_headers(current.trace_headers())
        return called

    async def _invoke(self, request: Any, called: Context) -> Any:
        """The result of the method.

        Raises:
            DeadlineExceeded: it took longer than it may.
            RuntimeError: what it waited for was cancelled, and it did not expect that.
            Exception: what the method raised.
        """
        leave = entered(called)
        try:
            if self._endpoint.timeout is None:
                return await self._endpoint.invoke(request)
            with anyio.move_on_after(self._endpoint.timeout):
                return await self._endpoint.invoke(request)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            # Taken for the end of its instance, it would be handed out at once, for ever.
            raise RuntimeError(f"what {self._name} waited for was cancelled") from error
        finally:
            leave()
        called.kill()
        raise DeadlineExceeded(f"{self._name} took longer than its {self._endpoint.timeout:g} s")


class TakingRunner(HandlerRunner):
    """Runs a method with what a taker hands out, as much at a time as the endpoint has places."""

    _keeps_returns: ClassVar[bool] = False
    """See `Taker.keeps_returns`: it has a log for them."""

    def __init__(self, bus: Bus, instance: InstanceName, endpoint: Endpoint) -> None:
        super().__init__(bus, instance, endpoint)
        self._taker: Taker | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None

    @abstractmethod
    def _taking(self) -> AbstractAsyncContextManager[Taker]:
        """The taker, open while the block runs."""

    @abstractmethod
    async def _carry_out(self, job: Job) -> None:
        """Run the method with a job, and settle it."""

    def _note_dropped(self, job_id: str, end: JobEnd) -> None:
        """Note that a job has left its queue without having begun."""

    async def _has_begun(self, job_id: str) -> bool:
        """True if it is known that a try of one has begun."""
        return False

    async def _has_ended(self, job_id: str) -> bool:
        """True if it is known how one ended."""
        return False

    async def _take_no_more(self) -> None:
        if self._taker is not None:
            await self._taker.drain()

    async def _open(self, exits: AsyncExitStack) -> Taker | None:
        """The taker, open until the stack is left; None where a drain begins before."""
        while not self._is_draining:
            try:
                return await exits.enter_async_context(self._taking())
            except Unavailable as error:
                # What it takes from was there at the start: a server was lost since.
                logger.warning("%r takes nothing yet: %s", self, error)
            await anyio.sleep(RETRY_PAUSE)
        return None

    async def _run_all(self) -> None:
        async with AsyncExitStack() as exits:
            taker = await self._open(exits)
            if taker is None:
                return
            self._taker = taker
            taker.on_dropped = self._note_dropped
            taker.has_begun = self._has_begun
            taker.has_ended = self._has_ended
            taker.keeps_returns |= self._keeps_returns
            if self._is_draining:
                await taker.drain()
            try:
                while jobs := await taker.begin():
                    for job in jobs:
                        self._start(self._run(job))
                while self._tasks:
                    await asyncio.wait(self._tasks)
            finally:
                await self._end_tasks()
                if self._failure is not None:
                    raise self._failure

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        # Not a task group's: entering a scope costs each job more than its bookkeeping here.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_ended)

    def _note_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._stopping.cancel()

    async def _end_tasks(self) -> None:
        """Cancel what still runs, and wait until it has given its jobs back."""
        if not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            _, stuck = await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT)
            for task in stuck:
                logger.error("a handler ignores its cancellation: %r", task)

    async def _run(self, job: Job) -> None:
        try:
            async with job:
                await self._carry_out(job)
        except DynbusError as error:
            # It is stored how it ended, or another taker gets it.
            logger.warning("%s of %s: %s", job.job_id, self._name, error)
