"""Whatever comes and goes wrong: the invariants of the autoscaler on a simulated fleet.

`scripts/test tests/llm/scaling -m soak --numprocesses 2 -s` plays 10,000 drawn stories.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Final

import pytest

from dynbus.llm.replay.apart import DECODE, PREFILL
from dynbus.llm.replay.scaled import Fault, Sample
from dynbus.llm.scaling.policy import ScalingConfig

from .stories import APART, CONFIG, INTERVAL, Story, constant, of_pool, turns

SOAKED: Final = int(os.environ.get("SCALING_STORIES", "10000"))
PER_TEST: Final = 250


def broken(first: int, last: int) -> dict[int, list[str]]:
    """The broken invariants of the stories of seeds from `first` to before `last`."""
    stories = map(Story.draw, range(first, last))
    return {each.seed: problems for each in stories if (problems := each.broken(each.play()))}


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_no_drawn_story_breaks_an_invariant(first: int) -> None:
    assert broken(first, first + 25) == {}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 100 + SOAKED, PER_TEST))
def test_none_of_ten_thousand_drawn_stories_breaks_an_invariant(first: int) -> None:
    assert broken(first, first + PER_TEST) == {}


def settled(story: Story, after: float = 900.0) -> list[list[Sample]]:
    """The samples of each pool under a constant load, once its beginning is over."""
    last = story.trace.requests[-1].arrival
    result = story.play()
    return [
        [each for each in of_pool(result, pool) if after <= each.time <= last]
        for pool in story.config.pools
    ]


both = pytest.mark.parametrize("config", [CONFIG, APART], ids=["together", "apart"])


@both
@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.8])
def test_an_even_load_leaves_the_target_where_it_is(rate: float, config: ScalingConfig) -> None:
    for samples in settled(Story(0, constant(rate, 2400.0), config=config)):
        assert len({each.target.desired for each in samples}) == 1


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
@pytest.mark.parametrize(
    ("seed", "config"),
    [(0, CONFIG), (1, CONFIG), (2, CONFIG), (3, APART)],
    ids=["0-together", "1-together", "2-together", "3-apart"],
)
def test_a_constant_load_with_chance_in_it_turns_the_target_ever_less_often(
    rate: float, seed: int, config: ScalingConfig
) -> None:
    for samples in settled(Story(0, constant(rate, 7200.0, seed), config=config)):
        _check_turns(samples)


def _check_turns(samples: Sequence[Sample]) -> None:
    changes = [b for a, b in pairwise(samples) if a.target.desired != b.target.desired]
    downs = [
        (each.time, later.time)
        for each, later in pairwise(changes)
        if each.target.reason.startswith("down") and later.target.reason.startswith("up")
    ]
    # Each time that instances were missed soon, fewer have to be enough for twice as long.
    assert turns(samples) <= 8
    assert len([up for down, up in downs if up - down < CONFIG.down_after]) <= 3


def test_instances_that_never_start_are_given_up_and_asked_for_again_ever_later() -> None:
    stuck = Fault("stuck", 0.5, 10_000.0)
    story = Story(0, constant(0.8, 2400.0), (stuck,), first=1)

    samples = story.play().samples

    pauses = [
        len(list(run)) * INTERVAL
        for is_paused, run in groupby(samples, lambda one: one.target.reason.startswith("paused"))
        if is_paused
    ]
    assert len(pauses) >= 4
    assert pauses[:-1] == sorted(pauses[:-1])
    assert pauses[0] <= CONFIG.cold_start + INTERVAL
    assert max(pauses) <= CONFIG.hold + INTERVAL


def test_a_pool_at_zero_comes_with_the_first_request_that_is_held_and_goes_again() -> None:
    samples = Story(0, constant(0.2, 300.0), first=0).play().samples

    assert [each.ready for each in samples[:2]] == [0, 0]
    assert samples[0].target.desired >= 1
    assert samples[-1].ready == 0


def test_a_pool_of_prompts_at_zero_comes_with_the_first_that_is_computed_where_it_is_decoded() -> (
    None
):
    result = Story(0, constant(0.2, 600.0), first=0, config=APART).play()

    prompts, outputs = of_pool(result, PREFILL), of_pool(result, DECODE)
    # Requests are held for those that decode; these ask in vain for prompts, and compute them.
    assert outputs[0].target.desired >= 1
    asked = next(each.time for each in prompts if each.target.desired)
    served = next(each.time for each in outputs if each.ready)
    assert 0 <= asked - served <= INTERVAL
    assert max(each.ready for each in prompts) >= 1
    assert (prompts[-1].ready, outputs[-1].ready) == (0, 0)
