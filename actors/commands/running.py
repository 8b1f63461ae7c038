"""What `dynbus run` does once its command line is read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click

from dynbus.actors.running.child import WorkerSettings
from dynbus.actors.running.in_process import (
    Ending,
    Failure,
    StartFailed,
    failure_of,
    problems_of,
    serve,
    stalls_of,
)
from dynbus.actors.running.leaving import leave_within, running_threads
from dynbus.actors.running.supervisor import Supervisor
from dynbus.actors.serving.instance import InstanceBroken
from dynbus.bus import exit_codes
from dynbus.bus.cleanup import finish
from dynbus.bus.commands.terminal import error_line, notice
from dynbus.bus.errors import ConfigError, DynbusError
from dynbus.bus.lane import new_event_loop
from dynbus.bus.telemetry.health import METRICS_REMEDY, HealthServer, Status
from dynbus.bus.telemetry.logs import configure_logging, redact_url

from .interrupts import Interrupts
from .local_server import embedded_if_local
from .plan import Plan, RunOptions, health_address, is_installed, make_plan, print_plan

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from dynbus.actors.runtime import Runtime

AT_ONCE_SECONDS: Final = 2.0
"""Seconds after the second signal within which this process has ended whatever happens."""
CHILDREN_SECONDS: Final = 5.0
"""The same where there are children, which are killed one by one before."""

METRICS_MODULES: Final = (
    "prometheus_client",
    "opentelemetry.sdk",
    "opentelemetry.exporter.prometheus",
)
"""What a metrics page is made with: the extra `metrics`."""

logger = logging.getLogger(__name__)


def execute(options: RunOptions) -> int:
    """Carry out `dynbus run` and tell why where it fails; returns the exit code."""
    try:
        failure, code = _execute(options)
    except DynbusError as error:
        failure = failure_of(error)
        code = failure.code
    if failure is not None:
        _print_failure(failure)
    return code


def _execute(options: RunOptions) -> tuple[Failure | None, int]:
    if options.reload and not options.dry_run:
        from .reload import watch_and_run

        configure_logging(options.log_format, options.log_level)
        return None, watch_and_run(options)
    plan = make_plan(options, os.environ)
    if options.dry_run:
        for warning in plan.warnings:
            notice(f"dynbus: {warning}")
        print_plan(plan, as_json=options.as_json)
        return None, exit_codes.OK
    configure_logging(options.log_format, options.log_level)
    for warning in plan.warnings:
        logger.warning("%s", warning)
    if options.in_process:
        return _in_process(plan, options)
    return asyncio.run(_run_in_children(plan, options))


async def _run_in_children(plan: Plan, options: RunOptions) -> tuple[Failure | None, int]:
    metrics = options.health is not None and _can_expose()
    supervisor = Supervisor(
        plan.assignments,
        WorkerSettings(
            plan.bus, options.log_format, options.log_level, options.otlp_endpoint, metrics
        ),
        drain_grace=plan.config.drain_grace,
    )
    async with contextlib.AsyncExitStack() as stack:
        interrupts = Interrupts(
            supervisor.drain,
            supervisor.stop,
            within=CHILDREN_SECONDS,
            told=_is_told(options),
        )
        stack.enter_context(interrupts)
        if options.parent_fd is not None:
            interrupts.stop_when_closed(options.parent_fd)
        # Before the server is there: its start and the imports of the children take as long.
        running = asyncio.ensure_future(supervisor.run())
        stack.push_async_callback(_cancelled, running)
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
        await stack.enter_async_context(embedded_if_local(plan.config, fresh=options.fresh))
        supervisor.begin()
        code = await running
    failed = code not in (exit_codes.OK, exit_codes.INTERRUPTED)
    return (supervisor.failure if failed else None), code


def _in_process(plan: Plan, options: RunOptions) -> tuple[Failure | None, int]:
    before = {*running_threads()}
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        failure, code = runner.run(_run_in_process(plan, options))

        def say() -> None:
            if failure is not None:
                _print_failure(failure)

        leaving = leave_within(code, say=say)
    if set(running_threads()) <= before:
        leaving.cancel()
    return failure, code


async def _run_in_process(plan: Plan, options: RunOptions) -> tuple[Failure | None, int]:
    metrics = options.health is not None and _can_expose()
    ending = Ending()
    async with contextlib.AsyncExitStack() as stack:
        interrupts = Interrupts(
            ending.drain,
            ending.stop,
            within=AT_ONCE_SECONDS,
            told=_is_told(options),
        )
        stack.enter_context(interrupts)
        if options.parent_fd is not None:
            interrupts.stop_when_closed(options.parent_fd)
        if options.otlp_endpoint or metrics:
            stack.callback(_telemetry(options.otlp_endpoint, metrics))
        await stack.enter_async_context(embedded_if_local(plan.config, fresh=options.fresh))
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
                *(plan.assignments, plan.bus, ending),
                started=started,
                stopping=stopping,
                restart=True,
            )
        except (InstanceBroken, StartFailed) as error:
            failure = failure_of(error)
            return failure, failure.code
    return None, exit_codes.INTERRUPTED if ending.at_once.is_set() else exit_codes.OK


def _is_told(options: RunOptions) -> bool:
    # The process that reloads knows why it ends this one, and tells it.
    return options.parent_fd is None


def _health(
    options: RunOptions,
    live: Callable[[], Status],
    ready: Callable[[], Status],
    metrics: bool,
    registry: CollectorRegistry | None = None,
) -> HealthServer:
    host, port = health_address(options.health or "", public=options.health_public)
    return HealthServer(
        host,
        port,
        live=live,
        ready=ready,
        metrics=metrics,
        registry=registry,
        insecure=options.health_public,
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
    without = "" if server.has_metrics else f"; /metrics {METRICS_REMEDY}"
    logger.info("health at %s%s", server.url, without)


def _can_expose() -> bool:
    return all(map(is_installed, METRICS_MODULES))


def _telemetry(otlp_endpoint: str | None, metrics: bool) -> Callable[[], object]:
    from dynbus.bus.telemetry import telemetry

    return telemetry.configure(
        service_name="dynbus", otlp_endpoint=otlp_endpoint, prometheus=metrics
    ).shutdown


async def _cancelled(task: asyncio.Future[int]) -> None:
    """Wait for the end of a task, cancelled unless it has ended."""
    task.cancel()
    await finish(asyncio.wait({task}))


def _print_failure(failure: Failure) -> None:
    if failure.traceback:
        click.echo(failure.traceback.rstrip(), err=True)
    # What follows is the log of a server that does not start.
    reason, _, log = failure.message.partition("\n")
    click.echo(error_line(reason), err=True)
    if log:
        notice(redact_url(log))
