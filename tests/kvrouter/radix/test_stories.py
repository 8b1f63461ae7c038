"""Whatever an index is told, it says what a naive account of the same messages says."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.kvrouter.event_strategies import removed_events, stored_events
from tests.kvrouter.naive_caches import NaiveCaches

from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheDigest,
    KvEvent,
    Tier,
    encode_events,
)
from dynbus.kvrouter.hashing import sequence_hashes
from dynbus.kvrouter.radix import index as radix_index
from dynbus.kvrouter.radix.index import Overlap, RadixIndex, Rank
from dynbus.kvrouter.radix.snapshot import dump_index, load_index
from dynbus.kvrouter.stream.digest import MASK, block_digest, index_digest

INSTANCES = "abc"
engine_hashes = st.one_of(st.integers(0, 9), st.integers(2**64 - 5, 2**64 - 1))
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK])
events = st.lists(
    st.one_of(
        stored_events(engine_hashes, st.integers(1, 3), tiers=tiers, min_size=0),
        stored_events(engine_hashes, st.integers(1, 3), tiers=tiers),
        removed_events(engine_hashes, tiers=tiers, min_size=0),
        st.just(AllBlocksCleared()),
        st.builds(CacheDigest, st.integers(0, 9), st.integers(0, 2**64 - 1)),
    ),
    min_size=0,
    max_size=6,
)
ranks = st.builds(Rank, st.sampled_from(INSTANCES), st.sampled_from([0, 0, 0, 1]))


class NaiveRanks:
    """What ranks hold in each tier; a cache is named by (rank, tier)."""

    def __init__(self) -> None:
        self.caches = NaiveCaches()
        self.next_id: dict[Rank, tuple[int, int]] = {}

    def empty(self, rank: Rank) -> None:
        for tier in Tier:
            self.caches.paths.pop((rank, tier), None)

    def leave(self, instance: str) -> None:
        for rank in [rank for rank in self.next_id if rank.instance == instance]:
            self.empty(rank)
            del self.next_id[rank]

    def apply(
        self, rank: Rank, batch: Sequence[KvEvent | CacheDigest], epoch: int, first_id: int
    ) -> None:
        known_epoch, next_id = self.next_id.get(rank, (0, 0))
        if epoch > known_epoch or first_id > next_id:
            self.empty(rank)
            next_id = first_id
        new = batch[next_id - first_id :]
        self.next_id[rank] = epoch, max(next_id, first_id + len(batch))
        for event in new:
            if isinstance(event, BlockStored):
                engine, blocks = list(event.engine_hashes), list(event.block_hashes)
                self.caches.store((rank, event.tier), event.parent_hash, engine, blocks)
            elif isinstance(event, BlockRemoved):
                self.caches.remove((rank, event.tier), list(event.engine_hashes))
            elif isinstance(event, AllBlocksCleared):
                self.empty(rank)

    def lookup(self, prefix: Sequence[int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for rank in self.next_id:
            held = self.caches.find(prefix).get((rank, Tier.DEVICE), 0)
            if held > found.get(rank.instance, 0):
                found[rank.instance] = held
        return found

    def overlaps(self, prefix: Sequence[int]) -> dict[Rank, Overlap]:
        found: dict[Rank, Overlap] = {}
        for rank in self.next_id:
            of_tier = [set(self.caches.paths.get((rank, tier), {}).values()) for tier in Tier]
            counts = [0] * len(Tier)
            for end in range(1, len(prefix) + 1):
                path = tuple(prefix[:end])
                nearest = next((tier for tier in Tier if path in of_tier[tier]), None)
                if nearest is None:
                    break
                counts[nearest] += 1
            if any(counts):
                found[rank] = Overlap(*counts)
        return found

    def blocks(self) -> int:
        return sum(map(len, self.caches.paths.values()))

    def digest(self, rank: Rank) -> CacheDigest:
        blocks = digest = 0
        for tier in Tier:
            held = self.caches.paths.get((rank, tier), {})
            names = np.array(list(held), dtype=np.uint64)
            lasts = np.array([path[-1] for path in held.values()], dtype=np.uint64)
            blocks += len(held)
            digest += block_digest(names, lasts, tier)
        return CacheDigest(blocks, digest & MASK)


class Story(RuleBasedStateMachine):
    """Messages of ranks and tiers, with faults, departures, sweeps and snapshots."""

    max_blocks = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex(max_blocks=self.max_blocks)
        self.naive = NaiveRanks()
        self.next_id: dict[Rank, tuple[int, int]] = {}

    @rule(rank=ranks, batch=events, shift=st.sampled_from([0, 0, 0, 0, -2, -1, 1]))
    def apply(self, rank: Rank, batch: list[KvEvent], shift: int) -> None:
        epoch, next_id = self.next_id.get(rank, (1, 0))
        first_id = max(0, next_id + shift)
        self.next_id[rank] = epoch, max(next_id, first_id + len(batch))
        sent = encode_events(batch, event_epoch=epoch, first_id=first_id, dp_rank=rank.dp_rank)

        self.index.apply(rank.instance, sent)
        self.naive.apply(rank, batch, epoch, first_id)

    @rule(rank=ranks)
    def begin_an_epoch(self, rank: Rank) -> None:
        self.next_id[rank] = (self.next_id.get(rank, (1, 0))[0] + 1, 0)

    @rule(instance=st.sampled_from(INSTANCES))
    def leave(self, instance: str) -> None:
        self.index.remove_instance(instance)
        self.naive.leave(instance)

    @rule(limit=st.integers(1, 10))
    def sweep(self, limit: int) -> None:
        self.index.sweep(limit)

    @rule(prefix=st.lists(st.integers(1, 3), max_size=8))
    def ask(self, prefix: list[int]) -> None:
        assert self.index.lookup(prefix) == self.naive.lookup(prefix)
        assert self.index.overlaps(prefix) == self.naive.overlaps(prefix)

    @rule()
    def go_on_from_a_snapshot(self) -> None:
        self.index, _ = load_index(dump_index(self.index, 1), max_blocks=self.max_blocks)
        # What was evicted is told only while the index is full, so not of the one before.
        data = dump_index(self.index, 1)
        again, _ = load_index(data, max_blocks=self.max_blocks)
        assert dump_index(again, 1) == data

    @invariant()
    def it_holds_what_was_told(self) -> None:
        assert self.index.statistics().blocks == self.naive.blocks()
        for rank in self.index.ranks:
            assert index_digest(self.index, rank) == self.naive.digest(rank)

    def teardown(self) -> None:
        for instance in INSTANCES:
            self.index.remove_instance(instance)
        assert self.index.sweep()
        assert self.index.statistics().runs == 0


class StoryAtTheLimit(Story):
    """The same, where caches forget with nearly every message, one at a time."""

    max_blocks = 12

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(radix_index, "EVICT_LOOK", 1)
        self.patch.setattr(radix_index, "OVERSHOOT", 2.0)

    def ask(self, prefix: list[int]) -> None:
        """It says less than is held, never more."""
        really = self.naive.lookup(prefix)
        for instance, held in self.index.lookup(prefix).items():
            assert held <= really[instance]

    def it_holds_what_was_told(self) -> None:
        """It holds no more than it may, and not what is not there."""
        counted = self.index.statistics()
        assert counted.blocks <= min(self.naive.blocks(), 2 * self.max_blocks)
        assert counted.blocks == sum(state.blocks for state in self.index.ranks.values())

    ask = rule(prefix=st.lists(st.integers(1, 3), max_size=8))(ask)
    it_holds_what_was_told = invariant()(it_holds_what_was_told)

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()


TestStory = Story.TestCase
TestStory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoryAtTheLimit = StoryAtTheLimit.TestCase
TestStoryAtTheLimit.settings = TestStory.settings


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_index_of_thousands_of_blocks_says_what_was_told(seed: int) -> None:
    random = Random(seed)
    index, naive = RadixIndex(), NaiveRanks()
    next_id = dict.fromkeys(INSTANCES, 0)
    for step in range(350):
        instance = random.choice(INSTANCES)
        batch = [_random_event(random, step) for _ in range(8)]
        index.apply(instance, encode_events(batch, event_epoch=1, first_id=next_id[instance]))
        naive.apply(Rank(instance, 0), batch, 1, next_id[instance])
        next_id[instance] += len(batch)
        if step % 130 == 129:
            index.remove_instance(instance)
            naive.leave(instance)
            next_id[instance] = 0
    prefixes = [_path(random) for _ in range(5)]
    counted = index.statistics()

    assert [index.lookup(prefix) for prefix in prefixes] == [*map(naive.lookup, prefixes)]
    assert counted.blocks == naive.blocks()
    assert 0 < counted.detached < counted.blocks
    for instance in INSTANCES:
        rank = Rank(instance, 0)
        assert index_digest(index, rank) == naive.digest(rank)
        index.remove_instance(instance)
    assert index.sweep()
    assert index.statistics().runs == 0


def _path(random: Random) -> list[int]:
    """A prefix in a tree that branches every 16 blocks."""
    blocks: list[int] = []
    for _ in range(random.randint(1, 8)):
        branch = random.randint(0, 5)
        blocks += (branch * 1000 + at for at in range(random.choice([16, 16, 16, 7])))
    return blocks


def _random_event(random: Random, step: int) -> KvEvent:
    """A whole prefix or a removal; the engine's hash of a block is that of its path."""
    path = _path(random)
    names: list[int] = sequence_hashes(path).tolist()
    if step % 100 < 60:
        return BlockStored(None, names, path)
    random.shuffle(names)
    return BlockRemoved(names[: random.randint(0, len(names))])


def test_an_array_with_gaps_or_of_other_numbers_is_looked_up_like_a_list() -> None:
    index = RadixIndex()
    index.apply("a", encode_events([BlockStored(None, [1, 2], [1, 2])], event_epoch=1, first_id=0))
    wide = np.array([1, 9, 2, 9], dtype=np.uint64)
    frozen = np.array([1, 2], dtype=np.uint64)
    frozen.flags.writeable = False

    found = [index.lookup(asked) for asked in ([1, 2], wide[::2], frozen, np.array([1, 2]))]

    assert found == [{"a": 2}] * 4


def test_an_instance_that_left_is_in_no_answer_that_was_remembered() -> None:
    index = RadixIndex()
    sent = encode_events([BlockStored(None, [1, 2], [1, 2])], event_epoch=1, first_id=0)
    for number in range(20):
        index.apply(f"i{number}", sent)
    index.lookup([1, 2])
    index.remove_instance("i3")

    assert index.lookup([1, 2]) == {f"i{n}": 2 for n in range(20) if n != 3}
    assert len(index.overlaps([1, 2, 3])) == 19


def test_an_answer_is_the_askers_own() -> None:
    index = RadixIndex()
    sent = encode_events([BlockStored(None, [1], [1])], event_epoch=1, first_id=0)
    for number in range(20):
        index.apply(f"i{number}", sent)

    index.lookup([1]).clear()

    assert len(index.lookup([1])) == 20
