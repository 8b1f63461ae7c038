"""A plan has the fewest engines that keep targets in simulations, and how sure that is."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.llm.profiles import made_profile

from dynbus import ConfigError
from dynbus.llm.mock.profile import EngineProfile
from dynbus.llm.planning import Configuration, Target, attained, fewest, make_plan
from dynbus.llm.planning.configuration import Engines
from dynbus.llm.planning.search import speed_errors
from dynbus.llm.profiling import TrafficShape, draw_traffic
from dynbus.llm.replay import ReplayedRequest, ReplayResult

TRACE = draw_traffic(TrafficShape(60.0, 12.0, 500), 150, 16, seed=1)
TARGETS = (Target("ttft", "p95", 0.04), Target("itl", "p95", 0.02))


def configuration(
    profile: EngineProfile | None = None, *, bandwidth: float | None = None, price: float = 1.0
) -> Configuration:
    return Configuration(
        profile or made_profile(), "round_robin", 256, bandwidth=bandwidth, price=price
    )


@given(st.integers(1, 60), st.integers(1, 50), st.integers(1, 50))
def test_the_fewest_is_found_wherever_the_search_begins(needed: int, most: int, start: int) -> None:
    asked: list[int] = []

    def is_enough(number: int) -> bool:
        asked.append(number)
        return number >= needed

    assert fewest(is_enough, most, start) == (needed if needed <= most else None)
    assert all(1 <= number <= most for number in asked)
    assert len(asked) == len(set(asked)) <= 13


def test_the_plan_keeps_the_targets_and_one_engine_less_does_not() -> None:
    plan = make_plan(configuration(price=2.5), TRACE, TARGETS, speed=60.0)

    assert plan.engines is not None
    assert plan.engines.serving > 1
    assert plan.cost == 2.5 * plan.engines.serving
    tried = {attempt.engines: attempt.seconds for attempt in plan.attempts}
    one_less = tried[Engines(plan.engines.serving - 1)]
    assert plan.seconds is not None
    assert one_less is not None
    assert all(time <= each.seconds for time, each in zip(plan.seconds, TARGETS, strict=True))
    assert any(time > each.seconds for time, each in zip(one_less, TARGETS, strict=True))


def test_the_range_is_that_of_engines_that_are_as_much_slower_as_the_profile_erred() -> None:
    sure = make_plan(configuration(made_profile(held_out=0.0)), TRACE, TARGETS, speed=60.0)
    optimist = make_plan(configuration(made_profile(held_out=-0.4)), TRACE, TARGETS, speed=60.0)

    assert sure.engines == optimist.engines
    assert (sure.least, sure.most) == (sure.total, sure.total)
    assert optimist.least == sure.total
    assert optimist.most is not None
    assert sure.total is not None
    assert optimist.most > sure.total


def test_errors_both_ways_make_an_engine_faster_and_slower() -> None:
    assert speed_errors(made_profile()) == (1.0, 1.0)
    assert speed_errors(made_profile(held_out=-0.2)) == pytest.approx((1.0, 1.25))
    assert speed_errors(made_profile(held_out=0.25)) == pytest.approx((0.8, 1.0))


def test_targets_that_no_number_keeps_have_no_engines() -> None:
    plan = make_plan(configuration(), TRACE, [Target("itl", "mean", 1e-6)], speed=60.0, allowed=4)

    assert (plan.engines, plan.cost, plan.least, plan.most) == (None, None, None, None)
    assert plan.attempts[-1].engines == Engines(4)


def test_what_is_prefilled_elsewhere_comes_when_its_blocks_have_moved() -> None:
    fast = configuration(bandwidth=1e15).run(TRACE, Engines(3, 2), speed=20.0)
    slow = configuration(bandwidth=4096e2).run(TRACE, Engines(3, 2), speed=20.0)

    firsts = [[one.first_token for one in result.requests] for result in (fast, slow)]
    # Blocks are reserved between two steps, which are others where blocks come later.
    assert firsts[0] == pytest.approx(firsts[1], abs=0.01)
    waits = [
        [one.last_token - one.first_token for one in result.requests if one.output_tokens > 1]
        for result in (fast, slow)
    ]
    # 100 blocks a second of 16 tokens each.
    prompts = [one.prompt_tokens for one in slow.requests if one.output_tokens > 1]
    assert np.mean(waits[1]) - np.mean(waits[0]) == pytest.approx(np.mean(prompts) / 1600, rel=0.15)
    tokens = sum(one.output_tokens - 1 for one in TRACE.requests)
    assert fast.intervals[1].sum() == tokens
    assert [one.output_tokens for one in fast.requests] == [
        one.output_tokens for one in TRACE.requests
    ]
    assert len(fast.busy) == 5


def test_where_others_decode_prompts_are_there_sooner_under_load() -> None:
    together = configuration().run(TRACE, Engines(3), speed=200.0)
    apart = configuration(bandwidth=1e15).run(TRACE, Engines(3, 2), speed=200.0)

    firsts = [np.mean([one.first_token for one in each.requests]) for each in (together, apart)]
    assert firsts[1] < firsts[0]


def test_prefill_and_decode_apart_have_a_number_each() -> None:
    plan = make_plan(configuration(bandwidth=1e10), TRACE, TARGETS, speed=60.0)

    assert plan.engines is not None
    assert plan.engines.decoding >= 1
    assert plan.total == plan.engines.serving + plan.engines.decoding
    assert str(plan.engines) == f"{plan.engines.serving}+{plan.engines.decoding}"
    assert plan.seconds is not None
    assert all(time <= each.seconds for time, each in zip(plan.seconds, TARGETS, strict=True))


@pytest.mark.parametrize(("metric", "seconds"), [("e2e", 0.055), ("tpot", 0.003), ("ttft", 0.025)])
def test_no_split_of_fewer_engines_keeps_a_single_target(metric: str, seconds: float) -> None:
    apart = configuration(bandwidth=1e10)
    targets = [Target(metric, "p95", seconds)]

    plan = make_plan(apart, TRACE, targets, speed=120.0, allowed=8, seeds=1)

    assert plan.total is not None
    assert plan.total > 2
    assert plan.seconds is not None
    assert plan.seconds[0] <= seconds
    for serving in range(1, plan.total - 1):
        # Of fewer engines, those with as many that decode as may be.
        fewer = Engines(serving, plan.total - 1 - serving)
        assert attained(apart.run(TRACE, fewer, speed=120.0), targets)[0] > seconds


def test_engines_that_decode_beyond_the_profile_are_not_too_few_that_compute_prompts() -> None:
    profile = made_profile()
    narrow = msgspec.structs.replace(profile.range, context_tokens=600)
    profile = msgspec.structs.replace(profile, range=narrow)
    targets = [Target("ttft", "p95", 0.05)]

    plan = make_plan(configuration(profile, bandwidth=1e10), TRACE, targets, speed=60.0, seeds=1)
    wide = make_plan(configuration(bandwidth=1e10), TRACE, targets, speed=60.0, seeds=1)

    assert plan.engines is not None
    assert wide.engines is not None
    assert plan.engines.serving == wide.engines.serving
    assert plan.engines.decoding > wide.engines.decoding


def test_fewer_engines_that_the_search_left_out_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def run(_: Configuration, __: object, engines: Engines, **___: object) -> ReplayResult:
        tried.append(engines.serving)
        # Of round_robin, that is, whose caches divide prefixes.
        first = 1.0 if engines.serving in {6, 9, 10} else 3.0
        return ReplayResult(
            [ReplayedRequest(0.0, 10, 1, 0, first_token=first, last_token=first)],
            (np.empty(0), np.empty(0, np.int64)),
            [1.0],
            0,
        )

    monkeypatch.setattr(Configuration, "run", run)

    plan = make_plan(configuration(), TRACE, [Target("ttft", "mean", 2.0)], allowed=10, seeds=1)

    assert plan.engines == Engines(6)


def test_blocks_of_an_unknown_size_cannot_be_moved() -> None:
    profile = msgspec.structs.replace(made_profile(), block_bytes=0)

    with pytest.raises(ConfigError, match="does not say how many bytes a block"):
        configuration(profile, bandwidth=1e9)


def test_numbers_of_engines_that_run_fuller_than_was_measured_are_not_enough() -> None:
    profile = made_profile()
    narrow = msgspec.structs.replace(profile.range, context_tokens=300)
    profile = msgspec.structs.replace(profile, range=narrow)

    few = make_plan(configuration(profile), TRACE, TARGETS, speed=60.0, allowed=2)

    assert few.engines is None
    assert "300 at most" in few.why_none


RESULT = ReplayResult(
    [
        ReplayedRequest(0.0, 10, 3, 0, first_token=1.0, last_token=2.0),
        ReplayedRequest(1.0, 10, 1, 0, first_token=4.0, last_token=4.0),
    ],
    (np.array([0.3, 0.7]), np.array([9, 1])),
    [1.0],
    0,
)


@pytest.mark.parametrize(
    ("metric", "statistic", "seconds"),
    [
        ("ttft", "mean", 2.0),
        ("ttft", "p50", 1.0),
        ("ttft", "p99.9", 3.0),
        ("tpot", "mean", 0.5),
        ("itl", "mean", 0.34),
        ("itl", "p90", 0.3),
        ("itl", "p95", 0.7),
        ("e2e", "p95", 3.0),
    ],
)
def test_a_target_is_measured_on_what_it_names(metric: str, statistic: str, seconds: float) -> None:
    assert attained(RESULT, [Target(metric, statistic, 1.0)]) == pytest.approx((seconds,))


@pytest.mark.parametrize(
    ("metric", "statistic", "seconds", "reason"),
    [
        ("tfft", "p95", 1.0, r"objective tfft_p95: 'tfft' is unknown \(did you mean ttft\?\)"),
        ("ttft", "max", 1.0, "'max' is no statistic: give mean, or a percentile"),
        ("ttft", "p100", 1.0, "'p100' is no statistic"),
        ("ttft", "p95", 0.0, "give more than 0"),
    ],
)
def test_a_target_that_cannot_be_is_refused(
    metric: str, statistic: str, seconds: float, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Target(metric, statistic, seconds)
