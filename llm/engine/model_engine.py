"""An engine around a model: batching, the cache, sampling and ends are here."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.generation import Generated, GenerateRequest

from .interface import EngineLimits, EngineLoad, Prefill, Step, StepFailed
from .model import Chunk, Model
from .request_pool import RequestPool
from .sampling import Sampler, draw_tokens
from .scheduler import ScheduledRequest
from .tokens import SecretSequence


class _Continuation(SecretSequence):
    """A sequence and how its tokens are drawn."""

    sampler: Sampler


class ModelEngine:
    """An engine whose steps a model computes: see `Engine`.

    Args:
        model: has a cache of `limits.blocks` blocks of `limits.block_size` tokens.
        limits: its `vocabulary` is the model's.
        eos_token_ids: with which the model ends its text.
        prefix_caching: whether blocks are found again by later requests. Without it there are no
            events.
    """

    computes = True

    def __init__(
        self,
        model: Model,
        limits: EngineLimits,
        *,
        eos_token_ids: Iterable[int] = (),
        prefix_caching: bool = True,
    ) -> None:
        self.limits = limits
        self._model = model
        self._key = secrets.token_bytes(32)
        # Files of models name tokens that the model has not.
        self._eos = frozenset(each for each in eos_token_ids if 0 <= each < limits.vocabulary)
        self._pool: RequestPool[_Continuation] = RequestPool(limits, prefix_caching=prefix_caching)

    def __repr__(self) -> str:
        return f"<ModelEngine [{self._pool!r}]>"

    @property
    def has_work(self) -> bool:
        return self._pool.has_work

    @property
    def load(self) -> EngineLoad:
        return self._pool.load

    def add(self, request_id: str, request: GenerateRequest) -> None:
        prompt, room = self._pool.check(request_id, request)
        seed = request.sampling.seed
        # A negative seed is the number above that has the same bits.
        seed = secrets.randbits(64) if seed is None else seed % (1 << 64)
        stops = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            stops |= self._eos
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
            stop_token_ids=stops,
            min_tokens=request.min_tokens,
        )

    def _sequence(
        self,
        request: GenerateRequest,
        prompt: NDArray[np.uint32],
        seed: int,
        index: int,
        stops: frozenset[int],
    ) -> _Continuation:
        sequence = _Continuation(
            request.token_ids,
            self.limits.block_size,
            key=self._key,
            as_array=prompt,
            lora_name=request.lora_name,
            salt=request.cache_salt,
        )
        sequence.sampler = Sampler(
            request.sampling,
            seed=seed,
            index=index,
            prompt=request.token_ids,
            generated=request.generated,
            stop_token_ids=sorted(stops),
            min_tokens=request.min_tokens,
        )
        return sequence

    def cancel(self, request_id: str) -> None:
        self._pool.cancel(request_id)

    def step(self) -> Step:
        """Compute the next tokens of all requests that have room.

        Raises:
            StepFailed: the model raised, and nothing can be relied on any longer. The cause are
                those that had no token yet, or all that were computed where there is no such one.
        """
        plan = self._pool.scheduler.schedule()
        if not plan.chunks:
            return Step((), self._pool.manager.take_events())
        ready = [scheduled for scheduled, _ in plan.chunks if scheduled.is_ready]
        try:
            logits = self._model.compute(
                [_chunk(scheduled, tokens) for scheduled, tokens in plan.chunks]
            )
        except Exception as error:
            computed = {scheduled.id for scheduled, _ in plan.chunks}
            new = {scheduled.id for scheduled, _ in plan.chunks if not scheduled.generated}
            raise StepFailed(f"{type(error).__name__}: {error}", new or computed) from error
        drawn = draw_tokens(
            logits,
            [scheduled.sequence.sampler for scheduled in ready],
            [scheduled.sequence.length for scheduled in ready],
        )
        outputs: list[tuple[str, Generated]] = []
        failed: dict[str, None] = {}
        prefilled: list[Prefill] = []
        for scheduled, token in zip(ready, drawn, strict=True):
            if token is None:
                failed[scheduled.id] = None
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
            item = Generated(
                [token.token_id],
                scheduled.index,
                [token.logprob] if token.logprob is not None else None,
                reason,
                scheduled.cached_tokens if is_first else None,
            )
            outputs.append((scheduled.id, item))
            if reason is not None:
                self._pool.end(scheduled)
        for request_id in failed:
            self._pool.cancel(request_id)
        return Step(
            outputs,
            self._pool.manager.take_events(),
            failures=[(request_id, _NO_TOKEN) for request_id in failed],
            admitted=plan.admitted,
            prefilled=prefilled,
        )


_NO_TOKEN = "no token can be drawn: the logits are no numbers, or logit_bias excludes every token"


def _chunk(scheduled: ScheduledRequest[_Continuation], tokens: int) -> Chunk:
    computed = scheduled.computed
    return Chunk(
        scheduled.sequence.token_ids[computed - tokens : computed],
        computed - tokens,
        scheduled.blocks,
        scheduled.is_ready,
    )
