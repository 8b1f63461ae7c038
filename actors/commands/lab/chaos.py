"""`dynbus lab chaos`: break what a graph runs on, on purpose, and say whether its promises held."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import anyio
import click
import msgspec

from dynbus.actors.chaos.checker import Spread
from dynbus.actors.chaos.report import Report
from dynbus.actors.chaos.schedule import Kind, parse_kinds, parse_pauses
from dynbus.actors.chaos.trial import StartFailed, TrialOptions, run_trial
from dynbus.actors.commands.options import (
    TargetsCommand,
    file_option,
    namespace_option,
    plan_request,
)
from dynbus.actors.running.planning import PlanFailed
from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.errors import ConfigError
from dynbus.bus.lane import new_event_loop
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.telemetry.logs import configure_logging

_HELP: Final = """Break what the actors of TARGETs run on, and check every call meanwhile.

    dynbus starts a nats-server and the actors, as `dynbus run` does, calls them, and breaks its own
    processes, server and connections: it kills, freezes, restarts, cuts off, adds and drains them.
    It touches no other server and no other process. Without a TARGET it serves echoes, whose items
    are known beforehand. The same seed gives the same faults at the same times.

    \b
    Faults for --kinds:
      kill, kill-third      kill -9 of one instance, of a third of them
      freeze                SIGSTOP of an instance, SIGCONT up to 5 s later
      join, leave, restart  one instance more, one less, all of a node one by one
      server, leader        kill -9 of a nats-server, of the one that leads a cluster
      freeze-server         SIGSTOP of a nats-server: nobody is told that it is gone
      delay, cut, half-open the connections of an instance or of the callers
      silence               the whole link of an instance or of the callers, without a word

    \b
    dynbus lab chaos --minutes 1
    dynbus lab chaos --minutes 10 --seed 7 --kinds kill,freeze --pause 0.5-2 --json found.json
    dynbus lab chaos --servers 3 --kinds leader --pause 8
    dynbus lab chaos actors.py --call demo.Shouter.shout='"a b"' --minutes 2

    A call of a graph that is answered twice in the same way, while nothing is wrong, must be
    answered so always. Ctrl-C ends the faults, and what was found until then is told.
    """

_EPILOG: Final = (
    "Exit codes: 0 every promise was kept, 1 one was not, 2 wrong usage, 3 wrong configuration, "
    "4 no server, 5 an actor did not start, 130 ended by Ctrl-C before its time, every promise "
    "kept until then."
)


@click.command(cls=TargetsCommand, help=_HELP, epilog=_EPILOG)
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@file_option
@namespace_option
@click.option(
    "--minutes",
    type=terminal.number(0.01, 1440),
    default=1.0,
    show_default=True,
    help="How long faults go on.",
)
@click.option("--seed", type=click.IntRange(0), help="Of the faults; a random one, which is told.")
@click.option("--kinds", metavar="KIND,...", help="Which faults; all that there are.")
@click.option(
    "--pause",
    metavar="SECONDS",
    default="1-4",
    show_default=True,
    help="Between two faults, or its least and its most.",
)
@click.option(
    "--instances",
    type=click.IntRange(1, 256),
    help="Of each node. Default: 4 echoes; as many as the graph says, and 2 at least.",
)
@click.option(
    "--servers", type=click.Choice(["1", "3"]), default="1", show_default=True, help="3: a cluster."
)
@click.option(
    "--callers",
    type=click.IntRange(1, 4096),
    default=16,
    show_default=True,
    help="How many calls are open at a time.",
)
@click.option(
    "--call",
    "calls",
    metavar="ENDPOINT[=JSON]",
    multiple=True,
    help="Call namespace.component.endpoint; repeatable. Default: all that need no request.",
)
@click.option(
    "--timeout",
    type=terminal.number(0.1, 3600),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Of each --call.",
)
@click.option("--strict", is_flag=True, help="No --call may fail, whatever its handler declares.")
@click.option("--json", "as_json", metavar="FILE", help="Write what was found; - is the output.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"]),
    default="critical",
    show_default=True,
    help="Of everything that runs: much is logged when much fails.",
)
@click.pass_context
def chaos(
    ctx: click.Context,
    /,
    targets: tuple[str, ...],
    config_files: tuple[str, ...],
    namespace: str | None,
    seed: int | None,
    as_json: str | None,
    **given: Any,
) -> None:
    graph = plan_request(ctx, targets, config_files, namespace) if targets else None
    if graph is None and (config_files or namespace or ctx.meta["dynbus.options"]):
        raise click.UsageError("-f, --namespace and --Actor.ARGUMENT are for a TARGET", ctx)
    options = _options(graph, random_seed() if seed is None else seed, **given)
    ctx.exit(execute(options, as_json))


def random_seed() -> int:
    """One that is short enough to be typed."""
    return int.from_bytes(os.urandom(4), "big")


def _options(
    graph: Any,
    seed: int,
    *,
    minutes: float,
    kinds: str | None,
    pause: str,
    instances: int | None,
    servers: str,
    callers: int,
    calls: Sequence[str],
    timeout: float,
    strict: bool,
    log_level: str,
) -> TrialOptions:
    """The options of the command line.

    Raises:
        ConfigError: an option is not usable, or does not fit the others.
    """
    chosen = list(Kind) if kinds is None else parse_kinds(kinds)
    if servers == "1":
        if kinds is not None and Kind.LEADER in chosen:
            raise ConfigError("leader needs a cluster: add --servers 3, or use server")
        chosen = [kind for kind in chosen if kind is not Kind.LEADER]
    if graph is None and (calls or strict):
        raise ConfigError(
            "--call and --strict are for a TARGET: the echoes are called by themselves"
        )
    return TrialOptions(
        graph=graph,
        calls=[_read_call(text) for text in calls],
        seed=seed,
        seconds=60.0 * minutes,
        kinds=chosen,
        pauses=parse_pauses(pause),
        instances=instances,
        servers=int(servers),
        callers=callers,
        timeout=timeout,
        strict=strict,
        log_level=log_level,
    )


def _read_call(text: str) -> tuple[EndpointName, bytes | None]:
    name, equals, request = text.partition("=")
    endpoint = EndpointName.parse(name)
    if not equals:
        return endpoint, None
    data = os.fsencode(request)
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"--call {name}: the request is not JSON: {error}; text needs quotes of its own, for "
            f"example --call {name}='\"a\"'"
        ) from None
    return endpoint, data


def execute(options: TrialOptions, as_json: str | None) -> int:
    """Carry it out and tell what was found; returns the exit code.

    Raises:
        ConfigError, Unavailable: it cannot be carried out.
    """
    configure_logging("console", options.log_level)
    file = _open(as_json)
    terminal.notice(
        f"dynbus: faults for {terminal.duration(options.seconds)} with --seed {options.seed}: "
        f"{', '.join(options.kinds)}"
    )
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            report = runner.run(_interruptible(options))
    except (PlanFailed, StartFailed) as error:
        if error.failure.traceback:
            click.echo(error.failure.traceback.rstrip(), err=True)
        click.echo(terminal.error_line(error.failure.message), err=True)
        return error.failure.code
    if file is not None:
        with file:
            file.write(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if as_json == "-":
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        _print(report)
    if not report.held:
        return exit_codes.FAILURE
    return exit_codes.INTERRUPTED if report.interrupted else exit_codes.OK


def _open(path: str | None) -> IO[bytes] | None:
    """The file for what is found; found out before minutes have gone by that it cannot be."""
    if path is None or path == "-":
        return None
    try:
        return Path(path).open("wb")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None


async def _interruptible(options: TrialOptions) -> Report:
    """The first signal ends the faults, the second all, the third whatever is left."""
    interrupted, loop = asyncio.Event(), asyncio.get_running_loop()
    with anyio.CancelScope() as running:

        def signalled() -> None:
            if running.cancel_called:
                os._exit(exit_codes.INTERRUPTED)
            if interrupted.is_set():
                running.cancel()
                return
            interrupted.set()
            terminal.notice("dynbus: healing what is broken; press Ctrl-C again to stop at once")

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signalled)
        return await run_trial(options, interrupted)
    raise KeyboardInterrupt


def _print(report: Report) -> None:
    """For people."""
    rows = [("seed", str(report.seed)), ("faults for", f"{report.seconds:g} s")]
    rows += [(f"  {kind}", str(count)) for kind, count in sorted(report.carried_out.items())]
    rows += [(f"  {kind}, skipped", str(count)) for kind, count in sorted(report.skipped.items())]
    rows += [(f"instances of {node}", str(count)) for node, count in report.instances.items()]
    rows += [("load", text) for text in report.load]
    rows += [("calls", f"{report.calls:,} by {report.callers} callers, {report.items:,} items")]
    rows += [(f"  ended: {code}", f"{count:,}") for code, count in sorted(report.ends.items())]
    rows += [(f"stalls after {kind}", _of(figure)) for kind, figure in report.stalls.items()]
    if report.unexplained is not None:
        rows += [("stalls without a fault", _of(report.unexplained))]
    whole = "never" if report.whole_after is None else f"{report.whole_after:g} s"
    rows += [("whole again after", whole)]
    memory = f"{report.before.held.memory:g} to {report.after.held.memory:g} MiB"
    rows += [("memory of the callers", memory)]
    rows += [(f"BROKEN: {promise}", f"{count:,}") for promise, count in report.broken.items()]
    rows += [
        (f"  {each.call}", f"{each.promise.value}: {each.details}") for each in report.violations
    ]
    rows += [("promises", "all kept" if report.held else "NOT kept")]
    terminal.print_table(
        ("WHAT", "FOUND"), [(terminal.plain(what), terminal.plain(figure)) for what, figure in rows]
    )


def _of(spread: Spread) -> str:
    return (
        f"{spread.count}: median {spread.p50:.2f} s, p99 {spread.p99:.2f} s, "
        f"longest {spread.longest:.2f} s"
    )
