"""`python -m benchmarks.routing TRACE`: policies at parts of the load that round robin carries."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.replay.report import Objective, Report, summarize
from dynbus.llm.replay.simulation import Simulation
from dynbus.llm.replay.trace import Trace, read_trace

from .agreement import ROUTER_MODES, Figure, compare

LOADS = (0.3, 0.7, 0.95)


@click.command()
@click.argument("path", metavar="TRACE", type=click.Path(exists=True, path_type=Path))
@click.option("--instances", type=click.IntRange(1), default=8, show_default=True)
@click.option("--policies", default="round_robin,random,dynamo,kv", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--python-dynamo", help="The Python with ai-dynamo-runtime, to compare with it.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all figures.")
def main(
    path: Path,
    instances: int,
    policies: str,
    seed: int,
    python_dynamo: str | None,
    json_path: Path | None,
) -> None:
    """Compare policies on a trace in Mooncake's format, and our simulator with Dynamo's."""
    console = Console()
    simulation = Simulation(instances, MockConfig(), seed=seed)
    trace = read_trace(path, block_size=simulation.engine.block_size)
    full = simulation.saturating_speed(trace)
    console.print(
        f"{len(trace.requests):,} requests, {instances} instances: round robin carries "
        f"{full:.2f} times the speed of the trace"
    )
    found: dict[str, Any] = {"instances": instances, "saturating_speed": full}
    at_loads = {load: replace(simulation, speed=load * full) for load in LOADS}
    if python_dynamo is not None:
        for policy in ROUTER_MODES:
            figures = {
                load: compare(python_dynamo, path, trace, at, policy)
                for load, at in at_loads.items()
            }
            _print_agreement(console, policy, figures)
            found[f"agreement_{policy}"] = {
                load: [each._asdict() for each in figures[load]] for load in LOADS
            }
    reports = {
        load: [_report(trace, at, policy) for policy in policies.split(",")]
        for load, at in at_loads.items()
    }
    _print_policies(console, reports)
    found["policies"] = {load: [asdict(each) for each in reports[load]] for load in LOADS}
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2) + "\n")


def _report(trace: Trace, simulation: Simulation, policy: str) -> Report:
    """The figures of the second half: weights may have been chosen on the first."""
    return summarize(
        policy,
        simulation.run(trace, policy),
        skip=len(trace.requests) // 2,
        objective=Objective(),
    )


def _print_agreement(console: Console, policy: str, figures: dict[float, list[Figure]]) -> None:
    table = Table("", title=f"{policy}: dynbus / Dynamo, difference")
    for load in figures:
        table.add_column(f"load {load}", justify="right")
    for row in zip(*figures.values(), strict=True):
        cells = [f"{each.dynbus:,.4g} / {each.dynamo:,.4g}, {each.difference:+.2%}" for each in row]
        table.add_row(row[0].name, *cells)
    console.print(table)


def _print_policies(console: Console, reports: dict[float, list[Report]]) -> None:
    table = Table(
        "load",
        "policy",
        "TTFT mean, ms",
        "p99, ms",
        "ITL mean, ms",
        "hit rate",
        "goodput, requests/s",
        "TTFT mean to the first policy",
        title="Policies, on the second half of the trace",
    )
    for load, at_load in reports.items():
        for report in at_load:
            gain = report.ttft_ms.mean / at_load[0].ttft_ms.mean - 1.0
            table.add_row(
                str(load),
                report.policy,
                f"{report.ttft_ms.mean:,.1f}",
                f"{report.ttft_ms.p99:,.1f}",
                f"{report.itl_ms.mean:,.2f}",
                f"{report.hit_rate:.2%}",
                f"{report.goodput:,.3f}",
                f"{gain:+.1%}",
            )
    console.print(table)


if __name__ == "__main__":
    main()
