"""`dynbus stop`, `dynbus restart`, `dynbus scale`: change a `dynbus run` that goes on."""

from __future__ import annotations

import re

import click

from dynbus.actors.running.control import (
    Done,
    Progress,
    Question,
    Refused,
    RestartNodes,
    ScaleNode,
    StopRun,
    ask,
    find_run,
    wait_for_end,
)
from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import terminal

_SCALE = re.compile(r"([\w.-]+)=(\d+)", re.ASCII)

run_option = click.option(
    "--run",
    "pid",
    type=int,
    metavar="PID",
    help="The process of the `dynbus run`, where several in this folder may be meant.",
)


@click.command(help="End the `dynbus run` of this folder: it drains, and has ended when this has.")
@click.option("--now", is_flag=True, help="End it at once, without a drain.")
@run_option
@click.pass_context
def stop(ctx: click.Context, /, *, now: bool, pid: int | None) -> None:
    """`dynbus stop`."""
    ctx.exit(_carry_out(pid, StopRun(now)))


@click.command(
    help="""Replace the instances of the `dynbus run` of this folder by new ones, one at a time.

    Each is drained when the one that replaces it is ready; where that does not start, the old ones
    go on. NODE is namespace.component, or the component alone; without any, all are restarted.

    What the files say now is compared with what runs first. Where callers of the running instances
    could not go on with the new ones, nothing is restarted, and the message names the field;
    `dynbus schema check` tells more.
    """,
    epilog="Exit codes: 0 restarted, 1 refused, or a new instance did not start, 2 wrong usage, "
    "3 there is no such run.",
)
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@click.option("--force", is_flag=True, help="Restart whatever becomes of callers.")
@run_option
@click.pass_context
def restart(ctx: click.Context, /, *, nodes: tuple[str, ...], force: bool, pid: int | None) -> None:
    """`dynbus restart`."""
    ctx.exit(_carry_out(pid, RestartNodes(list(nodes), force)))


def _counted(
    ctx: click.Context, _parameter: click.Parameter, given: tuple[str, ...]
) -> list[ScaleNode]:
    """Parse NODE=COUNT.

    Raises:
        click.UsageError: something else was given.
    """
    nodes: list[ScaleNode] = []
    for each in given:
        match = _SCALE.fullmatch(each)
        if match is None:
            raise click.UsageError(f"{each!r}: write NODE=COUNT, for example Splitter=3", ctx)
        nodes.append(ScaleNode(match[1], int(match[2])))
    return nodes


@click.command(
    help="""Have the `dynbus run` of this folder run so many instances of a node.

    \b
    dynbus scale demo.Splitter=3
    dynbus scale Splitter=0 Shouter=2
    """
)
@click.argument("counts", nargs=-1, required=True, metavar="NODE=COUNT...", callback=_counted)
@run_option
@click.pass_context
def scale(ctx: click.Context, /, *, counts: list[ScaleNode], pid: int | None) -> None:
    """`dynbus scale`."""
    ctx.exit(_carry_out(pid, *counts))


def _names(question: Question) -> list[str]:
    """The nodes that a question is about."""
    if isinstance(question, RestartNodes):
        return question.names
    return [question.name] if isinstance(question, ScaleNode) else []


def _carry_out(pid: int | None, *questions: Question) -> int:
    """Ask a run, and tell what it does; returns the exit code."""
    run = find_run(pid, [name for question in questions for name in _names(question)])
    for question in questions:
        done = isinstance(question, StopRun)
        for answer in ask(run, question):
            if isinstance(answer, Progress):
                click.echo(terminal.printable(answer.text))
            elif isinstance(answer, Refused):
                click.echo(terminal.error_line(answer.reason), err=True)
                return exit_codes.FAILURE
            done = done or isinstance(answer, Done)
        if not done:
            click.echo(
                terminal.error_line(f"dynbus run {run} ended before it had done this"), err=True
            )
            return exit_codes.FAILURE
        if isinstance(question, StopRun):
            wait_for_end(run)
    return exit_codes.OK
