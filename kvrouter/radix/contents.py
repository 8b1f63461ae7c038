"""Which blocks a holder has, as columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .prefix_tree import PrefixTree
from .records import DEPTH_BITS, MAX_DEPTH
from .runs import Holder, Run

Words = NDArray[np.uint64]


def held_names(holder: Holder) -> Words:
    """The engine's hash of each held block."""
    return np.fromiter(holder.held, dtype=np.uint64, count=len(holder.held))


def held_blocks(tree: PrefixTree, holder: Holder) -> tuple[Words, Words]:
    """The engine's hash and the block hash of each held block."""
    held = holder.held
    count = len(held)
    if not count:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint64)
    locations = np.fromiter(held.values(), dtype=np.int64, count=count)
    depths = locations & MAX_DEPTH
    numbers = locations >> DEPTH_BITS
    # Blocks that were stored together are neighbours in `held`, and in one run.
    firsts = np.concatenate(([0], np.flatnonzero(np.diff(numbers)) + 1))
    columns = _Columns()
    which = [columns.place(tree.runs[number]) for number in numbers[firsts].tolist()]
    places = np.repeat(np.array(which), np.diff(np.append(firsts, count)))
    ends, tails = np.array(columns.ends), np.array(columns.tails)
    while (moved := np.flatnonzero(depths >= ends[places])).size:
        places[moved] = tails[places[moved]]
    blocks = np.frombuffer(b"".join(columns.blocks), dtype="<u8")
    return held_names(holder), blocks[np.array(columns.shifts)[places] + depths].astype(np.uint64)


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
