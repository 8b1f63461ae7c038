"""The requests of an engine, each as one sequence for each of its continuations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.generation import GenerateRequest, Session

from .block_manager import BlockManager
from .interface import EngineLimits, EngineLoad, RequestTooLong
from .requests import check_request
from .scheduler import S, ScheduledRequest, Scheduler


class RequestPool(Generic[S]):
    """The requests of an engine, those of them that run, and the blocks of the cache that they
    have.

    Continuations of one request share the blocks of its prompt as other requests do, by finding
    them in the cache. Each computes for itself what is behind the last complete block.

    Args:
        headroom: how many blocks admission leaves free for requests that run.
        prefix_caching: whether blocks are found again.
        chunked_prefill: whether a prompt may be computed in several steps.

    Attributes:
        scheduler, manager: what decides; not to be changed by others.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        headroom: int = 0,
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
    ) -> None:
        self.limits = limits
        self.manager = BlockManager(limits.blocks, headroom=headroom, prefix_caching=prefix_caching)
        self.scheduler: Scheduler[S] = Scheduler(
            self.manager,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            chunked_prefill=chunked_prefill,
        )
        self._requests: dict[str, list[ScheduledRequest[S]]] = {}
        self._cache_tokens = (limits.blocks - headroom) * limits.block_size

    def __repr__(self) -> str:
        scheduler = self.scheduler
        return (
            f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting | {self.manager!r}"
        )

    @property
    def has_work(self) -> bool:
        scheduler = self.scheduler
        return (bool(self._requests) and not scheduler.is_stalled) or scheduler.has_held

    @property
    def is_waiting(self) -> bool:
        """True if there are requests, all of which wait for others."""
        return bool(self._requests) and self.scheduler.is_stalled

    @property
    def load(self) -> EngineLoad:
        scheduler = self.scheduler
        return EngineLoad(
            len(scheduler.running),
            len(scheduler.waiting),
            self.manager.active,
            scheduler.cached_tokens,
            scheduler.prompt_tokens,
            scheduler.preempted,
            self.manager.pins,
        )

    def room(self, request_id: str, length: int, max_tokens: int | None) -> int:
        """The number of tokens that may follow a prompt of this length: as many as are wanted, or
        as fit.

        Raises:
            RequestTooLong: what is wanted does not fit, even alone.
        """
        context, cache = self.limits.context_length, self._cache_tokens
        wanted = 1 if max_tokens is None else max_tokens
        # The last token is never computed.
        if length + wanted - 1 > cache:
            raise RequestTooLong(
                f"request {request_id!r} may have {length + wanted - 1} tokens in the cache, which "
                f"holds {cache}: shorten the prompt or lower max_tokens"
            )
        if length + wanted > context:
            raise RequestTooLong(
                f"request {request_id!r} has a prompt of {length} tokens and may have {wanted} of "
                f"output, and the context has {context}: shorten the prompt or lower max_tokens"
            )
        return min(context - length, cache - length + 1) if max_tokens is None else wanted

    def check_text(self, request_id: str, length: int) -> None:
        """Check that a text that nothing follows fits.

        Raises:
            RequestTooLong: it does not, even alone.
        """
        limit = min(self.limits.context_length, self._cache_tokens)
        if length > limit:
            raise RequestTooLong(
                f"request {request_id!r} has a text of {length} tokens, and {limit} fit: shorten it"
            )

    def __contains__(self, request_id: str) -> bool:
        """True if a request has not ended."""
        return request_id in self._requests

    def check(self, request_id: str, request: GenerateRequest) -> tuple[NDArray[np.uint32], int]:
        """Check a request before it is added.

        Returns:
            The prompt as an array, of shape [tokens], and how many tokens may follow it.

        Raises:
            RequestTooLong: it does not fit, even alone.
            ValueError: a value is not usable, and which; or the id is in use.
        """
        self.check_new(request_id)
        prompt = check_request(request, self.limits)
        return prompt, self.room(request_id, len(request.token_ids), request.max_tokens)

    def check_new(self, request_id: str) -> None:
        """Check that no request has this id.

        Raises:
            ValueError: one has.
        """
        if request_id in self:
            raise ValueError(f"request {request_id!r} is in the engine already: cancel it first")

    def add(
        self,
        request_id: str,
        sequences: Sequence[S],
        max_tokens: int,
        *,
        first_index: int = 0,
        priority: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        is_text: bool = False,
        caches: bool = True,
        holds: bool = False,
        is_parked: bool = False,
        owner: str | None = None,
        session: Session | None = None,
    ) -> None:
        """Take in a request that is checked: one sequence for each of its continuations."""
        added = [
            ScheduledRequest(
                request_id,
                sequence,
                max_tokens,
                first_index + number,
                priority,
                stop_token_ids,
                min_tokens,
                leads=not number,
                is_text=is_text,
                caches=caches,
                holds=holds,
                is_parked=is_parked,
                owner=owner or "",
                session=session,
            )
            for number, sequence in enumerate(sequences)
        ]
        self._requests[request_id] = added
        for each in added:
            self.scheduler.add(each)

    # Blocks that others read and write ------------------------------------------------

    def check_hold(self, hold_id: str, continuations: int = 1) -> None:
        """Check that blocks can be held by this id.

        Raises:
            ValueError: a request or a hold has it, or the request has several continuations.
        """
        self.check_new(hold_id)
        if self.manager.holds(hold_id):
            raise ValueError(f"{hold_id!r} holds blocks already: release it first")
        if continuations != 1:
            raise ValueError(
                f"n = {continuations}: a request whose blocks are transferred has one "
                "continuation: compute it in one engine"
            )

    def parked(self, request_id: str) -> ScheduledRequest[S] | None:
        """A request that waits for its prompt; None for any other."""
        for scheduled in self._requests.get(request_id, ()):
            if scheduled.is_parked:
                return scheduled
        return None

    def release(self, hold_id: str) -> None:
        """End a hold, or have none for its request; nothing for an unknown one."""
        for scheduled in self._requests.get(hold_id, ()):
            if scheduled.holds and not self.manager.holds(hold_id):
                # It waits to be admitted. Without blocks nothing can be delivered to it.
                scheduled.holds = scheduled.is_parked = False
        self.scheduler.end_hold(hold_id)

    # Ends -----------------------------------------------------------------------------

    def finish(self, scheduled: ScheduledRequest[S]) -> None:
        """A running continuation has ended; its request has with the last of them."""
        self.scheduler.finish(scheduled)
        left = self._requests[scheduled.id]
        left.remove(scheduled)
        if not left:
            del self._requests[scheduled.id]

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free its blocks; False for an unknown one."""
        left = self._requests.pop(request_id, None)
        if left is None:
            return False
        for scheduled in left:
            self.scheduler.cancel(scheduled)
        return True
