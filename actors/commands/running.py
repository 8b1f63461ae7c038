"""What `dynbus run` does once its command line is read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import click

from dynbus.actors.configuration import (
    ActorOption,
    Text,
    actor_settings,
    bus_settings,
    read_file,
)
from dynbus.actors.loader import load_targets
from dynbus.actors.serving import (
    Assignment,
    Ending,
    Failure,
    StartFailed,
    describe,
    problems_of,
    serve,
    stalls_of,
)
from dynbus.actors.supervisor import Supervisor, WorkerSettings
from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import plain, print_json, print_table
from dynbus.bus.config import BusConfig, load_config
from dynbus.bus.embedded import embedded_server
from dynbus.bus.errors import ConfigError, DynbusError
from dynbus.bus.health import HealthServer, Status, parse_address
from dynbus.bus.lane import new_event_loop
from dynbus.bus.logs import LogFormat, configure_logging, redact_url
from dynbus.bus.nats_server import Address

if TYPE_CHECKING:
    from dynbus.actors.runtime import Runtime

AT_ONCE_SECONDS: Final = 2.0
"""Seconds after the second signal within which this process has ended whatever happens."""
CHILDREN_SECONDS: Final = 5.0
"""The same where there are children, which are killed one by one before."""

HIDDEN_WORDS: Final = ("password", "secret", "token", "key", "credential")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command line of `dynbus run`.

    Attributes:
        actor_options: `--Actor.key=value`.
        arguments: all of it as it was written, for `--reload`.
        parent_fd: a descriptor whose end means that the `--reload` process is dead.
    """

    targets: Sequence[str]
    config_file: str | None
    nats: str | None
    in_process: bool
    reload: bool
    fresh: bool
    dry_run: bool
    as_json: bool
    log_format: LogFormat | None
    log_level: str
    otlp_endpoint: str | None
    health: str | None
    health_public: bool
    parent_fd: int | None
    actor_options: Sequence[ActorOption]
    arguments: Sequence[str]


@dataclass(frozen=True)
class Plan:
    """What a run starts, checked.

    Attributes:
        assignments: dependencies first.
        bus: fields of `BusConfig` for every process.
    """

    assignments: list[Assignment]
    bus: dict[str, Any]
    config: BusConfig


def execute(options: RunOptions) -> int:
    """Carry out `dynbus run` and tell why where it fails; returns the exit code."""
    try:
        failure, code = _execute(options)
    except DynbusError as error:
        failure = describe(error)
        code = failure.code
    if failure is not None:
        _tell(failure)
    return code


def _execute(options: RunOptions) -> tuple[Failure | None, int]:
    if options.reload and not options.dry_run:
        from .reload import watch_and_run

        configure_logging(options.log_format, options.log_level)
        return None, watch_and_run(options)
    plan = make_plan(options, os.environ)
    if options.dry_run:
        _print_plan(plan, as_json=options.as_json)
        return None, exit_codes.OK
    configure_logging(options.log_format, options.log_level)
    if options.parent_fd is not None:
        _end_with_parent(options.parent_fd)
    if options.in_process:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_run_in_process(plan, options))
    return asyncio.run(_run_in_children(plan, options))


def make_plan(options: RunOptions, environment: Mapping[str, str]) -> Plan:
    """Load the targets and check every setting.

    Raises:
        ConfigError: something is not usable; nothing has been started.
    """
    file = read_file(Path(options.config_file)) if options.config_file else {}
    actors = load_targets(options.targets)
    settings = actor_settings(
        actors, file=file, options=options.actor_options, environment=environment
    )
    bus = bus_settings(file, environment, servers=options.nats)
    assignments = [Assignment(actor, *settings[actor]) for actor in actors]
    return Plan(assignments, bus, load_config(bus, environment))


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
        stack.enter_context(
            Interrupts(
                supervisor.drain,
                supervisor.stop,
                within=CHILDREN_SECONDS,
                grace=plan.config.drain_grace,
            )
        )
        # Before the server is there: its start and the imports of the children take as long.
        running = asyncio.ensure_future(supervisor.run())
        stack.push_async_callback(_cancelled, running)
        if options.health is not None:
            from .aggregated_metrics import exposed

            if metrics:
                stack.enter_context(exposed(supervisor))
            await stack.enter_async_context(
                _health(options, Status, lambda: Status(supervisor.problems()), metrics)
            )
        await stack.enter_async_context(embedded_if_local(plan.config, fresh=options.fresh))
        supervisor.begin()
        code = await running
    failed = code not in (exit_codes.OK, exit_codes.INTERRUPTED)
    return (supervisor.failure if failed else None), code


async def _run_in_process(plan: Plan, options: RunOptions) -> tuple[Failure | None, int]:
    metrics = options.health is not None and _can_expose()
    ending = Ending()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(
            Interrupts(
                ending.drain,
                ending.stop,
                within=AT_ONCE_SECONDS,
                grace=plan.config.drain_grace,
            )
        )
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
                lambda: Status(problems_of(runtime)),
                metrics,
            )
            # On the control thread: it answers while a handler blocks this loop.
            await runtime.bus.lane.run(server.start())
            health.append(server)
            logger.info("health at %s", server.url)

        async def stopping(runtime: Runtime) -> None:
            for server in health:
                await runtime.bus.lane.run(server.aclose())

        try:
            await serve(plan.assignments, plan.bus, ending, started=started, stopping=stopping)
        except StartFailed as error:
            failure = describe(error)
            return failure, failure.code
    return None, exit_codes.INTERRUPTED if ending.at_once.is_set() else exit_codes.OK


@contextlib.asynccontextmanager
async def embedded_if_local(config: BusConfig, *, fresh: bool) -> AsyncGenerator[None, None]:
    """The embedded server, where the only URL is a loopback one; nothing elsewhere.

    Raises:
        ConfigError: `fresh` is asked of a server that is not embedded; see `embedded_server`.
    """
    url = config.servers[0]
    if len(config.servers) > 1 or not _is_local(url):
        if fresh:
            where = redact_url(", ".join(config.servers))
            raise ConfigError(
                f"--fresh empties the embedded server's data; {where} is not embedded"
            )
        yield
        return
    async with embedded_server(url, fresh=fresh) as server:
        logger.info("%s", redact_url(server.description))
        yield


def _is_local(url: str) -> bool:
    try:
        return not url.startswith("tls:") and Address.parse(url).is_loopback
    except ConfigError:
        return False  # a websocket, or something that the client will refuse by its name


def _health(
    options: RunOptions,
    live: Callable[[], Status],
    ready: Callable[[], Status],
    metrics: bool,
) -> HealthServer:
    host, port = parse_address(options.health or "")
    return HealthServer(
        host, port, live=live, ready=ready, metrics=metrics, insecure=options.health_public
    )


def _can_expose() -> bool:
    import importlib.util

    return all(
        importlib.util.find_spec(name) is not None
        for name in ("prometheus_client", "opentelemetry.sdk", "opentelemetry.exporter.prometheus")
    )


def _telemetry(otlp_endpoint: str | None, metrics: bool) -> Callable[[], object]:
    from dynbus.bus import telemetry

    return telemetry.configure(
        service_name="dynbus", otlp_endpoint=otlp_endpoint, prometheus=metrics
    ).shutdown


class Interrupts(contextlib.AbstractContextManager[None]):
    """Hears SIGINT and SIGTERM: the first calls `drain`, the second `stop`, both on the loop.

    After the second the process ends `within` that many seconds, even when its loop is blocked.
    At the first it says that calls have `grace` seconds to finish, if that is given.
    """

    def __init__(
        self,
        drain: Callable[[], None],
        stop: Callable[[], None],
        *,
        within: float,
        grace: float | None = None,
    ) -> None:
        self._within = within
        self._grace = grace
        self._calls = [drain, stop]
        self._loop = asyncio.get_running_loop()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._received)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if not self._calls:
            return
        self._loop.call_soon_threadsafe(self._calls.pop(0))
        if self._calls and self._grace is not None:
            self._loop.call_soon_threadsafe(self._tell)
        elif not self._calls:
            watchdog = threading.Timer(self._within, os._exit, (exit_codes.INTERRUPTED,))
            watchdog.daemon = True
            watchdog.start()

    def _tell(self) -> None:
        logger.info(
            "draining: running calls have %g s to finish; Ctrl-C again stops at once", self._grace
        )


async def _cancelled(task: asyncio.Future[int]) -> None:
    """Wait for the end of a task, cancelled unless it has ended."""
    task.cancel()
    await asyncio.wait({task})


def _end_with_parent(fd: int) -> None:
    """End this run when the descriptor does."""
    os.set_inheritable(fd, False)

    def wait() -> None:
        while os.read(fd, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="dynbus-reload", daemon=True).start()


def _tell(failure: Failure) -> None:
    if failure.traceback:
        click.echo(failure.traceback.rstrip(), err=True)
    click.echo(f"dynbus: {redact_url(failure.message)}", err=True)


def _print_plan(plan: Plan, *, as_json: bool) -> None:
    rows = [
        {
            "address": f"{a.actor.__dynbus_namespace__}.{a.actor.__dynbus_component__}",
            "class": f"{a.actor.__module__}:{a.actor.__qualname__}",
            "instances": a.workers,
            "endpoints": {
                spec.name: "stream" if spec.streaming else "unary"
                for spec in a.actor.__dynbus_handlers__.values()
            },
            "arguments": {name: _shown(name, value) for name, value in a.arguments.items()},
        }
        for a in plan.assignments
    ]
    servers = [redact_url(server) for server in plan.config.servers]
    if as_json:
        print_json({"servers": servers, "actors": rows})
        return
    print_table(
        ("ADDRESS", "CLASS", "INSTANCES", "ENDPOINTS", "ARGUMENTS"),
        [
            (
                plain(str(row["address"])),
                plain(str(row["class"])),
                str(row["instances"]),
                plain(", ".join(_pairs(row["endpoints"]))),
                plain(", ".join(_pairs(row["arguments"]))),
            )
            for row in rows
        ],
    )
    click.echo(f"server: {', '.join(servers)}")


def _pairs(values: Any) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]


def _shown(name: str, value: Any) -> Any:
    """An argument as it may be printed."""
    if any(word in name.lower() for word in HIDDEN_WORDS):
        return "***"
    return str(value) if isinstance(value, Text) else value
