"""The face of a library for arrays, as far as the decoder needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.weights.model import LayerWeights

from .batch import Batch, Indices

A = TypeVar("A")


@dataclass(frozen=True, slots=True, eq=False)
class Layer(Generic[A]):
    """The weights of a layer, as `LayerWeights` has them, where the backend computes."""

    attention_norm: A
    qkv: A
    qkv_bias: A | None
    q_norm: A | None
    k_norm: A | None
    output: A
    mlp_norm: A
    gate_up: A
    down: A


@dataclass(frozen=True, slots=True, eq=False)
class Rows(Generic[A]):
    """The rows of a step where the backend computes.

    Attributes:
        batch: the same on the host.
        token_ids, slots, sampled: as the batch has them.
        cos, sin: of the angles by which each row's heads are rotated; [rows, 1, head_dim / 2].
    """

    batch: Batch
    token_ids: A
    slots: A
    sampled: A
    cos: A
    sin: A


class Backend(Protocol[A]):
    """Computes the parts of a decoder. Shapes are those of rows: [rows, ...].

    Attributes:
        name: such as "numpy".
        dtype: of keys and values, such as "float32".
        threads: that load a model.
        is_exact: whether each row has the same bits whatever is computed beside it.
    """

    name: str
    dtype: str
    threads: int
    is_exact: bool

    def put(self, array: NDArray[np.float32]) -> A:
        """Weights, in the backend's type of numbers."""
        ...

    def layer(self, weights: LayerWeights) -> Layer[A]:
        """A layer's weights. Called by several threads."""
        ...

    def cache(self, blocks: int, block_size: int, heads: int, head_dim: int) -> A:
        """Room for the keys and values of one layer, contiguous in this order:
        [blocks, block_size, 2, heads, head_dim]."""
        ...

    def rows(self, batch: Batch, frequencies: NDArray[np.float32]) -> Rows[A]:
        """Make the arrays of a step."""
        ...

    def take(self, array: A, rows: A) -> A:
        """A copy of some rows, or of the embeddings of tokens."""
        ...

    def norm(self, rows: A, weight: A, eps: float) -> A:
        """Rows divided by the root of the mean of their squares, times the weight."""
        ...

    def linear(self, rows: A, matrix: A, bias: A | None = None) -> A:
        """Rows times the matrix, and the bias added."""
        ...

    def add(self, rows: A, others: A) -> A:
        """The sum; the first may be overwritten by it."""
        ...

    def gated(self, gate_up: A) -> A:
        """SiLU of the left half times the right half; the argument may be overwritten."""
        ...

    def split(self, qkv: A, heads: int, kv_heads: int) -> tuple[A, A, A]:
        """Queries, keys and values: [rows, heads, head_dim] each."""
        ...

    def rotate(self, heads: A, rows: Rows[A]) -> A:
        """Heads rotated by their positions."""
        ...

    def attend(self, q: A, k: A, v: A, cache: A, rows: Rows[A]) -> A:
        """Write the keys and values into the cache, then let the queries attend to it.

        Returns:
            Of shape [rows, heads * head_dim].
        """
        ...

    def host(self, rows: A) -> NDArray[np.float32]:
        """Rows, on the host."""
        ...

    def indices(self, rows: Indices) -> A:
        """Numbers of rows, for `take`."""
        ...

    def logits(self, rows: A, head: A) -> NDArray[np.float32]:
        """Rows times the transposed head, on the host."""
        ...
