"""The figures of the benchmark: what they are called, and what the targets ask of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeAlias

from .system import BASELINE

Samples: TypeAlias = Mapping[str, list[float | None]]
"""Of one system: metric to one value per run, None where the run failed."""


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        digits: after the decimal point.
        compared: whether a ratio against the baseline says something.
    """

    key: str
    label: str
    unit: str
    digits: int = 0
    higher_is_better: bool = False
    compared: bool = True


METRICS: Final = (
    Metric("unary_p50_us", "unary, 1 caller, p50", "us"),
    Metric("unary_p99_us", "unary, 1 caller, p99", "us"),
    Metric("unary_64_rate", "unary, 64 callers", "calls/s", higher_is_better=True),
    Metric("stream_rate", "1 stream", "items/s", higher_is_better=True),
    Metric("stream_yielding_rate", "1 stream, awaiting", "items/s", higher_is_better=True),
    Metric("stream_64_rate", "64 streams", "items/s", higher_is_better=True),
    Metric("stream_64_yielding_rate", "64 streams, awaiting", "items/s", higher_is_better=True),
    Metric("first_item_p50_us", "first item of a stream, p50", "us"),
    Metric("first_item_p99_us", "first item of a stream, p99", "us"),
    Metric("first_item_per_unary", "first item / unary call, p50", "x", 2, compared=False),
    Metric("steps_cpu_us", "256 streams: CPU per item, both ends", "us", 2),
    Metric("steps_cpu_with_broker_us", "256 streams: CPU per item, with broker", "us", 2),
    Metric("steps_late_p50_ms", "256 streams: lateness p50", "ms", 2),
    Metric("steps_late_p99_ms", "256 streams: lateness p99", "ms", 2),
    Metric("steps_rate", "256 streams: rate (12,800 asked)", "items/s", higher_is_better=True),
    Metric("engine_steps_cpu_us", "256 streams by the engine path: CPU per item", "us", 2),
    Metric("engine_steps_cpu_with_broker_us", "the same, with broker", "us", 2),
    Metric("engine_steps_late_p50_ms", "256 streams by the engine path: lateness p50", "ms", 2),
    Metric("engine_steps_late_p99_ms", "256 streams by the engine path: lateness p99", "ms", 2),
    Metric(
        "engine_steps_rate",
        "256 streams by the engine path: rate",
        "items/s",
        higher_is_better=True,
    ),
    Metric(
        "bytes_steps_cpu_us", "256 streams, engine path, passed on as bytes: CPU per item", "us", 2
    ),
    Metric("bytes_steps_cpu_with_broker_us", "the same, with broker", "us", 2),
    Metric(
        "bytes_steps_rate",
        "256 streams, engine path, passed on as bytes: rate",
        "items/s",
        higher_is_better=True,
    ),
    Metric("idle_percent", "idle instance", "% CPU", 2, compared=False),
    Metric("import_s", "import dynbus", "s", 3, compared=False),
    Metric("hello_s", "dynbus run hello, to first answer", "s", 2, compared=False),
)


def middle(values: list[float | None]) -> float | None:
    """The median of the runs that succeeded."""
    present = [value for value in values if value is not None]
    return median(present) if present else None


def ratio(samples: Mapping[str, Samples], key: str, system: str, against: str) -> float | None:
    """The median of `system`/`against`, each ratio taken within one run."""
    ours = samples.get(system, {}).get(key, [])
    theirs = samples.get(against, {}).get(key, [])
    pairs = zip(ours, theirs, strict=False)
    return middle([a / b for a, b in pairs if a is not None and b])


@dataclass(frozen=True)
class Target:
    """What dynbus must reach: `limit` is a ratio with `against`, else a value."""

    key: str
    limit: float
    at_least: bool = False
    against: str | None = None

    def measure(self, samples: Mapping[str, Samples]) -> float | None:
        """The figure to compare with the limit; None if it was not measured."""
        if self.against is None:
            return middle(list(samples.get("dynbus", {}).get(self.key, [])))
        return ratio(samples, self.key, "dynbus", self.against)

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


TARGETS: Final = (
    Target("unary_p50_us", 1.25, against=BASELINE),
    Target("unary_64_rate", 0.9, at_least=True, against=BASELINE),
    Target("unary_64_rate", 3.0, at_least=True, against="dynamo"),
    Target("stream_rate", 2.0, at_least=True, against=BASELINE),
    Target("stream_rate", 10.0, at_least=True, against="dynamo"),
    Target("stream_64_rate", 2.0, at_least=True, against=BASELINE),
    Target("stream_64_rate", 5.0, at_least=True, against="dynamo"),
    Target("engine_steps_cpu_us", 0.6, against=BASELINE),
    Target("steps_late_p99_ms", 5.0),
    Target("first_item_per_unary", 1.3),
    Target("idle_percent", 1.0),
    Target("import_s", 0.4),
    Target("hello_s", 2.5),
)
