"""An engine that computes, in the virtual time of a simulated fleet: a step takes what it takes.

Engines of a fleet take turns, so that each step has the machine alone, and the clock of each goes
on by the seconds that its own steps took: a fleet of any size on a machine for one engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter import block_hashes
from dynbus.llm.engine import Engine, EngineLoad
from dynbus.llm.mock.engine import Output, StepResult
from dynbus.llm.mock.sequence import GrowingSequence
from dynbus.llm.replay import Fleet, Simulation
from dynbus.llm.replay.trace import Trace, TraceRequest

from .batches import plain_request

POLICY: Final = "round_robin"
"""Of a fleet of one engine: any does."""
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


class MeasuredEngine:
    """An `Engine` as a `Fleet` drives it; what a step takes is measured.

    Args:
        prompts: of the requests that will come, by their ids.
        clock: see `SteppedBench`.

    Attributes:
        steps: the seconds of each step, as they were measured.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Mapping[str, list[int]],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._prompts = prompts
        self._adding = 0.0
        # The number of the last step in which a request had a token; 0 for none yet.
        self._last: dict[str, int] = {}
        self.steps: list[float] = []

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def load(self) -> EngineLoad:
        return self._engine.load

    def add_sequence(self, request_id: str, sequence: GrowingSequence, max_tokens: int) -> None:
        """Take in a request, whose prompt is known by its id."""
        request = plain_request(self._prompts[request_id], max_tokens)
        began = self._clock()
        self._engine.add(request_id, request)
        self._adding += self._clock() - began
        self._last[request_id] = 0

    def advance_ended(self, now: float, until: float) -> StepResult | None:
        """None: it takes no steps at once."""
        return None

    def quiet_until(self, now: float) -> float | None:
        """None: nobody knows what the next steps will take."""
        return None

    def advance(self, now: float = 0.0, until: float | None = None) -> StepResult:
        """Take one step."""
        began = self._clock()
        step = self._engine.step()
        seconds = self._clock() - began + self._adding + step.delay
        self._adding = 0.0
        self.steps.append(seconds)
        if step.failures or step.refusals:
            raise RuntimeError(f"the engine has failed: {[*step.failures, *step.refusals]}")
        outputs: list[Output] = []
        decoding = 0
        for name, made in step.outputs:
            is_first, resumes = not self._last[name], self._last[name] < len(self.steps) - 1
            self._last[name] = len(self.steps)
            decoding += not (is_first or resumes)
            outputs.append(
                Output(
                    name,
                    made.index,
                    True,
                    made.token_ids,
                    len(made.token_ids),
                    is_first,
                    made.finish_reason,
                    resumes and not is_first,
                    made.cached_tokens or 0,
                )
            )
        return StepResult(
            seconds,
            (seconds,),
            outputs,
            list(step.events),
            decoding,
            0,
            step.admitted,
            step.prefilled,
        )


def measured_fleet(
    simulation: Simulation,
    engines: Sequence[Engine],
    prompts: Mapping[str, list[int]],
    policy: str = POLICY,
    *,
    clock: Callable[[], float] = perf_counter,
) -> Fleet:
    """A fleet of engines that compute, in virtual time; see `MeasuredEngine`.

    Args:
        simulation: of the same number of mock engines.
        prompts: of all requests, by their ids.
        clock: see `SteppedBench`.
    """
    left = iter(engines)
    return Fleet(
        simulation.names,
        simulation.config(policy),
        simulation.engine,
        event_delay=simulation.event_delay,
        seed=simulation.seed,
        make_engine=lambda _: MeasuredEngine(next(left), prompts, clock),
    )


def with_vocabulary(
    trace: Trace, vocabulary: int, *, salt: int = 0
) -> tuple[Trace, dict[str, list[int]]]:
    """A trace whose prompts have tokens that a model knows.

    Args:
        vocabulary: token ids are below it.
        salt: with another one the same blocks have other tokens, which no engine has cached.

    Returns:
        The trace, with the block hashes of these tokens; and the prompts by their requests' ids.
    """
    requests: list[TraceRequest] = []
    prompts: dict[str, list[int]] = {}
    for request in trace.requests:
        tokens = _below(request.tokens, vocabulary, salt)
        prompts[request.id] = tokens.tolist()
        requests.append(
            TraceRequest(
                request.id,
                request.line,
                request.arrival,
                request.prompt_tokens,
                request.output_tokens,
                request.hash_ids,
                block_hashes(tokens, trace.block_size),
                request.trace_block,
            )
        )
    return Trace(requests, trace.block_size), prompts


def _below(tokens: NDArray[np.uint32], vocabulary: int, salt: int) -> NDArray[np.uint32]:
    """Tokens below a number; equal ones stay equal, and blocks differ still."""
    mixed = (tokens.astype(np.uint64) + np.uint64((salt << 32) + 1)) * _GOLDEN
    return ((mixed >> np.uint64(33)) % np.uint64(vocabulary)).astype(np.uint32)
