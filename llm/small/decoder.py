"""A decoder of the Llama family over a paged cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.engine import Chunk
from dynbus.llm.weights.model import ModelWeights

from .backend import Backend, Layer, Rows
from .batch import batch_of

A = TypeVar("A")


class Decoder(Generic[A]):
    """Computes the tokens of many sequences in one step: a `Model` of `dynbus.llm.engine`.

    Args:
        weights: of the model; they are read here, and may be closed then.
        blocks, block_size: of the cache of keys and values.
        progress: is told, from any thread, how many of the layers are loaded.

    Attributes:
        config: the model's sizes and options.
        vocabulary: how many tokens it knows.
    """

    def __init__(
        self,
        weights: ModelWeights,
        backend: Backend[A],
        *,
        blocks: int,
        block_size: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        config = weights.config
        self.config = config
        self.vocabulary = config.vocabulary
        self._backend = backend
        self._block_size = block_size
        self._frequencies = weights.rope_frequencies()
        self._layers = _load_layers(weights, backend, progress)
        self._embedding = backend.put(weights.embedding())
        self._head = self._embedding if weights.is_tied else backend.put(weights.head())
        self._norm = backend.put(weights.final_norm())
        self._caches = [
            backend.cache(config.kv_heads, blocks * block_size, config.head_dim)
            for _ in range(config.layers)
        ]

    def __repr__(self) -> str:
        return f"<Decoder {self.config.architecture}, {self._backend.name}>"

    def compute(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Compute tokens of several sequences, and keep their keys and values.

        Returns:
            The logits behind the last token of each chunk with `is_sampled`, in their order; of
            shape [sampled chunks, vocabulary].
        """
        backend, config = self._backend, self.config
        rows = backend.rows(batch_of(chunks, self._block_size), self._frequencies)
        states = backend.take(self._embedding, rows.token_ids)
        for layer, cache in zip(self._layers, self._caches, strict=True):
            states = self._layer(states, layer, cache, rows)
        states = backend.take(states, rows.sampled)
        states = backend.norm(states, self._norm, config.norm_eps)
        return backend.logits(states, self._head)

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
