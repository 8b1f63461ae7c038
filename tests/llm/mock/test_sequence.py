"""The next token is a function of the seed and all tokens before it, and of nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.kvrouter.hashing import block_hashes, sequence_hashes
from dynbus.llm.mock.sequence import MockSequence

prompts = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80)


def sequence(tokens: list[int], block_size: int = 8, seed: int = 0) -> MockSequence:
    return MockSequence(tokens, block_size, seed=seed)


@given(prompts, st.integers(1, 60), st.integers(0, 60), st.integers(0, 2**64 - 1))
def test_a_continued_request_has_the_same_rest(
    prompt: list[int], length: int, accepted: int, seed: int
) -> None:
    whole = sequence(prompt, seed=seed).extend(length)

    rest = sequence(prompt + whole[:accepted], block_size=16, seed=seed).extend(
        max(0, length - accepted)
    )

    assert rest == whole[accepted:]


@given(prompts, st.lists(st.integers(1, 20), max_size=6))
def test_tokens_are_hashed_like_a_prompt_of_them(prompt: list[int], counts: list[int]) -> None:
    grown = sequence(prompt)
    tokens = list(prompt)

    for count in counts:
        tokens += grown.extend(count)
        grown.hash_to(grown.length // 8)
    grown.hash_to(grown.length // 8)

    expected = block_hashes(tokens, 8)
    assert grown.length == len(tokens)
    assert grown.block_hashes == expected.tolist()
    assert grown.sequence_hashes == sequence_hashes(expected).tolist()


def test_another_seed_gives_other_tokens() -> None:
    assert sequence([1, 2, 3], seed=1).extend(8) != sequence([1, 2, 3], seed=2).extend(8)


def test_tokens_differ_and_stay_in_the_vocabulary() -> None:
    made = MockSequence([5], 8, vocabulary=50).extend(500)

    assert set(made) == set(range(50))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        sequence([])
