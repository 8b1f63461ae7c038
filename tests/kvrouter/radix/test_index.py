"""The index follows each rank's numbering, and claims no block that may be gone."""

from __future__ import annotations

import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kvrouter.event_strategies import removed_events, stored_events
from tests.kvrouter.naive_caches import NaiveCaches

from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    Tier,
    encode_events,
)
from dynbus.kvrouter.radix import index as radix_index
from dynbus.kvrouter.radix.index import MessageOutcome, Overlap, RadixIndex, Rank
from dynbus.kvrouter.radix.snapshot import dump_index, load_index


def message(*events: KvEvent, first_id: int = 0, epoch: int = 1, dp_rank: int = 0) -> bytes:
    return encode_events(events, event_epoch=epoch, first_id=first_id, dp_rank=dp_rank)


def stored(*hashes: int, parent: int | None = None, tier: Tier = Tier.DEVICE) -> BlockStored:
    """Blocks whose engine hash is their block hash."""
    return BlockStored(parent, list(hashes), list(hashes), tier)


def test_each_instance_is_found_with_the_prefix_that_it_holds() -> None:
    index = RadixIndex()

    index.apply("a", message(stored(1, 2, 3)))
    index.apply("b", message(stored(1, 2), stored(7, parent=2)))

    assert index.lookup([1, 2, 3, 4]) == {"a": 3, "b": 2}
    assert index.lookup([1, 2, 7]) == {"a": 2, "b": 3}
    assert index.lookup([2, 3]) == {}
    assert index.lookup([]) == {}


def test_a_message_that_comes_twice_changes_nothing() -> None:
    index = RadixIndex()
    index.apply("a", message(stored(1, 2)))
    index.apply("a", message(BlockRemoved([2]), first_id=1))

    again = index.apply("a", message(stored(1, 2)))

    assert again.verdict is MessageOutcome.DUPLICATE
    assert index.lookup([1, 2]) == {"a": 1}


def test_of_a_message_that_overlaps_only_the_new_events_are_applied() -> None:
    index = RadixIndex()
    index.apply("a", message(stored(1), BlockRemoved([1])))

    applied = index.apply("a", message(stored(1), BlockRemoved([1]), stored(5)))

    assert (applied.verdict, applied.events) == (MessageOutcome.APPLIED, 1)
    assert index.lookup([1]) == {}
    assert index.lookup([5]) == {"a": 1}


def test_after_a_gap_nothing_from_before_it_is_claimed() -> None:
    index = RadixIndex()
    index.apply("a", message(stored(1, 2)))
    index.apply("b", message(stored(1, 2)))

    applied = index.apply("a", message(stored(9), first_id=5))

    assert applied.verdict is MessageOutcome.GAP
    assert applied.needs_resync
    assert index.lookup([1, 2]) == {"b": 2}
    assert index.lookup([9]) == {"a": 1}


def test_a_new_epoch_begins_with_nothing_and_the_old_one_is_over() -> None:
    index = RadixIndex()
    index.apply("a", message(stored(1, 2), epoch=1))

    index.apply("a", message(stored(3), epoch=2))
    late = index.apply("a", message(stored(4), first_id=1, epoch=1))

    assert late.verdict is MessageOutcome.STALE
    assert index.lookup([1]) == {}
    assert index.lookup([3]) == {"a": 1}
    assert index.lookup([4]) == {}


def test_a_block_without_its_parent_is_left_out_and_told() -> None:
    index = RadixIndex()

    applied = index.apply("a", message(stored(2, parent=1), stored(5)))

    assert applied == (MessageOutcome.UNKNOWN_PARENT, 1)
    assert applied.needs_resync
    assert index.lookup([5]) == {"a": 1}


def test_an_index_that_joins_late_needs_no_resync_for_what_it_missed() -> None:
    index = RadixIndex()

    applied = index.apply("a", message(stored(2, parent=1), stored(5), first_id=100))

    assert applied.verdict is MessageOutcome.APPLIED
    assert index.lookup([5]) == {"a": 1}


def test_what_is_no_message_is_counted_and_changes_nothing() -> None:
    index = RadixIndex()
    index.apply("a", message(stored(1)))

    applied = index.apply("a", b"\x01 not a message")

    assert applied == (MessageOutcome.MALFORMED, 0)
    assert index.lookup([1]) == {"a": 1}
    assert index.statistics().verdicts[MessageOutcome.MALFORMED] == 1


def test_clearing_empties_one_rank_of_all_tiers() -> None:
    index = RadixIndex()
    index.apply("a", message(stored(1), stored(1, tier=Tier.HOST)))
    index.apply("a", message(stored(1, 2), dp_rank=1))

    index.apply("a", message(AllBlocksCleared(), stored(8), first_id=2))

    assert index.lookup([1, 2]) == {"a": 2}
    assert set(index.overlaps([1])) == {Rank("a", 1)}
    assert index.lookup([8]) == {"a": 1}


def test_of_several_ranks_the_longest_prefix_counts() -> None:
    index = RadixIndex()
    index.apply("a", message(stored(1)))
    index.apply("a", message(stored(1, 2, 3), dp_rank=1))

    assert index.lookup([1, 2, 3]) == {"a": 3}
    assert index.overlaps([1, 2, 3]) == {
        Rank("a", 0): Overlap(1, 0, 0, 0),
        Rank("a", 1): Overlap(3, 0, 0, 0),
    }


def test_a_lower_tier_goes_on_where_the_device_ends_and_fills_its_holes() -> None:
    index = RadixIndex()
    index.apply(
        "a",
        message(
            stored(1, 2, 3, 4, 5, 6),
            stored(1, 2, 3, 4, tier=Tier.HOST),
            BlockRemoved([3, 6]),
            stored(1, 2, 3, 4, 5, 6, 7, tier=Tier.DISK),
        ),
    )

    assert index.overlaps([1, 2, 3, 4, 5, 6, 7, 8]) == {Rank("a", 0): Overlap(4, 1, 2, 0)}
    assert index.lookup([1, 2, 3, 4]) == {"a": 2}


def test_an_instance_that_leaves_is_gone_at_once_and_its_memory_with_the_sweep() -> None:
    index = RadixIndex()
    index.apply("a", message(stored(*range(1, 1001))))
    index.apply("b", message(stored(1, 2)))

    index.remove_instance("a")
    index.remove_instance("nobody")

    assert index.lookup([1, 2, 3]) == {"b": 2}
    assert index.statistics().blocks == 2
    assert index.sweep()
    assert index.statistics().runs == 1


def test_an_instance_may_come_back_before_it_was_swept() -> None:
    index = RadixIndex()
    index.apply("a", message(stored(*range(1, 2001))))
    index.remove_instance("a")

    index.apply("a", message(stored(1, 2), epoch=2))

    assert index.lookup([1, 2, 3]) == {"a": 2}
    while not index.sweep(10):
        assert index.lookup([1, 2, 3]) == {"a": 2}


def test_more_blocks_than_allowed_are_never_held() -> None:
    index = RadixIndex(max_blocks=100)

    for start in range(0, 2000, 20):
        index.apply("a", message(stored(*range(start, start + 20)), first_id=start // 20))
        assert index.statistics().blocks <= 100

    assert index.statistics().evicted >= 1900
    assert index.lookup(list(range(1980, 2000))) == {"a": 20}


def test_caches_forget_one_after_the_other_with_the_messages_that_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(radix_index, "EVICT_LOOK", 1)
    index = RadixIndex(max_blocks=1000)
    chains = [list(range(start, start + 10)) for start in range(1, 2001, 10)]
    next_id = dict.fromkeys("abcde", 0)
    most = 0
    forgotten: list[int] = []
    for number, chain in enumerate(chains):
        instance = "abcde"[number % 5]
        before = index.statistics().evicted
        index.apply(instance, message(stored(*chain), first_id=next_id[instance]))
        next_id[instance] += 1
        counted = index.statistics()
        most = max(most, counted.blocks)
        forgotten.append(counted.evicted - before)

    # The tenth that goes is spread over the caches, one for each message.
    assert max(forgotten) == 30
    assert most == 1000
    assert index.lookup(chains[-1]) == {"e": 10}
    assert index.lookup(chains[0]) == {}
    found = sum(sum(index.lookup(chain).values()) for chain in chains)
    assert found == index.statistics().blocks


def test_at_the_overshoot_all_caches_forget_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_index, "EVICT_LOOK", 1)
    index = RadixIndex(max_blocks=1000)
    for number, instance in enumerate("abcde"):
        blocks = range(200 * number + 1, 200 * number + 201)
        for at in range(0, 200, 10):
            index.apply(instance, message(stored(*blocks[at : at + 10]), first_id=at // 10))

    index.apply("f", message(stored(*range(5001, 5401))))

    assert 600 <= index.statistics().blocks <= 1050


def test_one_instance_cannot_take_the_room_of_others() -> None:
    index = RadixIndex(max_blocks=5_000)
    honest = {"a": range(1, 881), "b": range(2001, 2273)}
    for instance, blocks in honest.items():
        index.apply(instance, message(stored(*blocks)))

    for first_id in range(500):
        flood = range(10_000 + 40 * first_id, 10_040 + 40 * first_id)
        index.apply("x", message(stored(*flood), first_id=first_id))

    held = {instance: index.lookup(list(blocks)) for instance, blocks in honest.items()}
    assert held == {"a": {"a": 880}, "b": {"b": 272}}
    assert not index.ranks[Rank("a", 0)].partial
    assert index.ranks[Rank("x", 0)].partial
    assert 3000 < index.ranks[Rank("x", 0)].blocks < 5_000 - 880 - 272
    assert index.statistics().blocks <= 5_000


def test_an_instance_gains_no_room_by_holding_the_same_in_many_ranks_and_tiers() -> None:
    index = RadixIndex(max_blocks=1_000)
    index.apply("a", message(stored(*range(1, 101))))
    fork = [stored(*range(1, 51)), stored(7777, parent=50)]

    for dp_rank in range(40):
        index.apply("x", encode_events(fork, event_epoch=1, first_id=0, dp_rank=dp_rank))

    assert index.lookup(list(range(1, 101)))["a"] == 100
    assert not index.ranks[Rank("a", 0)].partial
    assert index.statistics().blocks <= 1_050


def test_the_caches_of_one_instance_give_up_alike() -> None:
    index = RadixIndex(max_blocks=1_000)
    for number in range(60):
        dp_rank, first_id = number % 2, number // 2
        events = [stored(*range(100 * number + 1, 100 * number + 21))]
        index.apply("x", encode_events(events, event_epoch=1, first_id=first_id, dp_rank=dp_rank))

    blocks = [index.ranks[Rank("x", dp_rank)].blocks for dp_rank in (0, 1)]
    assert abs(blocks[0] - blocks[1]) <= 40
    assert sum(blocks) > 800


def test_an_instance_may_leave_while_caches_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_index, "EVICT_LOOK", 1)
    index = RadixIndex(max_blocks=100)
    for instance in "abcde":
        index.apply(instance, message(stored(*range(1, 21))))
    index.apply("a", message(stored(200), first_id=1))

    index.remove_instance("b")
    for first_id in range(2, 5):
        index.apply("a", message(stored(200 + first_id), first_id=first_id))

    assert index.statistics().evicted == 80
    assert index.statistics().blocks == 4
    assert index.lookup(list(range(1, 21))) == {}
    loaded, _ = load_index(dump_index(index, 1), max_blocks=100)
    assert loaded.statistics().runs == index.statistics().runs == 4


hashes = st.integers(0, 20)
events = st.lists(
    st.one_of(
        stored_events(hashes, st.integers(1, 3)),
        removed_events(hashes),
        st.just(AllBlocksCleared()),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(
    batches=st.lists(st.tuples(st.sampled_from("ab"), events, st.booleans()), max_size=15),
    data=st.data(),
)
def test_the_index_agrees_with_an_account_of_the_events_that_arrived_once(
    batches: list[tuple[str, list[KvEvent], bool]], data: st.DataObject
) -> None:
    index, naive = RadixIndex(), NaiveCaches()
    next_id = {"a": 0, "b": 0}

    for instance, batch, twice in batches:
        sent = message(*batch, first_id=next_id[instance])
        next_id[instance] += len(batch)
        for _ in range(1 + twice):
            index.apply(instance, sent)
        for event in batch:
            if isinstance(event, BlockStored):
                naive.store(
                    instance, event.parent_hash, list(event.engine_hashes), list(event.block_hashes)
                )
            elif isinstance(event, BlockRemoved):
                naive.remove(instance, list(event.engine_hashes))
            else:
                naive.paths.pop(instance, None)

    for held in list(naive.paths.values()):
        for path in held.values():
            assert index.lookup(path) == naive.find(path)
    prefix = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    assert index.lookup(prefix) == naive.find(prefix)
    assert index.statistics().blocks == sum(len(held) for held in naive.paths.values())


@pytest.mark.parametrize("blocks", [0, 3])
def test_the_index_shows_what_it_follows(blocks: int) -> None:
    index = RadixIndex()
    if blocks:
        index.apply("a", message(stored(*range(blocks))))

    assert repr(index) == f"<RadixIndex [{blocks // 3} instances, {blocks // 3} runs]>"


@pytest.mark.parametrize(
    ("epoch", "first_id"),
    [(1 << 63, 0), ((1 << 64) - 1, 0), (1, (1 << 64) - 2), (1, (1 << 64) - 1)],
)
def test_a_message_with_numbers_that_nothing_could_follow_hides_no_rank(
    epoch: int, first_id: int
) -> None:
    index = RadixIndex()
    index.apply("a", message(stored(1)))
    forged = bytearray(message(BlockRemoved([1]), BlockRemoved([2])))
    struct.pack_into("<QQ", forged, 8, epoch, first_id)

    applied = index.apply("a", bytes(forged))

    assert applied == (MessageOutcome.MALFORMED, 0)
    assert index.lookup([1]) == {"a": 1}
    assert load_index(dump_index(index, 1), max_blocks=10)[0].lookup([1]) == {"a": 1}


def test_a_block_with_very_many_below_it_that_comes_and_goes_costs_a_bounded_time() -> None:
    index = RadixIndex()
    children = [BlockStored(1, [block], [block]) for block in range(2, 20_002)]
    index.apply("a", message(stored(1), *children))
    index.apply("b", message(stored(1, 2)))
    again: list[KvEvent] = [BlockRemoved([1]), stored(1)] * 5_000

    begun = time.process_time()
    applied = index.apply("a", message(*again, first_id=20_001))

    # All of it would take one minute or more.
    assert time.process_time() - begun < 10.0
    assert applied == (MessageOutcome.EXCESSIVE, 0)
    assert applied.needs_resync
    assert index.lookup([1, 2]) == {"b": 2}
    assert index.statistics().blocks == 2
    assert index.ranks[Rank("a", 0)].partial


def test_a_block_with_many_below_it_may_come_and_go() -> None:
    index = RadixIndex()
    children = [BlockStored(1, [block], [block]) for block in range(2, 5_002)]
    index.apply("a", message(stored(1), *children))
    again: list[KvEvent] = [BlockRemoved([1]), stored(1)] * 10

    applied = index.apply("a", message(*again, first_id=5_001))

    assert applied == (MessageOutcome.APPLIED, 20)
    assert index.lookup([1, 5001]) == {"a": 2}
