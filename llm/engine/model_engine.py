"""An engine around a model: batching, the cache, sampling and ends are here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.embedding import Embedded, EmbedRequest, Pooling
from dynbus.llm.generation import Generated, GenerateRequest

from .block_manager import BlockManager
from .constraint import NO_STRUCTURE, Constraint, Grammars
from .interface import (
    NO_EMBEDDINGS,
    BlockTier,
    EngineLimits,
    EngineLoad,
    KvWitness,
    Prefill,
    Step,
    StepFailed,
)
from .model import Chunk, ComparableModel, EmbeddingModel, PagedModel, SharedModel
from .pooling import StatePool
from .request_pool import RequestPool
from .requests import check_embedding, check_request
from .sampling import Sampler, draw_tokens
from .scheduler import ScheduledRequest
from .tokens import SecretSequence

if TYPE_CHECKING:
    from dynbus.transfer import KvMemory


class _Sequence(SecretSequence):
    """A sequence, and how its tokens are drawn or its states gathered.

    Attributes:
        pool: of a text to embed; None for one that is continued.
    """

    sampler: Sampler
    pool: StatePool | None = None


class ModelEngine:
    """An engine whose steps a model computes: see `Engine`.

    Args:
        model: has a cache of `limits.blocks` blocks of `limits.block_size` tokens.
        limits: its `vocabulary` is the model's.
        eos_token_ids: with which the model ends its text.
        prefix_caching: whether blocks are found again by later requests. Without it there are no
            events.
        pooling: how the states of a text become its embedding; None to make no embeddings.
        tokenizer: gives the `tokenizer.json` of the model, when the first output with a form is
            asked for; None to refuse such requests.

    Attributes:
        memory: of a `SharedModel`, which makes the engine a `TransferringEngine`; no other has it.

    Raises:
        ValueError: embeddings are to be made, and the model is no `EmbeddingModel`.
    """

    computes = True
    memory: KvMemory

    def __init__(
        self,
        model: PagedModel,
        limits: EngineLimits,
        *,
        eos_token_ids: Iterable[int] = (),
        prefix_caching: bool = True,
        pooling: Pooling | None = None,
        tokenizer: Callable[[], bytes] | None = None,
    ) -> None:
        self._embedding_model = model if isinstance(model, EmbeddingModel) else None
        if pooling is not None and self._embedding_model is None:
            raise ValueError(f"pooling = {pooling!r}: {model!r} has no compute_with_states")
        self._pooling: Pooling | None = pooling
        self.limits = limits
        self._model = model
        self._grammars: Grammars | None = None
        if tokenizer is not None:
            self._grammars = Grammars(tokenizer, limits.vocabulary)
        # Which tokens may come is found out while the model computes; a thread begins with use.
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="engine-masks")
        self._key = secrets.token_bytes(32)
        # Files of models name tokens that the model has not.
        self._eos = frozenset(each for each in eos_token_ids if 0 <= each < limits.vocabulary)
        self._pool: RequestPool[_Sequence] = RequestPool(limits, prefix_caching=prefix_caching)
        # Ends of requests whose first token, drawn elsewhere, was their last.
        self._outputs: list[tuple[str, Generated]] = []
        self._prefill_listener: Callable[[int, float], object] | None = None
        # Whether the tier has events of which no step has told yet.
        self._has_untold = False
        self._witness: KvWitness | None = None
        if isinstance(model, SharedModel):
            self.memory = model.memory

    def __repr__(self) -> str:
        return f"<ModelEngine [{self._pool!r}]>"

    @property
    def has_work(self) -> bool:
        return self._pool.has_work or bool(self._outputs) or self._has_untold

    @property
    def load(self) -> EngineLoad:
        return self._pool.load

    def keep_evicted(self, tier: BlockTier, *, key: bytes | None = None) -> None:
        """Have what the cache evicts go to a tier, and come back from it; before any request.

        Args:
            key: that sequence hashes are made with, for a tier that knows blocks by those of
                another engine; see `SecretSequence`.
        """
        self._pool.manager.tier = tier
        if key is not None:
            # Routers are to know what it has from before, whether requests come or not.
            self._key, self._has_untold = key, True

    def watch_prefill(self, listener: Callable[[int, float], object]) -> None:
        """Tell how many tokens of prompts each step computes, and in how many seconds.

        It is told by the engine's thread, of steps that computed prompts and little else.
        """
        self._prefill_listener = listener

    def _be_witnessed(self, make: Callable[[ComparableModel, BlockManager], KvWitness]) -> None:
        model, manager = self._model, self._pool.manager
        if not isinstance(model, ComparableModel):
            raise ValueError(f"{model!r} has no layer_of: its blocks cannot be compared")
        manager.is_traced = True
        self._witness = self._pool.scheduler.witness = make(model, manager)

    def idle_for(self) -> float | None:
        """See `WitnessedEngine`."""
        if self._witness is None or self._pool.is_waiting or self.has_work:
            return None
        return self._witness.idle_for()

    def check(self) -> Step:
        """See `WitnessedEngine`."""
        if self._witness is not None:
            self._witness.check()
        return Step((), self._pool.manager.take_events())

    def note_source(self, request_id: str, source: str) -> None:
        """See `WitnessedEngine`."""
        scheduled = self._pool.parked(request_id)
        if scheduled is not None:
            scheduled.source = source

    @property
    def is_waiting(self) -> bool:
        return self._pool.is_waiting

    def add(self, request_id: str, request: GenerateRequest) -> None:
        prompt, room = self._pool.check(request_id, request)
        self._add(request_id, request, prompt, room)

    def _add(
        self,
        request_id: str,
        request: GenerateRequest,
        prompt: NDArray[np.uint32],
        room: int,
        *,
        holds: bool = False,
        is_parked: bool = False,
    ) -> None:
        seed = request.sampling.seed
        # A negative seed is the number above that has the same bits.
        seed = secrets.randbits(64) if seed is None else seed % (1 << 64)
        stops = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            stops |= self._eos
        if request.structured is not None and self._grammars is None:
            raise ValueError(NO_STRUCTURE)
        sequences = [
            self._sequence(request, prompt, seed, request.index + each, stops)
            for each in range(request.n)
        ]
        self._pool.add(
            request_id,
            sequences,
            room,
            first_index=request.index,
            priority=request.priority,
            owner=request.cache_salt,
            session=request.session,
            stop_token_ids=stops,
            min_tokens=request.min_tokens,
            holds=holds,
            is_parked=is_parked,
        )

    # Blocks that others read and write ------------------------------------------------

    def reserve(self, request_id: str, request: GenerateRequest) -> None:
        self._pool.check_hold(request_id, request.n)
        prompt, room = self._pool.check(request_id, request)
        self._add(request_id, request, prompt, room, holds=True, is_parked=True)

    def deliver(self, request_id: str, computed: int, first: Generated | None) -> None:
        """See `TransferringEngine`; where `first` ends the output, the next step tells why.

        Raises:
            ValueError: `first` is no token of the model, or not in the form of the output. The
                request is gone.
        """
        scheduled = self._pool.parked(request_id)
        if scheduled is None:
            return
        if first is None:
            self._pool.scheduler.deliver(scheduled, computed, goes_on=False)
            return
        try:
            token_id = self._checked_first(first, scheduled.sequence.sampler)
        except ValueError:
            self._pool.cancel(request_id)
            raise
        self._pool.scheduler.deliver(scheduled, computed, goes_on=True)
        constraint = scheduled.sequence.sampler.constraint
        scheduled.sequence.append(token_id)
        scheduled.generated += 1
        scheduled.resumes = not scheduled.computed
        reason = scheduled.finish_reason(token_id)
        if constraint is not None and constraint.is_complete:
            reason = "stop"
        if reason is not None:
            self._pool.cancel(request_id)
            self._outputs.append((request_id, Generated([], scheduled.index, None, reason)))

    def _checked_first(self, first: Generated, sampler: Sampler) -> int:
        """Count the first token of a request that another engine has drawn.

        Raises:
            ValueError: it cannot be the first token.
        """
        if len(first.token_ids) != 1 or not 0 <= first.token_ids[0] < self.limits.vocabulary:
            raise ValueError(
                f"the first token came as {first.token_ids}: it is one id from 0 to "
                f"{self.limits.vocabulary - 1}"
            )
        (token_id,) = first.token_ids
        sampler.note(token_id)
        if sampler.constraint is not None and sampler.constraint.error:
            raise ValueError(
                f"the first token came as {token_id}, which is not in the form of the output: "
                f"{sampler.constraint.error}"
            )
        return token_id

    def add_held(self, request_id: str, request: GenerateRequest) -> None:
        self._pool.check_hold(request_id, request.n)
        self._pool.check_new(request_id)
        prompt = check_request(request, self.limits)
        room = self._pool.room(request_id, len(request.token_ids), 1)
        self._add(request_id, request, prompt, room, holds=True)

    def hold(self, hold_id: str, request: GenerateRequest) -> None:
        self._pool.check_hold(hold_id)
        prompt = check_request(request, self.limits)
        self._pool.scheduler.hold(hold_id, self._tokens(request, prompt))

    def release(self, hold_id: str) -> None:
        self._pool.release(hold_id)

    def announce(self, name: str, owner: str, session: str) -> None:
        """See `AnnouncedEngine`."""
        self._pool.scheduler.announce(name, owner, session)

    # Requests -------------------------------------------------------------------------

    def check_request(self, request: GenerateRequest | EmbedRequest) -> None:
        """Check what only this engine knows, before a request of any kind is taken in.

        Raises:
            ValueError: a value is not usable, and which.
        """

    def _tokens(
        self, request: GenerateRequest | EmbedRequest, tokens: NDArray[np.uint32]
    ) -> _Sequence:
        self.check_request(request)
        return _Sequence(
            request.token_ids,
            self.limits.block_size,
            key=self._key,
            as_array=tokens,
            lora_name=request.lora_name,
            salt=request.cache_salt,
        )

    def _sequence(
        self,
        request: GenerateRequest,
        prompt: NDArray[np.uint32],
        seed: int,
        index: int,
        stops: frozenset[int],
    ) -> _Sequence:
        sequence = self._tokens(request, prompt)
        stop_ids = sorted(stops)
        constraint: Constraint | None = None
        if request.structured is not None and self._grammars is not None:
            constraint = self._grammars.constraint(request.structured, stop_ids, request.output)
        sequence.sampler = Sampler(
            request.sampling,
            seed=seed,
            index=index,
            prompt=request.token_ids,
            generated=request.generated,
            stop_token_ids=stop_ids,
            min_tokens=request.min_tokens,
            constraint=constraint,
        )
        return sequence

    def prepare(self, request: GenerateRequest) -> None:
        """Have ready what takes time of a request; may be called in any thread, before `add`.

        Raises:
            ValueError: the form of its output cannot be enforced, and why.
        """
        if request.structured is not None and self._grammars is not None:
            self._grammars.prepare(request.structured)

    def add_embedding(self, request_id: str, request: EmbedRequest) -> None:
        """Take in a text; the step that computes the last of it has its embedding.

        Raises:
            RequestTooLong: it does not fit.
            ValueError: a value is not usable, and which; the id is in use; or no embeddings are
                made.
        """
        model, pooling = self._embedding_model, self._pooling
        if model is None or pooling is None:
            raise ValueError(NO_EMBEDDINGS)
        self._pool.check_new(request_id)
        text = check_embedding(request, self.limits, model.state_size)
        self._pool.check_text(request_id, len(request.token_ids))
        sequence = self._tokens(request, text)
        sequence.pool = StatePool(pooling, request.dimensions or model.state_size)
        self._pool.add(
            request_id,
            [sequence],
            0,
            priority=request.priority,
            owner=request.cache_salt,
            is_text=True,
            caches=pooling == "last",
        )

    def cancel(self, request_id: str) -> None:
        self._pool.cancel(request_id)

    def step(self) -> Step:
        """Compute the next tokens of all requests that have room.

        Raises:
            StepFailed: the model raised, and nothing can be relied on any longer. The cause are
                those that had no token yet, or all that were computed where there is no such one.
        """
        self._has_untold = False
        plan = self._pool.scheduler.schedule()
        outputs, self._outputs = self._outputs, []
        if not plan.chunks:
            return Step(
                outputs,
                self._pool.manager.take_events(),
                admitted=plan.admitted,
                held=self._pool.scheduler.take_held(),
            )
        ready = [
            scheduled
            for scheduled, _ in plan.chunks
            if scheduled.is_ready and scheduled.sequence.pool is None
        ]
        size = self.limits.block_size
        chunks = [_chunk(scheduled, tokens, size) for scheduled, tokens in plan.chunks]
        masks = self._fill([scheduled.sequence.sampler.constraint for scheduled in ready])
        states: NDArray[np.float32] | None = None
        began = perf_counter()
        try:
            if self._embedding_model is not None and any(chunk.states for chunk in chunks):
                logits, states = self._embedding_model.compute_with_states(chunks)
            else:
                logits = self._model.compute(chunks)
        except Exception as error:
            computed = {scheduled.id for scheduled, _ in plan.chunks}
            new = {scheduled.id for scheduled, _ in plan.chunks if not scheduled.generated}
            raise StepFailed(f"{type(error).__name__}: {error}", new or computed) from error
        if self._prefill_listener is not None and plan.prefill_tokens > 4 * len(chunks):
            self._prefill_listener(plan.prefill_tokens, perf_counter() - began)
        if masks is not None:
            masks.result()
        if self._witness is not None:
            _show_first(self._witness, ready, logits)
        drawn = draw_tokens(
            logits,
            [scheduled.sequence.sampler for scheduled in ready],
            [scheduled.sequence.length for scheduled in ready],
        )
        failures: list[tuple[str, str]] = []
        refusals: list[tuple[str, str]] = []
        ended: set[str] = set()
        prefilled: list[Prefill] = []
        for scheduled, token in zip(ready, drawn, strict=True):
            constraint = scheduled.sequence.sampler.constraint
            if token is None or (constraint is not None and constraint.error):
                # It may have several continuations.
                if scheduled.id not in ended:
                    ended.add(scheduled.id)
                    is_form = constraint is not None and bool(constraint.error)
                    (refusals if is_form else failures).append(
                        (scheduled.id, _why_none(constraint))
                    )
                continue
            scheduled.sequence.append(token.token_id)
            is_first = not scheduled.generated and scheduled.leads
            if is_first:
                prefilled.append(
                    Prefill(scheduled.id, scheduled.cached_tokens or 0, scheduled.chunks)
                )
            scheduled.generated += 1
            scheduled.resumes = False
            reason = scheduled.finish_reason(token.token_id)
            if constraint is not None and constraint.is_complete:
                reason = "stop"
            item = Generated(
                [token.token_id],
                scheduled.index,
                [token.logprob] if token.logprob is not None else None,
                reason,
                scheduled.cached_tokens if is_first else None,
            )
            outputs.append((scheduled.id, item))
            if reason is not None:
                self._pool.finish(scheduled)
        for request_id in ended:
            self._pool.cancel(request_id)
        embedded: list[tuple[str, Embedded]] = []
        if states is not None:
            scheduled_texts = [scheduled for scheduled, _ in plan.chunks]
            self._gather(scheduled_texts, chunks, states, embedded, failures)
        return Step(
            outputs,
            self._pool.manager.take_events(),
            failures=failures,
            admitted=plan.admitted,
            prefilled=prefilled,
            embedded=embedded,
            refusals=refusals,
            held=self._pool.scheduler.take_held(),
        )

    def _fill(self, constraints: Sequence[Constraint | None]) -> Future[None] | None:
        """Begin to find out which tokens may come next; None where all may."""
        bound = [constraint for constraint in constraints if constraint is not None]
        return self._beside.submit(_fill_each, bound) if bound else None

    def _gather(
        self,
        computed: Sequence[ScheduledRequest[_Sequence]],
        chunks: Sequence[Chunk],
        states: NDArray[np.float32],
        embedded: list[tuple[str, Embedded]],
        failures: list[tuple[str, str]],
    ) -> None:
        """Give the states of a step to their texts, and end the texts that are complete."""
        first = 0
        for scheduled, chunk in zip(computed, chunks, strict=True):
            pool = scheduled.sequence.pool
            if pool is None or not chunk.states:
                continue
            if not chunk.computed:
                # It may have been preempted.
                pool.restart()
            pool.add(states[first : first + chunk.states])
            first += chunk.states
            if not scheduled.is_ready:
                continue
            self._pool.finish(scheduled)
            embedding = pool.embedding()
            if embedding is None:
                failures.append((scheduled.id, _NO_EMBEDDING))
                continue
            data = embedding.astype("<f4", copy=False).tobytes()
            embedded.append((scheduled.id, Embedded(data, scheduled.cached_tokens or 0)))


def witness(
    engine: ModelEngine, make: Callable[[ComparableModel, BlockManager], KvWitness]
) -> None:
    """Have an engine's witness of where its blocks come from, which checks while there is no work;
    before any request.

    Args:
        make: makes it, of the model and the manager of the cache's blocks.

    Raises:
        ValueError: the model is no `ComparableModel`.
    """
    engine._be_witnessed(make)  # pyright: ignore[reportPrivateUsage]


def _show_first(
    witness: KvWitness, ready: Sequence[ScheduledRequest[_Sequence]], logits: NDArray[np.float32]
) -> None:
    """Show a witness the first logits of each request."""
    for scheduled, row in zip(ready, logits, strict=True):
        if scheduled.leads and not scheduled.is_drawn:
            scheduled.is_drawn = True
            witness.drawn(scheduled.id, scheduled.sequence.token_ids, row)


_NO_TOKEN = "no token can be drawn: the logits are no numbers, or logit_bias excludes every token"


def _fill_each(constraints: Sequence[Constraint]) -> None:
    for constraint in constraints:
        constraint.fill()


def _why_none(constraint: Constraint | None) -> str:
    if constraint is None:
        return _NO_TOKEN
    if constraint.error:
        return f"structured: the form is too much for llguidance: {constraint.error}"
    return (
        "no token can be drawn that is in the form of its output: the logits are no numbers, or "
        "logit_bias excludes every such token"
    )


_NO_EMBEDDING = "it has no embedding: its states are no numbers, or all zero"


def _chunk(scheduled: ScheduledRequest[_Sequence], tokens: int, block_size: int) -> Chunk:
    computed, pool = scheduled.computed, scheduled.sequence.pool
    is_last = scheduled.is_ready
    blocks = scheduled.blocks
    if scheduled.holds:
        # It has those of its whole prompt.
        blocks = blocks[: -(-computed // block_size)]
    return Chunk(
        scheduled.sequence.token_ids[computed - tokens : computed],
        computed - tokens,
        blocks,
        is_last and pool is None,
        0 if pool is None else pool.wanted(tokens, is_last=is_last),
    )
