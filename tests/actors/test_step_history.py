"""The decisions of a job that goes on with what its earlier tries have finished."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus import StepMismatch
from dynbus.actors.serving.step_history import (
    SIGNAL,
    SLEEP,
    STEP,
    Begin,
    FinishedStep,
    StepHistory,
    how_to_begin,
)
from dynbus.bus.work_queue import RunPhase, RunState


def finished(kind: str, name: str, sequence: int = 0) -> FinishedStep:
    return FinishedStep(kind, name, msgspec.Raw(b"1"), sequence)


def test_steps_are_known_by_their_places() -> None:
    charged = finished(STEP, "charge")
    history = StepHistory({0: charged})

    assert history.reach(STEP, "charge") == (0, charged)
    assert history.reach(STEP, "charge") == (1, None)


def test_another_step_at_a_finished_place_is_refused() -> None:
    with pytest.raises(StepMismatch, match="step 1 of this job was sleep when it ran before, and"):
        StepHistory({0: finished(SLEEP, "")}).reach(STEP, "charge")


@given(st.permutations(range(4)), st.integers(0, 4))
def test_steps_side_by_side_may_finish_in_any_order(order: list[int], count: int) -> None:
    done = {at: finished(STEP, f"s{at}") for at in order[:count]}
    history = StepHistory(done)

    assert [history.reach(STEP, f"s{at}") for at in range(4)] == [
        (at, done.get(at)) for at in range(4)
    ]


def test_each_signal_is_taken_once() -> None:
    history = StepHistory({0: finished(SIGNAL, "go", 7), 1: finished(SIGNAL, "stop", 9)})
    assert (history.taken_signals("go"), history.taken_signals("no")) == (7, 0)

    history.finish(2, finished(SIGNAL, "go", 12))

    assert history.taken_signals("go") == 12


SEQUENCES = st.integers(1, 4)
STATES = st.none() | st.builds(RunState, st.sampled_from(RunPhase), SEQUENCES, st.just(1))


@given(STATES, st.sets(SEQUENCES, min_size=1))
def test_of_the_messages_of_a_job_one_at_least_may_run_it(
    state: RunState | None, queued: set[int]
) -> None:
    begins = {own: how_to_begin(state, own, queued) for own in queued}

    assert any(begin is not Begin.DROP for begin in begins.values())


@given(STATES, st.sets(SEQUENCES, min_size=1))
def test_of_the_messages_of_a_job_that_waited_one_at_most_runs_it_without_asking(
    state: RunState | None, queued: set[int]
) -> None:
    begins = [how_to_begin(state, own, queued) for own in queued]

    assert state is None or begins.count(Begin.RUN) <= 1


@pytest.mark.parametrize(
    ("state", "own", "queued", "begin"),
    [
        (None, 5, (5,), Begin.RUN),
        (RunState(RunPhase.RUNNING, 5, 1), 5, (5,), Begin.RUN),
        (RunState(RunPhase.RUNNING, 5, 1), 9, (5, 9), Begin.DROP),
        (RunState(RunPhase.RUNNING, 5, 1), 9, (9,), Begin.CLAIM),
        (RunState(RunPhase.WAITING, 5, 1), 5, (5,), Begin.CLAIM),
        (RunState(RunPhase.WOKEN, 5, 1), 9, (5, 9), Begin.CLAIM),
        (RunState(RunPhase.WOKEN, 5, 1), 5, (5, 9), Begin.DROP),
        # Its waker died before it had put the copy.
        (RunState(RunPhase.WOKEN, 5, 1), 5, (5,), Begin.CLAIM),
        # It was dropped while it was on its way to its taker.
        (RunState(RunPhase.WAITING, 9, 2), 5, (9,), Begin.DROP),
        (RunState(RunPhase.WAITING, 9, 2), 5, (), Begin.CLAIM),
    ],
)
def test_which_message_runs_a_job(
    state: RunState | None, own: int, queued: tuple[int, ...], begin: Begin
) -> None:
    assert how_to_begin(state, own, queued) is begin
