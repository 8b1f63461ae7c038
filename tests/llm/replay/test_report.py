"""The figures of a replay are those of its requests."""

from __future__ import annotations

import numpy as np
import pytest

from dynbus.llm.replay.fleet import ReplayedRequest, ReplayResult
from dynbus.llm.replay.report import Objective, summarize


def result() -> ReplayResult:
    records = [
        ReplayedRequest(10.0, 100, 11, 0, 10.5, 11.5, 0),
        ReplayedRequest(11.0, 300, 21, 1, 12.5, 14.5, 200),
        ReplayedRequest(12.0, 100, 1, 1, 15.0, 15.0, 50),
    ]
    intervals = np.array([0.1, 0.05, 0.2]), np.array([20, 9, 1])
    return ReplayResult(records, intervals, [1.0, 3.0], 2)


def test_the_figures_are_those_of_the_requests() -> None:
    report = summarize("p", result())

    assert report.as_json() == {
        "policy": "p",
        "requests": 3,
        "duration_s": 5.0,
        "ttft_ms": {"mean": pytest.approx(5000 / 3, abs=1e-3), "p50": 1500.0, "p99": 2970.0},
        "itl_ms": {"mean": pytest.approx(88.333), "p50": 100.0, "p99": 200.0},
        "hit_rate": 0.5,
        "output_tokens_per_s": 6.6,
    }
    assert report.balance == pytest.approx(2 / 3)
    assert report.preempted == 2


def test_goodput_counts_requests_that_keep_both_bounds() -> None:
    assert summarize("p", result(), objective=Objective(1.6, 0.1)).goodput == 2 / 5
    assert summarize("p", result(), objective=Objective(1.4, 0.1)).goodput == 1 / 5
    assert summarize("p", result(), objective=Objective(9.0, 0.05)).goodput == 1 / 5


@pytest.mark.parametrize("bounds", [(-1.0, 0.1), (1.0, 0.0), (float("nan"), 1.0)])
def test_an_objective_that_nothing_can_keep_is_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="is kept by no request: give milliseconds above 0"):
        Objective(*bounds)


def test_the_first_requests_can_be_left_out() -> None:
    report = summarize("p", result(), skip=2)

    assert (report.requests, report.duration_s) == (1, 3.0)
    assert (report.ttft_ms.mean, report.hit_rate) == (3000.0, 0.5)


def test_something_must_be_left() -> None:
    with pytest.raises(ValueError, match="skip = 3 leaves none of 3 requests"):
        summarize("p", result(), skip=3)


def test_without_a_second_token_there_is_no_time_between_tokens() -> None:
    records = [ReplayedRequest(0.0, 10, 1, 0, 1.0, 1.0)]
    nothing = np.empty(0), np.empty(0, dtype=np.int64)

    report = summarize("p", ReplayResult(records, nothing, [1.0], 0))

    assert report.itl_ms.mean == report.itl_ms.p99 == 0.0
