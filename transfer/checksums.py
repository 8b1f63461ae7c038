"""Checksums of KV blocks, which are the same wherever the layouts put the numbers.

The numbers are hashed layer by layer, keys before values, head by head, token by token. Gathering
them so costs more than hashing them: about 0.3 s for a GB on one core, on each side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from .errors import InvalidTransfer
from .layout import BlockLayout, KvMemory, Region

_GATHERED_BYTES = 2**20
"""Of one layer at a time: they stay in the processor's cache until they are hashed."""


def checksums(
    memory: KvMemory,
    blocks: Sequence[int],
    tokens: int,
    *,
    start: int = 0,
    per: int | None = None,
    heads: range | None = None,
) -> list[int]:
    """A checksum (xxh3, 64 bits) for each `per` tokens: all layers, their keys and values.

    Two sides agree when they give the same tokens, `per` and heads, whatever their layouts are.

    Args:
        blocks: in the order of their tokens.
        start: the place of the first token, counted from the beginning of the first block.
        per: tokens of a checksum; the last may have fewer. By default those of a block.
        heads: by their numbers in the model; those of the layout by default.

    Raises:
        InvalidTransfer: the blocks, tokens or heads are not in this memory, or it is a GPU's.
    """
    layout = memory.layout
    per = layout.block_size if per is None else per
    heads = (
        range(layout.first_head, layout.first_head + layout.kv_heads) if heads is None else heads
    )
    ids = np.asarray(blocks, np.int64)
    first = heads.start - layout.first_head
    if (
        tokens < 1
        or start < 0
        or per < 1
        or not heads
        or heads.step != 1
        or first < 0
        or first + len(heads) > layout.kv_heads
        or ids.size < layout.blocks_of(start + tokens)
        or ids.min() < 0
        or ids.max() >= layout.blocks
    ):
        raise InvalidTransfer(
            f"there are no checksums of {tokens} tokens from {start} on and of {heads} in"
            f" {ids.size} blocks of {layout}"
        )
    views = [
        _layer_view(memory, layer)[:, :, first : first + len(heads)]
        for layer in range(layout.layers)
    ]
    token_bytes = 2 * len(heads) * layout.token_bytes
    at_once = max(1, _GATHERED_BYTES // (per * token_bytes)) * per
    found: list[int] = []
    for begin in range(0, tokens, at_once):
        found += _sums(views, ids, range(start + begin, start + min(tokens, begin + at_once)), per)
    return found


def _sums(
    views: Sequence[NDArray[np.uint8]], ids: NDArray[np.int64], tokens: range, per: int
) -> list[int]:
    """The checksums of a few tokens, which are given by their places in the list of blocks."""
    sums = [xxhash.xxh3_64() for _ in range(0, len(tokens), per)]
    block_size = views[0].shape[3]
    number, token = np.divmod(np.arange(tokens.start, tokens.stop), block_size)
    for view in views:
        if per == block_size and not tokens.start % per:
            parts = list(view[ids[number[::per]]])
            parts[-1] = parts[-1][:, :, : (len(tokens) - 1) % per + 1]
        else:
            each = view[ids[number], :, :, token]
            parts = [each[at : at + per].transpose(1, 2, 0, 3) for at in range(0, len(tokens), per)]
        for part, one in zip(parts, sums, strict=True):
            one.update(np.ascontiguousarray(part).data)
    return [one.intdigest() for one in sums]


def _layer_view(memory: KvMemory, layer: int) -> NDArray[np.uint8]:
    """A layer's bytes: blocks, keys and values, heads, tokens, bytes of a head and token."""
    layout = memory.layout
    index, offset = layout.offsets[layer]
    flat = _bytes_of(memory.regions[index])[offset:]
    return as_strided(flat, _shape(layout), (*layout.strides, 1), writeable=False)


def _shape(layout: BlockLayout) -> tuple[int, int, int, int, int]:
    return (layout.blocks, 2, layout.kv_heads, layout.block_size, layout.token_bytes)


def _bytes_of(region: Region) -> NDArray[np.uint8]:
    if region.kind != "DRAM":
        raise InvalidTransfer("checksums of blocks on a GPU are not possible: copy them first")
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.size).from_address(region.address))
