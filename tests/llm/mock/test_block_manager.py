"""The blocks of a cache: each counted once, found while it is cached, evicted oldest first."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynbus.kvrouter.events import BlockRemoved, BlockStored, KvEvent
from dynbus.llm.mock.block_manager import Allocation, BlockManager


def filled(manager: BlockManager, hashes: list[int]) -> Allocation:
    """A request that has computed these blocks."""
    allocation = Allocation()
    assert manager.grow(allocation, len(hashes))
    manager.store(allocation, hashes, hashes, None)
    return allocation


def contents(events: list[KvEvent]) -> set[int]:
    """The blocks that are left after these events."""
    held: set[int] = set()
    for event in events:
        if isinstance(event, BlockStored):
            assert held.isdisjoint(event.engine_hashes)
            held.update(event.engine_hashes)
        else:
            assert isinstance(event, BlockRemoved)
            assert held.issuperset(event.engine_hashes)
            held.difference_update(event.engine_hashes)
    return held


def test_a_prefix_is_found_up_to_the_first_block_that_is_missing() -> None:
    manager = BlockManager(8)
    manager.release(filled(manager, [1, 2, 3]))

    assert manager.prefix([1, 2, 9, 3], 4) == (2, 0)
    assert manager.prefix([1, 2, 3], 2) == (2, 0)


def test_blocks_in_use_are_told_from_idle_ones() -> None:
    manager = BlockManager(8)
    manager.release(filled(manager, [1, 2, 3]))
    manager.claim(Allocation(), [1, 2, 3], 1)

    assert manager.prefix([1, 2, 3], 3) == (3, 1)
    assert manager.active == 1


def test_the_least_recently_used_block_is_evicted_first_and_a_tail_before_its_head() -> None:
    manager = BlockManager(4)
    manager.release(filled(manager, [1, 2]))
    manager.release(filled(manager, [3, 4]))
    manager.take_events()

    manager.grow(Allocation(), 3)

    assert manager.take_events() == [BlockRemoved([2, 1, 4])]


def test_a_block_in_use_is_never_evicted() -> None:
    manager = BlockManager(4)
    filled(manager, [1, 2])

    assert not manager.grow(Allocation(), 3)
    assert manager.free == 2


def test_admission_leaves_the_headroom_free_and_growth_uses_it() -> None:
    manager = BlockManager(10, headroom=2)

    assert manager.admits(8, 0)
    assert not manager.admits(9, 0)
    assert manager.admits(9, 1)
    assert manager.grow(Allocation(), 10)


def test_a_block_that_another_has_cached_meanwhile_stays_private() -> None:
    manager = BlockManager(8)
    filled(manager, [1, 2])
    manager.take_events()

    second = filled(manager, [1, 2, 3])

    assert (second.cached, second.private) == ([3], 2)
    assert manager.take_events() == [BlockStored(2, [3], [3])]
    manager.release(second)
    assert (manager.active, manager.cached) == (2, 3)


def test_without_prefix_caching_nothing_is_found_and_nothing_told() -> None:
    manager = BlockManager(8, prefix_caching=False)
    manager.release(filled(manager, [1, 2]))

    assert manager.prefix([1, 2], 2) == (0, 0)
    assert manager.take_events() == []
    assert manager.free == 8


class Manager(RuleBasedStateMachine):
    """Requests over a small tree of prefixes, beside the events that were told."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12)
        self.requests: list[tuple[Allocation, list[int]]] = []
        self.told: list[KvEvent] = []

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def start(self, path: list[int]) -> None:
        hashes = [hash(tuple(path[: end + 1])) & 0xFFFF for end in range(len(path))]
        found, used = self.manager.prefix(hashes, len(hashes) - 1)
        if not self.manager.admits(len(hashes), used):
            return
        allocation = Allocation()
        self.manager.claim(allocation, hashes, found)
        assert self.manager.grow(allocation, len(hashes))
        parent = hashes[found - 1] if found else None
        self.manager.store(allocation, hashes[found:], hashes[found:], parent)
        assert allocation.blocks == len(hashes)
        self.requests.append((allocation, hashes))

    @precondition(lambda self: bool(self.requests))
    @rule(pick=st.integers(0, 99))
    def grow(self, pick: int) -> None:
        allocation, _ = self.requests[pick % len(self.requests)]
        before, free = allocation.blocks, self.manager.free

        grown = self.manager.grow(allocation, before + 2)

        assert grown == (free >= 2)
        assert allocation.blocks == before + 2 * grown

    @precondition(lambda self: bool(self.requests))
    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        allocation, _ = self.requests.pop(pick % len(self.requests))
        self.manager.release(allocation)

    @invariant()
    def every_block_is_counted_once(self) -> None:
        shared = {block for allocation, _ in self.requests for block in allocation.cached}
        private = sum(allocation.private for allocation, _ in self.requests)

        assert self.manager.active == len(shared) + private

    @invariant()
    def the_events_tell_what_is_cached(self) -> None:
        self.told += self.manager.take_events()
        held = contents(self.told)

        assert len(held) == self.manager.cached
        for block in held:
            assert self.manager.prefix([block], 1)[0] == 1


TestManager = Manager.TestCase
