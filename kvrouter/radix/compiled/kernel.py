"""The compiled kernel: `Kernel` over arrays, one call of compiled code for each question."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.events import (
    EPOCH_LIMIT,
    ID_LIMIT,
    AllBlocksCleared,
    BlockStored,
    InvalidEvents,
    KvEvent,
    encode_events,
)
from dynbus.kvrouter.radix.kernel import REMEMBERED, Answers, Changes, Hashes, Key, Value
from dynbus.kvrouter.radix.prefix_tree import PrefixTree
from dynbus.kvrouter.radix.python_kernel import add_records
from dynbus.kvrouter.radix.records import (
    DEPTH_BITS,
    MAX_DEPTH,
    MOST_LOOKED_AT,
    CacheRecord,
    RunRecord,
)

from .dumping import contents_of, run_records
from .finding import arrays_of, count_tiers, descend, find, places_of, tell
from .hashing import chain_hashes, hash_blocks
from .held import figures_of, make_held
from .jit import Int
from .limits import (
    HELD_BLOCKS,
    WAS_BORN,
    WAS_TOUCHED,
    forget_runs,
    runs_to_give_up,
    shrink,
    sweep,
)
from .loading import load_held, load_runs, set_detached
from .messages import (
    ADDED,
    CLEARED,
    CURSOR_FIELDS,
    DIGEST,
    EVENT,
    HEADER_BYTES,
    LOOKED_AT,
    ORPHANS,
    UNKNOWN,
    apply_events,
    open_message,
    skip_events,
)
from .tree import count_runs, make_tree

Words = NDArray[np.uint64]

_WHOLE: Final = 1 << 32
_WORD: Final = np.dtype(np.uint64)


class CompiledHolder:
    """One cache: what it holds, in a table of its own."""

    __slots__ = ("held", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.held = make_held(number, secrets.randbits(64))

    @property
    def blocks(self) -> int:
        """How many blocks it holds."""
        return figures_of(self.held)[0]

    @property
    def detached(self) -> int:
        """How many of them lie behind a hole."""
        return figures_of(self.held)[1]


class WireBatch:
    """A message of events that was looked through, but not taken apart."""

    __slots__ = ("bytes", "dp_rank", "event_epoch", "events", "first_id", "message")

    def __init__(self, message: bytes) -> None:
        self.message = message if type(message) is bytes else bytes(message)
        self.bytes = np.frombuffer(self.message, dtype=np.uint8)
        is_whole, self.dp_rank, self.event_epoch, self.first_id, self.events = open_message(
            self.bytes
        )
        if (
            not is_whole
            or self.event_epoch >= EPOCH_LIMIT
            or self.first_id + self.events >= ID_LIMIT
        ):
            raise InvalidEvents(f"{len(message)} bytes that are no message of KV events")

    def __len__(self) -> int:
        return self.events


class CompiledKernel:
    """A prefix tree in arrays."""

    def __init__(self) -> None:
        self._tree = make_tree(secrets.randbits(62))
        self._refresh()
        self._growth: Int = 0
        self._cursor = np.zeros(CURSOR_FIELDS, dtype=np.int64)
        self._found: NDArray[np.int64] = np.zeros(256, dtype=np.int64)
        self._next_number = 1
        self._free_numbers: list[int] = []
        self._leaving: list[CompiledHolder] = []

    # Holders --------------------------------------------------------------------------

    def add_holder(self) -> CompiledHolder:
        if self._free_numbers:
            return CompiledHolder(self._free_numbers.pop())
        self._next_number += 1
        return CompiledHolder(self._next_number - 1)

    def drop_holder(self, holder: CompiledHolder) -> None:
        self._leaving.append(holder)

    @property
    def is_swept(self) -> bool:
        return not self._leaving

    def sweep(self, limit: int) -> None:
        while self._leaving and limit > 0:
            holder = self._leaving[-1]
            freed, left = sweep(self._tree, holder.held, limit)
            limit -= freed
            if not left:
                self._leaving.pop()
                self._free_numbers.append(holder.number)
        if not self._leaving:
            shrink(self._tree)
        self._refresh()

    def _refresh(self) -> None:
        """Look at the arrays of the tree as they are now."""
        # Kept, since the places are theirs.
        self._arrays = arrays_of(self._tree)
        self._places = places_of(self._arrays)

    # Events ---------------------------------------------------------------------------

    def decode(self, message: bytes) -> WireBatch:
        return WireBatch(message)

    def apply(
        self,
        batch: WireBatch,
        skip: int,
        holder_of: Callable[[int], CompiledHolder],
        clear: Callable[[], None],
    ) -> Changes:
        message, wire, cursor = batch.message, batch.bytes, self._cursor
        cursor[:] = 0
        if skip:
            skip_events(wire, cursor, skip)
        at = skip
        while at < batch.events:
            code = message[HEADER_BYTES + at]
            if code & 3 == CLEARED:
                clear()
            elif code & 3 != DIGEST:
                held = holder_of(code >> 3).held
                growth = apply_events(self._tree, held, wire, cursor)
                if growth != self._growth:
                    self._growth = growth
                    self._refresh()
                if cursor[LOOKED_AT] > MOST_LOOKED_AT:
                    break
                at = int(cursor[EVENT])
                continue
            skip_events(wire, cursor, 1)
            at += 1
        counts: list[int] = cursor.tolist()
        return Changes(
            counts[ORPHANS],
            counts[UNKNOWN],
            counts[ADDED],
            counts[LOOKED_AT] > MOST_LOOKED_AT,
        )

    # Questions ------------------------------------------------------------------------

    def find(self, block_hashes: Hashes, answers: Answers[Key, Value]) -> dict[Key, Value]:
        found = self._found
        if type(block_hashes) is not np.ndarray:
            block_hashes = np.array(block_hashes, _WORD)
        try:
            base, stamp, count, holder, end = find(block_hashes, self._places, found)
        except TypeError:
            # An array of other numbers, or one with gaps.
            block_hashes = np.ascontiguousarray(block_hashes, _WORD)
            base, stamp, count, holder, end = find(block_hashes, self._places, found)
        if base:
            known = answers.remembered.get(base)
            if known is None or known[0] != stamp:
                known = self._remember(answers, base, stamp)
            answer = known[1].copy()
        else:
            answer = {}
        if count == 1:
            label = answers.labels.get(holder)
            if label is not None:
                answer[label] = answers.values(end)
        elif count:
            if 2 * count > len(found):
                self._found = np.zeros(4 * count, dtype=np.int64)
                return self.find(block_hashes, answers)
            self._add(answer, answers, count)
        return answer

    def _remember(
        self, answers: Answers[Key, Value], run: int, stamp: int
    ) -> tuple[int, dict[Key, Value]]:
        """Put down what is held of the path to a run, as long as its stamp is the largest."""
        before = self._found
        # What `find` told stays as it is.
        self._found = np.zeros(max(len(before), 256), dtype=np.int64)
        answer: dict[Key, Value] = {}
        self._add(answer, answers, self._tell(run, _WHOLE))
        self._found = before
        if len(answers.remembered) >= REMEMBERED:
            answers.remembered.clear()
        known = answers.remembered[run] = (stamp, answer)
        return known

    def _add(self, answer: dict[Key, Value], answers: Answers[Key, Value], count: int) -> None:
        """Add what was found to an answer: the longer ends come later."""
        found = self._found
        half = len(found) // 2
        labels, values = answers.labels, answers.values
        ends = found[half : half + count].tolist()
        for holder, end in zip(found[:count].tolist(), ends, strict=True):
            if holder in labels:
                answer[labels[holder]] = values(end)

    def _tell(self, run: int, depth: int) -> int:
        """Find all holders of the path to a run; returns how many were told, some repeatedly."""
        count = int(tell(self._tree, run, depth, self._found))
        if 2 * count > len(self._found):
            self._found = np.zeros(4 * count, dtype=np.int64)
            tell(self._tree, run, depth, self._found)
        return count

    def find_holders(self, block_hashes: Hashes) -> dict[int, int]:
        query = np.ascontiguousarray(block_hashes, _WORD)
        count = self._tell(*descend(self._tree, query))
        half = len(self._found) // 2
        ends = self._found[half : half + count].tolist()
        return dict(zip(self._found[:count].tolist(), ends, strict=True))

    def count_tiers(
        self, block_hashes: Hashes, holders: Sequence[Sequence[int]]
    ) -> Iterable[Sequence[int]]:
        query = np.ascontiguousarray(block_hashes, _WORD)
        numbers = np.array(holders, dtype=np.int64).reshape(len(holders), -1)
        counts: list[list[int]] = count_tiers(
            self._tree, *descend(self._tree, query), numbers
        ).tolist()
        return counts

    @property
    def run_count(self) -> int:
        return int(count_runs(self._tree))

    def contents(self, holder: CompiledHolder) -> tuple[Words, Words]:
        engine_hashes, blocks, _, _ = contents_of(self._tree, holder.held, 0, _WHOLE)
        return engine_hashes, blocks

    # Limits ---------------------------------------------------------------------------

    def choose_victims(self, holders: Sequence[CompiledHolder], count: int) -> NDArray[np.int64]:
        is_counted = np.zeros(self._next_number, dtype=np.bool_)
        is_counted[[holder.number for holder in holders]] = True
        runs = runs_to_give_up(self._tree, is_counted)
        runs = runs[np.lexsort((runs[:, WAS_BORN], runs[:, WAS_TOUCHED]))]
        enough = int(np.searchsorted(runs[:, HELD_BLOCKS].cumsum(), count)) + 1
        return runs[:enough].copy()

    def evict(self, holder: CompiledHolder, victims: NDArray[np.int64], most: int) -> int:
        forgotten = int(forget_runs(self._tree, holder.held, victims, most))
        self._refresh()
        return forgotten

    # Snapshots ------------------------------------------------------------------------

    @property
    def next_numbers(self) -> tuple[int, int]:
        return len(self._arrays[0]), self._next_number

    def run_records(self) -> Iterator[RunRecord]:
        return run_records(self._tree)

    def columns(self, holder: CompiledHolder, limit: int) -> Iterator[tuple[Words, Words]]:
        place, held = 0, holder.held
        while place >= 0:
            engine_hashes, _, locations, place = contents_of(self._tree, held, place, limit)
            if len(locations):
                numbers, depths = locations >> np.uint64(32), locations & np.uint64(MAX_DEPTH)
                yield engine_hashes, numbers << np.uint64(DEPTH_BITS) | depths

    def load(
        self,
        runs: Sequence[RunRecord],
        caches: Sequence[CacheRecord],
        next_numbers: tuple[int, int],
    ) -> list[CompiledHolder]:
        holders = [CompiledHolder(number) for number in range(1, len(caches) + 1)]
        self._next_number = len(caches) + 1
        number_of = {cache.number: number for number, cache in enumerate(caches, 1)}
        numbers = load_runs(self._tree, runs, number_of)
        known = np.array(sorted(numbers), dtype=np.uint64)
        loaded = np.array([numbers[number] for number in sorted(numbers)], dtype=np.uint64)
        for holder, cache in zip(holders, caches, strict=True):
            engine_hashes, locations = cache.arrays()
            places = np.searchsorted(known, locations >> np.uint64(DEPTH_BITS))
            locations = loaded[places] << np.uint64(32) | locations & np.uint64(MAX_DEPTH)
            load_held(holder.held, engine_hashes, locations)
        detached: dict[int, int] = {}
        for run in runs:
            for number, spans in run.detached.items():
                behind = sum(end - start for start, end in spans)
                detached[number] = detached.get(number, 0) + behind
        for number, blocks in detached.items():
            set_detached(holders[number_of[number] - 1].held, blocks)
        self._refresh()
        return holders

    def prefix_tree(self) -> PrefixTree:
        tree = PrefixTree()
        add_records(tree, list(self.run_records()))
        return tree


def warm_up() -> None:
    """Call everything once: what comes from the cache is linked at its first call only."""
    events: list[KvEvent] = [
        BlockStored(None, [1], [1]),
        AllBlocksCleared(),
        BlockStored(None, [1, 2], [1, 2]),
    ]
    kernel, other = CompiledKernel(), CompiledKernel()
    holder = kernel.add_holder()
    batch = kernel.decode(encode_events(events, event_epoch=1, first_id=0))
    kernel.apply(batch, 1, lambda _: holder, lambda: None)
    tokens = np.zeros(64, dtype=np.uint32)
    prefix = chain_hashes(hash_blocks(tokens, 16, 0), 0)
    kernel.find(prefix, Answers({holder.number: 0}, int))
    kernel.find_holders(prefix)
    kernel.count_tiers(prefix, [[holder.number, 0, 0, 0]])
    kernel.contents(holder)
    columns = [column.tobytes() for column in next(kernel.columns(holder, 2))]
    cache = CacheRecord(holder.number, 0, columns[0], columns[1])
    (loaded,) = other.load(list(kernel.run_records()), [cache], kernel.next_numbers)
    kernel.evict(holder, kernel.choose_victims([holder], 1), 1)
    other.drop_holder(loaded)
    other.sweep(loaded.blocks + loaded.detached)
    assert not kernel.run_count + other.run_count
