"""The times that a fleet is to keep, and those that a replay attains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dynbus import ConfigError
from dynbus.llm.replay import ReplayResult
from dynbus.llm.replay.report import weighted_quantiles
from dynbus.spi import suggestion

METRICS: Final = ("ttft", "itl", "tpot", "e2e")
_STATISTIC: Final = re.compile(r"mean|p(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Target:
    """A limit of a time.

    Attributes:
        metric: `ttft`, from arrival to the first token; `itl`, between two tokens, over all pairs
            of all requests; `tpot`, the mean of these in a request, over the requests; `e2e`, from
            arrival to the last token.
        statistic: `mean`, or a percentile such as `p95`.
        seconds: the most that it may be.

    Raises:
        ConfigError: there is no such metric or statistic, or the limit is not above 0.
    """

    metric: str
    statistic: str
    seconds: float

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            near = suggestion(self.metric, METRICS)
            raise ConfigError(
                f"objective {self.name}: {self.metric!r} is unknown{near}: give one of "
                f"{', '.join(METRICS)}, such as ttft_p95=500ms"
            )
        if _STATISTIC.fullmatch(self.statistic) is None:
            raise ConfigError(
                f"objective {self.name}: {self.statistic!r} is no statistic: give mean, or a "
                "percentile such as p95"
            )
        if not self.seconds > 0.0:
            raise ConfigError(f"objective {self.name}: no request takes no time: give more than 0")

    @property
    def name(self) -> str:
        """As command lines have it, such as `ttft_p95`."""
        return f"{self.metric}_{self.statistic}"

    @property
    def quantile(self) -> float | None:
        """The part of its percentile, from 0 to 1; None for the mean."""
        match = _STATISTIC.fullmatch(self.statistic)
        return float(match[1]) / 100.0 if match is not None and match[1] else None


def attained(result: ReplayResult, targets: Sequence[Target]) -> tuple[float, ...]:
    """The seconds of each target in a replay; 0 where no request has such a time."""
    return tuple(_attained(result, target) for target in targets)


def _attained(result: ReplayResult, target: Target) -> float:
    requests = result.requests
    if target.metric == "itl":
        seconds, counts = result.intervals
    else:
        if target.metric == "ttft":
            times = [one.first_token - one.arrival for one in requests]
        elif target.metric == "e2e":
            times = [one.last_token - one.arrival for one in requests]
        else:
            times = [
                (one.last_token - one.first_token) / (one.output_tokens - 1)
                for one in requests
                if one.output_tokens > 1
            ]
        seconds = np.array(times)
        counts = np.ones(len(times), np.int64)
    if not len(seconds):
        return 0.0
    if target.quantile is None:
        return float(np.average(seconds, weights=counts))
    return weighted_quantiles(seconds, counts, (target.quantile,))[0]
