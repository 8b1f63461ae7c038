"""Stop and kill reach everyone who listens, once, and cannot be taken back."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context, context


def test_there_is_no_context_outside_of_a_handler() -> None:
    with pytest.raises(LookupError) as caught:
        context()

    assert str(caught.value) == "context() is only known inside a handler"
    assert Context.current() is None


@pytest.mark.anyio
async def test_a_context_belongs_to_the_task_that_entered_it() -> None:
    mine = Context("mine")

    async def inside() -> Context:
        mine.enter()
        return context()

    assert await asyncio.create_task(inside()) is mine
    assert Context.current() is None


def test_a_context_without_an_id_gets_a_random_one() -> None:
    assert len(Context().id) == 32
    assert Context().id != Context().id


def test_metadata_is_a_copy_that_cannot_be_changed() -> None:
    given = {"tenant": "a"}
    call = Context("r", metadata=given)
    given["tenant"] = "b"

    with pytest.raises(TypeError):
        cast(Any, call.metadata)["tenant"] = "c"

    assert call.metadata == {"tenant": "a"}


def test_the_time_left_counts_down_to_the_deadline() -> None:
    left = Context("r", deadline=monotonic() + 10.0).time_left()

    assert left is not None
    assert 9.0 < left <= 10.0


def test_a_context_without_a_deadline_has_no_time_left_to_tell() -> None:
    assert Context("r").time_left() is None


def test_a_stop_is_no_kill() -> None:
    call = Context("r")

    call.stop_generating()

    assert (call.is_stopped(), call.is_killed()) == (True, False)
    assert repr(call) == "<Context r [stopped | attempt: 1]>"


def test_a_kill_is_a_stop_too() -> None:
    call = Context("r")

    call.kill()

    assert (call.is_stopped(), call.is_killed()) == (True, True)


def test_listeners_hear_stop_and_kill_once_each() -> None:
    call = Context("r")
    heard: list[bool] = []
    call.link(heard.append)

    call.stop_generating()
    call.stop_generating()
    call.kill()
    call.kill()
    call.stop_generating()

    assert heard == [False, True]


def test_a_listener_that_comes_late_hears_at_once() -> None:
    stopped, killed = Context("r"), Context("r")
    stopped.stop_generating()
    killed.kill()
    heard: list[bool] = []

    stopped.link(heard.append)
    killed.link(heard.append)

    assert heard == [False, True]


def test_an_unlinked_listener_hears_nothing() -> None:
    call = Context("r")
    heard: list[bool] = []
    unlink = call.link(heard.append)

    unlink()
    unlink()
    call.kill()

    assert heard == []


@pytest.mark.anyio
async def test_stopped_returns_when_the_call_is_stopped() -> None:
    call = Context("r")
    waiting = asyncio.create_task(call.stopped())
    await asyncio.sleep(0)
    assert not waiting.done()

    call.stop_generating()

    await asyncio.wait_for(waiting, 1.0)
    await asyncio.wait_for(call.stopped(), 1.0)


@pytest.mark.anyio
async def test_waiting_for_a_stop_can_be_cancelled() -> None:
    call = Context("r")
    waiting = asyncio.create_task(call.stopped())
    await asyncio.sleep(0)

    waiting.cancel()
    await asyncio.wait([waiting])
    call.stop_generating()

    assert waiting.cancelled()


def test_the_drain_of_the_instance_shows_while_it_lasts() -> None:
    draining = False
    call = Context("r", draining=lambda: draining)
    assert not call.is_draining()

    draining = True

    assert call.is_draining()
    assert not Context("r").is_draining()


def test_trace_headers_are_a_copy() -> None:
    call = Context("r", trace_headers={"traceparent": "00-a-b-01"})

    call.trace_headers()["traceparent"] = "other"

    assert call.trace_headers() == {"traceparent": "00-a-b-01"}


def test_trace_headers_are_replaced_once_there_is_a_span() -> None:
    call = Context("r", trace_headers={"traceparent": "00-a-b-01"})

    call.set_trace_headers({"traceparent": "00-a-c-01"})

    assert call.trace_headers() == {"traceparent": "00-a-c-01"}
