"""What is known of a handler's durations, and what that says of a call's chances."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.serving.durations import KEPT_RUNS, Durations

SECONDS = st.floats(0.001, 100.0)


def known(*seconds: float) -> Durations:
    durations = Durations()
    for one in seconds:
        durations.add(one, whole=True)
    return durations


def test_of_a_handler_that_never_ran_nothing_is_known() -> None:
    durations = Durations()

    assert (len(durations), durations.mean_held) == (0, 0.0)
    assert durations.first_end([1.0, 0.1]) == 1.0
    assert durations.needed(1.0) is None
    assert repr(durations) == "<Durations [0 runs of 0 s]>"


def test_the_chance_to_be_done_is_that_of_the_runs_that_took_no_longer() -> None:
    durations = known(0.1, 0.2, 0.3, 0.4)

    assert [durations.chance(left) for left in (0.05, 0.1, 0.35, 1.0)] == [0.0, 0.25, 0.75, 1.0]


def test_runs_that_were_cut_short_before_any_came_to_its_end_tell_nothing() -> None:
    durations = Durations()

    durations.add(0.3, whole=False)

    assert len(durations) == 0


def test_a_run_that_was_cut_short_counts_as_long_as_those_that_took_longer() -> None:
    durations = known(0.1, 1.0, 2.0)

    durations.add(0.5, whole=False)

    assert durations.chance(1.49) == 0.5
    assert durations.chance(1.5) == 0.75


def test_a_run_that_was_cut_short_after_all_that_is_known_counts_twice_its_time() -> None:
    durations = known(0.1)

    durations.add(0.5, whole=False)

    assert durations.chance(0.99) == 0.5
    assert durations.chance(1.0) == 1.0


def test_runs_that_are_given_up_early_do_not_make_a_handler_look_fast() -> None:
    durations = known(*[0.2] * 10)

    for _ in range(KEPT_RUNS):
        durations.add(0.001, whole=False)

    assert durations.chance(0.19) == 0.0
    assert durations.mean_held < 0.002


def test_a_handler_that_became_slower_is_found_out_although_all_its_runs_are_cut() -> None:
    durations = known(*[0.2] * KEPT_RUNS)

    for _ in range(KEPT_RUNS):
        durations.add(0.3, whole=False)

    assert durations.chance(0.5) == 0.0


def test_what_is_long_ago_is_forgotten() -> None:
    durations = known(*[10.0] * KEPT_RUNS, *[0.1] * KEPT_RUNS)

    assert len(durations) == KEPT_RUNS
    assert durations.chance(0.1) == 1.0


@pytest.mark.parametrize(
    ("left", "others", "worth_it"),
    [(0.2, False, True), (0.2, True, True), (0.19, False, False), (-1.0, False, False)],
)
def test_a_call_that_cannot_be_done_in_what_is_left_is_not_worth_it(
    left: float, others: bool, worth_it: bool
) -> None:
    durations = known(*[0.2] * 10)

    assert durations.is_worth_it(left, 2.0, others=others) is worth_it


def test_a_call_with_a_poor_chance_gives_way_to_others_with_a_better_one() -> None:
    durations = known(*[0.1] * 9, 1.0)

    assert durations.is_worth_it(0.5, 2.0, others=False)
    assert not durations.is_worth_it(0.5, 2.0, others=True)


def test_long_runs_do_not_begin_only_to_be_cut_for_the_sake_of_a_few_short_ones() -> None:
    durations = known(*[0.01] * 5, *[1.0] * 5)

    assert not durations.is_worth_it(0.9, 2.0, others=False)


def test_no_call_is_worth_it_where_no_known_run_is_so_short() -> None:
    durations = known(3.0, 3.0)

    assert not durations.is_worth_it(2.0, 2.0, others=False)
    assert durations.needed(2.0) is None


@pytest.mark.parametrize(
    ("ages", "first"), [([0.15, 0.1, 0.0], 0.05), ([0.19] * 8, 0.01), ([0.3], 0.3)]
)
def test_the_first_of_equal_runs_ends_when_the_oldest_does(ages: list[float], first: float) -> None:
    durations = known(*[0.2] * 10)

    assert durations.first_end(ages) == pytest.approx(first, abs=0.01)


def test_of_many_runs_of_all_lengths_the_first_ends_soon() -> None:
    durations = known(*[0.01 * step for step in range(1, 101)])

    assert durations.first_end([0.0]) == pytest.approx(0.5, abs=0.05)
    assert durations.first_end([0.0] * 8) == pytest.approx(0.1, abs=0.04)


@given(st.lists(st.tuples(SECONDS, st.booleans()), max_size=200), SECONDS, st.data())
def test_more_time_is_never_a_smaller_chance(
    runs: list[tuple[float, bool]], allowed: float, data: st.DataObject
) -> None:
    durations = Durations()
    for seconds, whole in runs:
        durations.add(seconds, whole=whole)
    ages = sorted(data.draw(st.lists(SECONDS, min_size=1, max_size=40)), reverse=True)

    chances = [durations.chance(allowed * part / 8) for part in range(9)]

    assert all(less <= more for less, more in pairwise(chances))
    assert 0.0 <= chances[-1] <= 1.0
    assert durations.first_end(ages) >= 0.0
    # With all its time a call is worth it whenever it can be done at all.
    for others in (False, True):
        assert durations.is_worth_it(allowed, allowed, others=others) is (chances[-1] > 0)
