"""An instance moves along the table of its life and nowhere else."""

from __future__ import annotations

import itertools

import pytest

from dynbus.actors.serving.instance import TRANSITIONS, InstanceState, Lifecycle

NEW, STARTING, READY, DRAINING, STOPPED = InstanceState

ALLOWED = {
    (NEW, STARTING),
    (STARTING, READY),
    (STARTING, STOPPED),
    (READY, DRAINING),
    (READY, STOPPED),
    (DRAINING, STOPPED),
}
REFUSED = sorted(
    set(itertools.product(InstanceState, repeat=2)) - ALLOWED, key=lambda pair: str(pair)
)


def at(state: InstanceState) -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.state = state
    return lifecycle


def test_an_instance_begins_as_new() -> None:
    assert repr(Lifecycle()) == "<Lifecycle new>"


def test_the_table_has_these_steps() -> None:
    assert {(source, to) for source, targets in TRANSITIONS.items() for to in targets} == ALLOWED


@pytest.mark.parametrize(("source", "target"), sorted(ALLOWED, key=str))
def test_a_step_of_the_table_is_taken(source: InstanceState, target: InstanceState) -> None:
    lifecycle = at(source)

    lifecycle.to(target)

    assert lifecycle.state is target


@pytest.mark.parametrize(("source", "target"), REFUSED)
def test_any_other_step_is_refused_and_changes_nothing(
    source: InstanceState, target: InstanceState
) -> None:
    lifecycle = at(source)

    with pytest.raises(RuntimeError) as caught:
        lifecycle.to(target)

    assert str(caught.value) == f"an instance cannot go from {source.value} to {target.value}"
    assert lifecycle.state is source
