"""An index from a snapshot answers like the one it was taken from, now and afterwards."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.kvrouter.events import BlockStored, KvEvent, Tier, encode_events
from dynbus.kvrouter.index import RadixIndex
from dynbus.kvrouter.snapshot import IndexDump, TornSnapshot, dump_index, load_index

from .event_strategies import removed_events, stored_events

hashes = st.integers(0, 15)
tiers = st.sampled_from([Tier.DEVICE, Tier.HOST])
events = st.lists(
    st.one_of(stored_events(hashes, st.integers(1, 3), tiers=tiers), removed_events(hashes)),
    min_size=1,
    max_size=4,
)
sources = st.tuples(st.sampled_from("ab"), st.integers(0, 1))
batches = st.lists(st.tuples(sources, events), max_size=8)
prefixes = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), max_size=10)


def feed(
    indexes: list[RadixIndex],
    sent: list[tuple[tuple[str, int], list[KvEvent]]],
    next_id: dict[tuple[str, int], int],
) -> None:
    for source, batch in sent:
        instance, dp_rank = source
        first_id = next_id.get(source, 0)
        next_id[source] = first_id + len(batch)
        message = encode_events(batch, event_epoch=1, first_id=first_id, dp_rank=dp_rank)
        verdicts = [index.apply(instance, message) for index in indexes]
        assert len(set(verdicts)) == 1


@settings(max_examples=200, deadline=None)
@given(batches, batches, prefixes)
def test_a_loaded_index_answers_like_the_one_that_was_dumped(
    before: list[tuple[tuple[str, int], list[KvEvent]]],
    after: list[tuple[tuple[str, int], list[KvEvent]]],
    asked: list[list[int]],
) -> None:
    original = RadixIndex()
    next_id: dict[tuple[str, int], int] = {}
    feed([original], before, next_id)

    loaded, sequence = load_index(dump_index(original, 41), max_blocks=1000)
    feed([original, loaded], after, next_id)

    assert sequence == 41
    for prefix in asked:
        assert loaded.lookup(prefix) == original.lookup(prefix)
        assert loaded.overlaps(prefix) == original.overlaps(prefix)
    ours, theirs = loaded.statistics(), original.statistics()
    assert (ours.blocks, ours.detached, ours.runs) == (theirs.blocks, theirs.detached, theirs.runs)
    assert dump_index(loaded, 1) == dump_index(original, 1)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])
def test_an_index_of_any_number_of_runs_is_dumped_in_slices_and_loaded(count: int) -> None:
    index = RadixIndex()
    blocks = list(range(1, count + 1))
    chains: list[KvEvent] = [BlockStored(None, [block], [block]) for block in blocks]
    index.apply("a", encode_events(chains, event_epoch=1, first_id=0))
    dump = IndexDump(index, 5)

    slices = sum(1 for _ in dump.slices())

    loaded, _ = load_index(bytes(dump.data), max_blocks=100_000)
    assert loaded.statistics().runs == count
    assert all(loaded.lookup([block]) == {"a": 1} for block in blocks[:: max(1, count // 50)])
    assert slices >= count // 512


def test_an_instance_that_left_is_not_in_the_snapshot() -> None:
    index = RadixIndex()
    message = encode_events([BlockStored(None, [1, 2], [1, 2])], event_epoch=1, first_id=0)
    index.apply("a", message)
    index.apply("b", message)
    index.remove_instance("a")

    loaded, _ = load_index(dump_index(index, 2), max_blocks=1000)

    assert loaded.lookup([1, 2]) == {"b": 2}
    assert loaded.statistics().instances == 1


@given(st.data())
def test_a_snapshot_that_is_not_whole_is_refused(data: st.DataObject) -> None:
    index = RadixIndex()
    index.apply("a", encode_events([BlockStored(None, [1, 2], [1, 2])], event_epoch=1, first_id=0))
    whole = dump_index(index, 2)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))

    for torn in (whole[:at], bytes(flipped), whole + b"x", b""):
        with pytest.raises(TornSnapshot):
            load_index(torn, max_blocks=1000)
