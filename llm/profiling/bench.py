"""The bench that an engine is measured on: the same measurement for one in this process and for one
behind the bus."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.engine import EngineLimits
from dynbus.llm.mock.engine import MockConfig, MockEngine
from dynbus.llm.mock.timing import StepWork
from dynbus.llm.replay import ReplayedRequest, Simulation
from dynbus.llm.replay.trace import Trace

from .batches import Batch, batches_for, longest_request

Progress = Callable[[int, int], object]
"""A listener that is told how much is done, of how much."""

WARM_UP: Final = 8
"""Steps of the first batch, which are not counted: caches fill."""
MOST_EMPTY: Final = 0.2
"""The part of the batches that may come to nothing."""


class Measured(NamedTuple):
    """The time that some steps in a row took together.

    Attributes:
        works: of each of them.
        seconds: of all together, with what it took to take in the requests that came with them.
        is_answer: whether that is the time from a request's call to its first token, of an engine
            that had nothing to do: serving is in it.
    """

    works: Sequence[StepWork]
    seconds: float
    is_answer: bool = False


class Times(NamedTuple):
    """The times of requests, in seconds.

    Attributes:
        ttft: from the arrival to the first token; of shape [requests].
        tpot: between two tokens, on average; of shape [requests with two tokens or more].
    """

    ttft: NDArray[np.float64]
    tpot: NDArray[np.float64]

    @classmethod
    def of(cls, requests: Sequence[ReplayedRequest]) -> Times:
        return cls(
            np.array([one.first_token - one.arrival for one in requests]),
            np.array(
                [
                    (one.last_token - one.first_token) / (one.output_tokens - 1)
                    for one in requests
                    if one.output_tokens > 1
                ]
            ),
        )


@dataclass(frozen=True, slots=True)
class Effort:
    """The extent of a measurement.

    Attributes:
        context: tokens of the longest request.
        repeats: of each batch; the mean of their times counts, without the shortest and longest.
        patience: seconds of a batch from which on it is not repeated.
    """

    context: int
    repeats: int = 5
    patience: float = 2.0


class EngineBench(Protocol):
    """An engine that nobody else uses, and that does what it is measured by."""

    @property
    def limits(self) -> EngineLimits: ...

    async def carry_out(self, batch: Batch) -> Sequence[Measured]:
        """Have it compute a batch, whose prompts it has not seen.

        Returns:
            the steps; none where they cannot be told apart.

        Raises:
            ValueError: its steps are not those of the scheduler of `dynbus.llm.engine`.
        """
        ...

    async def serve(
        self,
        simulation: Simulation,
        trace: Trace,
        prompts: Mapping[str, list[int]],
        progress: Callable[[int], None],
    ) -> Times:
        """Have it answer the requests of a trace.

        Args:
            simulation: of one engine of the same limits; the trace passes with its speed.
            prompts: of all requests, by their ids.
            progress: is told how many requests have arrived.
        """
        ...


async def measure(
    bench: EngineBench, effort: Effort, progress: Progress | None = None, *, seed: int = 0
) -> list[Measured]:
    """The steps of batches of all sizes up to an engine's limits.

    Args:
        progress: is told how many batches are done, of how many.
        seed: of the order of the batches.

    Raises:
        ValueError: the engine's steps are not those of its scheduler.
    """
    batches = list(batches_for(bench.limits, effort.context))
    runs: list[list[Sequence[Measured]]] = [[] for _ in batches]
    order = np.arange(len(batches))
    random = np.random.default_rng(seed)
    with collected_once():
        longest = longest_request(bench.limits, effort.context)
        prompt = min(bench.limits.block_size, longest - WARM_UP)
        await bench.carry_out(Batch([(0, prompt, WARM_UP)]))
        # A machine is faster in some minutes than in others: no batch is of one minute alone.
        for turn in range(effort.repeats):
            random.shuffle(order)
            for done, at in enumerate(order.tolist()):
                if turn < 1 or _total(runs[at][0]) < effort.patience:
                    runs[at].append(await bench.carry_out(batches[at]))
                if progress is not None:
                    before = turn * len(batches)
                    progress(before + done + 1, effort.repeats * len(batches))
    empty = sum(not any(each) for each in runs)
    if empty > MOST_EMPTY * len(batches):
        raise ValueError(
            f"the tokens of {empty} of {len(batches)} batches came in an order that no steps of "
            "dynbus.llm.engine explain: nothing else may use the engine, nor the machine; one that "
            "batches in another way has no profile"
        )
    return [one for each in runs for one in _averages(each)]


def _averages(runs: Sequence[Sequence[Measured]]) -> list[Measured]:
    """The steps of a batch, with the means of what they took without the shortest and longest."""
    # Those of one that is served differ a little: a request may come a step later.
    times: dict[tuple[tuple[StepWork, ...], bool], list[float]] = {}
    for works, seconds, is_answer in (one for run in runs for one in run):
        times.setdefault((tuple(works), is_answer), []).append(seconds)
    measured: list[Measured] = []
    for (works, is_answer), taken in times.items():
        kept = sorted(taken)[1:-1] if len(taken) > 2 else taken
        measured.append(Measured(works, float(np.mean(kept)), is_answer))
    return measured


def _total(run: Sequence[Measured]) -> float:
    return sum(each.seconds for each in run)


class _WorkRecorder:
    """A `StepTiming` that notes the work of steps; they take no time."""

    def __init__(self) -> None:
        self.works: list[StepWork] = []

    def step(self, work: StepWork, capacity_tokens: int) -> float:
        self.works.append(work)
        return 0.0

    def decode_steps(
        self, context_tokens: int, requests: int, steps: int, capacity_tokens: int
    ) -> NDArray[np.float64]:
        """See `StepTiming`; the steps of the recorder are taken one by one."""
        raise NotImplementedError


def shadow_of(limits: EngineLimits) -> tuple[MockEngine, list[StepWork]]:
    """A mock engine that schedules as one of these limits does, and the list of its steps' works,
    which grows."""
    recorder = _WorkRecorder()
    config = MockConfig(
        block_size=limits.block_size,
        blocks=limits.blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        context_length=limits.context_length,
        prefix_caching=limits.has_events,
        timing=recorder,
    )
    return MockEngine(config), recorder.works


@contextmanager
def collected_once() -> Generator[None]:
    """Have no garbage collection within the block: one would be taken for the engine's work."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
