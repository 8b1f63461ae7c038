"""Pooling: the embedding of a text from the states of its tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.embedding import Pooling


class StatePool:
    """Gathers the states of one text, which a model computes in chunks.

    Args:
        dimensions: of the embedding; at most the size of a state.
    """

    def __init__(self, pooling: Pooling, dimensions: int) -> None:
        self._pooling: Pooling = pooling
        self._dimensions = dimensions
        self._sum: NDArray[np.float64] | None = None
        self._count = 0

    def __repr__(self) -> str:
        return f"<StatePool {self._pooling} [{self._count} states]>"

    def wanted(self, tokens: int, *, is_last: bool) -> int:
        """The number of the last states of a chunk that are needed.

        Args:
            tokens: of the chunk.
            is_last: whether the text ends with it.
        """
        if self._pooling == "mean":
            return tokens
        return 1 if is_last else 0

    def restart(self) -> None:
        """Forget all states: the text is computed anew."""
        self._sum = None
        self._count = 0

    def add(self, states: NDArray[np.float32]) -> None:
        """Take the states of a chunk, of shape [tokens, size]."""
        # One after another, so that the same states have the same sum whatever the chunks were.
        rows = states.astype(np.float64)
        if self._sum is not None:
            rows = np.concatenate([self._sum[None], rows])
        self._sum = np.add.reduce(rows, axis=0)
        self._count += len(states)

    def embedding(self) -> NDArray[np.float32] | None:
        """The embedding, of length 1; None where the states are no numbers, or all zero."""
        assert self._sum is not None, "the text has no states"
        state = self._sum[: self._dimensions] / self._count
        with np.errstate(all="ignore"):
            embedding = (state / np.linalg.norm(state)).astype(np.float32)
        return embedding if np.isfinite(embedding).all() else None
