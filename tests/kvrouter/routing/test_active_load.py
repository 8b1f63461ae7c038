"""Load by rank: shared blocks count once, and what ended counts no longer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing.active_load import (
    FIRST_ROOM,
    MANY,
    NO_LOAD,
    ActiveLoad,
    RankLoad,
    leading_blocks,
    leading_blocks_of_each,
)
from dynbus.kvrouter.routing.candidates import Offer

from .routing_fixtures import profile

A, B = Rank("a", 0), Rank("b", 0)
AB = Offer((profile("a"), profile("b")))
SIZE = 16


def chain(*blocks: int) -> list[int]:
    """Names of prefixes: each stands for its block and all before it."""
    return [hash(blocks[: at + 1]) for at in range(len(blocks))]


def test_blocks_that_requests_share_count_once() -> None:
    load = ActiveLoad()

    load.add("one", A, chain(1, 2, 3), 48, 0)
    load.add("two", A, chain(1, 2, 4, 5), 70, 32)

    assert load.of(A) == RankLoad(48 + 38, 5, 2)
    assert load.of(B) == NO_LOAD


def test_prefill_tokens_count_until_the_first_output() -> None:
    load = ActiveLoad()
    load.add("one", A, chain(1, 2), 32, 0)

    assert load.prefill_completed("one")
    assert load.prefill_completed("one")

    assert load.of(A) == RankLoad(0, 2, 1)


def test_a_freed_request_leaves_what_others_use() -> None:
    load = ActiveLoad()
    load.add("one", A, chain(1, 2, 3), 48, 0)
    load.add("two", A, chain(1, 2), 32, 0)

    assert load.free("one")
    assert not load.free("one")

    assert load.of(A) == RankLoad(32, 2, 1)
    assert load.columns(AB, chain(1, 2, 3)).added_blocks.tolist() == [1, 3]


def test_output_counts_in_whole_when_its_length_is_unknown() -> None:
    load = ActiveLoad()
    load.add("one", A, chain(1), 16, 0)

    load.grow("one", 40, 16)
    load.grow("one", 50, 16)

    assert load.of(A).blocks == 1 + 3


def test_output_of_an_expected_length_counts_for_what_is_still_to_come() -> None:
    load = ActiveLoad()
    load.add("one", A, chain(1), 16, 0, expected_output_tokens=128)

    load.grow("one", 32, 16)
    early = load.of(A).blocks
    load.grow("one", 200, 16)

    assert early == 1 + 2 * 0.75
    assert load.of(A).blocks == 1


@pytest.mark.parametrize("said", [-1, 0, 10**400])
def test_output_of_an_absurd_expected_length_never_counts_for_more_than_it_is(said: int) -> None:
    load = ActiveLoad()
    load.add("1", A, [1], 16, 0, said)

    load.grow("1", 1000, 16)

    assert 62.0 <= load.of(A).blocks <= 63.0


def test_an_instance_that_is_gone_takes_its_requests_along() -> None:
    load = ActiveLoad()
    load.add("one", A, chain(1), 16, 0)
    load.add("two", Rank("a", 1), chain(1), 16, 0)
    load.add("three", B, chain(1), 16, 0)

    load.remove_instance("a")

    assert len(load) == 1
    assert "three" in load
    assert load.of(A).requests == 0
    assert not load.free("one")
    assert not load.grow("two", 5, 16)
    assert not load.prefill_completed("two")


def test_an_id_is_used_once_at_a_time() -> None:
    load = ActiveLoad()
    load.add("one", A, chain(1), 16, 0)

    with pytest.raises(ValueError, match="'one' is active already"):
        load.add("one", B, chain(1), 16, 0)


PROMPTS = st.lists(st.integers(0, 1), max_size=6)
STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([A, B]), PROMPTS, st.sampled_from("afp")),
    max_size=40,
)


@settings(max_examples=200)
@given(steps=STEPS, question=PROMPTS)
def test_load_is_that_of_the_requests_that_run(
    steps: Sequence[tuple[int, Rank, list[int], str]], question: list[int]
) -> None:
    load = ActiveLoad()
    running: dict[str, tuple[Rank, list[int], int]] = {}

    for number, rank, blocks, step in steps:
        key = str(number)
        if step == "a" and key not in running:
            load.add(key, rank, chain(*blocks), 16 * len(blocks) + 3, 16)
            running[key] = (rank, chain(*blocks), max(0, 16 * len(blocks) + 3 - 16))
        elif step == "f":
            assert load.free(key) == (running.pop(key, None) is not None)
        elif step == "p" and key in running:
            load.prefill_completed(key)
            running[key] = (*running[key][:2], 0)

    asked = chain(*question)
    columns = load.columns(AB, asked)
    for at, rank in enumerate(AB.ranks):
        here = [request for request in running.values() if request[0] == rank]
        used = {block for _, blocks, _ in here for block in blocks}
        assert load.of(rank) == RankLoad(sum(one[2] for one in here), len(used), len(here))
        added = len(set(asked) - used)
        assert tuple(column[at] for column in columns) == (*load.of(rank), added)


def test_requests_whose_blocks_are_in_no_order_are_gone_with_their_ends() -> None:
    load = ActiveLoad()
    load.add("one", A, [1], 16, 0)
    load.add("two", A, [2, 1], 32, 0)

    load.free("one")
    load.free("two")

    assert load.columns(AB, [1]).added_blocks.tolist() == [1, 1]
    load.add("three", B, [1], 16, 0)
    assert load.columns(AB, [1]).added_blocks.tolist() == [1, 0]


def test_ranks_that_come_and_go_leave_the_loads_of_others_as_they_are() -> None:
    load = ActiveLoad()
    load.add("kept", A, chain(1, 2), 32, 0)
    before = [column.tolist() for column in load.columns(AB, chain(1))]

    for number in range(5 * FIRST_ROOM):
        load.add(f"{number}", Rank(f"other-{number}", 0), chain(1), 16, 0)
        load.free(f"{number}") if number % 2 else load.remove_instance(f"other-{number}")

    assert [column.tolist() for column in load.columns(AB, chain(1))] == before
    rows = load._rows  # pyright: ignore[reportPrivateUsage]
    assert len(rows) < 2 * FIRST_ROOM


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=3 * MANY),
    question=st.lists(st.integers(0, 1), max_size=9),
)
def test_what_many_hold_is_what_each_holds(
    prompts: Sequence[list[int]], question: list[int]
) -> None:
    held = [dict.fromkeys(chain(*blocks)) for blocks in prompts]
    asked = chain(*question)

    of_each = leading_blocks_of_each(held, asked)

    assert of_each == [leading_blocks(one, asked) for one in held]
