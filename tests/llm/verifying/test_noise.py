"""The noise of an engine, and what differs by more."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.verifying.budget import SAVED, TimeBudget
from dynbus.llm.verifying.noise import (
    MEASURES,
    OTHER,
    SAME,
    Bounds,
    Difference,
    Noise,
    differences,
    logits_difference,
)

EPSILON = 2.0**-23


def blocks(seed: int = 1) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((3, 8, 2, 2, 4)).astype(np.float32)


def test_the_bounds_are_a_multiple_of_the_largest_noise() -> None:
    noise = Noise(EPSILON, 8.0)
    for at in range(MEASURES):
        assert not noise.is_known
        noise.note([Difference(0.01 * at, 0.1 * at), SAME], 0.001 * at)

    assert noise.is_known
    assert noise.bounds == Bounds(0.16, 1.6, 0.016)


def test_what_is_not_finite_is_no_measure_of_noise() -> None:
    noise = Noise(EPSILON, 8.0)

    taken = [noise.note([SAME, OTHER], 0.0), noise.note([SAME], math.inf)]
    taken += [noise.note([Difference(0.01, 0.1)], 0.001) for _ in range(MEASURES - 1)]
    assert not noise.is_known
    taken.append(noise.note([], 0.0))

    assert taken == [False, False, *[True] * MEASURES]
    assert noise.is_known
    assert noise.bounds == Bounds(0.08, 0.8, 0.008)
    assert not noise.bounds.allow(OTHER)


def test_an_engine_without_noise_is_judged_by_its_bits_until_others_give_it_blocks() -> None:
    noise = Noise(0.0, 8.0)

    assert noise.is_known
    assert noise.bounds == Bounds(0.0, 0.0, 0.0)
    noise.admit_others()
    assert noise.bounds == Bounds(1e-5, 1e-4, 1e-5)


@given(st.integers(0, 2), st.integers(0, 127), st.integers(0, 31))
def test_each_bit_of_a_block_is_a_difference_where_bits_count(
    block: int, word: int, bit: int
) -> None:
    right = blocks()
    wrong = right.copy()
    wrong[block].reshape(-1).view(np.uint32)[word] ^= np.uint32(1 << bit)

    told = differences(wrong, right, exactly=True)

    assert [each == OTHER for each in told] == [at == block for at in range(3)]


def test_other_contents_are_apart_by_about_their_own_size_and_noise_is_not() -> None:
    right = blocks()
    noisy = right * np.float32(1 + 1e-6)
    other = blocks(2)

    assert all(
        each.norm < 2e-6 and each.peak < 1e-5 for each in differences(noisy, right, exactly=False)
    )
    assert all(each.norm > 1 and each.peak > 1 for each in differences(other, right, exactly=False))


def test_what_is_no_number_is_another() -> None:
    wrong = blocks()
    wrong[0, 0, 0, 0, 0] = math.nan
    wrong[1, 0, 0, 0, 0] = math.inf
    wrong[2, 0, 0, 0, 0] = 3e38

    assert differences(wrong, blocks(), exactly=False)[:2] == [OTHER, OTHER]
    assert differences(wrong, blocks(), exactly=False)[2].peak > 1e30
    row = np.array([1.0, 2.0], np.float32)
    assert logits_difference(row * np.float32(math.nan), row, exactly=False) == math.inf


def test_logits_are_compared_in_terms_of_their_range() -> None:
    computed = np.array([-1.0, 0.0, 3.0], np.float32)
    drawn = np.array([-1.0, 0.5, 3.0], np.float32)

    assert logits_difference(drawn, computed, exactly=False) == 0.125
    assert logits_difference(drawn, computed, exactly=True) == math.inf
    assert logits_difference(computed.copy(), computed, exactly=True) == 0.0


@given(
    st.floats(0.001, 1.0),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 2)), min_size=1, max_size=50),
)
def test_work_takes_no_more_than_its_share_but_for_the_last_piece(
    share: float, pieces: list[tuple[float, float]]
) -> None:
    now = spent = longest = 0.0
    budget = TimeBudget(share, now)
    for pause, seconds in pieces:
        now += max(pause, budget.wait(now))
        assert spent <= share * now + longest + 1e-6
        now += seconds
        budget.spend(seconds, now)
        spent += seconds
        longest = max(longest, seconds)


def test_what_is_saved_up_is_bounded() -> None:
    budget = TimeBudget(0.5, 0.0)
    budget.spend(SAVED, 1e6)
    budget.spend(1.0, 1e6)

    assert budget.wait(1e6) == 4.0


def test_a_piece_begins_when_as_much_is_saved_as_the_last_one_took() -> None:
    budget = TimeBudget(0.01, 0.0)
    spent = 0.0
    now = 0.0
    while now < 1000.0:
        now += budget.wait(now) + 0.5
        budget.spend(0.5, now)
        spent += 0.5

    assert 0.009 * now <= spent <= 0.01 * now + 0.5
