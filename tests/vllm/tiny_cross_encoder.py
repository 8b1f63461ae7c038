"""A cross-encoder of random weights, made without a network."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ("the", "a", "cat", "dog", "sat", "on", "mat", "France", "Paris", "capital", "of", "is")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def write_tiny_cross_encoder(folder: Path) -> None:
    """Write a BERT of two layers with one label; its heads have 32 values, as vLLM's attention on
    CPUs wants."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    raw: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    fast: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        num_labels=1,
    )
    model = transformers.BertForSequenceClassification(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            # Of the usual spread, all scores would be about the same.
            torch.nn.init.normal_(weights, std=0.3)
    model.save_pretrained(folder)
