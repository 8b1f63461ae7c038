"""A model made in code: a tokenizer of 11,025 words, a chat template, and weights by chance.

A word is a token, with the space before it, and the first 11,025 tokens are the words: so a text
has as many tokens as it should, and all that a mock engine makes is text. The tokenizer is a BPE
of two merges for a word, and costs what others do.

Engines that compute have two layers of the Llama family: its words mean nothing, and a prompt of
2,048 tokens takes them a tenth of a second or more.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

NAME = "bench"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SYLLABLES = ["".join(pair) for pair in product("bcdfghjklmnpqrstvwxyz", "aeiou")]
WORDS = ["".join(pair) for pair in product(_SYLLABLES, repeat=2)]
VOCABULARY = len(WORDS)


@dataclass(frozen=True)
class Size:
    """How large a model is, by the names of the Llama family."""

    layers: int = 2
    hidden: int = 128
    intermediate: int = 256
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64


def make_tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer; token i is the word i with a space before it."""
    space = "Ġ"  # how byte-level tokenizers write one
    tokens = [space + word for word in WORDS]
    tokens += [*WORDS, *_SYLLABLES, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [(syllable[0], syllable[1]) for syllable in _SYLLABLES]
    merges += [(word[:2], word[2:]) for word in WORDS]
    merges += [(space, word) for word in WORDS]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made: Any = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return made  # type: ignore[no-any-return]


def write_model(folder: Path, context_length: int, size: Size | None = None) -> Path:
    """Write its files, as a worker registers them."""
    size = size or Size()
    folder.mkdir(parents=True, exist_ok=True)
    made = make_tokenizer()
    (folder / "tokenizer.json").write_text(made.to_str())
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "max_position_embeddings": context_length,
                "eos_token_id": made.token_to_id("<|im_end|>"),
                "vocab_size": made.get_vocab_size(),
                "hidden_size": size.hidden,
                "intermediate_size": size.intermediate,
                "num_hidden_layers": size.layers,
                "num_attention_heads": size.heads,
                "num_key_value_heads": size.kv_heads,
                "head_dim": size.head_dim,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
                "hidden_act": "silu",
            }
        )
    )
    _write_weights(folder / "model.safetensors", made.get_vocab_size(), size)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "chat_template": TEMPLATE,
            }
        )
    )
    return folder


def _write_weights(path: Path, vocabulary: int, size: Size) -> None:
    """Write weights by chance, the same each time, as a safetensors file has them."""
    hidden, intermediate = size.hidden, size.intermediate
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    shapes = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,)}
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm": (hidden,),
            f"{prefix}.post_attention_layernorm": (hidden,),
            f"{prefix}.self_attn.q_proj": (queries, hidden),
            f"{prefix}.self_attn.k_proj": (keys, hidden),
            f"{prefix}.self_attn.v_proj": (keys, hidden),
            f"{prefix}.self_attn.o_proj": (hidden, queries),
            f"{prefix}.mlp.gate_proj": (intermediate, hidden),
            f"{prefix}.mlp.up_proj": (intermediate, hidden),
            f"{prefix}.mlp.down_proj": (hidden, intermediate),
        }
    drawn = np.random.default_rng(1)
    header: dict[str, Any] = {}
    contents: list[bytes] = []
    end = 0
    for name, shape in shapes.items():
        weights = drawn.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        contents.append((weights if len(shape) > 1 else 1 + weights).astype("<f4").tobytes())
        begin, end = end, end + len(contents[-1])
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(contents))


def words(count: int, seed: int) -> str:
    """A text of so many tokens, always the same for a seed."""
    return " " + " ".join(random.Random(seed).choices(WORDS, k=count))
