"""What is the same for all policies, and the load at which a fleet has enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.replay.simulation import Simulation
from dynbus.llm.replay.trace import read_trace

EXCERPT = Path(__file__).parents[2] / "data" / "mooncake" / "conversation.jsonl"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"instances": 0}, "instances = 0"),
        ({"speed": 0.0}, "speed = 0"),
        ({"event_delay": -1.0}, "event_delay = -1"),
    ],
)
def test_a_simulation_that_cannot_be_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(Simulation(1), **changed)


def test_a_trace_with_other_blocks_is_refused() -> None:
    trace = read_trace(EXCERPT, block_size=64, limit=5)

    with pytest.raises(ValueError, match="blocks of 64 tokens and the engine of 16"):
        Simulation(1, MockConfig(block_size=16)).run(trace, "round_robin")


def test_a_trace_that_lasts_longer_than_a_clock_is_exact_is_refused() -> None:
    trace = read_trace(EXCERPT, block_size=64, limit=50)

    with pytest.raises(ValueError, match="look at its timestamp, in milliseconds"):
        Simulation(1, speed=1e-12).run(trace, "round_robin")


def test_beyond_the_saturating_speed_the_fleet_falls_behind() -> None:
    trace = read_trace(EXCERPT, block_size=64)
    simulation = Simulation(4)

    speed = simulation.saturating_speed(trace)

    def late(times: float) -> float:
        """Seconds from the last arrival to the last token, over the time of the arrivals."""
        result = replace(simulation, speed=times * speed).run(trace, "round_robin")
        arrivals = trace.duration / (times * speed)
        return (max(request.last_token for request in result.requests) - arrivals) / arrivals

    assert late(0.5) < 0.35
    assert late(2.0) > 0.9
