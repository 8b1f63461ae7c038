"""Which blocks a host store keeps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.kvrouter.events import BlockRemoved, BlockStored, Tier
from dynbus.kvrouter.stream.cache_mirror import CacheMirror
from dynbus.llm.engine.interface import CachedBlock
from dynbus.llm.tiers.host_index import HostIndex


def chain(name: int, length: int) -> list[int]:
    """The sequence hashes of a prompt; two of different names share none."""
    return [name * 100 + at for at in range(1, length + 1)]


def add(index: HostIndex, parent: int | None, hashes: Sequence[int]) -> list[int]:
    return index.add(parent, hashes, [each + 5000 for each in hashes])


def test_blocks_are_found_from_the_first_that_is_asked_for_to_the_first_that_is_lacking() -> None:
    index = HostIndex(8)
    places = add(index, None, chain(1, 3))

    assert index.find(chain(1, 6), 0, 6) == places
    assert index.find(chain(1, 6), 1, 2) == places[1:2]
    assert index.find(chain(2, 3), 0, 3) == []


def test_a_block_whose_predecessor_is_not_kept_is_not_taken_in() -> None:
    index = HostIndex(8)

    assert add(index, 77, [78]) == []
    assert 78 not in index


def test_the_end_of_the_prefix_that_was_used_the_longest_ago_goes_first() -> None:
    index = HostIndex(4)
    add(index, None, chain(1, 2))
    add(index, None, chain(2, 2))
    index.find(chain(1, 2), 0, 2)

    add(index, None, chain(3, 1))

    assert [each in index for each in chain(1, 2)] == [True, True]
    assert [each in index for each in chain(2, 2)] == [True, False]


def test_of_a_prefix_that_is_longer_than_the_store_its_beginning_is_kept() -> None:
    index = HostIndex(3)

    assert len(add(index, None, chain(1, 5))) == 3
    assert [each in index for each in chain(1, 5)] == [True, True, True, False, False]


def test_a_pinned_block_stays_until_every_pin_is_taken_back() -> None:
    index = HostIndex(1)
    places = add(index, None, chain(1, 1))
    index.pin(places)
    index.pin(places)
    index.unpin(places)

    assert add(index, None, chain(2, 1)) == []
    index.unpin(places)
    assert add(index, None, chain(2, 1)) == places


def test_events_tell_of_the_host_tier_what_went_before_what_came() -> None:
    index = HostIndex(1)
    add(index, None, [1])
    add(index, None, [2])

    assert index.take_events() == [
        BlockStored(None, [1], [5001], Tier.HOST),
        BlockRemoved([1], Tier.HOST),
        BlockStored(None, [2], [5002], Tier.HOST),
    ]
    assert index.take_events() == []


def test_with_a_block_that_is_removed_goes_what_follows_it_and_nothing_else() -> None:
    index = HostIndex(8)
    add(index, None, [1, 2, 3])
    add(index, 2, [4])
    add(index, None, [5])

    gone = index.remove([2, 77])

    assert sorted(gone) == [2, 3, 4]
    assert [each in index for each in (1, 2, 3, 4, 5)] == [True, False, False, False, True]
    assert index.take_events()[-1] == BlockRemoved(gone, Tier.HOST)
    assert len(add(index, 1, [6, 7, 8, 9, 10, 11])) == 6


def test_a_store_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="room for 1 block at least"):
        HostIndex(0)


# Prompts over few blocks, so that they share beginnings: each is a path of choices.
paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), paths),
        st.tuples(st.just("find"), paths),
        st.tuples(st.just("pin"), paths),
        st.tuples(st.just("unpin"), st.just([0])),
        st.tuples(st.just("remove"), paths),
    ),
    max_size=60,
)


def hashes_of(path: Sequence[int]) -> list[int]:
    """The sequence hashes of a path: equal where the path up to there is."""
    found: list[int] = []
    name = 1
    for step in path:
        name = name * 3 + step
        found.append(name)
    return found


@given(actions, st.integers(1, 7))
def test_a_store_is_closed_under_prefixes_and_its_events_say_exactly_what_it_has(
    story: list[tuple[str, list[int]]], places: int
) -> None:
    index = HostIndex(places)
    mirror = CacheMirror()
    pinned: list[tuple[list[int], list[int]]] = []
    for action, path in story:
        hashes = hashes_of(path)
        if action == "add":
            here = 0
            while here < len(hashes) and hashes[here] in index:
                here += 1
            add(index, hashes[here - 1] if here else None, hashes[here:])
        elif action == "find":
            index.find(hashes, 0, len(hashes))
        elif action == "pin":
            found = index.find(hashes, 0, len(hashes))
            index.pin(found)
            pinned.append((hashes[: len(found)], found))
        elif action == "remove":
            if not pinned:
                gone = index.remove([hashes[-1]])
                assert not any(each in index for each in (hashes[-1], *gone))
        elif pinned:
            index.unpin(pinned.pop()[1])
        events = index.take_events()
        assert mirror.apply(events) == events
        assert len(index) <= places
        assert mirror.digest().blocks == len(index)
        for held, where in pinned:
            assert index.find(held, 0, len(held)) == where
        for prompt in (hashes, *(held for held, _ in pinned)):
            lacking = [each not in index for each in prompt]
            assert lacking == sorted(lacking), "nothing is kept behind a block that is not"
    for _, where in pinned:
        index.unpin(where)
    assert not index.pinned
    # With no pins left everything may go, so that a prompt as long as the store fits.
    whole = [-each for each in range(1, places + 1)]
    assert len(add(index, None, whole)) == places


def test_a_prompt_for_which_there_is_no_room_is_walked_along_once() -> None:
    index = HostIndex(20)
    blocks = [CachedBlock(at, at + 1, at or None, at) for at in range(500)]
    cached = {block.sequence_hash: block for block in blocks}
    looks = 0

    def find(sequence_hash: int) -> CachedBlock | None:
        nonlocal looks
        looks += 1
        return cached.get(sequence_hash)

    def evict(block: CachedBlock) -> dict[int, CachedBlock]:
        del cached[block.sequence_hash]
        return index.take_in([block], find)

    assert len(evict(blocks[-1])) == 20
    for block in reversed(blocks[100:-1]):
        assert evict(block) == {}
    assert looks < 3 * len(blocks)

    # There is room again.
    index.remove([15])
    assert len(evict(blocks[99])) == 6
