"""Epochs grow, and none lies so far ahead that no true one could ever follow it."""

from __future__ import annotations

from dynbus.kvrouter.stream.event_stream import CLOCK_ALLOWANCE, EpochClock, latest_epoch

DAY = 24 * 3600.0


def test_epochs_grow_when_the_clock_stands_or_goes_back() -> None:
    times = iter([50, 50, 20])
    clock = EpochClock(lambda: next(times))

    assert [clock.next(), clock.next(), clock.next(above=90)] == [50, 51, 91]


def test_an_epoch_may_lie_a_day_ahead_of_the_time_at_which_it_was_stored() -> None:
    stored = 1_700_000_000.0

    assert latest_epoch(stored) == int((stored + DAY) * 1e9)


def test_what_lies_too_far_ahead_is_not_outdone_since_no_index_would_take_it() -> None:
    clock = EpochClock(lambda: 100)

    last = clock.next(above=100 + CLOCK_ALLOWANCE)
    forged = EpochClock(lambda: 100).next(above=101 + CLOCK_ALLOWANCE)

    assert last == 101 + CLOCK_ALLOWANCE
    assert forged == 100
    assert clock.is_credible(100 + CLOCK_ALLOWANCE)
    assert not clock.is_credible(101 + CLOCK_ALLOWANCE)


def test_a_clock_that_was_days_ahead_is_believed_again_once_it_is_set() -> None:
    times = iter([3 * CLOCK_ALLOWANCE, 50])
    clock = EpochClock(lambda: next(times))

    assert [clock.next(), clock.next()] == [3 * CLOCK_ALLOWANCE, 50]


def test_an_epoch_of_before_the_clock_was_set_back_by_days_is_not_outdone() -> None:
    times = iter([3 * CLOCK_ALLOWANCE, 50])
    clock = EpochClock(lambda: next(times))
    before = clock.next()

    assert clock.next(above=before) == 50
