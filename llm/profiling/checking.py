"""The error of a profile: traffic on the engine, and the same in a simulation with the profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.mock.profile import EngineProfile, HeldOutError
from dynbus.llm.replay import Simulation

from .bench import EngineBench, Progress, Times, collected_once
from .measured_engine import POLICY, with_vocabulary
from .traffic import TrafficShape, draw_traffic

MEAN_GOAL: Final = 0.10
"""The largest error of the means that a profile is to have."""
P99_GOAL: Final = 0.20
"""The largest error of the 99th percentiles."""


def error_of(predicted: Times, measured: Times, load: float) -> HeldOutError:
    """The relative error of the times that a simulation says.

    Raises:
        ValueError: what was measured took no time.
    """
    return HeldOutError(
        len(measured.ttft),
        load,
        _error(predicted.ttft.mean(), measured.ttft.mean()),
        _error(np.percentile(predicted.ttft, 99), np.percentile(measured.ttft, 99)),
        _error(predicted.tpot.mean(), measured.tpot.mean()),
        _error(np.percentile(predicted.tpot, 99), np.percentile(measured.tpot, 99)),
    )


def _error(predicted: float | np.floating, measured: float | np.floating) -> float:
    if not measured > 0.0:
        raise ValueError(
            "tokens of the requests that are held out came at once, in no time: no error of that "
            "can be told"
        )
    return float(predicted) / float(measured) - 1.0


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The traffic that a profile is checked with.

    Attributes:
        shape: of its requests.
        requests: in each run.
        loads: of each run, as a share of what the engine can do at most.
        seed: of the traffic of the first run.
    """

    shape: TrafficShape
    requests: int = 300
    loads: Sequence[float] = (0.3, 0.5, 0.7)
    seed: int = 1


async def check_profile(
    profile: EngineProfile,
    bench: EngineBench,
    held_out: HeldOut,
    progress: Progress | None = None,
) -> list[HeldOutError]:
    """The errors of a profile on traffic that it was not fitted to.

    Args:
        bench: the one on which the profile was measured.
        progress: is told how many requests have arrived, of how many.

    Raises:
        OutsideProfile: the traffic has steps that the profile was not fitted to.
        ValueError: no request of it has two tokens, or tokens came in no time.
    """
    config = MockConfig(**profile.size(), timing=profile.timing())
    simulation = Simulation(1, config)
    errors: list[HeldOutError] = []
    count = held_out.requests
    total = count * len(held_out.loads)
    with collected_once():
        for number, load in enumerate(held_out.loads):
            drawn = draw_traffic(
                held_out.shape, count, profile.block_size, seed=held_out.seed + number
            )
            if all(one.output_tokens < 2 for one in drawn.requests):
                raise ValueError(
                    "no request that is held out has two tokens: give shorter prompts or longer "
                    "outputs"
                )
            # The engine's cache has the prompts of the runs before.
            trace, prompts = with_vocabulary(drawn, bench.limits.vocabulary, salt=number)
            offered = replace(simulation, speed=load * simulation.saturating_speed(trace))
            tell = partial(_tell, progress, number * count, total)
            measured = await bench.serve(offered, trace, prompts, tell)
            predicted = Times.of(offered.run(trace, POLICY).requests)
            errors.append(error_of(predicted, measured, load))
    return errors


def _tell(progress: Progress | None, before: int, total: int, done: int) -> None:
    if progress is not None:
        progress(before + done, total)


def misses(errors: Sequence[HeldOutError]) -> list[str]:
    """The goals that a profile misses, in words."""
    missed: list[str] = []
    for each in errors:
        for name, error, goal in (
            ("mean TTFT", each.ttft_mean, MEAN_GOAL),
            ("p99 TTFT", each.ttft_p99, P99_GOAL),
            ("mean TPOT", each.tpot_mean, MEAN_GOAL),
            ("p99 TPOT", each.tpot_p99, P99_GOAL),
        ):
            if abs(error) > goal:
                missed.append(f"{name} at load {each.load:g} by {error:+.1%}, goal {goal:.0%}")
    return missed
