"""The decoder's parts in numpy, float32."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.weights.model import LayerWeights
from dynbus.spi import usable_cores

from .backend import Layer, Rows
from .batch import Batch, Indices, Piece

Array: TypeAlias = NDArray[Any]

_QUERIES: Final = 128
"""Rows of a sequence that attend at a time: their scores stay in the processor's cache."""
_MASKED: Final = np.triu(np.full((_QUERIES, _QUERIES), -np.inf, np.float32), 1)
"""The mask that is added to the scores of a tile's queries and its own keys."""
_GATHERED_BLOCKS: Final = 3
"""A sequence is gathered if its blocks lie in runs shorter than this on average. A copy of a block
takes about as long as a product more for each run."""

_MANY_KEYS: Final = 448
"""From so many on, keys times queries takes BLAS a third of the time of queries times keys, where
the queries are few."""
_VECTORS: Final = 6
"""So few rows are multiplied by a matrix one by one: BLAS copies the matrix for a product with
several, which takes longer than reading it again."""
_FEW_ROWS: Final = 32
"""With fewer rows a step uses one thread. It has hundreds of products of a fraction of a
millisecond, and BLAS waits for all its threads at the end of each: where another process has a core
for a moment, that made a step ten times slower, and two threads gain a third at most."""


class NumpyBackend:
    """Computes with numpy.

    Args:
        threads: how many BLAS uses for a prompt, in the whole process; 0 for one for each core. It
            takes threadpoolctl to set them: without it BLAS does as it was built to.
        deterministic: computes each row on its own and with one thread, so that it has the same
            bits whatever is computed beside it. Several times slower.
    """

    def __init__(self, *, threads: int = 0, deterministic: bool = False) -> None:
        self.name = "numpy"
        self.dtype = "float32"
        self.threads = threads or usable_cores()
        self._deterministic = self.is_exact = deterministic
        self._blas = _blas()
        self._blas_threads = 0
        self._use_threads(1)

    def _use_threads(self, count: int) -> None:
        if count != self._blas_threads and self._blas is not None:
            self._blas.limit(limits=count, user_api="blas")
        self._blas_threads = count

    def put(self, array: Array) -> Array:
        return array

    def layer(self, weights: LayerWeights) -> Layer[Array]:
        return Layer(
            weights.attention_norm,
            weights.qkv,
            weights.qkv_bias,
            weights.q_norm,
            weights.k_norm,
            weights.output,
            weights.mlp_norm,
            weights.gate_up,
            weights.down,
        )

    def cache(self, blocks: int, block_size: int, heads: int, head_dim: int) -> Array:
        return np.zeros((blocks, block_size, 2, heads, head_dim), np.float32)

    def rows(self, batch: Batch, frequencies: Array) -> Rows[Array]:
        is_small = self._deterministic or len(batch.token_ids) < _FEW_ROWS
        self._use_threads(1 if is_small else self.threads)
        angles = batch.positions.astype(np.float32)[:, None, None] * frequencies
        return Rows(
            batch, batch.token_ids, batch.slots, batch.sampled, np.cos(angles), np.sin(angles)
        )

    def take(self, array: Array, rows: Array) -> Array:
        return array.take(rows, 0)

    def norm(self, rows: Array, weight: Array, eps: float) -> Array:
        squares: Array = np.einsum("...i,...i->...", rows, rows)[..., None]
        squares /= rows.shape[-1]
        squares += eps
        np.sqrt(squares, out=squares)
        normed: Array = rows / squares
        normed *= weight
        return normed

    def linear(self, rows: Array, matrix: Array, bias: Array | None = None) -> Array:
        if self._deterministic:
            product = _product_of_each(rows, matrix)
        elif len(rows) <= _VECTORS:
            product = np.empty((len(rows), matrix.shape[1]), np.float32)
            for row, target in zip(rows, product, strict=True):
                np.dot(row, matrix, out=target)
        else:
            product = rows @ matrix
        if bias is not None:
            product += bias
        return product

    def add(self, rows: Array, others: Array) -> Array:
        rows += others
        return rows

    def gated(self, gate_up: Array) -> Array:
        width = gate_up.shape[1] // 2
        gate, up = gate_up[:, :width], gate_up[:, width:]
        # SiLU, gate / (1 + exp(-gate)); an exp that overflows gives the right 0.
        gated = np.negative(gate)
        with np.errstate(over="ignore"):
            np.exp(gated, out=gated)
        gated += 1
        np.divide(gate, gated, out=gated)
        gated *= up
        return gated

    def split(self, qkv: Array, heads: int, kv_heads: int) -> tuple[Array, Array, Array]:
        split = qkv.reshape(len(qkv), heads + 2 * kv_heads, -1)
        return split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]

    def rotate(self, heads: Array, rows: Rows[Array]) -> Array:
        half = heads.shape[-1] // 2
        left, right = heads[..., :half], heads[..., half:]
        rotated = np.empty(heads.shape, np.float32)
        np.multiply(left, rows.cos, out=rotated[..., :half])
        np.multiply(right, rows.cos, out=rotated[..., half:])
        rotated[..., :half] -= right * rows.sin
        rotated[..., half:] += left * rows.sin
        return rotated

    def host(self, rows: Array) -> Array:
        return rows

    def indices(self, rows: Indices) -> Array:
        return rows

    def logits(self, rows: Array, head: Array) -> Array:
        if self._deterministic:
            return _product_of_each(rows, head.T)
        # In this order a product of few rows is faster.
        logits = np.matmul(head, rows.T)
        return np.ascontiguousarray(logits.T)

    def attend(self, q: Array, k: Array, v: Array, cache: Array, rows: Rows[Array]) -> Array:
        slots = cache.reshape(-1, *cache.shape[2:])
        slots[rows.slots, 0] = k
        slots[rows.slots, 1] = v
        kv_heads, head_dim = k.shape[1:]
        # The query heads that share a head of keys lie side by side.
        grouped = q.reshape(len(q), kv_heads, -1, head_dim)
        attended = np.empty(grouped.shape, np.float32)
        for piece in rows.batch.pieces:
            queries = grouped[piece.first : piece.last]
            target = attended[piece.first : piece.last]
            if self._deterministic:
                keys, values = _by_head(_gathered(cache, piece))
                _attend_each(queries, keys, values, target)
            elif len(queries) == 1:
                runs = [slots[first:last] for first, last in piece.runs]
                if len(runs) * _GATHERED_BLOCKS > len(piece.blocks) + 2:
                    runs = [_gathered(cache, piece)]
                _attend_runs(queries[0], runs, target[0])
            else:
                if len(piece.runs) == 1:
                    first, last = piece.runs[0]
                    keys, values = _by_head(slots[first:last])
                else:
                    keys, values = _by_head(_gathered(cache, piece))
                _attend_tiles(queries, keys, values, target)
        return attended.reshape(len(q), -1)


def _blas() -> Any:
    """The controller of BLAS's threads; None where threadpoolctl is not installed."""
    try:
        threadpoolctl: Any = import_module("threadpoolctl")
    except ImportError:
        return None
    return threadpoolctl.ThreadpoolController()


def _product_of_each(rows: Array, matrix: Array) -> Array:
    """The product of each row on its own.

    BLAS computes the rows of one product in tiles: on some processors a row's last bits differ with
    its place among the others, however many there are.
    """
    product: Array = np.matmul(rows[:, None], matrix)
    return product[:, 0]


def _gathered(cache: Array, piece: Piece) -> Array:
    """A copy of a sequence's keys and values: [tokens, 2, heads, head_dim]."""
    blocks = cache.reshape(len(cache), -1).take(piece.blocks, 0)
    return blocks.reshape(-1, *cache.shape[2:])[: piece.length]


def _by_head(slots: Array) -> tuple[Array, Array]:
    """The keys and the values of slots, [heads, tokens, head_dim] each, not copied."""
    return slots[:, 0].swapaxes(0, 1), slots[:, 1].swapaxes(0, 1)


def _softmax(scores: Array) -> Array:
    """The exponentials in place of the scores, and their sums; rows of the last axis."""
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    sums: Array = scores.sum(-1, keepdims=True)
    return sums


def _attend_runs(query: Array, runs: list[Array], target: Array) -> None:
    """One query of each head, [heads, group, head_dim], attends to the slots of its sequence.

    They are not copied.
    """
    each = [_by_head(slots) for slots in runs]
    if sum(map(len, runs)) < _MANY_KEYS:
        parts = [query @ keys.swapaxes(1, 2) for keys, _ in each]
    else:
        turned = np.ascontiguousarray(query.swapaxes(1, 2))
        parts = [(keys @ turned).swapaxes(1, 2) for keys, _ in each]
    scores = np.concatenate(parts, -1) if len(parts) > 1 else np.ascontiguousarray(parts[0])
    sums = _softmax(scores)
    if len(each) == 1:
        np.matmul(scores, each[0][1], out=target)
    else:
        target[:] = 0
        at = 0
        for _, values in each:
            length = values.shape[1]
            target += scores[..., at : at + length] @ values
            at += length
    target /= sums


def _attend_tiles(queries: Array, keys: Array, values: Array, target: Array) -> None:
    """Queries of the last tokens, [rows, heads, group, head_dim], attend to those up to them."""
    count, heads, group, head_dim = queries.shape
    before = keys.shape[1] - count
    for first in range(0, count, _QUERIES):
        last = min(count, first + _QUERIES)
        rows, length = last - first, before + last
        tile = queries[first:last].transpose(1, 2, 0, 3).reshape(heads, group * rows, head_dim)
        scores = tile @ keys[:, :length].swapaxes(1, 2)
        scores.reshape(heads, group, rows, length)[..., length - rows :] += _MASKED[:rows, :rows]
        sums = _softmax(scores)
        attended = scores @ values[:, :length]
        attended /= sums
        target[first:last] = attended.reshape(heads, group, rows, head_dim).transpose(2, 0, 1, 3)


def _attend_each(queries: Array, keys: Array, values: Array, target: Array) -> None:
    """As `_attend_tiles`, each row on its own: its result depends on its position alone."""
    before = keys.shape[1] - len(queries)
    for at, query in enumerate(queries):
        length = before + at + 1
        scores = np.ascontiguousarray(query) @ keys[:, :length].swapaxes(1, 2)
        sums = _softmax(scores)
        target[at] = scores @ values[:, :length]
        target[at] /= sums
