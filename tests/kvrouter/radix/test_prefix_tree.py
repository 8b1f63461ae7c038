"""The tree answers like the simplest account of what the caches hold, and keeps nothing else."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.kvrouter.naive_caches import NaiveCaches, packed

from dynbus.kvrouter.radix.prefix_tree import PrefixTree
from dynbus.kvrouter.radix.runs import Holder

CACHES = 3

caches = st.integers(0, CACHES - 1)
blocks = st.integers(1, 3)
few_hashes = st.integers(0, 11)
many_hashes = st.integers(100, 160)


def chains_of(hashes: st.SearchStrategy[int]) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(hashes, blocks), min_size=1, max_size=5)


class CachesInATree(RuleBasedStateMachine):
    """Stores, removals in any order, departures: after each the tree agrees with the account."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.naive = NaiveCaches()
        self.holders = {name: self.tree.add_holder() for name in range(CACHES)}

    @rule(name=caches, parent=st.none() | few_hashes, chain=chains_of(few_hashes))
    def store_hashes_that_come_again(
        self, name: int, parent: int | None, chain: list[tuple[int, int]]
    ) -> None:
        self._store(name, [(parent, chain)])

    @rule(
        name=caches,
        chains=st.lists(
            st.tuples(st.none() | many_hashes, chains_of(many_hashes)), min_size=1, max_size=6
        ),
    )
    def store_many_chains(
        self, name: int, chains: list[tuple[int | None, list[tuple[int, int]]]]
    ) -> None:
        self._store(name, chains)

    @rule(name=caches, engine=st.lists(st.one_of(few_hashes, many_hashes), min_size=1, max_size=8))
    def remove(self, name: int, engine: list[int]) -> None:
        held = len(self.holders[name].held)

        unknown = self.tree.remove(self.holders[name], engine)

        self.naive.remove(name, engine)
        assert held - len(self.holders[name].held) == len(engine) - unknown

    @rule(name=caches, limit=st.integers(1, 30))
    def leave(self, name: int, limit: int) -> None:
        self.tree.drop_holder(self.holders[name])
        self.holders[name] = self.tree.add_holder()
        self.naive.paths.pop(name, None)
        self.tree.sweep(limit)

    @rule(prefix=st.lists(blocks, min_size=1, max_size=8))
    def find(self, prefix: list[int]) -> None:
        assert self._find(prefix) == self.naive.find(prefix)

    @invariant()
    def every_path_is_found_as_far_as_it_is_held(self) -> None:
        for name, holder in self.holders.items():
            held = self.naive.paths.get(name, {})
            assert set(holder.held) == set(held)
            for path in set(held.values()):
                assert self._find(path).get(name) == self.naive.find(path).get(name)

    @invariant()
    def the_tree_is_sound(self) -> None:
        for holder in self.holders.values():
            detached = 0
            for run in self.tree.runs.values():
                spans = (run.detached or {}).get(holder.number, ())
                detached += sum(end - start for start, end in spans)
            assert detached == holder.detached
        for run in self.tree.runs.values():
            assert run.end - run.start == len(run.blocks) // 8
            assert run is self.tree.root or run.children is None or run.children
            for child in (run.children or {}).values():
                assert (child.parent, child.start) == (run, run.end)
                assert self.tree.runs[child.id] is child

    def teardown(self) -> None:
        for holder in self.holders.values():
            self.tree.remove(holder, list(holder.held))
        self.tree.sweep(1 << 30)

        assert list(self.tree.runs) == [0]
        assert self.tree.is_swept
        assert all(not holder.detached for holder in self.holders.values())

    def _store(self, name: int, chains: list[tuple[int | None, list[tuple[int, int]]]]) -> None:
        bounds = [0]
        for _, chain in chains:
            bounds.append(bounds[-1] + len(chain))
        pairs = [pair for _, chain in chains for pair in chain]

        orphans = self.tree.store(
            self.holders[name],
            [parent for parent, _ in chains],
            bounds,
            [engine for engine, _ in pairs],
            packed([block for _, block in pairs]),
        )

        stored = [
            self.naive.store(
                name, parent, [engine for engine, _ in chain], [block for _, block in chain]
            )
            for parent, chain in chains
        ]
        assert orphans == [at for at, whole in enumerate(stored) if not whole]

    def _find(self, prefix: list[int] | tuple[int, ...]) -> dict[object, int]:
        found = self.tree.find(packed(prefix))
        return {
            name: found[holder.number]
            for name, holder in self.holders.items()
            if holder.number in found
        }


TestCachesInATree = CachesInATree.TestCase
TestCachesInATree.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def chain(
    tree: PrefixTree, holder: Holder, engine: list[int], *, parent: int | None = None
) -> None:
    """Store blocks that are named like their engine hashes."""
    assert tree.store(holder, [parent], [0, len(engine)], engine, packed(engine)) == []


def test_blocks_behind_a_hole_count_again_when_it_is_filled() -> None:
    tree = PrefixTree()
    holder = tree.add_holder()
    chain(tree, holder, [1, 2, 3, 4])
    chain(tree, holder, [5], parent=3)

    tree.remove(holder, [2])
    with_hole = tree.find(packed([1, 2, 3, 4]))
    chain(tree, holder, [2], parent=1)

    assert with_hole == {holder.number: 1}
    assert tree.find(packed([1, 2, 3, 4])) == {holder.number: 4}
    assert tree.find(packed([1, 2, 3, 5])) == {holder.number: 4}


def test_a_block_with_two_engine_hashes_is_held_until_both_are_removed() -> None:
    tree = PrefixTree()
    holder = tree.add_holder()
    for engine in (10, 20):
        tree.store(holder, [None], [0, 1], [engine], packed([1]))

    tree.remove(holder, [10])
    after_one = tree.find(packed([1]))
    tree.remove(holder, [20])

    assert after_one == {holder.number: 1}
    assert tree.find(packed([1])) == {}


def test_a_split_run_is_found_by_the_locations_from_before() -> None:
    tree = PrefixTree()
    first, second = tree.add_holder(), tree.add_holder()
    chain(tree, first, list(range(1, 9)))
    chain(tree, second, [1, 2, 3, 4, 50])
    chain(tree, second, [60], parent=2)

    chain(tree, first, [70], parent=8)
    tree.remove(first, [70, 8, 7, 6, 5, 4])

    assert tree.find(packed([1, 2, 3, 4])) == {first.number: 3, second.number: 4}
