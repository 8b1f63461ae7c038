"""The watch over an engine's steps, on the thread of the control lane, which no hang stops."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio

from dynbus.spi import Bus, Openable, Work, monotonic

from .step_watch import HangLimits, Progress, StepWatch

TICK: Final = 0.25
"""Seconds between two looks."""


def stacks_of_threads() -> str:
    """The stacks of all threads of this process, as the log shows them."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    stacks: list[str] = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        lines = "" if frame is None else "".join(traceback.format_stack(frame))
        stacks.append(f"Thread {thread.name}:\n{lines}")
    return "".join(stacks).rstrip()


class HangWatch(Openable):
    """Watches an engine while in the `async with`.

    Args:
        hung: called once, on the lane's thread, with the reason for which the engine counts as
            hung.

    Attributes:
        reason: that one; empty while it goes on.
    """

    def __init__(
        self, bus: Bus, progress: Progress, limits: HangLimits, hung: Callable[[str], object]
    ) -> None:
        super().__init__(bus.background)
        self._lane = bus.lane
        self._progress = progress
        self._hung = hung
        self._steps = StepWatch(limits, TICK)
        self.reason = ""

    def __repr__(self) -> str:
        return f"<HangWatch [{self.reason or 'it goes on'}]>"

    @property
    def silence(self) -> float:
        """Seconds since its last step for which it has had work."""
        return self._steps.silence

    @property
    def limit(self) -> float:
        """Seconds of its longest legal step now."""
        return self._steps.limit

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        work = await self._lane.run(self._begin())
        try:
            yield
        finally:
            self._lane.call(work.cancel)

    async def _begin(self) -> Work:
        return self._lane.background.start(self._look, name="watch over an engine")

    async def _look(self) -> None:
        while not self.reason:
            await anyio.sleep(TICK)
            self.reason = self._steps.look(monotonic(), self._progress())
        self._hung(self.reason)
