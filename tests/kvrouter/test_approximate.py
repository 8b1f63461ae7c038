"""Guesses from own decisions: they last for a time, or as long as there is room."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.kvrouter.approximate import ApproximateIndex
from dynbus.kvrouter.index import Rank

A, B = Rank("a", 0), Rank("b", 0)


def chain(*blocks: int) -> list[int]:
    """Names of prefixes: each stands for its block and all before it."""
    return [hash(blocks[: at + 1]) for at in range(len(blocks))]


def test_a_prompt_is_held_where_it_was_sent() -> None:
    index = ApproximateIndex()

    index.store(A, chain(1, 2, 3), 0.0)

    assert index.reach(A, chain(1, 2, 3, 4), 1.0) == 3
    assert index.reach(A, chain(1, 2, 9), 1.0) == 2
    assert index.reach(B, chain(1, 2, 3), 1.0) == 0


def test_blocks_are_gone_after_their_time_and_reuse_renews_it() -> None:
    index = ApproximateIndex(ttl=120.0)
    index.store(A, chain(1, 2, 3), 0.0)

    index.store(A, chain(1, 2), 100.0)

    assert index.reach(A, chain(1, 2, 3), 119.0) == 3
    assert index.reach(A, chain(1, 2, 3), 121.0) == 2
    assert index.reach(A, chain(1, 2, 3), 221.0) == 0
    assert len(index) == 0


def test_beyond_its_capacity_a_rank_forgets_what_was_used_the_longest_ago() -> None:
    index = ApproximateIndex(ttl=None, default_capacity=4)
    index.store(A, chain(1, 2, 3), 0.0)

    index.store(A, chain(5, 6), 1.0)

    assert index.reach(A, chain(1, 2, 3), 1e9) == 2
    assert index.reach(A, chain(5, 6), 1e9) == 2


def test_the_capacity_of_a_rank_goes_before_the_default() -> None:
    index = ApproximateIndex(default_capacity=1)

    index.store(A, chain(1, 2, 3), 0.0, capacity=2)

    assert index.reach(A, chain(1, 2, 3), 1.0) == 2


def test_guesses_go_on_from_what_is_known_exactly() -> None:
    index = ApproximateIndex(ttl=5.0)
    index.store(A, chain(1, 2, 3, 4), 0.0, start=2)

    assert index.reach(A, chain(1, 2, 3, 4), 1.0, start=2) == 4
    assert index.reach(A, chain(1, 2, 3, 4), 1.0, start=1) == 1


def test_what_the_exact_index_has_is_guessed_no_longer() -> None:
    index = ApproximateIndex(ttl=5.0)
    index.store(A, chain(1, 2, 3, 4), 0.0)

    index.confirm(A, chain(1, 2, 3, 4), 3)

    assert index.reach(A, chain(1, 2, 3, 4), 1.0, start=3) == 4
    assert index.reach(A, chain(1, 2, 3, 4), 1.0) == 0


def test_an_instance_that_is_gone_is_forgotten() -> None:
    index = ApproximateIndex()
    index.store(A, chain(1), 0.0)
    index.store(Rank("a", 1), chain(1), 0.0)

    index.remove_instance("a")

    assert len(index) == 0


PROMPTS = st.lists(st.integers(0, 2), max_size=5)


@settings(max_examples=200)
@given(
    stores=st.lists(st.tuples(st.integers(0, 10), PROMPTS), max_size=15),
    question=PROMPTS,
    capacity=st.none() | st.integers(1, 8),
)
def test_answers_are_those_of_a_walk_over_what_was_used_last(
    stores: Sequence[tuple[int, list[int]]], question: list[int], capacity: int | None
) -> None:
    index = ApproximateIndex(ttl=20.0, default_capacity=capacity)
    used: dict[int, float] = {}
    now = 0.0

    for pause, prompt in stores:
        now += pause
        index.store(A, chain(*prompt), now)
        for block in reversed(chain(*prompt)):
            used.pop(block, None)
            used[block] = now
        for block in list(used)[: max(0, len(used) - (capacity or 1000))]:
            del used[block]

    held = 0
    for block in chain(*question):
        if block not in used or used[block] + 20.0 <= now:
            break
        held += 1
    assert index.reach(A, chain(*question), now) == held
