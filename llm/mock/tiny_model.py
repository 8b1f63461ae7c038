"""A model of 200 KB with random weights, for tests of workers that compute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .text_model import END_ID, write_mock_model

_HIDDEN: Final = 64
_INTERMEDIATE: Final = 96
_LAYERS: Final = 2
_HEADS: Final = 4
_KV_HEADS: Final = 2
_HEAD_DIM: Final = 16


def write_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a Llama of two layers with random weights, in the files that an author publishes.

    `ModelWorker(model=str(folder), backend="numpy")` serves it, with the tokenizer and the chat
    template of the mock model: a context of 512 tokens, and text without a meaning. The same
    weights give the same greedy tokens.

    Args:
        folder: made where it is missing; its files of these names are replaced.
        seed: of the weights.

    Returns:
        `folder`.

    Raises:
        OSError: the folder cannot be written.
    """
    vocabulary = write_mock_model(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": END_ID,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(_safetensors(_tensors(vocabulary, seed)))
    return folder


def _tensors(vocabulary: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """All weights by their names; matrices are [outputs, inputs] and keep the scale of states."""
    random = np.random.default_rng(seed)
    states, kv = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    matrices = {
        "self_attn.q_proj": (states, _HIDDEN),
        "self_attn.k_proj": (kv, _HIDDEN),
        "self_attn.v_proj": (kv, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, states),
        "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
    }

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return random.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)

    ones = np.ones(_HIDDEN, np.float32)
    # Its rows are the logits' too: of a larger scale, so that greedy tokens are far from ties.
    embeddings = matrix(vocabulary, _HIDDEN) * np.float32(8)
    tensors = {"model.embed_tokens.weight": embeddings, "model.norm.weight": ones}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = ones
        tensors[f"{prefix}post_attention_layernorm.weight"] = ones
        for name, shape in matrices.items():
            tensors[f"{prefix}{name}.weight"] = matrix(*shape)
    return tensors


def _safetensors(tensors: Mapping[str, NDArray[np.float32]]) -> bytes:
    """The bytes of a file in the safetensors format: a header of JSON, then the numbers."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return b"".join(
        [len(head).to_bytes(8, "little"), head, *(one.tobytes() for one in tensors.values())]
    )
