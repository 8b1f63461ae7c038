"""The choice of a lane for a job, and of the lanes that a taker asks."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.work_queue.lanes import (
    LOOK_AFTER,
    ORDERED_LANES,
    PRIORITY_LANES,
    Asks,
    LaneChoice,
    lane_of_key,
    lane_of_priority,
)

counts = st.integers(0, 4)


def test_jobs_have_a_lane_for_their_priority() -> None:
    assert [lane_of_priority(one) for one in (7, 1, 0, -1, -7)] == [
        "high",
        "high",
        "normal",
        "low",
        "low",
    ]


@given(st.text())
def test_a_key_has_the_lane_that_any_client_computes(key: str) -> None:
    assert lane_of_key(key) == str(zlib.crc32(key.encode()) % 16)
    assert lane_of_key(key) in ORDERED_LANES


def test_keys_are_spread_over_all_lanes() -> None:
    assert {lane_of_key(f"customer-{number}") for number in range(200)} == set(ORDERED_LANES)


def test_the_most_preferred_lane_that_has_jobs_is_asked_alone() -> None:
    choice = LaneChoice([0, 5, 5], ordered=False)

    # Of the first one nothing is known yet.
    assert choice.pick(2, [0, 0, 0], (), now=0.1).counts == {0: 1, 1: 2}
    assert choice.pick(2, [0, 0, 0], (), now=0.2) == Asks({1: 2}, [])
    choice.heard_of_job(0)
    assert choice.pick(2, [0, 0, 1], (), now=0.3) == Asks({0: 2}, [2])


def test_all_lanes_are_asked_where_none_is_known_to_have_a_job() -> None:
    choice = LaneChoice([0, 3, 0], ordered=False)
    choice.pick(2, [0, 0, 0], (), now=0.0)
    choice.heard_nothing([0, 2, 0])

    assert choice.pick(2, [0, 2, 0], (), now=0.1) == Asks({0: 2, 2: 2}, [])


def test_a_preferred_lane_is_looked_at_now_and_then_while_another_has_jobs() -> None:
    choice = LaneChoice([0, 9, 0], ordered=False)
    choice.pick(1, [0, 0, 0], (), now=0.0)

    assert choice.pick(1, [0, 0, 0], (), now=LOOK_AFTER / 2).counts == {1: 1}
    assert choice.pick(1, [0, 0, 0], (), now=LOOK_AFTER).counts == {0: 1, 1: 1}


def test_lanes_of_an_ordered_queue_take_turns() -> None:
    choice = LaneChoice([2] * 16, ordered=True)
    turns: list[int] = []
    for _ in range(17):
        (lane,) = choice.pick(1, [0] * 16, (), now=0.0).counts
        choice.delivered(lane, pending=1)
        turns.append(lane)

    assert turns == [*range(16), 0]


@given(
    st.lists(counts, min_size=16, max_size=16),
    st.integers(1, 20),
    st.sets(st.integers(0, 15)),
    st.lists(st.integers(0, 1), min_size=16, max_size=16),
)
def test_a_lane_in_order_is_asked_for_one_job_and_for_none_while_one_is_held(
    waiting: list[int], needed: int, held: set[int], asked: list[int]
) -> None:
    picked = LaneChoice(waiting, ordered=True).pick(needed, asked, held, now=0.0)

    assert not held & picked.counts.keys()
    assert all(count == 1 and not asked[lane] for lane, count in picked.counts.items())
    if needed > sum(count > 0 for count in waiting):
        # Nothing waits that a taker with time could run.
        asked_for = {lane for lane in range(16) if asked[lane]} | picked.counts.keys()
        assert set(range(16)) - held <= asked_for


@given(
    st.lists(counts, min_size=3, max_size=3),
    st.integers(0, 5),
    st.lists(counts, min_size=3, max_size=3),
)
def test_as_many_as_are_needed_are_asked_of_the_first_lane_that_has_jobs(
    waiting: list[int], needed: int, asked: list[int]
) -> None:
    choice = LaneChoice(waiting, ordered=False)
    counts = choice.pick(needed, asked, (), now=0.0).counts
    first = next((lane for lane in range(3) if waiting[lane]), None)

    if needed == 0:
        assert counts == {}
    for lane in range(len(PRIORITY_LANES)) if first is None else [first]:
        assert counts.get(lane, 0) == max(0, needed - asked[lane])
