"""The kernel in plain Python: `Kernel` over a `PrefixTree`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.events import EventBatch, Operation, decode_events

from .eviction import Victim, choose_victims, evict
from .holdings import next_start, reach
from .kernel import MANY, REMEMBERED, Answers, Changes, Hashes, Key, Value
from .prefix_tree import PrefixTree
from .records import DEPTH_BITS, MAX_DEPTH, MOST_LOOKED_AT, CacheRecord, RunRecord
from .runs import Holder, Run

Words = NDArray[np.uint64]


class PythonKernel:
    """A prefix tree of Python objects."""

    def __init__(self) -> None:
        self.tree = PrefixTree()

    # Holders --------------------------------------------------------------------------

    def add_holder(self) -> Holder:
        return self.tree.add_holder()

    def drop_holder(self, holder: Holder) -> None:
        self.tree.drop_holder(holder)

    @property
    def is_swept(self) -> bool:
        return self.tree.is_swept

    def sweep(self, limit: int) -> None:
        self.tree.sweep(limit)

    # Events ---------------------------------------------------------------------------

    def decode(self, message: bytes) -> EventBatch:
        return decode_events(message)

    def apply(
        self,
        batch: EventBatch,
        skip: int,
        holder_of: Callable[[int], Holder],
        clear: Callable[[], None],
    ) -> Changes:
        tree = self.tree
        operations, tiers, bounds = batch.operations, batch.tiers, batch.bounds
        orphans = unknown = added = looked_at = 0
        stored = sum(bounds[i + 1] - bounds[i] for i in range(skip) if not operations[i])
        at, end = skip, len(operations)
        while at < end and looked_at <= MOST_LOOKED_AT:
            operation, tier = operations[at], tiers[at]
            last = at + 1
            while last < end and operations[last] == operation and tiers[last] == tier:
                last += 1
            first_block, last_block = bounds[at], bounds[last]
            if operation == Operation.STORED:
                count = last_block - first_block
                holder = holder_of(tier)
                holder.looked_at = 0
                before = len(holder.held)
                orphans += len(
                    tree.store(
                        holder,
                        batch.parents[at:last],
                        [bound - first_block for bound in bounds[at : last + 1]],
                        batch.engine_hashes[first_block:last_block],
                        batch.blocks[8 * stored : 8 * (stored + count)],
                    )
                )
                added += len(holder.held) - before
                stored += count
                looked_at += holder.looked_at
            elif operation == Operation.REMOVED:
                removed = batch.engine_hashes[first_block:last_block]
                holder = holder_of(tier)
                holder.looked_at = 0
                missing = tree.remove(holder, removed)
                looked_at += holder.looked_at
                added -= len(removed) - missing
                unknown += missing
            elif operation == Operation.CLEARED:
                clear()
            at = last
        return Changes(orphans, unknown, added, looked_at > MOST_LOOKED_AT)

    # Questions ------------------------------------------------------------------------

    def find(self, block_hashes: Hashes, answers: Answers[Key, Value]) -> dict[Key, Value]:
        path, end = self.tree.descend(_packed(block_hashes))
        answer: dict[Key, Value] = {}
        labels, values = answers.labels, answers.values
        for run in path:
            if len(run.ends) >= MANY and run.end <= end:
                answer.update(self._known(run, answers))
                continue
            for number, held in run.ends.items():
                if number in labels:
                    answer[labels[number]] = values(min(held, end))
        return answer

    def _known(self, run: Run, answers: Answers[Key, Value]) -> dict[Key, Value]:
        """What is to say of a run, remembered as long as nothing changes there."""
        known = answers.remembered.get(run.id)
        if known is not None and known[0] == run.stamp:
            return known[1]
        labels, values = answers.labels, answers.values
        answer = {labels[one]: values(held) for one, held in run.ends.items() if one in labels}
        if len(answers.remembered) >= REMEMBERED:
            answers.remembered.clear()
        answers.remembered[run.id] = (run.stamp, answer)
        return answer

    def find_holders(self, block_hashes: Hashes) -> dict[int, int]:
        return self.tree.find(_packed(block_hashes))

    def count_tiers(
        self, block_hashes: Hashes, holders: Sequence[Sequence[int]]
    ) -> Iterable[Sequence[int]]:
        path, end = self.tree.descend(_packed(block_hashes))
        return [_counts(of_rank, path, end) for of_rank in holders]

    @property
    def run_count(self) -> int:
        return len(self.tree.runs) - 1

    def contents(self, holder: Holder) -> tuple[Words, Words]:
        held = holder.held
        count = len(held)
        if not count:
            return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint64)
        engine_hashes = np.fromiter(held, dtype=np.uint64, count=count)
        locations = np.fromiter(held.values(), dtype=np.int64, count=count)
        depths = locations & MAX_DEPTH
        numbers = locations >> DEPTH_BITS
        # Blocks that were stored together are neighbours in `held`, and in one run.
        firsts = np.concatenate(([0], np.flatnonzero(np.diff(numbers)) + 1))
        columns = _Columns()
        which = [columns.place(self.tree.runs[number]) for number in numbers[firsts].tolist()]
        places = np.repeat(np.array(which), np.diff(np.append(firsts, count)))
        ends, tails = np.array(columns.ends), np.array(columns.tails)
        while (moved := np.flatnonzero(depths >= ends[places])).size:
            places[moved] = tails[places[moved]]
        blocks = np.frombuffer(b"".join(columns.blocks), dtype="<u8")
        return engine_hashes, blocks[np.array(columns.shifts)[places] + depths].astype(np.uint64)

    # Limits ---------------------------------------------------------------------------

    def choose_victims(self, holders: Sequence[Holder], count: int) -> list[Victim]:
        return choose_victims(self.tree, {holder.number for holder in holders}, count)

    def evict(self, holder: Holder, victims: Sequence[Victim], most: int) -> int:
        return evict(self.tree, holder, victims, most)

    # Snapshots ------------------------------------------------------------------------

    @property
    def next_numbers(self) -> tuple[int, int]:
        return self.tree.next_run, self.tree.next_holder

    def run_records(self) -> Iterator[RunRecord]:
        return (_run_record(run) for run in self.tree.by_level() if run.parent is not None)

    def columns(self, holder: Holder, limit: int) -> Iterator[tuple[Words, Words]]:
        engine_hashes, locations = iter(holder.held), iter(holder.held.values())
        for start in range(0, len(holder.held), limit):
            size = min(limit, len(holder.held) - start)
            yield (
                np.fromiter(islice(engine_hashes, size), dtype=np.uint64, count=size),
                np.fromiter(islice(locations, size), dtype=np.uint64, count=size),
            )

    def load(
        self,
        runs: Sequence[RunRecord],
        caches: Sequence[CacheRecord],
        next_numbers: tuple[int, int],
    ) -> list[Holder]:
        tree = self.tree
        add_records(tree, runs)
        tree.next_run, tree.next_holder = next_numbers
        detached: dict[int, int] = {}
        for record in runs:
            for number, spans in record.detached.items():
                behind = sum(end - start for start, end in spans)
                detached[number] = detached.get(number, 0) + behind
        holders: list[Holder] = []
        for cache in caches:
            holder = Holder(cache.number)
            engine_hashes, locations = cache.arrays()
            holder.held = dict(zip(engine_hashes.tolist(), locations.tolist(), strict=True))
            holder.detached = detached.get(cache.number, 0)
            holders.append(holder)
        return holders

    def prefix_tree(self) -> PrefixTree:
        return self.tree


def add_records(tree: PrefixTree, runs: Sequence[RunRecord]) -> None:
    """Put runs into an empty tree."""
    for record in runs:
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
    for record in runs:
        if record.tail:
            tree.runs[record.number].tail = tree.runs[record.tail]


def _run_record(run: Run) -> RunRecord:
    assert run.parent is not None
    copies = [(number, depth, count) for (number, depth), count in (run.copies or {}).items()]
    return RunRecord(
        run.id,
        run.parent.id,
        run.tail.id if run.tail is not None else 0,
        bytes(run.blocks),
        run.ends,
        run.detached or {},
        copies,
    )


def _packed(block_hashes: Hashes) -> bytes:
    return np.asarray(block_hashes, dtype="<u8").tobytes()


def _counts(holders: Sequence[int], path: Iterable[Run], end: int) -> list[int]:
    """How many blocks of a path one rank has in each tier."""
    counts = [0] * len(holders)
    at = 0
    for run in path:
        while at < min(run.end, end):
            stop = min(run.end, end)
            nearest = None
            for tier, holder in enumerate(holders):
                if not holder:
                    continue
                reached = reach(run, holder, at)
                if reached is not None:
                    nearest = tier
                    stop = min(reached, stop)
                    break
                # A farther tier counts only up to where this one has something again.
                stop = min(stop, next_start(run, holder, at))
            if nearest is None:
                return counts
            counts[nearest] += stop - at
            at = stop
    return counts


class _Columns:
    """The runs that locations lead to, and their tails, as columns.

    Attributes:
        ends: the depth behind the last block of each.
        tails: the place of the run that goes on behind that.
        shifts: what to add to a depth to find its block in `blocks`, joined.
    """

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.tails: list[int] = []
        self.shifts: list[int] = []
        self.blocks: list[bytearray] = []
        self._places: dict[int, int] = {}
        self._joined = 0

    def place(self, run: Run) -> int:
        """Where a run is in the columns."""
        known = self._places.get(run.id)
        if known is not None:
            return known
        place = self._places[run.id] = len(self.ends)
        following: Run | None = run
        while following is not None:
            self.ends.append(following.end)
            self.shifts.append(self._joined - following.start)
            self.blocks.append(following.blocks)
            self._joined += following.end - following.start
            following = following.tail
            self.tails.append(len(self.ends))
        return place
