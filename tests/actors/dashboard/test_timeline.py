"""The time line: nothing is lost as its buckets widen, and it stays of bounded size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.dashboard.timeline import MOST_PLACES, OTHERS, Timeline, Times

MOMENTS = st.lists(st.floats(0, 2e9), min_size=1, max_size=60)


def test_what_happens_is_counted_in_its_part_of_the_time() -> None:
    line = Timeline()
    for at in (100.0, 100.9, 103.2):
        line.add(at, "begun")

    span = line.span(100.0, 104.0, 10)

    assert (span.since, span.width, span.until) == (100.0, 1.0, 104.0)
    assert [bucket.counts.get("begun", 0) for bucket in span.buckets] == [2, 0, 0, 1]
    assert line.totals == {"begun": 3}


@given(MOMENTS)
def test_all_is_kept_in_few_buckets_whenever_it_happened(moments: list[float]) -> None:
    line = Timeline(most=8)
    for at in moments:
        line.add(at, "begun")
        line.observe(at, "first", 0.1)

    since, until = line.range or (0.0, 0.0)
    span = line.span(since, until, 5)

    assert len(span.buckets) <= 5
    assert since <= min(moments)
    assert max(moments) <= until
    assert sum(one.counts.get("begun", 0) for one in span.buckets) == len(moments)
    assert sum(one.times["first"].count for one in span.buckets if one.times) == len(moments)
    assert repr(line).startswith("<Timeline [")
    assert int(repr(line).split("[")[1].split()[0]) <= 8


def test_of_one_that_goes_on_what_is_old_goes_before_anything_gets_wider() -> None:
    line = Timeline(keep=4.0, most=8)
    for at in range(100):
        line.add(float(at), "begun")

    assert line.width == 1.0
    assert [one.counts["begun"] for one in line.span(97.0, 100.0, 3).buckets] == [1, 1, 1]
    assert line.totals["begun"] == 100


@given(st.floats(0, 1e6), st.floats(0, 1e5), st.floats(0.5, 1e6))
def test_an_amount_that_is_spread_is_the_same_in_all(
    since: float, length: float, amount: float
) -> None:
    line = Timeline()

    line.spread(since, since + length, "output", amount)

    begin, end = line.range or (0.0, 0.0)
    assert since - 1 <= begin
    assert end <= since + length + 1
    counted = sum(one.counts.get("output", 0) for one in line.span(begin, end, 100).buckets)
    assert counted == pytest.approx(amount)


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_right_within_a_fortieth(values: list[float], part: float) -> None:
    one, other = Times(), Times()
    for number, value in enumerate(values):
        (one if number % 2 else other).add(value)
    one.merge(other)

    exact = sorted(values)[max(1, -int(-part * len(values) // 1)) - 1]

    assert one.quantile(part) == pytest.approx(exact, rel=0.026)


def test_where_there_is_nothing_no_quantile_is_known() -> None:
    assert Times().quantile(0.5) is None


def test_of_very_many_instances_the_further_ones_are_counted_together() -> None:
    line = Timeline()
    for number in range(MOST_PLACES + 10):
        line.place(1.0, f"i{number}")

    [bucket] = line.span(1.0, 2.0, 1).buckets

    assert len(bucket.places) == MOST_PLACES + 1
    assert bucket.places[OTHERS] == 10
