"""The whole index as bytes, with the stream sequence that it covers and a checksum.

An index that was loaded from a snapshot and one that applied all messages up to that
sequence answer alike, and stay alike with the messages that follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec
import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from dynbus.kvrouter.events import EPOCH_LIMIT, ID_LIMIT, Tier

from .contents import Words, held_columns
from .dumped import DEPTH_BITS, MAX_DEPTH, DumpedCache, DumpedRun, check_dumped
from .index import RadixIndex, Rank, RankState
from .prefix_tree import PrefixTree
from .runs import MOST_NAMED, Holder, NamedBlocks, Run

MAGIC: Final = b"dynbus-kv-index\x01"
CHECKSUM_BYTES: Final = 16
SLICE_BLOCKS: Final = 16_384
SLICE_RUNS: Final = 512
"""The number of runs that are dumped in one turn of the loop: a millisecond or two."""


class TornSnapshot(ValueError):
    """Bytes that are no whole snapshot of version 1."""


class _DumpedRank(msgspec.Struct, frozen=True, array_like=True):
    instance: str
    dp_rank: int
    event_epoch: int
    next_id: int
    partial: bool
    holders: list[DumpedCache]
    stated: str = ""


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    next_run: int
    next_holder: int
    ranks: list[_DumpedRank]
    runs: list[DumpedRun]
    evicted: int = 0


_TIERS: Final = frozenset(Tier)

_decoder = msgspec.msgpack.Decoder(_Snapshot)


def dump_index(index: RadixIndex, sequence: int) -> bytes:
    """A snapshot of an index that has applied the stream up to `sequence`."""
    dump = IndexDump(index, sequence)
    for _ in dump.slices():
        pass
    return bytes(dump.data)


class IndexDump:
    """A snapshot in the making, for a loop that has other things to do.

    Attributes:
        data: the snapshot, once `slices` has come to its end.
    """

    def __init__(self, index: RadixIndex, sequence: int) -> None:
        self.data = bytearray()
        self._index = index
        self._sequence = sequence
        self._checksum = xxh3_128()

    def slices(self) -> Iterator[None]:
        """Go on by a slice with each step. The index must not change meanwhile."""
        index, tree = self._index, self._index.tree
        while not index.sweep(SLICE_BLOCKS):
            yield
        self.data += MAGIC + bytes(CHECKSUM_BYTES)
        self._add(_array_head(len(_Snapshot.__struct_fields__)))
        for number in (self._sequence, tree.next_run, tree.next_holder):
            self._add(msgspec.msgpack.encode(number))
        self._add(_array_head(len(index.ranks)))
        for rank, state in index.ranks.items():
            yield from self._add_rank(rank, state)
        runs = (_dumped_run(run) for run in tree.by_level() if run.parent is not None)
        self._add(_array_head(tree.run_count))
        while some := list(islice(runs, SLICE_RUNS)):
            self._add(b"".join(map(msgspec.msgpack.encode, some)))
            yield
        self._add(msgspec.msgpack.encode(index.statistics().evicted))
        self.data[len(MAGIC) : len(MAGIC) + CHECKSUM_BYTES] = self._checksum.digest()

    def _add(self, piece: bytes) -> None:
        self.data += piece
        self._checksum.update(piece)

    def _add_rank(self, rank: Rank, state: RankState) -> Iterator[None]:
        holders: list[DumpedCache] = []
        for tier, holder in state.holders.items():
            engine_hashes, locations = bytearray(), bytearray()
            for names, depths, runs, counts in held_columns(holder, SLICE_BLOCKS):
                numbers = np.array([run.id for run in runs], dtype=np.uint64)
                places = np.repeat(numbers << np.uint64(DEPTH_BITS), counts) | depths
                engine_hashes += names.astype("<u8", copy=False).tobytes()
                locations += places.astype("<u8", copy=False).tobytes()
                yield
            holders.append(DumpedCache(holder.number, tier, bytes(engine_hashes), bytes(locations)))
        dumped = _DumpedRank(
            rank.instance,
            rank.dp_rank,
            state.event_epoch,
            state.next_id,
            state.partial,
            holders,
            state.stated,
        )
        self._add(msgspec.msgpack.encode(dumped))


def _array_head(count: int) -> bytes:
    """The bytes before the elements of a msgpack array."""
    if count < 16:
        return bytes([0x90 | count])
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def load_index(data: bytes, *, max_blocks: int) -> tuple[RadixIndex, int]:
    """The index of a snapshot, and the sequence that it covers.

    Raises:
        TornSnapshot: the bytes are not whole, of another version, or do not fit together.
    """
    head = len(MAGIC)
    body = data[head + CHECKSUM_BYTES :]
    if data[:head] != MAGIC or data[head : head + CHECKSUM_BYTES] != xxh3_128_digest(body):
        raise TornSnapshot(f"{len(data)} bytes are no whole snapshot of version 1")
    index = RadixIndex(max_blocks=max_blocks)
    try:
        snapshot = _decoder.decode(body)
        _fill(index, snapshot)
    except (msgspec.DecodeError, ValueError) as error:
        raise TornSnapshot(f"a snapshot that cannot be read: {error}") from error
    return index, snapshot.sequence


def _check_rank(rank: _DumpedRank) -> None:
    tiers = [cache.tier for cache in rank.holders]
    if len(set(tiers)) < len(tiers) or not _TIERS.issuperset(tiers):
        raise ValueError(f"{rank.instance}/{rank.dp_rank} has tiers {tiers}")
    if not (
        0 <= rank.dp_rank < 1 << 16
        and 0 <= rank.event_epoch < EPOCH_LIMIT
        and 0 <= rank.next_id < ID_LIMIT
    ):
        raise ValueError(f"{rank.instance}/{rank.dp_rank} has numbers that no message has")


def _fill(index: RadixIndex, snapshot: _Snapshot) -> None:
    caches = [cache for rank in snapshot.ranks for cache in rank.holders]
    next_numbers = snapshot.next_run, snapshot.next_holder
    check_dumped(snapshot.runs, caches, next_numbers)
    for rank in snapshot.ranks:
        _check_rank(rank)
    if len({(rank.instance, rank.dp_rank) for rank in snapshot.ranks}) < len(snapshot.ranks):
        raise ValueError("one rank twice")
    if snapshot.evicted < 0:
        raise ValueError(f"{snapshot.evicted} blocks were evicted")
    loaded = iter(_load(index.tree, snapshot.runs, caches, next_numbers))
    for rank in snapshot.ranks:
        state = RankState(rank.event_epoch, rank.next_id, rank.partial, stated=rank.stated)
        for cache in rank.holders:
            state.holders[cache.tier] = next(loaded)
        index.restore(Rank(rank.instance, rank.dp_rank), state)
    index.restore_evicted(snapshot.evicted)


def _load(
    tree: PrefixTree,
    runs: Sequence[DumpedRun],
    caches: Sequence[DumpedCache],
    next_numbers: tuple[int, int],
) -> list[Holder]:
    """Fill an empty tree with what fits together; returns the holders in order."""
    _add_runs(tree, runs)
    tree.next_run, tree.next_holder = next_numbers
    detached: dict[int, int] = {}
    for dumped in runs:
        for number, spans in dumped.detached.items():
            behind = sum(end - start for start, end in spans)
            detached[number] = detached.get(number, 0) + behind
    holders: list[Holder] = []
    for cache in caches:
        holder = Holder(cache.number)
        _name_blocks(tree, holder, *cache.arrays())
        holder.detached = detached.get(cache.number, 0)
        holders.append(holder)
    return holders


def _name_blocks(tree: PrefixTree, holder: Holder, engine_hashes: Words, locations: Words) -> None:
    names, places = engine_hashes.tolist(), locations.tolist()
    # Where the next block is no neighbour.
    breaks = (np.flatnonzero(np.diff(locations) != 1) + 1).tolist()
    for start, end in zip([0, *breaks], [*breaks, len(names)], strict=True):
        for first in range(start, end, MOST_NAMED):
            run, depth = tree.runs[places[first] >> DEPTH_BITS], places[first] & MAX_DEPTH
            last = min(first + MOST_NAMED, end)
            named = NamedBlocks(run, depth, bytearray(engine_hashes[first:last].tobytes()))
            holder.held.update(dict.fromkeys(names[first:last], named))


def _add_runs(tree: PrefixTree, runs: Sequence[DumpedRun]) -> None:
    """Put runs into an empty tree."""
    for dumped in runs:
        parent = tree.runs[dumped.parent]
        run = tree.runs[dumped.number] = Run(
            dumped.number, parent.end, bytearray(dumped.blocks), parent
        )
        run.ends = dumped.ends
        run.detached = dumped.detached or None
        run.copies = {(number, depth): count for number, depth, count in dumped.copies} or None
        if parent.children is None:
            parent.children = {}
        parent.children[dumped.blocks[:8]] = run
    for dumped in runs:
        if dumped.tail:
            tree.runs[dumped.number].tail = tree.runs[dumped.tail]


def _dumped_run(run: Run) -> DumpedRun:
    assert run.parent is not None
    copies = [(number, depth, count) for (number, depth), count in (run.copies or {}).items()]
    return DumpedRun(
        run.id,
        run.parent.id,
        run.tail.id if run.tail is not None else 0,
        bytes(run.blocks),
        run.ends,
        run.detached or {},
        copies,
    )
