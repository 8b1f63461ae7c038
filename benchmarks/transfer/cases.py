"""Which transfers are measured, and which of the pool's blocks each of them moves."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

POOL_BYTES = 256 << 20
"""Of each side's memory."""

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
COUNTS = {4 * KIB: 4000, 16 * KIB: 4000, 64 * KIB: 1000}
"""Of blocks in a transfer; of larger ones as many as have 64 MiB."""


class Case(NamedTuple):
    layout: Literal["scattered", "contiguous"]
    block_bytes: int
    blocks: int

    @property
    def bytes(self) -> int:
        return self.block_bytes * self.blocks

    @property
    def name(self) -> str:
        size = self.block_bytes
        text = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
        return f"{text} x {self.blocks}" + (f" {self.layout}" if self.blocks > 1 else "")

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The blocks' numbers in the reader's pool, and in the holder's: no two are the same."""
        if self.layout == "contiguous":
            return np.arange(self.blocks), np.arange(self.blocks)
        random = np.random.default_rng(self.block_bytes)
        count = POOL_BYTES // self.block_bytes
        return random.permutation(count)[: self.blocks], random.permutation(count)[: self.blocks]


def cases() -> list[Case]:
    """One block, many scattered and many contiguous, of each size."""
    found: list[Case] = []
    for size in SIZES:
        count = COUNTS.get(size, 64 * MIB // size)
        found += [
            Case("contiguous", size, 1),
            Case("scattered", size, count),
            Case("contiguous", size, count),
        ]
    return found
