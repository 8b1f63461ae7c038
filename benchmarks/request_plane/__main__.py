"""`python -m benchmarks.request_plane`: see `benchmarks/README.md`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from .driver import Options, measure
from .report import print_tables, write_json, write_plot
from .system import MODULES
from .workloads import WORKLOADS

_WORKLOADS = ("idle", *WORKLOADS, "startup")


def _split(
    known: Sequence[str],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A callback of an option that takes several of `known`, with commas between them."""

    def split(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
        names = [name.strip() for name in value.split(",")]
        for name in names:
            if name not in known:
                raise click.BadParameter(f"{name!r} is unknown; known are {', '.join(known)}")
        return names

    return split


@click.command()
@click.option(
    "--systems", callback=_split([*MODULES]), default=",".join(MODULES), show_default=True
)
@click.option(
    "--workloads", callback=_split(_WORKLOADS), default=",".join(_WORKLOADS), show_default=True
)
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--duration", type=click.FloatRange(0.2), default=3.0, show_default=True, help="Seconds each."
)
@click.option(
    "--idle", type=click.FloatRange(0.5), default=10.0, show_default=True, help="Seconds to idle."
)
@click.option(
    "--python-dynamo", default=sys.executable, help="The Python that has ai-dynamo-runtime."
)
@click.option("--python-ray", default=sys.executable, help="The Python that has ray[serve].")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all values here.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Write a plot here.")
def main(
    systems: list[str],
    workloads: list[str],
    runs: int,
    duration: float,
    idle: float,
    python_dynamo: str,
    python_ray: str,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure calls and streams of dynbus, bare nats-py, Dynamo, grpc.aio and Ray Serve."""
    pythons = {"dynamo": python_dynamo, "ray": python_ray}
    options = Options(systems, workloads, runs, duration, idle, pythons)
    results = asyncio.run(measure(options))
    print_tables(options, results)
    if json_path is not None:
        write_json(json_path, options, results)
    if plot_path is not None:
        try:
            write_plot(plot_path, options, results)
        except ImportError:
            click.echo("no plot: matplotlib is not installed", err=True)


if __name__ == "__main__":
    main()
