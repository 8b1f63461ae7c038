"""`dynbus graph`: draw which actors a run has and who calls whom."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import click

from dynbus.actors.running.drawing import called_by, dot, mermaid, tree
from dynbus.actors.running.plan import PlannedNode
from dynbus.actors.running.planning import load_run
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.errors import ConfigError

from .options import TargetsCommand, file_option, namespace_option, plan_request, targets_argument

GRAPHVIZ_SECONDS: Final = 60.0


def svg(nodes: Sequence[PlannedNode]) -> str:
    """A picture that Graphviz draws.

    Raises:
        ConfigError: Graphviz is not there, or fails.
    """
    program = shutil.which("dot")
    if program is None:
        raise ConfigError(
            "--format svg needs Graphviz, whose program dot is not on the path: install the "
            "package graphviz, or use --format mermaid"
        )
    try:
        drawn = subprocess.run(
            [program, "-Tsvg"],
            input=dot(nodes),
            capture_output=True,
            text=True,
            timeout=GRAPHVIZ_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"Graphviz failed: {error}") from None
    if drawn.returncode != 0:
        raise ConfigError(f"Graphviz failed: {drawn.stderr.strip()}")
    return drawn.stdout


FORMATS: Final[Mapping[str, Callable[[Sequence[PlannedNode]], str]]] = {
    "tree": tree,
    "mermaid": mermaid,
    "dot": dot,
    "svg": svg,
}


@click.command(
    cls=TargetsCommand,
    help="""Draw the graph of the actors of TARGETs: who runs, how often, and who calls whom.

    Nothing is started. TARGETs and options are those of `dynbus run`. An
    endpoint with * is a stream.

    \b
    dynbus graph actors.py
    dynbus graph actors.py --format mermaid
    dynbus graph actors.py -f config.yaml --format svg > graph.svg
    """,
)
@targets_argument
@file_option
@namespace_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(list(FORMATS)),
    default="tree",
    show_default=True,
    help="svg needs Graphviz.",
)
@terminal.json_option
@click.pass_context
def graph(
    ctx: click.Context,
    /,
    *,
    targets: tuple[str, ...],
    config_files: tuple[str, ...],
    namespace: str | None,
    kind: str,
    as_json: bool,
) -> None:
    """`dynbus graph`."""
    nodes = load_run(plan_request(ctx, targets, config_files, namespace), os.environ).plan().nodes
    if as_json:
        terminal.print_json(
            [
                {
                    "address": node.address,
                    "class": node.actor,
                    "instances": node.service.workers,
                    "resources": node.service.resources.declared(),
                    "endpoints": node.endpoints,
                    "calls": called_by(node),
                }
                for node in nodes
            ]
        )
    else:
        click.echo(FORMATS[kind](nodes))
