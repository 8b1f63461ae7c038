"""Leaving a call, in every way and at every moment: the far side stops, nothing is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from tests.conditions import eventually

from dynbus import Cancelled, DeadlineExceeded, Runtime, call_options
from dynbus.bus.execution import Execution
from dynbus.bus.nats_server import RunningServer

from .observation import leftovers
from .processes import Processes
from .workload import ACTORS, Count, Relay, Source, Top, Wait

pytestmark = pytest.mark.anyio


class Setting:
    """Two runtimes: one serves all actors, the other calls them."""

    def __init__(self, serving: Runtime, calling: Runtime) -> None:
        self.serving = serving
        self.calling = calling
        self.source = calling.client(Source)
        self.relay = calling.client(Relay)
        self.top = calling.client(Top)

    async def begun(self, tag: str) -> None:
        async def condition() -> bool:
            return tag in (await self.source.journal()).begun

        await eventually(condition)

    async def is_quiet(self, within: float = 2.0) -> float:
        """Wait until no handler runs and nothing is left of any call; returns the seconds."""

        async def quiet() -> bool:
            return (await self.source.journal()).running == 0

        took = await eventually(quiet, within, what="no handler runs")
        await eventually(
            lambda: not leftovers(self.serving) and not leftovers(self.calling),
            within,
            what=f"{leftovers(self.serving)}, {leftovers(self.calling)}",
        )
        assert handler_tasks() == []
        return took


def handler_tasks() -> list[str]:
    """The handlers that run as tasks of this loop."""
    coroutines = [str(task.get_coro()) for task in asyncio.all_tasks()]
    return [coroutine for coroutine in coroutines if f"{Execution.__name__}._" in coroutine]


@asynccontextmanager
async def setting(server: RunningServer) -> AsyncGenerator[Setting]:
    async with (
        Runtime.connect(server.url, drain_grace=0.1) as serving,
        Runtime.connect(server.url) as calling,
    ):
        for actor in ACTORS.values():
            await serving.start(actor)
        for component in ACTORS:
            await (
                await calling.namespace("scenario").component(component).endpoint("count").client()
            ).wait_for_instances(timeout=5.0)
        yield Setting(serving, calling)


async def test_leaving_a_loop_early_stops_the_handler_and_its_sub_calls(
    own_server: RunningServer,
) -> None:
    async with setting(own_server) as at:
        async for item in at.top.count(Count(items=10**9, pause=0.01)):
            if item.index == 5:
                break
        took = await at.is_quiet()

    assert took < 1.8


@pytest.mark.parametrize("moment", ["before the first item", "between items", "at the last"])
async def test_cancelling_the_task_that_reads_a_stream_stops_the_handler(
    own_server: RunningServer, moment: str
) -> None:
    async with setting(own_server) as at:
        seen = asyncio.Event()
        request = {
            "before the first item": Count(items=0, pause=0.0),
            "between items": Count(items=10**9, pause=0.2),
            "at the last": Count(items=3, pause=0.0),
        }[moment]

        async def read() -> None:
            async for item in at.top.count(request):
                if moment == "at the last" and item.index < 2:
                    continue
                seen.set()
                if moment == "at the last":
                    await asyncio.sleep(60)

        reading = asyncio.create_task(read())
        if moment != "before the first item":
            await asyncio.wait_for(seen.wait(), 5.0)
        else:
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await at.is_quiet()


async def test_closing_a_stream_stops_the_handler_and_ends_the_iteration(
    own_server: RunningServer,
) -> None:
    async with setting(own_server) as at:
        stream = at.source.count(Count(items=10**9, pause=0.01))
        await anext(stream)

        await stream.aclose()

        assert [item async for item in stream] == []
        await at.is_quiet()


async def test_a_stream_that_is_dropped_without_closing_is_cancelled(
    own_server: RunningServer,
) -> None:
    async with setting(own_server) as at:
        stream = at.source.count(Count(items=10**9, pause=0.01))
        await anext(stream)

        del stream

        await at.is_quiet()


async def test_cancelling_a_unary_call_cancels_the_handler_two_hops_away(
    own_server: RunningServer,
) -> None:
    async with setting(own_server) as at:
        call = asyncio.create_task(at.top.work(Wait(seconds=60.0, tag="far")))
        await at.begun("far")

        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        took = await at.is_quiet(3.0)
        journal = await at.source.journal()

    assert journal.cancelled == ["far"]
    assert took < 2.0


async def test_stop_generating_in_a_parent_stops_its_sub_calls_tidily(
    own_server: RunningServer,
) -> None:
    async with setting(own_server) as at:
        seen = await at.relay.stop_child(Count(items=10**9, pause=0.01, tag="child"))
        await at.is_quiet()
        journal = await at.source.journal()

    assert 1 <= seen < 50
    assert journal.stopped == ["child"]
    assert journal.finished == ["child"]


async def test_a_handler_has_a_second_to_finish_tidily_when_its_caller_leaves(
    own_server: RunningServer,
) -> None:
    async with setting(own_server) as at:
        call = asyncio.create_task(at.source.tidy(Wait(seconds=0.7, tag="tidy")))
        await at.begun("tidy")

        call.cancel()
        await asyncio.wait([call])
        await at.is_quiet()
        journal = await at.source.journal()

    assert journal.finished == ["tidy"]


async def test_a_handler_that_is_not_done_in_that_second_is_cancelled(
    own_server: RunningServer,
) -> None:
    async with setting(own_server) as at:
        call = asyncio.create_task(at.source.tidy(Wait(seconds=60.0, tag="slow")))
        await at.begun("slow")

        call.cancel()
        await asyncio.wait([call])
        took = await at.is_quiet(3.0)
        journal = await at.source.journal()

    assert journal.cancelled == ["slow"]
    assert 0.8 < took < 2.0


async def test_a_handler_that_ignores_its_cancellation_does_not_hold_its_caller(
    own_server: RunningServer,
) -> None:
    async with setting(own_server) as at:
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded), call_options(timeout=0.3):
            await at.source.stubborn(Wait(seconds=1.5, tag="stubborn"))
        took = time.monotonic() - begun
        await at.is_quiet(4.0)
        journal = await at.source.journal()

    assert took < 0.6
    assert journal.finished == ["stubborn"]


async def test_a_deadline_ends_the_call_at_the_caller_and_at_every_hop(
    own_server: RunningServer,
) -> None:
    async with setting(own_server) as at:
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded) as raised, call_options(timeout=0.5):
            await at.top.work(Wait(seconds=60.0, tag="late"))
        took = time.monotonic() - begun
        await at.is_quiet(1.0)

    assert 0.45 < took < 0.8
    assert "scenario.Top.work@" in raised.value.hop


async def test_a_deadline_names_the_hop_whose_time_was_over(own_server: RunningServer) -> None:
    async with setting(own_server) as at:
        with pytest.raises(DeadlineExceeded) as raised, call_options(timeout=10.0):
            await at.relay.short(Wait(seconds=60.0, tag="short"))
        await at.is_quiet(1.0)

    assert "scenario.Source.work@" in raised.value.hop


async def test_a_call_whose_time_is_over_is_not_sent(own_server: RunningServer) -> None:
    async with setting(own_server) as at:
        with call_options(timeout=0.01):
            stream = at.source.count(Count(items=3, tag="never"))
        await asyncio.sleep(0.05)

        with pytest.raises(DeadlineExceeded) as raised:
            await anext(stream)
        journal = await at.source.journal()

    assert not raised.value.started
    assert "never" not in journal.begun


async def test_a_call_that_is_cancelled_before_its_request_arrives_never_begins(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=5.0):
            await source.where()
        # The worker's loop is blocked: requests wait in front of it, cancels on the lane.
        blocking = asyncio.create_task(source.block(Wait(seconds=1.0)))
        await asyncio.sleep(0.2)
        calls = [
            asyncio.create_task(source.work(Wait(seconds=60.0, tag=f"early {n}")))
            for n in range(20)
        ]
        await asyncio.sleep(0.1)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)

        await blocking
        await asyncio.sleep(0.2)
        journal = await source.journal()

    assert journal.begun == []


async def test_a_stream_that_the_far_side_cancels_ends_in_an_error_and_not_in_silence(
    own_server: RunningServer,
) -> None:
    async with setting(own_server) as at:
        stream = at.source.count(Count(items=10**9, pause=0.01))
        await anext(stream)
        server = next(
            i.server for i in at.serving.instances.values() if i.server.component == "Source"
        )

        server.end_all(Cancelled("the operator cancelled it"))

        with pytest.raises(Cancelled):
            async for _ in stream:
                pass
        await at.is_quiet()


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.soak)])
async def test_calls_cancelled_at_any_moment_leave_nothing_behind(
    own_server: RunningServer, count: int
) -> None:
    async with setting(own_server) as at:

        async def leave_after(seconds: float) -> None:
            try:
                async with asyncio.timeout(seconds):
                    async for _ in at.top.count(Count(items=50, pause=0.001)):
                        pass
            except TimeoutError:
                return

        for batch in range(0, count, 50):
            await asyncio.gather(*(leave_after((batch + n) % 97 / 1000) for n in range(50)))

        await at.is_quiet(3.0)
