"""A call that is admitted is settled exactly once, whoever ends it and however it streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from tests.bus.near_side import endpoint, until

from dynbus.bus.clock import monotonic
from dynbus.bus.context import context
from dynbus.bus.errors import (
    Cancelled,
    DeadlineExceeded,
    DynbusError,
    ReaderStalled,
)
from dynbus.bus.serving.execution import STOP_TIMEOUT, TURN_ITEMS

from .bench import Bench, assert_settled, story, wait_for_ever

# Ends from outside ------------------------------------------------------------------------


def test_a_deadline_that_passes_in_the_queue_ends_a_call_that_never_starts() -> None:
    async def tell(bench: Bench) -> None:
        running, waiting = bench.call(), bench.call(seconds=2.0)

        await asyncio.sleep(2.1)

        assert isinstance(waiting.error, DeadlineExceeded)
        assert (waiting.error.started, waiting.call.entered) == (False, False)
        assert running.error is None
        assert bench.execution.load == 1
        bench.execution.kill(running.call)
        await bench.execution.idle()
        assert_settled(bench, running, waiting)

    story(endpoint(wait_for_ever, concurrency=1), tell)


def test_a_deadline_that_passes_while_the_handler_runs_cancels_it() -> None:
    async def tell(bench: Bench) -> None:
        begun = monotonic()
        call = bench.call(seconds=2.0)

        await bench.execution.idle()

        assert monotonic() - begun == pytest.approx(2.0, abs=0.1)
        assert isinstance(call.error, DeadlineExceeded)
        assert call.error.started
        assert call.call.context.is_killed()
        assert_settled(bench, call)

    story(endpoint(wait_for_ever), tell)


def test_a_call_that_is_killed_before_its_first_step_never_enters_its_handler() -> None:
    entered: list[bytes] = []

    async def handler(data: bytes) -> bytes:
        entered.append(data)
        return data

    async def tell(bench: Bench) -> None:
        killed, waiting = bench.call(b"1"), bench.call(b"2")

        bench.execution.abort(killed.call, Cancelled("given up"))
        await bench.execution.idle()

        assert entered == [b"2"]
        assert_settled(bench, killed, waiting)

    story(endpoint(handler, concurrency=1), tell)


@pytest.mark.parametrize(("tidy", "error"), [(True, None), (False, Cancelled)])
def test_a_stop_asks_first_and_kills_after_the_time_that_was_given(
    tidy: bool, error: type[DynbusError] | None
) -> None:
    async def handler(_: bytes) -> bytes:
        await context().stopped()
        await asyncio.sleep(0.5 if tidy else 2.0)
        return b"tidy"

    async def tell(bench: Bench) -> None:
        call = bench.call()
        await until(lambda: call.call.entered)

        bench.execution.cancel(call.call, 1.0)
        await bench.execution.idle()

        assert (type(call.error) if call.error else None) is error
        assert call.sent == ([b"tidy"] if tidy else [])
        assert call.call.context.is_stopped()
        assert_settled(bench, call)

    story(endpoint(handler), tell)


def test_a_stop_without_a_time_never_kills() -> None:
    async def handler(_: bytes) -> bytes:
        await context().stopped()
        await asyncio.sleep(1000.0)
        return b"late"

    async def tell(bench: Bench) -> None:
        call = bench.call()
        await until(lambda: call.call.entered)

        bench.execution.cancel(call.call, -1.0)
        await bench.execution.idle()

        assert call.sent == [b"late"]

    story(endpoint(handler), tell)


def test_stopping_waits_for_handlers_that_clean_up_and_leaves_those_that_never_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cleaned: list[bool] = []
    let_go = asyncio.Event()

    async def handler(data: bytes) -> bytes:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await (asyncio.sleep(1.0) if data == b"tidy" else let_go.wait())
            cleaned.append(True)
        return b""

    async def tell(bench: Bench) -> None:
        calls = [bench.call(b"tidy"), bench.call(b"stubborn")]
        await until(lambda: all(call.call.entered for call in calls))
        for call in calls:
            bench.execution.kill(call.call)

        begun = monotonic()
        await bench.execution.stop()

        assert monotonic() - begun == pytest.approx(STOP_TIMEOUT, abs=0.1)
        assert cleaned == [True]
        let_go.set()
        await bench.execution.idle()

    story(endpoint(handler), tell)

    assert caplog.text.count("a handler ignores its cancellation") == 1


# Streams ----------------------------------------------------------------------------------


def test_a_stream_that_never_waits_leaves_turns_to_others() -> None:
    async def handler(data: bytes) -> AsyncGenerator[bytes, None]:
        for _ in range(10 * TURN_ITEMS):
            yield b"x"

    async def tell(bench: Bench) -> None:
        first, second = bench.call(), bench.call()

        await until(lambda: len(second.sent) > 1)

        assert len(first.sent) <= 2 * TURN_ITEMS
        await bench.execution.idle()
        assert len(first.sent) == len(second.sent) == 10 * TURN_ITEMS

    story(endpoint(handler, streaming=True), tell)


def test_a_stream_whose_reader_grants_nothing_waits_and_then_goes_on() -> None:
    produced: list[int] = []

    async def handler(_: bytes) -> AsyncGenerator[bytes, None]:
        for number in range(3):
            produced.append(number)
            yield b"x"

    async def tell(bench: Bench) -> None:
        call = bench.call()
        call.reply.is_blocked = True
        await asyncio.sleep(1.0)
        assert produced == [0]

        call.reply.is_blocked = False
        call.reply.go_on()
        await bench.execution.idle()

        assert produced == [0, 1, 2]
        assert_settled(bench, call)

    story(endpoint(handler, streaming=True), tell)


def test_a_stream_without_a_new_item_is_ended_after_its_idle_time() -> None:
    async def handler(_: bytes) -> AsyncGenerator[bytes, None]:
        yield b"x"
        await asyncio.sleep(5.0)
        yield b"y"
        await asyncio.Event().wait()

    async def tell(bench: Bench) -> None:
        call = bench.call()
        ended_after = 0
        while call.error is None:
            await asyncio.sleep(1.0)
            ended_after += 1
            bench.execution.end_if_stuck(call.call, monotonic())
        await bench.execution.idle()

        assert ended_after > 11
        assert call.sent == [b"x", b"y"]
        assert isinstance(call.error, DeadlineExceeded)
        assert call.error.message == "the handler yielded nothing for 6.0 s"
        assert_settled(bench, call)

    story(endpoint(handler, streaming=True, idle_timeout=6.0), tell)


def test_a_stream_whose_reader_stalls_is_ended_for_that_and_not_for_being_idle() -> None:
    async def handler(_: bytes) -> AsyncGenerator[bytes, None]:
        while True:
            yield b"x"

    async def tell(bench: Bench) -> None:
        call = bench.call()
        call.reply.is_blocked = True
        await asyncio.sleep(9.0)
        bench.execution.end_if_stuck(call.call, monotonic())
        assert call.error is None
        await asyncio.sleep(2.0)
        bench.execution.end_if_stuck(call.call, monotonic())

        await bench.execution.idle()

        assert isinstance(call.error, ReaderStalled)
        assert_settled(bench, call)

    story(
        endpoint(handler, streaming=True, idle_timeout=1.0),
        tell,
        reader_stall_timeout=10.0,
    )
