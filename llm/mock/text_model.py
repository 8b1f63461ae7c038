"""Files of a model that has no weights: a tokenizer and a chat template, so that a mock talks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

END: Final = "<|end|>"
_BEGIN: Final = "<|begin|>"

CONTEXT_LENGTH: Final = 8192

_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|begin|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)

_TEXT: Final = (
    "a about after all and are as at be before between blocks box but by cache can cat comes "
    "day do each engine every few find first for from gives goes good green had has have he her "
    "here hold house how I if in into is it keeps know land last light like line little long "
    "look made make many message model moon more most mountain much my never new next no not "
    "now of old on one only or other our out over paper prompt quiet rain read river road route "
    "said sea see she ship slow small so some song stands star stone stream such than that the "
    "their them then there these they thing this time to tokens train tree two under until up "
    "very wait was water way we well went were what when where which while white who will wind "
    "with without word would write years yes you your "
)
_WORDS: Final = _TEXT.split()
MOCK_TOKENS: Final = len(_WORDS) + 3
"""A mock draws of these: the words, a full stop, a comma, and the end. The ids after them are
bytes, in which it reads prompts."""

END_ID: Final = MOCK_TOKENS - 1


def write_mock_model(folder: Path) -> int:
    """Write the files of the model into a folder, which is made if need be.

    Returns:
        How many tokens there are.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    drawn = [f"\u0120{word}" for word in _WORDS]
    # What stands for bytes is there in any case; a full stop and a comma are drawn as well.
    marks = [".", ","]
    tokens = [*drawn, *marks, END, *(one for one in alphabet if one not in marks), _BEGIN]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made: Any = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False) for token in (_BEGIN, END)])
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "tokenizer.json": made.to_str(),
        "config.json": json.dumps(
            {
                "model_type": "mock",
                "max_position_embeddings": CONTEXT_LENGTH,
                "eos_token_id": END_ID,
            }
        ),
        "tokenizer_config.json": json.dumps({"eos_token": END, "chat_template": _TEMPLATE}),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return len(tokens)
