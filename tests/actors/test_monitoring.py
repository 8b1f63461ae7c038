"""Alert rules and the dashboard: they are read by what they are for, and name what is measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from click.testing import CliRunner
from grafana_foundation_sdk.models.dashboard import Dashboard

from dynbus.actors.commands.deploy import monitoring
from dynbus.actors.documents.alerts import ALERTS, Alert
from dynbus.actors.documents.dashboard import ROWS

DOCS = Path(__file__).parents[2] / "docs"
UNITS = {"s": "_seconds", "By": "_bytes", "bytes": "_bytes"}
NOT_OURS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}


def documented() -> set[str]:
    """The names that Prometheus has for the metrics in the tables of the guides."""
    names: set[str] = set()
    for path in (DOCS / "guides").glob("*.md"):
        for line in path.read_text().splitlines():
            row = re.match(r"\| `(dynbus\.[\w.]+)` \|([^|]*)\|", line)
            if row is not None:
                names |= set(_of_prometheus(row[1], row[2]))
        for name in re.findall(r"`(gen_ai\.server\.[\w.]+)`", path.read_text()):
            names |= set(_of_prometheus(name, "histogram, s"))
    return names


def _of_prometheus(name: str, kind: str) -> Iterator[str]:
    plain = name.replace(".", "_")
    unit = next((UNITS[word] for word in re.findall(r"\w+", kind) if word in UNITS), "")
    if "histogram" in kind:
        yield from (f"{plain}{unit}_{part}" for part in ("bucket", "count", "sum"))
    elif "gauge" in kind or "up-down" in kind:
        yield plain + unit
    elif "counter" in kind:
        yield f"{plain}{unit}_total"
    else:
        # Tables of counters and gauges of hand-overs do not say which is which.
        yield from (plain + unit, f"{plain}{unit}_total")


def metrics_of(expression: str) -> set[str]:
    """The names of metrics that an expression reads."""
    waiting: list[Any] = [promql.parse(expression)]
    names: set[str] = set()
    while waiting:
        node = waiting.pop()
        match node:
            case promql.VectorSelector():
                names.add(str(node.name))
            case promql.MatrixSelector():
                waiting.append(node.vector_selector)
            case promql.BinaryExpr():
                waiting += [node.lhs, node.rhs]
            case promql.Call():
                waiting += node.args
            case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr():
                waiting.append(node.expr)
            case promql.NumberLiteral():
                pass
            case _:
                pytest.fail(f"{node!r} of {expression} is not known to this test")
    return names


def test_the_rules_read_metrics_that_are_documented() -> None:
    known = documented() | NOT_OURS

    unknown = {alert.name: metrics_of(alert.expression) - known for alert in ALERTS}

    assert {name: names for name, names in unknown.items() if names} == {}


def test_the_dashboard_plots_metrics_that_are_documented() -> None:
    known = documented() | NOT_OURS
    queries = [
        query.replace("$__rate_interval", "1m")
        for row in ROWS.values()
        for panel in row
        for query, _ in panel.queries
    ]

    assert {name for query in queries for name in metrics_of(query)} - known == set()


def test_the_files_are_those_of_prometheus_and_grafana(tmp_path: Path) -> None:
    folder = tmp_path / "monitoring"

    done = CliRunner().invoke(monitoring, [str(folder)])

    rules = yaml.safe_load((folder / "dynbus-alerts.yaml").read_text())
    model = json.loads((folder / "dynbus-dashboard.json").read_text())
    assert done.output.split() == [
        str(folder / "dynbus-alerts.yaml"),
        str(folder / "dynbus-dashboard.json"),
    ]
    assert [rule["alert"] for group in rules["groups"] for rule in group["rules"]] == [
        alert.name for alert in ALERTS
    ]
    assert len(Dashboard.from_json(model).panels or ()) == len(model["panels"])


def test_the_panels_of_a_dashboard_do_not_overlap(tmp_path: Path) -> None:
    CliRunner().invoke(monitoring, [str(tmp_path)])
    model = json.loads((tmp_path / "dynbus-dashboard.json").read_text())
    cells = [
        (place["x"] + right, place["y"] + down)
        for place in (panel["gridPos"] for panel in model["panels"])
        for right in range(place["w"])
        for down in range(place["h"])
    ]

    assert len(cells) == len(set(cells))
    assert max(column for column, _ in cells) < 24


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_has_a_chapter_of_the_runbook(alert: Alert) -> None:
    chapters = dict(
        part.split("\n", 1) for part in (DOCS / "runbook.md").read_text().split("\n## ")[1:]
    )

    assert all(f"**{word}:**" in chapters[alert.name] for word in ("Says", "Look", "Do"))
    assert set(chapters) == {each.name for each in ALERTS}
