"""What a block costs in time and memory: python -m benchmarks.block_path"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from .workload import OUTPUT_BLOCKS, PROMPT_BLOCKS

STORED: Final = ("worker, prompts", "index, prompts", "decision")
"""The stages of a prompt's block, each in microseconds."""

Figures = Mapping[str, float]


def run(what: str, prompts: int, checkout: Path | None) -> Figures:
    """What one process measures, with the code of a checkout or the one that is installed."""
    environment = dict(os.environ)
    if checkout is not None:
        environment["PYTHONPATH"] = str(checkout / "src")
    command = [sys.executable, "-m", "benchmarks.block_path.measure", what, str(prompts)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, env=environment
    )
    figures: Figures = json.loads(done.stdout)
    return figures


def shown(times: Sequence[Figures], held: Figures) -> dict[str, float]:
    """The medians of the times in microseconds, and the bytes of each place."""
    found = {name: 1e6 * median(one[name] for one in times) for name in times[0]}
    found["a prompt's block, engine to decision"] = sum(found[name] for name in STORED)
    whole = PROMPT_BLOCKS + OUTPUT_BLOCKS
    for place in ("worker", "index"):
        of_prompts, of_outputs = held[f"{place}, prompts"], held[f"{place}, outputs"]
        each = (of_prompts * PROMPT_BLOCKS + of_outputs * OUTPUT_BLOCKS) / whole
        found[f"bytes, {place}"] = each
    found["bytes, worker and index"] = found["bytes, worker"] + found["bytes, index"]
    found["bytes, a guess meanwhile"] = held["guess"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--before", type=Path, help="a checkout of another version, measured in turn with this one"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    checkouts: dict[str, Path | None] = {"now": None}
    if options.before is not None:
        checkouts = {"before": options.before.resolve(), "now": None}
    times: dict[str, list[Figures]] = {name: [] for name in checkouts}
    for _ in range(options.runs):
        for name, checkout in checkouts.items():
            times[name].append(run("time", options.prompts, checkout))
    found = {
        name: shown(times[name], run("bytes", options.prompts, checkout))
        for name, checkout in checkouts.items()
    }
    for row in found["now"]:
        values = [found[name][row] for name in checkouts]
        ratio = f"{values[-1] / values[0]:8.2f}" if len(values) > 1 else ""
        print(f"{row:40}", *(f"{value:10.2f}" for value in values), ratio)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
