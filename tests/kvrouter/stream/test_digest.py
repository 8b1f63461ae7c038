"""Digests show whether an index is what its ranks hold, and old epochs whether it can be."""

from __future__ import annotations

from tests.kvrouter.event_bus import stored

from dynbus.kvrouter.events import CacheDigest, KvEvent, encode_events
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.stream.digest import (
    SECONDS_PER_HELD_BLOCK,
    STALE_IN_A_ROW,
    Comparison,
    IndexCheck,
    index_digest,
)

A = Rank("a", 0)


def index_of(*events: KvEvent, first_id: int = 0) -> RadixIndex:
    index = RadixIndex()
    index.apply("a", encode_events(events, event_epoch=1, first_id=first_id))
    return index


def test_the_digest_of_what_is_held_agrees() -> None:
    check, index = IndexCheck(), index_of(stored(1, 2))

    assert check.compare(index, A, index_digest(index, A), 0.0, is_doubted=False) is (
        Comparison.AGREES
    )
    assert (check.comparisons, check.mismatches) == (1, 0)


def test_other_blocks_and_another_number_of_blocks_differ() -> None:
    check, index = IndexCheck(), index_of(stored(1, 2))

    others = check.compare(index, A, CacheDigest(2, 12345), 0.0, is_doubted=False)
    more = check.compare(index, A, CacheDigest(3, 12345), 0.0, is_doubted=False)

    assert others is more is Comparison.DIFFERS
    assert (check.comparisons, check.mismatches) == (1, 2)


def test_a_rank_is_looked_at_in_full_when_it_is_its_turn_or_when_it_is_doubted() -> None:
    check, index = IndexCheck(), index_of(stored(1, 2))
    digest = index_digest(index, A)
    turn = 2 * SECONDS_PER_HELD_BLOCK
    check.compare(index, A, digest, 10.0, is_doubted=False)

    early = check.compare(index, A, digest, 10.0 + turn / 2, is_doubted=False)
    doubted = check.compare(index, A, digest, 10.0 + turn / 2, is_doubted=True)
    late = check.compare(index, A, digest, 10.0 + 2 * turn, is_doubted=False)

    assert early is Comparison.NOT_COMPARED
    assert doubted is late is Comparison.AGREES


def test_an_index_that_is_known_to_lack_blocks_needs_no_look() -> None:
    check, index = IndexCheck(), index_of(stored(1, 2), first_id=5)

    assert check.compare(index, A, CacheDigest(2, 0), 0.0, is_doubted=False) is Comparison.PARTIAL
    assert check.comparisons == 0


def test_what_was_forgotten_for_memory_is_not_asked_for() -> None:
    index = RadixIndex(max_blocks=10)
    index.apply("a", encode_events([stored(*range(1, 30))], event_epoch=1, first_id=0))

    outcome = IndexCheck().compare(index, A, CacheDigest(29, 0), 0.0, is_doubted=False)

    assert outcome is Comparison.EVICTED


def test_an_old_epoch_that_goes_on_is_told_from_one_that_ends() -> None:
    check = IndexCheck()

    ending = [check.note_stale(A) for _ in range(STALE_IN_A_ROW - 1)]
    check.note_current(A)
    going_on = [check.note_stale(A) for _ in range(STALE_IN_A_ROW + 1)]

    assert not any(ending)
    assert going_on == [False] * (STALE_IN_A_ROW - 1) + [True, False]


def test_an_instance_that_is_gone_leaves_nothing() -> None:
    check, index = IndexCheck(), index_of(stored(1, 2))
    check.compare(index, A, index_digest(index, A), 0.0, is_doubted=False)
    for _ in range(STALE_IN_A_ROW - 1):
        check.note_stale(A)

    check.forget("a")

    assert not check.note_stale(A)
    assert check.compare(index, A, index_digest(index, A), 0.0, is_doubted=False) is (
        Comparison.AGREES
    )
