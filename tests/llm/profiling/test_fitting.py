"""Costs are fitted by least squares of relative errors, and none is negative."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.llm.profiles import made_profile

from dynbus.llm.mock.timing import StepWork
from dynbus.llm.profiling import Measured
from dynbus.llm.profiling.fitting import fit_costs, nonnegative_least_squares


@given(st.integers(0, 1 << 32), st.integers(1, 6), st.integers(1, 12))
def test_no_better_coefficients_are_near(seed: int, coefficients: int, measurements: int) -> None:
    random = np.random.default_rng(seed)
    a = random.standard_normal((measurements, coefficients))
    b = random.standard_normal(measurements)

    x = nonnegative_least_squares(a, b)

    # The conditions of Karush, Kuhn and Tucker.
    gradient = a.T @ (b - a @ x)
    assert (x >= 0.0).all()
    assert (gradient <= 1e-8).all()
    assert np.abs(gradient[x > 0.0]).max(initial=0.0) < 1e-8


def test_steps_of_an_engine_give_its_costs_back() -> None:
    timing = made_profile().timing()
    random = np.random.default_rng(0)
    works = [
        StepWork(
            int(prompts),
            int(prompts * 50),
            int(prompts * random.integers(1000, 30_000)),
            int(requests),
            int(requests * random.integers(10, 900)),
        )
        for prompts, requests in random.integers(0, 3, (200, 2))
        if prompts + requests
    ]

    costs, _ = fit_costs([Measured([work], timing.step(work, 0)) for work in works])

    fitted = timing.__class__("fitted", costs, timing.range)
    errors = [fitted.step(work, 0) / timing.step(work, 0) - 1.0 for work in works]
    assert np.abs(errors).max() < 1e-6
    assert costs.attention == pytest.approx(1e-8, rel=1e-4)
    assert costs.context_tokens == pytest.approx(1e-6, rel=1e-4)


def test_steps_that_were_measured_together_are_fitted_too() -> None:
    timing = made_profile().timing()
    works = [StepWork(requests=1, context_tokens=context) for context in range(10, 400, 10)]
    pairs = [works[at : at + 2] for at in range(0, len(works), 2)]

    costs, _ = fit_costs(
        [Measured(pair, sum(timing.step(work, 0) for work in pair)) for pair in pairs]
    )

    assert costs.context_tokens == pytest.approx(1e-6, rel=1e-6)


def test_what_serving_adds_to_answers_is_no_cost_of_steps() -> None:
    timing = made_profile().timing()
    works = [StepWork(1, length, length * (length - 1) // 2) for length in range(8, 250, 16)]
    later = [Measured([work], timing.step(work, 0)) for work in works[::2]]
    answers = [Measured([work], 0.004 + timing.step(work, 0), True) for work in works]

    costs, latency = fit_costs([*later, *answers])

    assert latency == pytest.approx(0.004, rel=1e-6)
    assert costs.sequences[0][1] == pytest.approx(0.001, rel=1e-6)


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="no step was measured"):
        fit_costs([])
    with pytest.raises(ValueError, match="a step took no time"):
        fit_costs([Measured([StepWork(requests=1)], 0.0)])
