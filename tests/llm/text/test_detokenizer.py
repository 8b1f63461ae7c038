from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import InvalidResponse
from dynbus.llm.text.detokenizer import MAX_PENDING, Detokenizer
from dynbus.llm.text.tokenizer import Tokenizer

from .first_stop import cut_at_first
from .tiny_tokenizer import sentencepiece_tokenizer, tiny_tokenizer


def pieces_of(detokenizer: Detokenizer, ids: list[int], together: int = 1) -> list[str]:
    pushed = [
        detokenizer.push(ids[start : start + together]) for start in range(0, len(ids), together)
    ]
    return [*pushed, detokenizer.flush()]


@cache
def byte_of(byte: int) -> int:
    """The token of a byte that is no character by itself."""
    tokenizer = tiny_tokenizer()
    (found,) = [
        index
        for index in range(tokenizer.vocabulary_size)
        if tokenizer.token_bytes(index) == bytes([byte])
    ]
    return found


tokens = st.lists(st.integers(0, tiny_tokenizer().vocabulary_size - 1), max_size=80)
short = st.text("aeT ht.", min_size=1, max_size=4)


@given(st.text(max_size=60), st.integers(1, 5))
def test_the_pieces_of_any_text_are_the_text(text: str, together: int) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)

    pieces = pieces_of(Detokenizer(tokenizer), ids, together)

    assert "".join(pieces) == tokenizer.decode(ids)


@given(tokens, st.integers(1, 5))
def test_the_pieces_of_any_tokens_are_the_text_of_all(ids: list[int], together: int) -> None:
    tokenizer = tiny_tokenizer()

    pieces = pieces_of(Detokenizer(tokenizer), ids, together)

    assert "".join(pieces) == tokenizer.decode(ids)


@given(st.text("aeT ht.é", max_size=60), st.lists(short, max_size=4), st.integers(1, 5))
def test_the_pieces_are_the_text_before_the_first_stop_string(
    text: str, stop: list[str], together: int
) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, stop=stop)

    pieces = pieces_of(detokenizer, ids, together)

    assert "".join(pieces) == cut_at_first(text, stop)
    assert (detokenizer.stopped is not None) == any(string in text for string in stop)


def test_a_character_of_several_tokens_comes_whole() -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    ids = [byte_of(byte) for byte in "€".encode()]

    pieces = [detokenizer.push([token_id]) for token_id in ids]

    assert pieces == ["", "", "€"]


def test_a_character_that_was_never_complete_comes_at_the_end_as_what_it_is() -> None:
    detokenizer = Detokenizer(tiny_tokenizer())

    pieces = pieces_of(detokenizer, [byte_of(byte) for byte in "€".encode()[:2]])

    assert pieces == ["", "", "\N{REPLACEMENT CHARACTER}"]


def test_what_comes_after_a_stop_string_is_not_given_out() -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer, stop=["stop"])

    text = detokenizer.push(tokenizer.encode("one stop and more"))

    assert (text, detokenizer.stopped) == ("one ", "stop")
    assert detokenizer.push(tokenizer.encode(" and more")) + detokenizer.flush() == ""


def test_special_tokens_are_no_text_unless_they_are_asked_for() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a<|im_end|>b")

    texts = [
        "".join(pieces_of(Detokenizer(tokenizer, special=special), ids))
        for special in (False, True)
    ]

    assert texts == ["ab", "a<|im_end|>b"]


def test_bytes_that_are_no_character_are_not_kept_for_ever() -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    broken = byte_of(0x80)

    text = detokenizer.push([broken] * (10 * MAX_PENDING))

    assert len(text) > 8 * MAX_PENDING
    assert len(text + detokenizer.flush()) == 10 * MAX_PENDING


def test_bytes_that_are_no_character_do_not_break_the_one_that_follows_them() -> None:
    tokenizer = tiny_tokenizer()
    ids = [byte_of(0x80)] * (MAX_PENDING - 1) + [byte_of(byte) for byte in "€".encode()]

    pieces = pieces_of(Detokenizer(tokenizer), ids)

    assert "".join(pieces) == tokenizer.decode(ids)


def test_an_output_goes_on_where_the_prompt_ends() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("hello world")

    begun = "".join(pieces_of(Detokenizer(tokenizer), ids[1:]))
    continued = "".join(pieces_of(Detokenizer(tokenizer, ids[:1]), ids[1:]))

    assert (begun, continued) == ("world", " world")


def test_a_prompt_that_ends_within_a_character_is_not_given_out() -> None:
    detokenizer = Detokenizer(tiny_tokenizer(), [*tiny_tokenizer().encode("one"), byte_of(0xE2)])

    text = detokenizer.push(tiny_tokenizer().encode("two"))

    assert text == "two"


@pytest.mark.parametrize("token_id", [-1, 2**40])
def test_what_is_no_token_id_is_refused_by_what_it_is(token_id: int) -> None:
    with pytest.raises(InvalidResponse, match=str(token_id)):
        Detokenizer(tiny_tokenizer()).push([token_id])


def test_a_token_id_of_no_token_is_no_text() -> None:
    tokenizer: Tokenizer = tiny_tokenizer()
    unknown = tokenizer.vocabulary_size + 5

    pieces = pieces_of(Detokenizer(tokenizer), [*tokenizer.encode("a"), unknown])

    assert "".join(pieces) == "a"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(tiny_tokenizer(), stop=[""])


def test_special_tokens_that_are_shown_are_text_and_others_are_not() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a<|im_end|>é<|im_start|>b")

    pieces = pieces_of(Detokenizer(tokenizer, shown=["<|im_start|>", "no token", "a"]), ids)

    assert "".join(pieces) == "aé<|im_start|>b"


def test_a_character_that_a_shown_token_cuts_off_comes_before_it() -> None:
    tokenizer = tiny_tokenizer()
    (marker,) = tokenizer.encode("<|im_start|>", special=False)
    ids = [byte_of(0xE2), marker, *tokenizer.encode("é")]

    pieces = pieces_of(Detokenizer(tokenizer, shown=["<|im_start|>"]), ids)

    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}<|im_start|>é"


def test_a_stop_string_is_found_in_a_token_that_is_shown() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a<|im_start|>b")

    detokenizer = Detokenizer(tokenizer, stop=["im_start"], shown=["<|im_start|>"])

    assert ("".join(pieces_of(detokenizer, ids)), detokenizer.stopped) == ("a<|", "im_start")
