"""Plans of faults are data: drawn from a seed, written and read, and made shorter."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dynbus import ConfigError
from dynbus.actors.simulation.plan import (
    SECONDS,
    Fault,
    Kind,
    Plan,
    draw_plan,
    read_plan,
    shorten,
    write_plan,
)

shares = st.floats(0, 1).map(lambda value: round(value, 4))
faults = st.builds(
    Fault,
    at=st.floats(0, 10).map(lambda value: round(value, 3)),
    kind=st.sampled_from(Kind),
    pick=shares,
    lasts=st.floats(0, 10).map(lambda value: round(value, 3)),
    manner=shares,
)
plans: st.SearchStrategy[Plan] = st.lists(faults, max_size=12).map(
    lambda drawn: tuple(sorted(drawn, key=lambda fault: fault.at))
)


def draw(seed: int, kinds: dict[Kind, float] | None = None) -> Plan:
    weights = dict.fromkeys(Kind, 1.0) if kinds is None else kinds
    return draw_plan(random.Random(seed), weights, seconds=8.0, most=6)


def test_a_seed_draws_the_same_plan_each_time() -> None:
    drawn = [draw(seed) for seed in range(50)]

    assert drawn == [draw(seed) for seed in range(50)]
    assert len(set(drawn)) > 40


def test_a_plan_has_the_kinds_that_were_asked_for_in_their_bounds() -> None:
    drawn = [fault for seed in range(300) for fault in draw(seed)]

    assert {fault.kind for fault in drawn} == set(Kind)
    for fault in drawn:
        low, high = SECONDS[fault.kind]
        assert 0 <= fault.at <= 8.0
        assert low <= fault.lasts <= high
    only = {fault.kind for seed in range(50) for fault in draw(seed, {Kind.KILL: 1.0})}
    assert only == {Kind.KILL}


def test_without_kinds_there_are_no_faults() -> None:
    assert draw(1, {}) == ()


@given(plans)
def test_a_plan_that_is_written_is_read_as_it_was(plan: Plan) -> None:
    assert read_plan(write_plan(plan)) == plan


def test_a_text_that_is_no_plan_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="is no plan: .* give the one that a failure shows"):
        read_plan('[{"at": 1, "kind": "earthquake"}]')


@given(plans, st.sampled_from(Kind))
def test_a_plan_is_reduced_to_the_one_fault_that_matters(plan: Plan, kind: Kind) -> None:
    def fails(candidate: Plan) -> bool:
        return any(fault.kind is kind for fault in candidate)

    assume(fails(plan))
    shortest, _ = shorten(plan, fails, tries=1000)

    assert [fault.kind for fault in shortest] == [kind]


@given(plans)
def test_a_fault_that_matters_is_made_short_and_soon(plan: Plan) -> None:
    shortest, _ = shorten(plan, lambda candidate: bool(candidate), tries=1000)

    assert len(shortest) == min(1, len(plan))
    assert all(fault.at < 0.02 and fault.lasts < 0.02 for fault in shortest)


@given(plans, st.integers(0, 20))
def test_no_more_tries_are_made_than_are_allowed(plan: Plan, tries: int) -> None:
    made: list[Plan] = []

    def fails(candidate: Plan) -> bool:
        made.append(candidate)
        return True

    _, used = shorten(plan, fails, tries=tries)

    assert used == len(made) <= tries
