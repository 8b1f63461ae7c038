"""The control lane runs beside the main loop, hands results and errors over, and ends."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from dynbus.bus.errors import Unavailable
from dynbus.bus.lane import InlineLane, ThreadLane, new_event_loop
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.transport import Connection, ConnectionState
from dynbus.testing import run

pytestmark = pytest.mark.anyio

NAME = "test-control"


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


async def connect() -> Connection:
    """A connection that lives on the lane's loop."""
    return await MemoryBus().connect()


@asynccontextmanager
async def started() -> AsyncGenerator[ThreadLane, None]:
    lane = ThreadLane(NAME)
    await lane.start(connect)
    try:
        yield lane
    finally:
        await lane.stop()


async def test_work_runs_on_the_lanes_thread_and_its_result_comes_back() -> None:
    async def where() -> tuple[int, asyncio.AbstractEventLoop]:
        return threading.get_ident(), asyncio.get_running_loop()

    async with started() as lane:
        ident, loop = await lane.run(where())
        expected = lane.loop

    assert ident != threading.get_ident()
    assert loop is expected
    assert loop is not asyncio.get_running_loop()


async def test_what_work_raises_is_raised_to_whoever_awaits_it() -> None:
    async def fail() -> None:
        raise KeyError("on the lane")

    async with started() as lane:
        with pytest.raises(KeyError, match="on the lane"):
            await lane.run(fail())


async def test_the_lane_goes_on_while_the_main_loop_is_blocked() -> None:
    called = threading.Event()

    async with started() as lane:
        lane.call(called.set)
        # The main loop does not run until this returns.
        went_on = called.wait(timeout=60)

    assert went_on


async def test_cancelling_a_waiter_cancels_its_work() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with started() as lane:
        waiter = asyncio.create_task(lane.run(hang()))
        await asyncio.to_thread(begun.wait, 10.0)
        waiter.cancel()
        await asyncio.wait({waiter})
        ended = await asyncio.to_thread(cancelled.wait, 10.0)

    assert begun.is_set()
    assert ended


async def test_work_that_fails_when_nobody_waits_for_it_any_longer_is_no_news() -> None:
    begun, failed = threading.Event(), threading.Event()

    async def fail() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            failed.set()
            raise Unavailable("too late")

    # What its loop reported would fail this test.
    async with started() as lane:
        waiter = asyncio.create_task(lane.run(fail()))
        await asyncio.to_thread(begun.wait, 10.0)
        waiter.cancel()
        await asyncio.wait({waiter})
        ended = await asyncio.to_thread(failed.wait, 10.0)

    assert ended
    assert waiter.cancelled()


async def test_work_that_is_pending_when_the_lane_ends_fails_as_unavailable() -> None:
    begun = threading.Event()

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with started() as lane:
        waiter = asyncio.create_task(lane.run(hang()))
        await asyncio.to_thread(begun.wait, 10.0)

    with pytest.raises(Unavailable, match="the control lane is closed"):
        async with asyncio.timeout(60):
            await waiter


async def test_work_that_cancels_itself_while_the_lane_lives_is_seen_as_cancelled() -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    async with started() as lane:
        waiter = asyncio.create_task(lane.run(give_up()))
        await asyncio.wait({waiter}, timeout=60)

    assert waiter.cancelled()


async def test_work_that_comes_after_the_last_turn_of_the_lane_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closing, queued = threading.Event(), threading.Event()
    ran: list[str] = []

    class LastTurn(asyncio.SelectorEventLoop):
        def close(self) -> None:
            closing.set()
            queued.wait(60)
            super().close()

    async def work() -> None:
        ran.append("work")

    monkeypatch.setattr("dynbus.bus.lane.new_event_loop", LastTurn)
    async with started() as lane:
        stopping = asyncio.create_task(lane.stop())
        await asyncio.to_thread(closing.wait, 10.0)

        waiter = asyncio.create_task(lane.run(work()))
        # It has been given to the lane's loop, which runs no more.
        await asyncio.sleep(0)
        queued.set()
        with pytest.raises(Unavailable, match="the control lane is closed"):
            async with asyncio.timeout(60):
                await waiter
        await stopping

    assert ran == []


async def test_a_lane_that_cannot_connect_says_why_and_leaves_no_thread() -> None:
    async def refuse() -> Connection:
        raise Unavailable("no server")

    lane = ThreadLane(NAME)

    with pytest.raises(Unavailable, match="no server"):
        await lane.start(refuse)
    await lane.stop()

    assert lane_threads() == []


async def test_giving_up_a_connect_ends_it_on_the_lane_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def hang() -> Connection:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError("nothing sets the event")

    lane = ThreadLane(NAME)
    starting = asyncio.create_task(lane.start(hang))
    await asyncio.to_thread(begun.wait, 10.0)

    starting.cancel()
    await asyncio.wait({starting})
    async with asyncio.timeout(60):
        await lane.stop()

    assert starting.cancelled()
    assert cancelled.is_set()
    assert lane_threads() == []
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


async def test_a_connection_that_comes_when_nobody_waits_any_longer_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = threading.Event()
    opened: list[Connection] = []

    async def deaf() -> Connection:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            # As nats-py does in the middle of a handshake.
            opened.append(await connect())
        return opened[0]

    lane = ThreadLane(NAME)
    starting = asyncio.create_task(lane.start(deaf))
    await asyncio.to_thread(begun.wait, 10.0)

    starting.cancel()
    await asyncio.wait({starting})
    await lane.stop()

    assert [connection.state for connection in opened] == [ConnectionState.CLOSED]
    assert lane_threads() == []
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


async def test_stopping_closes_the_connection_and_ends_the_thread() -> None:
    async with started() as lane:
        connection = lane.connection
        running = lane_threads()

    assert len(running) == 1
    assert connection.state is ConnectionState.CLOSED
    assert lane_threads() == []


async def test_a_second_stop_changes_nothing() -> None:
    async with started() as lane:
        await lane.stop()

    assert lane_threads() == []


async def test_after_the_end_calls_are_left_out_and_work_is_refused() -> None:
    ran: list[str] = []

    async def work() -> None:
        ran.append("work")

    async with started() as lane:
        pass

    lane.call(ran.append, "call")
    with pytest.raises(Unavailable, match="the control lane is closed"):
        await lane.run(work())

    assert ran == []


def test_an_inline_lane_shares_the_main_loop_and_calls_in_a_later_turn() -> None:
    async def story() -> tuple[list[str], list[str], bool]:
        lane = InlineLane(await connect())
        called: list[str] = []

        lane.call(called.append, "late")
        at_once = list(called)
        await asyncio.sleep(0)

        async def where() -> bool:
            return asyncio.get_running_loop() is lane.loop

        same = await lane.run(where())
        await lane.stop()
        return at_once, called, same and lane.connection.state is ConnectionState.CLOSED

    assert run(story()) == ([], ["late"], True)


def test_a_new_event_loop_can_run() -> None:
    async def answer() -> int:
        return 42

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(answer()) == 42
