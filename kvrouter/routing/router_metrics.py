"""The metrics of routers. Their labels are bounded: the target, and closed lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dynbus.bus.telemetry.metrics import Labels, Metrics, Readings
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.follower import IndexFollower

from .scheduling import Follower, SchedulerStatistics

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_KINDS: Final = ("prompt", "best", "expected", "compared", "reused")
"""Of which tokens `dynbus.kv.tokens` counts, as `SchedulerStatistics` says."""


class RouterMetrics:
    """The metrics of one router.

    Args:
        source: the router's id.
        namespace, component: of the instances that it chooses among.
    """

    def __init__(self, metrics: Metrics, source: str, namespace: str, component: str) -> None:
        self._source = source
        self._labels: Labels = (("dynbus.namespace", namespace), ("dynbus.component", component))
        self._readings: dict[str, Readings] = {
            "cache_aware": metrics.gauge(
                "kv.cache_aware", "{router}", "Routers, by how far they know the caches."
            ),
            "decisions": metrics.counter("kv.decisions", "{decision}", "Requests routed."),
            "tokens": metrics.counter(
                "kv.tokens", "{token}", "Prompt tokens of routed requests, by what they are."
            ),
            "hit_rate": metrics.gauge(
                "kv.hit_rate", "1", "Share of prompt tokens expected in the chosen cache.", max
            ),
            "waiting": metrics.gauge("kv.waiting", "{request}", "Requests in routers' queues."),
            "resyncs": metrics.counter("kv.resyncs", "{request}", "Resyncs asked for."),
            "blocks": metrics.gauge("kv.index.blocks", "{block}", "Blocks held in the index."),
            "staleness": metrics.gauge(
                "kv.staleness", "s", "Age of events when applied, 99th percentile.", max
            ),
        }

    def put(
        self,
        awareness: CacheAwareness,
        statistics: SchedulerStatistics | None,
        follower: Follower | None,
    ) -> None:
        """Replace all values."""
        for name, values in self._values(awareness, statistics, follower).items():
            self._readings[name].put(self._source, values)

    def remove(self) -> None:
        """The router is gone."""
        for readings in self._readings.values():
            readings.remove(self._source)

    def _values(
        self,
        awareness: CacheAwareness,
        statistics: SchedulerStatistics | None,
        follower: Follower | None,
    ) -> dict[str, Mapping[Labels, float]]:
        labels = self._labels
        found: dict[str, Mapping[Labels, float]] = {
            "cache_aware": {
                (*labels, ("dynbus.level", level.value)): float(level is awareness.level)
                for level in AwarenessLevel
            }
        }
        if statistics is not None:
            tokens = {kind: getattr(statistics, f"{kind}_tokens") for kind in TOKEN_KINDS}
            found["decisions"] = {labels: statistics.decisions}
            found["waiting"] = {labels: statistics.waiting}
            found["tokens"] = {
                (*labels, ("dynbus.kind", kind)): count for kind, count in tokens.items()
            }
            if tokens["prompt"]:
                found["hit_rate"] = {labels: tokens["expected"] / tokens["prompt"]}
        if isinstance(follower, IndexFollower):
            status = follower.status()
            found["resyncs"] = {labels: status.requests}
            found["staleness"] = {labels: status.staleness.p99}
            found["blocks"] = {labels: follower.index.statistics().blocks}
        return found
