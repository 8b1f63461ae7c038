"""Metrics of a front end, as Prometheus reads them.

Inter-token latencies are very many, so they are counted here by plain numbers, and written in
Prometheus's text format when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dynbus.llm.answers import Usage

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

LONG: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SHORT: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)

MAX_SERIES: Final = 1000
MAX_TENANTS: Final = 100
OTHER: Final = "other"

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Counts of values, by the bound that each is at most."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def lines(self, name: str, labels: Labels) -> Iterator[str]:
        """The histogram in Prometheus's text format."""
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield _line(f"{name}_bucket", (*labels, ("le", str(bound))), total)
        yield _line(f"{name}_sum", labels, self._sum)
        yield _line(f"{name}_count", labels, total)


class ModelMetrics:
    """The histograms of one model."""

    def __init__(self) -> None:
        self.duration = Histogram(LONG)
        self.time_to_first_token = Histogram(LONG)
        self.inter_token_latency = Histogram(SHORT)
        self.preparing = Histogram(SHORT)
        self.queue = Histogram(LONG)


_HISTOGRAMS: Final[Mapping[str, tuple[str, str]]] = {
    "request_duration_seconds": ("duration", "From a request's arrival to the end of its answer."),
    "time_to_first_token_seconds": (
        "time_to_first_token",
        "From a request's arrival to its first token.",
    ),
    "inter_token_latency_seconds": (
        "inter_token_latency",
        "Between two tokens of an answer.",
    ),
    "preparing_seconds": ("preparing", "Until a request was token ids."),
    "queue_seconds": ("queue", "From there until an engine was found for it."),
}


class FrontEndMetrics:
    """All metrics of a front end.

    Attributes:
        in_flight: requests that run.
        blocked: times that a stream waited for its client.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.blocked = 0
        self._models: dict[str, ModelMetrics] = {}
        self._requests: Counter[Labels] = Counter()
        self._tokens: Counter[Labels] = Counter()
        self._tenants: set[str] = set()
        self._tokens_of_tenants: Counter[Labels] = Counter()

    def of(self, model: str) -> ModelMetrics:
        """The histograms of a model that is served."""
        metrics = self._models.get(model)
        if metrics is None:
            if len(self._models) >= MAX_SERIES:
                model = OTHER
            metrics = self._models.setdefault(model, ModelMetrics())
        return metrics

    def count(self, endpoint: str, model: str, status: int) -> None:
        """A request was answered."""
        if model not in self._models:
            # Names that clients make up are no series.
            model = OTHER
        labels = (("endpoint", endpoint), ("model", model), ("status", str(status)))
        self._requests[labels] += 1

    def count_tokens(self, model: str, tenant: str, usage: Usage) -> None:
        """Tokens belong to a request that has ended.

        Args:
            tenant: whose it is; empty without tenants.
        """
        if tenant and tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                tenant = OTHER
            self._tenants.add(tenant)
        for kind in ("prompt", "completion", "cached"):
            count: int = getattr(usage, kind) or 0
            if count:
                self._tokens[(("model", model), ("kind", kind))] += count
            if count and tenant:
                self._tokens_of_tenants[(("tenant", tenant), ("kind", kind))] += count

    def page(self, models: int, streams: Mapping[str, int]) -> str:
        """All of it in Prometheus's text format.

        Args:
            models: how many can be asked now.
            streams: what became of how many resumable ones.
        """
        prefix = "dynbus_http"
        lines = [
            *_family(f"{prefix}_requests_total", "counter", "Requests that were answered."),
            *(_line(f"{prefix}_requests_total", *one) for one in self._requests.items()),
            *_family(f"{prefix}_tokens_total", "counter", "Tokens of requests that have ended."),
            *(_line(f"{prefix}_tokens_total", *one) for one in self._tokens.items()),
            *_family(f"{prefix}_tenant_tokens_total", "counter", "The same by tenant."),
            *(
                _line(f"{prefix}_tenant_tokens_total", *one)
                for one in self._tokens_of_tenants.items()
            ),
            *_family(f"{prefix}_requests_in_flight", "gauge", "Requests that run."),
            _line(f"{prefix}_requests_in_flight", (), self.in_flight),
            *_family(
                f"{prefix}_blocked_total", "counter", "Times that a stream waited for its client."
            ),
            _line(f"{prefix}_blocked_total", (), self.blocked),
            *_family(
                f"{prefix}_resumable_streams_total", "counter", "What became of resumable streams."
            ),
            *(
                _line(f"{prefix}_resumable_streams_total", (("event", event),), count)
                for event, count in streams.items()
            ),
            *_family(f"{prefix}_models", "gauge", "Models that can be asked."),
            _line(f"{prefix}_models", (), models),
        ]
        for name, (attribute, text) in _HISTOGRAMS.items():
            lines += _family(f"{prefix}_{name}", "histogram", text)
            for model, metrics in self._models.items():
                histogram: Histogram = getattr(metrics, attribute)
                lines += histogram.lines(f"{prefix}_{name}", (("model", model),))
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _line(name: str, labels: Labels, value: float) -> str:
    pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
