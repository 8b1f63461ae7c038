"""A call is admitted, or refused with its reason, and its handler's end is the call's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextvars import ContextVar

import pytest
from tests.bus.near_side import ADDRESS, INSTANCE, endpoint

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
    Unavailable,
)

from .bench import Bench, assert_settled, echo, story


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
        assert refused.error.message == "1 call runs and 1 waits"
        assert refused.error.retry_after == 0
        assert not refused.error.started
        assert refused.error.hop == f"{ADDRESS}@{INSTANCE}"
        await bench.execution.idle()
        assert bench.served.errors == 1
        assert_settled(bench, *calls)

    story(endpoint(echo, concurrency=1, queue=1), tell)


def test_only_the_time_in_which_a_handler_ran_says_when_to_come_back() -> None:
    async def handler(data: bytes) -> bytes:
        await asyncio.sleep(1.0)
        return data

    async def tell(bench: Bench) -> None:
        # The second waits as long as it runs, and many are refused at once.
        calls = [bench.call() for _ in range(50)]
        await bench.execution.idle()
        again = [bench.call() for _ in range(3)]
        refused = again[2].error

        assert isinstance(refused, Overloaded)
        assert refused.retry_after == pytest.approx(1.0, rel=0.05)
        assert bench.served.processing_time == pytest.approx(2.0, abs=0.01)
        await bench.execution.idle()
        assert_settled(bench, *calls, *again)

    story(endpoint(handler, concurrency=1, queue=1), tell)


def test_a_call_that_would_be_too_late_is_refused_before_it_waits() -> None:
    async def handler(data: bytes) -> bytes:
        await asyncio.sleep(1.0)
        return data

    async def tell(bench: Bench) -> None:
        first = bench.call()
        await bench.execution.idle()

        running, late, patient = bench.call(), bench.call(seconds=1.5), bench.call(seconds=2.5)

        assert isinstance(late.error, Overloaded)
        assert late.error.message == (
            "1 call runs and 0 wait: it would probably not be done by its deadline"
        )
        assert (late.error.started, late.error.retryable) == (False, True)
        assert late.error.retry_after == pytest.approx(1.0, rel=0.05)
        await bench.execution.idle()
        assert patient.sent == [b""]
        assert_settled(bench, first, running, late, patient)

    story(endpoint(handler, concurrency=1), tell)


def test_a_call_whose_time_runs_out_while_it_waits_is_refused_when_its_turn_comes() -> None:
    began: list[bytes] = []
    seconds = 1.0

    async def handler(data: bytes) -> bytes:
        began.append(data)
        await asyncio.sleep(seconds)
        return data

    async def tell(bench: Bench) -> None:
        nonlocal seconds
        first = bench.call(b"1")
        await bench.execution.idle()
        seconds = 2.0

        slow, late, patient = bench.call(b"2"), bench.call(b"3", seconds=2.5), bench.call(b"4")
        await asyncio.sleep(2.1)

        assert isinstance(late.error, Overloaded)
        assert (late.error.started, began) == (False, [b"1", b"2", b"4"])
        await bench.execution.idle()
        assert_settled(bench, first, slow, late, patient)

    story(endpoint(handler, concurrency=1), tell)


def test_a_client_that_fills_the_queue_makes_place_for_another() -> None:
    async def tell(bench: Bench) -> None:
        greedy = [bench.call(taker="greedy") for _ in range(3)]

        other = bench.call(b"other", taker="other")

        assert isinstance(greedy[2].error, Overloaded)
        assert greedy[2].error.message == (
            "1 call runs and 2 wait: the queue is full, and a client with fewer calls in it took "
            "this one's place"
        )
        assert not greedy[2].error.started
        await bench.execution.idle()
        assert other.sent == [b"other"]
        assert [call.sent for call in greedy] == [[b""], [b""], []]
        assert_settled(bench, *greedy, other)

    story(endpoint(echo, concurrency=1, queue=2), tell)


def test_a_call_that_is_given_up_before_its_handler_begins_is_dropped_at_once() -> None:
    begun: list[bytes] = []

    async def handler(data: bytes) -> bytes:
        begun.append(data)
        await asyncio.sleep(10.0)
        return data

    async def tell(bench: Bench) -> None:
        # The task of the first is there, and has not taken its first step; the second waits.
        given_up = [bench.call(b"admitted"), bench.call(b"waits")]
        for one in reversed(given_up):
            bench.execution.cancel(one.call, 1.0)

        for one in given_up:
            assert isinstance(one.error, Cancelled)
            assert not one.error.started
        await bench.execution.idle()
        assert begun == []
        assert_settled(bench, *given_up)

    story(endpoint(handler, concurrency=1), tell)


def test_a_handler_that_is_cancelled_early_does_not_look_fast() -> None:
    async def handler(data: bytes) -> bytes:
        await asyncio.sleep(1.0)
        return data

    async def tell(bench: Bench) -> None:
        whole = bench.call()
        await bench.execution.idle()
        cut = bench.call(seconds=0.1)
        await bench.execution.idle()
        stopped = bench.call()
        await asyncio.sleep(0.1)
        bench.execution.cancel(stopped.call, 0.0)
        await bench.execution.idle()

        assert bench.served.admission.durations.chance(0.9) == 0.0
        assert_settled(bench, whole, cut, stopped)

    story(endpoint(handler), tell)


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
        (ExceptionGroup("in a group", [ValueError("no")]), HandlerError, "ValueError: no"),
        (ExceptionGroup("in a group", [Overloaded("later")]), Overloaded, "later"),
        (
            ExceptionGroup("group", [ValueError("no"), Overloaded("later")]),
            HandlerError,
            "ExceptionGroup: group (2 sub-exceptions): ValueError: no; Overloaded: later",
        ),
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
        assert call.error.error_type == "ValueError"
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
