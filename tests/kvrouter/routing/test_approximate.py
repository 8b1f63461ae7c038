"""Guesses from own decisions: they last for a time, or as long as there is room."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing.caches import DEFAULT_CAPACITY, ApproximateIndex

A, B = Rank("a", 0), Rank("b", 0)


def chain(*blocks: int) -> list[int]:
    """Names of prefixes: each stands for its block and all before it."""
    return [hash(blocks[: at + 1]) % (1 << 64) for at in range(len(blocks))]


def test_a_prompt_is_held_where_it_was_sent() -> None:
    index = ApproximateIndex(ttl=120.0)

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
    index = ApproximateIndex(ttl=None)
    index.store(A, chain(1, 2, 3), 0.0, capacity=4)

    index.store(A, chain(5, 6), 1.0, capacity=4)

    assert index.reach(A, chain(1, 2, 3), 1e9) == 2
    assert index.reach(A, chain(5, 6), 1e9) == 2


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


def test_a_prompt_is_sent_again_after_its_beginning_was_known_exactly_and_lost() -> None:
    index = ApproximateIndex(ttl=5.0)
    prompt = chain(*range(10))
    index.store(A, prompt, 0.0)
    index.confirm(A, prompt, 4)

    index.store(A, prompt[:2], 0.1)
    between = index.reach(A, prompt, 0.1)
    index.store(A, prompt, 0.2)

    assert between == 2
    assert index.reach(A, prompt, 0.2) == 10


def test_what_was_known_exactly_and_is_lost_is_not_guessed_by_a_longer_prompt() -> None:
    index = ApproximateIndex(ttl=5.0)
    index.store(A, chain(1, 2), 0.0)

    index.confirm(A, chain(1, 2, 3), 3)

    assert index.reach(A, chain(1, 2, 3), 1.0) == 0


def test_ranks_that_nobody_asks_for_are_forgotten_in_their_time() -> None:
    index = ApproximateIndex(ttl=5.0)

    for number in range(1000):
        index.store(Rank(f"gone-{number}", 0), chain(1, 2, 3), float(number))

    assert len(index) == 5 * 3


def test_without_a_time_and_a_capacity_there_is_a_limit_all_the_same() -> None:
    index = ApproximateIndex(ttl=None)

    for first in range(0, 3 * DEFAULT_CAPACITY, 1000):
        index.store(A, range(first, first + 1000), 0.0)

    assert len(index) == DEFAULT_CAPACITY


def test_an_instance_that_is_gone_is_forgotten() -> None:
    index = ApproximateIndex(ttl=120.0)
    index.store(A, chain(1), 0.0)
    index.store(Rank("a", 1), chain(1), 0.0)

    index.remove_instance("a")

    assert len(index) == 0


PROMPTS = st.lists(st.integers(0, 2), max_size=5)


@settings(max_examples=200)
@given(
    stores=st.lists(st.tuples(st.integers(0, 10), PROMPTS), max_size=15),
    question=PROMPTS,
    capacity=st.integers(1, 8) | st.just(1000),
)
def test_answers_are_those_of_a_walk_over_what_was_used_last(
    stores: Sequence[tuple[int, list[int]]], question: list[int], capacity: int
) -> None:
    index = ApproximateIndex(ttl=20.0)
    used: dict[int, float] = {}
    now = 0.0

    for pause, prompt in stores:
        now += pause
        index.store(A, chain(*prompt), now, capacity=capacity)
        for block in reversed(chain(*prompt)):
            used.pop(block, None)
            used[block] = now
        for block in list(used)[: max(0, len(used) - capacity)]:
            del used[block]

    held = 0
    for block in chain(*question):
        if block not in used or used[block] + 20.0 <= now:
            break
        held += 1
    assert index.reach(A, chain(*question), now) == held


STEPS = st.one_of(
    st.tuples(st.just("store"), PROMPTS, st.integers(0, 5)),
    st.tuples(st.just("confirm"), PROMPTS, st.integers(0, 5)),
)


@settings(max_examples=500)
@given(
    steps=st.lists(STEPS, max_size=20),
    question=PROMPTS,
    start=st.integers(0, 5),
    capacity=st.integers(1, 8) | st.just(1000),
)
def test_guesses_end_where_the_exact_index_was_known_to_have_more(
    steps: Sequence[tuple[str, list[int], int]], question: list[int], start: int, capacity: int
) -> None:
    index = ApproximateIndex(ttl=20.0)
    guessed: dict[int, bool] = {}

    for kind, blocks, at in steps:
        prompt = chain(*blocks)
        at = min(at, len(prompt))
        if kind == "store":
            index.store(A, prompt, 0.0, start=at, capacity=capacity)
            for place in reversed(range(len(prompt))):
                guessed.pop(prompt[place], None)
                guessed[prompt[place]] = place >= at
            for block in list(guessed)[: max(0, len(guessed) - capacity)]:
                del guessed[block]
        else:
            index.confirm(A, prompt, at)
            guessed.update((block, False) for block in prompt[:at] if block in guessed)

    start = reached = min(start, len(question))
    for block in chain(*question)[start:]:
        if not guessed.get(block):
            break
        reached += 1
    assert index.reach(A, chain(*question), 0.0, start=start) == reached
