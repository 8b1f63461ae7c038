"""`dynbus lab replay`: what a routing policy would have made of a trace."""

from __future__ import annotations

import math
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
    dynbus lab replay trace.jsonl --kill 60 --scale 300=12 --cold-start 45
    dynbus lab replay trace.jsonl --autoscale 2:16 --cold-start 45 --policy kv
    """


MOST_SECONDS: Final = 1e9
MOST_INSTANCES: Final = 100_000
"""Of a simulated fleet."""


class TimedCount(click.ParamType[tuple[float, int]]):
    """A number of instances from a time on, as SECONDS=N."""

    name = "seconds=n"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, int]:
        at, _, count = str(value).partition("=")
        try:
            seconds, instances = float(at), int(count)
        except ValueError:
            seconds, instances = math.nan, 0
        if not (0.0 <= seconds <= MOST_SECONDS and 0 <= instances <= MOST_INSTANCES):
            self.fail(
                f"{value!r}: give seconds and up to {MOST_INSTANCES:,} instances, as in 60=12",
                *(param, ctx),
            )
        return seconds, instances


class Bounds(click.ParamType[tuple[int, int]]):
    """The least and the most instances, as LEAST:MOST."""

    name = "least:most"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        least, _, most = str(value).partition(":")
        if not (least.isdecimal() and most.isdecimal()):
            self.fail(f"{value!r}: give the least and the most instances, as in 2:16", param, ctx)
        return int(least), int(most)


speed_option: Final = click.option(
    "--speed",
    type=terminal.number(0, min_open=True),
    default=1.0,
    show_default=True,
    help="How many times faster requests arrive than in the trace.",
)
limit_option: Final = click.option(
    "--limit", type=click.IntRange(1), help="Only so many of the first requests."
)


@click.command(help=_HELP, epilog=terminal.EXIT_CODES)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--instances", type=click.IntRange(1, MOST_INSTANCES), default=8, show_default=True)
@click.option(
    "--policy",
    "policies",
    default="round_robin,dynamo,kv",
    show_default=True,
    metavar="NAME[,NAME...]",
    help="The policies to compare.",
)
@speed_option
@limit_option
@click.option(
    "--kill",
    "kills",
    type=terminal.number(0, MOST_SECONDS),
    multiple=True,
    metavar="SECONDS",
    help="An instance dies so long after the first arrival, and another is started; repeatable.",
)
@click.option(
    "--scale",
    "scales",
    type=TimedCount(),
    multiple=True,
    metavar="SECONDS=N",
    help="So long after the first arrival there are to be N instances; repeatable.",
)
@click.option(
    "--autoscale",
    "bounds",
    type=Bounds(),
    metavar="LEAST:MOST",
    help="The autoscaler scales the fleet within these, for --slo-ttft and --slo-itl; it begins "
    "with --instances.",
)
@click.option(
    "--cold-start",
    type=terminal.number(0, MOST_SECONDS),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="From the start of an instance, for --kill, --scale and --autoscale, until it serves.",
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Engines that take the time of this one, of dynbus profile, and have its sizes unless "
    "others are given.",
)
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
    callback=terminal.check_plot,
    help="Write the times to the first token as an SVG image, a file named .svg. A terminal shows "
    "them in any case; - prints that elsewhere, too.",
)
@terminal.json_option
def replay(
    trace: Path,
    instances: int,
    policies: str,
    speed: float,
    limit: int | None,
    kills: tuple[float, ...],
    scales: tuple[tuple[float, int], ...],
    bounds: tuple[int, int] | None,
    cold_start: float,
    profile_path: Path | None,
    event_delay: float,
    seed: int,
    slo_ttft: float,
    slo_itl: float,
    plot_path: Path | None,
    as_json: bool,
    **engine: Any,
) -> None:
    from dynbus import DynbusError
    from dynbus.llm.replay import Objective, Simulation
    from dynbus.llm.replay.scaled import Fault
    from dynbus.llm.scaling import PoolConfig

    from .policies import policy_names
    from .replaying import mock_config, print_reports, replay_trace, ttft_bars, write_plot

    try:
        objective = Objective(slo_ttft / 1000.0, slo_itl / 1000.0)
        config = mock_config(profile_path, engine)
        simulation = Simulation(
            instances, config, speed=speed, event_delay=event_delay / 1000.0, seed=seed
        )
        faults = [
            *(Fault("dies", at) for at in kills),
            *(Fault("hand", at, instances=count) for at, count in scales),
        ]
        replays = replay_trace(
            trace,
            simulation,
            policy_names(policies),
            objective,
            limit=limit,
            faults=faults,
            cold_start=cold_start,
            autoscale=None if bounds is None else PoolConfig("aggregated", *bounds),
        )
    except DynbusError:
        raise
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        terminal.print_json([each.as_json() for each in replays])
    else:
        print_reports(replays)
        terminal.print_bars(
            "Times to the first token", ttft_bars(replays), always=plot_path == terminal.TO_TERMINAL
        )
    if plot_path is not None and plot_path != terminal.TO_TERMINAL:
        try:
            write_plot(plot_path, replays)
        except OSError as error:
            raise click.ClickException(f"the plot was not written: {error}") from None
