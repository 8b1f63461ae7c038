"""KV blocks in memory as a layout defines them, and layouts of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynbus.transfer.layout import Axis, BlockLayout, KvMemory, Pieces

Bytes: TypeAlias = NDArray[np.uint8]
AXES: tuple[Axis, ...] = ("kv", "head", "block", "token")


def small_layout(order: Sequence[Axis] = AXES, **changed: Any) -> BlockLayout:
    """A layout of 2 layers, 2 heads, 8 blocks of 4 tokens, where nothing else is given."""
    given: dict[str, Any] = {
        "dtype": "float32",
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 4,
        "block_size": 4,
        "blocks": 8,
    }
    return BlockLayout.packed(order, **{**given, **changed})


@st.composite
def layouts(draw: st.DrawFn, *, like: BlockLayout | None = None) -> BlockLayout:
    """Any layout; one that blocks of `like` can become."""
    total = like.total_heads if like else draw(st.integers(1, 6))
    if like:
        # At least one head is on both sides.
        common = draw(st.integers(like.first_head, like.first_head + like.kv_heads - 1))
        first = draw(st.integers(0, common))
        last = draw(st.integers(common, total - 1))
    else:
        first = draw(st.integers(0, total - 1))
        last = draw(st.integers(first, total - 1))
    axes: list[Axis] = draw(st.permutations(AXES))
    if draw(st.booleans()):
        axes.insert(draw(st.integers(0, 4)), "layer")
    return BlockLayout.packed(
        axes,
        dtype=like.dtype if like else draw(st.sampled_from(["float32", "bfloat16", "int8"])),
        layers=like.layers if like else draw(st.integers(1, 3)),
        kv_heads=last - first + 1,
        first_head=first,
        total_heads=total,
        head_dim=like.head_dim if like else draw(st.integers(1, 3)),
        block_size=draw(st.integers(1, 6)),
        blocks=draw(st.integers(1, 12)),
    )


def filled(layout: BlockLayout, seed: int = 0) -> KvMemory:
    """Memory of random bytes, none of which is 0."""
    memory = KvMemory.allocate(layout)
    rng = np.random.default_rng(seed)
    for array in arrays_of(memory):
        array[:] = rng.integers(1, 256, array.size, np.uint8)
    return memory


def arrays_of(memory: KvMemory) -> list[Bytes]:
    """The regions of memory that was allocated for a layout."""
    return list(cast("tuple[Bytes, ...]", memory.owner))


def numbers(column: NDArray[Any]) -> list[int]:
    """A column of numbers as integers of Python."""
    return [int(each) for each in column]


def read(pieces: Pieces, local: KvMemory, remote: KvMemory) -> None:
    """Copy pieces as a READ does."""
    for ours, at, theirs, begin, length in zip(
        numbers(pieces.local_region),
        numbers(pieces.local_offset),
        numbers(pieces.remote_region),
        numbers(pieces.remote_offset),
        numbers(pieces.length),
        strict=True,
    ):
        target, source = arrays_of(local)[ours], arrays_of(remote)[theirs]
        assert 0 <= at <= at + length <= target.size
        assert 0 <= begin <= begin + length <= source.size
        target[at : at + length] = source[begin : begin + length]


def tokens_of(
    memory: KvMemory, blocks: Sequence[int], places: range, heads: range | None = None
) -> list[bytes]:
    """The bytes of tokens, found one by one by the definition of a layout.

    Args:
        places: of the tokens, counted from the beginning of the first block.
        heads: by their numbers in the model; all that are there by default.
    """
    layout = memory.layout
    by_block, by_kv, by_head, by_token = layout.strides
    heads = heads or range(layout.first_head, layout.first_head + layout.kv_heads)
    return [
        arrays_of(memory)[region][begin : begin + layout.token_bytes].tobytes()
        for region, offset in layout.offsets
        for place in places
        for kv in range(2)
        for head in heads
        for begin in [
            offset
            + blocks[place // layout.block_size] * by_block
            + kv * by_kv
            + (head - layout.first_head) * by_head
            + place % layout.block_size * by_token
        ]
    ]
