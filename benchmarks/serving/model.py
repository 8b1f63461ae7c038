"""A model made in code: a tokenizer of 11,025 words, a chat template, and no weights.

A word is a token, with the space before it, and the first 11,025 tokens are the words: so a text
has as many tokens as it should, and all that a mock engine makes is text. The tokenizer is a BPE
of two merges for a word, and costs what others do.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

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


def write_model(folder: Path, context_length: int) -> Path:
    """Write its files, as a worker registers them."""
    folder.mkdir(parents=True, exist_ok=True)
    made = make_tokenizer()
    (folder / "tokenizer.json").write_text(made.to_str())
    (folder / "config.json").write_text(
        json.dumps(
            {
                "max_position_embeddings": context_length,
                "eos_token_id": made.token_to_id("<|im_end|>"),
                "vocab_size": made.get_vocab_size(),
            }
        )
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )
    return folder


def words(count: int, seed: int) -> str:
    """A text of so many tokens, always the same for a seed."""
    return " " + " ".join(random.Random(seed).choices(WORDS, k=count))
