"""The steps of an engine in this process, each measured, beside the work that it did.

A mock engine of the same limits is stepped beside it and tells the work: it has the same scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np

from dynbus.llm.engine import Engine, EngineLimits
from dynbus.llm.replay import Simulation
from dynbus.llm.replay.trace import Trace

from .batches import Batch, plain_request
from .bench import Measured, Times, shadow_of
from .measured_engine import measured_fleet


class SteppedBench:
    """The `EngineBench` of an engine in this process, which it steps.

    Traffic is served in virtual time: nobody waits for an arrival.

    Args:
        engine: nobody else uses it; its batching is that of `dynbus.llm.engine`.
        seed: of the prompts, which no cache has.
        clock: seconds; that of the processor's time measures on a machine that is busy otherwise.
    """

    def __init__(
        self, engine: Engine, *, seed: int = 0, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._random = np.random.default_rng(seed)
        self._requests = 0

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    async def carry_out(self, batch: Batch) -> list[Measured]:
        """See `EngineBench`."""
        engine, limits = self._engine, self._engine.limits
        shadow, works = shadow_of(limits)
        coming = sorted(batch.arrivals)
        vocabulary = min(limits.vocabulary, 1 << 31)
        steps = 0
        measured: list[Measured] = []
        while coming or engine.has_work:
            adding = 0.0
            while coming and (coming[0][0] <= steps or not engine.has_work):
                _, prompt, output = coming.pop(0)
                request = plain_request(
                    self._random.integers(0, vocabulary, prompt).tolist(), output
                )
                self._requests += 1
                name = f"m{self._requests}"
                shadow.add(name, request)
                began = self._clock()
                engine.add(name, request)
                adding += self._clock() - began
            began = self._clock()
            step = engine.step()
            seconds = self._clock() - began + step.delay
            expected = [output.request_id for output in shadow.advance().outputs]
            if [name for name, _ in step.outputs] != expected:
                raise ValueError(
                    f"step {steps} has tokens of {[name for name, _ in step.outputs]} and not of "
                    f"{expected}: the engine's batching is not that of dynbus.llm.engine, measure "
                    "its streams"
                )
            if not works[-1].prompts + works[-1].requests:
                break
            measured.append(Measured([works[-1]], adding + seconds))
            steps += 1
        return measured

    async def serve(
        self,
        simulation: Simulation,
        trace: Trace,
        prompts: Mapping[str, list[int]],
        progress: Callable[[int], None],
    ) -> Times:
        """See `EngineBench`."""
        fleet = measured_fleet(simulation, [self._engine], prompts, clock=self._clock)
        served = fleet.run(trace, speed=simulation.speed, progress=progress)
        return Times.of(served.requests)
