"""Signals that end a run from outside."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Self

from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import terminal

logger = logging.getLogger(__name__)

_DRAINING: Final = "draining: taking no more calls; press Ctrl-C again to stop at once"


class Interrupts:
    """Handles SIGINT and SIGTERM: the first calls `drain`, the second `stop`, both on the loop.

    After the second the process ends within `within` seconds, even when its loop is blocked.

    Args:
        stop: does what `drain` does too.
    """

    def __init__(
        self,
        drain: Callable[[], None],
        stop: Callable[[], None],
        *,
        within: float,
    ) -> None:
        self._within = within
        self._drain = drain
        self._stop = stop
        self._steps = deque([self._begin_drain, self._stop])
        self._loop = asyncio.get_running_loop()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if not self._steps:
            return
        step = self._steps.popleft()
        if not self._steps:
            watchdog = threading.Timer(self._within, os._exit, (exit_codes.INTERRUPTED,))
            watchdog.daemon = True
            watchdog.start()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
            self._loop.call_soon_threadsafe(step)

    def _begin_drain(self) -> None:
        self._drain()
        # How many calls run, and how long they have, is for the instances to say.
        if sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO):
            # A user who wants no more than warnings waits in front of the terminal all the same.
            terminal.notice(f"dynbus: {_DRAINING}")
        logger.info(_DRAINING)
