"""The whole index as bytes, with the stream sequence that it covers and a checksum.

An index that was loaded from a snapshot and one that applied all messages up to that
sequence answer alike, and stay alike with the messages that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128, xxh3_128_digest

from .index import RadixIndex, Rank, RankState
from .intervals import Interval
from .prefix_tree import PrefixTree
from .runs import Holder, Run

MAGIC: Final = b"dynbus-kv-index\x01"
CHECKSUM_BYTES: Final = 16
SLICE_BLOCKS: Final = 16_384
SLICE_RUNS: Final = 512
"""What is dumped in one turn of the loop: a millisecond or two."""


class TornSnapshot(ValueError):
    """Bytes that are no whole snapshot of version 1."""


class _HolderRecord(msgspec.Struct, frozen=True, array_like=True):
    """A cache: its number, tier, and its blocks as two arrays of u64."""

    number: int
    tier: int
    engine_hashes: bytes
    locations: bytes


class _RankRecord(msgspec.Struct, frozen=True, array_like=True):
    instance: str
    dp_rank: int
    event_epoch: int
    next_id: int
    partial: bool
    holders: list[_HolderRecord]


class _RunRecord(msgspec.Struct, frozen=True, array_like=True):
    number: int
    parent: int
    tail: int
    blocks: bytes
    ends: dict[int, int]
    detached: dict[int, list[Interval]]
    copies: list[tuple[int, int, int]]


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    next_run: int
    next_holder: int
    ranks: list[_RankRecord]
    runs: list[_RunRecord]


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
        runs = (run for run in tree.by_level() if run.parent is not None)
        self._add(_array_head(len(tree.runs) - 1))
        while records := [_run_record(run) for run in islice(runs, SLICE_RUNS)]:
            self._add(b"".join(map(msgspec.msgpack.encode, records)))
            yield
        self.data[len(MAGIC) : len(MAGIC) + CHECKSUM_BYTES] = self._checksum.digest()

    def _add(self, piece: bytes) -> None:
        self.data += piece
        self._checksum.update(piece)

    def _add_rank(self, rank: Rank, state: RankState) -> Iterator[None]:
        holders: list[_HolderRecord] = []
        for tier, holder in state.holders.items():
            columns: list[bytes] = []
            for numbers in (holder.held, holder.held.values()):
                column = bytearray()
                for piece in _pieces(numbers, len(holder.held)):
                    column += piece.tobytes()
                    yield
                columns.append(bytes(column))
            holders.append(_HolderRecord(holder.number, tier, columns[0], columns[1]))
        record = _RankRecord(
            rank.instance, rank.dp_rank, state.event_epoch, state.next_id, state.partial, holders
        )
        self._add(msgspec.msgpack.encode(record))


def _pieces(numbers: Iterable[int], count: int) -> Iterator[NDArray[np.uint64]]:
    following = iter(numbers)
    for start in range(0, count, SLICE_BLOCKS):
        size = min(SLICE_BLOCKS, count - start)
        yield np.fromiter(islice(following, size), dtype="<u8", count=size)


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
        TornSnapshot: the bytes are not whole, or of another version.
    """
    head = len(MAGIC)
    body = data[head + CHECKSUM_BYTES :]
    if data[:head] != MAGIC or data[head : head + CHECKSUM_BYTES] != xxh3_128_digest(body):
        raise TornSnapshot(f"{len(data)} bytes are no whole snapshot of version 1")
    try:
        snapshot = _decoder.decode(body)
        index = RadixIndex(max_blocks=max_blocks)
        _fill(index, snapshot)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
        raise TornSnapshot(f"a snapshot that cannot be read: {error}") from error
    return index, snapshot.sequence


def _run_record(run: Run) -> _RunRecord:
    assert run.parent is not None
    copies = [(number, depth, count) for (number, depth), count in (run.copies or {}).items()]
    return _RunRecord(
        run.id,
        run.parent.id,
        run.tail.id if run.tail is not None else 0,
        bytes(run.blocks),
        run.ends,
        run.detached or {},
        copies,
    )


def _fill(index: RadixIndex, snapshot: _Snapshot) -> None:
    tree = index.tree
    tree.next_run = snapshot.next_run
    tree.next_holder = snapshot.next_holder
    for record in snapshot.runs:
        _add_run(tree, record)
    for record in snapshot.runs:
        if record.tail:
            tree.runs[record.number].tail = tree.runs[record.tail]
    detached: dict[int, int] = {}
    for record in snapshot.runs:
        for number, spans in record.detached.items():
            detached[number] = detached.get(number, 0) + sum(end - start for start, end in spans)
    for rank in snapshot.ranks:
        state = RankState(rank.event_epoch, rank.next_id, rank.partial)
        for cache in rank.holders:
            holder = state.holders[cache.tier] = Holder(cache.number)
            engine_hashes = np.frombuffer(cache.engine_hashes, dtype="<u8").tolist()
            locations = np.frombuffer(cache.locations, dtype="<u8").tolist()
            holder.held = dict(zip(engine_hashes, locations, strict=True))
            holder.detached = detached.get(cache.number, 0)
        index.restore(Rank(rank.instance, rank.dp_rank), state)


def _add_run(tree: PrefixTree, record: _RunRecord) -> None:
    parent = tree.runs[record.parent]
    run = tree.runs[record.number] = Run(
        record.number, parent.end, bytearray(record.blocks), parent
    )
    run.ends = record.ends
    run.detached = record.detached or None
    run.copies = {(number, depth): count for number, depth, count in record.copies} or None
    if parent.children is None:
        parent.children = {}
    parent.children[record.blocks[:8]] = run
