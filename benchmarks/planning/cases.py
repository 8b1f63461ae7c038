"""Drawn traffic with an objective, and the engines that it takes, by plan and for real."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.mock.profile import EngineProfile
from dynbus.llm.planning import Configuration, Plan, Target, attained, fewest, make_plan
from dynbus.llm.planning.configuration import Engines
from dynbus.llm.profiling import TrafficShape, draw_traffic, measured_fleet, with_vocabulary
from dynbus.llm.profiling.batches import plain_request
from dynbus.llm.profiling.bench import collected_once
from dynbus.llm.replay import ReplayResult, Simulation, Trace
from dynbus.llm.small import SmallConfig, SmallEngine

REQUESTS = 240
ALLOWED = 16


@dataclass(frozen=True)
class Case:
    """A drawn case.

    Attributes:
        speed: of the trace.
        prompts: of its requests.
        clock: by which engines are measured.
    """

    seed: int
    configuration: Configuration
    trace: Trace
    prompts: dict[str, list[int]]
    speed: float
    targets: tuple[Target, ...]
    clock: Callable[[], float]

    def plan(self) -> Plan:
        return make_plan(
            self.configuration, self.trace, self.targets, speed=self.speed, allowed=ALLOWED
        )

    def really(self, engines: int, make: Callable[[SmallConfig], SmallEngine]) -> tuple[float, ...]:
        """The seconds of the targets with so many engines that compute.

        Each gets the requests that the router of a simulation gives it, and computes them alone on
        the machine: engines in turn would find the processor's caches full of each other's weights.
        """
        routed = self.configuration.run(self.trace, Engines(engines), speed=self.speed)
        size = self.configuration.engine()
        alone = Simulation(1, size, speed=self.speed)
        parts: list[ReplayResult] = []
        for number in range(engines):
            requests = [
                request
                for request, life in zip(self.trace.requests, routed.requests, strict=True)
                if life.instance == number
            ]
            if not requests:
                continue
            engine = make(_small(size))
            # Memory that is used for the first time is slower.
            engine.add("warm", plain_request([1] * 200, 4))
            while engine.has_work:
                engine.step()
            fleet = measured_fleet(alone, [engine], self.prompts, clock=self.clock)
            with collected_once():
                parts.append(fleet.run(Trace(requests, self.trace.block_size), speed=self.speed))
        whole = ReplayResult(
            [request for part in parts for request in part.requests],
            (
                np.concatenate([part.intervals[0] for part in parts]),
                np.concatenate([part.intervals[1] for part in parts]),
            ),
            [busy for part in parts for busy in part.busy],
            sum(part.preempted for part in parts),
        )
        return attained(whole, self.targets)

    def fewest_really(
        self, start: int, make: Callable[[SmallConfig], SmallEngine]
    ) -> tuple[int | None, dict[int, tuple[float, ...]]]:
        """The fewest engines that keep the targets, and what each number attained."""
        known: dict[int, tuple[float, ...]] = {}

        def is_enough(engines: int) -> bool:
            if engines not in known:
                known[engines] = self.really(engines, make)
            return all(
                time <= target.seconds
                for time, target in zip(known[engines], self.targets, strict=True)
            )

        return fewest(is_enough, ALLOWED, start), known


def draw_case(
    seed: int, profile: EngineProfile, vocabulary: int, clock: Callable[[], float]
) -> Case:
    """A case of a seed; its size of engine is one that the profile was fitted to."""
    random = np.random.default_rng(seed)
    profile = msgspec.structs.replace(
        profile,
        max_num_seqs=int(random.choice([4, 8, 16])),
        max_num_batched_tokens=int(random.choice([128, 256, 512])),
    )
    blocks = int(random.choice([128, 256, 1024]))
    policy = str(random.choice(["kv", "dynamo", "round_robin"]))
    shape = TrafficShape(
        prompt_tokens=float(random.uniform(40, 220)),
        output_tokens=float(random.uniform(8, 48)),
        longest=profile.context_length,
        shared=float(random.uniform(0.0, 0.8)),
    )
    drawn = draw_traffic(shape, REQUESTS, profile.block_size, seed=seed)
    trace, prompts = with_vocabulary(drawn, vocabulary)
    configuration = Configuration(profile, policy, blocks)
    one = Simulation(1, configuration.engine()).saturating_speed(trace)
    load = float(random.uniform(1.2, 5.0))
    relaxed = (Target("ttft", "p95", 1.0), Target("itl", "p95", 1.0))
    # About what a fleet attains that has half of its engines' time left.
    easy = attained(
        configuration.run(trace, Engines(math.ceil(2 * load)), speed=load * one), relaxed
    )
    ttft, itl = (float(random.uniform(0.9, 2.5)) * each for each in easy)
    targets = (Target("ttft", "p95", ttft), Target("itl", "p95", itl))
    return Case(seed, configuration, trace, prompts, load * one, targets, clock)


def _small(size: MockConfig) -> SmallConfig:
    return SmallConfig(
        backend="numpy",
        threads=1,
        block_size=size.block_size,
        blocks=size.blocks,
        max_num_seqs=size.max_num_seqs,
        max_num_batched_tokens=size.max_num_batched_tokens,
        pooling=None,
    )


def maker(model: Path) -> Callable[[SmallConfig], SmallEngine]:
    """Makes engines of a model."""
    return lambda config: SmallEngine(model, config)
