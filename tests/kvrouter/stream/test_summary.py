"""What other regions hear of a cache is what an index says of it."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from tests.kvrouter.event_strategies import removed_events, stored_events

from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    encode_events,
)
from dynbus.kvrouter.hashing import hash_prefixes
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.stream.cache_mirror import CacheMirror
from dynbus.kvrouter.stream.summary import (
    BELIEVED_FOR,
    MOST_SUMMARIES,
    SUMMARY_BLOCKS,
    CachesAbroad,
    summarize,
)

RANK = Rank("a", 0)
NAMES = st.integers(1, 9)
ROOM = 1 << 20


def mirror_of(*events: KvEvent) -> CacheMirror:
    cache = CacheMirror()
    cache.apply(events)
    return cache


def heard(cache: CacheMirror, max_bytes: int = ROOM) -> CachesAbroad:
    abroad = CachesAbroad()
    assert abroad.put(RANK, summarize(cache, max_bytes), 0.0)
    return abroad


@example([BlockStored(None, [1, 2, 3], [1, 2, 3]), BlockRemoved([2])], [1, 2, 3])
@given(
    st.lists(
        stored_events(NAMES, st.integers(1, 3))
        | removed_events(NAMES)
        | st.just(AllBlocksCleared()),
        max_size=8,
    ),
    st.lists(st.integers(1, 3), max_size=6),
)
def test_a_summary_says_of_each_prompt_what_an_index_says(
    events: list[KvEvent], prompt: list[int]
) -> None:
    index, cache = RadixIndex(), CacheMirror()
    index.apply("a", encode_events(cache.apply(events), event_epoch=1, first_id=0))
    overlap = index.overlaps(np.array(prompt, dtype=np.uint64)).get(RANK)

    reach = heard(cache).reach(RANK, hash_prefixes(prompt), 1.0)

    assert reach == (0 if overlap is None else overlap.total)


def test_of_too_many_blocks_the_latest_are_said_and_those_that_lead_to_them() -> None:
    shared = BlockStored(None, [1], [1])
    old = BlockStored(None, range(2, SUMMARY_BLOCKS), range(2, SUMMARY_BLOCKS))
    new = BlockStored(1, range(100_000, 101_000), range(100_000, 101_000))
    cache = mirror_of(shared, old, new)

    abroad = heard(cache)

    latest = hash_prefixes([1, *range(100_000, 101_000)])
    assert abroad.reach(RANK, latest, 1.0) == 1001
    assert len(cache.prefixes(SUMMARY_BLOCKS)) <= SUMMARY_BLOCKS
    assert len(summarize(cache, 400)) == 400


def test_a_summary_counts_until_it_is_too_old() -> None:
    abroad = heard(mirror_of(BlockStored(None, [1, 2], [1, 2])))

    reached = [abroad.reach(RANK, hash_prefixes([1, 2, 3]), at) for at in (1.0, BELIEVED_FOR)]

    assert reached == [2, 0]
    assert abroad.reach(Rank("b", 0), hash_prefixes([1]), 1.0) == 0


def test_what_is_no_summary_is_refused_and_no_more_are_kept_than_there_is_room_for() -> None:
    abroad = CachesAbroad()
    assert not abroad.put(RANK, b"123", 0.0)

    for number in range(MOST_SUMMARIES):
        assert abroad.put(Rank("many", number), b"", 0.0)
    assert not abroad.put(RANK, b"", 1.0)
    assert abroad.put(RANK, b"", BELIEVED_FOR)
