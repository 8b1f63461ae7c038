"""A dump of the radix index as arrays, of which a snapshot consists, and the check that they fit
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from .contents import Words
from .intervals import Interval

DEPTH_BITS: Final = 24
MAX_DEPTH: Final = (1 << DEPTH_BITS) - 1

_RUN_LIMIT: Final = 1 << (64 - DEPTH_BITS)
_HOLDER_LIMIT: Final = 1 << 31
_COPIES_LIMIT: Final = 1 << 31


class DumpedRun(msgspec.Struct, frozen=True, array_like=True):
    """A run: see `runs.Run`.

    Attributes:
        parent: the number of the run above, which comes before this one; 0 for the root.
        tail: the number of the run that old locations lead to; 0 for none.
    """

    number: int
    parent: int
    tail: int
    blocks: bytes
    ends: dict[int, int]
    detached: dict[int, list[Interval]]
    copies: list[tuple[int, int, int]]


class DumpedCache(msgspec.Struct, frozen=True, array_like=True):
    """A cache: its number, tier, and its blocks as two arrays of u64.

    Attributes:
        locations: `run << DEPTH_BITS | depth` of each block.
    """

    number: int
    tier: int
    engine_hashes: bytes
    locations: bytes

    def arrays(self) -> tuple[Words, Words]:
        """The engine's hashes and the locations."""
        hashes = np.frombuffer(self.engine_hashes, dtype="<u8").astype(np.uint64)
        return hashes, np.frombuffer(self.locations, dtype="<u8").astype(np.uint64)


def check_dumped(
    runs: Sequence[DumpedRun], caches: Sequence[DumpedCache], next_numbers: tuple[int, int]
) -> None:
    """Make sure that runs and caches fit together: the tree that they are loaded into relies on it.

    Args:
        next_numbers: above the numbers of all runs and caches.

    Raises:
        ValueError: they do not.
    """
    numbers = {cache.number for cache in caches}
    if len(numbers) < len(caches) or not all(0 < number < _HOLDER_LIMIT for number in numbers):
        raise ValueError("two caches with one number, or a number that no cache can have")
    places = _Places(runs)
    of_holder: dict[int, _Claims] = {cache.number: _Claims([], {}) for cache in caches}
    for run in runs:
        _claim(run, places, of_holder)
    next_run, next_holder = next_numbers
    if not max(places.ends) < next_run < _RUN_LIMIT or next_holder <= max(numbers, default=0):
        raise ValueError(f"runs go on from {next_run}, caches from {next_holder}")
    for cache in caches:
        _check_cache(cache, places, of_holder[cache.number])


class _Places:
    """The place of each block of the runs, if the blocks of all runs are put in a row.

    Runs that go on in their tails, one after the other, are neighbours in that row.

    Attributes:
        runs, starts, ends: of each run, by number; the root has an end only.

    Raises:
        ValueError: the runs are no tree.
    """

    def __init__(self, runs: Sequence[DumpedRun]) -> None:
        self.runs: dict[int, DumpedRun] = {}
        self.starts: dict[int, int] = {}
        self.ends = {0: 0}
        firsts: set[tuple[int, bytes]] = set()
        for run in runs:
            start = self.ends.get(run.parent)
            size, rest = divmod(len(run.blocks), 8)
            if start is None or not 0 < run.number < _RUN_LIMIT or run.number in self.ends:
                raise ValueError(f"run {run.number} has no parent before it, or its number twice")
            if not size or rest or start + size > MAX_DEPTH:
                raise ValueError(f"run {run.number} has no whole blocks, or too many")
            first = run.parent, run.blocks[:8]
            if first in firsts:
                raise ValueError(f"run {run.number} begins like another one below {run.parent}")
            firsts.add(first)
            self.runs[run.number] = run
            self.starts[run.number], self.ends[run.number] = start, start + size
        self._line_up()

    def _line_up(self) -> None:
        for run in self.runs.values():
            if run.tail and (run.tail not in self.runs or self.runs[run.tail].parent != run.number):
                raise ValueError(f"run {run.number} has a tail that does not follow it")
        tails = {run.tail for run in self.runs.values()}
        order: list[int] = []
        chains: list[int] = []
        for head in self.runs:
            number = 0 if head in tails else head
            while number:
                order.append(number)
                chains.append(head)
                number = self.runs[number].tail
        starts = np.array([self.starts[number] for number in order], dtype=np.int64)
        ends = np.array([self.ends[number] for number in order], dtype=np.int64)
        row_ends = np.cumsum(ends - starts)
        # A depth of a run, and the same depth of any tail of it, are found by the same number.
        self._bases = np.cumsum(np.array([0, *np.diff(chains)]) != 0) << DEPTH_BITS
        self._keys = self._bases + ends
        self._shifts = row_ends - ends
        self._starts = starts
        self._at = np.argsort(np.array(order, dtype=np.uint64))
        self._numbers = np.array(order, dtype=np.uint64)[self._at]
        self._shift_of = dict(zip(order, self._shifts.tolist(), strict=True))

    def find(self, locations: Words) -> NDArray[np.int64]:
        """The places of locations.

        Raises:
            ValueError: one of them is in no run.
        """
        if not len(locations):
            return np.empty(0, dtype=np.int64)
        numbers = locations >> np.uint64(DEPTH_BITS)
        depths = (locations & np.uint64(MAX_DEPTH)).astype(np.int64)
        run_places = np.searchsorted(self._numbers, numbers)
        if not len(self._numbers) or not (run_places < len(self._numbers)).all():
            raise ValueError("a location in no run")
        of_run = self._at[run_places]
        keys = self._bases[of_run] + depths
        at = np.searchsorted(self._keys, keys, side="right")
        fits = (self._numbers[run_places] == numbers) & (depths >= self._starts[of_run])
        if not fits.all() or not (at < len(self._keys)).all():
            raise ValueError("a location in no run")
        if not (self._bases[at] == self._bases[of_run]).all():
            raise ValueError("a location behind the end of its run")
        return self._shifts[at] + depths

    def place(self, run: int, depth: int) -> int:
        """The place of a block of a run."""
        shift: int = self._shift_of[run]
        return shift + depth


class _Claims(NamedTuple):
    """The blocks that runs say a cache holds.

    Attributes:
        spans: first place, and how many.
        copies: place, and further names of the block there.
    """

    spans: list[tuple[int, int]]
    copies: dict[int, int]


def _claim(run: DumpedRun, places: _Places, of_holder: dict[int, _Claims]) -> None:
    """Note what a run says of caches.

    Raises:
        ValueError: it contradicts itself, or the run above.
    """
    start, end = places.starts[run.number], places.ends[run.number]
    above = places.runs.get(run.parent)
    for holder in run.ends.keys() | run.detached.keys():
        is_whole_above = above is None or above.ends.get(holder) == start
        held = run.ends.get(holder)
        spans = list(run.detached.get(holder, ()))
        if held is not None and not is_whole_above:
            raise ValueError(f"run {run.number} is held by {holder} without the blocks above")
        # Where a span may begin: what touches is one, and not behind a hole.
        free = held + 1 if held is not None else start + is_whole_above
        if (held is None and not spans) or (held is not None and held <= start):
            raise ValueError(f"run {run.number} is held by {holder} with no blocks")
        for first, last in spans:
            if not free <= first < last:
                raise ValueError(f"run {run.number} is held by {holder} from {first} to {last}")
            free = last + 1
        spans = spans if held is None else [(start, held), *spans]
        if holder not in of_holder or spans[-1][1] > end:
            raise ValueError(f"run {run.number} is held by {holder} up to {spans[-1][1]}")
        of_holder[holder].spans.extend(
            (places.place(run.number, first), last - first) for first, last in spans
        )
    for holder, depth, count in run.copies:
        place = places.place(run.number, depth)
        if holder not in of_holder or not start <= depth < end or not 0 < count < _COPIES_LIMIT:
            raise ValueError(f"run {run.number} has copies that are none")
        if place in of_holder[holder].copies:
            raise ValueError(f"run {run.number} has the same copies twice")
        of_holder[holder].copies[place] = count


def _check_cache(cache: DumpedCache, places: _Places, claims: _Claims) -> None:
    """Make sure that a cache's blocks are those that the runs say it holds."""
    engine_hashes, locations = cache.arrays()
    if len(engine_hashes) != len(locations):
        raise ValueError(f"cache {cache.number} has blocks without a location")
    if len(np.unique(engine_hashes)) < len(engine_hashes):
        raise ValueError(f"cache {cache.number} has two blocks of one name")
    held, names = np.unique(places.find(locations), return_counts=True)
    firsts, counts = np.array(sorted(claims.spans), dtype=np.int64).reshape(-1, 2).T
    if counts.sum() != len(held):
        raise ValueError(f"cache {cache.number} does not hold what the runs say")
    shifts = firsts - np.concatenate(([0], np.cumsum(counts)[:-1])) if len(firsts) else firsts
    expected = np.repeat(shifts, counts) + np.arange(len(held))
    expected_names = np.ones(len(held), dtype=np.int64)
    copied = np.array(list(claims.copies), dtype=np.int64)
    copies = np.array(list(claims.copies.values()), dtype=np.int64)
    if not np.isin(copied, expected).all():
        raise ValueError(f"cache {cache.number} has names of blocks that it does not hold")
    expected_names[np.searchsorted(expected, copied)] += copies
    if not ((held == expected) & (names == expected_names)).all():
        raise ValueError(f"cache {cache.number} does not hold what the runs say")
