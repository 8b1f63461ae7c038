"""Leaving a call, in every way and at every moment: the far side stops, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from contextlib import suppress

import pytest
from tests.conditions import PATIENCE, Stopwatch, eventually

from dynbus import Cancelled, DeadlineExceeded, Runtime, call_options
from dynbus.bus.nats.server_process import RunningServer

from .observation import holds_as_before, leftovers, no_handler_runs, resident
from .processes import Processes
from .stage import Link, Stage
from .workload import ACTORS, Census, Count, Source, Top, Wait

pytestmark = pytest.mark.anyio


async def test_leaving_a_loop_early_stops_the_handler_and_its_sub_calls(stage: Stage) -> None:
    async for item in stage.top.count(Count(items=10**9, pause=0.01)):
        if item.index == 5:
            break
    took = await stage.is_quiet()

    assert took < 1.8


@pytest.mark.parametrize("moment", ["before the first item", "between items", "at the last"])
async def test_cancelling_the_task_that_reads_a_stream_stops_the_handler(
    stage: Stage, moment: str
) -> None:
    seen = asyncio.Event()
    request = {
        "before the first item": Count(items=0, pause=0.0),
        "between items": Count(items=10**9, pause=0.2),
        "at the last": Count(items=3, pause=0.0),
    }[moment]

    async def read() -> None:
        async for item in stage.top.count(request):
            if moment == "at the last" and item.index < 2:
                continue
            seen.set()
            if moment == "at the last":
                await asyncio.sleep(60)

    reading = asyncio.create_task(read())
    if moment != "before the first item":
        await asyncio.wait_for(seen.wait(), PATIENCE)
    else:
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await stage.is_quiet()


@pytest.mark.nightly(
    "tests/actors/test_stream.py::test_closing_a_stream_ends_the_far_side_and_gives_no_more"
)
async def test_closing_a_stream_stops_the_handler_and_ends_the_iteration(stage: Stage) -> None:
    stream = stage.source.count(Count(items=10**9, pause=0.01))
    await anext(stream)

    await stream.aclose()

    assert [item async for item in stream] == []
    await stage.is_quiet()


@pytest.mark.nightly(
    "tests/actors/test_stream.py::test_a_stream_that_nobody_holds_any_more_ends_the_far_side"
)
async def test_a_stream_that_is_dropped_without_closing_is_cancelled(stage: Stage) -> None:
    stream = stage.source.count(Count(items=10**9, pause=0.01))
    await anext(stream)

    del stream

    await stage.is_quiet()


async def test_cancelling_a_unary_call_cancels_the_handler_two_hops_away(stage: Stage) -> None:
    call = asyncio.create_task(stage.top.work(Wait(seconds=60.0, tag="far")))
    await stage.has_begun("far")

    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    took = await stage.is_quiet(3.0)
    journal = await stage.source.journal()

    assert journal.cancelled == ["far"]
    assert took < 2.0


async def test_stop_generating_in_a_parent_stops_its_sub_calls_tidily(stage: Stage) -> None:
    seen = await stage.relay.stop_child(Count(items=10**9, pause=0.01, tag="child"))
    await stage.is_quiet()
    journal = await stage.source.journal()

    assert 1 <= seen < 50
    assert journal.stopped == ["child"]
    assert journal.finished == ["child"]


@pytest.mark.nightly(
    "tests/bus/serving/test_execution_ends.py::test_a_stop_asks_first_and_kills_after_the_time_that_was_given"
)
async def test_a_handler_has_a_second_to_finish_tidily_when_its_caller_leaves(stage: Stage) -> None:
    # Most of that second is for the machine to be busy in.
    call = asyncio.create_task(stage.source.tidy(Wait(seconds=0.3, tag="tidy")))
    await stage.has_begun("tidy")

    call.cancel()
    await asyncio.wait([call])
    await stage.is_quiet()
    journal = await stage.source.journal()

    assert journal.finished == ["tidy"]


@pytest.mark.nightly(
    "tests/bus/serving/test_execution_ends.py::test_a_stop_asks_first_and_kills_after_the_time_that_was_given"
)
async def test_a_handler_that_is_not_done_in_that_second_is_cancelled(stage: Stage) -> None:
    call = asyncio.create_task(stage.source.tidy(Wait(seconds=60.0, tag="slow")))
    await stage.has_begun("slow")

    begun = time.monotonic()
    call.cancel()
    await asyncio.wait([call])
    await stage.is_quiet(3.0)
    took = time.monotonic() - begun
    journal = await stage.source.journal()

    assert journal.cancelled == ["slow"]
    assert took > 0.8


async def test_a_handler_that_ignores_its_cancellation_does_not_hold_its_caller(
    stage: Stage,
) -> None:
    watch = Stopwatch()
    with pytest.raises(DeadlineExceeded), call_options(timeout=0.3):
        await stage.source.stubborn(Wait(seconds=3.0, tag="stubborn"))
    took = watch.seconds()
    await stage.is_quiet(6.0)
    journal = await stage.source.journal()

    assert took < 2.0
    assert journal.finished == ["stubborn"]


async def test_a_deadline_ends_the_call_at_the_caller_and_at_every_hop(stage: Stage) -> None:
    begun, watch = time.monotonic(), Stopwatch()
    with pytest.raises(DeadlineExceeded) as raised, call_options(timeout=0.5):
        await stage.top.work(Wait(seconds=60.0, tag="late"))
    took, unhindered = time.monotonic() - begun, watch.seconds()
    await stage.is_quiet(1.0)

    assert took > 0.45
    assert unhindered < 5.0
    assert "scenario.Top.work@" in raised.value.hop


async def test_a_deadline_names_the_hop_whose_time_was_over(stage: Stage) -> None:
    with pytest.raises(DeadlineExceeded) as raised, call_options(timeout=10.0):
        await stage.relay.short(Wait(seconds=60.0, tag="short"))
    await stage.is_quiet(1.0)

    assert "scenario.Source.work@" in raised.value.hop


async def test_a_call_whose_time_is_over_is_not_sent(stage: Stage) -> None:
    with call_options(timeout=0.01):
        stream = stage.source.count(Count(items=3, tag="never"))
    await asyncio.sleep(0.05)

    with pytest.raises(DeadlineExceeded) as raised:
        await anext(stream)
    journal = await stage.source.journal()

    assert not raised.value.started
    assert "never" not in journal.begun


async def test_a_call_that_is_cancelled_before_its_request_arrives_never_begins(link: Link) -> None:
    # The worker's loop is blocked: requests wait in front of it, cancels on the lane.
    blocking = asyncio.create_task(link.source.block(Wait(seconds=2.0)))
    await link.worker.says("blocking")
    calls = [
        asyncio.create_task(link.source.work(Wait(seconds=60.0, tag=f"early {n}")))
        for n in range(20)
    ]
    await asyncio.sleep(0.1)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)

    await blocking
    await asyncio.sleep(0.2)
    journal = await link.source.journal()

    assert journal.begun == []


async def test_a_stream_that_the_far_side_cancels_ends_in_an_error_and_not_in_silence(
    stage: Stage,
) -> None:
    stream = stage.source.count(Count(items=10**9, pause=0.01))
    await anext(stream)

    for call in stage.server.ledger.calls():
        stage.server.execution.abort(call, Cancelled("the operator cancelled it"))

    with pytest.raises(Cancelled):
        async for _ in stream:
            pass
    await stage.is_quiet()


async def leave(source: Source, top: Top, number: int) -> None:
    """Make a call and leave it: each number in another way, at another moment, at another depth."""
    at = top if number % 2 else source
    moment = number % 97 / 1000
    count = Count(items=10**9, pause=0.002)
    way = number // 2 % 5
    if way == 0:
        async for item in at.count(count):
            if item.index == number % 7:
                break
    elif way in (1, 2):
        call = read(at, count) if way == 1 else at.work(Wait(seconds=60.0))
        task: asyncio.Task[object] = asyncio.create_task(call)
        await asyncio.sleep(moment)
        task.cancel()
        await asyncio.wait([task])
    else:
        with suppress(DeadlineExceeded), call_options(timeout=0.001 + moment):
            await (read(at, count) if way == 3 else at.work(Wait(seconds=60.0)))


async def read(at: Source | Top, count: Count) -> None:
    async for _ in at.count(count):
        pass


async def test_calls_left_in_any_way_at_any_moment_leave_nothing_behind(stage: Stage) -> None:
    for first in range(0, 500, 50):
        numbers = range(first, first + 50)
        await asyncio.gather(*(leave(stage.source, stage.top, number) for number in numbers))

    await stage.is_quiet(3.0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_20_000_calls_left_in_any_way_leave_nothing_on_either_side(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, *ACTORS)
    async with Runtime.connect(own_server.url) as runtime:
        source, top = runtime.client(Source), runtime.client(Top)
        with call_options(wait=60.0):
            await source.where()
            await top.work(Wait())
        start = await source.census()
        # The first tenth fills the caches, and what is remembered of ended calls.
        await leave_many(source, top, 2000)
        await eventually(holds_as_before(start, source))
        before = Holdings(await source.census(), worker.pid)

        begun = time.monotonic()
        await leave_many(source, top, 20_000)
        took = time.monotonic() - begun
        await eventually(no_handler_runs(source))
        await eventually(holds_as_before(start, source))
        await eventually(lambda: not leftovers(runtime))
        after = Holdings(await source.census(), worker.pid)
        print(f"20,000 calls left in {took:.0f} s; before: {before}; after: {after}")

    assert after.tasks == before.tasks
    # An instance knows some requests that were given up before they arrived, 8192 at most.
    assert after.worker_blocks - before.worker_blocks < 10_000
    assert after.blocks - before.blocks < 2000
    assert after.worker_resident - before.worker_resident < 8
    assert after.resident - before.resident < 8


class Holdings:
    """What a worker and this process, which calls it, hold; resident memory in MiB."""

    def __init__(self, worker: Census, worker_id: int) -> None:
        gc.collect()
        self.tasks = len(asyncio.all_tasks())
        self.blocks = sys.getallocatedblocks()
        self.resident = resident(os.getpid())
        self.worker_blocks = worker.blocks
        self.worker_resident = resident(worker_id)

    def __str__(self) -> str:
        return (
            f"worker {self.worker_resident} MiB in {self.worker_blocks} blocks, "
            f"caller {self.resident} MiB in {self.blocks} blocks"
        )


async def leave_many(source: Source, top: Top, count: int) -> None:
    for first in range(0, count, 50):
        await asyncio.gather(*(leave(source, top, first + number) for number in range(50)))
