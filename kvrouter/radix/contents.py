"""The blocks of one holder, as columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .runs import NAME_BYTES, Holder, NamedBlocks, Run

Words = NDArray[np.uint64]


class HeldColumns(NamedTuple):
    """Blocks of a holder, column by column.

    Attributes:
        names: the engine's hash of each.
        depths: how many blocks are before each on its path.
        runs: where neighbours were stored, see `NamedBlocks.run`.
        counts: of each run, how many blocks of it follow each other here.
    """

    names: Words
    depths: Words
    runs: list[Run]
    counts: NDArray[np.int64]


def held_names(holder: Holder) -> Words:
    """The engine's hash of each held block."""
    return np.fromiter(holder.held, dtype=np.uint64, count=len(holder.held))


def held_columns(holder: Holder, limit: int) -> Iterator[HeldColumns]:
    """The blocks of a holder, some `limit` at a time. It must not change meanwhile."""
    values = iter(holder.held.values())
    seen: set[NamedBlocks] = set()
    while some := dict.fromkeys(islice(values, limit)):
        new = [named for named in some if named not in seen]
        seen.update(new)
        yield _columns(new)


def _columns(several: list[NamedBlocks]) -> HeldColumns:
    names = np.frombuffer(b"".join([named.names for named in several]), dtype=np.uint64)
    counts = np.array([len(named.names) // NAME_BYTES for named in several], dtype=np.int64)
    firsts = np.array([named.start for named in several], dtype=np.int64)
    before = np.cumsum(counts) - counts
    depths = np.repeat(firsts - before, counts) + np.arange(len(names))
    return HeldColumns(names, depths.astype(np.uint64), [one.run for one in several], counts)


def held_blocks(holder: Holder) -> tuple[Words, Words]:
    """The engine's hash and the block hash of each held block."""
    if not holder.held:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint64)
    names, depths, runs, counts = next(held_columns(holder, holder.blocks))
    rows = _RunRows()
    places = np.repeat(np.array([rows.place(run) for run in runs]), counts)
    depths = depths.astype(np.int64)
    ends, tails = np.array(rows.ends), np.array(rows.tails)
    while (moved := np.flatnonzero(depths >= ends[places])).size:
        places[moved] = tails[places[moved]]
    blocks = np.frombuffer(b"".join(rows.blocks), dtype="<u8")
    return names, blocks[np.array(rows.shifts)[places] + depths].astype(np.uint64)


class _RunRows:
    """Runs and their tails, a row each.

    Attributes:
        ends: the depth behind the last block of each.
        tails: the row of the run that goes on behind that.
        shifts: what to add to a depth to find its block in `blocks`, joined.
    """

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.tails: list[int] = []
        self.shifts: list[int] = []
        self.blocks: list[bytearray] = []
        self._rows: dict[int, int] = {}
        self._joined = 0

    def place(self, run: Run) -> int:
        """The row of a run."""
        known = self._rows.get(run.id)
        if known is not None:
            return known
        row = self._rows[run.id] = len(self.ends)
        following: Run | None = run
        while following is not None:
            self.ends.append(following.end)
            self.shifts.append(self._joined - following.start)
            self.blocks.append(following.blocks)
            self._joined += following.end - following.start
            following = following.tail
            self.tails.append(len(self.ends))
        return row
