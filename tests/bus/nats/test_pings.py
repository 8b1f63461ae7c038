"""Pings are answered in their order, and a server that answers none is given up in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from dynbus.bus.clock import monotonic
from dynbus.bus.nats import session as module
from dynbus.bus.nats.session import (
    BUSY_INTERVAL,
    DEAF_AFTER,
    IDLE_INTERVAL,
    PING,
    SILENT_AFTER,
    SLOW_ANSWERS,
    NatsOutput,
    Pings,
)
from dynbus.testing import run

LONG = 100.0
LATE = 1.0
NOTICED = 1.5
"""Seconds within which the silent loss of a server is noticed while anything is sent."""


class Session:
    """A link to a server, and what it carries.

    Attributes:
        react: called 50 ms after each ping that gets there.
        rate: bytes per second that it takes; None for all at once, 0 for none.
    """

    def __init__(self, react: Callable[[Pings], None], rate: float | None = None) -> None:
        self.output = NatsOutput(asyncio.get_running_loop())
        self.output.session = self  # type: ignore[assignment]
        self.pings = Pings(asyncio.get_running_loop(), self.output)
        self.react = react
        self.rate = rate
        self.write_buffer_size = 0
        self.sent = 0
        self._begun = monotonic()

    def fall_silent(self) -> None:
        self.react = ignore

    def answer_quickly(self) -> None:
        self.react = answer

    @property
    def unacknowledged(self) -> int:
        if self.rate is None:
            return 0
        return max(0, self.sent - int(self.rate * (monotonic() - self._begun)))

    def write_now(self, data: bytes) -> None:
        self.sent += len(data)
        if PING in data and self.rate != 0.0:
            delay = self.unacknowledged / self.rate if self.rate else 0.0
            asyncio.get_running_loop().call_later(0.05 + delay, lambda: self.react(self.pings))


def answer(pings: Pings) -> None:
    pings.heard()
    pings.answered()


def answer_late(pings: Pings) -> None:
    asyncio.get_running_loop().call_later(LATE - 0.05, answer, pings)


def ignore(pings: Pings) -> None:
    """The server is silent."""


async def given_up_after(session: Session, busy: Callable[[], None] | None = None) -> float | None:
    """Seconds after which the server is given up; None for never.

    Args:
        busy: called ten times a second.
    """
    given_up = asyncio.Event()
    begun = monotonic()
    session.pings.watch(given_up.set)

    async def work() -> None:
        while True:
            if busy is not None:
                busy()
            await asyncio.sleep(0.1)

    working = asyncio.create_task(work())
    try:
        async with asyncio.timeout(LONG):
            await given_up.wait()
    except TimeoutError:
        return None
    else:
        return monotonic() - begun
    finally:
        session.pings.unwatch()
        working.cancel()


async def noticed_after(at: float, *, is_busy: bool) -> float:
    """Seconds from the moment on in which a server falls silent that answered until then."""
    session = Session(answer)
    asyncio.get_running_loop().call_later(at, session.fall_silent)

    def write() -> None:
        if is_busy:
            session.output.write(b"beat")

    seconds = await given_up_after(session, write)
    assert seconds is not None
    return seconds - at


@pytest.mark.parametrize("phase", [0.0, 0.06, 0.13, 0.19, 0.24, 0.26, 0.31, 0.4])
def test_a_silent_server_is_noticed_within_a_second_and_a_half_while_anything_is_sent(
    phase: float,
) -> None:
    async def story() -> float:
        return await noticed_after(5.0 + phase, is_busy=True)

    assert 1.0 <= run(story()) <= NOTICED


def test_a_silent_server_is_noticed_later_while_nothing_is_sent() -> None:
    async def story() -> float:
        return await noticed_after(5.0, is_busy=False)

    assert run(story()) <= IDLE_INTERVAL + BUSY_INTERVAL + SILENT_AFTER


def test_a_server_whose_answers_took_long_has_longer_until_they_are_quick_again() -> None:
    async def story() -> tuple[float, float]:
        session = Session(answer_late)
        asyncio.get_running_loop().call_later(10.0, session.fall_silent)
        slow = await given_up_after(session)
        session = Session(answer_late)
        asyncio.get_running_loop().call_later(10.0, session.answer_quickly)
        asyncio.get_running_loop().call_later(60.0, session.fall_silent)
        quick = await given_up_after(session)
        assert slow is not None
        assert quick is not None
        return slow - 10.0, quick - 60.0

    slow, quick = run(story())

    assert slow + IDLE_INTERVAL >= SLOW_ANSWERS * LATE
    assert slow > IDLE_INTERVAL + BUSY_INTERVAL + SILENT_AFTER
    assert quick <= IDLE_INTERVAL + BUSY_INTERVAL + SILENT_AFTER


def test_a_server_that_talks_and_does_not_hear_is_given_up() -> None:
    async def story() -> float | None:
        session = Session(Pings.heard)
        return await given_up_after(session, session.pings.heard)

    seconds = run(story())

    assert seconds == pytest.approx(DEAF_AFTER, abs=2 * IDLE_INTERVAL)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_server_that_answers_is_never_given_up(is_busy: bool) -> None:
    async def story() -> float | None:
        session = Session(answer)
        return await given_up_after(session, lambda: session.output.write(b"x" * is_busy))

    assert run(story()) is None


def test_a_ping_that_waits_behind_much_that_is_taken_slowly_is_waited_for() -> None:
    async def story() -> float | None:
        session = Session(answer, rate=1e6)
        session.output.write(b"x" * 5_000_000)
        return await given_up_after(session)

    assert run(story()) is None


def test_a_link_that_takes_nothing_any_more_is_given_up_whatever_waits_in_front_of_the_ping() -> (
    None
):
    async def story() -> float | None:
        session = Session(answer, rate=0.0)
        session.output.write(b"x" * 5_000_000)
        return await given_up_after(session)

    seconds = run(story())

    assert seconds is not None
    assert seconds <= NOTICED + IDLE_INTERVAL


def test_a_server_that_takes_all_and_answers_nothing_is_given_up() -> None:
    """It stands still, and its system goes on taking what comes."""

    async def story() -> float | None:
        session = Session(ignore)
        return await given_up_after(session, lambda: session.output.write(b"beat"))

    seconds = run(story())

    assert seconds is not None
    assert seconds <= NOTICED


@pytest.mark.parametrize("stands_still", [0.5, 1.0, 3.0, 10.0])
def test_time_in_which_the_process_stood_still_is_not_the_silence_of_the_server(
    stands_still: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came meanwhile is read behind the look, and a moment late."""
    stood_still = 0.0
    monkeypatch.setattr(module, "monotonic", lambda: monotonic() + stood_still)

    async def story() -> bool:
        nonlocal stood_still
        session = Session(ignore)
        given_up = asyncio.Event()
        session.pings.watch(given_up.set)
        session.output.write(b"call")
        await asyncio.sleep(BUSY_INTERVAL + 0.1)
        stood_still = stands_still
        await asyncio.sleep(BUSY_INTERVAL / 2)
        was_given_up = given_up.is_set()
        session.react = answer
        answer(session.pings)
        await asyncio.sleep(10.0)
        session.pings.unwatch()
        assert not was_given_up
        return given_up.is_set()

    assert run(story()) is False


def test_a_new_session_starts_to_count_anew() -> None:
    async def story() -> float | None:
        session = Session(ignore)
        session.pings.watch(lambda: None)
        session.output.write(b"call")
        await asyncio.sleep(BUSY_INTERVAL + SILENT_AFTER - 0.1)
        session.pings.unwatch()
        session.pings.lose()

        return await given_up_after(session, lambda: session.output.write(b"beat"))

    seconds = run(story())

    assert seconds is not None
    assert seconds >= SILENT_AFTER


def test_nothing_is_sent_once_a_session_is_no_longer_watched() -> None:
    async def story() -> int:
        session = Session(answer)
        session.pings.watch(lambda: None)

        session.pings.unwatch()

        await asyncio.sleep(10 * IDLE_INTERVAL)
        return session.sent

    assert run(story()) == 0


def test_answers_go_to_those_who_wait_in_their_order() -> None:
    async def story() -> list[bool]:
        pings = Session(ignore).pings
        first, second = pings.send(), pings.send()

        pings.answered()

        return [first.done(), second.done()]

    assert run(story()) == [True, False]


def test_one_that_waits_no_longer_takes_its_answer_from_nobody_else() -> None:
    async def story() -> list[bool]:
        pings = Session(ignore).pings
        first, second = pings.send(), pings.send()
        first.cancel()

        pings.answered()
        after_one = second.done()
        pings.answered()

        return [after_one, second.done()]

    assert run(story()) == [False, True]


def test_the_end_of_a_session_is_told_to_all_who_wait() -> None:
    async def story() -> list[BaseException | None]:
        pings = Session(ignore).pings
        waiting = [pings.send(), pings.send()]

        pings.lose()
        pings.answered()

        return [one.exception() for one in waiting]

    assert [type(error) for error in run(story())] == [ConnectionResetError] * 2


def test_a_pong_that_nobody_waits_for_is_no_error() -> None:
    async def story() -> str:
        pings = Session(ignore).pings

        pings.answered()

        return repr(pings)

    assert run(story()) == "<Pings [waiting: 0]>"


def test_a_round_trip_is_that_of_the_last_ping_of_the_session() -> None:
    async def story() -> tuple[float, float, float]:
        session = Session(answer)
        before = session.pings.round_trip
        await session.pings.send()
        measured = session.pings.round_trip
        session.pings.lose()
        return before, measured, session.pings.round_trip

    before, measured, after = run(story())

    assert (before, after) == (0.0, 0.0)
    assert measured == pytest.approx(0.05)
