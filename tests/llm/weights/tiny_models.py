"""Tiny models of each architecture, with weights made from a seed, as folders and GGUF files."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tests.llm.weights.gguf_files import write_gguf
from tests.llm.weights.safetensors_files import write_safetensors

Floats = NDArray[np.float32]

VOCABULARY: Final = 160
HIDDEN: Final = 64
INTERMEDIATE: Final = 96
LAYERS: Final = 2
HEADS: Final = 4
KV_HEADS: Final = 2
CONTEXT: Final = 512
EOS: Final = 3

LLAMA3: Final = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GGUF_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class TinyModel:
    """A model that is like a large one in all but its size."""

    name: str
    architecture: str
    head_dim: int = 16
    is_tied: bool = True
    rope: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def config(self) -> dict[str, object]:
        """What `config.json` has."""
        classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
        return {
            "architectures": [f"{classes[self.architecture]}ForCausalLM"],
            "model_type": self.architecture,
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": self.head_dim,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": self.rope or None,
            "tie_word_embeddings": self.is_tied,
            "hidden_act": "silu",
            "torch_dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": EOS,
        }

    def tensors(self) -> dict[str, Floats]:
        """All weights, by the names that a safetensors folder has them under."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))

        def matrix(rows: int, columns: int) -> Floats:
            return random.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)

        def vector(count: int, middle: float) -> Floats:
            return (middle + random.standard_normal(count, np.float32) * 0.2).astype(np.float32)

        tensors: dict[str, Floats] = {
            "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN) * np.float32(8),
            "model.norm.weight": vector(HIDDEN, 1),
        }
        if not self.is_tied:
            tensors["lm_head.weight"] = matrix(VOCABULARY, HIDDEN) * np.float32(2)
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            tensors[f"{prefix}input_layernorm.weight"] = vector(HIDDEN, 1)
            tensors[f"{prefix}post_attention_layernorm.weight"] = vector(HIDDEN, 1)
            for name, count in heads.items():
                rows = count * self.head_dim
                tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows, HIDDEN)
                if self.architecture == "qwen2":
                    tensors[f"{prefix}self_attn.{name}_proj.bias"] = vector(rows, 0)
            if self.architecture == "qwen3":
                tensors[f"{prefix}self_attn.q_norm.weight"] = vector(self.head_dim, 1)
                tensors[f"{prefix}self_attn.k_norm.weight"] = vector(self.head_dim, 1)
            tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * self.head_dim)
            tensors[f"{prefix}mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
            tensors[f"{prefix}mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
            tensors[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        return tensors

    def write_folder(self, folder: Path, type: str = "F32") -> Path:
        """Write a folder as a model's author publishes it, less the tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 4]}))
        write_safetensors(folder / "model.safetensors", self.tensors(), type)
        return folder

    def write_gguf(self, path: Path, type: str = "F32") -> Path:
        """Write a GGUF file, less the tokenizer."""
        return write_gguf(path, self.gguf_metadata(), self.gguf_tensors(), type)

    def gguf_metadata(self) -> dict[str, object]:
        prefix = self.architecture
        metadata: dict[str, object] = {
            "general.architecture": prefix,
            f"{prefix}.block_count": LAYERS,
            f"{prefix}.context_length": CONTEXT,
            f"{prefix}.embedding_length": HIDDEN,
            f"{prefix}.feed_forward_length": INTERMEDIATE,
            f"{prefix}.attention.head_count": HEADS,
            f"{prefix}.attention.head_count_kv": KV_HEADS,
            f"{prefix}.attention.key_length": self.head_dim,
            f"{prefix}.attention.value_length": self.head_dim,
            f"{prefix}.attention.layer_norm_rms_epsilon": 1e-6,
            f"{prefix}.rope.dimension_count": self.head_dim,
            f"{prefix}.rope.freq_base": 10000.0,
            "tokenizer.ggml.eos_token_id": EOS,
            "tokenizer.ggml.eom_token_id": 4,
        }
        if self.rope.get("rope_type") == "linear":
            metadata[f"{prefix}.rope.scaling.type"] = "linear"
            metadata[f"{prefix}.rope.scaling.factor"] = self.rope["factor"]
        return metadata

    def gguf_tensors(self) -> dict[str, Floats]:
        tensors: dict[str, Floats] = {}
        for name, tensor in self.tensors().items():
            base, _, kind = name.rpartition(".")
            if base.startswith("model.layers."):
                _, _, number, base = base.split(".", 3)
                if self.architecture == "llama" and base[-6:] in ("q_proj", "k_proj"):
                    # This architecture has the numbers that rotate together side by side.
                    halves = tensor.reshape(-1, 2, self.head_dim // 2, HIDDEN)
                    tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
                tensors[f"blk.{number}.{_GGUF_NAMES[base]}.{kind}"] = tensor
            else:
                tensors[f"{_GGUF_NAMES[base]}.{kind}"] = tensor
        if self.rope.get("rope_type") == "llama3":
            tensors["rope_freqs.weight"] = self._llama3_divisors()
        return tensors

    def _llama3_divisors(self) -> Floats:
        """What each frequency is divided by, written apart from the code that is tested."""
        divisors: list[float] = []
        for pair in range(self.head_dim // 2):
            turns = 64 / (2 * np.pi) * 10000.0 ** (-2 * pair / self.head_dim)
            smooth = min(1.0, max(0.0, (turns - 1) / (4 - 1)))
            divisors.append(1 / ((1 - smooth) / 4 + smooth))
        return np.array(divisors, np.float32)


TINY_MODELS: Final = {
    model.name: model
    for model in (
        TinyModel("llama", "llama"),
        TinyModel("llama-llama3-untied", "llama", is_tied=False, rope=LLAMA3),
        TinyModel("llama-linear", "llama", rope={"rope_type": "linear", "factor": 2.0}),
        TinyModel("qwen2", "qwen2", is_tied=False),
        TinyModel("qwen3", "qwen3", head_dim=32),
    )
}
