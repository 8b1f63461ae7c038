"""The blocks of a cache: each counted once, found while it is cached, evicted oldest first."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynbus.kvrouter.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from dynbus.llm.engine.block_manager import BlockManager


def filled(manager: BlockManager, hashes: list[int]) -> list[int]:
    """The block table of a request that has computed these blocks."""
    table: list[int] = []
    assert manager.grow(table, len(hashes))
    manager.store(table, 0, hashes, hashes, None)
    return table


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
    manager.claim([], [1, 2, 3], 1)

    assert manager.prefix([1, 2, 3], 3) == (3, 1)
    assert manager.active == 1


def test_the_least_recently_used_block_is_evicted_first_and_a_tail_before_its_head() -> None:
    manager = BlockManager(4)
    manager.release(filled(manager, [1, 2]))
    manager.release(filled(manager, [3, 4]))
    manager.take_events()

    manager.grow([], 3)

    assert manager.take_events() == [BlockRemoved([2, 1, 4])]


def test_a_block_in_use_is_never_evicted() -> None:
    manager = BlockManager(4)
    filled(manager, [1, 2])

    assert not manager.grow([], 3)
    assert manager.free == 2


def test_admission_leaves_the_headroom_free_and_growth_uses_it() -> None:
    manager = BlockManager(10, headroom=2)

    assert manager.admits(8, 0)
    assert not manager.admits(9, 0)
    assert manager.admits(9, 1)
    assert manager.grow([], 10)


def test_a_block_that_another_has_cached_meanwhile_stays_private() -> None:
    manager = BlockManager(8)
    filled(manager, [1, 2])
    manager.take_events()

    second = filled(manager, [1, 2, 3])

    assert manager.take_events() == [BlockStored(2, [3], [3])]
    assert manager.active == 5
    manager.release(second)
    assert (manager.active, manager.cached) == (2, 3)


def test_a_block_that_is_found_again_keeps_its_id() -> None:
    manager = BlockManager(8)
    first = filled(manager, [1, 2, 3])
    ids = list(first)
    manager.release(first)
    filled(manager, [7, 8])

    again: list[int] = []
    manager.claim(again, [1, 2, 3], 3)

    assert again == ids


def test_the_copy_of_a_cached_block_has_an_id_of_its_own() -> None:
    manager = BlockManager(8)

    first, second = filled(manager, [1, 2]), filled(manager, [1, 2])

    assert set(first).isdisjoint(second)
    found: list[int] = []
    manager.claim(found, [1, 2], 2)
    assert found == first


def test_without_prefix_caching_nothing_is_found_and_nothing_told() -> None:
    manager = BlockManager(8, prefix_caching=False)
    manager.release(filled(manager, [1, 2]))

    assert manager.prefix([1, 2], 2) == (0, 0)
    assert manager.take_events() == []
    assert manager.free == 8


def test_a_held_block_is_neither_found_free_nor_evicted_after_its_request_has_ended() -> None:
    manager = BlockManager(4)
    table = filled(manager, [1, 2])
    assert manager.grow(table, 3)
    manager.hold("h", table)
    manager.release(table)

    assert not manager.grow([], 2)
    assert manager.prefix([1, 2], 2) == (2, 2)
    manager.end_hold("h")
    assert manager.grow([], 4)
    assert manager.pins == 0


class Manager(RuleBasedStateMachine):
    """Requests over a small tree of prefixes, beside the events that were told."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12)
        self.requests: list[tuple[list[int], list[int]]] = []
        self.ids: dict[int, int] = {}
        self.holds: dict[str, list[int]] = {}
        self.count = 0
        self.told: list[KvEvent] = []

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def start(self, path: list[int]) -> None:
        hashes = [hash(tuple(path[: end + 1])) & 0xFFFF for end in range(len(path))]
        found, used = self.manager.prefix(hashes, len(hashes) - 1)
        if not self.manager.admits(len(hashes), used):
            return
        table: list[int] = []
        self.manager.claim(table, hashes, found)
        assert table == [self.ids[block] for block in hashes[:found]]
        assert self.manager.grow(table, len(hashes))
        assert self.held.isdisjoint(table[found:])
        parent = hashes[found - 1] if found else None
        self.manager.store(table, found, hashes[found:], hashes[found:], parent)
        assert len(table) == len(hashes)
        self.requests.append((table, hashes))
        self.note_events(dict(zip(hashes, table, strict=True)))

    def note_events(self, ids: dict[int, int]) -> None:
        """Which id a block has that was stored, as long as it is cached."""
        for event in self.manager.take_events():
            self.told.append(event)
            for block in event.engine_hashes if not isinstance(event, AllBlocksCleared) else ():
                if isinstance(event, BlockStored):
                    self.ids[block] = ids[block]
                else:
                    del self.ids[block]

    @precondition(lambda self: bool(self.requests))
    @rule(pick=st.integers(0, 99))
    def grow(self, pick: int) -> None:
        table, _ = self.requests[pick % len(self.requests)]
        before, free = len(table), self.manager.free

        grown = self.manager.grow(table, before + 2)

        assert grown == (free >= 2)
        assert len(table) == before + 2 * grown
        assert self.held.isdisjoint(table[before:])
        self.note_events({})

    @precondition(lambda self: bool(self.requests))
    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        table, _ = self.requests.pop(pick % len(self.requests))
        self.manager.release(table)
        assert not table

    @property
    def held(self) -> set[int]:
        return {block for blocks in self.holds.values() for block in blocks}

    @precondition(lambda self: bool(self.requests))
    @rule(pick=st.integers(0, 99), count=st.integers(0, 6))
    def hold(self, pick: int, count: int) -> None:
        table, _ = self.requests[pick % len(self.requests)]
        self.count += 1
        self.holds[str(self.count)] = table[:count]
        self.manager.hold(str(self.count), table[:count])
        assert self.manager.holds(str(self.count))

    @precondition(lambda self: bool(self.holds))
    @rule(pick=st.integers(0, 99))
    def end_hold(self, pick: int) -> None:
        name = list(self.holds)[pick % len(self.holds)]
        del self.holds[name]
        for _ in range(2):
            self.manager.end_hold(name)
        assert not self.manager.holds(name)

    @invariant()
    def every_block_is_counted_once(self) -> None:
        used = {block for table, _ in self.requests for block in table}

        assert self.manager.active == len(used | self.held)
        assert self.manager.pins == sum(map(len, self.holds.values()))

    @invariant()
    def only_cached_blocks_are_shared(self) -> None:
        counts = Counter(block for table, _ in self.requests for block in table)

        shared = {block for block, count in counts.items() if count > 1}
        assert shared <= set(self.ids.values())

    @invariant()
    def the_events_tell_what_is_cached(self) -> None:
        held = contents(self.told)

        assert len(held) == self.manager.cached
        for block in held:
            assert self.manager.prefix([block], 1)[0] == 1


TestManager = Manager.TestCase


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.booleans()), max_size=30
    ),
    st.sets(st.integers(1, 121), max_size=4),
    st.sets(st.integers(1, 121), max_size=6),
)
def test_with_a_block_that_is_dropped_goes_all_that_cannot_be_relied_on_without_it(
    story: list[tuple[list[int], bool]], wrong: set[int], below: set[int]
) -> None:
    manager = BlockManager(12)
    manager.is_traced = True
    parents: dict[int, int | None] = {}
    tables: list[list[int]] = []
    for path, keeps in story:
        name = 1
        hashes = [name := name * 3 + step for step in path]
        parents |= dict(zip(hashes, [None, *hashes[:-1]], strict=True))
        held, used = manager.prefix(hashes, len(hashes))
        if not manager.admits(len(hashes), used):
            continue
        table: list[int] = []
        manager.claim(table, hashes, held)
        assert manager.grow(table, len(hashes))
        before = hashes[held - 1] if held else None
        manager.store(table, held, hashes[held:], hashes[held:], before)
        if keeps:
            tables.append(table)
        else:
            manager.release(table)
    manager.take_events()
    cached = {each for each in parents if manager.block_of(each) is not None}
    below -= wrong

    gone = manager.drop(wrong, below)

    def is_sound(each: int | None) -> bool:
        if each is None:
            return True
        if each in wrong:
            return False
        return is_sound(parents[each]) if each in cached else each in below

    assert set(gone) == {each for each in cached if not is_sound(each)}
    assert all(manager.block_of(each) is None for each in gone)
    removed: list[int] = []
    for event in manager.take_events():
        assert isinstance(event, BlockRemoved)
        removed += event.engine_hashes
    assert sorted(removed) == sorted(gone)
    for table in tables:
        manager.release(table)
    assert manager.free == 12
