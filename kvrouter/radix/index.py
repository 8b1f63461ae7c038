"""The radix index: which instance holds which prefix, as its events tell.

`RadixIndex` numbers, orders and separates: by instance, event epoch, data-parallel rank and
tier. What it says of an instance is a pure function of the messages applied, in their order.
It errs on one side only: after a gap it forgets what the rank had rather than claim a block
that may be gone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from dynbus.kvrouter.events import EventBatch, Hashes, InvalidEvents, Operation, Tier, decode_events

from .eviction import Victim, choose_victims, evict, fair_share
from .holdings import count_tiers
from .labels import LabelledHolders
from .prefix_tree import MOST_LOOKED_AT, PrefixTree
from .runs import Holder

SWEEP_BLOCKS: Final = 256
"""Blocks of instances that left to free with each message."""

DEFAULT_MAX_BLOCKS: Final = 10_000_000

EVICT_TO: Final = 0.9
"""The part of `max_blocks` that is left when some were forgotten for it."""
EVICT_LOOK: Final = 1 << 16
"""With each message caches forget until so many of their blocks and runs were looked at."""
OVERSHOOT: Final = 1.05
"""Beyond so many times `max_blocks` caches forget until less is held, however long that takes."""


class MessageOutcome(StrEnum):
    """The outcome of applying a message."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    """All of its events were applied before."""
    STALE = "stale"
    """It belongs to an epoch that is over."""
    GAP = "gap"
    """Events before it are missing: the rank was emptied, then the message applied."""
    UNKNOWN_PARENT = "unknown_parent"
    """Applied but for blocks whose parent the index does not know."""
    EXCESSIVE = "excessive"
    """Blocks with very many others below them came and went: the rank was emptied."""
    MALFORMED = "malformed"
    """It is no message of events."""


class Applied(NamedTuple):
    """The outcome of applying a message, and its size.

    Attributes:
        events: how many of its events were applied.
    """

    verdict: MessageOutcome
    events: int

    @property
    def needs_resync(self) -> bool:
        """True if the index lacks blocks that only the instance can send again."""
        return self.verdict in (
            MessageOutcome.GAP,
            MessageOutcome.UNKNOWN_PARENT,
            MessageOutcome.EXCESSIVE,
        )


class Rank(NamedTuple):
    """One data-parallel rank of an instance: a cache of its own."""

    instance: str
    dp_rank: int

    def __str__(self) -> str:
        return f"{self.instance}/{self.dp_rank}"


class Overlap(NamedTuple):
    """The blocks of a prefix that a rank holds, counted in the nearest tier that has them."""

    device: int
    host: int
    disk: int
    external: int

    @property
    def total(self) -> int:
        """Blocks of all tiers together."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """Figures of an index.

    Attributes:
        blocks: held blocks, counted once for each cache that holds them.
        detached: those of them that lie behind a hole.
        runs: stretches of blocks without a branch.
        verdicts: messages by what became of them.
        unknown_removals: removals of blocks that were not held.
        evicted: blocks forgotten for the sake of `max_blocks`.
    """

    instances: int
    blocks: int
    detached: int
    runs: int
    verdicts: dict[MessageOutcome, int]
    unknown_removals: int
    evicted: int


@dataclass(slots=True)
class RankState:
    """The state of a rank in the index.

    Attributes:
        partial: whether blocks may be missing, since the index joined late or had a gap.
        stated: what the rank says of how far its events can be relied on; empty for exact.
    """

    event_epoch: int
    next_id: int
    partial: bool
    holders: dict[int, Holder] = field(default_factory=dict[int, Holder])
    stated: str = ""

    @property
    def blocks(self) -> int:
        """The number of blocks that it holds, over all tiers."""
        return sum(holder.blocks for holder in self.holders.values())


class RadixIndex:
    """Prefixes of blocks and the instances that hold them.

    Args:
        max_blocks: beyond this many held blocks the instances that hold more than a fair share
            of it forget what they used the longest ago, with the messages that follow. Meanwhile
            `OVERSHOOT` times as many may be held.
    """

    def __init__(self, *, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self.tree = PrefixTree()
        self.ranks: dict[Rank, RankState] = {}
        self._of_instance: dict[str, list[Rank]] = {}
        # By the number of a holder in device memory.
        self._names: dict[int, str] = {}
        self._owners: dict[int, Rank] = {}
        self._by_instance = LabelledHolders(self._names, int)
        self._by_rank = LabelledHolders(self._owners, _device_overlap)
        self._is_plain = True  # one rank per instance and one tier
        self._verdicts = dict.fromkeys(MessageOutcome, 0)
        self._unknown_removals = 0
        self._evicted = 0
        self._blocks = 0
        self._max_blocks = max_blocks
        # Runs to give up, and the caches that are still to forget so many blocks of them.
        self._victims: list[Victim] = []
        self._to_forget: deque[tuple[Holder, int]] = deque()

    def __repr__(self) -> str:
        return f"<RadixIndex [{len(self._of_instance)} instances, {self.tree.run_count} runs]>"

    # Events ---------------------------------------------------------------------------

    def apply(self, instance: str, message: bytes) -> Applied:
        """Take in a message of an instance's events."""
        try:
            batch = decode_events(message)
        except InvalidEvents:
            self._verdicts[MessageOutcome.MALFORMED] += 1
            return Applied(MessageOutcome.MALFORMED, 0)
        return self.apply_batch(Rank(instance, batch.dp_rank), batch)

    def apply_batch(self, rank: Rank, batch: EventBatch) -> Applied:
        """Take in a message of a rank's events that is decoded already."""
        applied = self._apply(rank, batch)
        self._verdicts[applied.verdict] += 1
        if not self.tree.is_swept:
            self.tree.sweep(SWEEP_BLOCKS + 2 * applied.events)
        return applied

    def _apply(self, rank: Rank, batch: EventBatch) -> Applied:
        state = self.ranks.get(rank)
        verdict = MessageOutcome.APPLIED
        skip = 0
        if state is None or batch.event_epoch > state.event_epoch:
            state = self._begin(rank, batch)
        elif batch.event_epoch < state.event_epoch:
            return Applied(MessageOutcome.STALE, 0)
        elif batch.first_id > state.next_id:
            self._empty(rank, state)
            state.partial = True
            verdict = MessageOutcome.GAP
        else:
            skip = state.next_id - batch.first_id
            if skip and skip >= len(batch):
                return Applied(MessageOutcome.DUPLICATE, 0)
        state.next_id = batch.first_id + len(batch)
        orphans = self._carry_out(rank, state, batch, skip)
        if orphans is None:
            self._empty(rank, state)
            state.partial = True
            return Applied(MessageOutcome.EXCESSIVE, 0)
        if self._to_forget or self._blocks > self._max_blocks:
            self._evict()
        if orphans and verdict is MessageOutcome.APPLIED and not state.partial:
            verdict = MessageOutcome.UNKNOWN_PARENT
        return Applied(verdict, len(batch) - skip - orphans)

    def _begin(self, rank: Rank, batch: EventBatch) -> RankState:
        """An epoch begins: whatever the rank held is gone."""
        before = self.ranks.get(rank)
        if before is not None:
            self._empty(rank, before)
        state = RankState(batch.event_epoch, batch.first_id, partial=batch.first_id > 0)
        self._follow(rank, state)
        return state

    def _follow(self, rank: Rank, state: RankState) -> None:
        self.ranks[rank] = state
        of_instance = self._of_instance.setdefault(rank.instance, [])
        if rank not in of_instance:
            of_instance.append(rank)
        if len(of_instance) > 1:
            self._is_plain = False

    def _empty(self, rank: Rank, state: RankState) -> None:
        self._blocks -= state.blocks
        for holder in state.holders.values():
            self._names.pop(holder.number, None)
            del self._owners[holder.number]
            self.tree.drop_holder(holder)
        dropped = {holder.number for holder in state.holders.values()}
        if any(holder.number in dropped for holder, _ in self._to_forget):
            self._to_forget = deque(
                (holder, most) for holder, most in self._to_forget if holder.number not in dropped
            )
        state.holders.clear()
        self._by_instance.forget()
        self._by_rank.forget()

    def _carry_out(self, rank: Rank, state: RankState, batch: EventBatch, skip: int) -> int | None:
        """Apply the events from number `skip` on.

        Returns:
            How many chains had no parent; None where carrying on would take too long, since
            blocks with very many others below them came and went.
        """
        tree = self.tree
        operations, tiers, bounds = batch.operations, batch.tiers, batch.bounds
        orphans = looked_at = 0
        stored = sum(bounds[i + 1] - bounds[i] for i in range(skip) if not operations[i])
        at, end = skip, len(operations)
        while at < end and looked_at <= MOST_LOOKED_AT:
            operation, tier = operations[at], tiers[at]
            last = at + 1
            while last < end and operations[last] == operation and tiers[last] == tier:
                last += 1
            first_block, last_block = bounds[at], bounds[last]
            if operation == Operation.STORED:
                count = last_block - first_block
                holder = self._holder(rank, state, tier)
                holder.looked_at = 0
                before = holder.blocks
                orphans += len(
                    tree.store(
                        holder,
                        batch.parents[at:last],
                        [bound - first_block for bound in bounds[at : last + 1]],
                        batch.engine_hashes[first_block:last_block],
                        batch.blocks[8 * stored : 8 * (stored + count)],
                    )
                )
                self._blocks += holder.blocks - before
                stored += count
                looked_at += holder.looked_at
            elif operation == Operation.REMOVED:
                removed = batch.engine_hashes[first_block:last_block]
                holder = self._holder(rank, state, tier)
                holder.looked_at = 0
                missing = tree.remove(holder, removed)
                looked_at += holder.looked_at
                self._blocks -= len(removed) - missing
                self._unknown_removals += missing
            elif operation == Operation.CLEARED:
                self._empty(rank, state)
                state.partial = False
            at = last
        return None if looked_at > MOST_LOOKED_AT else orphans

    def _evict(self) -> None:
        """Make room for some time: one cache after the other forgets its oldest runs."""
        looked_at = 0
        most_held = self._max_blocks * OVERSHOOT
        before = -1
        # What caches forget may be less than they were to: then once more, if that helps.
        while before != self._evicted:
            before = self._evicted
            if not self._to_forget and not self._choose():
                self.tree.sweep(EVICT_LOOK)
                return
            while self._to_forget and (looked_at < EVICT_LOOK or self._blocks > most_held):
                holder, most = self._to_forget.popleft()
                looked_at += holder.blocks + len(self._victims)
                evicted = evict(self.tree, holder, self._victims, most)
                self._blocks -= evicted
                self._evicted += evicted
                if evicted:
                    # What was forgotten may be named as a parent; its instance need not send it
                    # again.
                    self.ranks[self._owners[holder.number]].partial = True
            if self._to_forget:
                return
            self._victims = []
            if self._blocks <= most_held:
                return

    def _choose(self) -> bool:
        """Find out who is to forget how much, and of which runs; returns whether there are any."""
        room = int(self._max_blocks * EVICT_TO)
        held = {
            instance: sum(self.ranks[rank].blocks for rank in ranks)
            for instance, ranks in self._of_instance.items()
        }
        share = fair_share(held.values(), room)
        for instance in [instance for instance, blocks in held.items() if blocks > share]:
            ranks = self._of_instance[instance]
            holders = [one for rank in ranks for one in self.ranks[rank].holders.values()]
            # An instance's caches share likewise.
            of_each = fair_share([holder.blocks for holder in holders], share)
            self._to_forget.extend(
                (holder, holder.blocks - of_each) for holder in holders if holder.blocks > of_each
            )
        chosen = {holder.number for holder, _ in self._to_forget}
        self._victims = choose_victims(self.tree, chosen, self._blocks - room)
        if not self._victims:
            self._to_forget.clear()
        return bool(self._to_forget)

    def _holder(self, rank: Rank, state: RankState, tier: int) -> Holder:
        holder = state.holders.get(tier)
        if holder is None:
            holder = state.holders[tier] = self.tree.add_holder()
            self._own(rank, tier, holder)
        return holder

    def restore_evicted(self, blocks: int) -> None:
        """So many blocks were forgotten before, for want of room; with more room now they may be
        said again."""
        if 2 * self._blocks > self._max_blocks:
            self._evicted = blocks

    def restore(self, rank: Rank, state: RankState) -> None:
        """Take in a rank whose holders are in the tree already."""
        self._follow(rank, state)
        self._blocks += state.blocks
        for tier, holder in state.holders.items():
            self._own(rank, tier, holder)

    def _own(self, rank: Rank, tier: int, holder: Holder) -> None:
        self._owners[holder.number] = rank
        if tier == Tier.DEVICE:
            self._names[holder.number] = rank.instance
        else:
            self._is_plain = False

    def remove_instance(self, instance: str) -> None:
        """Forget an instance. Its memory comes back with the messages that follow, or `sweep`."""
        for rank in self._of_instance.pop(instance, ()):
            self._empty(rank, self.ranks.pop(rank))

    @property
    def has_evicted(self) -> bool:
        """True if blocks were evicted to keep to `max_blocks`."""
        return self._evicted > 0

    def sweep(self, limit: int = 1 << 30) -> bool:
        """Free up to `limit` blocks of what has left; returns whether that was all."""
        self.tree.sweep(limit)
        return self.tree.is_swept

    # Questions ------------------------------------------------------------------------

    def lookup(self, block_hashes: Hashes) -> dict[str, int]:
        """The number of blocks of a prefix that each instance holds in device memory, from the
        first on.

        Args:
            block_hashes: of shape [blocks], as `hashing.block_hashes` gives them.

        Returns:
            Instances that hold one block at least; of several ranks the one with the most.
        """
        if self._is_plain:
            return self._by_instance.find(self.tree, _packed(block_hashes))
        names = self._names
        best: dict[str, int] = {}
        for number, held in self.tree.find(_packed(block_hashes)).items():
            instance = names.get(number)
            if instance is not None and held > best.get(instance, 0):
                best[instance] = held
        return best

    def overlaps(self, block_hashes: Hashes) -> dict[Rank, Overlap]:
        """The number of blocks of a prefix that each rank holds, over all tiers.

        A block counts for the nearest tier that has it. The count ends with the first block
        that the rank has nowhere.
        """
        if self._is_plain:
            return self._by_rank.find(self.tree, _packed(block_hashes))
        owners = self._owners
        path, end = self.tree.descend(_packed(block_hashes))
        overlaps: dict[Rank, Overlap] = {}
        for number in {number for run in path for number in run.ends}:
            rank = owners.get(number)
            if rank is not None and rank not in overlaps:
                holders = self.ranks[rank].holders
                numbers = [holders[tier].number if tier in holders else 0 for tier in Tier]
                overlaps[rank] = Overlap(*count_tiers(numbers, path, end))
        return overlaps

    def statistics(self) -> IndexStatistics:
        """Figures of this index."""
        holders = [one for state in self.ranks.values() for one in state.holders.values()]
        return IndexStatistics(
            instances=len(self._of_instance),
            blocks=self._blocks,
            detached=sum(holder.detached for holder in holders),
            runs=self.tree.run_count,
            verdicts=dict(self._verdicts),
            unknown_removals=self._unknown_removals,
            evicted=self._evicted,
        )


def _packed(block_hashes: Hashes) -> bytes:
    return np.asarray(block_hashes, dtype="<u8").tobytes()


@lru_cache(maxsize=1 << 14)
def _device_overlap(held: int) -> Overlap:
    return Overlap(held, 0, 0, 0)
