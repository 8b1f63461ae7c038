"""Prompts and outputs apart, in one simulation."""

from __future__ import annotations

import numpy as np
import pytest

from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.llm.disaggregated.settings import DisaggregationSettings
from dynbus.llm.mock import engine
from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.mock.timing import StepWork
from dynbus.llm.replay.apart import ApartFleet, ApartSimulation
from dynbus.llm.replay.policies import with_policy
from dynbus.llm.replay.simulation import Simulation
from dynbus.llm.replay.trace import Trace, TraceRequest

ROUTER = with_policy(RouterConfig(), "round_robin")
REMOTE = DisaggregationSettings("remote")
TOKEN_SECONDS = 1e-4
PROMPT = 640


def requests(count: int, every: float, output: int = 100) -> list[TraceRequest]:
    """Requests that share nothing."""
    return [
        TraceRequest(
            f"r{number}",
            number + 1,
            number * every,
            PROMPT,
            output,
            np.zeros(0, np.int64),
            np.arange(10, dtype=np.uint64) + np.uint64(100 * number + 1),
        )
        for number in range(count)
    ]


def fleet(
    prompts: list[str], outputs: list[str], settings: DisaggregationSettings = REMOTE
) -> ApartFleet:
    return ApartFleet(
        outputs,
        prompts,
        ROUTER,
        MockConfig(),
        seconds_per_token=TOKEN_SECONDS,
        settings=settings,
        event_delay=0.0,
        seed=0,
    )


def test_the_first_token_is_there_before_the_blocks_and_the_second_after_them() -> None:
    apart = fleet(["p"], ["d"])

    life = apart.arrive(requests(1, 1.0, output=2)[0], 0.0)
    result = apart.finish()

    moved = PROMPT * TOKEN_SECONDS
    assert life.first_token == pytest.approx(MockConfig().timing.step(_prompt(), 1))
    assert moved < life.last_token - life.first_token < moved + 0.02
    assert [len(result.busy), result.busy[0]] == [2, pytest.approx(life.first_token)]
    prompts, outputs = apart.prompts.figures("p"), apart.figures("d")
    assert (prompts["requests"], prompts["output_tokens"]) == (1, 1)
    assert (outputs["requests"], outputs["output_tokens"]) == (1, 2)
    assert prompts["requests_ended"] == outputs["requests_ended"] == 1
    assert outputs["decode_seconds"] == pytest.approx(life.last_token - life.first_token)


def _prompt() -> StepWork:
    return StepWork(1, PROMPT, PROMPT * (PROMPT - 1) // 2)


def test_a_prompt_that_is_computed_elsewhere_has_its_blocks_reserved_and_holds_up_no_tokens() -> (
    None
):
    apart = fleet(["p"], ["d"])
    apart.arrive(requests(1, 1.0)[0], 0.0)

    apart.advance(0.001)

    # As real engines count those that wait for their prompts.
    assert apart.figures("d")["running"] == 1
    assert apart.figures("d")["kv_blocks_used"] == PROMPT // MockConfig().block_size
    apart.finish()
    assert apart.figures("d")["kv_blocks_used"] == 0


@pytest.mark.parametrize("has_one", [True, False])
def test_without_a_prefill_instance_prompts_are_computed_where_they_are_decoded(
    has_one: bool,
) -> None:
    apart = fleet(["p"] if has_one else [], ["d"])
    life = apart.arrive(requests(1, 1.0)[0], 0.0)
    if has_one:
        apart.prompts.kill("p", 0.01)

    apart.finish()

    assert life.last_token > life.first_token > 0.0
    # What was lost on the way is no sign that there are too few.
    assert apart.figures("d")["prompts_turned_away"] == (not has_one)


def test_prompts_that_are_short_are_not_turned_away() -> None:
    apart = fleet([], ["d"], DisaggregationSettings(local_prompt_tokens=PROMPT))

    apart.arrive(requests(1, 1.0)[0], 0.0)
    apart.finish()

    assert apart.figures("d")["prompts_turned_away"] == 0


@pytest.mark.parametrize("killed_at", [0.001, 0.05, 0.5])
def test_what_a_decode_instance_had_goes_on_at_another_behind_its_tokens(killed_at: float) -> None:
    apart = fleet(["p"], ["a", "b"])
    lives = [apart.arrive(one, one.arrival) for one in requests(2, 0.0001)]
    apart.advance(killed_at)
    made = [life.first_token for life in lives]

    apart.kill("a", killed_at)
    apart.finish()

    assert {life.instance for life in lives} == {1}
    assert all(life.last_token > life.first_token for life in lives)
    assert all(life.first_token == was for life, was in zip(lives, made, strict=True) if was == was)
    assert apart.figures("b")["kv_blocks_used"] == 0


def test_steps_that_are_taken_together_are_those_that_are_taken_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = Trace(requests(60, 0.02, output=150), 64)
    apart = ApartSimulation(Simulation(2), 2, TOKEN_SECONDS, REMOTE)

    together = apart.run(trace, "round_robin")
    monkeypatch.setattr(engine, "QUIET_STEPS", 1)
    one_by_one = apart.run(trace, "round_robin")

    times = [
        [(each.first_token, each.last_token) for each in result.requests]
        for result in (together, one_by_one)
    ]
    assert np.array(times[0]) == pytest.approx(np.array(times[1]))
    assert together.intervals[1].sum() == one_by_one.intervals[1].sum() == 60 * 149
    assert sum(together.busy) == pytest.approx(sum(one_by_one.busy))
