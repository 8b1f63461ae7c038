"""The metrics of several processes become one page on which they stay apart."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import PLATFORM_COLLECTOR, CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric

from dynbus.actors.commands.aggregated_metrics import HANGS, WORKER_LABEL, merge

PAGE = """\
# HELP dynbus_calls_total Calls that have ended.
# TYPE dynbus_calls_total counter
dynbus_calls_total{endpoint="greet"} %d.0
"""
PYTHON = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{version="3"} 1.0
"""


def text_of(families: list[Metric]) -> str:
    """The page that is made of them."""

    class Collector:
        def collect(self) -> list[Metric]:
            return families

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry).decode()


def test_the_samples_of_every_process_keep_their_worker() -> None:
    (family,) = merge([], [("demo.Splitter/2", PAGE % 4), ("demo.Splitter/1", PAGE % 3)])

    assert family.name == "dynbus_calls"
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"endpoint": "greet", WORKER_LABEL: "demo.Splitter/1"}, 3.0),
        ({"endpoint": "greet", WORKER_LABEL: "demo.Splitter/2"}, 4.0),
    ]


def test_process_metrics_of_the_workers_stand_beside_those_of_the_parent() -> None:
    own = list(PLATFORM_COLLECTOR.collect())

    families = merge(own, [("a/1", PYTHON), ("b/1", PYTHON)])

    (info,) = [family for family in families if family.name == "python_info"]
    assert [sample.labels.get(WORKER_LABEL) for sample in info.samples] == [None, "a/1", "b/1"]


def test_a_page_that_is_asked_for_again_holds_nothing_twice() -> None:
    pages = [
        text_of(merge(PLATFORM_COLLECTOR.collect(), [("a/1", PYTHON), ("b/1", PYTHON)]))
        for _ in range(2)
    ]

    assert pages[0] == pages[1]
    assert pages[0].count("python_info{") == 3


def test_counters_of_an_actor_s_own_make_one_family() -> None:
    pages: list[tuple[str, str]] = []
    for worker in ("a/1", "a/2"):
        registry = CollectorRegistry()
        Counter("jobs", "Jobs.", registry=registry).inc()
        pages.append((worker, generate_latest(registry).decode()))

    page = text_of(merge([], pages))

    assert page.count("# TYPE jobs_total counter") == 1
    assert page.count("jobs_total{") == 2
    assert page.count("# TYPE jobs_created gauge") == 1


def test_one_name_of_two_types_is_one_family_of_none() -> None:
    gauge = "# TYPE jobs gauge\njobs 2.0\n"
    counter = "# TYPE jobs_total counter\njobs_total 1.0\n"

    (family,) = merge([], [("a/1", gauge), ("b/1", counter)])

    assert family.type == "unknown"
    assert [sample.name for sample in family.samples] == ["jobs", "jobs_total"]
    assert text_of([family]).count("# TYPE") == 1


def test_hangs_are_those_that_the_parent_has_seen_and_not_those_of_a_process_that_ends() -> None:
    own = Metric(HANGS, "Instances that hung and were withdrawn.", "counter")
    own.add_sample(f"{HANGS}_total", {WORKER_LABEL: "a/1"}, 3.0)
    page = f"# TYPE {HANGS}_total counter\n{HANGS}_total 1.0\n"

    (family,) = merge([own], [("a/1", page)])

    assert [sample.value for sample in family.samples] == [3.0]


def test_a_process_without_metrics_adds_nothing() -> None:
    assert merge([], []) == []
    assert merge([], [("a/1", "")]) == []
