"""A call gives its items in order and once, asks for what is missing, and ends in time."""

from __future__ import annotations

import asyncio

import pytest
from tests.bus.far_side import ENDPOINT, played, settle

from dynbus.bus.calling.pending_call import KILL_AFTER, PendingCall
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.errors import (
    Cancelled,
    DeadlineExceeded,
    HandlerError,
    Overloaded,
    PayloadTooLarge,
)
from dynbus.bus.protocol.wire import (
    Cancel,
    Credit,
    End,
    Frame,
    Item,
    Items,
    Part,
    Resume,
    failed_frame,
)
from dynbus.testing import run


def item(call: PendingCall, sequence: int, data: bytes) -> Item:
    return Item(call.number, call.secret, call.attempt, sequence, data)


def end(call: PendingCall, sequence: int, data: bytes | None = None) -> End:
    return End(call.number, call.secret, call.attempt, sequence, data)


def ids(frames: list[Cancel]) -> list[tuple[int, float]]:
    return [(frame.number, frame.kill_after) for frame in frames]


# Items and results -------------------------------------------------------------------------


def test_a_reader_that_waits_is_woken_by_the_first_items() -> None:
    async def story() -> list[list[bytes]]:
        async with played() as side:
            call = side.begin(streaming=True)
            waiting = asyncio.ensure_future(call.items())

            await side.far.send(item(call, 0, b"a"))
            first = await waiting
            await side.far.send(item(call, 1, b"b"), item(call, 2, b"c"), end(call, 3))

            return [first, await call.items(), await call.items()]

    assert run(story()) == [[b"a"], [b"b", b"c"], []]


def test_items_that_came_before_an_error_are_read_before_it_is_raised() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin(streaming=True)

            await side.far.send(
                item(call, 0, b"a"),
                failed_frame(call.number, call.secret, 1, 1, HandlerError("it broke")),
            )

            assert await call.items() == [b"a"]
            with pytest.raises(HandlerError, match="it broke"):
                await call.items()

    run(story())


def test_an_error_of_the_far_side_is_raised_as_itself() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()
            error = Overloaded("later", retry_after=2.5, started=False)

            await side.far.send(failed_frame(call.number, call.secret, 1, 0, error))

            with pytest.raises(Overloaded) as raised:
                await call.result()
            assert raised.value.retry_after == 2.5

    run(story())


def test_a_large_result_is_put_together() -> None:
    async def story() -> bytes:
        async with played() as side:
            call = side.begin()

            await side.far.send(
                Part(call.number, call.secret, 1, 0, b"one "),
                Part(call.number, call.secret, 1, 1, b"two "),
                end(call, 2, b"three"),
            )

            return await call.result()

    assert run(story()) == b"one two three"


def test_parts_over_the_limit_end_the_call_and_kill_the_far_side() -> None:
    async def story() -> None:
        async with played(max_item_bytes=10) as side:
            call = side.begin()

            await side.far.send(Part(call.number, call.secret, 1, 0, b"x" * 11))

            with pytest.raises(PayloadTooLarge):
                await call.result()
            assert ids(await side.far.heard(Cancel)) == [(call.number, 0.0)]

    run(story())


# What is missing ---------------------------------------------------------------------------


def test_a_gap_is_asked_about_once_and_closed_by_what_is_sent_again() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin(streaming=True)

            await side.far.send(item(call, 1, b"b"), item(call, 2, b"c"))
            asked = await side.far.heard(Resume)
            await side.far.send(
                Items(call.number, call.secret, 1, 0, [b"a", b"b", b"c"]), end(call, 3)
            )

            assert [frame.resume_from for frame in asked] == [0]
            assert await call.items() == [b"a", b"b", b"c"]
            assert await call.items() == []
            assert side.far.all(Resume) == asked

    run(story())


def test_items_that_come_twice_are_read_once() -> None:
    async def story() -> list[bytes]:
        async with played() as side:
            call = side.begin(streaming=True)

            for _ in range(3):
                await side.far.send(item(call, 0, b"a"), item(call, 1, b"b"))

            return await call.items()

    assert run(story()) == [b"a", b"b"]


# Credit ------------------------------------------------------------------------------------


def test_a_writer_gets_credit_when_half_of_its_window_has_been_read() -> None:
    async def story() -> None:
        async with played(stream_window=20_000) as side:
            call = side.begin(streaming=True)
            await side.far.send(item(call, 0, b"x" * 20_000))

            call.consumed(9_000)
            await side.bus.data.barrier()
            early = side.far.all(Credit)
            call.consumed(1_000)

            (credit,) = await side.far.heard(Credit)
            assert early == []
            assert (credit.granted, credit.received) == (30_000, 1)

    run(story())


def test_a_call_that_has_ended_gives_no_credit() -> None:
    async def story() -> list[Credit]:
        async with played(stream_window=20_000) as side:
            call = side.begin(streaming=True)
            await side.far.send(item(call, 0, b"x" * 20_000), end(call, 1))

            call.consumed(20_000)
            await side.bus.data.barrier()
            await settle(side.far.connection)

            return side.far.all(Credit)

    assert run(story()) == []


# The end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_cancelling_the_task_that_awaits_a_call_cancels_the_far_side(streaming: bool) -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin(streaming=streaming)
            waiting = asyncio.ensure_future(call.items() if streaming else call.result())
            await side.far.request()

            waiting.cancel()
            await asyncio.wait({waiting})

            assert waiting.cancelled()
            assert isinstance(call.error, Cancelled)
            assert ids(await side.far.heard(Cancel)) == [(call.number, KILL_AFTER)]

    run(story())


@pytest.mark.parametrize(("kill", "kill_after"), [(False, -1.0), (True, 0.0)])
def test_a_cancelled_call_is_read_to_its_end(kill: bool, kill_after: float) -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin(streaming=True)
            await side.far.request()

            call.cancel(kill=kill)
            await side.far.heard(Cancel)
            await side.far.send(item(call, 0, b"last"), end(call, 1))

            assert ids(side.far.all(Cancel)) == [(call.number, kill_after)]
            assert await call.items() == [b"last"]
            assert await call.items() == []

    run(story())


def test_a_call_follows_the_context_it_was_made_in() -> None:
    async def story() -> None:
        async with played() as side:
            context = Context(id="request-1")
            call, other = side.begin(), side.begin()
            call.follow(context)
            other.follow(context)
            await side.far.send(end(other, 0, b""))

            context.stop_generating()
            context.kill()

            cancels = await side.far.heard(Cancel, 2)
            assert ids(cancels) == [(call.number, -1.0), (call.number, 0.0)]

    run(story())


def test_a_deadline_ends_the_call_where_it_waits_and_kills_the_far_side() -> None:
    async def story() -> None:
        async with played() as side:
            begun = monotonic()
            call = side.begin(deadline=begun + 0.5)

            with pytest.raises(DeadlineExceeded) as raised:
                await call.result()

            assert monotonic() - begun == pytest.approx(0.5)
            assert raised.value.hop == f"caller of {ENDPOINT.hop('one')}"
            assert raised.value.request_id == "request-1"
            assert ids(await side.far.heard(Cancel)) == [(call.number, 0.0)]

    run(story())


def test_a_call_that_has_ended_leaves_nothing_behind() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()

            await side.far.send(end(call, 0, b""))

            assert len(side.caller.deadlines) == 0
            assert side.caller.open_calls() == {}
            assert call.remote.done == [(call.number, call.secret)]

    run(story())


@pytest.mark.parametrize("late", [1, 2, 3])
def test_what_comes_after_the_end_changes_nothing(late: int) -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()
            await side.far.send(end(call, 0, b"answer"))
            sent = len(side.far.all(Cancel))

            frames: list[Frame] = [end(call, 0, b"another")] * late
            await side.far.send(*frames)
            call.fail(HandlerError("late"))
            call.expire()
            call.abandon()
            call.cancel(kill=True)
            await side.bus.data.barrier()
            await settle(side.far.connection)

            assert await call.result() == b"answer"
            assert call.error is None
            assert len(side.far.all(Cancel)) == sent

    run(story())
