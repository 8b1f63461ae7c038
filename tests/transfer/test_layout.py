"""Blocks of one layout become blocks of another: which bytes are which."""

from __future__ import annotations

import numpy as np
import pytest

from dynbus.transfer.layout import BlockLayout, KvMemory, Pieces, plan


def layout(**changed: object) -> BlockLayout:
    given: dict[str, object] = {
        "order": ("kv", "head", "block", "token"),
        "dtype": "float32",
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 4,
        "block_size": 4,
        "blocks": 8,
    }
    return BlockLayout.packed(**{**given, **changed})  # type: ignore[arg-type]


def test_blocks_that_follow_each_other_on_both_sides_are_one_piece_for_each_head() -> None:
    pieces = plan(layout(), [0, 1, 2, 3], layout(), [4, 5, 6, 7], 16)

    assert len(pieces) == 2 * 2 * 2
    assert set(pieces.length.tolist()) == {16 * 4 * 4}


def test_the_bytes_of_pieces_are_those_of_the_tokens() -> None:
    pieces = plan(layout(), [0, 3], layout(), [7, 1], 7)

    assert pieces.bytes == 2 * 2 * 2 * 7 * 4 * 4


@pytest.mark.parametrize(
    "order", [("block", "token", "kv", "head"), ("kv", "head", "block", "token")]
)
def test_copying_the_pieces_moves_the_tokens(order: tuple[str, ...]) -> None:
    here, there = layout(order=order), layout()
    source, target = KvMemory.allocate(there), KvMemory.allocate(here)
    fill(source)

    copy(plan(here, [5, 2], there, [1, 6], 7), target, source)

    np.testing.assert_array_equal(tokens_of(target, [5, 2], 7), tokens_of(source, [1, 6], 7))


def fill(memory: KvMemory) -> None:
    rng = np.random.default_rng(0)
    for array in arrays(memory):
        array[:] = rng.integers(1, 255, array.size, np.uint8)


def arrays(memory: KvMemory) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    owner = memory.owner
    assert isinstance(owner, tuple)
    return list(owner)


def copy(pieces: Pieces, local: KvMemory, remote: KvMemory) -> None:
    """What NIXL does with a READ."""
    for at, begin, of, first, length in zip(
        pieces.local_region.tolist(),
        pieces.local_offset.tolist(),
        pieces.remote_region.tolist(),
        pieces.remote_offset.tolist(),
        pieces.length.tolist(),
        strict=True,
    ):
        arrays(local)[at][begin : begin + length] = arrays(remote)[of][first : first + length]


def tokens_of(
    memory: KvMemory, blocks: list[int], tokens: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The bytes of tokens one by one, found by the definition of a layout."""
    kind = memory.layout
    found = [
        arrays(memory)[region][begin : begin + kind.token_bytes]
        for region, offset in kind.offsets
        for token in range(tokens)
        for kv in range(2)
        for head in range(kind.kv_heads)
        for begin in [
            offset
            + blocks[token // kind.block_size] * kind.strides[0]
            + kv * kind.strides[1]
            + head * kind.strides[2]
            + token % kind.block_size * kind.strides[3]
        ]
    ]
    return np.array(found)
