"""A stretch of blocks without a branch, and the caches that hold blocks of it."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from .intervals import Intervals

BLOCK_BYTES: Final = 8
NAME_BYTES: Final = 8
pack_name: Final = struct.Struct("=Q").pack

MOST_NAMED: Final = 64
"""Blocks in one `NamedBlocks`: a name is searched among so many."""


class Run:
    """Blocks `[start, end)` below `parent`, which branch nowhere.

    Attributes:
        blocks: their hashes, little-endian, 8 bytes each.
        children: by the bytes of their first block; None for none.
        tail: the child that was split off this run and that its old locations lead to.
        ends: by holder, the end of what it holds without a gap.
        detached: by holder, what it holds behind a hole; None for nothing.
        copies: by (holder, depth), how many more engine hashes name this one block.
        stamp: grows whenever `ends` changes.
    """

    __slots__ = (
        "blocks",
        "children",
        "copies",
        "detached",
        "end",
        "ends",
        "id",
        "parent",
        "stamp",
        "start",
        "tail",
        "touched",
    )

    def __init__(self, number: int, start: int, blocks: bytearray, parent: Run | None) -> None:
        self.id = number
        self.start = start
        self.end = start + len(blocks) // BLOCK_BYTES
        self.blocks = blocks
        self.parent = parent
        self.children: dict[bytes, Run] | None = None
        self.tail: Run | None = None
        self.ends: dict[int, int] = {}
        self.detached: dict[int, Intervals] | None = None
        self.copies: dict[tuple[int, int], int] | None = None
        self.touched = 0
        self.stamp = 0

    def __repr__(self) -> str:
        return f"<Run {self.id} [{self.start}:{self.end} | holders: {len(self.ends)}]>"


def find_name(names: bytearray, packed: bytes) -> int:
    """The place of a name among names that have it."""
    at = names.find(packed)
    while at % NAME_BYTES:
        # It is the end of one name and the beginning of the next.
        at = names.find(packed, at + 1)
    return at // NAME_BYTES


class NamedBlocks(msgspec.Struct, eq=False, gc=False):
    """Neighbouring blocks of a holder and the engine's hashes that name them.

    One object for up to `MOST_NAMED` blocks, in place of a location for each: what a block costs
    is its name, its entry in `Holder.held` and its place here. The garbage collector looks at none
    of it: it would look at every block.

    Attributes:
        run: where the first one was stored. Those beyond its end are in its tail.
        start: the depth of the first one.
        names: the engine's hash of each, 8 bytes in the machine's order.
    """

    run: Run
    start: int
    names: bytearray

    @property
    def end(self) -> int:
        """The depth behind the last one."""
        return self.start + len(self.names) // NAME_BYTES

    def depth_of(self, name: int) -> int:
        """The depth of the block that has a name."""
        return self.start + find_name(self.names, pack_name(name))

    def list_names(self) -> list[int]:
        """The names, in the order of the blocks."""
        return memoryview(self.names).cast("Q").tolist()


class Holder:
    """One cache: what it holds, by the hashes of its engine.

    Attributes:
        number: never used again, also when the holder is gone.
        detached: how many blocks of it lie behind a hole.
        looked_at: runs below a hole that was made or filled, since this was set to 0.
    """

    __slots__ = ("detached", "held", "looked_at", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: dict[int, NamedBlocks] = {}
        self.detached = 0
        self.looked_at = 0

    @property
    def blocks(self) -> int:
        """The number of blocks that it holds."""
        return len(self.held)


def common_bytes(first: bytes | bytearray, second: bytes | bytearray) -> int:
    """Bytes of the blocks that two equally long stretches begin with alike.

    Halving over comparisons of memory: the cost grows with the logarithm of their number.
    """
    low, high = 0, len(first) // BLOCK_BYTES
    if second.startswith(first):
        return len(first)
    while high - low > 1:
        middle = (low + high) // 2
        if second.startswith(first[low * 8 : middle * 8], low * 8):
            low = middle
        else:
            high = middle
    return low * 8
