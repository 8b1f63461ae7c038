"""The same replay by Dynamo's simulator and by ours, figure by figure."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from dynbus.llm.replay.report import summarize
from dynbus.llm.replay.simulation import Simulation
from dynbus.llm.replay.trace import Trace

ROUTER_MODES = {"round_robin": "round_robin", "dynamo": "kv_router"}
"""Policies that both have, by our name, with Dynamo's."""

TIMEOUT = 600.0


class Figure(NamedTuple):
    """One figure of both simulators."""

    name: str
    dynbus: float
    dynamo: float

    @property
    def difference(self) -> float:
        """How much more ours is, as a part of Dynamo's."""
        return self.dynbus / self.dynamo - 1.0


def compare(
    python_dynamo: str, path: Path, trace: Trace, simulation: Simulation, policy: str
) -> list[Figure]:
    """The figures of both simulators, with Dynamo's default engine and ours, which is equal.

    Raises:
        RuntimeError: Dynamo's replay failed.
    """
    theirs = _dynamo(python_dynamo, path, simulation, policy)
    ours = summarize(policy, simulation.run(trace, policy))
    return [
        Figure("TTFT mean, ms", ours.ttft_ms.mean, theirs["mean_ttft_ms"]),
        Figure("TTFT p50, ms", ours.ttft_ms.p50, theirs["median_ttft_ms"]),
        Figure("TTFT p99, ms", ours.ttft_ms.p99, theirs["p99_ttft_ms"]),
        Figure("ITL mean, ms", ours.itl_ms.mean, theirs["mean_itl_ms"]),
        Figure("output tokens/s", ours.output_tokens_per_s, theirs["output_throughput_tok_s"]),
        # Dynamo's other rate counts requests that were preempted several times.
        Figure("hit rate", ours.hit_rate, theirs["first_admission_prefix_cache_reused_ratio"]),
        Figure("duration, s", ours.duration_s, theirs["duration_ms"] / 1000.0),
    ]


def _dynamo(python_dynamo: str, path: Path, simulation: Simulation, policy: str) -> dict[str, Any]:
    asked = {
        "trace": str(path.resolve()),
        "instances": simulation.instances,
        "speed": simulation.speed,
        "router_mode": ROUTER_MODES[policy],
        "event_delay_ms": simulation.event_delay * 1000.0,
    }
    done = subprocess.run(
        [python_dynamo, "-m", "benchmarks.routing.dynamo_replay"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
        env={**os.environ, "DYN_LOG": "error"},
    )
    if done.returncode:
        raise RuntimeError(f"Dynamo's replay failed: {done.stderr.strip()[-500:]}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary
