"""`dynbus plan`: how many engines a traffic takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from dynbus.spi import terminal

from .replay import MOST_INSTANCES, limit_option, speed_option

MOST_BLOCKS: Final = 100_000_000
"""Of a cache or a tier: a simulated one has a place for each."""

_HELP: Final = """Say how many engines of which profile keep an objective on a trace.

    TRACE is in the format of `dynbus lab replay`, and time is virtual, too. For each profile,
    policy and size of cache the fewest engines are searched. The range behind their number is what
    they would be if the profile erred as it did on the runs that were held out, and with other
    seeds of the router.

    An objective is METRIC_STATISTIC=TIME, several with commas: ttft (to the first token), itl
    (between two tokens), tpot (the mean of these in a request) and e2e (to the last token), as mean
    or as a percentile.

    \b
    dynbus plan --trace trace.jsonl --profile small.json --objective ttft_p95=500ms,itl_p95=50ms
    dynbus plan --trace trace.jsonl --profile a.json --price 1 --profile b.json --price 2.5 \\
        --objective ttft_p99=2s --policy kv,dynamo --blocks 1024,4096 --layout together,apart
    """


@click.command(help=_HELP, epilog=terminal.EXIT_CODES)
@click.option(
    "--trace",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The traffic.",
)
@click.option(
    "--profile",
    "profiles",
    required=True,
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of dynbus profile. Repeatable.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    type=terminal.number(0, 1e12, min_open=True),
    help="Of an engine of each profile, in their order; 1 unless given. Repeatable.",
)
@click.option("--objective", required=True, metavar="METRIC=TIME[,...]", help="What is to be kept.")
@click.option(
    "--policy",
    "policies",
    default="kv",
    show_default=True,
    metavar="NAME[,NAME...]",
    help="The policies of the router to compare, as of dynbus lab replay.",
)
@click.option(
    "--blocks",
    default="",
    metavar="N[,N...]",
    help="Sizes of each engine's cache to compare; the profile's unless given.",
)
@click.option(
    "--host-blocks",
    default="0",
    show_default=True,
    metavar="N[,N...]",
    help="Sizes of its host tier to compare. To bring blocks back takes no time.",
)
@click.option(
    "--layout",
    "layouts",
    default="together",
    show_default=True,
    metavar="NAME[,NAME]",
    help="together: each engine computes prompts and decodes. apart: some do the one, others the "
    "other.",
)
@click.option(
    "--bandwidth",
    type=terminal.number(0, 1e9, min_open=True),
    default=10.0,
    show_default=True,
    metavar="GB/S",
    help="Of blocks that move from one engine to another, apart.",
)
@speed_option
@limit_option
@click.option(
    "--most",
    type=click.IntRange(1, MOST_INSTANCES),
    default=64,
    show_default=True,
    help="Engines that are tried.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Of the router, for the range.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=terminal.check_plot,
    help="Write what numbers of engines attain as an SVG image, a file named .svg. A terminal "
    "shows it in any case; - prints that elsewhere, too.",
)
@terminal.json_option
def plan(
    trace: Path,
    profiles: Sequence[Path],
    prices: Sequence[float],
    objective: str,
    policies: str,
    blocks: str,
    host_blocks: str,
    layouts: str,
    bandwidth: float,
    speed: float,
    limit: int | None,
    most: int,
    seeds: int,
    plot_path: Path | None,
    as_json: bool,
) -> None:
    from dynbus import DynbusError

    from .planning import (
        Choices,
        attempt_bars,
        configurations,
        parse_objective,
        plan_as_json,
        plan_trace,
        print_plans,
        write_plot,
    )
    from .policies import policy_names

    if len(prices) > len(profiles):
        raise click.BadParameter(
            f"{len(prices)} prices for {len(profiles)} profiles: give one for each at most",
            param_hint="--price",
        )
    if "apart" in layouts and most < 2:
        raise click.BadParameter(
            f"{most}: the layout apart has 2 engines at least: give 2 or more, or leave it out",
            param_hint="--most",
        )
    try:
        targets = parse_objective(objective)
        choices = Choices(
            list(dict.fromkeys(policy_names(policies))),
            _numbers("--blocks", blocks, least=1),
            _numbers("--host-blocks", host_blocks, least=0),
            _layouts(layouts),
            bandwidth * 1e9,
        )
        planned = configurations(profiles, prices, choices)
        plans = plan_trace(
            trace, planned, targets, speed=speed, limit=limit, allowed=most, seeds=seeds
        )
    except DynbusError:
        raise
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        terminal.print_json([plan_as_json(each, targets) for each in plans])
    else:
        print_plans(plans, targets, most)
        terminal.print_bars(
            "Engines, and the worst target as a part of its limit",
            attempt_bars(plans, targets),
            always=plot_path == terminal.TO_TERMINAL,
        )
    if plot_path is not None and plot_path != terminal.TO_TERMINAL:
        try:
            write_plot(plot_path, plans, targets)
        except OSError as error:
            raise click.ClickException(f"the plot was not written: {error}") from None
    if all(each.engines is None for each in plans):
        raise SystemExit(terminal.FAILURE)


def _numbers(option: str, text: str, *, least: int) -> list[int]:
    """The numbers of an option, with commas between."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [-1]
    if not all(least <= number <= MOST_BLOCKS for number in numbers):
        raise click.BadParameter(
            f"{text!r}: give whole numbers from {least} to {MOST_BLOCKS:,}, with commas between",
            param_hint=option,
        )
    return list(dict.fromkeys(numbers))


def _layouts(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names or not set(names) <= {"together", "apart"}:
        raise click.BadParameter(
            f"{text!r}: give together, apart, or both with a comma between", param_hint="--layout"
        )
    return list(dict.fromkeys(names))
