"""A call that is admitted is settled exactly once, however its handler ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from typing import Any

import pytest
from tests.bus.near_side import ADDRESS, INSTANCE, RecordedCall, bus_in_memory, endpoint, until

from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context, context
from dynbus.bus.endpoint import Endpoint
from dynbus.bus.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    DynbusError,
    HandlerError,
    InvalidRequest,
    InvalidResponse,
    Migrate,
    Overloaded,
    ReaderStalled,
    Unavailable,
)
from dynbus.bus.serving.execution import STOP_TIMEOUT, TURN_ITEMS, Execution
from dynbus.bus.serving.served_endpoint import ServedEndpoint
from dynbus.testing import run


class Bench:
    """One endpoint, executed."""

    def __init__(self, execution: Execution, handler: Endpoint) -> None:
        self.execution = execution
        self.served = ServedEndpoint(ADDRESS, handler, INSTANCE)

    def call(self, data: bytes = b"", *, seconds: float | None = None) -> RecordedCall:
        """Admit a call with so many seconds until its deadline."""
        now = monotonic()
        deadline = None if seconds is None else now + seconds
        made = RecordedCall(self.execution, self.served, Context("r1", deadline=deadline))
        self.execution.admit(made, data, {}, now)
        return made


def story(handler: Endpoint, tell: Callable[[Bench], Any], **settings: Any) -> Any:
    """What `tell` returns, with the endpoint on an idle in-memory bus."""

    async def whole() -> Any:
        async with bus_in_memory(**settings) as (_, bus):
            bench = Bench(Execution(bus, INSTANCE), handler)
            return await tell(bench)

    return run(whole())


def assert_settled(bench: Bench, *calls: RecordedCall) -> None:
    assert bench.execution.load == 0
    assert (bench.served.admission.running, bench.served.admission.waiting) == (0, 0)
    assert [call.retired for call in calls] == [1] * len(calls)
    assert bench.served.requests == len(calls)


async def echo(data: bytes) -> bytes:
    return data


async def wait_for_ever(_: bytes) -> bytes:
    await asyncio.Event().wait()
    return b""


def test_a_result_ends_its_call() -> None:
    async def tell(bench: Bench) -> None:
        call = bench.call(b"a")
        assert bench.execution.load == 1
        assert repr(bench.execution) == f"<Execution {INSTANCE} [serving | load: 1]>"

        await bench.execution.idle()

        assert (call.sent, call.error) == ([b"a"], None)
        assert_settled(bench, call)

    story(endpoint(echo), tell)


def test_calls_beyond_the_concurrency_run_in_the_order_in_which_they_came() -> None:
    order: list[bytes] = []

    async def handler(data: bytes) -> bytes:
        order.append(data)
        await asyncio.sleep(1.0)
        return data

    async def tell(bench: Bench) -> None:
        calls = [bench.call(data) for data in (b"1", b"2", b"3", b"4")]
        assert bench.execution.load == 4
        await asyncio.sleep(0.5)
        assert order == [b"1", b"2"]

        await bench.execution.idle()

        assert order == [b"1", b"2", b"3", b"4"]
        assert_settled(bench, *calls)

    story(endpoint(handler, concurrency=2), tell)


def test_a_call_beyond_the_queue_is_refused_and_counted() -> None:
    async def tell(bench: Bench) -> None:
        calls = [bench.call() for _ in range(3)]
        refused = calls[2]

        assert isinstance(refused.error, Overloaded)
        assert refused.error.message == "1 calls run and 1 wait"
        assert refused.error.retry_after > 0
        assert not refused.error.started
        assert refused.error.hop == f"{ADDRESS}@{INSTANCE}"
        await bench.execution.idle()
        assert bench.served.errors == 1
        assert_settled(bench, *calls)

    story(endpoint(echo, concurrency=1, queue=1), tell)


def test_while_it_drains_what_runs_goes_on_and_what_comes_is_refused() -> None:
    async def handler(data: bytes) -> bytes:
        await asyncio.sleep(1.0)
        return data

    async def tell(bench: Bench) -> None:
        before = bench.call(b"a")
        bench.execution.draining = True
        after = bench.call(b"b")

        await bench.execution.idle()

        assert before.sent == [b"a"]
        assert isinstance(after.error, Draining)
        assert not after.error.started
        assert_settled(bench, before, after)

    story(endpoint(handler), tell)


# Requests ---------------------------------------------------------------------------------


def test_a_request_that_comes_after_its_deadline_is_not_even_read() -> None:
    read: list[bytes] = []

    async def tell(bench: Bench) -> None:
        call = bench.call(b"a", seconds=0.0)

        assert isinstance(call.error, DeadlineExceeded)
        assert not call.error.started
        assert read == []
        assert_settled(bench, call)

    story(endpoint(echo, decode=read.append), tell)


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (InvalidRequest("text: Field required"), "text: Field required"),
        (ZeroDivisionError("by zero"), "the request could not be read: ZeroDivisionError: by zero"),
    ],
)
def test_a_request_that_cannot_be_read_is_refused(raised: Exception, message: str) -> None:
    def decode(data: bytes) -> bytes:
        raise raised

    async def tell(bench: Bench) -> None:
        call = bench.call(b"a")

        assert isinstance(call.error, InvalidRequest)
        assert (call.error.message, call.error.started) == (message, False)
        assert_settled(bench, call)

    story(endpoint(echo, decode=decode), tell)


def test_a_handler_does_not_see_the_variables_of_whoever_delivered_its_request() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="nobody's")
    seen: list[str] = []

    async def handler(data: bytes) -> bytes:
        seen.append(variable.get())
        variable.set("a handler's")
        return data

    async def tell(bench: Bench) -> None:
        variable.set("a caller's")
        for _ in range(2):
            bench.call()
            await bench.execution.idle()

    story(endpoint(handler), tell)

    assert seen == ["nobody's", "nobody's"]


# Errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (ValueError("no"), HandlerError, "ValueError: no"),
        (Overloaded("later"), Overloaded, "later"),
        (GeneratorExit(), Migrate, "the handler asks for another instance"),
        (asyncio.CancelledError(), Cancelled, "the handler was cancelled"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_an_exception_of_the_handler_is_the_call_s_error(
    raised: BaseException, kind: type[DynbusError], message: str, streaming: bool
) -> None:
    async def unary(_: bytes) -> bytes:
        raise raised

    async def stream(_: bytes) -> AsyncGenerator[bytes, None]:
        yield b"first"
        raise raised

    async def tell(bench: Bench) -> None:
        call = bench.call()

        await bench.execution.idle()

        assert call.error is not None
        assert type(call.error) is kind
        assert (call.error.message, call.error.started) == (message, True)
        assert call.sent == ([b"first"] if streaming else [])
        assert_settled(bench, call)

    story(endpoint(stream if streaming else unary, streaming=streaming), tell)


def test_an_error_of_a_sub_call_does_not_say_that_the_handler_did_not_run() -> None:
    async def handler(_: bytes) -> bytes:
        raise Unavailable("the other one is away", hop="a.B.c@x", started=False)

    async def tell(bench: Bench) -> None:
        call = bench.call()

        await bench.execution.idle()

        assert call.error is not None
        assert (call.error.started, call.error.hop) == (True, "a.B.c@x")

    story(endpoint(handler), tell)


@pytest.mark.parametrize("debug", [False, True])
def test_a_traceback_is_told_only_where_that_was_asked_for(debug: bool) -> None:
    async def handler(_: bytes) -> bytes:
        raise ValueError("no")

    async def tell(bench: Bench) -> None:
        call = bench.call()

        await bench.execution.idle()

        assert isinstance(call.error, HandlerError)
        assert ("in handler" in call.error.remote_traceback) is debug

    story(endpoint(handler), tell, debug=debug)


def test_a_result_that_does_not_fit_is_logged_for_the_author(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def encode(value: bytes) -> bytes:
        raise InvalidResponse("the value: Input should be a valid integer")

    async def tell(bench: Bench) -> None:
        call = bench.call()

        await bench.execution.idle()

        assert isinstance(call.error, InvalidResponse)

    with caplog.at_level(logging.ERROR):
        story(endpoint(echo, encode=encode), tell)

    assert f"{ADDRESS}, request r1: the value: Input should be a valid integer" in caplog.text


# Ends from outside ------------------------------------------------------------------------


def test_a_deadline_that_passes_in_the_queue_ends_a_call_that_never_starts() -> None:
    async def tell(bench: Bench) -> None:
        running, waiting = bench.call(), bench.call(seconds=2.0)

        await asyncio.sleep(2.1)

        assert isinstance(waiting.error, DeadlineExceeded)
        assert (waiting.error.started, waiting.entered) == (False, False)
        assert running.error is None
        assert bench.execution.load == 1
        bench.execution.kill(running)
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
        assert call.context.is_killed()
        assert_settled(bench, call)

    story(endpoint(wait_for_ever), tell)


def test_a_call_that_is_killed_before_its_first_step_never_enters_its_handler() -> None:
    entered: list[bytes] = []

    async def handler(data: bytes) -> bytes:
        entered.append(data)
        return data

    async def tell(bench: Bench) -> None:
        killed, waiting = bench.call(b"1"), bench.call(b"2")

        bench.execution.abort(killed, Cancelled("given up"))
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
        await until(lambda: call.entered)

        bench.execution.cancel(call, 1.0)
        await bench.execution.idle()

        assert (type(call.error) if call.error else None) is error
        assert call.sent == ([b"tidy"] if tidy else [])
        assert call.context.is_stopped()
        assert_settled(bench, call)

    story(endpoint(handler), tell)


def test_a_stop_without_a_time_never_kills() -> None:
    async def handler(_: bytes) -> bytes:
        await context().stopped()
        await asyncio.sleep(1000.0)
        return b"late"

    async def tell(bench: Bench) -> None:
        call = bench.call()
        await until(lambda: call.entered)

        bench.execution.cancel(call, -1.0)
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
        await until(lambda: all(call.entered for call in calls))
        for call in calls:
            bench.execution.kill(call)

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
        call.is_blocked = True
        await asyncio.sleep(1.0)
        assert produced == [0]

        call.is_blocked = False
        call.wake()
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
            bench.execution.end_if_stuck(call, monotonic())
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
        call.is_blocked = True
        await asyncio.sleep(9.0)
        bench.execution.end_if_stuck(call, monotonic())
        assert call.error is None
        await asyncio.sleep(2.0)
        bench.execution.end_if_stuck(call, monotonic())

        await bench.execution.idle()

        assert isinstance(call.error, ReaderStalled)
        assert_settled(bench, call)

    story(
        endpoint(handler, streaming=True, idle_timeout=1.0),
        tell,
        reader_stall_timeout=10.0,
    )
