"""A simulated fleet whose prompts are computed by some engines, and whose tokens by others.

What computes prompts does not wait for what decodes, so the two are replayed one after the other.
The first token is there when the prompt is computed; the blocks of the prompt follow to another
engine, which goes on when all are there. In dynbus most of them move while the rest of the prompt
is computed, so that this is later; but each prompt has the whole bandwidth, and a request that an
engine preempts while it decodes has its prompt computed anew at the cost of one token: both are
better than what happens. In which direction all of it errs is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.mock.timing import StepTiming, StepWork
from dynbus.llm.replay import ReplayResult, Simulation, Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class DeliveredTiming:
    """The timing of an engine that gets its prompts computed: each is one token that it decodes."""

    timing: StepTiming

    def step(self, work: StepWork, capacity_tokens: int) -> float:
        """See `StepTiming`."""
        decoded = StepWork(
            requests=work.requests + work.prompts,
            context_tokens=work.context_tokens + work.prompt_tokens,
        )
        return self.timing.step(decoded, capacity_tokens)

    def decode_steps(
        self, context_tokens: int, requests: int, steps: int, capacity_tokens: int
    ) -> NDArray[np.float64]:
        """See `StepTiming`."""
        return self.timing.decode_steps(context_tokens, requests, steps, capacity_tokens)


@dataclass(frozen=True, slots=True)
class ApartSimulation:
    """Engines that compute prompts, and engines that decode.

    Attributes:
        simulation: of the engines that compute prompts.
        decoding: how many decode.
        seconds_per_token: that the blocks of a token take from one to the other.
    """

    simulation: Simulation
    decoding: int
    seconds_per_token: float

    def run(self, trace: Trace, policy: str) -> ReplayResult:
        """Replay a trace; raises as `Simulation.run` does."""
        first = [replace(request, output_tokens=1) for request in trace.requests]
        prompts = self.simulation.run(Trace(first, trace.block_size), policy)
        ready = [
            one.first_token + self.seconds_per_token * one.prompt_tokens for one in prompts.requests
        ]
        goes_on = [at for at, request in enumerate(trace.requests) if request.output_tokens > 1]
        goes_on.sort(key=ready.__getitem__)
        for at, request in enumerate(trace.requests):
            prompts.requests[at].output_tokens = request.output_tokens
        if not goes_on:
            return prompts
        rest = [_rest(trace.requests[at], ready[at]) for at in goes_on]
        decoding = replace(
            self.simulation,
            instances=self.decoding,
            engine=_decoding(self.simulation.engine),
            speed=1.0,
        )
        decoded = decoding.run(Trace(rest, trace.block_size), policy)
        waits = np.empty(len(goes_on))
        for number, at in enumerate(goes_on):
            one, end = prompts.requests[at], decoded.requests[number]
            waits[number] = end.first_token - one.first_token
            one.last_token = end.last_token
        seconds, counts = decoded.intervals
        return ReplayResult(
            prompts.requests,
            (
                np.concatenate((seconds, waits)),
                np.concatenate((counts, np.ones(len(waits), np.int64))),
            ),
            [*prompts.busy, *decoded.busy],
            prompts.preempted + decoded.preempted,
        )


def _rest(request: TraceRequest, ready: float) -> TraceRequest:
    """The request of what is left behind the first token."""
    return replace(
        request,
        arrival=ready,
        prompt_tokens=request.prompt_tokens + 1,
        output_tokens=request.output_tokens - 1,
    )


def _decoding(engine: MockConfig) -> MockConfig:
    """The configuration of an engine whose prompts come computed, however many in a step."""
    return replace(
        engine,
        timing=DeliveredTiming(engine.timing),
        max_num_batched_tokens=max(engine.capacity_tokens, engine.max_num_batched_tokens),
        prefix_caching=False,
    )
