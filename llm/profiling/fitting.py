"""The costs of steps, fitted to measured ones.

Least squares of relative errors with coefficients that are never negative: a step of 1 ms counts as
much as one of 100 ms, and no cost is a gain. The algorithm is that of Lawson and
Hanson, "Solving Least Squares Problems" (1974), chapter 23.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.mock.profile import Row, StepCosts
from dynbus.llm.mock.timing import StepWork

from .batches import batch_sizes
from .bench import Measured

FINER: Final = 4
"""Rows of the table of prompt tokens are so many times farther from 0 each."""
LEAST_PROMPT: Final = 16
ROUNDS: Final = 2
"""Of further fits, each with the weights that the one before gives (iteratively reweighted)."""


class Fitted(NamedTuple):
    """The costs of steps, and the seconds that serving adds to each answer."""

    costs: StepCosts
    latency: float


def fit_costs(measured: Sequence[Measured]) -> Fitted:
    """The costs that explain measured steps best.

    Args:
        measured: each may be of several steps in a row, of which the sum was measured.

    Raises:
        ValueError: there is no step, or one took no time.
    """
    if not measured:
        raise ValueError("no step was measured: nothing can be fitted")
    works = [work for each in measured for work in each.works]
    counts = batch_sizes(max(_sequences(work) for work in works))
    lengths = _prompt_rows(max(work.prompt_tokens for work in works))
    features = np.array([_features(each, counts, lengths) for each in measured])
    seconds = np.array([each.seconds for each in measured])
    if not seconds.min() > 0.0:
        raise ValueError("a step took no time: the clock is too coarse to measure this engine")
    # A row of a table that no step is near has no cost of its own.
    scale = np.abs(features).max(axis=0)
    used = scale > 0.0
    scaled = features[:, used] / scale[used]
    fitted = nonnegative_least_squares(scaled / seconds[:, None], np.ones(len(seconds)))
    for _ in range(ROUNDS):
        # Relative to what is expected: relative to themselves, slow steps count for less.
        expected = np.maximum(scaled @ fitted, seconds.min())
        fitted = nonnegative_least_squares(scaled / expected[:, None], seconds / expected)
    costs = np.zeros(features.shape[1])
    costs[used] = fitted / scale[used]
    last = len(counts) + len(lengths)
    fitted_costs = StepCosts(
        _table(counts, costs[: len(counts)], used[: len(counts)]),
        _table(lengths, costs[len(counts) : last], used[len(counts) : last]),
        float(costs[last]),
        float(costs[last + 1]),
    )
    return Fitted(fitted_costs, float(costs[last + 2]))


def _prompt_rows(most: int) -> list[int]:
    """The rows of the table of prompt tokens; the last one is the largest number."""
    rows: list[int] = []
    at = LEAST_PROMPT
    while at < most:
        rows.append(at)
        at *= FINER
    return [*rows, max(most, 1)]


def _sequences(work: StepWork) -> int:
    return work.prompts + work.requests


def _features(
    measured: Measured, counts: Sequence[int], lengths: Sequence[int]
) -> NDArray[np.float64]:
    """The factors of all costs, and of the latency, in what was measured."""
    features = np.zeros(len(counts) + len(lengths) + 3)
    features[-1] = measured.is_answer
    for work in measured.works:
        _share(features[: len(counts)], counts, _sequences(work), from_zero=False)
        if work.prompt_tokens:
            prompt_tokens = features[len(counts) : -3]
            _share(prompt_tokens, lengths, work.prompt_tokens, from_zero=True)
        features[-3] += work.attention
        features[-2] += work.context_tokens
    return features


def _share(
    features: NDArray[np.float64], rows: Sequence[int], value: int, *, from_zero: bool
) -> None:
    """Divide 1 between the two rows that a value is between."""
    after = bisect_left(rows, value)
    if after == 0:
        features[0] += value / rows[0] if from_zero else 1.0
        return
    part = (value - rows[after - 1]) / (rows[after] - rows[after - 1])
    features[after - 1] += 1.0 - part
    features[after] += part


def _table(
    numbers: Sequence[int], costs: NDArray[np.float64], used: NDArray[np.bool_]
) -> list[Row]:
    """The rows that steps were near."""
    rows = [
        (number, float(cost))
        for number, cost, is_used in zip(numbers, costs, used, strict=True)
        if is_used
    ]
    return rows or [(numbers[-1], 0.0)]


def nonnegative_least_squares(
    a: NDArray[np.float64], b: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The x of no negative number that makes `a @ x` nearest to `b`.

    Args:
        a: of shape [measurements, coefficients].
        b: of shape [measurements].

    Returns:
        An array of shape [coefficients].
    """
    count = a.shape[1]
    free = np.zeros(count, dtype=bool)
    x = np.zeros(count)
    tolerance = 1e-10 * float(np.abs(a.T @ b).max(initial=0.0))
    for _ in range(30 * count):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if not (trial[free] <= 0.0).any():
                x = trial
                break
            # As far towards it as nothing becomes negative, and what is 0 then stays so.
            below = free & (trial <= 0.0)
            part = float((x[below] / (x[below] - trial[below])).min())
            x += part * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
            if not free.any():
                break
    return x
