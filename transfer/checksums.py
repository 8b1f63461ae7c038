"""Checksums of KV blocks, which are the same wherever the layouts put the numbers.

The numbers are hashed layer by layer, keys before values, head by head, token by token. Gathering
them so costs more than hashing them: 0.2 to 0.3 s for a GB on one core, on each side.

A reader that wants to be sure sends `Wanted` along when it asks the source to settle a lease. The
source answers with `Vouched`, made while the lease still held (`vouch`), and the reader compares
before it uses a byte (`compare`). Both hash in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio.to_thread
import msgspec
import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dynbus.spi import monotonic

from .errors import BadDescription, ChecksumMismatch, InvalidTransfer
from .layout import BlockLayout, KvMemory, bytes_of
from .leases import LeaseTable

_GATHERED_BYTES = 2**20
"""Of one layer at a time: they stay in the processor's cache until they are hashed."""


class Wanted(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of what a reader wants checksums.

    Attributes:
        tokens: that it has read.
        per: tokens of a checksum.
        first_head, heads: that it has, by their numbers in the model.
        start: the place of the first token, counted from the beginning of the lease's first block.
    """

    tokens: int
    per: int
    first_head: int
    heads: int
    start: int = 0


class Vouched(msgspec.Struct, frozen=True):
    """The blocks of a source, as checksums.

    Attributes:
        first_head, heads: of the model, that both sides have; the sums are of them.
        sums: in the order of the tokens.
    """

    first_head: int
    heads: int
    sums: list[int]


def wanted(memory: KvMemory, tokens: int, start: int) -> Wanted:
    """The request for checksums of so many tokens that were read into a memory.

    Args:
        start: in the blocks of the lease.
    """
    layout = memory.layout
    return Wanted(tokens, layout.block_size, layout.first_head, layout.kv_heads, start)


async def vouch(
    memory: KvMemory, leases: LeaseTable, lease_id: int, epoch: str, asked: Wanted
) -> Vouched | None:
    """The checksums of blocks under a lease, which goes on; None where it does not hold any more.

    The lease is settled after this: only then are the checksums those of what was lent.

    Raises:
        InvalidTransfer: the lease is not of so many tokens, there are no such heads here, or the
            memory is a GPU's.
    """
    lease = leases.held(lease_id, epoch, monotonic())
    if lease is None:
        return None
    layout = memory.layout
    first = max(asked.first_head, layout.first_head)
    last = min(asked.first_head + asked.heads, layout.first_head + layout.kv_heads)

    def make() -> list[int]:
        return checksums(
            memory,
            lease.blocks,
            asked.tokens,
            start=asked.start,
            per=asked.per,
            heads=range(first, last),
        )

    return Vouched(first, last - first, await anyio.to_thread.run_sync(make))


async def compare(
    memory: KvMemory,
    blocks: Sequence[int],
    tokens: int,
    vouched: Vouched | None,
    *,
    start: int = 0,
    source: str = "the source",
) -> None:
    """Compare what was read with what its source has.

    Args:
        blocks, start: where it is here, as for `checksums`.
        vouched: the answer of the source.
        source: its name, for the error.

    Raises:
        ChecksumMismatch: the bytes are others.
        BadDescription: the answer is none to what was asked.
    """
    if vouched is None:
        raise BadDescription(f"{source} was asked for checksums, and gave none")
    heads = range(vouched.first_head, vouched.first_head + vouched.heads)
    try:
        ours = await anyio.to_thread.run_sync(
            lambda: checksums(memory, blocks, tokens, start=start, heads=heads)
        )
    except InvalidTransfer as error:
        raise BadDescription(f"{source} gave checksums of other heads: {error}") from error
    theirs = vouched.sums
    if len(ours) != len(theirs):
        raise BadDescription(f"{source} gave {len(theirs)} checksums for {len(ours)} blocks")
    if others := [at for at, pair in enumerate(zip(ours, theirs, strict=True)) if len({*pair}) > 1]:
        raise ChecksumMismatch(
            f"{len(others)} of {len(ours)} blocks that were read are not those of {source}; the "
            f"first is number {others[0]}"
        )


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
    sums: list[int] = []
    for begin in range(0, tokens, at_once):
        sums += _sums(views, ids, range(start + begin, start + min(tokens, begin + at_once)), per)
    return sums


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
    flat = bytes_of(memory.regions[index])[offset:]
    return as_strided(flat, _shape(layout), (*layout.strides, 1), writeable=False)


def _shape(layout: BlockLayout) -> tuple[int, int, int, int, int]:
    return (layout.blocks, 2, layout.kv_heads, layout.block_size, layout.token_bytes)
