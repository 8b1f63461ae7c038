"""Tokens in the process that makes them: those of `tokenizers`, whatever is remembered."""

from __future__ import annotations

import json
import signal
from functools import cache
from typing import Any

import fastokens
import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from dynbus.llm.text import tokenizing
from dynbus.llm.text.rendering import Rendering
from dynbus.llm.text.tokenizer import Tokenizer
from dynbus.llm.text.tokenizing import Chats, Texts, Tokenising, TooManyTokens

from .tiny_tokenizer import sentencepiece_tokenizer, tiny_json, tiny_tokenizer

TEXT = "The capital of France is Paris, 東京. 🙂<|im_end|>"

pieces = st.lists(
    st.one_of(
        st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "<|", "|>", "\n"]),
        st.sampled_from(["<|x|>", " <|x|> ", "a<|x|>b", "aXaXa", "<|x|>y"]),
        st.text("aeT ht.12é\n", max_size=8),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    ),
    max_size=20,
).map("".join)


def changed(*added: AddedToken, **parts: Any) -> Tokenizer:
    """The tiny tokenizer with other parts; a fresh one, since tokens are added to it."""
    tokenizer = Tokenizer.from_json(tiny_json())
    raw: Any = tokenizer.raw
    raw.add_special_tokens(list(added))
    for name, part in parts.items():
        setattr(tokenizer.raw, name, part)
    return tokenizer


KINDS = {
    "plain": tiny_tokenizer(),
    "of SentencePiece": sentencepiece_tokenizer(),
    "with a token before each text": changed(
        post_processor=processors.TemplateProcessing(
            single="<|im_start|> $A <|im_end|>",
            special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
        )
    ),
    "normalized": changed(normalizer=normalizers.NFC()),
    "a space before each text": changed(
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "words of Qwen": changed(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\s+(?!\S)|\s+|\p{L}+|\p{N}|."), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "a token that takes the spaces before it": changed(
        AddedToken("<|x|>", normalized=False, lstrip=True)
    ),
    "a token that takes the spaces behind it": changed(
        AddedToken("<|x|>", normalized=False, rstrip=True)
    ),
    "a token that is looked for in normalized text": changed(AddedToken("<|x|>", normalized=True)),
    "a token that overlaps with itself": changed(AddedToken("aXa", normalized=False)),
    "tokens that begin alike": changed(
        AddedToken("<|x|>", normalized=False), AddedToken("<|x|>y", normalized=False)
    ),
    "a token that is a word": changed(AddedToken("<|x|>", normalized=False, single_word=True)),
}


@cache
def tokenising(kind: str) -> Tokenising:
    return Tokenising(KINDS[kind].to_json(), cache_bytes=2_000)


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(pieces, min_size=1, max_size=4), special=st.booleans())
def test_the_tokens_are_those_of_the_other_library(
    kind: str, texts: list[str], special: bool
) -> None:
    # Each text once more, as a part of the next ones.
    longer = ["".join(texts[:end]) for end in range(1, len(texts) + 1)]

    answer = tokenising(kind).answer(Texts(longer, special, 10.0))

    assert answer.ids == [KINDS[kind].encode(text, special=special) for text in longer]


SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+|zz"
)


@pytest.mark.parametrize("text", ["'\u017fx", " \u180eb", "\u180e\u180eb"])
def test_a_character_that_patterns_cut_otherwise_is_cut_as_by_the_other_library(text: str) -> None:
    ((whole, _),) = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    # All of the text becomes one token wherever it is not cut.
    merges = [(whole[:end], whole[end]) for end in range(1, len(whole))]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {one: n for n, one in enumerate([*letters, *map("".join, merges)])}
    made: Any = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    here = Tokenising(made.to_str().encode(), cache_bytes=2_000)
    assert here.is_fast

    answer = here.answer(Texts([text, "plain"], False, 10.0))

    assert answer.ids == [made.encode(one, add_special_tokens=False).ids for one in (text, "plain")]


def test_the_time_of_what_fails_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Tokenising(KINDS["plain"].to_json())
    broken = Rendering("{{ messages }}", [msgspec.Raw(b"[1")], 5.0)

    (chat,) = here.answer(Chats(broken, 5.0)).chats

    assert chat.failed is not None
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0
    monkeypatch.setattr(tokenizing, "MOST_TOKENS", -1000)
    with pytest.raises(TooManyTokens):
        here.answer(Texts(["a"], False, 5.0))
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


def test_the_faster_library_knows_the_usual_kinds() -> None:
    slow = {kind for kind in KINDS if not tokenising(kind).is_fast}

    assert slow <= {"of SentencePiece", "a token that is a word"}


def test_a_tokenizer_for_which_the_faster_library_has_other_tokens_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letters = json.loads(tiny_json())
    letters["model"]["merges"] = []
    other = fastokens.Tokenizer.from_json_str(json.dumps(letters))

    class Other:
        @staticmethod
        def from_json_str(_: str) -> fastokens.Tokenizer:
            return other

    monkeypatch.setattr(fastokens, "Tokenizer", Other)
    made = Tokenising(tiny_json())

    assert not made.is_fast
    ids = made.answer(Texts([TEXT], False, 10.0)).ids
    assert ids == [tiny_tokenizer().encode(TEXT, special=False)]
