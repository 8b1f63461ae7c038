"""A model of 330 KB with random weights and a tokenizer of its own, made without a network."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog ",
    "hello world, this is a tiny tokenizer 0123456789",
)
VOCABULARY = 512
RANK = 8


def write_tiny_model(folder: Path) -> None:
    """Write a Qwen 3 of two layers; its heads have 32 values, as vLLM's attention on CPUs wants."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text * 20 for text in CORPUS], trainer)
    fast: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=fast.eos_token_id,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            # Of the usual spread, greedy output would always be the same token.
            torch.nn.init.normal_(weights, std=0.2)
    model.save_pretrained(folder)


def write_tiny_adapter(folder: Path, seed: int) -> None:
    """Write a LoRA adapter of the model that changes what it says."""
    safetensors: Any = importlib.import_module("safetensors.numpy")
    generator = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for layer in range(2):
        for name, outputs in (("q_proj", 128), ("v_proj", 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, 64)), ("lora_B", (outputs, RANK))):
                tensors[f"{at}.{part}.weight"] = generator.normal(0.0, 0.5, shape).astype("float32")
    folder.mkdir(parents=True)
    safetensors.save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write_tiny_model(Path(sys.argv[1]))
