"""What is told again of a cache leads an index to what the events themselves led it to."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.kvrouter.event_strategies import removed_events, stored_events

from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheDigest,
    KvEvent,
    Tier,
    encode_events,
)
from dynbus.kvrouter.radix.index import MessageOutcome, RadixIndex, Rank
from dynbus.kvrouter.stream.cache_mirror import CacheMirror
from dynbus.kvrouter.stream.digest import index_digest

RANK = Rank("a", 0)
TIERS = st.sampled_from([Tier.DEVICE, Tier.HOST])
NAMES = st.integers(1, 9)


def index_of(events: Sequence[KvEvent]) -> RadixIndex:
    """An index that has applied the events in messages of up to three."""
    index = RadixIndex()
    for first_id in range(0, len(events), 3):
        message = encode_events(events[first_id : first_id + 3], event_epoch=1, first_id=first_id)
        assert index.apply("a", message).verdict is MessageOutcome.APPLIED
    return index


def stored(*hashes: int, parent: int | None = None, tier: Tier = Tier.DEVICE) -> BlockStored:
    return BlockStored(parent, list(hashes), list(hashes), tier)


def engine_hashes(events: Sequence[KvEvent]) -> list[list[int]]:
    return [list(map(int, one.engine_hashes)) for one in events if isinstance(one, BlockStored)]


@given(
    st.lists(
        st.lists(
            stored_events(NAMES, st.integers(1, 3), tiers=TIERS, min_size=0)
            | removed_events(NAMES, tiers=TIERS)
            | st.just(AllBlocksCleared()),
            max_size=6,
        ),
        max_size=8,
    ),
    st.lists(st.integers(1, 3), max_size=6),
)
def test_an_index_of_the_state_answers_as_an_index_of_the_events(
    handed_over: list[list[KvEvent]], prefix: list[int]
) -> None:
    mirror = CacheMirror()

    published = [event for events in handed_over for event in mirror.apply(events)]

    followed, told = index_of(published), index_of(list(mirror.state()))
    assert told.overlaps(prefix) == followed.overlaps(prefix)
    assert index_digest(told, RANK) == index_digest(followed, RANK) == mirror.digest()


def test_parents_are_told_before_their_children() -> None:
    mirror = CacheMirror()
    mirror.apply([stored(1, 2), stored(3, parent=2), stored(4, parent=1)])

    assert engine_hashes(list(mirror.state())) == [[1, 2, 3], [4]]


def test_a_child_whose_parent_was_removed_is_told_behind_a_hole() -> None:
    mirror = CacheMirror()
    mirror.apply([stored(1, 2, 3), BlockRemoved([2])])

    index = index_of(list(mirror.state()))

    assert index.lookup([1, 2, 3]) == {"a": 1}
    assert index.statistics().detached == 1
    assert index_digest(index, RANK) == mirror.digest()


def test_a_removed_block_is_told_only_while_others_are_below_it() -> None:
    mirror = CacheMirror()
    mirror.apply([stored(1, 2, 3), stored(8, parent=2), stored(9, parent=1)])

    mirror.apply([BlockRemoved([3]), BlockRemoved([2])])
    with_a_link = list(mirror.state())
    mirror.apply([BlockRemoved([8])])

    assert [len(each) for each in engine_hashes(with_a_link)] == [3, 1]
    assert engine_hashes(list(mirror.state())) == [[1, 9]]


def test_a_chain_without_its_parent_is_left_out_and_counted() -> None:
    mirror = CacheMirror()

    accepted = mirror.apply([stored(1), stored(5, parent=4), stored(2, parent=1)])

    assert accepted == [stored(1), stored(2, parent=1)]
    assert mirror.unknown_parents == 1


def test_what_was_cleared_is_not_told() -> None:
    mirror = CacheMirror()
    mirror.apply([stored(1), stored(2, tier=Tier.HOST), AllBlocksCleared()])

    assert list(mirror.state()) == []
    assert mirror.digest() == CacheDigest(0, 0)


def test_events_that_come_while_the_state_is_told_are_not_in_it() -> None:
    mirror = CacheMirror()
    mirror.apply([stored(1, 2)])

    state = mirror.state()
    mirror.apply([stored(9), BlockRemoved([1, 2])])

    assert engine_hashes(list(state)) == [[1, 2]]


EVENTS = (
    stored_events(NAMES, st.integers(1, 3), tiers=TIERS)
    | removed_events(NAMES, tiers=TIERS)
    | st.just(AllBlocksCleared())
)


@given(st.lists(EVENTS, max_size=30))
def test_what_is_known_of_a_block_is_what_its_latest_event_said(events: list[KvEvent]) -> None:
    mirror = CacheMirror()
    known: dict[Tier, dict[int, tuple[int, int | None]]] = {tier: {} for tier in Tier}

    for event in mirror.apply(events):
        if isinstance(event, AllBlocksCleared):
            for of_tier in known.values():
                of_tier.clear()
        elif isinstance(event, BlockRemoved):
            for name in event.engine_hashes:
                known[event.tier].pop(int(name), None)
        else:
            before = event.parent_hash
            for name, block in zip(event.engine_hashes, event.block_hashes, strict=True):
                known[event.tier][int(name)] = int(block), before
                before = int(name)

    for tier, blocks in known.items():
        assert set(mirror.held(tier)) == blocks.keys()
    for name in range(1, 10):
        found = mirror.find(name)
        assert found in [blocks.get(name) for blocks in known.values()]
        assert found is not None or not any(name in blocks for blocks in known.values())


def test_blocks_that_came_one_by_one_share_a_stretch() -> None:
    mirror = CacheMirror()

    mirror.apply([stored(1), *(stored(name, parent=name - 1) for name in range(2, 65))])

    assert len(set(map(id, mirror.held(Tier.DEVICE).values()))) == 1


def test_a_beginning_that_stays_keeps_nothing_of_the_ends_that_went() -> None:
    mirror = CacheMirror()
    beginning = mirror.apply([stored(1)])

    for first in range(100, 100_000, 200):
        end = [first, *range(first + 1, first + 100)]
        mirror.apply([stored(*end, parent=1), stored(first + 150, parent=first + 50)])
        mirror.apply([BlockRemoved([*reversed(end), first + 150])])

    [stretch] = mirror.held(Tier.DEVICE).values()
    assert len(stretch.names) == 8
    assert engine_hashes(list(mirror.state())) == engine_hashes(beginning)


def test_the_order_of_events_leaves_no_trace_in_the_digest() -> None:
    one, other = CacheMirror(), CacheMirror()

    one.apply([stored(1, 2), stored(7, tier=Tier.HOST)])
    other.apply([stored(7, tier=Tier.HOST), stored(1), stored(8), stored(2, parent=1)])
    other.apply([BlockRemoved([8])])

    assert one.digest() == other.digest()
    assert one.digest() != CacheMirror().digest()


def test_the_digest_is_what_the_protocol_says() -> None:
    def mix(number: int) -> int:
        mask = (1 << 64) - 1
        number = (number + 0x9E3779B97F4A7C15) & mask
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
        number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
        return number ^ number >> 31

    mirror = CacheMirror()
    mirror.apply([BlockStored(None, [5], [6], Tier.HOST), BlockStored(None, [7], [1 << 63])])

    expected = (mix(mix(5 + 1) ^ 6) + mix(mix(7) ^ 1 << 63)) % (1 << 64)
    assert mirror.digest() == CacheDigest(2, expected)


def test_a_block_costs_about_110_bytes_and_its_memory_comes_back() -> None:
    count, chain = 200_000, 50
    numbers = np.random.default_rng(1).integers(1, 1 << 63, count, dtype=np.uint64)
    events = [BlockStored(None, part, part) for part in np.split(numbers, count // chain)]
    removed = [BlockRemoved(part) for part in np.split(numbers, count // chain)]
    tracemalloc.start()
    try:
        mirror = CacheMirror()
        for stored_event in events:
            mirror.apply([stored_event])
        held = tracemalloc.get_traced_memory()[0]
        for removed_event in removed:
            mirror.apply([removed_event])
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert held / count < 130
    assert left / count < 60
