"""Tokens are drawn as `Sampling` says, by a plain reference, and the same again elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from time import thread_time

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynbus.llm.engine import EngineLimits
from dynbus.llm.engine.requests import check_request
from dynbus.llm.engine.sampling import (
    LEAST_LOGPROB,
    Sampler,
    candidates,
    draw_tokens,
    token_logprob,
    uniform,
)
from dynbus.llm.generation import GenerateRequest, Sampling

Floats = NDArray[np.float32]


def row(*logits: float) -> Floats:
    return np.array(logits, dtype=np.float32)


def draw(logits: Floats, sampler: Sampler, position: int = 0) -> int:
    [drawn] = draw_tokens(logits[np.newaxis], [sampler], [position])
    assert drawn is not None
    return drawn.token_id


def likely(logits: Floats, **sampling: float) -> dict[int, float]:
    """The probability of each token that can be drawn."""
    found = candidates(logits, Sampling(**sampling))  # type: ignore[arg-type]
    assert found is not None
    ids, weights = found
    numbers = range(len(weights)) if ids is None else ids.tolist()
    whole = float(weights.sum(dtype=np.float64))
    return {each: float(weight) / whole for each, weight in zip(numbers, weights, strict=True)}


class RoundingDecides(Exception):
    """The reference cannot say where a cut is."""


def plainly(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """The same, told step by step."""
    scaled = [logit / sampling.temperature for logit in logits]
    kept = list(range(len(scaled)))
    if 0 < sampling.top_k < len(scaled):
        least = sorted(scaled, reverse=True)[sampling.top_k - 1]
        kept = [each for each in kept if scaled[each] >= least]
    weights = {each: math.exp(scaled[each] - max(scaled)) for each in kept}
    if sampling.top_p < 1.0:
        wanted = sampling.top_p * sum(weights.values())
        reached, nucleus = 0.0, list[int]()
        for each in sorted(kept, key=lambda each: (-scaled[each], each)):
            if reached >= wanted:
                break
            nucleus.append(each)
            reached += weights[each]
            if abs(reached - wanted) < 1e-5:
                raise RoundingDecides
        weights = {each: weights[each] for each in sorted(nucleus)}
    if sampling.min_p:
        if any(abs(weight - sampling.min_p) < 1e-5 for weight in weights.values()):
            raise RoundingDecides
        weights = {each: weight for each, weight in weights.items() if weight >= sampling.min_p}
    whole = sum(weights.values())
    return {each: weight / whole for each, weight in weights.items()}


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from((0.25, 0.5, 1.0, 2.0)),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1.0),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)


@given(st.lists(st.integers(-12, 12), min_size=1, max_size=300), samplings)
def test_the_tokens_that_may_be_drawn_are_those_of_a_plain_reference(
    quarters: list[int], sampling: Sampling
) -> None:
    logits = [each / 4 for each in quarters]

    found = candidates(row(*logits), sampling)

    assert found is not None
    ids, weights = found
    try:
        expected = plainly(logits, sampling)
    except RoundingDecides:
        reject()
    assert (list(range(len(logits))) if ids is None else ids.tolist()) == list(expected)
    assert weights / weights.sum() == pytest.approx(list(expected.values()), rel=1e-4)


@given(st.integers(1, 100), st.floats(0.5, 0.999), st.integers(0, 2**32 - 1))
def test_a_large_vocabulary_is_cut_as_a_small_one(top_k: int, top_p: float, seed: int) -> None:
    logits = (np.random.default_rng(seed).normal(size=5000) * 4).astype(np.float32)
    by_rank = np.argsort(-logits, kind="stable")

    of_k = likely(logits, top_k=top_k)
    of_p = likely(logits, top_p=top_p)

    assert set(of_k) == set(by_rank[:top_k].tolist())
    assert set(of_p) == set(by_rank[: len(of_p)].tolist())
    everything = likely(logits)
    mass = [everything[each] for each in by_rank[: len(of_p)].tolist()]
    assert sum(mass[:-1]) < top_p + 1e-6
    assert sum(mass) > top_p - 1e-6


def test_all_that_are_as_likely_as_the_last_of_top_k_may_be_drawn() -> None:
    assert set(likely(row(3, 1, 2, 2, 2), top_k=2)) == {0, 2, 3, 4}


def test_of_equally_likely_tokens_top_p_takes_the_first() -> None:
    assert set(likely(np.zeros(2000, dtype=np.float32), top_p=0.25)) == set(range(500))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=3),
        Sampling(temperature=0.6),
        Sampling(top_k=5),
        Sampling(top_p=0.8),
        Sampling(min_p=0.1),
        Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling: Sampling) -> None:
    logits = (np.random.default_rng(4).normal(size=40) * 2).astype(np.float32)
    expected = plainly(logits.tolist(), sampling)
    sampler, draws = Sampler(sampling, seed=11), 4000

    counts = Counter(draw(logits, sampler, position) for position in range(draws))

    assert set(counts) <= set(expected)
    rare = {each for each, part in expected.items() if part * draws < 5}
    chi2 = sum(
        (counts[each] - part * draws) ** 2 / (part * draws)
        for each, part in expected.items()
        if each not in rare
    )
    freedom = len(expected) - len(rare)
    # Chi-square is near normal: five standard deviations.
    assert chi2 < freedom + 5.0 * math.sqrt(2.0 * freedom)


def test_a_large_vocabulary_is_drawn_as_often_as_it_is_likely() -> None:
    logits = (np.random.default_rng(4).normal(size=20_000) * 2).astype(np.float32)
    sampler, draws = Sampler(Sampling(), seed=5), 1500

    drawn = [draw(logits, sampler, position) for position in range(draws)]

    ranks = np.argsort(np.argsort(-logits))
    order = np.argsort(-logits)
    probability = np.exp(logits[order].astype(np.float64))
    before = np.cumsum(probability) / probability.sum()
    # Where each lies in the sum of all is uniform, if they are drawn as they should be.
    tenths = Counter(min(9, int(before[ranks[each]] * 10)) for each in drawn)
    assert sum((tenths[each] - draws / 10) ** 2 / (draws / 10) for each in range(10)) < 35


# Greedy, and what has no numbers ----------------------------------------------------------


def test_greedy_takes_the_likeliest_and_of_several_the_first() -> None:
    logits = np.stack([row(1, 5, 2), row(7, 7, 7), row(-1, -3, -1)])
    samplers = [Sampler(Sampling(temperature=0.0), seed=0) for _ in logits]

    drawn = draw_tokens(logits, samplers, [0, 0, 0])

    assert [each.token_id for each in drawn if each is not None] == [1, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_no_number_is_never_drawn(temperature: float) -> None:
    logits = np.stack([row(math.nan, 1, 2), row(0, math.nan, -math.inf)])
    samplers = [Sampler(Sampling(temperature=temperature, top_k=1), seed=0) for _ in logits]

    drawn = draw_tokens(logits, samplers, [0, 0])

    assert [each.token_id for each in drawn if each is not None] == [2, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_numbers_has_no_token_and_others_have_theirs(temperature: float) -> None:
    logits = np.stack([np.full(3, math.nan), np.full(3, -math.inf), row(0, 9, 0)])
    samplers = [Sampler(Sampling(temperature=temperature, top_k=1), seed=0) for _ in logits]

    drawn = draw_tokens(logits.astype(np.float32), samplers, [0, 0, 0])

    assert [each and each.token_id for each in drawn] == [None, None, 1]


def test_an_infinite_logit_is_certain() -> None:
    logits = row(1, math.inf, 3, math.inf)

    assert likely(logits, temperature=0.5, top_p=0.9) == {1: 0.5, 3: 0.5}


EXTREMES = st.sampled_from([1e-320, 1e-46, 1e-30, 0.5, 1.0, 1e30, 1e39, 1e308])


@given(
    temperature=st.just(0.0) | EXTREMES,
    top_k=st.sampled_from([0, 1, 3, 1 << 70]),
    cut=st.sampled_from([1e-320, 1e-46, 0.5, 1.0]),
    repetition_penalty=EXTREMES,
    penalty=EXTREMES.flatmap(lambda each: st.sampled_from([0.0, each, -each])),
    bias=st.dictionaries(st.integers(0, 7), st.sampled_from([-1e300, -5.0, 1e300]), max_size=8),
    logits=st.lists(
        st.sampled_from([-np.inf, -3e38, -2.0, 0.0, 3.0, 3e38, np.inf, np.nan]),
        min_size=8,
        max_size=8,
    ),
    min_tokens=st.integers(0, 2),
)
def test_no_number_that_a_request_may_have_breaks_the_engine(
    temperature: float,
    top_k: int,
    cut: float,
    repetition_penalty: float,
    penalty: float,
    bias: dict[int, float],
    logits: list[float],
    min_tokens: int,
) -> None:
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=cut,
        min_p=cut,
        repetition_penalty=repetition_penalty,
        frequency_penalty=penalty,
        presence_penalty=penalty,
        logit_bias=bias,
        logprobs=3,
    )
    limits = EngineLimits(4, 4, 1, 4, 16, vocabulary=8)
    check_request(GenerateRequest([1], sampling=sampling), limits)
    sampler = Sampler(sampling, seed=1, prompt=[1], stop_token_ids=[0], min_tokens=min_tokens)

    for position in range(3):
        [drawn] = draw_tokens(row(*logits)[np.newaxis], [sampler], [position])
        if drawn is not None:
            assert 0 <= drawn.token_id < 8
            assert drawn.token_id or position >= min_tokens
            assert drawn.logprob is not None
            assert -9999.0 <= drawn.logprob.logprob <= 0.0


@pytest.mark.parametrize("temperature", [1e-320, 1e-46])
def test_a_temperature_just_above_0_takes_the_likeliest(temperature: float) -> None:
    assert likely(row(1.0, 3.0, 2.0), temperature=temperature, top_p=0.5) == {1: 1.0}


def test_a_temperature_without_end_takes_what_is_possible_alike() -> None:
    assert likely(row(1.0, 3.0, -np.inf), temperature=1e300) == {0: 0.5, 1: 0.5, 2: 0.0}


def test_the_models_logits_are_left_as_they_are() -> None:
    logits = row(1, 2, 3)
    sampler = Sampler(
        Sampling(logit_bias={0: 50.0}, repetition_penalty=2.0, presence_penalty=1.0),
        seed=0,
        prompt=[1],
    )

    draw(logits, sampler)

    assert logits.tolist() == [1, 2, 3]


# Bias, penalties, stop tokens -------------------------------------------------------------


def greedy(**sampling: object) -> Sampling:
    return Sampling(temperature=0.0, **sampling)  # type: ignore[arg-type]


def test_a_bias_is_added_to_a_tokens_logit() -> None:
    assert draw(row(1, 2, 3), Sampler(greedy(logit_bias={0: 2.5}), seed=0)) == 0
    assert draw(row(1, 2, 3), Sampler(greedy(logit_bias={2: -100.0}), seed=0)) == 1


def test_repetition_makes_tokens_of_prompt_and_output_less_likely() -> None:
    sampler = Sampler(greedy(repetition_penalty=2.0), seed=0, prompt=[0, 0])

    drawn = [draw(row(4.5, 4.0, 3.0, -1.0), sampler) for _ in range(4)]

    # 0 counts half from the beginning, 1 after it was drawn, and 2 then is above them.
    assert drawn == [1, 2, 0, 0]


def test_repetition_makes_negative_logits_more_negative() -> None:
    assert draw(row(-1.0, -1.5), Sampler(greedy(repetition_penalty=2.0), seed=0, prompt=[0])) == 1


def test_frequency_counts_each_time_and_presence_once() -> None:
    by_frequency = Sampler(greedy(frequency_penalty=1.0), seed=0, prompt=[0, 0, 0])
    by_presence = Sampler(greedy(presence_penalty=1.0), seed=0, prompt=[0, 0, 0])
    logits = row(3.5, 2.0, 0.0)

    assert [draw(logits, by_frequency) for _ in range(5)] == [0, 0, 1, 0, 1]
    assert [draw(logits, by_presence) for _ in range(5)] == [0, 0, 0, 0, 0]


def test_stop_tokens_are_not_drawn_before_min_tokens() -> None:
    sampler = Sampler(greedy(), seed=0, stop_token_ids=[2], min_tokens=3)

    assert [draw(row(0, 1, 2), sampler) for _ in range(4)] == [1, 1, 1, 2]


# Random numbers ---------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 127))
def test_random_numbers_are_those_of_philox(seed: int, position: int, index: int) -> None:
    generator = np.random.Philox(key=seed, counter=position | index << 64)

    assert uniform(seed, position, index) == (int(generator.random_raw()) >> 11) * 2.0**-53


@given(st.integers(0, 2**64 - 1), st.integers(0, 20))
def test_a_stream_that_is_continued_elsewhere_draws_the_same_rest(seed: int, cut: int) -> None:
    logits = (np.random.default_rng(1).normal(size=(20, 50)) * 2).astype(np.float32)
    sampling = Sampling(temperature=1.2, top_p=0.95)

    whole = Sampler(sampling, seed=seed)
    drawn = [draw(logits[at], whole, 100 + at) for at in range(20)]
    rest = Sampler(sampling, seed=seed)

    assert [draw(logits[at], rest, 100 + at) for at in range(cut, 20)] == drawn[cut:]


def test_continuations_and_seeds_draw_for_themselves() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    streams = {
        tuple(draw(logits, Sampler(Sampling(), seed=seed, index=index), at) for at in range(5))
        for seed in range(3)
        for index in range(3)
    }

    assert len(streams) == 9


# Log-probabilities ------------------------------------------------------------------------


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = row(1, 2, 3, 3)
    sampler = Sampler(
        greedy(logprobs=2, logit_bias={0: 100.0}, repetition_penalty=9.0), seed=0, prompt=[3]
    )

    [drawn] = draw_tokens(logits[np.newaxis], [sampler], [0])

    assert drawn is not None
    assert drawn.logprob is not None
    whole = math.log(sum(math.exp(each) for each in (1, 2, 3, 3)))
    assert drawn.token_id == drawn.logprob.token_id == 0
    assert drawn.logprob.logprob == pytest.approx(1 - whole)
    assert [each for each, _ in drawn.logprob.top] == [2, 3]
    assert [each for _, each in drawn.logprob.top] == pytest.approx([3 - whole, 3 - whole])


def test_logprobs_of_no_alternatives_are_those_of_the_token_alone() -> None:
    [drawn] = draw_tokens(row(0, 0)[np.newaxis], [Sampler(greedy(logprobs=0), seed=0)], [0])

    assert drawn is not None
    assert drawn.logprob is not None
    assert drawn.logprob.top == []
    assert drawn.logprob.logprob == pytest.approx(-math.log(2))


def test_what_is_impossible_has_a_logprob_that_json_can_say() -> None:
    found = token_logprob(row(1, -math.inf, math.nan), 1, 3)

    assert found.logprob == LEAST_LOGPROB
    assert found.top == [(0, 0.0), (1, LEAST_LOGPROB), (2, LEAST_LOGPROB)]


# Time -------------------------------------------------------------------------------------


def test_eight_greedy_rows_take_little_more_than_one_look_at_their_logits() -> None:
    logits = np.random.default_rng(0).normal(size=(8, 152_064)).astype(np.float32)
    samplers = [Sampler(greedy(), seed=0) for _ in logits]

    drawing: list[float] = []
    looking: list[float] = []
    for _ in range(20):
        begun = thread_time()
        draw_tokens(logits, samplers, [0] * 8)
        drawn = thread_time()
        logits.argmax(axis=1)
        drawing.append(drawn - begun)
        looking.append(thread_time() - drawn)

    # 1.1 times as long; with a softmax of each row it would be eight times.
    assert min(drawing) < 4 * min(looking)
