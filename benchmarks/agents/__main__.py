"""`python -m benchmarks.agents`: how much of agents' conversations is computed again.

Each has 43 turns with pauses of 1 to 300 s, in which requests that nothing follows come and go. It
runs on a clock that jumps over pauses, so what takes hours takes minutes; what a small engine
computes is computed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from time import perf_counter

import click

from dynbus.llm.mock.tiny_model import write_tiny_model
from dynbus.testing import run

from .fleet import Fleet, mock_fleet, small_fleet
from .workload import Workload

VOCABULARY = 256


@click.command
@click.option("--engine", type=click.Choice(["mock", "small"]), default="mock", show_default=True)
@click.option("--agents", default=12, show_default=True)
@click.option("--instances", default=4, show_default=True)
@click.option("--lone-every", default=0.5, show_default=True, help="Mean seconds between others.")
@click.option("--session", default=600.0, show_default=True, help="Seconds that are kept.")
@click.option("--seed", default=7, show_default=True)
def main(
    engine: str, agents: int, instances: int, lone_every: float, session: float, seed: int
) -> None:
    """Print a table."""
    click.echo(
        f"{'sessions':>9} {'kills':>6} {'turns':>6} {'others':>7} {'again':>7} {'took s':>7}"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = _long_model(Path(folder))
        for kept in (0.0, session):
            for kills in (False, True):
                fields = {
                    "agents": agents,
                    "instances": instances,
                    "lone_every": lone_every,
                    "session": kept,
                    "kills": kills,
                }
                fleet: Fleet
                # Nothing is there from the fleet before.
                files = Path(folder) / f"{kept:g}-{kills}"
                if engine == "mock":
                    workload = Workload(100_000, 4000, 2**17, seed=seed)
                    fleet = mock_fleet(workload, files, **fields)
                else:
                    workload = Workload(6000, 400, VOCABULARY, seed=seed)
                    fleet = small_fleet(workload, model, files, lone_tokens=400, **fields)
                began = perf_counter()
                figures = run(fleet.run())
                click.echo(
                    f"{f'{kept:g} s' if kept else 'none':>9} {'each' if kills else 'none':>6} "
                    f"{figures.turns:>6} {figures.lone:>7} {figures.part:>7.2%} "
                    f"{perf_counter() - began:>7.1f}"
                )


def _long_model(folder: Path) -> Path:
    """A tiny model that takes long prompts."""
    config = write_tiny_model(folder) / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "max_position_embeddings": 8192}))
    return folder


if __name__ == "__main__":
    main()
