"""The decoder's parts in PyTorch, on the CPU or a GPU.

PyTorch is imported when a backend is made.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.weights.model import LayerWeights
from dynbus.spi import usable_cores

from .backend import Layer, Rows
from .batch import Batch, Indices, Piece, groups_by_length

DType = Literal["float32", "bfloat16"]

# PyTorch is no dependency, so that its types are not known here.
Tensor: TypeAlias = Any

_SHAPE: Final = 16
"""Rows of every matrix product of a deterministic backend."""


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """A sequence with several rows; `mask` says which keys its rows see, None for all up to it."""

    piece: Piece
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Decode:
    """Sequences of one row each, padded to the longest.

    Attributes:
        rows: where they are in the batch.
        blocks: of all of them, so many of each.
        mask: which keys each sees: [sequences, 1, 1, keys].
    """

    rows: Tensor
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _TorchRows(Rows[Tensor]):
    prefills: Sequence[_Prefill]
    decodes: Sequence[_Decode]


class TorchBackend:
    """Computes with PyTorch.

    Args:
        device: such as "cpu" or "cuda"; None for a GPU where there is one.
        dtype: of weights, keys and values.
        threads: how many PyTorch uses on the CPU, in the whole process; 0 for what it chooses.
        deterministic: computes each row in one shape, so that it has the same bits whatever is
            computed beside it. Several times slower.

    Raises:
        ImportError: PyTorch is not installed.
        ValueError: the device is not there.
    """

    def __init__(
        self,
        *,
        device: str | None = None,
        dtype: DType = "float32",
        threads: int = 0,
        deterministic: bool = False,
    ) -> None:
        try:
            torch: Any = import_module("torch")
        except ImportError as error:
            raise ImportError(
                "the backend 'torch' needs PyTorch: install dynbus[torch], or take the backend "
                "'numpy'"
            ) from error
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._device = torch.device(device)
            torch.empty(1, device=self._device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"the device {device!r} cannot be used: {reason}") from error
        self.dtype: str = dtype
        self.name = f"torch {dtype} on {device}"
        self.threads = threads or usable_cores()
        if threads:
            torch.set_num_threads(threads)
        self._torch = torch
        self._functions: Any = torch.nn.functional
        self._dtype = getattr(torch, dtype)
        self._deterministic = self.is_exact = deterministic

    def put(self, array: NDArray[np.float32]) -> Tensor:
        return self._torch.from_numpy(array).to(self._device, self._dtype)

    def layer(self, weights: LayerWeights) -> Layer[Tensor]:
        def put(array: NDArray[np.float32] | None) -> Tensor:
            return None if array is None else self.put(array)

        return Layer(
            put(weights.attention_norm),
            put(weights.qkv),
            put(weights.qkv_bias),
            put(weights.q_norm),
            put(weights.k_norm),
            put(weights.output),
            put(weights.mlp_norm),
            put(weights.gate_up),
            put(weights.down),
        )

    def cache(self, blocks: int, block_size: int, heads: int, head_dim: int) -> Tensor:
        shape = (blocks, block_size, 2, heads, head_dim)
        if self._device.type == "cpu":
            # PyTorch would write its zeros. These are the system's, page by page until they are
            # written over; numpy's are, too, but in pages of 2 MiB.
            zeros = mmap.mmap(-1, prod(shape) * self._dtype.itemsize)
            return self._torch.frombuffer(zeros, dtype=self._dtype).view(shape)
        return self._torch.zeros(shape, dtype=self._dtype, device=self._device)

    def rows(self, batch: Batch, frequencies: NDArray[np.float32]) -> Rows[Tensor]:
        angles = batch.positions.astype(np.float32)[:, None, None] * frequencies
        each = self._deterministic
        decoded = [piece for piece in batch.pieces if piece.last - piece.first == 1 and not each]
        return _TorchRows(
            batch,
            self._on_device(batch.token_ids),
            self._on_device(batch.slots),
            self._on_device(batch.sampled),
            self.put(np.cos(angles)),
            self.put(np.sin(angles)),
            [
                _Prefill(piece, self._on_device(piece.blocks), self._causal(piece))
                for piece in batch.pieces
                if each or piece.last - piece.first > 1
            ],
            [self._decode(group, batch.block_size) for group in groups_by_length(decoded)],
        )

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        return self._torch.from_numpy(array).to(self._device)

    def _causal(self, piece: Piece) -> Tensor | None:
        if not piece.computed or self._deterministic:
            return None
        rows = np.arange(piece.computed, piece.length)[:, None]
        return self._on_device(np.arange(piece.length) <= rows)

    def _decode(self, group: Sequence[Piece], block_size: int) -> _Decode:
        longest = group[0].length
        blocks = np.zeros((len(group), len(group[0].blocks)), np.int64)
        for row, piece in zip(blocks, group, strict=True):
            row[: len(piece.blocks)] = piece.blocks
        lengths = np.array([piece.length for piece in group])
        mask = np.arange(longest) < lengths[:, None]
        return _Decode(
            self._on_device(np.array([piece.first for piece in group])),
            self._on_device(blocks.ravel()),
            self._on_device(mask[:, None, None]),
        )

    def take(self, array: Tensor, rows: Tensor) -> Tensor:
        return array.index_select(0, rows)

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._functions.rms_norm(rows, (rows.shape[-1],), weight, eps)

    def linear(self, rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        product = self._in_shape(rows, matrix) if self._deterministic else rows @ matrix
        if bias is not None:
            product += bias
        return product

    def _in_shape(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """The product, so many rows at a time; the last ones are filled up with zeros."""
        count = len(rows)
        if not count:
            # No chunk of the step is sampled.
            return rows @ matrix
        padded = self._functions.pad(rows, (0, 0, 0, -count % _SHAPE))
        parts = [padded[at : at + _SHAPE] @ matrix for at in range(0, count, _SHAPE)]
        return self._torch.cat(parts)[:count]

    def add(self, rows: Tensor, others: Tensor) -> Tensor:
        rows += others
        return rows

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gated = self._functions.silu(gate)
        gated *= up
        return gated

    def split(self, qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        split = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
        q, k, v = split.split((heads, kv_heads, kv_heads), 1)
        return q, k, v

    def rotate(self, heads: Tensor, rows: Rows[Tensor]) -> Tensor:
        left, right = heads.chunk(2, -1)
        cos, sin = rows.cos, rows.sin
        return self._torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, rows: Rows[Tensor]) -> Tensor:
        assert isinstance(rows, _TorchRows), "the rows are of another backend"
        slots = cache.flatten(0, 1)
        slots.index_copy_(0, rows.slots, self._torch.stack((k, v), 1))
        kv_heads, head_dim = k.shape[1:]
        attended = self._torch.empty_like(q)
        for decode in rows.decodes:
            keys, values = self._gathered(cache, decode.blocks, len(decode.rows))
            longest = decode.mask.shape[-1]
            # The query heads that share a head of keys stand in for the rows of one sequence.
            queries = q.index_select(0, decode.rows).view(len(decode.rows), kv_heads, -1, head_dim)
            result = self._functions.scaled_dot_product_attention(
                queries,
                keys[:, :, :longest],
                values[:, :, :longest],
                attn_mask=decode.mask,
                scale=1.0,
            )
            attended.index_copy_(0, decode.rows, result.reshape(len(decode.rows), -1, head_dim))
        for prefill in rows.prefills:
            piece = prefill.piece
            if len(piece.runs) == 1 and not self._deterministic:
                first, last = piece.runs[0]
                keys, values = slots[None, first:last].permute(2, 0, 3, 1, 4)
            else:
                keys, values = self._gathered(cache, prefill.blocks, 1)
            result = self._attend_piece(
                q[piece.first : piece.last],
                keys[:, :, : piece.length],
                values[:, :, : piece.length],
                prefill.mask,
            )
            attended[piece.first : piece.last] = result
        return attended.view(len(q), -1)

    def _gathered(self, cache: Tensor, blocks: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Copies of keys and of values: [sequences, heads, tokens, head_dim] each."""
        taken = cache.flatten(1).index_select(0, blocks)
        keys, values = taken.view(sequences, -1, *cache.shape[2:]).permute(2, 0, 3, 1, 4)
        return keys, values

    def _attend_piece(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Rows of one sequence, [rows, heads, head_dim], attend to the keys up to each."""
        if self._deterministic:
            return self._attend_each(queries, keys[0], values[0])
        group = queries.shape[1] // keys.shape[1]
        result = self._functions.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.repeat_interleave(group, 1),
            values.repeat_interleave(group, 1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=1.0,
        )
        return result[0].transpose(0, 1)

    def _attend_each(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Each row on its own: its result depends on its position alone."""
        heads, length, head_dim = keys.shape
        before = length - len(queries)
        results: list[Tensor] = []
        for at, query in enumerate(queries):
            seen = before + at + 1
            scores = query.reshape(heads, -1, head_dim) @ keys[:, :seen].transpose(1, 2)
            results.append(scores.softmax(-1) @ values[:, :seen])
        return self._torch.stack(results).view(queries.shape)

    def host(self, rows: Tensor) -> NDArray[np.float32]:
        host: NDArray[np.float32] = rows.float().cpu().numpy()
        return host

    def indices(self, rows: Indices) -> Tensor:
        return self._torch.from_numpy(rows).to(self._device)

    def logits(self, rows: Tensor, head: Tensor) -> NDArray[np.float32]:
        product = self._in_shape(rows, head.t()) if self._deterministic else rows @ head.t()
        return self.host(product)
