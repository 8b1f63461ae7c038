"""A model that remembers: each token depends on every byte of the blocks before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.engine import Chunk
from dynbus.transfer.layout import BlockLayout, KvMemory

VOCABULARY = 97
LAYERS, HEADS, DIM = 2, 2, 4


class Remembering:
    """A `SharedModel` that writes each token and its place into the cache, and reads them all.

    Attributes:
        computed: tokens so far.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.vocabulary = VOCABULARY
        self.computed = 0
        self._block_size = block_size
        # A layout other than that of the store: keys and heads before blocks.
        self._cache = np.full((LAYERS, 2, HEADS, blocks, block_size, DIM), -1.0, np.float32)
        layout = BlockLayout.packed(
            ("layer", "kv", "head", "block", "token"),
            dtype="float32",
            layers=LAYERS,
            kv_heads=HEADS,
            head_dim=DIM,
            block_size=block_size,
            blocks=blocks,
        )
        self.memory = KvMemory.of_arrays(layout, [self._cache])

    def compute(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        size = self._block_size
        # All are written before any is read.
        for chunk in chunks:
            self.computed += len(chunk.token_ids)
            for at, token in enumerate(chunk.token_ids, chunk.computed):
                block = chunk.blocks[at // size]
                self._cache[:, :, :, block, at % size] = _mark(token, at)
        logits: list[NDArray[np.float32]] = []
        for chunk in chunks:
            if not chunk.is_sampled:
                continue
            places = np.arange(chunk.computed + len(chunk.token_ids))
            blocks = np.array(chunk.blocks)[places // size]
            known = self._cache[:, :, :, blocks, places % size]
            total = float((known.transpose(3, 0, 1, 2, 4) * WEIGHTS).sum())
            logits.append(_peak(total))
        return np.array(logits, np.float32).reshape(len(logits), VOCABULARY)


def expected(prompt: Sequence[int], tokens: int) -> list[int]:
    """What the model makes of a prompt, where each block is what it should be."""
    known = list(prompt)
    total = sum(float((_mark(token, at) * WEIGHTS).sum()) for at, token in enumerate(known))
    for _ in range(tokens):
        token = int(_peak(total).argmax())
        total += float((_mark(token, len(known)) * WEIGHTS).sum())
        known.append(token)
    return known[len(prompt) :]


PLACES = np.arange(LAYERS * 2 * HEADS * DIM, dtype=np.float32).reshape(LAYERS, 2, HEADS, DIM)
WEIGHTS = PLACES % 5 + 1


def _mark(token: int, at: int) -> NDArray[np.float32]:
    return (PLACES + token * 7 + at * 3) % 31


def _peak(total: float) -> NDArray[np.float32]:
    logits = np.zeros(VOCABULARY, np.float32)
    logits[int(total) % VOCABULARY] = 1.0
    return logits
