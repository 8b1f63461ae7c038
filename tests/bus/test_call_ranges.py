"""The calls of a heartbeat are told in as many messages as it takes, each judged by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.protocol.call_ranges import (
    CALL_BYTES,
    CallRange,
    covers,
    heartbeat_room,
    split_calls,
)
from dynbus.bus.protocol.wire import Heartbeat, Open, encode_batch

numbers = st.integers(0, 10**18 - 1)
calls_of_a_side = st.dictionaries(st.integers(0, 40) | numbers, st.integers(0, 2**63 - 1))


def test_what_fits_one_message_is_one_span_without_bounds() -> None:
    assert split_calls({7: 3, 8: 0}, 2) == [CallRange([(7, 3), (8, 0)], 0, None)]


def test_no_calls_at_all_are_a_span_that_says_so() -> None:
    assert split_calls({}, 5) == [CallRange([], 0, None)]


def test_more_calls_are_spans_that_follow_each_other_without_a_gap() -> None:
    assert split_calls({9: 1, 3: 2, 5: 0, 20: 4, 4: 7}, 2) == [
        CallRange([(3, 2), (4, 7)], 0, 4),
        CallRange([(5, 0), (9, 1)], 5, 19),
        CallRange([(20, 4)], 20, None),
    ]


@pytest.mark.parametrize(
    ("first", "last", "number", "covered"),
    [
        (0, None, 0, True),
        (0, None, 10**18, True),
        (5, 19, 4, False),
        (5, 19, 5, True),
        (5, 19, 19, True),
        (5, 19, 20, False),
        (20, None, 19, False),
        (9, 3, 5, False),
    ],
)
def test_a_frame_speaks_of_the_numbers_between_its_bounds_only(
    first: int, last: int | None, number: int, covered: bool
) -> None:
    assert covers(Open(1, [], [], first, last), number) is covered
    assert covers(Heartbeat(1, 0.0, False, [], first, last), number) is covered


@given(calls_of_a_side, st.integers(-1, 12))
def test_every_call_is_told_once_by_the_only_span_that_speaks_of_it(
    calls: dict[int, int], most: int
) -> None:
    ranges = split_calls(calls, most)

    assert [call for part in ranges for call in part.calls] == sorted(calls.items())
    assert all(len(part.calls) <= max(1, most) for part in ranges)
    for number in {0, *calls, *(number + 1 for number in calls)}:
        (part,) = [part for part in ranges if covers(part, number)]
        assert (number in dict(part.calls)) is (number in calls)


@given(calls_of_a_side, st.integers(1, 6), st.data())
def test_whichever_parts_are_lost_no_call_that_was_told_is_found_absent(
    calls: dict[int, int], most: int, data: st.DataObject
) -> None:
    ranges = split_calls(calls, most)
    arrived = [part for part in ranges if data.draw(st.booleans())]
    absent = {
        number
        for part in arrived
        for number in range(60)
        if covers(part, number) and number not in dict(part.calls)
    }

    assert absent.isdisjoint(calls)


@pytest.mark.parametrize("max_payload", [4096, 65536, 1 << 20])
def test_the_longest_span_fits_a_message(max_payload: int) -> None:
    sender, incarnation = f"_R.{'p' * 63}.{'c' * 32}", "i" * 32
    calls = {10**18 - 1 - number: 2**63 - 1 for number in range(60_000)}

    for part in split_calls(calls, heartbeat_room(max_payload) // CALL_BYTES):
        for frame in (
            Open(2**63 - 1, part.calls, [], part.first, part.last),
            Heartbeat(2**63 - 1, 0.25, True, part.calls, part.first, part.last),
        ):
            assert len(encode_batch(sender, incarnation, 2**32, [frame])) <= max_payload
