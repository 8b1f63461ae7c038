"""The states of a tiny model's tokens, written straight from its formulas: no cache, no batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tests.llm.weights.tiny_models import HEADS, KV_HEADS, LAYERS, TinyModel

Floats = NDArray[np.float64]


def states(tiny: TinyModel, token_ids: Sequence[int]) -> Floats:
    """The states behind the last norm, of shape [tokens, hidden]; rope is not scaled here."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tiny.tensors().items()}
    rows = weights["model.embed_tokens.weight"][list(token_ids)]
    for number in range(LAYERS):
        prefix = f"model.layers.{number}."
        layer = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        rows = rows + _attention(tiny, layer, _norm(rows, layer["input_layernorm.weight"]))
        rows = rows + _mlp(layer, _norm(rows, layer["post_attention_layernorm.weight"]))
    return _norm(rows, weights["model.norm.weight"])


def embedding(
    tiny: TinyModel, token_ids: Sequence[int], pooling: str, dimensions: int | None = None
) -> Floats:
    found = states(tiny, token_ids)
    pooled = found.mean(0) if pooling == "mean" else found[-1]
    cut: Floats = pooled[:dimensions]
    return cut / np.linalg.norm(cut)


def _norm(rows: Floats, weight: Floats) -> Floats:
    normed: Floats = rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + 1e-6) * weight
    return normed


def _attention(tiny: TinyModel, layer: dict[str, Floats], rows: Floats) -> Floats:
    count = len(rows)

    def heads(name: str) -> Floats:
        made: Floats = rows @ layer[f"self_attn.{name}_proj.weight"].T
        made = made + layer.get(f"self_attn.{name}_proj.bias", np.float64(0))
        made = made.reshape(count, -1, tiny.head_dim)
        weight = layer.get(f"self_attn.{name}_norm.weight")
        return made if weight is None else _norm(made, weight)

    q, k, v = _rotated(heads("q")), _rotated(heads("k")), heads("v")
    future = np.triu(np.full((count, count), -np.inf), 1)
    attended = np.empty_like(q)
    for head in range(HEADS):
        own = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ k[:, own].T / np.sqrt(tiny.head_dim) + future
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        attended[:, head] = shares / shares.sum(-1, keepdims=True) @ v[:, own]
    out: Floats = attended.reshape(count, -1) @ layer["self_attn.o_proj.weight"].T
    return out


def _rotated(heads: Floats) -> Floats:
    half = heads.shape[-1] // 2
    frequencies = np.array([10000.0 ** (-pair / half) for pair in range(half)])
    angles: Floats = np.arange(len(heads), dtype=np.float64)[:, None, None] * frequencies
    left, right = heads[..., :half], heads[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def _mlp(layer: dict[str, Floats], rows: Floats) -> Floats:
    gate = rows @ layer["mlp.gate_proj.weight"].T
    up = rows @ layer["mlp.up_proj.weight"].T
    out: Floats = (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    return out
