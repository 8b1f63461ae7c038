"""Deadlines fire once, soon after their time, and never when they were disarmed."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.clock import monotonic
from dynbus.bus.deadlines import NEAR, SLACK, Deadlines
from dynbus.testing import run

FAR = 10 * NEAR
LATEST = 2 * SLACK + 1e-6
"""A far deadline waits for the end of its bucket and then for the next tick."""


def fire(expire: Callable[[], object]) -> None:
    expire()


seconds = st.floats(-1.0, 100.0)


def fired_at(waits: list[float]) -> list[list[float]]:
    """The times, from the start, at which deadlines after `waits` seconds fire."""

    async def story() -> list[list[float]]:
        deadlines = Deadlines(asyncio.get_running_loop(), fire)
        begun = monotonic()
        times: list[list[float]] = [[] for _ in waits]

        def expiry(fired: list[float]) -> Callable[[], None]:
            return lambda: fired.append(monotonic() - begun)

        for wait, fired in zip(waits, times, strict=True):
            deadlines.arm(begun + wait, begun, expiry(fired))
        await asyncio.sleep(200.0)
        assert len(deadlines) == 0
        return times

    return run(story())


@given(st.lists(seconds, max_size=20))
def test_every_deadline_fires_once_and_never_early(waits: list[float]) -> None:
    for wait, fired in zip(waits, fired_at(waits), strict=True):
        assert len(fired) == 1
        assert fired[0] >= wait - 1e-6


@given(st.lists(seconds, max_size=20))
def test_a_near_deadline_is_exact_and_a_far_one_a_little_late(waits: list[float]) -> None:
    for wait, fired in zip(waits, fired_at(waits), strict=True):
        late = fired[0] - max(0.0, wait)
        assert late <= (1e-6 if wait < NEAR else LATEST)


@pytest.mark.parametrize("wait", [1.0, FAR])
def test_a_disarmed_deadline_does_not_fire(wait: float) -> None:
    async def story() -> tuple[list[str], int]:
        deadlines = Deadlines(asyncio.get_running_loop(), fire)
        fired: list[str] = []
        now = monotonic()

        def first() -> None:
            fired.append("first")

        def second() -> None:
            fired.append("second")

        number = deadlines.arm(now + wait, now, first)
        deadlines.arm(now + wait, now, second)
        deadlines.disarm(number, first)
        left = len(deadlines)
        await asyncio.sleep(2 * wait)
        return fired, left

    assert run(story()) == (["second"], 1)


@pytest.mark.parametrize("wait", [1.0, FAR])
def test_disarming_a_deadline_that_has_fired_is_no_error(wait: float) -> None:
    async def story() -> int:
        deadlines = Deadlines(asyncio.get_running_loop(), fire)
        fired = asyncio.Event()
        now = monotonic()
        number = deadlines.arm(now + wait, now, fired.set)
        await fired.wait()

        deadlines.disarm(number, fired.set)

        return len(deadlines)

    assert run(story()) == 0


def test_a_deadline_may_arm_the_next_one() -> None:
    async def story() -> float:
        deadlines = Deadlines(asyncio.get_running_loop(), fire)
        done = asyncio.Event()
        begun = monotonic()

        def again() -> None:
            now = monotonic()
            deadlines.arm(now + FAR, now, done.set)

        deadlines.arm(begun + FAR, begun, again)
        await done.wait()
        return monotonic() - begun

    assert 2 * FAR <= run(story()) <= 2 * FAR + 2 * LATEST


def test_cleared_deadlines_do_not_fire_and_leave_no_timer() -> None:
    async def story() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        deadlines = Deadlines(loop, fire)
        fired: list[None] = []
        now = monotonic()
        deadlines.arm(now + 1.0, now, lambda: fired.append(None))
        deadlines.arm(now + FAR, now, lambda: fired.append(None))

        deadlines.clear()

        left = len(deadlines)
        await asyncio.sleep(2 * FAR)
        return left, len(fired)

    assert run(story()) == (0, 0)


def test_deadlines_that_were_disarmed_keep_no_memory() -> None:
    async def story() -> int:
        deadlines = Deadlines(asyncio.get_running_loop(), fire)
        now = monotonic()

        def expire() -> None:
            raise AssertionError("it was disarmed")

        tracemalloc.start()
        try:
            for call in range(5_000):
                deadlines.disarm(deadlines.arm(now + FAR + call, now, expire), expire)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert run(story()) < 20_000
