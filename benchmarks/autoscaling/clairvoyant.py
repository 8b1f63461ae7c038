"""An autoscaler that knows the trace: in each interval the least instances that do about as well as
any number would, started so early that they serve when they are needed.

They are searched for in the same simulator: the trace is replayed on fleets of each size, which
tells for each interval the least size that is enough; then with these sizes, and with one instance
more wherever an interval is worse than it was, until none is. Where prompts and outputs have a pool
each, the sizes of one are tried beside the most instances of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

from dynbus.llm.replay import ApartSimulation, Objective, ReplayedRequest, Simulation, Trace
from dynbus.llm.replay.scaled import Decide, ScaledFleet, ScaledResult, is_good
from dynbus.llm.scaling import Observation, PoolTarget

ENOUGH: Final = 0.97
"""The share of the requests of an interval, of those that the largest fleet serves well, that an
interval is to have."""
ROUNDS: Final = 6

Sizes = Mapping[str, list[int]]
"""The instances of each pool in each interval; those of the last one hold on."""


class Setup(NamedTuple):
    """The world of both autoscalers."""

    simulation: Simulation | ApartSimulation
    objective: Objective
    cold_start: float
    interval: float
    step: float
    """Seconds for which the clairvoyant keeps a number of instances at least."""

    def replay(self, trace: Trace, decide: Decide, first: Mapping[str, int]) -> ScaledResult:
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


def scheduled(setup: Setup, sizes: Sizes) -> Decide:
    """The decisions of who has the sizes of all intervals in a list."""

    def decide(observation: Observation) -> dict[str, PoolTarget]:
        now = observation.time
        # What is asked for now serves a cold start later, after the next decision at the latest.
        until = now + setup.cold_start + 2 * setup.interval
        first, last = int(now / setup.step), int(until / setup.step)

        def wanted(sizes: Sequence[int]) -> int:
            return max(sizes[min(first, len(sizes) - 1) : last + 1])

        return {name: PoolTarget(wanted(each), "as is known") for name, each in sizes.items()}

    return decide


def search(
    setup: Setup, trace: Trace, least: int, most: int, progress: Callable[[str], object]
) -> tuple[ScaledResult, Sizes]:
    """The replay with the least sizes, and these.

    Args:
        least, most: sizes of pools that are tried.
    """
    began = trace.requests[0].arrival
    pace = setup.simulation.speed * setup.step
    of = [int((each.arrival - began) / pace) for each in trace.requests]
    intervals = range(of[-1] + 1)
    pools = list(setup.simulation.counts)

    def counted(result: ScaledResult, counts: Callable[[ReplayedRequest], bool]) -> list[int]:
        sums = [0] * len(intervals)
        for interval, request in zip(of, result.requests, strict=True):
            sums[interval] += counts(request)
        return sums

    def goods(result: ScaledResult) -> list[int]:
        return counted(result, lambda request: is_good(request, setup.objective))

    @cache
    def constant(*counts: int) -> list[int]:
        sizes = {pool: [count] for pool, count in zip(pools, counts, strict=True)}
        good = goods(setup.replay(trace, scheduled(setup, sizes), firsts(sizes)))
        progress(f"{firsts(sizes)}: {sum(good)} of {len(of)} good")
        return good

    # Of each pool, while all others are as large as they may be.
    by_size = {
        pool: {
            size: constant(*(size if each == pool else most for each in pools))
            for size in range(least, most + 1)
        }
        for pool in pools
    }
    tried = [each for of_pool in by_size.values() for each in of_pool.values()]
    best = [max(each[k] for each in tried) for k in intervals]
    sizes = {
        pool: [
            next((n for n, good in known.items() if good[k] >= ENOUGH * best[k]), most)
            for k in intervals
        ]
        for pool, known in by_size.items()
    }
    result = setup.replay(trace, scheduled(setup, sizes), firsts(sizes))
    for _ in range(ROUNDS):
        good = goods(result)
        late = counted(result, lambda one: one.first_token - one.arrival > setup.objective.ttft)
        more = [
            (k, pool)
            for k in intervals
            if good[k] < ENOUGH * best[k]
            # The first pool computes prompts; those that are late lack it, the others the last.
            and sizes[pool := pools[0 if 2 * late[k] >= best[k] - good[k] else -1]][k] < most
        ]
        progress(f"{len(more)} of {len(intervals)} intervals need more: {sum(good)} good")
        if not more:
            break
        for k, pool in more:
            sizes[pool][k] += 1
        result = setup.replay(trace, scheduled(setup, sizes), firsts(sizes))
    return result, sizes


def firsts(sizes: Sizes) -> dict[str, int]:
    """The sizes of the first interval."""
    return {pool: each[0] for pool, each in sizes.items()}
