"""The scheduler of an engine's steps: continuous batching as vLLM does it.

Running requests come first, each with the tokens that it lacks, a prompt in chunks; then waiting
ones in their order, as long as the token budget, the number of sequences and the blocks allow.
A running request that finds no block takes those of the last one: that one waits again, at the
head, and is computed anew. The order is that of priority, and of admission where it is the same.
Of those that wait with one priority, owners (tenants) have their turns by the work of their
requests. One that finds no room gets that of a running request of lower priority, or of an owner
that has more of them than its own, which waits again.

A request whose prompt is computed elsewhere, or read from elsewhere while it is computed here, has
all blocks of its prompt when it is admitted, and nobody takes them from it. While it waits for its
prompt to come it takes no place among those that run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from dynbus.kvrouter import fairness
from dynbus.llm.generation import FinishReason, Session

from .block_manager import BlockManager
from .interface import BlockTier, CachedBlock, Came, Held, KeptBlocks, KvWitness, remembers

TEXT_SHARE: Final = 4
"""The part of a step's tokens that texts to embed have at most while anything else runs: a stream
waits for the whole step, and nobody watches an embedding come."""

FIRST_OUTPUT: Final = 128.0
"""Tokens of output that a request is taken to have before any has ended."""
MEMORY: Final = 32
"""The output of the latest request counts for so much of what is expected: one part in as many."""

EXCHANGED: Final = 8
"""The part of the places of which each step may take some that run for some that wait."""

LOOKED_UP: Final = 256
"""Blocks of a prompt that are looked up at first; twice as many each time that all are cached."""


class HashedSequence(Protocol):
    """The interface that the scheduler needs of a request's tokens.

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


class _KeptSequence(HashedSequence):
    """The blocks of a conversation, whose tokens are not known."""

    def __init__(self, kept: KeptBlocks, block_size: int) -> None:
        self.sequence_hashes, self.block_hashes = kept
        self.length = len(kept.sequence_hashes) * block_size

    def hash_to(self, blocks: int) -> None:
        """They are hashed."""


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
        holds: whether its prompt's blocks are held when it is admitted, and are not taken from it.
        is_parked: whether it waits for its prompt, which is computed elsewhere.
        blocks: its block table.
        computed: tokens whose keys and values are in the cache, when the step has ended.
        generated: tokens of output so far.
        cached_tokens: tokens of the prompt found in the cache when it was first admitted.
        resumes: whether it was preempted after its last token.
        chunks: steps that computed a part of its prompt.
        owner: whose it is.
        session: the conversation that goes on after it; None for none.
        expected: tokens of output that are predicted.
        turn: its place among those that wait with its priority.
        source: the instance from which blocks are delivered to it; empty where it is not known.
        is_drawn: whether the witness has had its first logits.
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
    holds: bool = False
    is_parked: bool = False
    blocks: list[int] = field(default_factory=list[int])
    computed: int = 0
    generated: int = 0
    cached_tokens: int | None = None
    resumes: bool = False
    chunks: int = 0
    owner: str = ""
    session: Session | None = None
    expected: float = 0.0
    turn: float = 0.0
    source: str = ""
    is_drawn: bool = False

    def __repr__(self) -> str:
        return f"<ScheduledRequest {self.id} [{self.computed}/{self.sequence.length} computed]>"

    @property
    def is_ready(self) -> bool:
        """True if all its tokens are computed when the step ends, so that it has the next one."""
        return self.computed == self.sequence.length

    def finish_reason(self, token_id: int) -> FinishReason | None:
        """The reason for which it ends with its last token, which is counted already; None when it
        goes on."""
        if self.generated > self.min_tokens and token_id in self.stop_token_ids:
            return "stop"
        return "length" if self.generated >= self.max_tokens else None


class StepPlan(NamedTuple, Generic[S]):
    """The work of one step.

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
        is_stalled: whether nothing can be computed until a request or a hold comes or goes.
        witness: is told where the blocks of each request come from; None for nobody.
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
        self.is_stalled = False
        self.witness: KvWitness | None = None
        self._texts = self._parked = 0
        self._held: list[Held] = []
        self._manager = manager
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._chunked_prefill = chunked_prefill
        self._turns = fairness.FairTurns()
        # By owner; of texts none.
        self._running_of, self._waiting_of = Counter[str](), Counter[str]()
        # Whether the last step found no room for one that waits.
        self._is_full = False
        self._mean_output = FIRST_OUTPUT
        # A token of output takes a place of a step, one of a prompt a part of its tokens.
        self._decode_work = max_num_batched_tokens / max_num_seqs

    def __repr__(self) -> str:
        return f"<Scheduler [{len(self.running)} running, {len(self.waiting)} waiting]>"

    def add(self, request: ScheduledRequest[S]) -> None:
        """Let a request wait for a step that has room for it."""
        self._texts += request.is_text
        self.is_stalled = False
        if not request.is_text:
            request.expected = min(float(request.max_tokens), self._mean_output)
        request.turn = self._turns.take(request.owner, self._work(request))
        self._count(self._waiting_of, request, 1)
        self._wait(request)

    def _work(self, request: ScheduledRequest[S]) -> float:
        """The predicted work of a request that has not begun, in tokens of a prompt."""
        prompt = request.sequence.length if request.leads else 0
        return prompt + self._decode_work * request.expected

    @staticmethod
    def _count(owners: Counter[str], request: ScheduledRequest[S], change: int) -> None:
        if not request.is_text:
            owners[request.owner] += change
            if not owners[request.owner]:
                del owners[request.owner]

    def _wait(self, request: ScheduledRequest[S]) -> None:
        """Have a request wait: behind all that are more urgent or whose turn comes first."""
        waiting = self.waiting
        place = (-request.priority, request.turn)
        if not waiting or (-waiting[-1].priority, waiting[-1].turn) <= place:
            waiting.append(request)
            return
        behind = (at for at, one in enumerate(waiting) if (-one.priority, one.turn) > place)
        waiting.insert(next(behind), request)

    def schedule(self) -> StepPlan[S]:
        """Choose what the next step computes, and give it its blocks."""
        exchanged = self._change_places() if self._lacks_room() else 0
        budget = self._max_num_batched_tokens
        text_budget, text_places = self._text_room()
        prefill_tokens = context_tokens = preempted = 0
        chunks: list[tuple[ScheduledRequest[S], int]] = []
        at = 0
        # Some may be parked, and more may run than have a place when their prompts have come.
        chooses = self._parked > 0 or len(self.running) > self._max_num_seqs
        while at < len(self.running) and budget:
            request = self.running[at]
            if chooses and (request.is_parked or len(chunks) == self._max_num_seqs):
                at += 1
                continue
            length = request.sequence.length
            lacking = length - request.computed
            taken = min(lacking, budget)
            if request.is_text:
                taken = min(taken, text_budget)
                text_budget -= taken
                if not taken:
                    at += 1
                    continue
            elif lacking > 1 and self.waiting and self._chunked_prefill:
                taken = min(taken, budget - self._owed(request))
                if taken <= 0:
                    at += 1
                    continue
            gone = self._make_room(request, request.computed + taken)
            if gone:
                preempted += gone
                if at == len(self.running) or self.running[at] is not request:
                    # It was the last one that could, and has lost its own blocks.
                    continue
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
            self.is_stalled = not chunks
        if self._manager.pins:
            for request, _ in chunks:
                if request.holds:
                    self._tell_held(request)
        return StepPlan(chunks, prefill_tokens, context_tokens, preempted + exchanged, admitted)

    def _owed(self, request: ScheduledRequest[S]) -> int:
        """The tokens of prompts that are admitted in this step and go before the rest of the prompt
        of one that runs: they are more urgent, or their owners have fewer requests running."""
        owed, most = 0, self._running_of[request.owner]
        for one in islice(self.waiting, max(0, self._seats)):
            is_before = one.priority > request.priority or (
                one.priority == request.priority and self._running_of.get(one.owner, 0) + 1 < most
            )
            if one.is_text or not is_before or self._room_for(one) is None:
                break
            owed += one.sequence.length
        return owed

    def _lacks_room(self) -> bool:
        """True if something waits that finds no room in this step unless others give way."""
        if self._is_full or len(self.waiting) > self._seats:
            return bool(self.waiting)
        if not self.waiting or not self.running:
            return False
        first, last = self.waiting[0], self.running[-1]
        return first.priority > last.priority and self._room_for(first) is None

    def _change_places(self) -> int:
        """Have requests that run wait again for the sake of some that wait; returns how many."""
        placed = self._placed_anyway()
        fitting, gone = len(placed), 0
        for request in placed:
            self._move(request, runs=True)
        for _ in range(max(1, self._max_num_seqs // EXCHANGED)):
            exchange = self._exchange(placed)
            if exchange is None:
                break
            request, victims = exchange
            self._move(request, runs=True)
            placed.append(request)
            for victim in victims:
                self.running.remove(victim)
                self._set_back(victim)
            gone += len(victims)
        for at, request in reversed(list(enumerate(placed))):
            if at >= fitting:
                # Before those that gave way, whose turns have come as well.
                request.turn = min(request.turn, self.waiting[0].turn)
            self._move(request, runs=False)
        self.preempted += gone
        return gone

    def _placed_anyway(self) -> list[ScheduledRequest[S]]:
        """The requests that wait and find a place in this step without anyone's giving way."""
        blocks = self._manager.free - self._manager.headroom
        placed: list[ScheduledRequest[S]] = []
        for request in islice(self.waiting, max(0, self._seats)):
            blocks -= -(-request.sequence.length // self._block_size)
            if blocks < 0:
                break
            placed.append(request)
        return placed

    def _move(self, request: ScheduledRequest[S], *, runs: bool) -> None:
        """Take a request out of those that wait, as one that will run, or put it at their head."""
        if runs:
            self.waiting.remove(request)
        else:
            self.waiting.appendleft(request)
        self._count(self._waiting_of, request, -1 if runs else 1)
        self._count(self._running_of, request, 1 if runs else -1)

    def _exchange(
        self, placed: Sequence[ScheduledRequest[S]] = ()
    ) -> tuple[ScheduledRequest[S], list[ScheduledRequest[S]]] | None:
        """One that waits, and those that run that have to give way to it; None for none.

        Args:
            placed: those for which others have given way just now.
        """
        if not self.waiting or self.waiting[0].is_text:
            return None
        first = self.waiting[0]
        lower = [one for one in self.running if one.priority < first.priority]
        if victims := self._enough_of(lower, [first, *placed]):
            return first, victims
        running = self._running_of
        owner, most = max(running.items(), key=itemgetter(1), default=("", 0))
        short = {one for one in self._waiting_of if running.get(one, 0) + 1 < most}
        if not short:
            return None
        alike = (one for one in self.waiting if one.priority == first.priority)
        request = next((one for one in alike if one.owner in short), None)
        if request is None:
            return None
        others = [one for one in self.running if one.owner == owner]
        # No more than would leave it with as many as the other has then.
        others = others[running.get(request.owner, 0) + 1 :]
        others = [one for one in others if one.priority <= request.priority]
        victims = self._enough_of(others, [request, *placed])
        return (request, victims) if victims else None

    def _enough_of(
        self, others: Sequence[ScheduledRequest[S]], wanting: Sequence[ScheduledRequest[S]]
    ) -> list[ScheduledRequest[S]]:
        """The last of some that run whose places make room for those that want it; none where all
        do not."""
        blocks = sum(-(-one.sequence.length // self._block_size) for one in wanting)
        blocks -= self._manager.free - self._manager.headroom
        seats = len(wanting) - self._seats
        victims: list[ScheduledRequest[S]] = []
        for one in reversed(others):
            if blocks <= 0 and seats <= 0:
                break
            if not one.holds:
                victims.append(one)
                blocks -= len(one.blocks)
                seats -= 1
        return victims if blocks <= 0 and seats <= 0 else []

    def _make_room(self, request: ScheduledRequest[S], tokens: int) -> int:
        """Give a running request blocks for so many tokens; returns how many were preempted."""
        blocks = -(-tokens // self._block_size)
        gone = 0
        while not self._manager.grow(request.blocks, blocks):
            # What is held would not be free; this request at the latest holds nothing.
            last = len(self.running) - 1
            while self.running[last].holds:
                last -= 1
            victim = self.running.pop(last)
            self._set_back(victim)
            gone += 1
            if victim is request:
                break
        return gone

    def _set_back(self, request: ScheduledRequest[S]) -> None:
        """Let a request that runs no longer wait again, without its blocks."""
        self._manager.release(request.blocks)
        self._count(self._running_of, request, -1)
        self._count(self._waiting_of, request, 1)
        request.computed = 0
        request.resumes = request.generated > 0
        # Its turn has come already: behind it are those that came later.
        least = -request.priority
        before = (at for at, other in enumerate(self.waiting) if -other.priority >= least)
        self.waiting.insert(next(before, len(self.waiting)), request)

    def _text_room(self) -> tuple[int, int]:
        """The number of tokens of texts to embed that the next step may compute, and of those that
        it may admit.
        """
        tokens, places = self._max_num_batched_tokens, self._max_num_seqs
        if self._texts in (0, len(self.running) + len(self.waiting)):
            return tokens, places
        running = sum(one.is_text for one in self.running)
        return max(1, tokens // TEXT_SHARE), max(1, places // TEXT_SHARE) - running

    def _next_waiting(self, *, takes_texts: bool) -> ScheduledRequest[S] | None:
        """The request to be admitted next; texts are passed by where they have had their part."""
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
        self._is_full = False
        while True:
            request = self._next_waiting(takes_texts=text_budget > 0 < text_places)
            if request is None:
                break
            has_place = self._has_place(request) and (request.is_parked or budget > used)
            cached_blocks = self._room_for(request) if has_place else None
            if cached_blocks is None:
                self._is_full = budget > used
                break
            cached = cached_blocks * self._block_size
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
            self._turns.begin(request.turn)
            self._count(self._waiting_of, request, -1)
            self._count(self._running_of, request, 1)
            _insert(self.running, request)
            # The last token is computed in any case.
            most = (request.sequence.length - 1) // self._block_size if request.caches else 0
            name = request.id if request.leads else ""
            cached = self._claim(request.blocks, request.sequence, cached_blocks, most, name)
            taken = min(taken, request.sequence.length - cached)
            if request.is_text:
                text_budget -= taken
                text_places -= 1
            request.computed = cached
            if request.cached_tokens is None:
                request.cached_tokens = cached
                if request.leads:
                    self._turns.correct(request.owner, -cached)
                    admitted.append(request.id)
                    self.prompt_tokens += request.sequence.length
                    self.cached_tokens += cached
            if request.holds:
                self._begin_hold(request)
                if request.is_parked:
                    self._parked += 1
                    continue
            has_room = self._manager.grow(request.blocks, -(-(cached + taken) // self._block_size))
            assert has_room, "a request was admitted without room for it"
            self._compute(request, taken)
            request.chunks += 1
            chunks.append((request, taken))
            used += taken
        return used

    @property
    def _seats(self) -> int:
        """The number of requests that may run beside those that do; below 0 where more run than
        have a place."""
        return self._max_num_seqs - (len(self.running) - self._parked)

    def _has_place(self, request: ScheduledRequest[S]) -> bool:
        """True if a waiting request may run, or wait for its prompt, beside those that do."""
        return self._parked < self._max_num_seqs if request.is_parked else self._seats > 0

    def _room_for(self, request: ScheduledRequest[S]) -> int | None:
        """Cached blocks that a waiting request would begin with; None without room for it."""
        length = request.sequence.length
        size = self._block_size
        if not request.caches:
            return 0 if self._manager.admits(-(-length // size), 0) else None
        # The last token is computed in any case: its result is the next token.
        cached, used = self._cached_prefix(request.sequence, (length - 1) // size)
        return cached if self._manager.admits(-(-length // size), used) else None

    def _cached_prefix(self, sequence: HashedSequence, limit: int) -> tuple[int, int]:
        """The number of the first `limit` blocks that are cached, and of those in use; see
        `BlockManager.prefix`.

        Blocks behind one that is not cached are hashed when they are computed: all of a long prompt
        at once would hold up the others.
        """
        blocks = 0
        while True:
            blocks = min(limit, max(2 * blocks, LOOKED_UP))
            sequence.hash_to(blocks)
            cached, used = self._manager.prefix(sequence.sequence_hashes, blocks)
            if cached < blocks or blocks == limit:
                return cached, used

    def _claim(
        self,
        table: list[int],
        sequence: HashedSequence,
        cached: int,
        most: int,
        name: str = "",
    ) -> int:
        """Give a request the cached blocks that it begins with.

        Args:
            cached: how many the cache has.
            most: up to so many in all are brought back from the tier below, as room allows.
            name: of the request or hold for the witness; empty to tell it nothing.

        Returns:
            How many tokens are in its blocks.
        """
        manager, size = self._manager, self._block_size
        manager.claim(table, sequence.sequence_hashes, cached)
        if self.witness is not None and name:
            self.witness.came(name, sequence.sequence_hashes, 0, cached, "cached", "", ())
        if manager.tier is None:
            return cached * size
        limit = min(most, cached + manager.free - manager.headroom)
        kept = self._kept_in_tier(manager.tier, sequence, cached, limit)
        if not kept:
            return cached * size
        has_room = manager.grow(table, cached + kept)
        assert has_room, "the blocks of a tier were taken back without room for them"
        end = cached + kept
        filled = manager.tier.fill(table[cached:], sequence.sequence_hashes[cached:end])
        lost = table[cached + filled :]
        del table[cached + filled :]
        manager.release(lost)
        stored = self._store(table, sequence, cached, len(table))
        if self.witness is not None:
            hashes = sequence.sequence_hashes
            self.witness.came(name, hashes, cached, len(table), "host", "", stored)
        return len(table) * size

    def _kept_in_tier(
        self, tier: BlockTier, sequence: HashedSequence, cached: int, limit: int
    ) -> int:
        """The number of blocks behind the cached ones that the tier has, up to a limit."""
        known, looked_up = cached, LOOKED_UP
        while known < limit:
            end = min(limit, known + looked_up)
            sequence.hash_to(end)
            kept = tier.find(sequence.sequence_hashes[known:end])
            known += kept
            if known < end:
                break
            looked_up *= 2
        return known - cached

    def _store(
        self, table: Sequence[int], sequence: HashedSequence, first: int, last: int
    ) -> Sequence[CachedBlock]:
        """Cache the blocks of a sequence from `first` to before `last`, whose contents are there.

        The hashes of those before are known.

        Returns:
            See `BlockManager.store`.
        """
        if last <= first:
            return ()
        sequence.hash_to(last)
        return self._manager.store(
            table,
            first,
            sequence.sequence_hashes[first:last],
            sequence.block_hashes[first:last],
            sequence.sequence_hashes[first - 1] if first else None,
        )

    def _compute(self, request: ScheduledRequest[S], tokens: int, how: Came = "computed") -> None:
        """Note tokens as computed, and cache the blocks that they complete.

        Args:
            how: they came.
        """
        size = self._block_size
        first = request.computed // size
        request.computed += tokens
        last = request.computed // size
        if last > first and request.caches:
            stored = self._store(request.blocks, request.sequence, first, last)
            if self.witness is not None:
                hashes, source = request.sequence.sequence_hashes, request.source
                self.witness.came(request.id, hashes, first, last, how, source, stored)

    # Blocks that others read and write ------------------------------------------------

    def _begin_hold(self, request: ScheduledRequest[S]) -> None:
        """Give a request that is admitted all blocks of its prompt, and hold them."""
        has_room = self._manager.grow(
            request.blocks, -(-request.sequence.length // self._block_size)
        )
        assert has_room, "a request was admitted without room for it"
        self._manager.hold(request.id, request.blocks)
        if request.is_parked:
            self._tell_held(request)

    def _tell_held(self, request: ScheduledRequest[S]) -> None:
        blocks = tuple(request.blocks)
        self._held.append(Held(request.id, blocks, request.computed, request.cached_tokens or 0))

    def take_held(self) -> list[Held]:
        """The holds that are new or have more tokens since the last call."""
        held, self._held = self._held, []
        return held

    @property
    def has_held(self) -> bool:
        """True if `take_held` has some."""
        return bool(self._held)

    def deliver(self, request: ScheduledRequest[S], computed: int, *, goes_on: bool) -> None:
        """Let a parked request go on.

        Args:
            computed: tokens of its prompt that are in its blocks.
            goes_on: whether its next token is known, so that it goes on with its blocks if its
                whole prompt is in them. Otherwise it waits to be admitted like one that was
                preempted, and finds its complete blocks in the cache: transfers that were given up
                may still write into the others.
        """
        assert request.is_parked, f"{request} waits for nothing"
        self.is_stalled = request.is_parked = request.holds = False
        if request not in self.running:
            # It has no blocks yet.
            return
        self._parked -= 1
        length = request.sequence.length
        computed = min(computed, length)
        is_whole = goes_on and computed == length
        tokens = length if is_whole else computed // self._block_size * self._block_size
        if tokens > request.computed:
            self._compute(request, tokens - request.computed, "moved")
        if not is_whole:
            self.running.remove(request)
            self._set_back(request)

    def hold(self, hold_id: str, sequence: S) -> None:
        """Hold what is cached of a sequence, and what the tier below has of it."""
        self.is_stalled = False
        limit = sequence.length // self._block_size
        cached, _ = self._cached_prefix(sequence, limit)
        table: list[int] = []
        tokens = self._claim(table, sequence, cached, limit, hold_id)
        self._manager.hold(hold_id, table)
        self._held.append(Held(hold_id, tuple(table), tokens, tokens))
        self._manager.release(table)

    def announce(self, name: str, owner: str, session: str) -> None:
        """Bring back what the tier below keeps of a conversation; see `AnnouncedEngine`."""
        tier = self._manager.tier
        kept = tier.blocks_of(owner, session) if remembers(tier) else KeptBlocks([], [])
        sequence = _KeptSequence(kept, self._block_size)
        limit = len(kept.sequence_hashes)
        cached, _ = self._cached_prefix(sequence, limit)
        table: list[int] = []
        tokens = self._claim(table, sequence, cached, limit)
        self._held.append(Held(name, (), tokens, cached * self._block_size))
        self._manager.release(table)

    def end_hold(self, hold_id: str) -> None:
        """End a hold, or have none for its request; nothing for an unknown one."""
        self.is_stalled = False
        self._manager.end_hold(hold_id)

    # Many steps at once ---------------------------------------------------------------

    def quiet_steps(self, limit: int) -> int:
        """For how many steps every running request that has its prompt decodes and nothing else
        happens.

        The last of them may be the one in which a request ends. 0 when the next step does
        anything else; `limit` at most.
        """
        decoding = self.decoding
        if not 0 < len(decoding) <= self._max_num_seqs:
            return 0
        steps = limit
        for request in decoding:
            lacking = request.sequence.length - request.computed
            if not request.generated or lacking != 1 or request.stop_token_ids or request.resumes:
                return 0
            left = request.max_tokens - request.generated
            if left < steps:
                steps = left
        # What keeps a request waiting now does so until another ends: blocks only get fewer.
        first = self.waiting[0] if self.waiting else None
        if first is not None and self._has_place(first) and self._room_for(first) is not None:
            return 0
        if self._lacks_room() and self._exchange() is not None:
            return 0
        while steps and self._added_blocks(steps) > self._manager.free:
            steps //= 2
        return steps

    def _added_blocks(self, steps: int) -> int:
        size = self._block_size
        return sum(
            max(0, -(-(request.computed + steps) // size) - len(request.blocks))
            for request in self.decoding
        )

    @property
    def decoding(self) -> list[ScheduledRequest[S]]:
        """The running requests that do not wait for their prompt."""
        if not self._parked:
            return self.running
        return [request for request in self.running if not request.is_parked]

    @property
    def context_tokens(self) -> int:
        """The tokens of all of these."""
        return sum(request.sequence.length for request in self.decoding)

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
        self._parked -= request.is_parked
        self.is_stalled = False
        self.running.remove(request)
        self._count(self._running_of, request, -1)
        if request.session is not None:
            self._keep_for(request.session, request)
        self._manager.release(request.blocks)
        if not request.is_text:
            unexpected = request.generated - request.expected
            self._turns.correct(request.owner, self._decode_work * unexpected)
            if request.generated:
                self._mean_output += (request.generated - self._mean_output) / MEMORY

    def _keep_for(self, session: Session, request: ScheduledRequest[S]) -> None:
        """Have the blocks of a request kept for the next one of its conversation."""
        tier = self._manager.tier
        if tier is not None and request.leads and request.caches:
            blocks = request.computed // self._block_size
            hashes = request.sequence.sequence_hashes[:blocks]
            find = self._manager.find_cached
            name = session.branch or session.name
            tier.keep_for(request.owner, name, hashes, session.seconds, find, session.after)

    def cancel(self, request: ScheduledRequest[S]) -> None:
        """Take a request out wherever it is."""
        if request in self.running:
            self.finish(request)
        else:
            self._texts -= request.is_text
            self.is_stalled = False
            self.waiting.remove(request)
            self._count(self._waiting_of, request, -1)
            if not request.generated:
                self._turns.correct(request.owner, -self._work(request))


def _insert(requests: list[ScheduledRequest[S]], request: ScheduledRequest[S]) -> None:
    """Put a request in its place by priority, behind all of its own."""
    if not requests or requests[-1].priority >= request.priority:
        requests.append(request)
        return
    before = (at for at, other in enumerate(requests) if other.priority < request.priority)
    requests.insert(next(before, len(requests)), request)
