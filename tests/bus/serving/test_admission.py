"""A handler runs as many calls as it allows, queues some in arrival order, refuses the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.serving.admission import Admission, Verdict

RUN, WAIT, REFUSE = Verdict


def test_calls_run_then_wait_then_are_refused() -> None:
    admission: Admission[str] = Admission(2, 1)

    verdicts = [admission.enter(call) for call in "abcd"]

    assert verdicts == [RUN, RUN, WAIT, REFUSE]
    assert repr(admission) == "<Admission [2 running, 1 waiting]>"


def test_a_concurrency_of_one_is_a_mailbox_in_arrival_order() -> None:
    admission: Admission[str] = Admission(1, None)
    for call in "abcd":
        admission.enter(call)

    order = [admission.leave() for _ in range(4)]

    assert order == ["b", "c", "d", None]
    assert admission.running == 0


def test_no_concurrency_limit_means_that_nobody_waits() -> None:
    admission: Admission[int] = Admission(None, 0)

    assert {admission.enter(call) for call in range(1000)} == {RUN}


def test_no_queue_limit_means_that_nobody_is_refused() -> None:
    admission: Admission[int] = Admission(1, None)

    verdicts = [admission.enter(call) for call in range(1000)]

    assert verdicts == [RUN] + [WAIT] * 999


def test_a_queue_of_zero_refuses_at_once() -> None:
    admission: Admission[str] = Admission(1, 0)

    assert [admission.enter(call) for call in "ab"] == [RUN, REFUSE]


def test_a_withdrawn_call_does_not_run() -> None:
    admission: Admission[str] = Admission(1, None)
    for call in "abc":
        admission.enter(call)

    assert admission.withdraw("b")
    assert admission.leave() == "c"


@pytest.mark.parametrize("call", ["a", "z"])
def test_only_a_waiting_call_can_be_withdrawn(call: str) -> None:
    admission: Admission[str] = Admission(1, None)
    admission.enter("a")

    assert not admission.withdraw(call)
    assert admission.running == 1


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(st.sampled_from(["enter", "leave", "withdraw"]), max_size=60),
)
def test_the_limits_hold_whatever_happens(concurrency: int, queue: int, steps: list[str]) -> None:
    admission: Admission[int] = Admission(concurrency, queue)
    waiting: list[int] = []
    running = 0

    for number, step in enumerate(steps):
        if step == "enter":
            verdict = admission.enter(number)
            running += verdict is RUN
            if verdict is WAIT:
                waiting.append(number)
        elif step == "leave" and running:
            following = admission.leave()
            assert following == (waiting.pop(0) if waiting else None)
            running -= following is None
        elif step == "withdraw" and waiting:
            assert admission.withdraw(waiting.pop())

        assert (admission.running, admission.waiting) == (running, len(waiting))
        assert running <= concurrency
        assert len(waiting) <= queue
        assert running == concurrency or not waiting
