"""Sorted intervals behave like the set of the integers that they cover."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynbus.kvrouter.radix import intervals
from dynbus.kvrouter.radix.intervals import Intervals

spans = st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda span: (span[0], sum(span)))


def covered(found: Intervals) -> set[int]:
    return {position for start, end in found for position in range(start, end)}


def covering(added: list[tuple[int, int]]) -> Intervals:
    found: Intervals = []
    for start, end in added:
        intervals.add(found, start, end)
    return found


def assert_normal(found: Intervals) -> None:
    """Sorted, none empty, no two that touch."""
    assert all(start < end for start, end in found)
    assert all(before[1] < after[0] for before, after in zip(found, found[1:], strict=False))


@given(st.lists(spans, max_size=8), spans)
def test_adding_covers_the_span_and_tells_what_was_covered(
    before: list[tuple[int, int]], span: tuple[int, int]
) -> None:
    found = covering(before)
    held = covered(found)

    again = intervals.add(found, *span)

    assert covered(found) == held | set(range(*span))
    assert again == len(held & set(range(*span)))
    assert_normal(found)


@given(st.lists(spans, max_size=8), st.integers(0, 40))
def test_discarding_uncovers_one_position_only(
    before: list[tuple[int, int]], position: int
) -> None:
    found = covering(before)
    held = covered(found)

    known = intervals.discard(found, position)

    assert known == (position in held)
    assert covered(found) == held - {position}
    assert_normal(found)


@given(st.lists(spans, max_size=8), st.integers(0, 40))
def test_the_end_at_a_position_is_the_first_that_is_not_covered(
    before: list[tuple[int, int]], position: int
) -> None:
    found = covering(before)
    held = covered(found)

    end = intervals.end_at(found, position)

    if position not in held:
        assert end is None
    else:
        assert end is not None
        assert end not in held
        assert set(range(position, end)) <= held


@given(st.lists(spans, max_size=8), st.integers(0, 40))
def test_a_split_loses_nothing(before: list[tuple[int, int]], position: int) -> None:
    found = covering(before)

    below, above = intervals.split(found, position)

    assert covered(below) == {held for held in covered(found) if held < position}
    assert covered(above) == {held for held in covered(found) if held >= position}
