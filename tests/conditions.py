"""Conditions of tests: waited for with a bound, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

POLL = 0.02
LOOP_REPORTS = ("exception was never retrieved", "was destroyed but it is pending")
PATIENCE = 60.0
"""Seconds on the clock that a test waits for what must come, however busy the machine is."""


async def eventually(
    condition: Callable[[], Any | Awaitable[Any]],
    within: float = PATIENCE,
    *,
    what: Callable[[], str] | str = "",
) -> float:
    """Wait until `condition()` is true; returns the seconds that it took, by a `Stopwatch`.

    Args:
        within: seconds by that stopwatch, for what is promised to come soon.

    Raises:
        AssertionError: it still is not after `within` seconds.
    """
    watch = Stopwatch()
    while True:
        value: Any = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return watch.seconds()
        watch.check(within, what or str(condition))
        await asyncio.sleep(POLL)


def wait_until(
    condition: Callable[[], Any], within: float = PATIENCE, *, what: Callable[[], str] | str = ""
) -> float:
    """`eventually` for a test without an event loop; `what` is asked when it was in vain."""
    watch = Stopwatch()
    while not condition():
        watch.check(within, what or str(condition))
        time.sleep(POLL)
    return watch.seconds()


class Stopwatch:
    """How long something takes on a machine that has time for it.

    Time in which somebody waited for a processor or a disk is not counted: a test that says how
    soon something happens must not fail because other programs run. Where the system does not tell
    how long that was, a quarter of the time is counted.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._stalled = stalled_seconds()

    def seconds(self) -> float:
        """Seconds since it was made, those left out in which the machine was busy."""
        elapsed = time.monotonic() - self._begun
        stalled = stalled_seconds()
        if stalled is None or self._stalled is None:
            return elapsed / 4
        return max(0.0, elapsed - (stalled - self._stalled))

    def check(self, within: float, what: str | Callable[[], str]) -> None:
        """Go on as long as `within` is not over.

        Raises:
            AssertionError: so many seconds have passed, or the clock went beyond all patience.
        """
        if self.seconds() < within and time.monotonic() - self._begun < max(within, PATIENCE):
            return
        raise AssertionError(
            f"not within {within:g} s: {what if isinstance(what, str) else what()}"
        )


def stalled_seconds() -> float | None:
    """Seconds since the system started in which some task waited for a processor or a disk.

    None where the system does not count them.
    """
    try:
        pressures = [Path(f"/proc/pressure/{of}").read_text() for of in ("cpu", "io")]
    except OSError:
        return None
    # some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS
    return sum(int(each.split()[4].removeprefix("total=")) for each in pressures) / 1e6


def no_loop_reports(output: str) -> bool:
    """Whether the event loops of a process had nothing to say: no lost exception, no lost task."""
    return not any(report in output for report in LOOP_REPORTS)
