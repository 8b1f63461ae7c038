"""A store in the memory of the host for the blocks that an engine's cache has no room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from dynbus import ConfigError
from dynbus.kvrouter import KvEvent
from dynbus.llm.engine.interface import CachedBlock
from dynbus.transfer import Axis, BlockLayout, KvMemory

from .copying import BlockCopier
from .cost import Rates
from .host_index import HostIndex


@dataclass(frozen=True, slots=True)
class HostStatistics:
    """Figures of a host store.

    Attributes:
        blocks, places: how many it has, and has room for.
        kept, brought: blocks that were copied into it and back, so far.
        computed: blocks that it had and that were computed, as that was faster.
    """

    blocks: int
    places: int
    kept: int
    brought: int
    computed: int


class HostStore:
    """Keeps evicted blocks of an engine, and writes them back: a `BlockTier`.

    Its memory is one stretch, in which each block lies in one piece.

    Args:
        engine: where the engine's blocks lie.
        size: bytes that the store may have.
        rates: of the engine: how fast it computes and copies.

    Attributes:
        memory: where its blocks lie, by their places.

    Raises:
        ConfigError: not one block fits; or the engine's blocks are on a GPU.
    """

    def __init__(self, engine: KvMemory, size: int, rates: Rates) -> None:
        layout = engine.layout
        places = size // layout.block_bytes
        if places < 1:
            raise ConfigError(
                f"host_memory_mib: {size} bytes hold no block, which takes {layout.block_bytes}: "
                "set more, or 0 for no store"
            )
        self.memory = KvMemory.allocate(
            BlockLayout.packed(
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
        )
        self._copier = BlockCopier(engine, self.memory)
        self._index = HostIndex(places)
        self._rates = rates
        self._pinned: list[int] = []
        self._kept = self._brought = self._computed = 0

    def __repr__(self) -> str:
        return f"<HostStore [{len(self._index)} of {self._index.places} blocks]>"

    @property
    def statistics(self) -> HostStatistics:
        """Figures of the store; to be read in any thread."""
        return HostStatistics(
            len(self._index), self._index.places, self._kept, self._brought, self._computed
        )

    def evicted(
        self, blocks: Sequence[CachedBlock], cached: Callable[[int], CachedBlock | None]
    ) -> None:
        """Copy what the cache gives up, and what of its prefixes is not here yet.

        A block without those before it would be of no use when they are given up later and there
        is no room, and routers know no such blocks.
        """
        sources: dict[int, int] = {}
        gone = {block.sequence_hash: block for block in blocks}
        for block in blocks:
            chain = self._lacking(block, gone, cached)
            if not chain:
                continue
            places = self._index.add(
                chain[0].parent_hash,
                [each.sequence_hash for each in chain],
                [each.block_hash for each in chain],
            )
            # A place may be given to another block before anything was copied there.
            sources.update(zip(places, (each.block for each in chain), strict=False))
        if not sources:
            return
        began = perf_counter()
        self._copier.keep(list(sources.values()), list(sources))
        self._rates.note_copy(len(sources), perf_counter() - began)
        self._kept += len(sources)

    def _lacking(
        self,
        block: CachedBlock,
        gone: dict[int, CachedBlock],
        cached: Callable[[int], CachedBlock | None],
    ) -> list[CachedBlock]:
        """The blocks of the prefix that ends with a block that are to be taken in, in their
        order.
        """
        chain: list[CachedBlock] = []
        at: CachedBlock | None = block
        while at is not None and at.sequence_hash not in self._index:
            chain.append(at)
            before = at.parent_hash
            if before is None or before in self._index:
                chain.reverse()
                return chain
            at = gone.get(before) or cached(before)
        # It is here already, or a block before it is nowhere.
        return []

    def find(self, sequence_hashes: Sequence[int]) -> int:
        """The number of these blocks that are here, from the first on; 0 where computing is faster.

        They stay until they are filled in.
        """
        places = self._index.find(sequence_hashes, 0, len(sequence_hashes))
        if places and not self._rates.copies(len(places)):
            self._computed += len(places)
            return 0
        self._index.pin(places)
        self._pinned += places
        return len(places)

    def fill(self, blocks: Sequence[int], sequence_hashes: Sequence[int]) -> int:
        """Copy the blocks that were found since the last call into these blocks of the engine."""
        pinned, self._pinned = self._pinned, []
        places = pinned[: len(blocks)]
        if places:
            began = perf_counter()
            self._copier.bring(places, list(blocks[: len(places)]))
            self._rates.note_copy(len(places), perf_counter() - began)
            self._brought += len(places)
        self._index.unpin(pinned)
        return len(places)

    def take_events(self) -> Sequence[KvEvent]:
        """The events of stored and removed blocks since the last call, in their order."""
        return self._index.take_events()


def _order(layout: BlockLayout) -> list[Axis]:
    """The axes within a block in the order of the engine's, so that few pieces are copied."""
    _, kv, head, token = layout.strides
    strides: dict[Axis, int] = {"kv": kv, "head": head, "token": token}
    return sorted(strides, key=strides.__getitem__, reverse=True)
