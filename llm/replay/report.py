"""The figures of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fleet import ReplayedRequest, ReplayResult


@dataclass(frozen=True, slots=True)
class Distribution:
    """A mean and two percentiles, in milliseconds."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Objective:
    """The limits that a request must keep to count as good, in seconds.

    Attributes:
        ttft: the most until its first token.
        itl: the most between two of its tokens, on average.

    Raises:
        ValueError: one of them is not above 0.
    """

    ttft: float = 2.0
    itl: float = 0.05

    def __post_init__(self) -> None:
        for name, seconds in (("TTFT", self.ttft), ("ITL", self.itl)):
            if not seconds > 0.0:
                raise ValueError(
                    f"an objective of {1000 * seconds:g} ms for the {name} is kept by no request: "
                    "give milliseconds above 0"
                )


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a policy on a trace.

    Attributes:
        duration_s: from the first arrival to the last token.
        ttft_ms: from arrival to the first token, over the requests.
        itl_ms: between two tokens of a request, over all pairs.
        hit_rate: the part of the prompt tokens that was found in a cache.
        output_tokens_per_s: of all instances together.
        balance: the mean of the instances' busy time over the longest; 1 is even.
        goodput: requests each second that keep the objective.
    """

    policy: str
    requests: int
    duration_s: float
    ttft_ms: Distribution
    itl_ms: Distribution
    hit_rate: float
    output_tokens_per_s: float
    balance: float
    goodput: float
    preempted: int

    def as_json(self) -> dict[str, Any]:
        """The figures that `dynbus lab replay --json` prints."""
        return {
            "policy": self.policy,
            "requests": self.requests,
            "duration_s": round(self.duration_s, 3),
            "ttft_ms": _rounded(self.ttft_ms),
            "itl_ms": _rounded(self.itl_ms),
            "hit_rate": round(self.hit_rate, 6),
            "output_tokens_per_s": round(self.output_tokens_per_s, 3),
        }


def summarize(
    policy: str, result: ReplayResult, *, skip: int = 0, objective: Objective | None = None
) -> Report:
    """The figures of a replay.

    Args:
        skip: leave out so many of the first requests: figures of the part of a trace on which
            nothing was chosen. The time between tokens, the balance and the preemptions are
            those of the whole replay.

    Raises:
        ValueError: no request is left.
    """
    requests = result.requests[skip:]
    if not requests:
        raise ValueError(f"skip = {skip} leaves none of {len(result.requests)} requests")
    objective = objective or Objective()
    first = ttft_seconds(requests)
    duration = max(request.last_token for request in requests) - requests[0].arrival
    between = np.array(
        [
            (request.last_token - request.first_token) / max(1, request.output_tokens - 1)
            for request in requests
        ]
    )
    good = int(np.count_nonzero((first <= objective.ttft) & (between <= objective.itl)))
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    return Report(
        policy=policy,
        requests=len(requests),
        duration_s=duration,
        ttft_ms=_distribution(first),
        itl_ms=_weighted(*result.intervals),
        hit_rate=sum(request.cached_tokens for request in requests) / prompt_tokens,
        output_tokens_per_s=sum(request.output_tokens for request in requests) / duration,
        balance=float(np.mean(result.busy)) / max(result.busy),
        goodput=good / duration,
        preempted=result.preempted,
    )


def ttft_seconds(requests: list[ReplayedRequest]) -> NDArray[np.float64]:
    """The times to the first token; of shape [requests]."""
    return np.array([request.first_token - request.arrival for request in requests])


def _distribution(seconds: NDArray[np.float64]) -> Distribution:
    p50, p99 = np.percentile(seconds, (50, 99))
    return Distribution(1000 * float(seconds.mean()), 1000 * float(p50), 1000 * float(p99))


def _weighted(seconds: NDArray[np.float64], counts: NDArray[np.int64]) -> Distribution:
    """The same of values that occur several times; zeros for none."""
    if not len(seconds):
        return Distribution(0.0, 0.0, 0.0)
    p50, p99 = weighted_quantiles(seconds, counts, (0.5, 0.99))
    mean = float(np.average(seconds, weights=counts))
    return Distribution(1000 * mean, 1000 * p50, 1000 * p99)


def weighted_quantiles(
    values: NDArray[np.float64], counts: NDArray[np.int64], parts: Sequence[float]
) -> list[float]:
    """For each part the least value up to which so much of all lies.

    Args:
        values, counts: each value, and how often it is there; both of shape [values], one at least.
    """
    order = np.argsort(values)
    ordered, until = values[order], np.cumsum(counts[order])
    return [float(ordered[int(until.searchsorted(part * float(until[-1])))]) for part in parts]


def _rounded(distribution: Distribution) -> dict[str, float]:
    return {
        "mean": round(distribution.mean, 3),
        "p50": round(distribution.p50, 3),
        "p99": round(distribution.p99, 3),
    }
