"""The echo handler that every system serves, and what goes over the wire.

Systems that carry plain objects serve these functions as they are; dynbus serves the same
four handlers with pydantic models in place of the dictionaries.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any, Final, TypeAlias

STEP_SECONDS: Final = 0.02
"""The time of one engine step."""

Json: TypeAlias = dict[str, Any]


def make_request(max_tokens: int) -> Json:
    """A request for `max_tokens` items."""
    return {"token_ids": [1, 2, 3], "text": "prompt", "max_tokens": max_tokens}


def make_item(token_id: int) -> Json:
    """One item, as an engine makes it for one token."""
    return {"token_ids": [token_id], "text": "tok", "index": 0}


class StepClock:
    """Wakes all waiters at every engine step, from a thread as an engine would.

    The thread lives only while somebody waits, so that an idle server is idle. Steps lie on
    a fixed grid: a server that falls behind is late, it does not shift the grid.
    """

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[float]] = []
        self._idle: threading.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def next_step(self) -> float:
        """Wait for the next step; returns when it was due, in seconds of `time.monotonic`."""
        # Once: it is a system call each time, the same for every system that is measured.
        loop = self._loop = self._loop or asyncio.get_running_loop()
        waiter: asyncio.Future[float] = loop.create_future()
        self._waiters.append(waiter)
        if self._idle is None:
            self._idle = threading.Event()
            threading.Thread(target=self._tick, args=(loop, self._idle), daemon=True).start()
        return await waiter

    def _tick(self, loop: asyncio.AbstractEventLoop, idle: threading.Event) -> None:
        due = time.monotonic() + STEP_SECONDS
        while not idle.wait(max(0.0, due - time.monotonic())):
            try:
                loop.call_soon_threadsafe(self._fire, due)
            except RuntimeError:  # the loop is closed: the server ended within a step
                return
            due += STEP_SECONDS

    def _fire(self, due: float) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(due)
        if not waiters and self._idle is not None:
            self._idle.set()
            self._idle = None


class Echo:
    """The four handlers, on plain dictionaries."""

    def __init__(self) -> None:
        self._clock = StepClock()

    async def unary(self, request: Json) -> Json:
        """One item."""
        return make_item(request["token_ids"][0])

    async def stream(self, request: Json) -> AsyncGenerator[Json, None]:
        """`max_tokens` items, without ever awaiting between them."""
        for token_id in range(request["max_tokens"]):
            yield make_item(token_id)

    async def stream_yielding(self, request: Json) -> AsyncGenerator[Json, None]:
        """`max_tokens` items, letting the loop turn before each."""
        for token_id in range(request["max_tokens"]):
            await asyncio.sleep(0)
            yield make_item(token_id)

    async def stream_steps(self, request: Json) -> AsyncGenerator[Json, None]:
        """One item for each of `max_tokens` engine steps; `step` is when the step was due."""
        for token_id in range(request["max_tokens"]):
            step = await self._clock.next_step()
            yield {**make_item(token_id), "step": step}


STREAMS: Final = ("stream", "stream_yielding", "stream_steps")
