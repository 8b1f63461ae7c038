"""What an engine computes in each step: continuous batching as vLLM does it.

Running requests come first, each with the tokens that it lacks, a prompt in chunks; then waiting
ones in their order, as long as the token budget, the number of sequences and the blocks allow.
A running request that finds no block takes those of the last one that was admitted: that one
waits again, at the head, and is computed anew.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from .block_manager import Allocation, BlockManager
from .sequence import Sequence


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request in the scheduler.

    Attributes:
        computed: tokens whose keys and values are in the cache.
        generated: tokens of output so far.
        cached_tokens: tokens of the prompt found in the cache when it was first admitted.
        resumes: whether it was preempted after its last token.
    """

    id: str
    sequence: Sequence
    max_tokens: int
    allocation: Allocation = field(default_factory=Allocation)
    computed: int = 0
    generated: int = 0
    cached_tokens: int | None = None
    resumes: bool = False

    def __repr__(self) -> str:
        return f"<ScheduledRequest {self.id} [{self.computed}/{self.sequence.length} computed]>"


class StepPlan(NamedTuple):
    """What one step computes.

    Attributes:
        prefill_tokens: tokens of prompts, and of output that a preempted request had.
        context_tokens: the tokens before those that are decoded, of all requests together.
        ready: the requests that have a token when the step ends.
        preempted: how many lost their blocks.
    """

    prefill_tokens: int
    context_tokens: int
    ready: list[ScheduledRequest]
    preempted: int


class Scheduler:
    """Chooses what each step computes.

    Args:
        block_size: tokens of a block.
        max_num_seqs: requests that run at a time.
        max_num_batched_tokens: tokens of a step; `max_num_seqs` at least.
        chunked_prefill: whether a prompt may be computed in several steps.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
    ) -> None:
        self.running: list[ScheduledRequest] = []
        self.waiting: deque[ScheduledRequest] = deque()
        self._manager = manager
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._chunked_prefill = chunked_prefill

    def __repr__(self) -> str:
        return f"<Scheduler [{len(self.running)} running, {len(self.waiting)} waiting]>"

    def schedule(self) -> StepPlan:
        """Choose what the next step computes, and give it its blocks."""
        budget = self._max_num_batched_tokens
        prefill_tokens = context_tokens = preempted = 0
        ready: list[ScheduledRequest] = []
        at = 0
        while at < len(self.running) and budget:
            request = self.running[at]
            length = request.sequence.length
            lacking = length - request.computed
            taken = min(lacking, budget)
            gone = self._make_room(request, request.computed + taken)
            preempted += gone
            if gone and self._is_waiting(request):
                break
            if request.generated and lacking == 1:
                context_tokens += length
            else:
                prefill_tokens += taken
            self._compute(request, taken)
            if taken == lacking:
                ready.append(request)
            budget -= taken
            at += 1
        if not preempted:
            prefill_tokens += self._admit(budget, ready)
        return StepPlan(prefill_tokens, context_tokens, ready, preempted)

    def _make_room(self, request: ScheduledRequest, tokens: int) -> int:
        """Give a running request blocks for so many tokens; returns how many were preempted."""
        blocks = -(-tokens // self._block_size)
        gone = 0
        while not self._manager.grow(request.allocation, blocks):
            victim = self.running.pop()
            self._manager.release(victim.allocation)
            victim.computed = 0
            victim.resumes = victim.generated > 0
            self.waiting.appendleft(victim)
            gone += 1
            if victim is request:
                break
        return gone

    def _is_waiting(self, request: ScheduledRequest) -> bool:
        return bool(self.waiting) and self.waiting[0] is request

    def _admit(self, budget: int, ready: list[ScheduledRequest]) -> int:
        """Start waiting requests; returns how many tokens they compute."""
        used = 0
        while self.waiting and budget > used and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            found = self._room_for(request)
            if found is None:
                break
            cached = found * self._block_size
            lacking = request.sequence.length - cached
            taken = min(lacking, budget - used)
            if taken < lacking and not self._chunked_prefill:
                break
            self.waiting.popleft()
            self.running.append(request)
            self._manager.claim(request.allocation, request.sequence.sequence_hashes, found)
            request.computed = cached
            if request.cached_tokens is None:
                request.cached_tokens = cached
            has_room = self._manager.grow(
                request.allocation, -(-(cached + taken) // self._block_size)
            )
            assert has_room, "a request was admitted without room for it"
            self._compute(request, taken)
            if taken == lacking:
                ready.append(request)
            used += taken
        return used

    def _room_for(self, request: ScheduledRequest) -> int | None:
        """Cached blocks that a waiting request would begin with; None without room for it."""
        length = request.sequence.length
        size = self._block_size
        # The last token is computed in any case: its result is the next token.
        found, used = self._manager.prefix(request.sequence.sequence_hashes, (length - 1) // size)
        return found if self._manager.admits(-(-length // size), used) else None

    def _compute(self, request: ScheduledRequest, tokens: int) -> None:
        """Note tokens as computed, and cache the blocks that they complete."""
        size = self._block_size
        first = request.computed // size
        request.computed += tokens
        last = request.computed // size
        if last > first:
            sequence = request.sequence
            sequence.hash_to(last)
            self._manager.store(
                request.allocation,
                sequence.sequence_hashes[first:last],
                sequence.block_hashes[first:last],
                sequence.sequence_hashes[first - 1] if first else None,
            )

    # Many steps at once ---------------------------------------------------------------

    def quiet_steps(self, limit: int) -> int:
        """For how many steps every running request decodes and nothing else happens.

        The last of them may be the one in which a request ends. 0 when the next step does
        anything else; `limit` at most.
        """
        if not self.running:
            return 0
        steps = limit
        for request in self.running:
            if not request.generated or request.sequence.length - request.computed != 1:
                return 0
            left = request.max_tokens - request.generated
            if left < steps:
                steps = left
        # What keeps a request waiting now does so until another ends: blocks only get fewer.
        has_place = self.waiting and len(self.running) < self._max_num_seqs
        if has_place and self._room_for(self.waiting[0]) is not None:
            return 0
        while steps and self._added_blocks(steps) > self._manager.free:
            steps //= 2
        return steps

    def _added_blocks(self, steps: int) -> int:
        size = self._block_size
        return sum(
            max(0, -(-(request.computed + steps) // size) - request.allocation.blocks)
            for request in self.running
        )

    @property
    def context_tokens(self) -> int:
        """The tokens of all running requests."""
        return sum(request.sequence.length for request in self.running)

    def decode(self, request: ScheduledRequest, steps: int) -> None:
        """Carry out quiet steps for a running request; the tokens that they make are there."""
        blocks = -(-(request.computed + steps) // self._block_size)
        has_room = self._manager.grow(request.allocation, blocks)
        assert has_room, "quiet steps ran out of blocks"
        self._compute(request, steps)

    # Leaving --------------------------------------------------------------------------

    def finish(self, request: ScheduledRequest) -> None:
        """Take a running request out, and its blocks back."""
        self.running.remove(request)
        self._manager.release(request.allocation)

    def cancel(self, request: ScheduledRequest) -> None:
        """Take a request out wherever it is."""
        if request in self.running:
            self.finish(request)
        else:
            self.waiting.remove(request)
