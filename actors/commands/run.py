"""`dynbus run`: serve the actors of files and modules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from dynbus.actors.placing.allotment import Place
from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.control import controlled
from dynbus.actors.running.in_process import (
    Ending,
    Failure,
    StartFailed,
    failure_of,
    leave_within,
    problems_of,
    running_threads,
    serve,
    stalls_of,
)
from dynbus.actors.running.plan import Plan
from dynbus.actors.running.planning import (
    LoadedRun,
    MakePlan,
    NotOnThisMachine,
    PlanFailed,
    load_run,
    plan_elsewhere,
    plan_of_bus,
)
from dynbus.actors.running.processes import ForkServer
from dynbus.actors.running.supervisor import Supervisor
from dynbus.actors.runtime import Runtime
from dynbus.actors.serving.instance import InstanceBroken
from dynbus.bus import exit_codes
from dynbus.bus.background import task_group
from dynbus.bus.commands.server import Server, connected, embedded_if_local
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import BusConfig, load_config
from dynbus.bus.errors import ConfigError, DynbusError
from dynbus.bus.extras import has_extra
from dynbus.bus.identity.credentials import own_credentials
from dynbus.bus.lane import new_event_loop
from dynbus.bus.telemetry.health import HealthServer, Status, health_tls, metrics_remedy
from dynbus.bus.telemetry.logs import configure_logging, redact_url

from .graph import FORMATS
from .interrupts import Interrupts
from .options import (
    RunOptions,
    TargetsCommand,
    check_options,
    file_option,
    health_address,
    namespace_option,
    targets_argument,
)
from .plan import print_plan
from .reload import Reloader, Watch, watching
from .remote_control import RemoteControl, heard_as, own_owner
from .rollout import Rollout
from .starting import show_start

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

AT_ONCE_SECONDS: Final = 2.0
"""Seconds after the second signal within which this process has ended whatever happens."""
CHILDREN_SECONDS: Final = 5.0
"""The same where there are children, which are killed one by one before."""

_HELP: Final = """Serve the actors of TARGETs, one process per instance.

    \b
    A TARGET is
      actors.py             the actors that the file defines
      actors.py:Shouter     one of them
      package.module:Name   one of an installed module

    Their dependencies start with them. With no server at a loopback URL, dynbus starts an embedded
    nats-server, with its data in .dynbus; it ends with the last run that uses it.
    The first Ctrl-C or SIGTERM drains the run: it takes no more calls and lets running ones finish.
    The second stops it at once.

    \b
    dynbus run actors.py
    dynbus run actors.py --Splitter.separator=, --Splitter.workers=2
    dynbus run actors.py:Shouter other.py -f config.yaml
    dynbus run actors.py --Splitter.workers=0     Splitter runs elsewhere
    dynbus run actors.py --namespace staging
    dynbus run actors.py --reload --log-level debug
    dynbus run actors.py --dry-run
    dynbus run actors.py --graph tree

    \b
    config.yaml:
      Splitter:
        separator: ","
        ServiceArgs: {workers: 2}
      bus:
        drain_grace: 10

    The command line overrides the environment (DYNBUS_Splitter__separator, then DYNBUS_CONFIG with
    JSON of the file's shape), the environment the files, a later file an earlier one, and the files
    what the class says. --dry-run shows where each value comes from.
    """

logger = logging.getLogger(__name__)


@click.command(
    cls=TargetsCommand,
    help=_HELP,
    epilog=exit_codes.RUN,
)
@targets_argument
@file_option
@terminal.nats_option
@namespace_option
@click.option("--in-process", is_flag=True, help="Run all instances in this one process.")
@click.option("--reload", is_flag=True, help="Replace the instances that a changed file affects.")
@click.option("--fresh", is_flag=True, help="Empty the embedded server's data first.")
@click.option("--dry-run", is_flag=True, help="Only print what the run would start.")
@click.option(
    "--graph",
    type=click.Choice(list(FORMATS)),
    help="Only draw who calls whom; svg needs Graphviz.",
)
@terminal.json_option
@click.option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    help="Default: console on a terminal, json elsewhere.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"]),
    default="info",
    show_default=True,
)
@click.option("--otlp-endpoint", metavar="URL", help="Send traces and metrics to a collector.")
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Serve /live, /ready and /metrics; with several processes, for all of them.",
)
@click.option(
    "--health-public", is_flag=True, help="Let --health listen beyond this machine, unprotected."
)
@click.option("--health-tls-cert", metavar="FILE", help="Serve --health by TLS: its certificate.")
@click.option("--health-tls-key", metavar="FILE", help="The key of that certificate.")
@click.option(
    "--health-tls-client-ca",
    metavar="FILE",
    help="Want certificates of those who ask --health, signed by the authorities in FILE.",
)
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    ctx.exit(execute(RunOptions(node_options=ctx.meta["dynbus.options"], **given)))


def execute(options: RunOptions) -> int:
    """Carry out `dynbus run` and tell why where it fails; returns the exit code."""
    failure: Failure | None
    try:
        failure, code = _execute(options)
    except DynbusError as error:
        failure = failure_of(error)
        code = failure.code
    except PlanFailed as error:
        failure, code = error.failure, error.failure.code
    if failure is not None:
        _print_failure(failure)
    return code


def _execute(options: RunOptions) -> tuple[Failure | None, int]:
    check_options(options)
    if options.dry_run:
        _show_plan(options)
        return None, exit_codes.OK
    if options.graph is not None:
        nodes = load_run(options.request, os.environ).plan().nodes
        click.echo(FORMATS[options.graph](nodes))
        return None, exit_codes.OK
    if options.in_process:
        run = load_run(options.request, os.environ)
        configure_logging(options.log_format, options.log_level)
        _warn([*run.warnings, *run.not_in_process()])
        return _in_process(run, options)
    configure_logging(options.log_format, options.log_level)
    if _tells_little():
        # Imports take seconds.
        terminal.notice(f"dynbus: starting the actors of {', '.join(options.targets)}")
    return asyncio.run(_run_in_children(options))


def _tells_little() -> bool:
    """True if a person is at the terminal and the log level hides the progress of the start."""
    return sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO)


def _show_plan(options: RunOptions) -> None:
    run = load_run(options.request, os.environ)
    warnings, refused = run.warnings, ""
    places: Mapping[str, Place] = {}
    if options.in_process:
        warnings = [*warnings, *run.not_in_process()]
    else:
        try:
            placed = run.placed(os.environ)
        except NotOnThisMachine as error:
            refused = str(error)
        else:
            warnings, places = [*warnings, *placed.warnings], placed.places
    for warning in warnings:
        terminal.notice(f"dynbus: {warning}")
    print_plan(run, os.environ, as_json=options.as_json, places=places, refused=refused)
    if refused:
        terminal.notice(f"dynbus: this machine would refuse the run: {refused}")


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        logger.warning("%s", warning)


async def _run_in_children(options: RunOptions) -> tuple[Failure | None, int]:
    metrics = options.health is not None and has_extra("metrics")
    ending = Ending()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(Interrupts(ending.drain, ending.stop, within=CHILDREN_SECONDS))
        watch: Watch | None = None
        waiting: Plan | None = None
        if options.reload:
            # Without its bus there is no run that could wait for a change.
            waiting = plan_of_bus(options.request, os.environ)
            # Before anything is loaded: no change is missed.
            watch = await stack.enter_async_context(watching(options.targets, options.config_files))
        forks = await stack.enter_async_context(
            ForkServer(("opentelemetry.exporter.prometheus",) if metrics else ())
        )
        asked = MakePlan(options.request, options.log_format, options.log_level)
        with ending.cuts_short() as planning:
            try:
                plan = await plan_elsewhere(forks, asked)
            except PlanFailed as error:
                if waiting is None:
                    raise
                _print_failure(error.failure)
                logger.error("nothing is served; waiting for a file to change")
                plan = waiting
        if planning.cancelled_caught:
            return None, ending.exit_code
        config = load_config(plan.bus, os.environ, sources=plan.sources)
        _warn(plan.warnings)

        def settings(plan: Plan) -> WorkerSettings:
            return WorkerSettings(
                *(plan.path, plan.bus, options.log_format, options.log_level),
                *(options.otlp_endpoint, metrics, plan.addresses),
            )

        supervisor = Supervisor(
            *(plan.nodes, settings(plan), forks, ending),
            drain_grace=config.drain_grace,
            machine=plan.machine,
            lasting=options.reload,
        )
        control = await stack.enter_async_context(
            controlled(
                supervisor,
                stop=lambda at_once: ending.stop() if at_once else ending.drain(),
                check=Rollout(forks, lambda: supervisor.settings, config).misfits,
            )
        )
        tasks = await stack.enter_async_context(task_group())
        # Before the server is there: its start and the imports of the children take as long.
        tasks.start_soon(supervisor.run)
        tasks.start_soon(partial(show_start, supervisor, bars=_tells_little()))
        if options.health is not None:
            from .aggregated_metrics import registry_of

            server = _health(
                options,
                Status,
                lambda: Status(supervisor.problems(), supervisor.details()),
                metrics,
                registry_of(supervisor) if metrics else None,
            )
            await _open_health(server)
            stack.push_async_callback(server.aclose)
            _tell_health(server)
        await stack.enter_async_context(embedded_if_local(config, fresh=options.fresh))
        remote = RemoteControl(
            control,
            partial(_connected_as, config, partial(heard_as, supervisor)),
            host=config.own_host,
            zone=config.zone,
            owner=own_owner(),
            follow=supervisor.follow,
        )
        await stack.enter_async_context(remote.open())
        supervisor.begin()
        if watch is not None:
            reloader = Reloader(
                *(watch, supervisor, asked, plan, config),
                settings=settings,
                tell_failure=_print_failure,
            )
            with ending.cuts_short():
                await reloader.run()
        await supervisor.ended.wait()
    failed = supervisor.exit_code not in (exit_codes.OK, exit_codes.INTERRUPTED)
    return (supervisor.failure if failed else None), supervisor.exit_code


def _connected_as(
    config: BusConfig, served: Callable[[], Sequence[str]]
) -> contextlib.AbstractAsyncContextManager[Server]:
    """A connection to the bus, of a folder of credentials with that of a component.

    Raises:
        ConfigError: there is none.
    """
    credentials = own_credentials(config.credentials, served())
    return connected(msgspec.structs.replace(config, credentials=credentials), "dynbus-run")


def _in_process(run: LoadedRun, options: RunOptions) -> tuple[Failure | None, int]:
    before = {*running_threads()}
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        failure, code = runner.run(_run_in_process(run, options))

        def say() -> None:
            if failure is not None:
                _print_failure(failure)

        leaving = leave_within(code, say=say)
    if set(running_threads()) <= before:
        leaving.cancel()
    return failure, code


async def _run_in_process(run: LoadedRun, options: RunOptions) -> tuple[Failure | None, int]:
    metrics = options.health is not None and has_extra("metrics")
    ending = Ending()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(Interrupts(ending.drain, ending.stop, within=AT_ONCE_SECONDS))
        if options.otlp_endpoint or metrics:
            stack.callback(_telemetry(options.otlp_endpoint, metrics))
        await stack.enter_async_context(embedded_if_local(run.config, fresh=options.fresh))
        health: list[HealthServer] = []

        async def started(runtime: Runtime) -> None:
            if options.health is None:
                return
            server = _health(
                options,
                lambda: Status(stalls_of(runtime)),
                lambda: Status(problems_of(runtime), runtime.bus.status.read()),
                metrics,
            )
            # On the control thread: it answers while a handler blocks this loop.
            await runtime.bus.lane.run(_open_health(server))
            health.append(server)
            _tell_health(server)

        async def stopping(runtime: Runtime) -> None:
            for server in health:
                await runtime.bus.lane.run(server.aclose())

        try:
            await serve(
                *(run.assignments, run.bus.values, ending),
                connected=_prints,
                started=started,
                addresses=run.addresses,
                stopping=stopping,
                restart=True,
            )
        except (InstanceBroken, StartFailed) as error:
            failure = failure_of(error)
            return failure, failure.code
    return None, ending.exit_code


def _prints(runtime: Runtime) -> None:
    runtime.bus.status.announcer = terminal.announce


def _health(
    options: RunOptions,
    live: Callable[[], Status],
    ready: Callable[[], Status],
    metrics: bool,
    registry: CollectorRegistry | None = None,
) -> HealthServer:
    host, port = health_address(options.health or "", public=options.has_public_health)
    cert, key = options.health_tls_cert, options.health_tls_key
    tls = health_tls(cert, key, options.health_tls_client_ca) if cert and key else None
    return HealthServer(
        host,
        port,
        live=live,
        ready=ready,
        metrics=metrics,
        registry=registry,
        tls=tls,
    )


async def _open_health(server: HealthServer) -> None:
    try:
        await server.start()
    except ConfigError as error:
        # Its cause is no mistake in the user's code, of which there would be a traceback.
        raise ConfigError(
            f"--health: {error}: give another port, or port 0 for any free one"
        ) from None


def _tell_health(server: HealthServer) -> None:
    without = "" if server.has_metrics else f"; /metrics {metrics_remedy()}"
    logger.info("health at %s%s", server.url, without)


def _telemetry(otlp_endpoint: str | None, metrics: bool) -> Callable[[], object]:
    from dynbus.bus.telemetry import telemetry

    return telemetry.configure_telemetry(
        service_name="dynbus", otlp_endpoint=otlp_endpoint, prometheus=metrics
    ).shutdown


def _print_failure(failure: Failure) -> None:
    if failure.traceback:
        click.echo(failure.traceback.rstrip(), err=True)
    # What follows is the log of a server that does not start.
    reason, _, log = failure.message.partition("\n")
    click.echo(terminal.error_line(reason), err=True)
    if log:
        terminal.notice(redact_url(log))
