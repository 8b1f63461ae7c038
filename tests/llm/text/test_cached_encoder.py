from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors

from dynbus.llm.text.cached_encoder import CachedEncoder, lone_tokens
from dynbus.llm.text.tokenizer import Tokenizer

from .tiny_tokenizer import sentencepiece_tokenizer, tiny_json, tiny_tokenizer

pieces = st.lists(
    st.one_of(
        st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "<|", "|>", "\n"]),
        st.text("aeT ht.12é\n", max_size=8),
        st.text(max_size=4),
    ),
    max_size=20,
).map("".join)


def changed(**parts: Any) -> Tokenizer:
    """The tiny tokenizer with other parts; a fresh one, since tokens are added to it."""
    tokenizer = Tokenizer.from_json(tiny_json())
    for name, part in parts.items():
        setattr(tokenizer.raw, name, part)
    return tokenizer


SAFE = {
    "plain": tiny_tokenizer(),
    "with a token before each text": changed(
        post_processor=processors.TemplateProcessing(
            single="<|im_start|> $A <|im_end|>",
            special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
        )
    ),
    "normalized": changed(normalizer=normalizers.NFC()),
    "words of Qwen": changed(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\s+(?!\S)|\s+|\p{L}+|\p{N}|."), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
}


@pytest.mark.parametrize("name", SAFE)
@given(texts=st.lists(pieces, min_size=1, max_size=4), special=st.booleans())
def test_the_tokens_are_those_of_the_whole_text(name: str, texts: list[str], special: bool) -> None:
    tokenizer = SAFE[name]
    encoder = CachedEncoder(tokenizer, max_bytes=2_000)

    # Each text once more, as a part of the next ones.
    for end in range(1, len(texts) + 1):
        text = "".join(texts[:end])

        assert encoder.encode(text, special=special) == tokenizer.encode(text, special=special)


def test_only_what_is_new_in_a_conversation_is_encoded() -> None:
    encoder = CachedEncoder(tiny_tokenizer())
    first = "<|im_start|>user\nThe capital of France?<|im_end|>\n<|im_start|>assistant\n"
    second = first + "Paris.<|im_end|>\n<|im_start|>user\nAnd Japan?<|im_end|>\n"

    encoder.encode(first)
    before = encoder.characters - encoder.cached_characters
    encoder.encode(second)

    new = encoder.characters - encoder.cached_characters - before
    assert before == len(first)
    assert new <= len(second) - len(first) + len("<|im_start|>assistant\n")


def test_what_is_remembered_is_bounded() -> None:
    encoder = CachedEncoder(tiny_tokenizer(), max_bytes=10_000)

    for number in range(500):
        encoder.encode(f"<|im_start|>{number} " + "text " * 20)

    assert 5_000 < encoder.size <= 10_000


def test_what_was_used_last_is_remembered_longest() -> None:
    encoder = CachedEncoder(tiny_tokenizer(), max_bytes=5_000)
    system = "<|im_start|>system\nThe capital"

    for number in range(100):
        encoder.encode(f"{system}<|im_start|>{number}")
    before = encoder.cached_characters
    encoder.encode(system)

    assert encoder.cached_characters - before == len(system)


@pytest.mark.parametrize(
    ("token", "others"),
    [
        (AddedToken("<|x|>", normalized=False, lstrip=True), []),
        (AddedToken("<|x|>", normalized=False, rstrip=True), []),
        (AddedToken("<|x|>", normalized=True), []),
        (AddedToken("aXa", normalized=False), []),
        (AddedToken("<|x|>", normalized=False), [AddedToken("<|x|>y", normalized=False)]),
        (AddedToken("<|x|>", normalized=False), [AddedToken("|>|", normalized=False)]),
    ],
)
def test_a_text_is_not_cut_at_a_token_that_may_not_stand_alone(
    token: AddedToken, others: list[AddedToken]
) -> None:
    tokenizer = Tokenizer.from_json(tiny_json())
    raw: Any = tokenizer.raw
    raw.add_special_tokens([token, *others])

    assert token.content not in lone_tokens(tokenizer)


def test_a_text_is_not_cut_where_its_place_makes_a_difference() -> None:
    prefixed = changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))

    assert lone_tokens(prefixed) == []
    assert lone_tokens(sentencepiece_tokenizer()) == []
    assert CachedEncoder(prefixed).encode("a<|im_end|>b") == prefixed.encode("a<|im_end|>b")


def test_threads_share_what_is_remembered() -> None:
    encoder = CachedEncoder(tiny_tokenizer(), max_bytes=20_000)
    texts = [
        "".join(f"<|im_start|>{number % turn} The capital of France" for number in range(40))
        for turn in range(1, 9)
    ]
    wrong: list[str] = []

    def encode(text: str) -> None:
        for _ in range(20):
            if encoder.encode(text) != tiny_tokenizer().encode(text):
                wrong.append(text)

    threads = [threading.Thread(target=encode, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert wrong == []
