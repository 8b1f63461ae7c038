"""What was found the longest ago goes first, and what changed since it was chosen stays."""

from __future__ import annotations

import pytest
from tests.kvrouter.naive_caches import packed

from dynbus.kvrouter.radix import eviction
from dynbus.kvrouter.radix.eviction import choose_victims, evict
from dynbus.kvrouter.radix.prefix_tree import PrefixTree, run_at
from dynbus.kvrouter.radix.runs import Holder, Run


def chain(tree: PrefixTree, holder: Holder, names: list[int], parent: int | None = None) -> None:
    """Store blocks whose hashes are their names."""
    assert not tree.store(holder, [parent], [0, len(names)], names, packed(names))


def test_the_leaf_that_was_found_the_longest_ago_goes() -> None:
    tree = PrefixTree()
    holder = tree.add_holder()
    for start in (100, 200, 300):
        chain(tree, holder, list(range(start, start + 10)))
    tree.find(packed([100]))
    tree.find(packed([300]))

    forgotten = evict(tree, holder, choose_victims(tree, {holder.number}, 5), 5)

    assert forgotten == 10
    assert len(holder.held) == 20
    assert tree.find(packed([200])) == {}
    assert tree.find(packed(list(range(100, 110)))) == {holder.number: 10}


def test_an_empty_tree_has_nothing_to_forget() -> None:
    assert choose_victims(PrefixTree(), {1}, 5) == []


def test_a_leaf_of_which_only_those_who_left_hold_something_is_not_chosen() -> None:
    tree = PrefixTree()
    left, holder = tree.add_holder(), tree.add_holder()
    chain(tree, left, [1, 2])
    chain(tree, holder, [3, 4])

    victims = choose_victims(tree, {holder.number}, 4)

    assert [victim.run.blocks for victim in victims] == [packed([3, 4])]


def test_a_leaf_that_was_found_since_it_was_chosen_stays() -> None:
    tree = PrefixTree()
    holder = tree.add_holder()
    chain(tree, holder, [1, 2])
    victims = choose_victims(tree, {holder.number}, 1)
    tree.find(packed([1]))

    assert evict(tree, holder, victims, 100) == 0
    assert tree.find(packed([1, 2])) == {holder.number: 2}


def test_a_leaf_that_went_on_since_it_was_chosen_stays() -> None:
    tree = PrefixTree()
    holder = tree.add_holder()
    chain(tree, holder, [1, 2])
    victims = choose_victims(tree, {holder.number}, 1)
    chain(tree, holder, [3], parent=2)

    assert evict(tree, holder, victims, 100) == 0
    assert tree.find(packed([1, 2, 3])) == {holder.number: 3}


def test_holders_of_one_leaf_forget_it_one_after_the_other() -> None:
    tree = PrefixTree()
    first, second = tree.add_holder(), tree.add_holder()
    chain(tree, first, [1, 2, 3])
    chain(tree, second, [1, 2])
    tree.remove(first, [2])
    victims = choose_victims(tree, {first.number, second.number}, 4)

    forgotten = evict(tree, first, victims, 100)
    between = tree.find(packed([1, 2, 3])), first.detached, len(first.held)

    assert forgotten == 2
    # The question was the first since the leaf was chosen.
    assert between == ({second.number: 2}, 0, 0)
    assert evict(tree, second, victims, 100) == 0
    assert evict(tree, second, choose_victims(tree, {second.number}, 1), 1) == 2
    assert len(tree.runs) == 1


def test_the_names_of_few_blocks_that_stay_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[int] = []

    def counting(run: Run, depth: int) -> Run:
        followed.append(depth)
        return run_at(run, depth)

    monkeypatch.setattr(eviction, "run_at", counting)
    tree = PrefixTree()
    holder, other = tree.add_holder(), tree.add_holder()
    for number in range(1000):
        chain(tree, holder, list(range(100 * number + 1, 100 * number + 65)))
    victims = choose_victims(tree, {holder.number, other.number}, 6400)

    forgotten = [evict(tree, one, victims, 6400) for one in (holder, other)]

    assert forgotten == [6400, 0]
    assert len(holder.held) == 57_600
    assert len(followed) == 6400


def test_a_holder_forgets_the_oldest_until_it_is_enough() -> None:
    tree = PrefixTree()
    holder = tree.add_holder()
    for start in (100, 200, 300):
        chain(tree, holder, list(range(start, start + 10)))
    tree.find(packed([100]))
    victims = choose_victims(tree, {holder.number}, 30)

    # The question was asked before they were chosen.
    assert evict(tree, holder, victims, 11) == 20
    assert tree.find(packed(list(range(100, 110)))) == {holder.number: 10}


def test_a_holder_gives_up_what_others_go_on_from() -> None:
    tree = PrefixTree()
    many, few = tree.add_holder(), tree.add_holder()
    chain(tree, many, [1, 2, 3])
    chain(tree, many, [4], parent=2)
    chain(tree, few, [1, 2, 3])
    chain(tree, few, [4], parent=2)
    tree.remove(many, [3, 4])

    forgotten = evict(tree, many, choose_victims(tree, {many.number}, 1), 1)

    assert forgotten == 2
    assert tree.find(packed([1, 2, 3])) == {few.number: 3}
    assert tree.find(packed([1, 2, 4])) == {few.number: 3}


def test_a_holder_keeps_what_it_goes_on_from_itself() -> None:
    tree = PrefixTree()
    holder = tree.add_holder()
    chain(tree, holder, [1, 2])
    chain(tree, holder, [3], parent=2)
    chain(tree, holder, [4], parent=2)

    victims = choose_victims(tree, {holder.number}, 100)

    assert sorted(victim.run.blocks for victim in victims) == [packed([3]), packed([4])]
