"""`/metrics` of a run with several processes: the pages of all children as one.

Each sample gets the label `dynbus_instance`, so that counters of different processes stay apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, Final

from dynbus.actors.supervisor import Supervisor

INSTANCE_LABEL: Final = "dynbus_instance"
TIMEOUT: Final = 3.0

_PROCESS_METRICS: Final = ("python_", "process_")


@contextmanager
def exposed(supervisor: Supervisor) -> Generator[None, None, None]:
    """Have prometheus-client's registry of this process give the metrics of the children."""
    from prometheus_client import REGISTRY

    collector = _ChildrenCollector(supervisor, asyncio.get_running_loop())
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)


class _ChildrenCollector:
    def __init__(self, supervisor: Supervisor, loop: asyncio.AbstractEventLoop) -> None:
        self._supervisor = supervisor
        self._loop = loop

    def describe(self) -> Iterable[Any]:
        return []

    def collect(self) -> Iterable[Any]:
        """Ask every child; called on a thread of the health server."""
        asked = asyncio.run_coroutine_threadsafe(self._supervisor.metrics(), self._loop)
        return merge((child.instance_id, page) for child, page in asked.result(TIMEOUT))


def merge(pages: Iterable[tuple[str, str]]) -> list[Any]:
    """The metric families of all pages, by name, with each sample's instance as a label."""
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Any] = {}
    for instance_id, page in pages:
        for family in text_string_to_metric_families(page):
            if family.name.startswith(_PROCESS_METRICS):
                continue  # this process has the same names for itself
            merged = families.setdefault(family.name, family)
            samples = [
                sample._replace(labels={**sample.labels, INSTANCE_LABEL: instance_id})
                for sample in family.samples
            ]
            if merged is family:
                merged.samples = samples
            else:
                merged.samples.extend(samples)
    return list(families.values())
