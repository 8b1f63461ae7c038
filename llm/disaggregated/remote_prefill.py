"""The decision of a decode instance about one prompt: computed here, or by prefill instances."""

from __future__ import annotations

import logging
from contextlib import suppress

import msgspec

from dynbus import DynbusError, WorkQueue, context
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.hand_over.messages import PrefillJob
from dynbus.llm.hand_over.observing import TransferSpans
from dynbus.llm.hand_over.sink import Origin, Plan

from .choosing import PrefillChoice

logger = logging.getLogger(__name__)


class RemotePrefill:
    """Plans which prompts are computed by prefill instances.

    Args:
        choice: decides.
        origin: the prefill instances.
        queue: of the jobs of prefill instances; None where prompts go directly always.
        instance: by which prefill instances answer to these jobs.
        model: the fingerprint of the own model, for who takes a job.
    """

    def __init__(
        self,
        choice: PrefillChoice,
        origin: Origin,
        spans: TransferSpans,
        *,
        queue: WorkQueue | None = None,
        instance: str = "",
        model: str = "",
    ) -> None:
        self.choice = choice
        self.origin = origin
        self._spans = spans
        self._queue = queue
        self._instance = instance
        self._model = model

    def __repr__(self) -> str:
        return f"<RemotePrefill {self.choice!r}>"

    async def plan(self, request: GenerateRequest) -> Plan | None:
        """See `Planner.plan`."""
        choice, running = self.choice, context()
        queue = self._queue if choice.goes_by_queue else None
        jobs = 0 if queue is None else await _waiting(queue)

        def is_remote(cached: int) -> bool:
            decision = choice.decide(request, cached, jobs=jobs)
            self._spans.decided(decision.describe())
            logger.debug("%s: %s", running.id, decision.describe())
            if not decision.remote:
                self.origin.figures.computed_here(str(decision.reason))
            return decision.remote

        expected = choice.cached_tokens(running.metadata)
        if not is_remote(expected):
            return None
        return Plan(
            self.origin,
            len(request.token_ids),
            # More of it may be here than its router knew.
            is_worth=lambda cached: cached <= expected or is_remote(cached),
            enqueue=None if queue is None else self._enqueue,
        )

    async def _enqueue(self, hand_over: str, tokens: int, deadline: float) -> None:
        assert self._queue is not None, "a job is made for the queue"
        job = PrefillJob(hand_over, self._instance, tokens, self._model)
        await self._queue.put(msgspec.json.encode(job), job_id=hand_over, deadline=deadline)


async def _waiting(queue: WorkQueue) -> int:
    """Prompts in the queue that nobody has taken; 0 where the server does not say."""
    with suppress(DynbusError):
        return (await queue.depth()).waiting
    return 0
