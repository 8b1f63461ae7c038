"""A batch begins when it is full or its first call is due, and a place is free."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.serving.gathering import Gathering


def gathering(most: int = 3, wait: float = 1.0, concurrency: int | None = 1) -> Gathering[str]:
    return Gathering(most, wait, concurrency)


def add(gathering: Gathering[str], *calls: str, key: object = None, now: float = 0.0) -> None:
    for call in calls:
        gathering.add(call, key, now, None)


def test_a_full_batch_begins_at_once() -> None:
    calls = gathering(most=2)

    add(calls, "a", "b")

    assert calls.next_due() == -math.inf
    assert calls.take(0.0) == [["a", "b"]]
    assert (len(calls), calls.running) == (0, 1)


def test_what_is_not_full_begins_when_its_first_call_has_waited() -> None:
    calls = gathering(most=3, wait=1.0)
    add(calls, "a", now=5.0)
    add(calls, "b", now=5.5)

    assert calls.take(5.9) == []
    assert calls.next_due() == 6.0
    assert calls.take(6.0) == [["a", "b"]]


def test_what_comes_while_no_place_is_free_goes_together_with_the_next() -> None:
    calls = gathering(most=4, wait=0.0)
    add(calls, "a")
    assert calls.take(0.0) == [["a"]]
    add(calls, "b", "c", "d")

    assert (calls.take(1.0), calls.next_due()) == ([], None)

    calls.ended()
    assert calls.take(1.0) == [["b", "c", "d"]]


def test_calls_of_different_keys_never_go_together() -> None:
    calls = gathering(most=2, concurrency=None)
    add(calls, "a", "c", key="x")
    add(calls, "b", key="y")

    assert calls.take(0.0) == [["a", "c"]]
    assert calls.take(1.0) == [["b"]]


def test_the_batch_whose_first_call_came_first_begins_first() -> None:
    calls = gathering(most=2, concurrency=1)
    add(calls, "slow", key="x", now=0.0)
    add(calls, "a", "b", "c", "d", key="y", now=0.5)

    assert calls.take(1.0) == [["slow"]]
    calls.ended()
    assert calls.take(1.0) == [["a", "b"]]
    calls.ended()
    assert calls.take(1.0) == [["c", "d"]]


def test_a_call_waits_for_others_for_half_of_its_time_at_most() -> None:
    calls = gathering(wait=10.0)
    add(calls, "patient")
    calls.add("hurried", None, 1.0, 3.0)
    calls.add("late", "other", 1.0, 0.5)

    assert calls.take(1.0) == [["late"]]
    calls.ended()
    assert calls.next_due() == 2.0
    assert calls.take(2.0) == [["patient", "hurried"]]


def test_a_call_that_is_withdrawn_holds_up_nobody_and_hurries_nobody() -> None:
    calls = gathering(most=2, wait=10.0)
    add(calls, "a")
    calls.add("hurried", None, 0.0, 2.0)

    assert calls.withdraw("hurried")

    assert not calls.withdraw("hurried")
    assert calls.next_due() == 10.0
    assert list(calls) == ["a"]
    assert calls.withdraw("a")
    assert (calls.next_due(), len(calls)) == (None, 0)


def test_a_call_of_a_batch_that_runs_is_not_withdrawn() -> None:
    calls = gathering(most=1)
    add(calls, "a")
    calls.take(0.0)

    assert not calls.withdraw("a")


def test_nobody_waits_for_others_when_none_come_any_longer() -> None:
    calls = gathering(wait=10.0, concurrency=2)
    add(calls, "a", key="x")

    calls.hurry()

    assert calls.take(0.0) == [["a"]]
    add(calls, "b", key="y")
    assert calls.take(0.0) == [["b"]]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("xyz"), st.none() | st.floats(0.0, 5.0)),
        st.tuples(st.just("withdraw"), st.integers(0, 200), st.none()),
        st.tuples(st.just("pass"), st.floats(0.0, 2.0), st.none()),
        st.tuples(st.just("end"), st.none(), st.none()),
    ),
    max_size=200,
)


@given(steps, st.integers(1, 5), st.floats(0.0, 3.0), st.none() | st.integers(1, 3))
def test_each_call_is_in_one_batch_of_its_key_in_order_and_none_waits_beside_a_free_place(
    plan: list[tuple[str, object, object]], most: int, wait: float, concurrency: int | None
) -> None:
    calls: Gathering[int] = Gathering(most, wait, concurrency)
    now = 0.0
    keys: list[object] = []
    due: list[float] = []
    gone: set[int] = set()
    begun: list[int] = []

    def take() -> None:
        for batch in calls.take(now):
            assert 1 <= len(batch) <= most
            assert len({keys[call] for call in batch}) == 1
            assert batch == sorted(batch)
            # Nobody of the key who came before stays behind.
            key = keys[batch[0]]
            assert all(call > batch[-1] for call in calls if keys[call] == key)
            assert len(batch) == most or min(due[call] for call in batch) <= now
            begun.extend(batch)
        assert concurrency is None or calls.running <= concurrency
        next_due = calls.next_due()
        assert next_due is None or next_due > now
        if concurrency is None or calls.running < concurrency:
            assert all(due[call] > now for call in calls)

    for step, one, two in plan:
        if step == "add":
            number = len(keys)
            keys.append(one)
            deadline = None if two is None else now + float(str(two))
            due.append(now + (wait if deadline is None else min(wait, (deadline - now) / 2)))
            calls.add(number, one, now, deadline)
        elif step == "withdraw":
            number = int(str(one))
            waits = number in list(calls)
            assert calls.withdraw(number) == waits
            gone |= {number} if waits else set()
        elif step == "pass":
            now += float(str(one))
        elif calls.running:
            calls.ended()
        take()

    waiting = list(calls)
    assert sorted([*begun, *waiting, *gone]) == list(range(len(keys)))
