"""A decoder of the Llama family over a paged cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.engine import Chunk
from dynbus.llm.weights.model import ModelWeights
from dynbus.transfer import BlockLayout, KvMemory

from .backend import Backend, Layer, Rows
from .batch import batch_of

A = TypeVar("A")

EPSILONS: Final = {"float32": 2.0**-23, "bfloat16": 2.0**-7}


class Decoder(Generic[A]):
    """Computes the tokens of many sequences in one step: a `SharedModel` of `dynbus.llm.engine`.

    Args:
        weights: of the model; they are read here, and may be closed then.
        blocks, block_size: of the cache of keys and values.
        spare: how many blocks there are beside, behind those of the cache.
        progress: is told, from any thread, how many of the layers are loaded.

    Attributes:
        config: the model's sizes and options.
        vocabulary: how many tokens it knows.
        state_size: numbers of a token's state.
        spare_blocks, epsilon, layers: see `ComparableModel`.
        memory: where its blocks lie. Of each layer a block is one piece, so that few pieces make a
            transfer.
    """

    def __init__(
        self,
        weights: ModelWeights,
        backend: Backend[A],
        *,
        blocks: int,
        block_size: int,
        spare: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        config = weights.config
        self.config = config
        self.vocabulary = config.vocabulary
        self.state_size = config.hidden
        self.layers = config.layers
        self.spare_blocks = range(blocks, blocks + spare)
        self.epsilon = 0.0 if backend.is_exact else EPSILONS[backend.dtype]
        self._backend = backend
        self._block_size = block_size
        self._frequencies = weights.rope_frequencies()
        self._layers = _load_layers(weights, backend, progress)
        self._embedding = backend.put(weights.embedding())
        self._head = self._embedding if weights.is_tied else backend.put(weights.head())
        self._norm = backend.put(weights.final_norm())
        self._caches = [
            backend.cache(blocks + spare, block_size, config.kv_heads, config.head_dim)
            for _ in range(config.layers)
        ]
        layout = BlockLayout.packed(
            ("block", "token", "kv", "head"),
            dtype=backend.dtype,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            blocks=blocks + spare,
        )
        self.memory = KvMemory.of_arrays(layout, self._caches)

    def __repr__(self) -> str:
        return f"<Decoder {self.config.architecture}, {self._backend.name}>"

    def compute(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Compute tokens of several sequences, and keep their keys and values.

        Returns:
            The logits behind the last token of each chunk with `is_sampled`, in their order; of
            shape [sampled chunks, vocabulary].
        """
        states, rows = self._states(chunks)
        return self._logits(states, rows)

    def compute_with_states(
        self, chunks: Sequence[Chunk]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Compute as `compute` does where a chunk needs states.

        Returns:
            The logits as of `compute`; and the states of the last `Chunk.states` tokens of each
            chunk, behind the last norm, in their order; of shape [tokens, state_size].
        """
        backend = self._backend
        states, rows = self._states(chunks)
        needed: list[int] = []
        end = 0
        for chunk in chunks:
            end += len(chunk.token_ids)
            needed += range(end - chunk.states, end)
        taken = backend.take(states, backend.indices(np.array(needed, np.int64)))
        normed = backend.norm(taken, self._norm, self.config.norm_eps)
        return self._logits(states, rows), backend.host(normed)

    def layer_of(self, blocks: Sequence[int], layer: int) -> NDArray[np.float32]:
        """See `ComparableModel`."""
        backend = self._backend
        taken = backend.take(self._caches[layer], backend.indices(np.array(blocks, np.int64)))
        return backend.host(taken)

    def _states(self, chunks: Sequence[Chunk]) -> tuple[A, Rows[A]]:
        """The states behind the last layer, and the rows that they are of."""
        backend = self._backend
        rows = backend.rows(batch_of(chunks, self._block_size), self._frequencies)
        states = backend.take(self._embedding, rows.token_ids)
        for layer, cache in zip(self._layers, self._caches, strict=True):
            states = self._layer(states, layer, cache, rows)
        return states, rows

    def _logits(self, states: A, rows: Rows[A]) -> NDArray[np.float32]:
        backend = self._backend
        sampled = backend.take(states, rows.sampled)
        normed = backend.norm(sampled, self._norm, self.config.norm_eps)
        return backend.logits(normed, self._head)

    def _layer(self, states: A, layer: Layer[A], cache: A, rows: Rows[A]) -> A:
        backend, config = self._backend, self.config
        normed = backend.norm(states, layer.attention_norm, config.norm_eps)
        qkv = backend.linear(normed, layer.qkv, layer.qkv_bias)
        q, k, v = backend.split(qkv, config.heads, config.kv_heads)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = backend.norm(q, layer.q_norm, config.norm_eps)
            k = backend.norm(k, layer.k_norm, config.norm_eps)
        q, k = backend.rotate(q, rows), backend.rotate(k, rows)
        attended = backend.attend(q, k, v, cache, rows)
        states = backend.add(states, backend.linear(attended, layer.output))
        normed = backend.norm(states, layer.mlp_norm, config.norm_eps)
        gated = backend.gated(backend.linear(normed, layer.gate_up))
        return backend.add(states, backend.linear(gated, layer.down))


def _load_layers(
    weights: ModelWeights, backend: Backend[A], progress: Callable[[int, int], None] | None
) -> list[Layer[A]]:
    def load(number: int) -> Layer[A]:
        return backend.layer(weights.layer(number))

    count = weights.config.layers
    layers: list[Layer[A]] = []
    with ThreadPoolExecutor(backend.threads) as pool:
        for layer in pool.map(load, range(count)):
            layers.append(layer)
            if progress is not None:
                progress(len(layers), count)
    return layers
