"""The checker notices everything that a stream must not do, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.chaos.checker import (
    BUCKETS,
    EXAMPLES,
    CallCheck,
    Checker,
    Promise,
    of_items,
    spread,
)

ITEMS = [b"a", b"b", b"c", b"d"]


def begun(checker: Checker, *, timeout: float | None = 10.0) -> CallCheck:
    return checker.begin("call 1", now=0.0, expected=of_items(ITEMS), pause=0.1, timeout=timeout)


def found(checker: Checker) -> dict[str, int]:
    return dict(checker.broken)


def test_a_stream_that_is_whole_and_in_time_keeps_every_promise() -> None:
    checker = Checker()

    check = begun(checker)
    for index, item in enumerate(ITEMS):
        check.item(item, 0.1 * index)
    check.end(0.5)

    assert checker.held
    assert (checker.calls, checker.items, dict(checker.ends)) == (1, 4, {"well": 1})


@pytest.mark.parametrize(
    ("items", "promise"),
    [
        ([b"a", b"c"], Promise.LOST),
        ([b"a", b"b", b"a"], Promise.DOUBLED),
        ([b"a", b"x"], Promise.WRONG),
        ([*ITEMS, b"a"], Promise.LONG),
    ],
)
def test_an_item_that_is_not_the_next_one_is_noticed(items: list[bytes], promise: Promise) -> None:
    checker = Checker()

    check = begun(checker)
    for item in items:
        check.item(item, 0.1)

    assert found(checker) == {promise.value: 1}
    assert checker.examples[0].call == "call 1"


def test_each_item_that_is_lost_or_doubled_is_counted_once() -> None:
    items = [b"%d" % number for number in range(2000)]
    checker = Checker()

    check = checker.begin("call 1", now=0.0, expected=of_items(items))
    for item in items[:10] + items[13:500] + items[498:]:
        check.item(item, 0.0)
    check.end(0.1)

    assert found(checker) == {Promise.LOST.value: 3, Promise.DOUBLED.value: 2}


def test_an_end_before_the_last_item_is_noticed() -> None:
    checker = Checker()

    check = begun(checker)
    check.item(b"a", 0.1)
    check.end(0.2)

    assert found(checker) == {Promise.SHORT.value: 1}


def test_what_comes_after_the_end_is_noticed() -> None:
    checker = Checker()

    check = begun(checker)
    check.fail(0.2, "StreamLost", "gone", allowed=True)
    check.item(b"a", 0.3)
    check.fail(0.4, "StreamLost", "gone again", allowed=True)

    assert found(checker) == {Promise.AFTER_THE_END.value: 2}


@pytest.mark.parametrize(("allowed", "broken"), [(True, {}), (False, {Promise.FAILED.value: 1})])
def test_an_error_is_counted_and_a_violation_only_where_none_may_come(
    allowed: bool, broken: dict[str, int]
) -> None:
    checker = Checker()

    begun(checker).fail(0.2, "StreamLost", "gone", allowed=allowed)

    assert (found(checker), dict(checker.ends)) == (broken, {"StreamLost": 1})


def test_an_error_without_a_type_and_a_call_that_hangs_are_noticed() -> None:
    checker = Checker()

    begun(checker).crash(0.2, "ValueError: x")
    begun(checker).hang(20.0)

    assert found(checker) == {Promise.UNTYPED.value: 1, Promise.HUNG.value: 1}


@pytest.mark.parametrize(("at", "broken"), [(11.9, {}), (12.1, {Promise.LATE.value: 1})])
def test_a_call_must_end_by_its_deadline(at: float, broken: dict[str, int]) -> None:
    checker = Checker()

    begun(checker).fail(at, "DeadlineExceeded", "late", allowed=True)

    assert found(checker) == broken


def test_each_item_too_many_is_counted_and_the_first_of_each_call_is_told() -> None:
    checker = Checker()

    for call in ("one", "another"):
        check = checker.begin(call, now=0.0, expected=of_items(ITEMS))
        for item in [b"a", b"b", b"a", b"b", b"c", b"d", b"e"]:
            check.item(item, 0.1)

    assert found(checker) == {Promise.DOUBLED.value: 4, Promise.LONG.value: 2}
    assert [(each.call, each.promise) for each in checker.examples] == [
        ("one", Promise.DOUBLED),
        ("one", Promise.LONG),
        ("another", Promise.DOUBLED),
        ("another", Promise.LONG),
    ]


def test_of_a_call_of_which_nothing_is_known_only_its_end_is_checked() -> None:
    checker = Checker()

    check = checker.begin("call 1", now=0.0)
    check.item(b"whatever", 1.0)
    check.end(2.0)

    assert checker.held


def test_a_stall_is_measured_from_the_fault_that_it_follows() -> None:
    checker = Checker()

    check = begun(checker)
    check.item(b"a", 0.1)
    checker.stalls.fault(0.15, "kill")
    checker.stalls.fault(0.6, "cut")
    check.item(b"b", 1.15)
    check.item(b"c", 1.25)

    assert checker.stalls.by_kind == {"kill": [pytest.approx(1.0)]}
    assert checker.stalls.unexplained == []


def test_an_item_that_was_on_its_way_as_the_fault_began_does_not_shorten_the_stall() -> None:
    checker = Checker()

    check = begun(checker)
    checker.stalls.fault(0.08, "kill")
    check.item(b"a", 0.1)
    check.item(b"b", 1.1)

    assert checker.stalls.by_kind == {"kill": [pytest.approx(1.02)]}


def test_a_stall_that_no_fault_preceded_is_told_apart() -> None:
    checker = Checker()

    check = begun(checker)
    checker.stalls.fault(0.3, "kill")
    check.item(b"a", 0.2)
    check.item(b"b", 0.4)
    check.item(b"c", 1.0)
    check.item(b"d", 2.5)

    assert checker.stalls.by_kind == {"kill": [pytest.approx(0.7)]}
    assert checker.stalls.unexplained == [1.5]


def test_the_stalls_of_streams_that_compute_their_items_again_are_told_apart() -> None:
    checker = Checker()

    check = checker.begin("call 1", now=0.0, pause=0.1, replays=True)
    checker.stalls.fault(0.1, "kill")
    check.item(b"a", 3.1)

    assert checker.stalls.by_kind == {"kill, replayed": [pytest.approx(3.0)]}
    assert [stall.call for stall in checker.stalls.longest] == ["call 1, item 0"]


def test_violations_are_counted_beyond_those_that_are_told() -> None:
    checker = Checker()

    for _ in range(EXAMPLES + 5):
        begun(checker).hang(1.0)

    assert (len(checker.examples), checker.broken[Promise.HUNG.value]) == (EXAMPLES, EXAMPLES + 5)


@given(st.lists(st.floats(0, 20), min_size=1))
def test_a_spread_counts_every_duration_once_and_tells_measured_ones(
    durations: list[float],
) -> None:
    told = spread(durations)

    assert told is not None
    assert told.count == len(durations) == sum(told.buckets.values())
    assert told.p50 <= told.p99 <= told.longest == round(max(durations), 3)
    assert len(told.buckets) == len(BUCKETS) + 1


def test_there_is_no_spread_of_nothing() -> None:
    assert spread([]) is None
