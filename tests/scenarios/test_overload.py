"""More calls than an instance takes: order in a mailbox, typed refusals, deadlines in the queue."""

from __future__ import annotations

import asyncio
import time

import pytest

from dynbus import DeadlineExceeded, Overloaded, call_options

from .stage import Stage
from .workload import Done, Wait

pytestmark = pytest.mark.anyio


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


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(stage: Stage) -> None:
    await stage.source.mailbox(Wait(seconds=0.1))
    admitted = [asyncio.create_task(stage.source.mailbox(Wait(seconds=0.2))) for _ in range(9)]
    await stage.has_load(9)

    begun = time.monotonic()
    with pytest.raises(Overloaded) as raised:
        await stage.source.mailbox(Wait(tag="too many"))
    took = time.monotonic() - begun
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
    running = asyncio.create_task(stage.source.mailbox(Wait(seconds=1.0, tag="running")))
    await stage.has_begun("running")

    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded), call_options(timeout=0.2):
        await stage.source.mailbox(Wait(tag="late"))
    took = time.monotonic() - begun
    await running

    journal = await stage.source.journal()
    assert took < 0.4
    assert journal.begun == ["running"]
    await stage.is_quiet()


async def test_a_call_that_is_retried_gets_through_once_the_queue_has_room(stage: Stage) -> None:
    admitted = [asyncio.create_task(stage.source.mailbox(Wait(seconds=0.1))) for _ in range(9)]
    await stage.has_load(9)

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
    assert outcomes.count("done") == len(journal.finished)
    assert outcomes.count("done") >= 35
    assert len(journal.begun) <= outcomes.count("done") + 2
    await stage.is_quiet()
