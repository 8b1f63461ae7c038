"""What an engine computes in each step: continuous batching as vLLM does it.

Running requests come first, each with the tokens that it lacks, a prompt in chunks; then waiting
ones in their order, as long as the token budget, the number of sequences and the blocks allow.
A running request that finds no block takes those of the last one: that one waits again, at the
head, and is computed anew. The order is that of priority, and of admission where it is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from dynbus.llm.generation import FinishReason

from .block_manager import BlockManager

TEXT_SHARE: Final = 4
"""The part of a step's tokens that texts to embed have at most while anything else runs: a stream
waits for the whole step, and nobody watches an embedding come."""

LOOKED_UP: Final = 256
"""Blocks of a prompt that are looked up at first; twice as many each time that all are cached."""


class HashedSequence(Protocol):
    """What the scheduler needs of a request's tokens.

    Attributes:
        length: the tokens so far.
        sequence_hashes, block_hashes: of the complete blocks that were asked for by `hash_to`.
    """

    length: int
    sequence_hashes: list[int]
    block_hashes: list[int]

    def hash_to(self, blocks: int) -> None:
        """Have the hashes of the first `blocks` blocks, which are complete."""
        ...


S = TypeVar("S", bound=HashedSequence)


@dataclass(slots=True, eq=False)
class ScheduledRequest(Generic[S]):
    """A request in the scheduler, or one of the continuations of a request.

    Attributes:
        index: of the continuation.
        max_tokens: with so many tokens of output it ends.
        priority: a higher one goes before a lower one.
        stop_token_ids: one of them ends it, after `min_tokens`.
        leads: whether it is the first continuation of its request, and tells for all of them what
            was found in the cache.
        is_text: whether it is a text to embed, which ends with its last token and makes room for
            all others.
        caches: whether its blocks are looked up in the cache, and found there by others. A text
            of which the states of all tokens are needed gains nothing by it.
        blocks: its block table.
        computed: tokens whose keys and values are in the cache, when the step has ended.
        generated: tokens of output so far.
        cached_tokens: tokens of the prompt found in the cache when it was first admitted.
        resumes: whether it was preempted after its last token.
        chunks: steps that computed a part of its prompt.
    """

    id: str
    sequence: S
    max_tokens: int
    index: int = 0
    priority: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    leads: bool = True
    is_text: bool = False
    caches: bool = True
    blocks: list[int] = field(default_factory=list[int])
    computed: int = 0
    generated: int = 0
    cached_tokens: int | None = None
    resumes: bool = False
    chunks: int = 0

    def __repr__(self) -> str:
        return f"<ScheduledRequest {self.id} [{self.computed}/{self.sequence.length} computed]>"

    @property
    def is_ready(self) -> bool:
        """Whether all its tokens are computed when the step ends, so that it has the next one."""
        return self.computed == self.sequence.length

    def finish_reason(self, token_id: int) -> FinishReason | None:
        """Why it ends with its last token, which is counted already; None when it goes on."""
        if self.generated > self.min_tokens and token_id in self.stop_token_ids:
            return "stop"
        return "length" if self.generated >= self.max_tokens else None


class StepPlan(NamedTuple, Generic[S]):
    """What one step computes.

    Attributes:
        chunks: the requests in the order in which they are computed, each with how many of its
            tokens: the last ones of those that are `computed` now.
        prefill_tokens: tokens of prompts, and of output that a preempted request had.
        context_tokens: the tokens before those that are decoded, of all requests together.
        preempted: how many lost their blocks.
        admitted: ids of the requests that had waited for their first step.
    """

    chunks: list[tuple[ScheduledRequest[S], int]]
    prefill_tokens: int
    context_tokens: int
    preempted: int
    admitted: Sequence[str] = ()


class Scheduler(Generic[S]):
    """Chooses what each step computes.

    Args:
        block_size: tokens of a block.
        max_num_seqs: requests that run at a time.
        max_num_batched_tokens: tokens of a step; `max_num_seqs` at least.
        chunked_prefill: whether a prompt may be computed in several steps; one that is longer than
            a step is in any case.

    Attributes:
        running, waiting: requests in their order. Not to be changed by others.
        prompt_tokens, cached_tokens: of all requests that were admitted, and of these the tokens
            that were found in the cache; a request with several continuations counts once.
        preempted: how often a request lost its blocks.
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
        self.running: list[ScheduledRequest[S]] = []
        self.waiting: deque[ScheduledRequest[S]] = deque()
        self.prompt_tokens = self.cached_tokens = self.preempted = 0
        self._texts = 0
        self._manager = manager
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._chunked_prefill = chunked_prefill

    def __repr__(self) -> str:
        return f"<Scheduler [{len(self.running)} running, {len(self.waiting)} waiting]>"

    def add(self, request: ScheduledRequest[S]) -> None:
        """Let a request wait for a step that has room for it."""
        self._texts += request.is_text
        _insert(self.waiting, request)

    def schedule(self) -> StepPlan[S]:
        """Choose what the next step computes, and give it its blocks."""
        budget = self._max_num_batched_tokens
        text_budget, text_places = self._text_room()
        prefill_tokens = context_tokens = preempted = 0
        chunks: list[tuple[ScheduledRequest[S], int]] = []
        at = 0
        while at < len(self.running) and budget:
            request = self.running[at]
            length = request.sequence.length
            lacking = length - request.computed
            taken = min(lacking, budget)
            if request.is_text:
                taken = min(taken, text_budget)
                text_budget -= taken
                if not taken:
                    at += 1
                    continue
            preempted += self._make_room(request, request.computed + taken)
            if at == len(self.running):
                # It was the last one, and has lost its own blocks.
                break
            if request.generated and lacking == 1:
                context_tokens += length
            else:
                prefill_tokens += taken
                request.chunks += 1
            self._compute(request, taken)
            chunks.append((request, taken))
            budget -= taken
            at += 1
        admitted: list[str] = []
        if preempted:
            self.preempted += preempted
        else:
            prefill_tokens += self._admit(budget, text_budget, text_places, chunks, admitted)
        return StepPlan(chunks, prefill_tokens, context_tokens, preempted, admitted)

    def _make_room(self, request: ScheduledRequest[S], tokens: int) -> int:
        """Give a running request blocks for so many tokens; returns how many were preempted."""
        blocks = -(-tokens // self._block_size)
        gone = 0
        while not self._manager.grow(request.blocks, blocks):
            victim = self.running.pop()
            self._manager.release(victim.blocks)
            victim.computed = 0
            victim.resumes = victim.generated > 0
            _insert(self.waiting, victim, first=True)
            gone += 1
            if victim is request:
                break
        return gone

    def _text_room(self) -> tuple[int, int]:
        """How many tokens of texts to embed the next step may compute, and how many of them it may
        admit."""
        tokens, places = self._max_num_batched_tokens, self._max_num_seqs
        if self._texts in (0, len(self.running) + len(self.waiting)):
            return tokens, places
        running = sum(one.is_text for one in self.running)
        return max(1, tokens // TEXT_SHARE), max(1, places // TEXT_SHARE) - running

    def _next_waiting(self, *, takes_texts: bool) -> ScheduledRequest[S] | None:
        """Who is to be admitted next; texts are passed by where they have had their part."""
        if not self.waiting or takes_texts or not self.waiting[0].is_text:
            return self.waiting[0] if self.waiting else None
        return next((one for one in self.waiting if not one.is_text), None)

    def _admit(
        self,
        budget: int,
        text_budget: int,
        text_places: int,
        chunks: list[tuple[ScheduledRequest[S], int]],
        admitted: list[str],
    ) -> int:
        """Start waiting requests; returns how many tokens they compute."""
        used = 0
        while budget > used and len(self.running) < self._max_num_seqs:
            request = self._next_waiting(takes_texts=text_budget > 0 < text_places)
            if request is None:
                break
            found = self._room_for(request)
            if found is None:
                break
            cached = found * self._block_size
            lacking = request.sequence.length - cached
            taken = min(lacking, budget - used)
            if request.is_text:
                taken = min(taken, text_budget)
            if taken < lacking and not self._chunked_prefill and chunks:
                # It waits for a step of its own, and is cut only if that has no room for it either.
                break
            if request is self.waiting[0]:
                self.waiting.popleft()
            else:
                self.waiting.remove(request)
            if request.is_text:
                text_budget -= taken
                text_places -= 1
            _insert(self.running, request)
            self._manager.claim(request.blocks, request.sequence.sequence_hashes, found)
            request.computed = cached
            if request.cached_tokens is None:
                request.cached_tokens = cached
                if request.leads:
                    admitted.append(request.id)
                    self.prompt_tokens += request.sequence.length
                    self.cached_tokens += cached
            has_room = self._manager.grow(request.blocks, -(-(cached + taken) // self._block_size))
            assert has_room, "a request was admitted without room for it"
            self._compute(request, taken)
            request.chunks += 1
            chunks.append((request, taken))
            used += taken
        return used

    def _room_for(self, request: ScheduledRequest[S]) -> int | None:
        """Cached blocks that a waiting request would begin with; None without room for it."""
        length = request.sequence.length
        size = self._block_size
        if not request.caches:
            return 0 if self._manager.admits(-(-length // size), 0) else None
        # The last token is computed in any case: its result is the next token.
        found, used = self._cached_prefix(request.sequence, (length - 1) // size)
        return found if self._manager.admits(-(-length // size), used) else None

    def _cached_prefix(self, sequence: S, limit: int) -> tuple[int, int]:
        """How many of the first `limit` blocks are cached, and in use; see `BlockManager.prefix`.

        Blocks behind one that is not cached are hashed when they are computed: all of a long prompt
        at once would hold up the others.
        """
        blocks = 0
        while True:
            blocks = min(limit, max(2 * blocks, LOOKED_UP))
            sequence.hash_to(blocks)
            found, used = self._manager.prefix(sequence.sequence_hashes, blocks)
            if found < blocks or blocks == limit:
                return found, used

    def _compute(self, request: ScheduledRequest[S], tokens: int) -> None:
        """Note tokens as computed, and cache the blocks that they complete."""
        size = self._block_size
        first = request.computed // size
        request.computed += tokens
        last = request.computed // size
        if last > first and request.caches:
            sequence = request.sequence
            sequence.hash_to(last)
            self._manager.store(
                request.blocks,
                first,
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
            lacking = request.sequence.length - request.computed
            if not request.generated or lacking != 1 or request.stop_token_ids:
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
            max(0, -(-(request.computed + steps) // size) - len(request.blocks))
            for request in self.running
        )

    @property
    def context_tokens(self) -> int:
        """The tokens of all running requests."""
        return sum(request.sequence.length for request in self.running)

    def decode(self, request: ScheduledRequest[S], steps: int) -> None:
        """Carry out quiet steps for a running request; the tokens that they make are there."""
        blocks = -(-(request.computed + steps) // self._block_size)
        has_room = self._manager.grow(request.blocks, blocks)
        assert has_room, "quiet steps ran out of blocks"
        self._compute(request, steps)

    # Leaving --------------------------------------------------------------------------

    def finish(self, request: ScheduledRequest[S]) -> None:
        """Take a running request out, and its blocks back."""
        self._texts -= request.is_text
        self.running.remove(request)
        self._manager.release(request.blocks)

    def cancel(self, request: ScheduledRequest[S]) -> None:
        """Take a request out wherever it is."""
        if request in self.running:
            self.finish(request)
        else:
            self._texts -= request.is_text
            self.waiting.remove(request)


def _insert(
    requests: MutableSequence[ScheduledRequest[S]],
    request: ScheduledRequest[S],
    *,
    first: bool = False,
) -> None:
    """Put a request in its place by priority: behind all of its own, or before them."""
    priority = request.priority
    if not first and (not requests or requests[-1].priority >= priority):
        requests.append(request)
        return
    least = priority + 1 if first else priority
    before = (at for at, other in enumerate(requests) if other.priority < least)
    requests.insert(next(before, len(requests)), request)
