"""The work and the output of `dynbus lab replay`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from dynbus.llm.replay.plot import plot_ttft
from dynbus.llm.replay.report import Objective, Report, summarize, ttft_seconds
from dynbus.llm.replay.simulation import Simulation
from dynbus.llm.replay.trace import Trace, read_trace
from dynbus.spi import terminal


class Replay(NamedTuple):
    """A policy's figures, and the seconds to the first token; of shape [requests]."""

    report: Report
    ttft: NDArray[np.float64]


def replay_trace(
    path: Path,
    simulation: Simulation,
    policies: Sequence[str],
    objective: Objective,
    *,
    limit: int | None = None,
) -> list[Replay]:
    """Replay a trace with each policy, with a progress bar on standard error.

    Raises:
        ConfigError: there is no such policy, or it returns no costs.
        InvalidTrace: the trace is none.
        OSError: the trace cannot be read.
        ValueError: the simulation does not fit the trace, and which option to change.
    """
    for policy in policies:
        # What is not known is said before anything is simulated.
        simulation.config(policy)
    replays: list[Replay] = []
    with _progress_bar() as bar:
        reading = bar.add_task("reading", total=limit)
        trace = read_trace(
            path,
            block_size=simulation.engine.block_size,
            limit=limit,
            progress=partial(_show, bar, reading),
        )
        bar.update(reading, completed=len(trace.requests), total=len(trace.requests))
        _check_room(trace, path, simulation)
        for policy in policies:
            task = bar.add_task(terminal.plain(policy), total=len(trace.requests))
            result = simulation.run(trace, policy, progress=partial(_show, bar, task))
            bar.update(task, completed=len(trace.requests))
            report = summarize(policy, result, objective=objective)
            replays.append(Replay(report, ttft_seconds(result.requests)))
    return replays


def _check_room(trace: Trace, path: Path, simulation: Simulation) -> None:
    engine = simulation.engine
    # The last token is never computed.
    needs = [one.prompt_tokens + one.output_tokens - 1 for one in trace.requests]
    room = (engine.blocks - engine.headroom) * engine.block_size
    for request, needed in zip(trace.requests, needs, strict=True):
        if needed > room:
            enough = -(-max(needs) // engine.block_size) + engine.headroom
            raise ValueError(
                f"{path}, line {request.line}: the request needs {needed} tokens in the cache, and "
                f"--blocks {engine.blocks} of {engine.block_size} tokens hold {room}: give "
                f"--blocks {enough} or more"
            )


def _show(bar: Progress, task: TaskID, done: int) -> None:
    bar.update(task, completed=done)


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def write_plot(path: Path, replays: Sequence[Replay]) -> None:
    """Write the times to the first token as an SVG image."""
    path.write_text(plot_ttft({each.report.policy: each.ttft for each in replays}))


def print_reports(reports: Sequence[Report]) -> None:
    """Print a table: a column for each policy."""
    rows = [
        ("requests", [f"{each.requests:,}" for each in reports]),
        ("duration, s", [f"{each.duration_s:,.1f}" for each in reports]),
        ("TTFT mean, ms", [f"{each.ttft_ms.mean:,.1f}" for each in reports]),
        ("TTFT p50, ms", [f"{each.ttft_ms.p50:,.1f}" for each in reports]),
        ("TTFT p99, ms", [f"{each.ttft_ms.p99:,.1f}" for each in reports]),
        ("ITL mean, ms", [f"{each.itl_ms.mean:,.2f}" for each in reports]),
        ("ITL p50, ms", [f"{each.itl_ms.p50:,.2f}" for each in reports]),
        ("ITL p99, ms", [f"{each.itl_ms.p99:,.2f}" for each in reports]),
        ("hit rate", [f"{each.hit_rate:.2%}" for each in reports]),
        ("output tokens/s", [f"{each.output_tokens_per_s:,.1f}" for each in reports]),
        ("goodput, requests/s", [f"{each.goodput:,.2f}" for each in reports]),
        ("balance", [f"{each.balance:.3f}" for each in reports]),
        ("preempted", [f"{each.preempted:,}" for each in reports]),
    ]
    terminal.print_table(
        ("FIGURE", *(terminal.plain(each.policy) for each in reports)),
        [(name, *values) for name, values in rows],
    )
