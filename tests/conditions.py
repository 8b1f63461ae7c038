"""Conditions of tests: waited for with a bound, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

POLL = 0.02
LOOP_REPORTS = ("exception was never retrieved", "was destroyed but it is pending")


async def eventually(
    condition: Callable[[], Any | Awaitable[Any]], within: float = 5.0, *, what: str = ""
) -> float:
    """Wait until `condition()` is true; returns the seconds that it took.

    Raises:
        AssertionError: it still is not after `within` seconds.
    """
    begun = time.monotonic()
    while True:
        value: Any = condition()
        if inspect.isawaitable(value):
            value = await value
        passed = time.monotonic() - begun
        if value:
            return passed
        assert passed < within, f"not within {within} s: {what or condition}"
        await asyncio.sleep(POLL)


def no_loop_reports(output: str) -> bool:
    """Whether the event loops of a process had nothing to say: no lost exception, no lost task."""
    return not any(report in output for report in LOOP_REPORTS)
