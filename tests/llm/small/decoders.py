"""Drives a decoder without an engine, for tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dynbus.llm.engine import Chunk
from dynbus.llm.small.decoder import Decoder
from dynbus.llm.small.numpy_backend import NumpyBackend
from dynbus.llm.small.torch_backend import DType, TorchBackend
from dynbus.llm.weights.model import open_weights

BLOCK_SIZE = 8
BLOCKS = 64

BACKENDS = [
    "numpy",
    pytest.param(
        "torch",
        marks=pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed"),
    ),
]


def decoder(
    path: Path, backend: str = "numpy", *, deterministic: bool = False, dtype: DType = "float32"
) -> Decoder[Any]:
    made: NumpyBackend | TorchBackend
    if backend == "numpy":
        made = NumpyBackend(deterministic=deterministic)
    else:
        made = TorchBackend(dtype=dtype, deterministic=deterministic)
    with open_weights(path) as weights:
        return Decoder(weights, made, blocks=BLOCKS, block_size=BLOCK_SIZE)


def greedy(
    model: Decoder[Any], prompt: list[int], count: int, blocks: list[int] | None = None
) -> tuple[list[int], list[NDArray[np.float32]]]:
    """Greedy tokens, and the logits that each was taken from and those behind the last."""
    tokens = list(prompt)
    table = list(range(BLOCKS)) if blocks is None else blocks
    seen = [prefill(model, tokens, table)]
    while len(tokens) < len(prompt) + count:
        tokens.append(int(seen[-1].argmax()))
        seen.append(model.compute([decoding(tokens, table)])[0])
    return tokens[len(prompt) :], seen


def prefill(
    model: Decoder[Any], tokens: list[int], table: list[int], chunk: int = 1 << 20
) -> NDArray[np.float32]:
    """The logits behind the last of these tokens, computed in chunks."""
    result: NDArray[np.float32] | None = None
    for first in range(0, len(tokens), chunk):
        last = min(len(tokens), first + chunk)
        result = model.compute([Chunk(tokens[first:last], first, table, True)])[0]
    assert result is not None, "there is no token"
    return result


def decoding(tokens: list[int], table: list[int]) -> Chunk:
    """The last of these tokens."""
    return Chunk(tokens[-1:], len(tokens) - 1, table, True)
