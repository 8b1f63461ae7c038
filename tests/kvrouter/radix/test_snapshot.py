"""An index from a snapshot answers like the one it was taken from, now and afterwards."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kvrouter.event_strategies import removed_events, stored_events
from xxhash import xxh3_128_digest

from dynbus.kvrouter.events import BlockRemoved, BlockStored, KvEvent, Tier, encode_events
from dynbus.kvrouter.radix.index import RadixIndex
from dynbus.kvrouter.radix.snapshot import MAGIC, IndexDump, TornSnapshot, dump_index, load_index
from dynbus.kvrouter.stream.digest import index_digest

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
@given(before=batches, after=batches, asked=prefixes)
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
    for rank in original.ranks:
        assert index_digest(loaded, rank) == index_digest(original, rank)


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


@given(data=st.data())
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


def sealed(body: Any) -> bytes:
    """A snapshot with a checksum that is right, whatever is in it."""
    raw = msgspec.msgpack.encode(body)
    return MAGIC + xxh3_128_digest(raw) + raw


def words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def at(run: int, depth: int) -> int:
    return run << 24 | depth


def forged(**changed: Any) -> bytes:
    """The blocks 1, 2 of one rank, under the names 11, 12, but for what is changed."""
    parts: dict[str, Any] = {
        "next_run": 2,
        "next_holder": 2,
        "rank": ["a", 0, 1, 1, False],
        "caches": [[1, 0, words(11, 12), words(at(1, 0), at(1, 1))]],
        "ranks": None,
        "runs": [[1, 0, 0, words(1, 2), {1: 2}, {}, ()]],
        "evicted": 0,
    }
    parts.update(changed)
    ranks = [[*parts["rank"], parts["caches"]]] if parts["ranks"] is None else parts["ranks"]
    numbers = 5, parts["next_run"], parts["next_holder"]
    return sealed([*numbers, ranks, parts["runs"], parts["evicted"]])


def one_cache(names: bytes, locations: bytes) -> list[Any]:
    return [[1, 0, names, locations]]


BLOCKS = words(1, 2)


def test_a_snapshot_that_fits_together_is_loaded() -> None:
    index, sequence = load_index(forged(), max_blocks=100)

    assert sequence == 5
    assert index.lookup([1, 2, 3]) == {"a": 2}


def test_a_snapshot_that_does_not_tell_of_evictions_is_loaded() -> None:
    original = RadixIndex()
    feed([original], [(("a", 0), [BlockStored(None, [1, 2], [1, 2])])], {})
    parts = msgspec.msgpack.decode(dump_index(original, 5)[len(MAGIC) + 16 :])

    index, sequence = load_index(sealed(parts[:-1]), max_blocks=2)

    assert (parts[-1], len(parts)) == (0, 6)
    assert (sequence, index.lookup([1, 2]), index.has_evicted) == (5, {"a": 2}, False)


@pytest.mark.parametrize(
    "foreign",
    [
        sealed([]),
        sealed([5, 2, 2, []]),
        sealed({"sequence": 5}),
        forged(caches=one_cache(b"1234567", words(at(1, 0)))),
        forged(caches=one_cache(words(11, 12), b"")),
        forged(caches=one_cache(words(11, 12), words(at(1, 0), at(7, 1)))),
        forged(caches=one_cache(words(11, 12), words(at(1, 0), at(1, 2)))),
        forged(caches=one_cache(words(11, 12), words(at(1, 0), at(1, 0)))),
        forged(caches=one_cache(words(11, 12), words(at(1, 0), (1 << 64) - 1))),
        forged(caches=one_cache(words(11, 12), words(at(1, 0), at(0, 1)))),
        forged(caches=one_cache(words(11, 11), words(at(1, 0), at(1, 1)))),
        forged(caches=one_cache(words(11), words(at(1, 0)))),
        forged(caches=[]),
        forged(caches=[[1, 4, words(11, 12), words(at(1, 0), at(1, 1))]]),
        forged(caches=[[1, 0, words(11, 12), words(at(1, 0), at(1, 1))], [1, 1, b"", b""]]),
        forged(caches=[[1, 0, words(11, 12), words(at(1, 0), at(1, 1))], [2, 0, b"", b""]]),
        forged(caches=[[0, 0, words(11, 12), words(at(1, 0), at(1, 1))]]),
        forged(next_run=1),
        forged(next_run=(1 << 64) - 1),
        forged(next_holder=1),
        forged(rank=["a", 1 << 16, 1, 1, False]),
        forged(rank=["a", 0, 1 << 63, 1, False]),
        forged(rank=["a", 0, 1, -1, False]),
        forged(rank=["a", 0, 1, 1 << 64 - 1, "no"]),
        forged(ranks=[["a", 0, 1, 1, False, []], ["a", 0, 1, 1, False, []]], runs=[]),
        forged(evicted=-1),
        forged(evicted=None),
        forged(runs=[]),
        forged(runs=[[1, 0, 0, b"123", {1: 2}, {}, []]]),
        forged(runs=[[1, 1, 0, BLOCKS, {1: 2}, {}, []]]),
        forged(runs=[[1, 0, 1, BLOCKS, {1: 2}, {}, []]]),
        forged(runs=[[1, 0, 9, BLOCKS, {1: 2}, {}, []]]),
        forged(runs=[[1, 0, 0, BLOCKS, {1: 3}, {}, []]]),
        forged(runs=[[1, 0, 0, BLOCKS, {1: 0}, {}, []]]),
        forged(runs=[[1, 0, 0, BLOCKS, {2: 2}, {}, []]]),
        forged(runs=[[1, 0, 0, BLOCKS, {1: 1}, {1: [(1, 2)]}, []]]),
        forged(runs=[[1, 0, 0, BLOCKS, {}, {1: [(0, 2)]}, []]]),
        forged(runs=[[1, 0, 0, BLOCKS, {1: 2}, {1: []}, [(1, 2, 1)]]]),
        forged(runs=[[1, 0, 0, BLOCKS, {1: 2}, {}, [(1, 0, 1)]]]),
        forged(runs=[[1, 0, 0, BLOCKS, {1: 2}, {}, []]] * 2),
        forged(runs=[[1, 0, 0, BLOCKS, {1: 2}, {}, []], [2, 0, 0, BLOCKS, {}, {}, []]], next_run=3),
        forged(runs=[[1, 0, 0, words(1), {}, {}, []], [2, 1, 0, words(2), {1: 2}, {}, []]]),
    ],
)
def test_a_snapshot_that_does_not_fit_together_is_torn_whatever_its_checksum_says(
    foreign: bytes,
) -> None:
    with pytest.raises(TornSnapshot):
        load_index(foreign, max_blocks=100)


@settings(max_examples=200, deadline=None)
@given(before=batches, data=st.data())
def test_a_snapshot_with_changed_bytes_is_torn_or_gives_an_index_that_works(
    before: list[tuple[tuple[str, int], list[KvEvent]]], data: st.DataObject
) -> None:
    original = RadixIndex()
    feed([original], before, {})
    head = len(MAGIC) + 16
    body = bytearray(dump_index(original, 41)[head:])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.one_of(st.sampled_from([0, 1, 2, 3, 255]), st.integers(0, 255)))
    changed = MAGIC + xxh3_128_digest(bytes(body)) + body

    try:
        index, sequence = load_index(bytes(changed), max_blocks=100)
    except TornSnapshot:
        return

    for rank in list(index.ranks):
        state = index.ranks[rank]
        sent: list[KvEvent] = [BlockStored(None, [91, 92], [1, 9]), BlockRemoved([*range(16)])]
        message = encode_events(
            sent, event_epoch=state.event_epoch, first_id=min(state.next_id, 1 << 60)
        )
        index.apply(rank.instance, message)
    load_index(dump_index(index, sequence), max_blocks=100)
    for instance in {rank.instance for rank in index.ranks}:
        index.remove_instance(instance)
    index.sweep()
    assert (index.statistics().blocks, index.statistics().detached) == (0, 0)


def test_a_loaded_index_knows_that_blocks_were_evicted_unless_it_has_more_room() -> None:
    original = RadixIndex(max_blocks=2)
    feed([original], [(("a", 0), [BlockStored(None, [n], [n])]) for n in range(1, 5)], {})
    dumped = dump_index(original, 1)

    loaded, _ = load_index(dumped, max_blocks=2)
    roomy, _ = load_index(dumped, max_blocks=100)

    assert loaded.statistics().evicted == original.statistics().evicted > 0
    assert not roomy.has_evicted
