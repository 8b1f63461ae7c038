"""The cost of waiting and of work, and that the choice follows it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.routing.candidates import Candidate
from dynbus.kvrouter.routing.cost import KvCost, Popularity, RequestShape

REQUEST = RequestShape(1000, 10, np.arange(100, dtype=np.uint64))


def cost(function: KvCost | None = None, **known: Any) -> float:
    [found] = (function or KvCost())(REQUEST, [Candidate(Rank("a", 0), **known)])
    return found


def test_the_cost_is_that_of_its_formula() -> None:
    found = cost(
        overlap=Overlap(40, 0, 0, 0),
        active_prefill_tokens=500,
        active_blocks=130.0,
        added_blocks=70,
        total_blocks=1000,
    )

    assert found == pytest.approx((500 + 3 * 600) * (1 + 0.5 * 0.2) + 10 * 0.003 * 200)


def test_work_of_ones_own_counts_more_than_waiting_for_that_of_others() -> None:
    waits = cost(overlap=Overlap(50, 0, 0, 0), active_prefill_tokens=900)
    computes = cost()

    assert waits < computes


def test_a_long_queue_is_worth_computing_anew_elsewhere() -> None:
    assert cost(overlap=Overlap(50, 0, 0, 0), active_prefill_tokens=1600) > cost()


def test_blocks_on_farther_tiers_count_for_less() -> None:
    tiers = [cost(overlap=Overlap(*at)) for at in np.eye(4, dtype=int) * 10]

    assert len(set(tiers)) == 4
    assert tiers[0] == min(tiers)
    assert max(tiers) < cost()


def test_blocks_that_a_peer_can_send_count_for_less_than_ones_own_and_more_than_none() -> None:
    own, fetched = cost(overlap=Overlap(40, 0, 0, 0)), cost(peer_blocks=40)

    assert own < fetched < cost()
    assert fetched == pytest.approx(3 * (1000 - 0.5 * 400))


def test_the_way_to_another_zone_counts_as_what_could_be_computed_meanwhile() -> None:
    there = cost(overlap=Overlap(60, 0, 0, 0), hop_ms=160.0)

    # 53 blocks of 10 tokens, whose work counts three times, are less than 1,600 tokens; 54 more.
    assert there == pytest.approx(3 * 400 + 10 * 160)
    assert cost(overlap=Overlap(53, 0, 0, 0), hop_ms=160.0) > cost()
    assert cost(overlap=Overlap(54, 0, 0, 0), hop_ms=160.0) < cost()
    assert cost(KvCost(hop_weight=0.0), hop_ms=160.0) == cost()


def test_more_overlap_than_prompt_costs_nothing_more() -> None:
    assert cost(overlap=Overlap(200, 0, 0, 0)) == 0.0


def test_a_cache_that_is_about_to_be_full_is_avoided() -> None:
    almost, full = (
        cost(KvCost(slowdown=0.0), active_blocks=blocks, total_blocks=1000)
        for blocks in (900.0, 950.0)
    )

    assert full - almost == pytest.approx(10 * (50 + 0.003 * 50))


def test_an_instance_that_does_not_say_its_size_is_costed_without_it() -> None:
    assert cost(active_blocks=100.0) == pytest.approx(3 * 1000 + 10 * 0.003 * 100)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_weight_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="work_weight = "):
        KvCost(work_weight=value)


def chosen(popularity: Popularity, blocks: list[int], held: dict[str, int]) -> str:
    """Who gets a prompt of these blocks of 10 tokens."""
    request = RequestShape(10 * len(blocks), 10, np.array(blocks, dtype=np.uint64))
    candidates = [
        Candidate(Rank(name, 0), Overlap(count, 0, 0, 0), active_blocks=100.0 * (name == "a"))
        for name, count in held.items()
    ]
    request.popularity = popularity.note(request.sequence_hashes)
    costs = KvCost()(request, candidates)
    return candidates[costs.index(min(costs))].rank.instance


def test_a_prefix_that_everybody_sends_is_copied_to_who_is_free() -> None:
    popularity = Popularity()
    shared = list(range(50))

    went = [
        chosen(popularity, [*shared, 1000 + number], {"a": 50, "b": 0, "c": 0})
        for number in range(200)
    ]

    assert went[0] == "a"
    assert went[-1] != "a"


def test_the_prefix_of_one_of_many_sessions_stays_where_it_is() -> None:
    popularity = Popularity()

    went = {
        chosen(popularity, [10_000 * (turn % 100) + at for at in range(50)], {"a": 50, "b": 0})
        for turn in range(2000)
    }

    assert went == {"a"}


@pytest.mark.parametrize(("times", "gets_it"), [(2, "a"), (3, "a"), (100, "b")])
def test_in_a_large_fleet_what_came_twice_by_chance_is_not_copied(times: int, gets_it: str) -> None:
    popularity = Popularity()
    others = iter(range(1_000_000, 2_000_000, 50))
    for _ in range(1000):
        popularity.note(list(range(first := next(others), first + 50)))
    held = {"a": 50, **{f"b{number}": 0 for number in range(999)}}

    went = [chosen(popularity, list(range(50)), held) for _ in range(times)]

    assert went[-1][0] == gets_it


def test_a_prefix_of_which_there_are_enough_copies_is_not_copied_further() -> None:
    popularity = Popularity()
    shared = list(range(50))

    went: set[str] = set()
    for number in range(1000):
        blocks = shared if number % 2 else [100_000 + 50 * number + at for at in range(50)]
        held = {"a": 50, "b": 50, "c": 0, "d": 0} if number % 2 else dict.fromkeys("abcd", 0)
        name = chosen(popularity, blocks, held)
        if number % 2:
            went.add(name)

    assert went == {"b"}
