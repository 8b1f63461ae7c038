"""A model of random weights that sees pictures, made without a network."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from tests.vllm.tiny_model import CORPUS, SPECIAL, VOCABULARY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EDGE = 56
"""Pixels of a side of what it sees; 16 patches, of which four become a token."""

OF_PICTURES = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def write_vision_model(folder: Path | str) -> None:
    """Write an Idefics 3 of two layers, for which vLLM needs nothing but Pillow."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    processors: Any = importlib.import_module(
        "transformers.models.idefics3.image_processing_pil_idefics3"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIAL, *OF_PICTURES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text * 20 for text in CORPUS], trainer)
    fast: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        additional_special_tokens=[OF_PICTURES[0]],
        extra_special_tokens={"image_token": OF_PICTURES[0]},
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = transformers.LlamaConfig(
        **shape,
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=fast.eos_token_id,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    config = transformers.Idefics3Config(
        vision_config={**shape, "image_size": EDGE, "patch_size": 14},
        text_config=text.to_dict(),
        image_token_id=fast.convert_tokens_to_ids(OF_PICTURES[0]),
        scale_factor=2,
        pad_token_id=0,
    )
    model = transformers.Idefics3ForConditionalGeneration(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            # Of the usual spread, greedy output would always be the same token.
            torch.nn.init.normal_(weights, std=0.2)
    model.save_pretrained(folder)
    processor = transformers.Idefics3Processor(
        image_processor=processors.Idefics3ImageProcessorPil(
            size={"longest_edge": EDGE},
            max_image_size={"longest_edge": EDGE},
            do_image_splitting=False,
        ),
        tokenizer=fast,
        image_seq_len=4,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)


if __name__ == "__main__":
    write_vision_model(Path(sys.argv[1]))
