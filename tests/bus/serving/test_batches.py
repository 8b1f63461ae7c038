"""The calls of an endpoint are answered together, and each stays one of its own."""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import pytest
from tests.bus.near_side import ADDRESS, INSTANCE, endpoint, until

from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context, context
from dynbus.bus.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    HandlerError,
    InvalidRequest,
    Overloaded,
)
from dynbus.bus.protocol.endpoint import BatchRule, Endpoint

from .bench import Bench, assert_settled, story

Run = Callable[[Sequence[bytes]], Awaitable[Any]]


def batched(run: Run, *, concurrency: int | None = 1, **rule: Any) -> Endpoint:
    """An endpoint whose calls go together, two at a time unless told."""
    fields: dict[str, Any] = {"run": run, "label": "Side.call", "most": 2, "wait": 0.0, **rule}
    return endpoint(answered, batch=BatchRule(**fields), concurrency=concurrency)


async def answered(request: bytes, answer: Callable[[bytes], Awaitable[bytes]]) -> bytes:
    return await answer(request)


async def upper(requests: Sequence[bytes]) -> list[bytes]:
    return [each.upper() for each in requests]


class Runs:
    """A handler of batches that takes its time.

    Attributes:
        begun: the requests of each batch.
        contexts: those in which they ran.
        cancelled: how many were.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.begun: list[list[bytes]] = []
        self.contexts: list[Context] = []
        self.cancelled = 0

    async def __call__(self, requests: Sequence[bytes]) -> list[bytes]:
        self.begun.append(list(requests))
        self.contexts.append(context())
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await upper(requests)


def test_each_call_has_its_own_result_of_the_batch() -> None:
    async def tell(bench: Bench) -> None:
        calls = [bench.call(data) for data in (b"a", b"b", b"c")]

        await bench.execution.idle()

        assert [call.sent for call in calls] == [[b"A"], [b"B"], [b"C"]]
        assert_settled(bench, *calls)

    story(batched(upper), tell)


def test_calls_wait_for_others_until_the_batch_is_full_or_due() -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        bench.call(b"a")
        await asyncio.sleep(0.4)
        assert runs.begun == []
        bench.call(b"b")
        await asyncio.sleep(0.2)

        assert runs.begun == [[b"a", b"b"]]
        bench.call(b"c")
        bench.call(b"d")
        bench.call(b"e")
        await bench.execution.idle()
        assert runs.begun == [[b"a", b"b"], [b"c", b"d", b"e"]]

    story(batched(runs, most=3, wait=0.5), tell)


def test_what_comes_while_a_batch_runs_goes_together_after_it() -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        bench.call(b"a")
        await asyncio.sleep(0.5)
        for data in (b"b", b"c", b"d", b"e", b"f"):
            bench.call(data)

        await bench.execution.idle()

        assert runs.begun == [[b"a"], [b"b", b"c", b"d"], [b"e", b"f"]]

    story(batched(runs, most=3), tell)


def test_as_many_batches_run_at_a_time_as_the_concurrency_says_and_further_calls_wait() -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        calls = [bench.call(b"%d" % number) for number in range(8)]
        await asyncio.sleep(0.5)
        assert runs.begun == [[b"0", b"1"], [b"2", b"3"]]
        # Two batches, and the one that comes together meanwhile.
        assert (bench.served.admission.running, bench.served.admission.waiting) == (6, 2)

        await bench.execution.idle()

        assert runs.begun[2:] == [[b"4", b"5"], [b"6", b"7"]]
        assert_settled(bench, *calls)

    story(batched(runs, concurrency=2), tell)


def test_calls_beyond_the_queue_are_refused() -> None:
    runs = Runs()
    made = batched(runs)
    changed = endpoint(answered, batch=made.batch, concurrency=1, queue=1)

    async def tell(bench: Bench) -> None:
        calls = [bench.call() for _ in range(6)]

        assert isinstance(calls[5].error, Overloaded)
        await bench.execution.idle()
        assert_settled(bench, *calls)

    story(changed, tell)


def test_only_calls_of_one_key_go_together() -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        for data in (b"x1", b"y1", b"x2", b"y2"):
            bench.call(data)

        await bench.execution.idle()

        assert runs.begun == [[b"x1", b"x2"], [b"y1", b"y2"]]

    story(batched(runs, key=operator.itemgetter(slice(1))), tell)


def test_a_key_that_is_not_usable_fails_its_call_alone() -> None:
    async def tell(bench: Bench) -> None:
        bad, good = bench.call(b"bad"), bench.call(b"good")

        await bench.execution.idle()

        assert isinstance(bad.error, HandlerError)
        assert "its batch_key gave a list, which cannot be compared" in str(bad.error)
        assert good.sent == [b"GOOD"]
        assert_settled(bench, bad, good)

    def key_of(data: bytes) -> object:
        return [1] if data == b"bad" else 1

    story(batched(upper, key=key_of), tell)


def test_a_call_that_is_left_before_its_batch_begins_is_not_in_it() -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        left, other = bench.call(b"left"), bench.call(b"other")
        await until(lambda: left.call.entered and other.call.entered)
        bench.execution.cancel(left.call, kill_after=1.0)

        await bench.execution.idle()

        assert isinstance(left.error, Cancelled)
        assert runs.begun == [[b"other"]]
        assert_settled(bench, left, other)

    story(batched(runs, most=3, wait=0.5), tell)


def test_a_batch_goes_on_for_those_who_stay_and_ends_when_all_have_left() -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        first, second = bench.call(b"1"), bench.call(b"2")
        await asyncio.sleep(0.1)
        bench.execution.cancel(first.call, kill_after=0.0)
        await asyncio.sleep(0.1)
        assert (bench.execution.load, runs.cancelled) == (1, 0)
        assert not runs.contexts[0].is_stopped()

        bench.execution.cancel(second.call, kill_after=0.2)
        await until(runs.contexts[0].is_stopped)
        assert runs.cancelled == 0
        await bench.execution.idle()

        assert (runs.cancelled, runs.contexts[0].is_killed()) == (1, True)
        assert_settled(bench, first, second)

        again = bench.call(b"again")
        await bench.execution.idle()
        assert again.sent == [b"AGAIN"]

    story(batched(runs), tell)


def test_a_batch_that_all_leave_as_it_begins_gives_its_place_back() -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        calls = [bench.call(b"1"), bench.call(b"2")]
        batches = bench.served.batches
        assert batches is not None
        await until(lambda: all(call.call.entered for call in calls))
        await until(lambda: not any(batches.has_waiting(call.call.context) for call in calls))
        assert runs.begun == []
        for call in calls:
            bench.execution.kill(call.call)
        await bench.execution.idle()
        last = bench.call(b"3")
        await bench.execution.idle()

        assert runs.begun[-1:] == [[b"3"]]
        assert last.sent == [b"3"]

    story(batched(runs), tell)


def test_a_deadline_ends_its_own_call_and_says_whether_the_batch_had_begun() -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        early, patient = bench.call(b"early", seconds=0.5), bench.call(b"patient")
        await asyncio.sleep(0.2)
        waits = bench.call(b"waits", seconds=0.4)
        await bench.execution.idle()

        assert isinstance(early.error, DeadlineExceeded)
        assert (early.error.started, early.error.message) == (
            True,
            "the deadline passed while the handler ran",
        )
        assert isinstance(waits.error, DeadlineExceeded)
        assert (waits.error.started, waits.error.message) == (
            False,
            "the deadline passed while the call waited",
        )
        assert patient.sent == [b"PATIENT"]
        assert runs.begun == [[b"early", b"patient"]]
        assert_settled(bench, early, patient, waits)

    story(batched(runs), tell)


def test_an_exception_fails_all_of_the_batch_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(requests: Sequence[bytes]) -> list[bytes]:
        raise ValueError("no weights")

    async def tell(bench: Bench) -> None:
        calls = [bench.call(), bench.call()]
        with caplog.at_level(logging.ERROR):
            await bench.execution.idle()

        for call in calls:
            assert isinstance(call.error, HandlerError)
            assert (call.error.message, call.error.error_type) == (
                "ValueError: no weights",
                "ValueError",
            )
        assert calls[0].error is not calls[1].error
        assert [each.getMessage() for each in caplog.records] == [
            f"{ADDRESS} raised in a batch of r1"
        ]
        assert_settled(bench, *calls)

    story(batched(fail), tell)


def test_an_error_of_dynbus_reaches_each_caller_as_one_of_its_own() -> None:
    shared = InvalidRequest("too long")

    async def fail(requests: Sequence[bytes]) -> list[bytes]:
        raise shared

    async def tell(bench: Bench) -> None:
        calls = [bench.call(), bench.call()]
        await bench.execution.idle()

        errors = [call.error for call in calls]
        assert [str(error) for error in errors] == [f"too long (at {ADDRESS}@{INSTANCE})"] * 2
        assert len({id(error) for error in (*errors, shared)}) == 3
        assert (shared.hop, shared.request_id) == ("", "")

    story(batched(fail), tell)


def test_an_exception_in_the_place_of_a_result_is_that_caller_s_error() -> None:
    async def some(requests: Sequence[bytes]) -> list[bytes | Exception]:
        return [each if each else InvalidRequest("it is empty") for each in requests]

    async def tell(bench: Bench) -> None:
        bad, good = bench.call(b""), bench.call(b"a")
        await bench.execution.idle()

        assert isinstance(bad.error, InvalidRequest)
        assert good.sent == [b"a"]
        assert_settled(bench, bad, good)

    story(batched(some), tell)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([b"1"], "Side.call returned a list of 1 for 2 requests: return one result for each"),
        ([b"1"] * 3, "Side.call returned a list of 3 for 2 requests"),
        (b"12", "Side.call returned bytes for 2 requests: return a list with one result for each"),
        (None, "Side.call returned NoneType for 2 requests"),
    ],
)
def test_what_is_no_result_for_each_request_fails_all_and_says_so(given: Any, text: str) -> None:
    async def wrong(requests: Sequence[bytes]) -> Any:
        return given

    async def tell(bench: Bench) -> None:
        calls = [bench.call(), bench.call()]
        await bench.execution.idle()

        for call in calls:
            assert isinstance(call.error, HandlerError)
            assert text in str(call.error)

    story(batched(wrong), tell)


def test_a_batch_that_is_cancelled_from_within_fails_its_calls() -> None:
    async def cancelled(requests: Sequence[bytes]) -> list[bytes]:
        raise asyncio.CancelledError

    async def tell(bench: Bench) -> None:
        calls = [bench.call(), bench.call()]
        await bench.execution.idle()

        assert [type(call.error) for call in calls] == [Cancelled, Cancelled]
        assert_settled(bench, *calls)

    story(batched(cancelled), tell)


def test_a_batch_has_what_its_calls_have_in_common() -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        one, two = bench.call(b"1", seconds=10.0), bench.call(b"2", seconds=20.0)
        for call, tenant in ((one, "a"), (two, "b")):
            call.call.context.metadata = MappingProxyType({"tenant": tenant, "region": "eu"})
        two.call.context.priority = 3
        begun = monotonic()
        await bench.execution.idle()

        (seen,) = runs.contexts
        assert seen not in (one.call.context, two.call.context)
        assert (seen.id, dict(seen.metadata), seen.priority) == ("r1", {"region": "eu"}, 3)
        assert seen.deadline == pytest.approx(begun + 20.0)
        assert seen.hop == f"{ADDRESS}@{INSTANCE}"

    story(batched(runs), tell)


@pytest.mark.parametrize(
    ("principals", "shared"), [(("a", "a"), "a"), (("a", "b"), ""), (("a", ""), "")]
)
def test_a_batch_has_the_principal_of_its_calls_where_that_is_one(
    principals: tuple[str, str], shared: str
) -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        for principal in principals:
            bench.call(b"1").call.context.principal = principal
        await bench.execution.idle()

        assert [seen.principal for seen in runs.contexts] == [shared]

    story(batched(runs), tell)


def test_a_batch_without_a_common_deadline_has_none() -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        bench.call(b"1", seconds=10.0)
        bench.call(b"2")
        await bench.execution.idle()

        assert runs.contexts[0].deadline is None

    story(batched(runs), tell)


def test_a_drain_begins_what_waits_for_others() -> None:
    runs = Runs()

    async def tell(bench: Bench) -> None:
        call = bench.call(b"1")
        await until(lambda: call.call.entered)
        begun = monotonic()

        bench.execution.begin_draining()
        await bench.execution.idle()

        assert monotonic() - begun == pytest.approx(1.0)
        assert (call.sent, runs.contexts[0].is_draining()) == ([b"1"], True)
        refused = bench.call(b"2")
        assert isinstance(refused.error, Draining)

    story(batched(runs, wait=60.0), tell)


def test_no_batch_runs_when_the_execution_has_stopped() -> None:
    runs = Runs(3600.0)

    async def tell(bench: Bench) -> None:
        calls = [bench.call(), bench.call(), bench.call()]
        await asyncio.sleep(0.1)
        for call in calls:
            bench.execution.abort(call.call, Draining("the instance was stopped"))
        await bench.execution.stop()

        assert runs.cancelled == 1
        assert not any("Batches" in repr(task) for task in asyncio.all_tasks())
        assert_settled(bench, *calls)

    story(batched(runs), tell)


secret: ContextVar[str] = ContextVar("secret", default="nobody's")


def test_a_batch_has_the_instance_s_variables_and_none_of_its_callers() -> None:
    seen: list[str] = []

    async def run(requests: Sequence[bytes]) -> list[bytes]:
        seen.append(secret.get())
        return list(requests)

    async def answered_by(request: bytes, answer: Callable[[bytes], Awaitable[bytes]]) -> bytes:
        secret.set("a caller's")
        return await answer(request)

    rule = BatchRule(run=run, label="Side.call", most=2, wait=0.0)

    async def tell(bench: Bench) -> None:
        bench.call()
        await bench.execution.idle()

        assert seen == ["nobody's"]

    story(endpoint(answered_by, batch=rule, concurrency=1), tell)
