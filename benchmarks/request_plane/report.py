"""The figures as a table, as JSON and as a plot."""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .driver import Options, Results
from .metrics import METRICS, TARGETS, Metric, middle, ratio
from .system import BASELINE

_WIDTH = 150


def print_tables(options: Options, results: Results) -> None:
    """Print the medians with their ratios, what is missing, and how the targets are met."""
    console = Console(width=_WIDTH, highlight=False)
    console.print(_figures_table(options, results))
    for system, notes in results.notes.items():
        for note in notes:
            console.print(f"{system}: {note}", markup=False)
    if "dynbus" in results.samples:
        console.print(_targets_table(results))


def _figures_table(options: Options, results: Results) -> Table:
    title = f"Medians of {options.runs} runs; in brackets the ratio to {BASELINE} in the same run"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("unit")
    for system in options.systems:
        table.add_column(system, justify="right")
    for metric in METRICS:
        cells = [_cell(metric, results, system) for system in options.systems]
        if any(cells):
            table.add_row(metric.label, metric.unit, *cells)
    return table


def _cell(metric: Metric, results: Results, system: str) -> str:
    samples = results.samples.get(system, {})
    value = middle(samples.get(metric.key, []))
    if value is None:
        return ""
    text = f"{value:,.{metric.digits}f}"
    if system == BASELINE or not metric.compared:
        return text
    times = ratio(results.samples, metric.key, system, BASELINE)
    return text if times is None else f"{text} ({times:.2f})"


def _targets_table(results: Results) -> Table:
    labels = {metric.key: f"{metric.label}, {metric.unit}" for metric in METRICS}
    table = Table(title="Targets for dynbus", title_justify="left")
    for column in ("", "asked", "measured", ""):
        table.add_column(column)
    for target in TARGETS:
        value = target.measure(results.samples)
        if value is None:
            continue
        asked = f"{'at least' if target.at_least else 'at most'} {target.limit:g}"
        if target.against is not None:
            asked += f" times {target.against}"
        verdict = "met" if target.is_met(value) else "[bold]missed[/bold]"
        table.add_row(labels[target.key], asked, f"{value:.2f}", verdict)
    return table


def write_json(path: Path, options: Options, results: Results) -> None:
    """Write every value of every run, and on what machine it was taken."""
    content = {
        "machine": {
            "platform": platform.platform(),
            "processors": os.cpu_count(),
            "python": platform.python_version(),
        },
        "options": {
            "systems": list(options.systems),
            "workloads": list(options.workloads),
            "runs": options.runs,
            "duration": options.duration,
            "idle": options.idle,
        },
        "units": {metric.key: metric.unit for metric in METRICS},
        "samples": results.samples,
        "notes": results.notes,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_plot(path: Path, options: Options, results: Results) -> None:
    """Draw one small bar chart per metric: the median, and the runs as dots.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # matplotlib is optional, and its types are not worth a dependency of the checks.
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    systems = [system for system in options.systems if system in results.samples]
    metrics = [m for m in METRICS if any(m.key in results.samples[s] for s in systems)]
    columns = 3
    rows = max(1, -(-len(metrics) // columns))
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(13, 2.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(metrics) :]:
        axis.set_visible(False)
    for axis, metric in zip(axes.flat, metrics, strict=False):
        _draw(axis, metric, systems, results)
    figure.suptitle(f"Medians of {options.runs} runs, each run a dot")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axis: Any, metric: Metric, systems: Sequence[str], results: Results) -> None:
    better = "higher is better" if metric.higher_is_better else "lower is better"
    axis.set_title(f"{metric.label}\n{metric.unit}, {better}", fontsize=9)
    for place, system in enumerate(systems):
        values = [v for v in results.samples[system].get(metric.key, []) if v is not None]
        value = middle(list(values))
        if value is None:
            continue
        bar = axis.barh(place, value, color=f"C{place}")
        axis.bar_label(bar, labels=[f"{value:,.{metric.digits}f}"], fontsize=8, padding=3)
        axis.plot(values, [place] * len(values), ".", color="black", markersize=3)
    axis.set_yticks(range(len(systems)), systems, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.tick_params(axis="x", labelsize=7)
