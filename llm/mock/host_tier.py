"""A host tier of a mock engine: it knows which blocks it has, and holds nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dynbus.kvrouter import KvEvent
from dynbus.llm.engine.interface import CachedBlock, KeptBlocks
from dynbus.llm.tiers.host_index import HostIndex
from dynbus.llm.tiers.lasting import LastingBlock, LastingMemory
from dynbus.llm.tiers.sessions import SessionKey
from dynbus.spi import monotonic


class MockTier:
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
        self._index = HostIndex(blocks)
        self._lasting: LastingMemory | None = None
        if folder is not None:
            # Blocks of no bytes.
            lasting = self._lasting = LastingMemory(folder, f"mock {block_size}", blocks, 0)
            left = [*lasting.blocks()]
            here = {block.place for block in self._index.restore(left)}
            lasting.drop({block.place for block in left} - here)

    def __repr__(self) -> str:
        return f"<MockTier [{len(self._index)} of {self._index.places} blocks]>"

    def evicted(
        self, blocks: Sequence[CachedBlock], cached: Callable[[int], CachedBlock | None]
    ) -> None:
        """See `BlockTier`."""
        self._index.end_those_over(monotonic())
        self._take_in(blocks, cached)

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

    def keep_for(
        self,
        owner: str,
        session: str,
        sequence_hashes: Sequence[int],
        seconds: float,
        cached: Callable[[int], CachedBlock | None],
        replaced: str = "",
    ) -> None:
        """See `BlockTier`."""
        key = SessionKey(owner, session)
        self._index.keep_for(key, sequence_hashes, monotonic(), seconds, replaced)
        if self._lasting is not None:
            # What is in the cache alone ends with the process.
            self._take_in(self._index.lacking(sequence_hashes, cached), cached)

    def blocks_of(self, owner: str, session: str) -> KeptBlocks:
        """See `RememberingTier`."""
        return self._index.blocks_of(SessionKey(owner, session), monotonic())

    def leave(self) -> None:
        """Leave a file to the next process, and write there no more."""
        if self._lasting is not None:
            self._lasting.close()
            self._lasting = None

    def take_events(self) -> Sequence[KvEvent]:
        """See `BlockTier`."""
        return self._index.take_events()
