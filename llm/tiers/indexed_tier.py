"""A tier below an engine's cache whose blocks an index knows, whatever is kept of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from dynbus.kvrouter import KvEvent
from dynbus.llm.engine.interface import CachedBlock, KeptBlocks
from dynbus.spi import monotonic

from .host_index import HostIndex
from .lasting import LastingBlock, LastingMemory
from .sessions import SessionKey


class IndexedTier(ABC):
    """A `RememberingTier`: the part of one that is the same for blocks of bytes and of none.

    Args:
        places: for how many blocks there is room.
    """

    def __init__(self, places: int) -> None:
        self._index = HostIndex(places)
        # A file of blocks that the next process goes on with; None for none.
        self._lasting: LastingMemory | None = None
        # Whether it takes nothing in any more.
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} [{len(self._index)} of {self._index.places} blocks]>"

    def _restore(self, lasting: LastingMemory) -> list[LastingBlock]:
        """Go on with what an earlier process has left; the blocks that are of use."""
        blocks = [*lasting.blocks()]
        here = self._index.restore(blocks)
        lasting.drop({block.place for block in blocks} - {block.place for block in here})
        return here

    @abstractmethod
    def _take_in(
        self, blocks: Sequence[CachedBlock], cached: Callable[[int], CachedBlock | None]
    ) -> None:
        """Keep blocks of the cache, and what of their prefixes is not here yet."""

    def evicted(
        self, blocks: Sequence[CachedBlock], cached: Callable[[int], CachedBlock | None]
    ) -> None:
        """See `BlockTier`."""
        if self._is_closed:
            return
        self._index.end_those_over(monotonic())
        self._take_in(blocks, cached)

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
        if self._is_closed:
            return
        key = SessionKey(owner, session)
        self._index.keep_for(key, sequence_hashes, monotonic(), seconds, replaced)
        if self._lasting is not None:
            # What is in the cache alone ends with the process.
            self._take_in(self._index.lacking(sequence_hashes, cached), cached)

    def blocks_of(self, owner: str, session: str) -> KeptBlocks:
        """See `RememberingTier`."""
        return self._index.blocks_of(SessionKey(owner, session), monotonic())

    def take_events(self) -> Sequence[KvEvent]:
        """The events of stored and removed blocks since the last call, in their order."""
        return self._index.take_events()
