"""`dynbus lab replay`: what a routing policy would have made of a trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import click

from dynbus.llm.mock.engine import MockSize
from dynbus.spi import flags, terminal

_HELP: Final = """Simulate a fleet of mock engines on a trace, with one policy after the other.

    TRACE is in Mooncake's format: lines of JSON with timestamp (ms), input_length,
    output_length and hash_ids of blocks of 512 tokens. Time is virtual: an hour of traffic
    takes seconds.

    Policies: round_robin, random, dynamo (Dynamo's cost function), kv (that of dynbus), or
    your own as module:function or file.py:function: it gets a request and its candidates, and
    returns one cost for each. A module is looked for in the current folder first.

    \b
    dynbus lab replay trace.jsonl --instances 8 --policy round_robin,dynamo,kv --speed 4
    dynbus lab replay trace.jsonl --policy dynamo,my_costs:cost --plot ttft.svg
    """


def _check_plot(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a path where no SVG can be written, before minutes of simulation."""
    if path is None:
        return None
    if path.suffix.lower() != ".svg":
        raise click.BadParameter(f"{path} is no SVG file: the plot is SVG, give a name in .svg")
    folder = path.parent
    if not folder.is_dir():
        raise click.BadParameter(f"there is no folder {folder}: make it, or choose another one")
    if not os.access(folder, os.W_OK):
        raise click.BadParameter(f"nothing can be written in {folder}: choose another folder")
    return path


@click.command(help=_HELP, epilog=terminal.EXIT_CODES)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--instances", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--policy",
    "policies",
    default="round_robin,dynamo,kv",
    show_default=True,
    metavar="NAME[,NAME...]",
    help="The policies to compare.",
)
@click.option(
    "--speed",
    type=terminal.number(0, min_open=True),
    default=1.0,
    show_default=True,
    help="How many times faster requests arrive than in the trace.",
)
@click.option("--limit", type=click.IntRange(1), help="Only so many of the first requests.")
@flags(MockSize, only=("block_size", "blocks", "max_num_seqs", "max_num_batched_tokens"))
@click.option(
    "--event-delay",
    type=terminal.number(0),
    default=5.0,
    show_default=True,
    metavar="MS",
    help="Until the router knows what an engine stored or removed.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of random choices.")
@click.option(
    "--slo-ttft", type=float, default=2000.0, show_default=True, metavar="MS", help="For goodput."
)
@click.option(
    "--slo-itl", type=float, default=50.0, show_default=True, metavar="MS", help="For goodput."
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_check_plot,
    help="Write the times to the first token as an SVG image, a file named .svg.",
)
@terminal.json_option
def replay(
    trace: Path,
    instances: int,
    policies: str,
    speed: float,
    limit: int | None,
    event_delay: float,
    seed: int,
    slo_ttft: float,
    slo_itl: float,
    plot_path: Path | None,
    as_json: bool,
    **engine: Any,
) -> None:
    from dynbus import DynbusError
    from dynbus.llm.mock.engine import MockConfig
    from dynbus.llm.replay import Objective, Simulation

    from .policies import policy_names
    from .replaying import print_reports, replay_trace, write_plot

    try:
        objective = Objective(slo_ttft / 1000.0, slo_itl / 1000.0)
        config = MockConfig(**engine)
        simulation = Simulation(
            instances, config, speed=speed, event_delay=event_delay / 1000.0, seed=seed
        )
        replays = replay_trace(trace, simulation, policy_names(policies), objective, limit=limit)
    except DynbusError:
        raise
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    reports = [each.report for each in replays]
    if as_json:
        terminal.print_json([report.as_json() for report in reports])
    else:
        print_reports(reports)
    if plot_path is not None:
        try:
            write_plot(plot_path, replays)
        except OSError as error:
            raise click.ClickException(f"the plot was not written: {error}") from None
