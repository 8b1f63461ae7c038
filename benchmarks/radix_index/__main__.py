"""`python -m benchmarks.radix_index`: medians of several runs, all sides in turn."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from statistics import median

import click
from rich.console import Console
from rich.table import Table

SIDES = ("dynbus", "dynamo", "dynamo-pinned")
PEERS = SIDES[1:]
FIGURES = {
    "events_per_s": "events of 4 blocks, per s",
    "lookups_per_s": "look-ups of 64 blocks, per s",
    "prompts_per_s": "8k tokens to scores, per s",
    "bytes_per_block": "bytes for each block held",
    "kept_after_leaving": "of that, kept after all left",
}


@click.command()
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True)
@click.option("--prefixes", type=click.IntRange(64), default=2000, show_default=True)
@click.option("--per-message", type=click.IntRange(1), default=64, show_default=True)
@click.option("--shared/--unshared", default=True, show_default=True, help="Half of a prefix.")
@click.option("--python-dynamo", default=sys.executable, help="The Python with ai-dynamo-runtime.")
def main(runs: int, prefixes: int, per_message: int, shared: bool, python_dynamo: str) -> None:
    """Measure the radix index beside Dynamo's RadixTree, on the same blocks."""
    sharing = "shared" if shared else "unshared"
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        make = ("messages", folder, str(prefixes), str(per_message), sharing)
        _run(sys.executable, *make).check_returncode()
        for _ in range(runs):
            for side in SIDES:
                python = sys.executable if side == "dynbus" else python_dynamo
                done = _run(python, "measure", side, folder, str(prefixes), sharing)
                if done.returncode:
                    click.echo(f"{side} is left out: {done.stderr.strip()[-300:]}", err=True)
                else:
                    found[side].append(json.loads(done.stdout))
    there = [side for side in SIDES if found[side]]
    peers = [side for side in PEERS if found["dynbus"] and found[side]]
    ratios = [f"dynbus to {side}" for side in peers]
    table = Table("", *there, *ratios, title=f"{prefixes} prefixes, medians of {runs} runs")
    for key, title in FIGURES.items():
        figures = [median(run[key] for run in found[side]) for side in there]
        # Within each run, since the machine changes its speed.
        within = [
            median(
                ours[key] / theirs[key]
                for ours, theirs in zip(found["dynbus"], found[side], strict=True)
            )
            for side in peers
        ]
        table.add_row(title, *(f"{one:,.2f}" for one in figures + within))
    Console().print(table)


def _run(python: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", f"benchmarks.radix_index.{module}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


if __name__ == "__main__":
    main()
