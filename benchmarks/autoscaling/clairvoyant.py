"""An autoscaler that knows the trace: in each interval the least instances that do about as well as
any number would, started so early that they serve when they are needed.

They are searched for in the same simulator: the trace is replayed on fleets of each size, which
tells for each interval the least size that is enough; then with these sizes, and with one instance
more wherever an interval is worse than it was, until none is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from dynbus.llm.replay import Objective, Simulation, Trace
from dynbus.llm.replay.scaled import Decide, ScaledFleet, ScaledResult, is_good
from dynbus.llm.scaling import Observation, PoolTarget

ENOUGH: Final = 0.97
"""The share of the requests of an interval, of those that the largest fleet serves well, that an
interval is to have."""
ROUNDS: Final = 6


class Setup(NamedTuple):
    """The world of both autoscalers."""

    simulation: Simulation
    objective: Objective
    cold_start: float
    interval: float
    step: float
    """Seconds for which the clairvoyant keeps a number of instances at least."""

    def replay(self, trace: Trace, decide: Decide, first: int) -> ScaledResult:
        """Replay a trace with an autoscaler."""
        fleet = ScaledFleet(
            self.simulation,
            "kv",
            decide,
            cold_start=self.cold_start,
            interval=self.interval,
            first=first,
        )
        return fleet.run(trace)


def scheduled(setup: Setup, sizes: Sequence[int]) -> Decide:
    """The decisions of who has the sizes of all intervals in a list."""

    def decide(observation: Observation) -> PoolTarget:
        now = observation.time
        # What is asked for now serves a cold start later, after the next decision at the latest.
        until = now + setup.cold_start + 2 * setup.interval
        first, last = int(now / setup.step), int(until / setup.step)
        wanted = sizes[min(first, len(sizes) - 1) : last + 1] or [sizes[-1]]
        return PoolTarget(max(wanted), "as is known")

    return decide


def search(
    setup: Setup, trace: Trace, least: int, most: int, progress: Callable[[str], object]
) -> tuple[ScaledResult, list[int]]:
    """The replay with the least sizes, and these.

    Args:
        least, most: sizes of fleets that are tried.
    """
    began = trace.requests[0].arrival
    pace = setup.simulation.speed * setup.step
    of = [int((each.arrival - began) / pace) for each in trace.requests]
    intervals = of[-1] + 1

    def goods(result: ScaledResult) -> list[int]:
        counts = [0] * intervals
        for interval, request in zip(of, result.requests, strict=True):
            counts[interval] += is_good(request, setup.objective)
        return counts

    by_size: dict[int, list[int]] = {}
    for size in range(least, most + 1):
        by_size[size] = goods(setup.replay(trace, scheduled(setup, [size]), size))
        progress(f"{size} instances: {sum(by_size[size])} of {len(of)} good")
    best = [max(by_size[size][k] for size in by_size) for k in range(intervals)]
    sizes = [
        next(size for size in by_size if by_size[size][k] >= ENOUGH * best[k])
        for k in range(intervals)
    ]
    result = setup.replay(trace, scheduled(setup, sizes), sizes[0])
    for _ in range(ROUNDS):
        counts = goods(result)
        bad = [k for k in range(intervals) if counts[k] < ENOUGH * best[k] and sizes[k] < most]
        progress(f"{len(bad)} of {intervals} intervals need more: {sum(counts)} good")
        if not bad:
            break
        for k in bad:
            sizes[k] += 1
        result = setup.replay(trace, scheduled(setup, sizes), sizes[0])
    return result, sizes
