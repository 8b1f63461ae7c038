"""The batch of one step, as arrays: the tokens of all chunks in rows, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.engine import Chunk

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The rows of one sequence, and where its keys and values lie.

    A slot is the place of one token in the cache: `block * block_size + offset`.

    Attributes:
        first, last: its rows are from `first` to before `last`.
        computed: the position of the first of them.
        blocks: of the sequence, in order; of shape [blocks].
        runs: the slots of its tokens, those of this step included, as ranges from a first to
            before a last: blocks that follow each other in the cache are one range.
    """

    first: int
    last: int
    computed: int
    blocks: Indices
    runs: list[tuple[int, int]]

    @property
    def length(self) -> int:
        """The tokens of the sequence up to its last row."""
        return self.computed + self.last - self.first


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of a step.

    Attributes:
        block_size: tokens of a block of the cache.
        token_ids, positions, slots: one for each row.
        sampled: the rows whose logits are needed.
        pieces: the sequences; those with one row each are decoded.
    """

    block_size: int
    token_ids: Indices
    positions: Indices
    slots: Indices
    sampled: Indices
    pieces: list[Piece]


def batch_of(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """Lay the chunks out in rows."""
    token_ids: list[int] = []
    positions: list[Indices] = []
    slots: list[Indices] = []
    sampled: list[int] = []
    pieces: list[Piece] = []
    for chunk in chunks:
        first = len(token_ids)
        token_ids += chunk.token_ids
        length = chunk.computed + len(token_ids) - first
        blocks = np.array(chunk.blocks[: -(-length // block_size)], np.int64)
        here = np.arange(chunk.computed, length)
        positions.append(here)
        slots.append(blocks[here // block_size] * block_size + here % block_size)
        if chunk.is_sampled:
            sampled.append(len(token_ids) - 1)
        runs = slot_runs(blocks, block_size, length)
        pieces.append(Piece(first, len(token_ids), chunk.computed, blocks, runs))
    return Batch(
        block_size,
        np.array(token_ids, np.int64),
        np.concatenate(positions),
        np.concatenate(slots),
        np.array(sampled, np.int64),
        pieces,
    )


def slot_runs(blocks: Indices, block_size: int, length: int) -> list[tuple[int, int]]:
    """The slots of the first `length` tokens of these blocks, as ranges as long as can be."""
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    firsts = blocks[np.concatenate([[0], breaks])] * block_size
    counts = np.diff(np.concatenate([[0], breaks, [len(blocks)]])) * block_size
    counts[-1] -= len(blocks) * block_size - length
    return [
        (first, first + count)
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)
    ]


def groups_by_length(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces that are padded to the longest of their group, none by more than its own length."""
    groups: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        if not groups or 2 * piece.length < groups[-1][0].length:
            groups.append([])
        groups[-1].append(piece)
    return groups
