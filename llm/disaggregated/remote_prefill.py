"""The one place where a decode instance decides about a prompt, and has it computed elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from dynbus import DynbusError, Reply, WorkQueue, context
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.hand_over.machine import HandOver
from dynbus.llm.hand_over.messages import PrefillJob
from dynbus.llm.hand_over.sink import Origin, Sink

from .choosing import PrefillChoice

logger = logging.getLogger(__name__)


class RemotePrefill:
    """Has prompts computed by prefill instances, where that is better than computing them here.

    Args:
        sink: of the engine that goes on.
        choice: decides.
        origin: the prefill instances.
        has_tickets: see `HandOver`.
        queue: of the jobs of prefill instances; None where prompts go directly always.
        instance: by which prefill instances answer to these jobs.
        model: the fingerprint of the own model, for who takes a job.
    """

    def __init__(
        self,
        sink: Sink,
        choice: PrefillChoice,
        origin: Origin,
        *,
        has_tickets: bool = True,
        queue: WorkQueue | None = None,
        instance: str = "",
        model: str = "",
    ) -> None:
        self.sink = sink
        self.choice = choice
        self.origin = origin
        self._has_tickets = has_tickets
        self._queue = queue
        self._instance = instance
        self._model = model

    def __repr__(self) -> str:
        return f"<RemotePrefill {self.choice!r}>"

    async def serve(
        self,
        name: str,
        request: GenerateRequest,
        reply: Reply[Generated],
        here: Callable[[], Awaitable[None]],
    ) -> None:
        """Serve a request of the running call to its end.

        Args:
            name: of the request in the engine.
            here: serves one whose prompt is computed here.
        """
        choice = self.choice
        queue = self._queue if choice.goes_by_queue else None
        jobs = 0 if queue is None else await _waiting(queue)

        def is_remote(cached: int) -> bool:
            decision = choice.decide(request, cached, jobs=jobs)
            self.sink.spans.decided(decision.describe())
            logger.debug("%s: %s", name, decision.describe())
            if not decision.remote:
                self.origin.figures.computed_here(str(decision.reason))
            return decision.remote

        expected = choice.cached_tokens(context().metadata)
        if not is_remote(expected):
            await here()
            return
        machine = HandOver(
            len(request.token_ids),
            has_tickets=self._has_tickets,
            queued=queue is not None,
            vocabulary=self.sink.runner.limits.vocabulary,
        )
        await self.sink.receive(
            name,
            request,
            reply,
            self.origin,
            machine,
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
