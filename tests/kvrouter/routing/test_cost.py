"""Costs are Dynamo's, worked out by hand, and the choice among them is fair."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import numpy as np
import pytest

from dynbus.kvrouter.hashing import block_hashes, sequence_hashes
from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.routing.candidates import Candidate
from dynbus.kvrouter.routing.cost import DynamoCost, RequestShape, choose


def shape(prompt_tokens: int, block_size: int = 16) -> RequestShape:
    return RequestShape.of(np.arange(prompt_tokens, dtype=np.uint32), block_size)


def candidate(
    *overlap: int, prefill: int = 0, active: float = 0, added: int = 0, requests: int = 0
) -> Candidate:
    tiers = Overlap(*(*overlap, 0, 0, 0, 0)[:4])
    return Candidate(Rank("a", 0), tiers, prefill, active, added, requests)


def test_the_published_example_of_dynamo_costs_18_10_and_11() -> None:
    candidates = [
        candidate(2, active=10),
        candidate(5, active=5),
        candidate(8, active=9),
    ]

    costs = DynamoCost()(shape(160), candidates)

    assert costs == [18, 10, 11]


def test_tiers_count_for_less_the_farther_they_are() -> None:
    candidates = [candidate(4), candidate(0, 4), candidate(0, 0, 4), candidate(0, 0, 0, 4)]

    costs = DynamoCost()(shape(160), candidates)

    assert costs == [6, 7, 9, 8]


def test_an_incomplete_block_and_active_prefill_tokens_count_in_fractions_of_a_block() -> None:
    assert DynamoCost()(shape(24), [candidate(prefill=40)]) == [4.0]


def test_prefill_left_is_never_negative() -> None:
    assert DynamoCost()(shape(32), [candidate(5, active=3)]) == [3]


def test_the_credit_halves_at_one_request_of_excess_prefill_with_decay_1() -> None:
    candidates = [candidate(8, prefill=160 + 320), candidate(8, prefill=320)]

    costs = DynamoCost(overlap_credit_decay=1.0)(shape(160), candidates)

    assert costs == [(480 + 160) / 16 - 4, (320 + 160) / 16 - 8]


def test_every_weight_has_its_place() -> None:
    cost = DynamoCost(
        overlap_credit=0.5,
        host_credit=0.25,
        disk_credit=0.125,
        external_credit=1.0,
        prefill_scale=3.0,
        active_request_weight=2.0,
    )

    costs = cost(shape(160), [candidate(2, 4, 8, 1, active=7, added=5, requests=6)])

    assert costs == [3.0 * (10 - 1 - 1 - 1 - 1) + 7 + 5 + 12]


def test_an_empty_prompt_has_a_cost() -> None:
    assert DynamoCost(overlap_credit_decay=1.0)(shape(0), [candidate(active=2)]) == [2]


@pytest.mark.parametrize("weight", [-0.5, math.inf, math.nan])
def test_a_weight_that_makes_no_sense_is_refused_by_name(weight: float) -> None:
    with pytest.raises(ValueError, match="disk_credit"):
        DynamoCost(disk_credit=weight)


def test_the_lowest_cost_is_chosen_and_equal_ones_equally_often() -> None:
    random = Random(1)

    chosen = Counter(choose(np.array([2.0, 1.0, 1.0, math.inf]), 0.0, random) for _ in range(1000))

    assert set(chosen) == {1, 2}
    assert 400 < chosen[1] < 600


def test_a_temperature_chooses_by_the_softmax_of_the_costs_over_their_range() -> None:
    random = Random(1)

    chosen = Counter(
        choose(np.array([0.0, 50.0, 100.0, math.inf]), 0.5, random) for _ in range(20000)
    )

    weights = [1.0, math.exp(-1.0), math.exp(-2.0)]
    for at, weight in enumerate(weights):
        assert chosen[at] / 20000 == pytest.approx(weight / sum(weights), abs=0.015)
    assert chosen[3] == 0


def test_equal_costs_at_a_temperature_are_chosen_equally_often() -> None:
    random = Random(1)

    chosen = Counter(choose(np.array([7.0, 7.0, math.inf]), 0.5, random) for _ in range(1000))

    assert set(chosen) == {0, 1}
    assert 400 < chosen[0] < 600


@pytest.mark.parametrize("costs", [[], [math.inf, math.inf]])
def test_nothing_is_chosen_when_there_is_nothing_to_choose(costs: list[float]) -> None:
    assert choose(np.array(costs), 0.0, Random(1)) is None
    assert choose(np.array(costs), 1.0, Random(1)) is None


def test_a_shape_has_the_hashes_of_its_complete_blocks_with_the_adapter_in_them() -> None:
    tokens = list(range(40))

    made = RequestShape.of(tokens, 16, lora_name="sql", salt="tenant")

    expected = block_hashes(tokens, 16, lora_name="sql", salt="tenant")
    assert made.block_hashes.tolist() == expected.tolist()
    assert made.sequence_hashes == sequence_hashes(expected).tolist()
    assert (made.prompt_tokens, made.prompt_blocks) == (40, 3)
