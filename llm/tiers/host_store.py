"""A store in the memory of the host for the blocks that an engine's cache has no room for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from dynbus import ConfigError
from dynbus.llm.engine.interface import CachedBlock
from dynbus.transfer import Axis, BlockLayout, KvMemory

from .copying import BlockCopier
from .cost import Rates
from .indexed_tier import IndexedTier
from .lasting import LastingBlock, LastingMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostStatistics:
    """Figures of a host store.

    Attributes:
        blocks, places: how many it has, and has room for.
        kept, brought: blocks that were copied into it and back, so far.
        computed: blocks that it had and that were computed, as that was faster.
        damaged: blocks that were not what was kept when they were to be brought back, so far.
        is_closed: whether it keeps and gives nothing any more.
        sessions, session_blocks: conversations that go on later, and their blocks.
    """

    blocks: int
    places: int
    kept: int
    brought: int
    computed: int
    damaged: int = 0
    is_closed: bool = False
    sessions: int = 0
    session_blocks: int = 0


class HostStore(IndexedTier):
    """Keeps evicted blocks of an engine, and writes them back: a `BlockTier`.

    Its memory is one stretch, in which each block lies in one piece.

    Args:
        engine: where the engine's blocks lie.
        size: bytes that the store may have.
        rates: of the engine: how fast it computes and copies.
        checksums: whether a block is brought back only where its bytes are those that were kept
            under its hash.
        folder: where its memory is a file, which the next process goes on with; None for memory
            that ends with this one. It needs checksums.
        kind: what blocks in such a file have to be of, such as the model.

    Attributes:
        memory: where its blocks lie, by their places.
        damaged: called with the sequence hashes of blocks that are not what was kept; by the
            engine's thread, when they are forgotten already. None for nobody.

    Raises:
        ConfigError: not one block fits; or the engine's blocks are on a GPU.
    """

    def __init__(
        self,
        engine: KvMemory,
        size: int,
        rates: Rates,
        *,
        checksums: bool = True,
        folder: Path | None = None,
        kind: str = "",
    ) -> None:
        layout = engine.layout
        places = size // layout.block_bytes
        if places < 1:
            raise ConfigError(
                f"host_memory_mib: {size} bytes hold no block, which takes {layout.block_bytes}: "
                "set more, or 0 for no store"
            )
        own = BlockLayout.packed(
            ("block", "layer", *_order(layout)),
            dtype=layout.dtype,
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            blocks=places,
            first_head=layout.first_head,
            total_heads=layout.total_heads,
        )
        super().__init__(places)
        if folder is None:
            self.memory = KvMemory.allocate(own)
        else:
            self._lasting = LastingMemory(folder, f"{kind} {own}", places, own.block_bytes)
            self.memory = KvMemory.of_arrays(own, [self._lasting.data])
        self._copier = BlockCopier(engine, self.memory)
        self._rates = rates
        self.damaged: Callable[[Sequence[int]], object] | None = None
        self._pinned: list[int] = []
        self._kept = self._brought = self._computed = self._damaged = 0
        self._has_left = False
        # Held while a file is written or read: it is left in between.
        self._using = threading.RLock()
        # By place: of the bytes there, with the hash of the block as the seed, so that a block that
        # is whole and another one's differs as well.
        self._sums: dict[int, int] | None = {} if checksums or folder is not None else None
        if self._lasting is not None:
            self._go_on(self._lasting)

    @property
    def key(self) -> bytes | None:
        """The key that sequence hashes have to be made with, so that blocks of earlier processes
        are of use; None where there are none."""
        return None if self._lasting is None else self._lasting.key

    @property
    def statistics(self) -> HostStatistics:
        """Figures of the store; to be read in any thread."""
        return HostStatistics(
            len(self._index),
            self._index.places,
            self._kept,
            self._brought,
            self._computed,
            self._damaged,
            self._is_closed,
            len(self._index.sessions),
            self._index.sessions.blocks,
        )

    def _go_on(self, lasting: LastingMemory) -> None:
        """Go on with what an earlier process has left."""
        here = self._restore(lasting)
        self._sums = {block.place: block.checksum for block in here}
        if here:
            logger.info("%d blocks are on the host from before, in %s", len(here), lasting.path)

    def _take_in(
        self, blocks: Sequence[CachedBlock], cached: Callable[[int], CachedBlock | None]
    ) -> None:
        with self._using:
            if not self._is_closed:
                self._copy_in(self._index.take_in(blocks, cached))

    def _copy_in(self, taken: Mapping[int, CachedBlock]) -> None:
        """Copy blocks to these places."""
        if not taken:
            return
        began = perf_counter()
        lasting = self._lasting
        if lasting is not None:
            lasting.drop(taken)
        self._copier.keep([one.block for one in taken.values()], list(taken))
        if self._sums is not None:
            for place, one in taken.items():
                self._sums[place] = self._copier.checksum(place, one.sequence_hash)
        if lasting is not None and self._sums is not None:
            for place, (_, sequence_hash, parent_hash, block_hash) in taken.items():
                lasting.note(
                    LastingBlock(place, sequence_hash, parent_hash, block_hash, self._sums[place])
                )
        self._rates.note_copy(len(taken), perf_counter() - began)
        self._kept += len(taken)

    def find(self, sequence_hashes: Sequence[int]) -> int:
        """The number of these blocks that are here, from the first on; 0 where computing is faster.

        They stay until they are filled in.
        """
        if self._is_closed:
            return 0
        places = self._index.find(sequence_hashes, 0, len(sequence_hashes))
        if places and not self._rates.copies(len(places)):
            self._computed += len(places)
            return 0
        self._index.pin(places)
        self._pinned += places
        return len(places)

    def fill(self, blocks: Sequence[int], sequence_hashes: Sequence[int]) -> int:
        """Copy the blocks that were found since the last call into these blocks of the engine.

        What is not what was kept is lost, and what follows it.
        """
        with self._using:
            return self._fill(blocks, sequence_hashes)

    def _fill(self, blocks: Sequence[int], sequence_hashes: Sequence[int]) -> int:
        pinned, self._pinned = self._pinned, []
        if self._has_left:
            # The bytes are those of another process.
            self._index.unpin(pinned)
            return 0
        places = self._intact(pinned[: len(blocks)], sequence_hashes)
        if places:
            began = perf_counter()
            self._copier.bring(places, list(blocks[: len(places)]))
            self._rates.note_copy(len(places), perf_counter() - began)
            self._brought += len(places)
        self._index.unpin(pinned)
        if len(places) < min(len(pinned), len(blocks)):
            self._lose(sequence_hashes[len(places)])
        return len(places)

    def _intact(self, places: list[int], sequence_hashes: Sequence[int]) -> list[int]:
        """These places up to the first one whose bytes are not those that were kept."""
        sums = self._sums
        if sums is not None:
            for at, (place, sequence_hash) in enumerate(zip(places, sequence_hashes, strict=False)):
                if self._copier.checksum(place, sequence_hash) != sums[place]:
                    return places[:at]
        return places

    def _lose(self, sequence_hash: int) -> None:
        """Forget a block that is not what was kept, and what follows it."""
        self._damaged += 1
        gone = self.forget([sequence_hash])
        logger.error(
            "a block that was kept on the host is not what was kept: it is computed again, and %d "
            "blocks are forgotten",
            len(gone),
        )
        if self.damaged is not None:
            self.damaged(gone)

    def __contains__(self, sequence_hash: object) -> bool:
        return sequence_hash in self._index

    def forget(self, sequence_hashes: Iterable[int]) -> list[int]:
        """See `ForgettingTier`."""
        with self._using:
            gone = self._index.remove(sequence_hashes)
            if self._lasting is not None and not self._has_left:
                self._lasting.forget(gone)
        return gone

    def leave(self) -> None:
        """Leave a file to the next process; in any thread. What the engine still computes is kept
        no more, and it is brought nothing."""
        self._is_closed = True
        with self._using:
            if self._lasting is not None:
                self._has_left = True
                self._lasting.close()

    def close(self) -> None:
        """See `ForgettingTier`."""
        self._is_closed = True
        self.forget(self._index.hashes)


def _order(layout: BlockLayout) -> list[Axis]:
    """The axes within a block in the order of the engine's, so that few pieces are copied."""
    _, kv, head, token = layout.strides
    strides: dict[Axis, int] = {"kv": kv, "head": head, "token": token}
    return sorted(strides, key=strides.__getitem__, reverse=True)
