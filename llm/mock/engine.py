"""A mock engine: it schedules, caches and takes time as a real one does, and computes nothing.

It is pure and synchronous: its driver brings the time, virtual or real.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynbus import ConfigError, Option, Options
from dynbus.kvrouter import KvEvent
from dynbus.llm.engine import EngineLimits, EngineLoad, Step
from dynbus.llm.engine.block_manager import BlockManager
from dynbus.llm.engine.interface import BlockTier, Held, Prefill
from dynbus.llm.engine.options import Blocks, BlockSize, KvEvents, MaxNumBatchedTokens, MaxNumSeqs
from dynbus.llm.engine.request_pool import RequestPool
from dynbus.llm.engine.scheduler import ScheduledRequest
from dynbus.llm.generation import FinishReason, Generated, GenerateRequest, TokenLogprob

from .host_tier import MockTier
from .sequence import VOCABULARY, GrowingSequence, MockSequence
from .timing import StepTiming, StepWork, Timing

QUIET_STEPS: Final = 64
"""The number of decode steps that are taken at once at most; their events are sent at their end."""


@dataclass(frozen=True, kw_only=True)
class MockSize(Options):
    """The size of a mock engine; the defaults are those of Dynamo's."""

    block_size: BlockSize = 64
    blocks: Blocks = 16_384
    max_num_seqs: MaxNumSeqs = 256
    max_num_batched_tokens: MaxNumBatchedTokens = 8192
    context_length: Annotated[
        int,
        Option(
            "the most tokens that a prompt and its output may have; 0 for what the cache holds",
            least=0,
            unit="tokens",
        ),
    ] = 0
    vocabulary: Annotated[
        int,
        Option(
            "output tokens are below it, those of prompts need not be; that of a tokenizer makes "
            "them text",
            least=1,
        ),
    ] = VOCABULARY
    kv_events: KvEvents = True
    host_blocks: Annotated[
        int,
        Option(
            "blocks that are kept for which the cache has no room, as on a host; to bring them "
            "back takes no time",
            least=0,
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class MockConfig(MockSize):
    """The size of an engine, and how it goes about its work.

    Raises:
        ConfigError: a limit is below 1, more requests may run than a step has tokens, or the
            watermark leaves no block.
    """

    chunked_prefill: Annotated[
        bool, Option("whether a prompt may be computed in several steps")
    ] = True
    prefix_caching: Annotated[bool, Option("whether blocks are found again by later requests")] = (
        True
    )
    watermark: Annotated[
        float, Option("the part of the blocks that admission leaves free", least=0)
    ] = 0.0
    latency: Annotated[
        float,
        Option(
            "seconds that serving adds to the time until a first token, in simulations",
            least=0,
            unit="seconds",
        ),
    ] = 0.0
    timing: Annotated[StepTiming, Option("how long a step takes")] = field(default_factory=Timing)
    limits: EngineLimits = field(init=False, repr=False)

    def check(self) -> None:
        super().check()
        try:
            limits = EngineLimits(
                self.block_size,
                self.blocks,
                self.max_num_seqs,
                self.max_num_batched_tokens,
                # The last token is never computed.
                self.context_length or self.capacity_tokens + 1,
                self.kv_events and self.prefix_caching,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        object.__setattr__(self, "limits", limits)
        if self.headroom >= self.blocks:
            raise ConfigError(
                f"watermark={self.watermark} leaves none of {self.blocks} blocks: choose a "
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


@dataclass(slots=True, eq=False)
class Output:
    """The tokens that one or several steps made for one request.

    Attributes:
        index: of its continuation.
        leads: whether that is the first of its request.
        tokens: empty where the sequence does not make token ids.
        count: how many tokens; more than one only after several steps.
        is_first: whether its first token is among them.
        finish_reason: why it ended with them; None while it goes on.
        resumes: whether it was preempted since its token before these.
        cached_tokens: of its prompt, found in the cache when it was first admitted.
    """

    request_id: str
    index: int
    leads: bool
    tokens: list[int]
    count: int
    is_first: bool
    finish_reason: FinishReason | None
    resumes: bool
    cached_tokens: int


class StepResult(NamedTuple):
    """The results of one step, or of several decode steps in which nothing else happened.

    Attributes:
        duration: seconds from the beginning to the end.
        durations: of each step; of shape [steps].
        outputs: in the order of admission; they are there when the step ends.
        events: what the cache stored and removed, likewise.
        decoding: how many of the outputs continue the step before.
        preempted: how many requests lost their blocks.
        admitted, prefilled, held: see `Step`.
    """

    duration: float
    durations: tuple[float, ...] | NDArray[np.float64]
    outputs: list[Output]
    events: list[KvEvent]
    decoding: int
    preempted: int
    admitted: Sequence[str] = ()
    prefilled: Sequence[Prefill] = ()
    held: Sequence[Held] = ()


class MockEngine:
    """An engine that batches, caches and takes time, and computes nothing: see `Engine`.

    `step` takes one step. A driver that keeps the time, such as a simulation, takes several at once
    by `advance`.

    Args:
        tier: for the blocks that its cache has no room for, in place of one by `host_blocks`.
    """

    computes = False

    def __init__(self, config: MockConfig | None = None, *, tier: BlockTier | None = None) -> None:
        self.config = config or MockConfig()
        self.limits = self.config.limits
        self._pool: RequestPool[GrowingSequence] = RequestPool(
            self.limits,
            headroom=self.config.headroom,
            prefix_caching=self.config.prefix_caching,
            chunked_prefill=self.config.chunked_prefill,
        )
        self._scheduler = self._pool.scheduler
        if tier is None and self.config.host_blocks:
            tier = MockTier(self.config.host_blocks)
        self._pool.manager.tier = tier
        # Routers are to know what it has from before, whether requests come or not.
        self._has_untold = tier is not None
        # How many log-probabilities are wanted, by request.
        self._logprobs: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<MockEngine [{self._pool!r}]>"

    @property
    def manager(self) -> BlockManager:
        """The blocks of its cache; to be looked at."""
        return self._pool.manager

    @property
    def has_work(self) -> bool:
        return self._pool.has_work or self._has_untold

    @property
    def load(self) -> EngineLoad:
        return self._pool.load

    def add(self, request_id: str, request: GenerateRequest) -> None:
        prompt, room = self._pool.check(request_id, request)
        if request.structured is not None:
            raise ValueError(
                "structured: a mock engine draws tokens at random, in no form; take an engine that "
                "computes a model, or leave the form of the output out"
            )
        sampling = request.sampling
        sequences = [
            MockSequence(
                request.token_ids,
                self.limits.block_size,
                seed=(sampling.seed or 0) + request.index + each,
                vocabulary=self.config.vocabulary,
                as_array=prompt,
                lora_name=request.lora_name,
                salt=request.cache_salt,
            )
            for each in range(request.n)
        ]
        if sampling.logprobs is not None:
            self._logprobs[request_id] = sampling.logprobs
        self._pool.add(
            request_id,
            sequences,
            room,
            first_index=request.index,
            priority=request.priority,
            stop_token_ids=frozenset(request.stop_token_ids),
            min_tokens=request.min_tokens,
            owner=request.cache_salt,
            session=request.session,
        )

    def add_sequence(self, request_id: str, sequence: GrowingSequence, max_tokens: int) -> None:
        """Take in a request whose tokens are kept in another way; raises like `add`."""
        self._pool.check_new(request_id)
        if max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: a request gets one token at least")
        self._pool.room(request_id, sequence.length, max_tokens)
        self._pool.add(request_id, (sequence,), max_tokens)

    def reserve_sequence(self, request_id: str, sequence: GrowingSequence, max_tokens: int) -> None:
        """Take in a request whose prompt is computed elsewhere, as `reserve` of a
        `TransferringEngine` does; raises like it."""
        self._pool.check_hold(request_id)
        self._pool.room(request_id, sequence.length, max_tokens)
        self._pool.add(request_id, (sequence,), max_tokens, holds=True, is_parked=True)

    def deliver(self, request_id: str, *, is_whole: bool) -> None:
        """Let a reserved request go on with its second token, its first one being known; with its
        prompt where that has not come."""
        scheduled = self._pool.parked(request_id)
        assert scheduled is not None, f"{request_id} waits for nothing"
        computed = scheduled.sequence.length if is_whole else 0
        self._scheduler.deliver(scheduled, computed, goes_on=is_whole)
        self._pool.release(request_id)
        if is_whole:
            scheduled.sequence.extend(1)
            scheduled.generated += 1
            # The time since its token before is none of a step.
            scheduled.resumes = True

    def announce(self, name: str, owner: str, session: str) -> None:
        """See `AnnouncedEngine`."""
        self._scheduler.announce(name, owner, session)

    def cancel(self, request_id: str) -> None:
        self._pool.cancel(request_id)
        self._pool.release(request_id)
        self._logprobs.pop(request_id, None)

    def step(self) -> Step:
        """Compute the next tokens of all requests that have room."""
        result = self.advance()
        outputs = [(output.request_id, self._generated(output)) for output in result.outputs]
        if self._logprobs:
            for request_id, item in outputs:
                if item.finish_reason is not None and request_id not in self._pool:
                    self._logprobs.pop(request_id, None)
        return Step(
            outputs,
            result.events,
            result.duration,
            admitted=result.admitted,
            prefilled=result.prefilled,
            held=result.held,
        )

    def _generated(self, output: Output) -> Generated:
        wanted = self._logprobs.get(output.request_id) if self._logprobs else None
        return Generated(
            output.tokens,
            output.index,
            None if wanted is None else [self._logprob(each, wanted) for each in output.tokens],
            output.finish_reason,
            output.cached_tokens if output.is_first and output.leads else None,
        )

    def _logprob(self, token_id: int, wanted: int) -> TokenLogprob:
        """Every token is as likely as any other."""
        vocabulary = self.config.vocabulary
        logprob = -math.log(vocabulary)
        top = [((token_id + each) % vocabulary, logprob) for each in range(min(wanted, vocabulary))]
        return TokenLogprob(token_id, logprob, top)

    # In virtual time ------------------------------------------------------------------

    def advance(self, now: float = 0.0, until: float | None = None) -> StepResult:
        """Take the next step, which begins at `now`.

        Args:
            now: seconds, on any clock.
            until: with it, decode steps in which nothing else happens are taken at once: those
                that begin before it.
        """
        self._has_untold = False
        if until is not None:
            steps = self._scheduler.quiet_steps(QUIET_STEPS)
            if steps > 1:
                durations = self._quiet_durations(steps)
                begun = 1 + int(durations.cumsum()[:-1].searchsorted(until - now))
                return self._decode(durations[:begun])
        plan = self._scheduler.schedule()
        prompts = attention = decoding = 0
        outputs: list[Output] = []
        prefilled: list[Prefill] = []
        for request, tokens in plan.chunks:
            if tokens > 1 or not request.generated:
                prompts += 1
                attention += tokens * (2 * request.computed - tokens - 1) // 2
            if request.computed == request.sequence.length:
                if request.generated:
                    decoding += not request.resumes
                elif request.leads:
                    prefilled.append(
                        Prefill(request.id, request.cached_tokens or 0, request.chunks)
                    )
                outputs.append(self._emit(request, request.sequence.extend(1), 1))
        work = StepWork(
            prompts,
            plan.prefill_tokens,
            attention,
            len(plan.chunks) - prompts,
            plan.context_tokens,
        )
        duration = self.config.timing.step(work, self.config.capacity_tokens)
        return StepResult(
            duration,
            (duration,),
            outputs,
            self.manager.take_events(),
            decoding,
            plan.preempted,
            plan.admitted,
            prefilled,
            self._scheduler.take_held(),
        )

    def quiet_until(self, now: float) -> float | None:
        """The time at which the decode steps end that can be taken at once from `now` on; None for
        none."""
        steps = self._scheduler.quiet_steps(QUIET_STEPS)
        if steps < 2:
            return None
        return now + float(self._quiet_durations(steps).sum())

    def advance_ended(self, now: float, until: float) -> StepResult | None:
        """Take those of the decode steps that can be taken at once from `now` on that end by
        `until`; None for none."""
        durations = self._quiet_durations(self._scheduler.quiet_steps(QUIET_STEPS))
        ended = int(durations.cumsum().searchsorted(until - now, side="right"))
        return self._decode(durations[:ended]) if ended else None

    def _quiet_durations(self, steps: int) -> NDArray[np.float64]:
        scheduler = self._scheduler
        return self.config.timing.decode_steps(
            scheduler.context_tokens, len(scheduler.decoding), steps, self.config.capacity_tokens
        )

    def _decode(self, durations: NDArray[np.float64]) -> StepResult:
        """Take quiet steps that take so long, one at least."""
        steps = len(durations)
        running = list(self._scheduler.decoding)
        tokens = [request.sequence.extend(steps) for request in running]
        for request in running:
            self._scheduler.decode(request, steps)
        outputs = [
            self._emit(request, made, steps) for request, made in zip(running, tokens, strict=True)
        ]
        return StepResult(
            float(durations.cumsum()[-1]),
            durations,
            outputs,
            self.manager.take_events(),
            len(running),
            0,
        )

    def _emit(
        self, request: ScheduledRequest[GrowingSequence], tokens: list[int], steps: int
    ) -> Output:
        """Count the tokens of a request, and end it with its last."""
        is_first = not request.generated
        resumes, request.resumes = request.resumes, False
        request.generated += steps
        reason = request.finish_reason(tokens[-1] if tokens else -1)
        if reason is not None:
            self._pool.finish(request)
        return Output(
            request.id,
            request.index,
            request.leads,
            tokens,
            steps,
            is_first,
            reason,
            resumes,
            request.cached_tokens or 0,
        )
