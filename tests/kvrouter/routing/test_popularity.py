"""How often a prefix begins the latest requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynbus.kvrouter.hashing import hash_prefixes
from dynbus.kvrouter.routing.cost import Popularity, next_length


def prompt(*blocks: int) -> list[int]:
    return hash_prefixes(blocks)


def test_a_prefix_that_nobody_had_before_is_not_listed() -> None:
    popularity = Popularity()

    assert popularity.note(prompt(1, 2, 3)).prefixes == []
    assert popularity.note(prompt(4, 5)).prefixes == []


def test_what_requests_share_is_counted_and_what_they_do_not_is_not() -> None:
    popularity = Popularity()
    popularity.note(prompt(1, 2, 3, 4))
    popularity.note(prompt(1, 2, 9))

    assert popularity.note(prompt(1, 2, 3, 7)).prefixes == [(1, 3), (2, 3), (3, 2)]


def test_a_prompt_without_a_complete_block_shares_nothing() -> None:
    popularity = Popularity()

    assert popularity.note(prompt()).prefixes == popularity.note(prompt()).prefixes == []


def test_what_was_last_asked_for_two_windows_ago_is_forgotten() -> None:
    popularity = Popularity(window=4)
    for _ in range(4):
        popularity.note(prompt(1))
    for number in range(8):
        popularity.note(prompt(100 + number))

    assert popularity.note(prompt(1)).prefixes == []


@given(st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=60))
def test_a_longer_prefix_is_never_more_popular_and_memory_is_bounded(
    prompts: list[list[int]],
) -> None:
    popularity = Popularity(window=8)

    for each in prompts:
        counted, found = popularity.note(prompt(*each))

        counts = [count for _, count in found]
        assert counts == sorted(counts, reverse=True)
        assert all(2 <= count <= counted <= 16 for count in counts)
        assert all(blocks <= len(each) for blocks, _ in found)


def test_the_lengths_that_are_counted_grow_without_end() -> None:
    lengths = [1]
    while lengths[-1] < 1000:
        lengths.append(next_length(lengths[-1]))

    assert all(after > before for before, after in zip(lengths, lengths[1:], strict=False))
    assert len(lengths) < 32
