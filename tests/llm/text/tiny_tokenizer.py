"""A tokenizer made in a moment: byte-level BPE with a few merges, and ChatML's special tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from dynbus.llm.text.guarded_tokenizer import GuardedTokenizer
from dynbus.llm.text.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = [
    "The capital of France is Paris, and that of Japan is 東京.",
    "naïve café 🙂 12345",
    "stop",
]


@cache
def tiny_json() -> bytes:
    """The `tokenizer.json` of it."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=400,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[AddedToken(token, normalized=False) for token in SPECIAL],
        ),
    )
    return raw.to_str().encode()


@cache
def tiny_tokenizer() -> Tokenizer:
    """The tokenizer itself; nobody may change it."""
    return Tokenizer.from_json(
        tiny_json(),
        eos_token_ids=[2],
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    )


@cache
def tiny_guarded() -> GuardedTokenizer:
    """The same in processes of its own, as front ends have it; nobody may change it."""
    plain = tiny_tokenizer()
    return GuardedTokenizer(
        tiny_json(), eos_token_ids=plain.eos_token_ids, special_tokens=plain.special_tokens
    )


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    """One that writes a space before each word, and leaves it out at the beginning of a text."""
    raw: Any = tokenizers.Tokenizer(
        models.WordLevel({"\u2581hello": 0, "\u2581world": 1, "<s>": 2, "?": 3}, unk_token="?")
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    raw.add_special_tokens([AddedToken("<s>", normalized=False)])
    return Tokenizer(raw)
