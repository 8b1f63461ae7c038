"""A host tier of a mock engine: it knows which blocks it has, and holds nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dynbus.llm.engine.interface import CachedBlock
from dynbus.llm.tiers.indexed_tier import IndexedTier
from dynbus.llm.tiers.lasting import LastingBlock, LastingMemory


class MockTier(IndexedTier):
    """Keeps evicted blocks of a mock: a `BlockTier`. To bring them back takes no time.

    Args:
        blocks: for how many there is room.
        folder: where its list of blocks is a file, which the next process goes on with; None for
            one that ends with this process.
        block_size: tokens of a block, which blocks in such a file have to be of.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, blocks: int, *, folder: Path | None = None, block_size: int = 0) -> None:
        super().__init__(blocks)
        if folder is not None:
            # Blocks of no bytes.
            self._lasting = LastingMemory(folder, f"mock {block_size}", blocks, 0)
            self._restore(self._lasting)

    def _take_in(
        self, blocks: Sequence[CachedBlock], cached: Callable[[int], CachedBlock | None]
    ) -> None:
        taken = self._index.take_in(blocks, cached)
        if self._lasting is not None:
            self._lasting.drop(taken)
            for place, (_, sequence_hash, parent_hash, block_hash) in taken.items():
                self._lasting.note(LastingBlock(place, sequence_hash, parent_hash, block_hash, 0))

    def find(self, sequence_hashes: Sequence[int]) -> int:
        """See `BlockTier`."""
        return len(self._index.find(sequence_hashes, 0, len(sequence_hashes)))

    def fill(self, blocks: Sequence[int], sequence_hashes: Sequence[int]) -> int:
        """See `BlockTier`."""
        return len(self._index.find(sequence_hashes, 0, len(blocks)))

    def leave(self) -> None:
        """Leave a file to the next process, and write there no more."""
        if self._lasting is not None:
            self._lasting.close()
            self._lasting = None
