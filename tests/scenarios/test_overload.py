"""More calls than an instance takes: order, refusals, deadlines, turns, and what gets done."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

import pytest
from tests.conditions import Stopwatch
from tests.story import on_a_kit

from dynbus import DeadlineExceeded, Overloaded, Runtime, call_options
from dynbus.bus.clock import monotonic
from dynbus.bus.nats.server_process import RunningServer
from dynbus.testing import TestKit

from .stage import Stage
from .workload import Done, Source, Wait

pytestmark = pytest.mark.anyio

PLACES: Final = 4
SECONDS: Final = 0.1
CAPACITY: Final = PLACES / SECONDS
ALLOWED: Final = 1.0
WHILE: Final = 4.0
HELD: Final = 1.0
"""Seconds for which a call keeps a mailbox full: longer than a processor is waited for."""
DURATIONS: Final[dict[str, Callable[[Random], float]]] = {
    "equal": lambda _: SECONDS,
    "1 to 50": lambda chance: chance.uniform(SECONDS / 25.5, 50 * SECONDS / 25.5),
}


async def test_a_mailbox_runs_one_call_at_a_time_in_order_of_arrival(stage: Stage) -> None:
    calls: list[asyncio.Task[Done]] = []
    for number in range(9):
        call = stage.source.mailbox(Wait(seconds=0.02, tag=str(number)))
        calls.append(asyncio.create_task(call))
        await asyncio.sleep(0)

    await asyncio.gather(*calls)

    journal = await stage.source.journal()
    assert journal.begun == [str(number) for number in range(9)]
    assert journal.finished == journal.begun


async def fill_mailbox(stage: Stage) -> list[asyncio.Task[Done]]:
    """One call that runs, and as many as may wait for it."""
    waits = [Wait(seconds=HELD), *(Wait(seconds=0.02) for _ in range(8))]
    calls = [asyncio.create_task(stage.source.mailbox(wait)) for wait in waits]
    await stage.has_load(len(calls))
    return calls


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(stage: Stage) -> None:
    await stage.source.mailbox(Wait(seconds=HELD))
    admitted = await fill_mailbox(stage)

    watch = Stopwatch()
    with pytest.raises(Overloaded) as raised:
        await stage.source.mailbox(Wait(tag="too many"))
    took = watch.seconds()
    results = await asyncio.gather(*admitted)

    journal = await stage.source.journal()
    assert took < 0.1
    assert raised.value.retryable
    assert not raised.value.started
    assert 0.05 < raised.value.retry_after < 5.0
    assert len(results) == 9
    assert "too many" not in journal.begun


async def test_a_deadline_that_passes_in_the_queue_ends_the_call_without_starting_it(
    stage: Stage,
) -> None:
    running = asyncio.create_task(stage.source.mailbox(Wait(seconds=3.0, tag="running")))
    await stage.has_begun("running")

    watch = Stopwatch()
    with pytest.raises(DeadlineExceeded), call_options(timeout=0.2):
        await stage.source.mailbox(Wait(tag="late"))
    took = watch.seconds()
    await running

    journal = await stage.source.journal()
    assert took < 0.4
    assert journal.begun == ["running"]
    await stage.is_quiet()


async def test_a_call_that_is_retried_gets_through_once_the_queue_has_room(stage: Stage) -> None:
    admitted = await fill_mailbox(stage)

    with call_options(retries=20):
        done = await stage.source.mailbox(Wait(tag="patient"))

    await asyncio.gather(*admitted)
    assert done.attempt > 1


async def test_at_five_times_the_capacity_no_work_starts_after_its_deadline(stage: Stage) -> None:
    outcomes: list[str] = []

    async def call(number: int) -> None:
        try:
            with call_options(timeout=0.5):
                await stage.source.mailbox(Wait(seconds=0.02, tag=str(number)))
            outcomes.append("done")
        except (Overloaded, DeadlineExceeded) as error:
            outcomes.append(error.code)

    calls: list[asyncio.Task[None]] = []
    for number in range(250):
        calls.append(asyncio.create_task(call(number)))
        await asyncio.sleep(0.004)
    await asyncio.gather(*calls)

    journal = await stage.source.journal()
    assert len(outcomes) == 250
    done = outcomes.count("done")
    assert done > 0
    # Where the machine stands still, the deadline of one that runs passes, or on its way back.
    assert done <= len(journal.finished) <= done + 5
    assert len(journal.begun) <= done + 5
    await stage.is_quiet()


@pytest.mark.soak
@pytest.mark.parametrize("durations", DURATIONS)
async def test_what_gets_done_in_time_does_not_fall_when_more_is_asked_of_a_real_server(
    stage: Stage, durations: str
) -> None:
    await ask_for_more_and_more(stage.source, durations)

    await stage.is_quiet()


@pytest.mark.parametrize("durations", DURATIONS)
def test_what_gets_done_in_time_does_not_fall_when_more_is_asked(durations: str) -> None:
    async def story(kit: TestKit) -> None:
        await kit.start(Source)
        await ask_for_more_and_more(kit.client(Source), durations)

    on_a_kit(story)


async def ask_for_more_and_more(source: Source, durations: str) -> None:
    """Load an instance below and beyond its capacity, and compare what gets done in time."""
    chance = Random(7)
    outcomes: Counter[str] = Counter()

    async def call(seconds: float) -> None:
        try:
            with call_options(timeout=ALLOWED):
                await source.few(Wait(seconds=seconds))
            outcomes["done"] += 1
        except (Overloaded, DeadlineExceeded) as error:
            outcomes[error.code] += 1

    async def load(times: float) -> tuple[int, Counter[str]]:
        """Calls come whatever becomes of those before, as callers do that know nothing of them."""
        outcomes.clear()
        calls: list[asyncio.Task[None]] = []
        begun = monotonic()
        while (passed := monotonic() - begun) < WHILE:
            due = int(passed * times * CAPACITY) + 1
            while len(calls) < due:
                calls.append(asyncio.create_task(call(DURATIONS[durations](chance))))
            await asyncio.sleep(0.5 / (times * CAPACITY))
        done = outcomes["done"]
        await asyncio.gather(*calls)
        print(f"{durations}, {times:g} times the capacity: {done / WHILE:.1f}/s, {outcomes}")
        return done, outcomes.copy()

    below, _ = await load(0.9)
    beyond = [await load(times) for times in (1.5, 5.0)]

    journal = await source.journal()
    assert below > 0.7 * 0.9 * CAPACITY * WHILE
    for done, one in beyond:
        assert done >= 0.8 * below
        # Who is refused is told so, and need not wait for its deadline.
        assert one["DeadlineExceeded"] < 0.1 * one.total()
    assert len(journal.cancelled) < 0.1 * len(journal.begun)


@pytest.mark.parametrize("open_calls", [500, 1500])
async def test_beside_a_client_with_many_open_calls_another_s_takes_about_as_long_as_alone(
    own_server: RunningServer, stage: Stage, open_calls: int
) -> None:
    refused = 0

    async def keep_calling(source: Source) -> None:
        nonlocal refused
        while True:
            try:
                # None is refused for its deadline: that tells how slow the machine is.
                with call_options(timeout=600.0):
                    await source.few(Wait(seconds=0.02))
            except Overloaded as error:
                refused += 1
                await asyncio.sleep(max(0.5, error.retry_after))

    async with Runtime.connect(own_server.url) as other, Runtime.connect(own_server.url) as greedy:
        source = other.client(Source)
        with call_options(wait=60.0):
            await source.few(Wait(seconds=0.02))
            await greedy.client(Source).where()
        greedy_calls = [
            asyncio.create_task(keep_calling(greedy.client(Source))) for _ in range(open_calls)
        ]
        try:
            await stage.has_load_of(min(open_calls, 1024))
            took: list[float] = []
            for _ in range(20):
                watch = Stopwatch()
                await source.few(Wait(seconds=0.02))
                took.append(watch.seconds())
        finally:
            for call in greedy_calls:
                call.cancel()
            await asyncio.gather(*greedy_calls, return_exceptions=True)

    took.sort()
    print(f"beside {open_calls} calls: median {took[10]:.3f} s, longest {took[-1]:.3f} s")
    assert took[10] < 0.2
    assert took[-1] < 0.6
    assert (refused > 0) is (open_calls > 1024)
