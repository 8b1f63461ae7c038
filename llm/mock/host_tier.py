"""A host tier of a mock engine: it knows which blocks it has, and holds nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynbus.kvrouter import KvEvent
from dynbus.llm.engine.interface import CachedBlock
from dynbus.llm.tiers.host_index import HostIndex
from dynbus.llm.tiers.sessions import SessionKey
from dynbus.spi import monotonic


class MockTier:
    """Keeps evicted blocks of a mock: a `BlockTier`. To bring them back takes no time.

    Args:
        blocks: for how many there is room.
    """

    def __init__(self, blocks: int) -> None:
        self._index = HostIndex(blocks)

    def __repr__(self) -> str:
        return f"<MockTier [{len(self._index)} of {self._index.places} blocks]>"

    def evicted(
        self, blocks: Sequence[CachedBlock], cached: Callable[[int], CachedBlock | None]
    ) -> None:
        """See `BlockTier`."""
        self._index.end_those_over(monotonic())
        self._index.take_in(blocks, cached)

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
    ) -> None:
        """See `BlockTier`."""
        self._index.keep_for(SessionKey(owner, session), sequence_hashes, monotonic(), seconds)

    def take_events(self) -> Sequence[KvEvent]:
        """See `BlockTier`."""
        return self._index.take_events()
