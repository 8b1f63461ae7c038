"""A mock engine: it schedules, caches and takes time as a real one does, and computes nothing.

It is pure and synchronous: whoever drives it brings the time, virtual or real.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.events import KvEvent
from dynbus.llm.engine.block_manager import BlockManager
from dynbus.llm.engine.scheduler import ScheduledRequest, Scheduler

from .sequence import VOCABULARY, Sequence, TokenSequence
from .timing import Timing

QUIET_STEPS: Final = 64
"""How many decode steps are taken at once at most: events of them are told at their end."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The size and the limits of an engine; the defaults are those of Dynamo's mock engine.

    Attributes:
        block_size: tokens of a block.
        blocks: how many the cache has.
        max_num_seqs: requests that run at a time.
        max_num_batched_tokens: tokens that one step computes.
        chunked_prefill: whether a prompt may be computed in several steps.
        prefix_caching: whether blocks are found again by later requests.
        watermark: the part of the blocks that admission leaves free.
        vocabulary: output tokens are below it.

    Raises:
        ValueError: a limit is below 1, more requests may run than a step has tokens, or the
            watermark leaves no block.
    """

    block_size: int = 64
    blocks: int = 16_384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    chunked_prefill: bool = True
    prefix_caching: bool = True
    watermark: float = 0.0
    vocabulary: int = VOCABULARY
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        for name in ("block_size", "blocks", "max_num_seqs", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be 1 at least")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is less than "
                f"max_num_seqs = {self.max_num_seqs}: every running request needs a token of a "
                "step"
            )
        if not 0.0 <= self.watermark < 1.0 or self.headroom >= self.blocks:
            raise ValueError(
                f"watermark = {self.watermark} leaves none of {self.blocks} blocks: choose a "
                "smaller part, from 0 on"
            )

    @property
    def headroom(self) -> int:
        """The blocks that admission leaves free."""
        return math.ceil(self.watermark * self.blocks)

    @property
    def capacity_tokens(self) -> int:
        """The tokens that the cache holds."""
        return self.blocks * self.block_size


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """A prompt to continue.

    Attributes:
        tokens: token ids; of shape [length].
        max_tokens: how many tokens it shall get.
        seed: output differs with it.
    """

    id: str
    tokens: NDArray[np.integer]
    max_tokens: int
    seed: int = 0


@dataclass(slots=True, eq=False)
class Output:
    """What a step made for one request.

    Attributes:
        tokens: empty where the sequence does not make token ids.
        count: how many tokens; more than one only after several steps.
        is_first: whether its first token is among them.
        is_last: whether the request ended with them.
        resumes: whether it was preempted since its token before these.
        cached_tokens: of its prompt, found in the cache when it was first admitted.
    """

    request_id: str
    tokens: list[int]
    count: int
    is_first: bool
    is_last: bool
    resumes: bool
    cached_tokens: int


class StepResult(NamedTuple):
    """What one step did, or several decode steps in which nothing else happened.

    Attributes:
        duration: seconds from the beginning to the end.
        durations: of each step; of shape [steps].
        outputs: in the order of admission; they are there when the step ends.
        events: what the cache stored and removed, likewise.
        decoding: how many of the outputs continue the step before.
        preempted: how many requests lost their blocks.
    """

    duration: float
    durations: tuple[float, ...] | NDArray[np.float64]
    outputs: list[Output]
    events: list[KvEvent]
    decoding: int
    preempted: int


class RequestTooLong(ValueError):
    """A request does not fit into the cache of the engine, even alone."""


class MockEngine:
    """An engine whose steps are computed by whoever calls `step`."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.manager = BlockManager(
            self.config.blocks,
            headroom=self.config.headroom,
            prefix_caching=self.config.prefix_caching,
        )
        self._scheduler: Scheduler[Sequence] = Scheduler(
            self.manager,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            chunked_prefill=self.config.chunked_prefill,
        )
        self._requests: dict[str, ScheduledRequest[Sequence]] = {}

    def __repr__(self) -> str:
        return f"<MockEngine [{self.running} running, {self.waiting} waiting | {self.manager!r}]>"

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to step for."""
        return not self._requests

    def add(self, request: EngineRequest) -> None:
        """Take in a request; it waits for a step that has room for it.

        Raises:
            RequestTooLong: its prompt and output are more than the cache holds.
            ValueError: its id is in use, its prompt empty, or `max_tokens` below 1.
        """
        config = self.config
        sequence = TokenSequence(
            request.tokens, config.block_size, seed=request.seed, vocabulary=config.vocabulary
        )
        self.add_sequence(request.id, sequence, request.max_tokens)

    def add_sequence(self, request_id: str, sequence: Sequence, max_tokens: int) -> None:
        """Take in a request whose tokens are kept in another way; raises like `add`."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is in the engine already: cancel it first")
        if max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: a request gets one token at least")
        # The last token is never computed.
        most = sequence.length + max_tokens - 1
        usable = (self.manager.blocks - self.manager.headroom) * self.config.block_size
        if most > usable:
            raise RequestTooLong(
                f"request {request_id!r} may have {most} tokens in the cache, which holds "
                f"{usable}: shorten the prompt or lower max_tokens"
            )
        added = ScheduledRequest(request_id, sequence, max_tokens)
        self._requests[request_id] = added
        self._scheduler.add(added)

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free its blocks; False for an unknown one."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._scheduler.cancel(request)
        return True

    def step(self, now: float = 0.0, until: float | None = None) -> StepResult:
        """Compute the next step, which begins at `now`.

        Args:
            now: seconds, on any clock.
            until: with it, decode steps in which nothing else happens are taken at once: those
                that begin before it.
        """
        if until is not None:
            steps = self._scheduler.quiet_steps(QUIET_STEPS)
            if steps > 1:
                return self._decode(self._quiet_durations(steps), until - now)
        plan = self._scheduler.schedule()
        timing = self.config.timing
        duration = timing.prefill(plan.prefill_tokens)
        if plan.context_tokens:
            duration += timing.decode(plan.context_tokens, self.config.capacity_tokens)
        decoding = 0
        outputs: list[Output] = []
        for request, _ in plan.chunks:
            if not request.is_ready:
                continue
            decoding += request.generated > 0 and not request.resumes
            outputs.append(self._emit(request, request.sequence.extend(1), 1))
        return StepResult(
            duration,
            (duration,),
            outputs,
            self.manager.take_events(),
            decoding,
            plan.preempted,
        )

    def quiet_until(self, now: float) -> float | None:
        """When the decode steps end that can be taken at once from `now` on; None for none."""
        steps = self._scheduler.quiet_steps(QUIET_STEPS)
        if steps < 2:
            return None
        return now + float(self._quiet_durations(steps).sum())

    def _quiet_durations(self, steps: int) -> NDArray[np.float64]:
        scheduler = self._scheduler
        return self.config.timing.decode_steps(
            scheduler.context_tokens, len(scheduler.running), steps, self.config.capacity_tokens
        )

    def _decode(self, durations: NDArray[np.float64], within: float) -> StepResult:
        """Take the quiet steps that begin within so many seconds, one at least."""
        ends = durations.cumsum()
        steps = 1 + int(ends[:-1].searchsorted(within))
        running = list(self._scheduler.running)
        tokens = [request.sequence.extend(steps) for request in running]
        for request in running:
            self._scheduler.decode(request, steps)
        outputs = [
            self._emit(request, made, steps) for request, made in zip(running, tokens, strict=True)
        ]
        return StepResult(
            float(ends[steps - 1]),
            durations[:steps],
            outputs,
            self.manager.take_events(),
            len(running),
            0,
        )

    def _emit(self, request: ScheduledRequest[Sequence], tokens: list[int], steps: int) -> Output:
        """Count the tokens of a request, and end it with its last."""
        is_first = not request.generated
        resumes, request.resumes = request.resumes, False
        request.generated += steps
        is_last = request.generated >= request.max_tokens
        if is_last:
            del self._requests[request.id]
            self._scheduler.finish(request)
        return Output(
            request.id, tokens, steps, is_first, is_last, resumes, request.cached_tokens or 0
        )
