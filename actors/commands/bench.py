"""`dynbus bench`: what the user's own server and machine can do."""

from __future__ import annotations

from typing import Final

import click

from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import json_option, nats_option, print_json, print_table

_HELP: Final = """Measure calls and streams over your own server.

    An echo actor is served in a process of its own and called from this one. What is measured
    includes both of them, so run it where your actors will run. With no server at a loopback
    URL an embedded one is started.

    \b
    dynbus bench
    dynbus bench --nats nats://bus.example:4222 --duration 5 --json
    """


@click.command(help=_HELP, short_help="Measure your own server.", epilog=exit_codes.GENERAL)
@click.option(
    "--duration",
    type=click.FloatRange(0.1, 600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to measure each figure.",
)
@json_option
@nats_option
def bench(duration: float, as_json: bool, nats: str | None) -> None:
    from .benchmarking import FIGURES, measure

    figures = measure(nats, duration)
    if as_json:
        print_json({name: round(value, 1) for name, value in figures.items()})
        return
    print_table(
        ("FIGURE", "VALUE", "UNIT"),
        [(text, f"{figures[name]:,.0f}", unit) for name, text, unit in FIGURES],
    )
