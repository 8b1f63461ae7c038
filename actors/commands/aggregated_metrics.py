"""`/metrics` of a run with several processes: their pages as one.

Each sample of a child gets the label `dynbus_worker`, so that those of different processes stay
apart. It is the child's place in the run, as `demo.Splitter/2`: it stays when the child is started
again, where an instance's id would begin new series each time. The parent adds the process metrics
of its own, without the label, and how often each child has hung, whose own count ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from dynbus.actors.running.supervisor import Supervisor

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

WORKER_LABEL: Final = "dynbus_worker"
TIMEOUT: Final = 3.0
HANGS: Final = "dynbus_hangs"


def registry_of(supervisor: Supervisor) -> CollectorRegistry:
    """The source of the metrics of all processes of a run; called on the supervisor's loop."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_RunCollector(supervisor, asyncio.get_running_loop()))
    return registry


class _RunCollector:
    def __init__(self, supervisor: Supervisor, loop: asyncio.AbstractEventLoop) -> None:
        self._supervisor = supervisor
        self._loop = loop

    def describe(self) -> Iterable[Any]:
        return []

    def collect(self) -> Iterable[Any]:
        """Ask every child; called on a thread of the health server."""
        from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR

        own = [
            family
            for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR)
            for family in collector.collect()
        ]
        asked = asyncio.run_coroutine_threadsafe(self._supervisor.metrics(), self._loop)
        pages = ((child.label, page) for child, page in asked.result(TIMEOUT))
        return merge([*own, self._hangs()], pages)

    def _hangs(self) -> Any:
        from prometheus_client.core import CounterMetricFamily

        labels = (WORKER_LABEL, "dynbus_namespace", "dynbus_component")
        family = CounterMetricFamily(
            HANGS, "Instances that hung and were withdrawn.", labels=labels
        )
        for child in list(self._supervisor.children):
            namespace, _, component = child.node.address.partition(".")
            family.add_metric([child.label, namespace, component], child.hangs)
        return family


def merge(own: Iterable[Any], pages: Iterable[tuple[str, str]]) -> list[Any]:
    """The metric families of this process and of all pages, each name once.

    Args:
        own: families of this process, which get no label.
        pages: of each worker its label, and its metrics in the text format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Any] = {}
    for family in own:
        _add(families, family, {})
    for worker, page in sorted(pages):
        for family in text_string_to_metric_families(page):
            if family.name == HANGS:
                continue  # it ends with the process
            _add(families, family, {WORKER_LABEL: worker})
    return list(families.values())


def _add(families: dict[str, Any], family: Any, labels: dict[str, str]) -> None:
    from prometheus_client import Metric

    # Not the family itself: some collectors give the same object each time.
    new = Metric(family.name, family.documentation, family.type)
    known = families.setdefault(family.name, new)
    known.samples += [
        sample._replace(labels={**sample.labels, **labels}) for sample in family.samples
    ]
    if known.type != family.type:
        # Two actors that count different things by one name: a name has one type on a page.
        known.type = "unknown"
