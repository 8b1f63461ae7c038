"""A mock engine in real time: one task steps it and sleeps for as long as the steps take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

import anyio

from dynbus.bus.background import Openable
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import Unavailable
from dynbus.kvrouter.events import KvEvent

from .engine import EngineConfig, EngineRequest, MockEngine, Output, StepResult

logger = logging.getLogger(__name__)

CATCH_UP: Final = 0.1
"""Seconds that an engine may lag behind its time and still catch up; the rest is dropped."""


class EventSink(Protocol):
    """Where an engine's KV events go."""

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Hand over events, in order; must not block."""
        ...


class EngineRunner(Openable):
    """Runs an engine. Use it with `async with`.

    Args:
        sink: gets what the cache stored and removed when a step has ended; None for nobody.

    Attributes:
        engine: not to be stepped by others.
    """

    def __init__(self, config: EngineConfig, sink: EventSink | None = None) -> None:
        super().__init__()
        self.engine = MockEngine(config)
        self._sink = sink
        self._readers: dict[str, asyncio.Queue[Output | None]] = {}
        self._has_work = asyncio.Event()
        self._failure: Exception | None = None

    def __repr__(self) -> str:
        return f"<EngineRunner {self.engine!r}>"

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, name="mock-engine")
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
                if self._failure is None:
                    self._failure = Unavailable("the engine was stopped")
                self._end_readers()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output, None]:
        """What each step makes for a request.

        Leaving it frees the blocks of the request, as does `cancel`, after which it just ends.

        Raises:
            RequestTooLong: its prompt and output are more than the cache holds.
            Unavailable: the engine was stopped, or it failed.
            ValueError: see `MockEngine.add`.
        """
        if self._failure is not None:
            raise self._unavailable()
        self.engine.add(request)
        queue: asyncio.Queue[Output | None] = asyncio.Queue()
        self._readers[request.id] = queue
        self._has_work.set()
        try:
            left = request.max_tokens
            while left:
                output = await queue.get()
                if output is None:
                    if self._failure is not None:
                        raise self._unavailable()
                    return
                left -= output.count
                yield output
        finally:
            self.cancel(request.id)

    def cancel(self, request_id: str) -> None:
        """Free the blocks of a request, and end its tokens; nothing for an unknown one."""
        self.engine.cancel(request_id)
        queue = self._readers.pop(request_id, None)
        if queue is not None:
            queue.put_nowait(None)

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"the mock engine does not run: {self._failure}")

    def _end_readers(self) -> None:
        for queue in self._readers.values():
            queue.put_nowait(None)

    async def _run(self) -> None:
        try:
            await self._step_forever()
        except Exception as error:
            logger.exception("the mock engine failed: its requests end")
            self._failure = error
            self._end_readers()

    async def _step_forever(self) -> None:
        ends = monotonic()
        while True:
            if self.engine.is_idle:
                self._has_work.clear()
                await self._has_work.wait()
                ends = monotonic()
            # Timers fire late: what a step was late for, the next ones have less.
            begins = max(ends, monotonic() - CATCH_UP)
            result = self.engine.step(begins)
            ends = begins + result.duration
            await anyio.sleep(max(0.0, ends - monotonic()))
            self._tell(result)

    def _tell(self, result: StepResult) -> None:
        for output in result.outputs:
            queue = self._readers.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)
        if self._sink is not None and result.events:
            self._sink.publish(result.events)
