"""Pings are answered in their order, and a server that answers none is given up in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from dynbus.bus.clock import monotonic
from dynbus.bus.nats.session import (
    MAX_SILENT_PINGS,
    MAX_UNANSWERED_PINGS,
    PING_INTERVAL,
    Pings,
)
from dynbus.testing import run


def given_up_after(react: Callable[[Pings], None]) -> float | None:
    """Seconds after which a server is given up that reacts to each ping so; None for never."""

    async def story() -> float | None:
        loop = asyncio.get_running_loop()
        given_up = asyncio.Event()

        def write(data: bytes) -> None:
            assert data == b"PING\r\n"
            loop.call_later(0.1, react, pings)

        pings = Pings(loop, write)
        begun = monotonic()
        pings.watch(given_up.set)
        try:
            async with asyncio.timeout(100 * PING_INTERVAL):
                await given_up.wait()
        except TimeoutError:
            return None
        else:
            return monotonic() - begun
        finally:
            pings.unwatch()

    return run(story())


def test_a_server_that_is_silent_is_given_up_after_two_pings() -> None:
    seconds = given_up_after(lambda _: None)

    assert seconds == pytest.approx((MAX_SILENT_PINGS + 1) * PING_INTERVAL)


def test_a_server_that_only_talks_is_given_up_after_five_pings() -> None:
    seconds = given_up_after(Pings.heard)

    assert seconds == pytest.approx((MAX_UNANSWERED_PINGS + 1) * PING_INTERVAL)


def test_a_server_that_answers_is_never_given_up() -> None:
    def answer(pings: Pings) -> None:
        pings.heard()
        pings.answered()

    assert given_up_after(answer) is None


def test_a_new_session_starts_to_count_anew() -> None:
    async def story() -> float:
        loop = asyncio.get_running_loop()
        given_up = asyncio.Event()
        pings = Pings(loop, lambda _: None)
        pings.watch(given_up.set)
        await asyncio.sleep(MAX_SILENT_PINGS * PING_INTERVAL + 0.1)
        pings.unwatch()
        begun = monotonic()

        pings.watch(given_up.set)

        await given_up.wait()
        return monotonic() - begun

    assert run(story()) == pytest.approx((MAX_SILENT_PINGS + 1) * PING_INTERVAL)


def test_nothing_is_sent_once_a_session_is_no_longer_watched() -> None:
    async def story() -> int:
        written: list[bytes] = []
        pings = Pings(asyncio.get_running_loop(), written.append)
        pings.watch(lambda: None)

        pings.unwatch()

        await asyncio.sleep(10 * PING_INTERVAL)
        return len(written)

    assert run(story()) == 0


def test_answers_go_to_those_who_wait_in_their_order() -> None:
    async def story() -> list[bool]:
        pings = Pings(asyncio.get_running_loop(), lambda _: None)
        first, second = pings.send(), pings.send()

        pings.answered()

        return [first.done(), second.done()]

    assert run(story()) == [True, False]


def test_one_that_waits_no_longer_takes_its_answer_from_nobody_else() -> None:
    async def story() -> list[bool]:
        pings = Pings(asyncio.get_running_loop(), lambda _: None)
        first, second = pings.send(), pings.send()
        first.cancel()

        pings.answered()
        after_one = second.done()
        pings.answered()

        return [after_one, second.done()]

    assert run(story()) == [False, True]


def test_the_end_of_a_session_is_told_to_all_who_wait() -> None:
    async def story() -> list[BaseException | None]:
        pings = Pings(asyncio.get_running_loop(), lambda _: None)
        waiting = [pings.send(), pings.send()]

        pings.lose()
        pings.answered()

        return [one.exception() for one in waiting]

    assert [type(error) for error in run(story())] == [ConnectionResetError] * 2


def test_a_pong_that_nobody_waits_for_is_no_error() -> None:
    async def story() -> str:
        pings = Pings(asyncio.get_running_loop(), lambda _: None)

        pings.answered()

        return repr(pings)

    assert run(story()) == "<Pings [waiting: 0, unanswered: 0]>"
