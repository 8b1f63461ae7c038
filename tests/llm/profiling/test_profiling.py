"""An engine is measured by its steps, and its profile checked on traffic that was not fitted.

The engine is a mock whose times are known, and the clock of what it computes stands still.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.llm.profiles import made_profile

from dynbus.llm.engine import EngineLimits
from dynbus.llm.mock import EngineProfile, MockConfig, MockEngine
from dynbus.llm.profiling import (
    Effort,
    HeldOut,
    Measured,
    SteppedBench,
    TrafficShape,
    check_profile,
    draw_traffic,
    make_profile,
    measure,
    misses,
    with_vocabulary,
)
from dynbus.llm.profiling.batches import batch_sizes, batches_for
from dynbus.llm.profiling.bench import Times
from dynbus.llm.profiling.checking import error_of
from dynbus.llm.replay import Trace

SHAPE = TrafficShape(prompt_tokens=60.0, output_tokens=12.0, longest=500)


def stopped() -> float:
    return 0.0


def engine_of(profile: EngineProfile, *, slower: float = 1.0, **size: int) -> MockEngine:
    timing = profile.timing(1.0 / slower)
    return MockEngine(MockConfig(**profile.size(**size), timing=timing, chunked_prefill=True))


def measured_steps() -> list[Measured]:
    bench = SteppedBench(engine_of(made_profile()), clock=stopped)
    return asyncio.run(measure(bench, Effort(400, repeats=1)))


def profile_of(measured: list[Measured]) -> EngineProfile:
    limits = engine_of(made_profile()).limits
    return make_profile(measured, limits, engine="e", model="m", how="steps", context=400)


def test_the_profile_of_an_engine_says_what_its_steps_take() -> None:
    measured = measured_steps()

    profile = profile_of(measured)

    timing = profile.timing()
    errors = [timing.step(one.works[0], 0) / one.seconds - 1.0 for one in measured]
    assert max(map(abs, errors)) < 0.001
    assert profile.range.sequences == 4
    assert profile.range.prompt_tokens == 256
    assert profile.range.context_tokens > 4 * 350
    assert profile.context_length == 400


def test_requests_that_were_held_out_take_what_the_simulation_says() -> None:
    profile = profile_of(measured_steps())
    held_out = HeldOut(TrafficShape(60.0, 12.0, 300), requests=60, loads=(0.3, 0.8))

    bench = SteppedBench(engine_of(made_profile()), clock=stopped)
    errors = asyncio.run(check_profile(profile, bench, held_out))

    assert [(each.requests, each.load) for each in errors] == [(60, 0.3), (60, 0.8)]
    assert misses(errors) == []
    assert max(abs(each.ttft_mean) for each in errors) < 0.001


def test_an_engine_that_became_slower_misses_the_goals() -> None:
    profile = made_profile()
    held_out = HeldOut(SHAPE, requests=60, loads=(0.3,))

    bench = SteppedBench(engine_of(profile, slower=1.5), clock=stopped)
    errors = asyncio.run(check_profile(profile, bench, held_out))

    # Queues make it more than the third that each step takes longer.
    assert -0.7 < errors[0].tpot_mean < -1 / 3 + 0.01
    assert "mean TPOT at load 0.3" in " ".join(misses(errors))


def test_an_engine_that_batches_in_another_way_is_refused() -> None:
    profile = made_profile()
    config = MockConfig(**profile.size(), timing=profile.timing(), chunked_prefill=False)

    with pytest.raises(ValueError, match="the engine's batching is not that of dynbus.llm.engine"):
        asyncio.run(
            measure(SteppedBench(MockEngine(config), clock=stopped), Effort(1000, repeats=1))
        )


def test_batches_are_of_all_sizes_and_fit_into_the_cache() -> None:
    limits = EngineLimits(16, 200, 24, 128, 4096)

    batches = list(batches_for(limits, 1000))

    assert {len(batch.arrivals) for batch in batches} >= {*range(1, 17), 24}
    together = [each for each in batches if {at for at, _, _ in each.arrivals} == {0}]
    assert max(max(length for _, length, _ in batch.arrivals) for batch in together) == 988
    assert all(
        len(batch.arrivals) == 1 or sum(each[1] for each in batch.arrivals) <= 3200
        for batch in together
    )
    assert batch_sizes(100) == [*range(1, 17), 24, 32, 48, 64, 96, 100]


@pytest.mark.parametrize(
    ("limits", "context"),
    [
        (EngineLimits(16, 4096, 16, 64, 512), 2048),
        (EngineLimits(16, 4096, 16, 128, 128), 256),
        (EngineLimits(16, 10, 8, 64, 4096), 256),
        (EngineLimits(16, 4096, 1, 64, 512), 4096),
        (EngineLimits(16, 1, 2, 64, 4096), 64),
    ],
)
def test_no_request_of_a_batch_is_longer_than_the_engine_takes(
    limits: EngineLimits, context: int
) -> None:
    longest = min(context, limits.context_length, limits.blocks * limits.block_size)
    sizes = [
        prompt + output
        for batch in batches_for(limits, context)
        for _, prompt, output in batch.arrivals
    ]

    assert max(sizes) == longest


def test_a_context_without_room_for_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="context = 8"):
        list(batches_for(EngineLimits(16, 200, 4, 128, 4096), 8))


def test_drawn_traffic_is_what_its_seed_says() -> None:
    first, again, other = (draw_traffic(SHAPE, 400, 16, seed=seed) for seed in (1, 1, 2))

    def lines(trace: Trace) -> list[tuple[float, int, int]]:
        return [(one.arrival, one.prompt_tokens, one.output_tokens) for one in trace.requests]

    assert lines(first) == lines(again) != lines(other)
    assert first.requests[0].arrival == 0.0
    assert all(one.prompt_tokens + one.output_tokens <= 500 for one in first.requests)
    mean = sum(one.prompt_tokens for one in first.requests) / 400
    assert mean == pytest.approx(60.0, rel=0.15)
    beginnings = [tuple(one.block_hashes[:1]) for one in first.requests if len(one.block_hashes)]
    assert len(set(beginnings)) < len(beginnings)


def test_prompts_of_a_small_vocabulary_share_what_they_shared() -> None:
    drawn = draw_traffic(SHAPE, 100, 16, seed=1)

    trace, prompts = with_vocabulary(drawn, 300)

    assert all(0 <= token < 300 for prompt in prompts.values() for token in prompt)
    before = [one.block_hashes.tolist() for one in drawn.requests]
    after = [one.block_hashes.tolist() for one in trace.requests]
    renamed = {
        b: a for old, new in zip(before, after, strict=True) for b, a in zip(old, new, strict=True)
    }
    assert [[renamed[one] for one in old] for old in before] == after
    assert len(set(renamed.values())) == len(renamed)


def test_of_tokens_that_came_in_no_time_no_error_is_told() -> None:
    times = Times(np.array([0.1, 0.2]), np.array([0.01, 0.02]))
    at_once = Times(np.array([0.1, 0.2]), np.array([0.0, 0.0]))

    with pytest.raises(ValueError, match="came at once, in no time"):
        error_of(times, at_once, 0.5)
