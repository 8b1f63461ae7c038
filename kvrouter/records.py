"""What a snapshot of the index consists of, whatever kernel it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from .intervals import Interval

DEPTH_BITS: Final = 24
MAX_DEPTH: Final = (1 << DEPTH_BITS) - 1

Words = NDArray[np.uint64]


class RunRecord(msgspec.Struct, frozen=True, array_like=True):
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


class CacheRecord(msgspec.Struct, frozen=True, array_like=True):
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


def check_records(runs: Sequence[RunRecord], caches: Sequence[CacheRecord]) -> None:
    """Make sure that records fit together.

    Raises:
        ValueError: they do not.
    """
    end_of: dict[int, int] = {0: 0}
    holders = {cache.number for cache in caches}
    if len(holders) < len(caches) or not all(0 < number < 1 << 31 for number in holders):
        raise ValueError("two caches with one number, or a number that no cache can have")
    for run in runs:
        start = end_of.get(run.parent)
        size, rest = divmod(len(run.blocks), 8)
        if start is None or run.number in end_of or not size or rest:
            raise ValueError(f"run {run.number} has no parent before it or no whole blocks")
        end = end_of[run.number] = start + size
        rows = [(holder, start, held) for holder, held in run.ends.items()]
        rows += [(holder, *span) for holder, spans in run.detached.items() for span in spans]
        rows += [(holder, depth, depth + 1) for holder, depth, _ in run.copies]
        for holder, first, last in rows:
            if holder not in holders or not start <= first < last <= end:
                raise ValueError(f"run {run.number} is held by {holder} from {first} to {last}")
        if any(not 0 < count < 1 << 31 for _, _, count in run.copies):
            raise ValueError(f"run {run.number} has copies that are none")
    for run in runs:
        if run.tail and end_of.get(run.tail, 0) <= end_of[run.number]:
            raise ValueError(f"run {run.number} has a tail that does not follow it")
    known = np.array(sorted(end_of), dtype=np.uint64)
    for cache in caches:
        engine_hashes, locations = cache.arrays()
        if len(engine_hashes) != len(locations):
            raise ValueError(f"cache {cache.number} has blocks without a location")
        numbers = locations >> np.uint64(DEPTH_BITS)
        if not np.isin(numbers, known[1:]).all():
            raise ValueError(f"cache {cache.number} has a location in no run")
