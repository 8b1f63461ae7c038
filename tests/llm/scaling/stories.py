"""Drawn stories of a fleet that is scaled: arrivals, faults, and what must hold of every one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from random import Random
from typing import Final

import numpy as np

from dynbus.kvrouter import RouterConfig
from dynbus.llm.disaggregated.settings import DisaggregationSettings
from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.mock.timing import Timing
from dynbus.llm.replay.apart import DECODE, PREFILL, ApartSimulation
from dynbus.llm.replay.scaled import Fault, Sample, ScaledFleet, ScaledResult
from dynbus.llm.replay.simulation import POOL, Simulation
from dynbus.llm.replay.trace import Trace, TraceRequest
from dynbus.llm.scaling.capacity import FULL
from dynbus.llm.scaling.policy import PoolConfig, ScalingConfig, ScalingPolicy

BLOCK: Final = 512
ENGINE: Final = MockConfig(
    block_size=BLOCK,
    blocks=64,
    kv_events=False,
    prefix_caching=False,
    timing=Timing(speedup_ratio=0.05),
)
"""A slow engine: a few requests a minute are a load."""
CONFIG: Final = ScalingConfig(
    {POOL: PoolConfig(least=0, most=6)},
    ttft=20.0,
    itl=1.0,
    cold_start=40.0,
    drain=20.0,
    down_after=120.0,
    hold=400.0,
)
APART: Final = replace(
    CONFIG,
    pools={PREFILL: PoolConfig("prefill", 0, 6), DECODE: PoolConfig("decode", 0, 6)},
)
INTERVAL: Final = 10.0


def request(number: int, at: float, prompt: int, output: int) -> TraceRequest:
    """A request that shares nothing with another one."""
    hashes = np.arange(prompt // BLOCK, dtype=np.uint64) + np.uint64(number * 4096 + 1)
    hashes *= np.uint64(0x9E3779B97F4A7C15)
    return TraceRequest(f"r{number}", number + 1, at, prompt, output, np.zeros(0, np.int64), hashes)


def constant(rate: float, seconds: float, seed: int | None = None) -> Trace:
    """Arrivals at one rate: evenly, or with a seed at random."""
    random = Random(seed)
    at, requests = 0.0, list[TraceRequest]()
    while at < seconds:
        prompt = 1000 if seed is None else round(random.uniform(500, 1500))
        output = 50 if seed is None else round(random.uniform(20, 80))
        requests.append(request(len(requests), at, prompt, output))
        at += 1 / rate if seed is None else random.expovariate(rate)
    return Trace(requests, BLOCK)


@dataclass(frozen=True)
class Story:
    """A load and what happens beside it.

    Attributes:
        first: instances of each pool at the beginning.
        settings: of pools of prompts and of outputs.
        token_seconds: that blocks take from one to the other.
    """

    seed: int
    trace: Trace
    faults: tuple[Fault, ...] = ()
    first: int = 1
    config: ScalingConfig = CONFIG
    settings: DisaggregationSettings = DisaggregationSettings(mode="remote")
    token_seconds: float = 1e-4

    @classmethod
    def draw(cls, seed: int) -> Story:
        """The story of a seed: phases of load, and up to four faults; every third one of pools of
        prompts and of outputs."""
        random = Random(seed)
        at, requests = 0.0, list[TraceRequest]()
        for _ in range(random.randint(1, 4)):
            rate = random.choice((0.02, 0.1, 0.3, 0.6, 1.0)) * random.uniform(0.5, 1.5)
            until = at + random.uniform(60, 600)
            prompt, output = random.uniform(200, 2000), random.uniform(10, 120)
            while (at := at + random.expovariate(rate)) < until:
                sizes = random.uniform(0.3, 1.7) * prompt, random.uniform(0.3, 1.7) * output
                requests.append(request(len(requests), at, *map(round, sizes)))
            at = until + random.choice((0.0, 0.0, 300.0))
        requests = requests or [request(0, 1.0, 500, 20)]
        ends = requests[-1].arrival
        faults = [
            Fault(
                random.choice(("lost", "stuck", "dies", "hand")),
                random.uniform(0, ends),
                random.uniform(10, 300),
                random.randint(0, 6),
            )
            for _ in range(random.choice((0, 0, 1, 2, 4)))
        ]
        story = cls(seed, Trace(requests, BLOCK), tuple(faults), random.randint(0, 3))
        return story._apart(random) if seed % 3 == 2 else story

    def _apart(self, random: Random) -> Story:
        """The same with prompts and outputs apart, some with a budget for both."""
        least = {PREFILL: random.randint(0, 1), DECODE: random.randint(0, 1)}
        pools = {
            name: replace(pool, least=least[name], gpus=random.randint(1, 2))
            for name, pool in APART.pools.items()
        }
        config = replace(APART, pools=pools)
        budget = random.choice((None, None, config.least_budget, 6, 9))
        faults = [fault._replace(pool=random.choice((PREFILL, DECODE))) for fault in self.faults]
        return replace(
            self,
            config=replace(config, budget=budget),
            faults=tuple(faults),
            settings=DisaggregationSettings(
                random.choice(("auto", "remote")),
                local_prompt_tokens=random.choice((0, 512, 1500)),
            ),
            token_seconds=random.choice((1e-6, 1e-4, 1e-3)),
        )

    @property
    def idle(self) -> float:
        """Seconds after the last token in which everything must have come to rest: two changes by
        hand may still be held, one after the other."""
        config = self.config
        return 3 * (config.hold + config.settled_after) + config.down_after + 10 * INTERVAL

    def play(self) -> ScaledResult:
        """The story as it goes."""
        policy, pools = ScalingPolicy(self.config), self.config.pools
        one = Simulation(1, ENGINE, router=RouterConfig(exact=False))
        apart = ApartSimulation(one, 1, self.token_seconds, self.settings)
        fleet = ScaledFleet(
            one if POOL in pools else apart,
            "round_robin",
            policy.decide,
            cold_start=self.config.cold_start,
            interval=INTERVAL,
            faults=self.faults,
            first=dict.fromkeys(pools, self.first),
        )
        return fleet.run(self.trace, idle=self.idle)

    def broken(self, result: ScaledResult) -> list[str]:
        """The invariants that do not hold, each with its place; none where all is well."""
        problems = [*_budget(result.samples, self.config), *_turned_away(result.samples)]
        for name in self.config.pools:
            samples = of_pool(result, name)
            problems += [f"{name}: {each}" for each in self._broken_of(name, samples)]
        if any(math.isnan(each.last_token) for each in result.requests):
            problems.append("a request was lost")
        return problems

    def _broken_of(self, name: str, samples: Sequence[Sample]) -> list[str]:
        """Those of one pool."""
        pool, config = self.config.pools[name], self.config
        problems = [
            *_bounds(samples, pool),
            *_open_streams(samples, pool),
            *_frozen(samples),
            *_in_vain(samples, config),
            *_by_hand(samples, self.faults, config, pool),
        ]
        last = samples[-1]
        # What was set by hand and never starts is seen by nobody.
        is_stuck = {"hand", "stuck"} <= {fault.kind for fault in self.faults}
        counts = {last.ready, last.target.desired, pool.least if is_stuck else last.set_to}
        if counts != {pool.least}:
            problems.append(f"at the end {sorted(counts)} instead of {pool.least}")
        return problems


def of_pool(result: ScaledResult, pool: str) -> list[Sample]:
    """The samples of a pool."""
    return [each for each in result.samples if each.pool == pool]


def _is_held(sample: Sample) -> bool:
    return sample.target.reason.startswith(("held", "paused", "frozen", "waits"))


def _bounds(samples: Sequence[Sample], pool: PoolConfig) -> list[str]:
    return [
        f"{each.time}: {each.target} is out of bounds"
        for each in samples
        # What is given up is asked for again later, and below the least until then.
        if not each.target.reason.startswith("paused")
        and not pool.least <= each.target.desired <= pool.most
    ]


def _budget(samples: Sequence[Sample], config: ScalingConfig) -> list[str]:
    """Targets are beyond the budget only as far as instances are there already, or at least."""
    problems: list[str] = []
    for time, group in groupby(samples, lambda each: each.time):
        wanted = there = 0
        for each in group:
            pool, desired = config.pools[each.pool], each.target.desired
            wanted += pool.gpus * desired
            # What is held was there, and what has died of it is on its way.
            stays = desired if _is_held(each) else max(each.ready, pool.least)
            there += pool.gpus * min(desired, stays)
        if config.budget is not None and wanted > max(config.budget, there):
            problems.append(f"{time}: {wanted} GPUs of {config.budget}, and {there} are there")
    return problems


def _turned_away(samples: Sequence[Sample]) -> list[str]:
    """Prompts that no prefill instance was there for bring one, where the budget has room."""
    return [
        f"{one.time}: {one.target} though {other.turned_away} prompts were turned away"
        for one, other in pairwise(samples)
        if (one.pool, other.pool) == (PREFILL, DECODE)
        and other.turned_away
        and not one.target.desired
        and not _is_held(one)
        and "do not fit" not in one.target.reason
    ]


def _open_streams(samples: Sequence[Sample], pool: PoolConfig) -> list[str]:
    """What runs fits into the caches of those that stay, and into one at least; prompts only into
    one, as they end soon."""
    return [
        f"{each.time}: {each.target} is below what {each.running} streams need"
        for each in samples
        if not _is_held(each)
        and each.target.desired < each.ready
        and (
            (
                pool.kind != "prefill"
                and each.context_tokens > FULL * ENGINE.capacity_tokens * each.target.desired
            )
            or (each.running > 0 and each.target.desired == 0)
        )
    ]


def _frozen(samples: Sequence[Sample]) -> list[str]:
    """A target stays while its metrics are missing."""
    # What is there at the beginning is taken over.
    before = samples[0].ready
    problems: list[str] = []
    for each in samples:
        if each.is_lost and each.target.desired != before:
            problems.append(f"{each.time}: {each.target} without metrics, after {before}")
        before = each.target.desired
    return problems


def _in_vain(samples: Sequence[Sample], config: ScalingConfig) -> list[str]:
    """No target stays above what is there for longer than a start may take."""
    problems: list[str] = []
    since: float | None = None
    before: Sample | None = None
    for each in samples:
        is_waiting = each.target.desired > each.ready and not each.is_lost
        is_same = before is not None and before.target.desired == each.target.desired
        since = (since if is_same and since is not None else each.time) if is_waiting else None
        if since is not None and each.time - since > config.settled_after + 2 * INTERVAL:
            problems.append(f"{each.time}: {each.target} is waited for since {since}")
        before = each
    return problems


def _by_hand(
    samples: Sequence[Sample],
    faults: Sequence[Fault],
    config: ScalingConfig,
    pool: PoolConfig,
) -> list[str]:
    """A number that was set by hand, where all that was asked for was there, stays for `hold`;
    unless the load had another one asked for before it could be seen."""
    problems: list[str] = []
    for fault in faults:
        # Fewer than there may be are taken for lost.
        if fault.pool not in ("", samples[0].pool) or fault.instances < pool.least:
            continue
        before = [each for each in samples if each.time <= fault.at][-2:]
        after = [each for each in samples if each.time > fault.at]
        if fault.kind != "hand" or len(faults) > 1 or not before:
            continue
        if any(each.starting or each.ready != each.target.desired for each in before):
            continue
        seen = next((n for n, each in enumerate(after) if each.ready == fault.instances), None)
        asked = before[-1].target.desired
        if seen is None or fault.instances == asked:
            continue
        if any(
            (each.target.desired, each.set_to) != (asked, fault.instances) for each in after[:seen]
        ):
            continue
        until = after[seen].time + config.hold
        problems += [
            f"{each.time}: {each.target} after {fault}"
            for each in after[seen:]
            if each.time < until and each.set_to != fault.instances
        ]
    return problems


def turns(samples: Sequence[Sample]) -> int:
    """The number of times that a target went up after it went down, or down after up."""
    targets = [each.target.desired for each in samples]
    steps = [b - a for a, b in pairwise(targets) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))
