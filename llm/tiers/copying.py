"""Copies of KV blocks between two memories of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from dynbus import ConfigError
from dynbus.transfer import KvMemory, check_convertible, plan

Bytes = NDArray[np.uint8]


class BlockCopier:
    """Copies blocks of the engine's memory to those of a store, and back.

    Args:
        engine, store: layouts that hold the same numbers, with blocks of the same size.

    Raises:
        ConfigError: one of them is not in the memory of the host.
        LayoutMismatch: they do not hold the same numbers.
    """

    def __init__(self, engine: KvMemory, store: KvMemory) -> None:
        check_convertible(engine.layout, store.layout)
        self._engine, self._store = engine, store
        self._engine_bytes = [_bytes_of(engine, at) for at in range(len(engine.regions))]
        self._store_bytes = [_bytes_of(store, at) for at in range(len(store.regions))]
        # Each block of the store lies in one piece.
        self._block_bytes = store.layout.block_bytes

    def __repr__(self) -> str:
        return f"<BlockCopier {self._engine!r}>"

    def keep(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Copy blocks of the engine to places of the store."""
        self._copy(self._engine_bytes, blocks, self._store_bytes, places, to_store=True)

    def bring(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy places of the store to blocks of the engine."""
        self._copy(self._engine_bytes, blocks, self._store_bytes, places, to_store=False)

    def checksum(self, place: int, seed: int) -> int:
        """The checksum (xxh3, 64 bits) of a place of the store, which has its block in one piece.

        Args:
            seed: with another one the same bytes have another checksum.
        """
        begin = place * self._block_bytes
        piece = self._store_bytes[0][begin : begin + self._block_bytes]
        return xxhash.xxh3_64_intdigest(piece.data, seed)

    def _copy(
        self,
        ours: list[Bytes],
        blocks: Sequence[int],
        theirs: list[Bytes],
        places: Sequence[int],
        *,
        to_store: bool,
    ) -> None:
        layout = self._engine.layout
        pieces = plan(layout, blocks, self._store.layout, places, len(blocks) * layout.block_size)
        # One call of C's memcpy for each would let other threads run in between, thousands of
        # times: slices of arrays do not.
        for region, offset, other_region, other_offset, length in zip(
            pieces.local_region.tolist(),
            pieces.local_offset.tolist(),
            pieces.remote_region.tolist(),
            pieces.remote_offset.tolist(),
            pieces.length.tolist(),
            strict=True,
        ):
            here = slice(offset, offset + length)
            there = slice(other_offset, other_offset + length)
            if to_store:
                theirs[other_region][there] = ours[region][here]
            else:
                ours[region][here] = theirs[other_region][there]


def _bytes_of(memory: KvMemory, region: int) -> Bytes:
    """A region as an array of bytes, which does not keep it alive."""
    described = memory.regions[region]
    if described.kind != "DRAM":
        raise ConfigError(
            "host_memory_mib: the blocks of an engine on a GPU are not kept in the memory of the "
            "host: leave it 0, or set device to cpu"
        )
    return np.ctypeslib.as_array((ctypes.c_uint8 * described.size).from_address(described.address))
