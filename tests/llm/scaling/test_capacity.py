"""What engines can do by formulas: more of them are never worse, and speeds are learned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.scaling.capacity import (
    Demand,
    EngineSpeed,
    Limits,
    Line,
    ProfileLearner,
    need,
    predict,
    streams_need,
)
from dynbus.llm.scaling.observation import PoolKind

PROFILE = EngineSpeed(Line(0.1, 1e-4), Line(0.02, 1e-7))
LIMITS = Limits(ttft=2.0, itl=0.05, capacity_tokens=100_000)

kinds: st.SearchStrategy[PoolKind] = st.sampled_from(("aggregated", "prefill", "decode"))
profiles = st.builds(
    EngineSpeed,
    st.builds(Line, st.floats(0.001, 1), st.floats(1e-7, 1e-3)),
    st.builds(Line, st.floats(0.001, 0.1), st.floats(1e-9, 1e-5)),
)
demands = st.builds(
    Demand,
    st.floats(0, 200),
    st.floats(1, 20_000),
    st.floats(1, 2000),
    st.floats(1, 20_000),
)
limits = st.builds(
    Limits,
    st.floats(0.05, 20),
    st.floats(0.005, 1),
    st.integers(0, 1_000_000),
    st.integers(0, 256),
)


def test_an_idle_engine_takes_as_long_as_its_prompt_and_a_step() -> None:
    state = predict("aggregated", PROFILE, Demand(1e-9, 1000, 100, 1000), 1)

    assert state.ttft == pytest.approx(0.2 + 0.02, rel=1e-3)
    assert state.itl == pytest.approx(0.02, rel=1e-3)


def test_running_requests_are_those_of_littles_law() -> None:
    demand = Demand(1.0, 1000, 100, 1000)

    state = predict("decode", PROFILE, demand, 2)

    assert state.running == pytest.approx(demand.rate / 2 * demand.output_tokens * state.itl)


@given(kinds, profiles, demands, st.integers(1, 100))
def test_more_instances_are_never_worse(
    kind: PoolKind, profile: EngineSpeed, demand: Demand, instances: int
) -> None:
    few, more = (predict(kind, profile, demand, n) for n in (instances, instances + 1))

    assert more.busy <= few.busy
    assert more.ttft <= few.ttft * (1 + 1e-9)
    assert more.itl <= few.itl * (1 + 1e-9)
    assert more.running <= few.running * (1 + 1e-9)


@given(kinds, profiles, demands, limits)
def test_the_need_is_the_least_that_keeps_the_objectives_that_can_be_kept(
    kind: PoolKind, profile: EngineSpeed, demand: Demand, limits: Limits
) -> None:
    needed = need(kind, profile, demand, limits, 64)

    assert 0 <= needed.instances <= 64
    assert (needed.instances == 0) == (demand.rate == 0.0)
    if needed.instances > 1 and not needed.out_of_reach:
        fewer = predict(kind, profile, demand, needed.instances - 1)
        context = fewer.running * demand.context_tokens
        assert (
            fewer.busy >= 1.0
            or fewer.ttft > limits.ttft
            or fewer.itl > limits.itl
            or context > limits.context_tokens
            or (limits.slots and fewer.running > 0.9 * limits.slots)
        )


@given(kinds, profiles, demands, limits)
def test_a_higher_rate_never_needs_fewer(
    kind: PoolKind, profile: EngineSpeed, demand: Demand, limits: Limits
) -> None:
    double = demand._replace(rate=2 * demand.rate)

    assert (
        need(kind, profile, demand, limits, 64).instances
        <= need(kind, profile, double, limits, 64).instances
    )


@pytest.mark.parametrize("rate", [0.5, 5.0, 20.0, 80.0])
def test_an_objective_that_is_just_missed_takes_about_as_many_as_one_that_is_just_kept(
    rate: float,
) -> None:
    demand = Demand(rate, 1000, 10, 1000)
    idle = predict("aggregated", PROFILE, Demand(1e-9, 1000, 10, 1000), 1).ttft

    kept = need("aggregated", PROFILE, demand, LIMITS._replace(ttft=1.01 * idle), 64)
    missed = need("aggregated", PROFILE, demand, LIMITS._replace(ttft=0.99 * idle), 64)

    assert (kept.out_of_reach, missed.out_of_reach) == ((), ("ttft",))
    assert kept.instances / 3 <= missed.instances <= kept.instances


@pytest.mark.parametrize(
    ("running", "context", "needed"),
    [(0, 0.0, 0), (1, 10.0, 1), (50, 89_000.0, 1), (50, 91_000.0, 2)],
)
def test_streams_need_the_room_that_they_have(running: int, context: float, needed: int) -> None:
    assert streams_need("aggregated", PROFILE, running, context, LIMITS) == needed


def test_streams_need_their_slots() -> None:
    assert streams_need("decode", PROFILE, 9, 900.0, LIMITS._replace(slots=4)) == 3


def test_a_profile_is_that_of_the_measurements_once_there_are_many() -> None:
    learner = ProfileLearner(EngineSpeed())

    for number in range(400):
        tokens = 500.0 + 10 * (number % 100)
        learner.note_first_tokens(tokens, PROFILE.prefill.at(tokens), 5, 5.0)
        context = 10_000.0 + 500 * (number % 100)
        learner.note_steps(context, PROFILE.decode.at(context), 20, 5.0)

    assert learner.profile.prefill.at(1000) == pytest.approx(PROFILE.prefill.at(1000), rel=0.1)
    assert learner.profile.decode.at(30_000) == pytest.approx(PROFILE.decode.at(30_000), rel=0.1)


def test_waits_among_the_measurements_make_no_engine_slow() -> None:
    learner = ProfileLearner(EngineSpeed())

    for number in range(400):
        wait = 5.0 if number % 5 == 0 else 0.0
        learner.note_first_tokens(1000.0, 0.2 + wait, 5, 5.0)

    assert learner.profile.prefill.at(1000) < 0.5


@given(profiles, st.lists(st.tuples(st.floats(1, 1e6), st.floats(1e-4, 100)), max_size=30))
def test_whatever_is_measured_no_speed_is_below_zero(
    prior: EngineSpeed, measured: list[tuple[float, float]]
) -> None:
    learner = ProfileLearner(prior)

    for x, seconds in measured:
        learner.note_first_tokens(x, seconds, 3, 5.0)
        learner.note_steps(x, seconds, 3, 5.0)

    assert min(*learner.profile.prefill, *learner.profile.decode) > 0.0


def test_figures_beyond_what_a_float_tells_apart_leave_what_was_known() -> None:
    learner = ProfileLearner(EngineSpeed())

    learner.note_first_tokens(1000.0, 0.5, 10**20, 5.0)

    assert learner.profile == EngineSpeed()
