"""`dynbus stop`, `restart`, `scale` and `drain`: change a `dynbus run` that goes on, that of this
folder or over the bus.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import click

from dynbus.actors.running.control import (
    Answer,
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
from dynbus.bus.errors import ConfigError, NoInstances

if TYPE_CHECKING:
    from dynbus.bus.commands.server import Server
    from dynbus.bus.commands.survey import InstanceReport

_SCALE = re.compile(r"([\w.-]+)=(\d+)", re.ASCII)
_HOST: Final = re.compile(r"host=(.+)")

run_option = click.option(
    "--run",
    "pid",
    type=int,
    metavar="PID",
    help="The process of the `dynbus run`, where several in this folder may be meant.",
)
host_option = click.option(
    "--host",
    metavar="NAME",
    help="Over the bus, the runs on this host; * for those on any. It takes the role operator.",
)


@click.command(help="End the `dynbus run` of this folder: it drains, and has ended when this has.")
@click.option("--now", is_flag=True, help="End it at once, without a drain.")
@run_option
@host_option
@terminal.nats_option
@click.pass_context
def stop(
    ctx: click.Context, /, *, now: bool, pid: int | None, host: str | None, nats: str | None
) -> None:
    """`dynbus stop`."""
    ctx.exit(_steer(pid, host, nats, StopRun(now)))


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
@host_option
@terminal.nats_option
@click.pass_context
def restart(
    ctx: click.Context,
    /,
    *,
    nodes: tuple[str, ...],
    force: bool,
    pid: int | None,
    host: str | None,
    nats: str | None,
) -> None:
    """`dynbus restart`."""
    ctx.exit(_steer(pid, host, nats, RestartNodes(list(nodes), force)))


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
    dynbus scale Splitter=3 --host node-7
    """
)
@click.argument("counts", nargs=-1, required=True, metavar="NODE=COUNT...", callback=_counted)
@run_option
@host_option
@terminal.nats_option
@click.pass_context
def scale(
    ctx: click.Context,
    /,
    *,
    counts: list[ScaleNode],
    pid: int | None,
    host: str | None,
    nats: str | None,
) -> None:
    """`dynbus scale`."""
    ctx.exit(_steer(pid, host, nats, *counts))


def _host(ctx: click.Context, _parameter: click.Parameter, given: str) -> str:
    """Parse host=NAME.

    Raises:
        click.UsageError: something else was given.
    """
    match = _HOST.fullmatch(given)
    if match is None:
        raise click.UsageError(f"{given!r}: write host=NAME, for example host=node-7", ctx)
    return match[1]


@click.command(
    help="""End every `dynbus run` on a host, over the bus: each drains, and has ended with this.

    Hosts are those of `dynbus ps --hosts`: DYNBUS_HOST of a process, or its host name. What an
    orchestrator owns is not ended, and it is said what to do there instead.

    \b
    dynbus drain host=node-7
    """,
    epilog="Exit codes: 0 all have ended, 1 instances of the host go on or no run of it answers, "
    "2 wrong usage, 4 no server can be asked.",
)
@click.argument("host", metavar="host=NAME", callback=_host)
@terminal.nats_option
@click.pass_context
def drain(ctx: click.Context, /, *, host: str, nats: str | None) -> None:
    """`dynbus drain`."""
    ctx.exit(_steer(None, host, nats, StopRun()))


def _names(question: Question) -> list[str]:
    """The nodes that a question is about."""
    if isinstance(question, RestartNodes):
        return question.names
    return [question.name] if isinstance(question, ScaleNode) else []


def _steer(pid: int | None, host: str | None, nats: str | None, *questions: Question) -> int:
    """Ask the run of this folder, or with a host those there; returns the exit code."""
    if host is not None:
        import asyncio

        return asyncio.run(_over_bus(pid, host, nats, questions))
    if nats is not None:
        raise click.UsageError("--nats is for --host: the run of this folder is asked directly")
    return _carry_out(pid, *questions)


def _carry_out(pid: int | None, *questions: Question) -> int:
    """Ask a run, and tell what it does; returns the exit code."""
    run = find_run(pid, [name for question in questions for name in _names(question)])
    for question in questions:
        done = isinstance(question, StopRun)
        for answer in ask(run, question):
            if not _tell(answer):
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


def _tell(answer: Answer, where: str = "") -> bool:
    """Print a step; False when it is a refusal."""
    if isinstance(answer, Refused):
        click.echo(terminal.error_line(f"{where}{answer.reason}"), err=True)
        return False
    if isinstance(answer, Progress):
        click.echo(terminal.printable(f"{where}{answer.text}"))
    return True


async def _over_bus(
    pid: int | None, host: str, nats: str | None, questions: Iterable[Question]
) -> int:
    """Ask runs of a host, one after the other; returns the exit code."""
    from .remote_control import ask_over_bus, find_runs, fitting

    questions = list(questions)
    names = [name for question in questions for name in _names(question)]
    async with terminal.server(terminal.settings(nats), "dynbus-steer") as server:
        rows = (await terminal.survey(server)).rows
        named = [name.partition(".")[0] for name in names if "." in name]
        namespaces = [*named, *(row.namespace for row in rows)]
        runs = await find_runs(server, namespaces, terminal.notice)
        drains_host = isinstance(questions[0], StopRun) and pid is None
        try:
            chosen = fitting(runs, host=host, pid=pid, nodes=names)
        except NoInstances:
            if drains_host:
                await _nobody_left(server, host)
            raise
        if len(chosen) > 1 and any(isinstance(each, ScaleNode) for each in questions):
            choices = " or ".join(f"--host {run.host} --run {run.pid}" for run in chosen)
            raise ConfigError(f"several runs have {', '.join(names)}: add {choices}")
        all_done = True
        for run in chosen:
            for question in questions:
                async for answer in ask_over_bus(server, run, question):
                    all_done = _tell(answer, f"{run.host} {run.pid}: ") and all_done
            if all_done and isinstance(questions[0], StopRun):
                click.echo(terminal.printable(f"{run.host} {run.pid}: ended"))
            elif not all_done and not isinstance(questions[0], StopRun):
                # The next ones would most likely be refused as well, and serve meanwhile.
                return exit_codes.FAILURE
        if drains_host:
            all_done = await _nobody_left(server, host) and all_done
    return exit_codes.OK if all_done else exit_codes.FAILURE


async def _nobody_left(server: Server, host: str) -> bool:
    """True if no instance of a host is left that serves; those that are, are told."""
    rows = (await terminal.survey(server)).rows
    left: list[InstanceReport] = [
        row for row in rows if host in ("*", row.host) and row.state == "serving"
    ]
    for row in left:
        terminal.notice(
            f"{row.namespace}.{row.component} {row.instance_id} at {row.address} goes on: no "
            "dynbus run that answers has it, so end its process there"
        )
    return not left
