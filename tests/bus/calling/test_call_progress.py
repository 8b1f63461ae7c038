"""What a writer is told of a call is what it may have missed, and no more."""

from __future__ import annotations

import pytest

from dynbus.bus.calling.call_progress import CallProgress
from dynbus.bus.errors import Cancelled
from dynbus.bus.protocol.wire import Credit, End, Frame, Item, Resume

WINDOW = 20_000


def progress(*items: bytes) -> CallProgress:
    """A call that was sent at 10, of which these items have arrived."""
    call = CallProgress(7, 2, window=WINDOW, max_item_bytes=1 << 20, now=10.0)
    for sequence, data in enumerate(items):
        call.reader.receive(Item(7, call.secret, 2, sequence, data))
    return call


def granted(call: CallProgress, count: int, received: int) -> Credit:
    return Credit(7, call.secret, 2, count, received)


def asked(call: CallProgress, resume_from: int, age: float) -> Resume:
    return Resume(7, call.secret, 2, resume_from, age)


@pytest.mark.parametrize(
    ("sent", "positions"),
    [
        ([0, 0, 0], []),
        ([1], []),
        ([1, 1], [0]),
        ([1, 0, 1], []),
        ([2, 5], [0]),
        ([None], []),
        ([None, None], [0]),
        ([1, 1, 1, 1], [0, 0]),
    ],
)
def test_only_a_second_heartbeat_that_tells_of_more_makes_it_ask(
    sent: list[int | None], positions: list[int]
) -> None:
    call = progress()

    said = [call.compare(figure, 12.5) for figure in sent]

    assert [frame for frame in said if frame] == [asked(call, one, 2.5) for one in positions]


def test_a_heartbeat_that_tells_of_more_counts_from_where_the_reader_is() -> None:
    call = progress()
    call.compare(2, 11.0)

    call.reader.receive(Item(7, call.secret, 2, 0, b"a"))

    assert call.compare(2, 11.5) is None
    assert call.compare(2, 12.0) == asked(call, 1, 2.0)


def test_a_gap_is_asked_about_once_for_each_position() -> None:
    call = progress()

    first, again = call.ask_once(11.0), call.ask_once(11.0)
    call.reader.receive(Item(7, call.secret, 2, 0, b"a"))

    assert first == asked(call, 0, 1.0)
    assert again is None
    assert call.ask_once(12.0) == asked(call, 1, 2.0)


def test_a_gap_of_which_a_heartbeat_told_is_asked_about_at_once() -> None:
    call = progress()

    told = call.compare(2, 11.0)

    assert told is None
    assert call.ask_once(11.5) == asked(call, 0, 1.5)
    assert call.ask_once(11.5) is None


def test_credit_is_granted_when_half_of_the_window_has_been_read() -> None:
    call = progress(b"x" * WINDOW)

    assert call.consume(9_000) is None
    assert call.consume(1_000) == granted(call, 30_000, 1)


def test_credit_is_repeated_to_a_writer_that_sends_nothing() -> None:
    call = progress(b"x" * WINDOW)
    call.consume(WINDOW)

    said = [call.compare(1, 11.0) for _ in range(3)]

    assert said == [None, granted(call, 2 * WINDOW, 1), granted(call, 2 * WINDOW, 1)]


def test_a_writer_that_was_granted_nothing_yet_is_told_of_no_credit() -> None:
    call = progress(b"x")

    assert [call.compare(1, 11.0) for _ in range(3)] == [None] * 3
    assert call.standing(11.0) == [asked(call, 1, 1.0)]


def test_a_writer_that_may_have_missed_all_is_told_of_position_and_credit() -> None:
    call = progress(b"x" * WINDOW)
    call.consume(WINDOW)

    assert call.standing(13.0) == [asked(call, 1, 3.0), granted(call, 2 * WINDOW, 1)]


@pytest.mark.parametrize("how", ["end", "error"])
def test_a_call_that_has_ended_grants_nothing(how: str) -> None:
    call = progress(b"x" * WINDOW)
    if how == "end":
        call.reader.receive(End(7, call.secret, 2, 1, None))
    else:
        call.error = Cancelled("left")

    assert not call.is_open
    assert call.consume(WINDOW) is None


def test_each_call_has_a_secret_of_its_own() -> None:
    frames: list[Frame] = [progress().cancel_frame(1.0) for _ in range(2)]

    assert frames[0] != frames[1]
