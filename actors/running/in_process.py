"""Serving instances in one process, from the first connection to its end.

`dynbus run --in-process` does so in its own process, `child_process.py` in a child.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import anyio

from dynbus.actors.declaring.actor import address_of
from dynbus.actors.declaring.restart_policy import RestartPolicy
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.runtime import Actor, ActorInstance, Runtime
from dynbus.actors.serving.instance import (
    InstanceBroken,
    InstanceState,
    ServedInstance,
    stop_all,
)
from dynbus.bus import exit_codes
from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic
from dynbus.bus.config import load_config
from dynbus.bus.errors import (
    ConfigError,
    DynbusError,
    PermissionDenied,
    Unavailable,
    describe_exception,
    only_cause,
)
from dynbus.bus.identity.credentials import own_credentials
from dynbus.bus.protocol.names import ComponentName

from .graph import dependency_depth, dependents_first

logger = logging.getLogger(__name__)

LEAVE_SECONDS: Final = 2.0
"""Seconds that users' code may still run after the end of all instances, threads above all, which
nobody can cancel; then it is abandoned."""


class Assignment(NamedTuple):
    """The part of an actor class that a run or one of its processes serves.

    Attributes:
        service: how it is served; its namespace is the class's own where that is empty.
        instance_id: of its only worker, where it is known before; it must be random.
        node: the name under which it is called; the class's component unless given.
        worker_index: of its first worker among those of the node.
    """

    actor: type[Actor]
    arguments: Mapping[str, Any]
    service: ServiceArgs = ServiceArgs()
    instance_id: str = ""
    node: str = ""
    worker_index: int = 0

    @property
    def address(self) -> ComponentName:
        """The address of its instances on the bus."""
        return address_of(self.actor, node=self.node, namespace=self.service.namespace)

    def instance(self, runtime: Runtime, instance_id: str = "", *, index: int = 0) -> ActorInstance:
        """A further instance, which is not started yet.

        Args:
            instance_id: one that nobody else can have.
            index: which of the instances of this process it is, from 0.
        """
        return ActorInstance(
            runtime,
            self.actor,
            dict(self.arguments),
            instance_id,
            id_is_random=True,
            node=self.node,
            namespace=self.service.namespace,
            enabled=self.service.enabled,
            worker_index=self.worker_index + index,
        )


class Failure(NamedTuple):
    """The reason for which a run cannot go on, for the user.

    Attributes:
        code: the exit code.
        traceback: of the user's code; empty when it had no part in it.
    """

    code: int
    message: str
    traceback: str = ""


class Ending:
    """The two signals that end a process: `drain` is the first, `stop` the last.

    Both may be called at any time and again; they belong to the loop.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        self.grace: float | None = None
        self._cut_short: anyio.CancelScope | None = None

    def drain(self, grace: float | None = None) -> None:
        """End tidily within `grace` seconds; None takes the configured ones."""
        if not self.asked.is_set():
            self.grace = grace
            self.asked.set()
            if self._cut_short is not None:
                self._cut_short.cancel()

    def stop(self) -> None:
        """End at once."""
        self.drain(0.0)
        self.at_once.set()

    @property
    def exit_code(self) -> int:
        """The exit code of a process which ends since it was asked to."""
        return exit_codes.INTERRUPTED if self.at_once.is_set() else exit_codes.OK

    @contextmanager
    def cuts_short(self) -> Generator[anyio.CancelScope]:
        """Cancel the block when the end is asked for; one such block runs at a time."""
        with anyio.CancelScope() as self._cut_short:
            if self.asked.is_set():
                self._cut_short.cancel()
            yield self._cut_short


class StartFailed(Exception):
    """Raised when an actor's constructor or `on_start` raised, which is the `__cause__`."""

    def __init__(self, address: ComponentName, cause: BaseException) -> None:
        super().__init__(f"{address} did not start: {with_root_cause(cause)}")


async def serve(
    assignments: Sequence[Assignment],
    bus: Mapping[str, Any],
    ending: Ending,
    *,
    connected: Callable[[Runtime], object] = lambda _: None,
    started: Callable[[Runtime], Awaitable[None]],
    addresses: Mapping[str, Sequence[str]] = MappingProxyType({}),
    stopping: Callable[[Runtime], Awaitable[None]] | None = None,
    restart: bool = False,
) -> None:
    """Serve the instances in this process until they are told to end and have drained.

    Args:
        assignments: dependencies before what depends on them.
        bus: fields of `BusConfig`.
        connected: called before the instances are started.
        started: awaited when all instances are ready.
        addresses: of the nodes of the run, by the `module:Name` of their class.
        stopping: awaited after the drain, before the bus is left.
        restart: do what its `on_crash` says when an actor in this process reports that it is
            broken. Otherwise that ends the serving.

    Raises:
        ConfigError: an instance is not usable as configured.
        InstanceBroken: an instance has reported that it is broken, and does not restart.
        PermissionDenied, Unavailable: the bus cannot be used.
        StartFailed: user code raised.
        Exception: what background work of the bus raised.
    """
    served = list(dict.fromkeys(str(each.address) for each in assignments))
    # A process of its own is named by what it serves.
    name = served[0] if len(served) == 1 else "dynbus-run"

    async def connect_and_serve() -> None:
        given = load_config(bus, unknown_variables="warn").credentials
        settings: dict[str, Any] = {**bus, "credentials": own_credentials(given, served)}
        with ending.cuts_short() as connecting:
            runtime = await Runtime.connect(name=name, **settings)
        if connecting.cancelled_caught:
            return
        runtime.bus.on_failure(ending.stop)
        runtime.run_addresses = {
            actor: tuple(map(ComponentName.parse, texts)) for actor, texts in addresses.items()
        }
        connected(runtime)
        try:
            with ending.cuts_short():
                instances = await _start_all(runtime, assignments, started)
                await _keep_all(runtime, instances, restart=restart)
            await _drain(runtime, ending)
            if stopping is not None:
                await stopping(runtime)
        finally:
            with anyio.CancelScope(shield=True):
                await runtime.close()
        if runtime.bus.failure is not None:
            raise runtime.bus.failure

    # In a task of its own, which is cancelled once however often this one is.
    async with task_group() as tasks:
        tasks.start_soon(connect_and_serve)


async def _start_all(
    runtime: Runtime,
    assignments: Sequence[Assignment],
    started: Callable[[Runtime], Awaitable[None]],
) -> list[tuple[Assignment, ActorInstance]]:
    instances: list[tuple[Assignment, ActorInstance]] = []
    for assignment in assignments:
        for index in range(assignment.service.workers):
            try:
                instance = assignment.instance(runtime, assignment.instance_id, index=index)
                await runtime.serve(instance)
                instances.append((assignment, instance))
            except (ConfigError, PermissionDenied, Unavailable):
                raise
            except (Exception, SystemExit) as error:
                raise StartFailed(assignment.address, error) from error
    await started(runtime)
    return instances


async def _keep_all(
    runtime: Runtime,
    instances: Sequence[tuple[Assignment, ActorInstance]],
    *,
    restart: bool,
) -> None:
    """Restart instances that break, until this is cancelled.

    Raises:
        InstanceBroken: one broke that is not to restart.
    """
    async with task_group() as tasks:
        for assignment, instance in instances:
            tasks.start_soon(_keep, runtime, assignment, instance, restart)
        await anyio.sleep_forever()


async def _keep(
    runtime: Runtime, assignment: Assignment, instance: ActorInstance, restart: bool
) -> None:
    """Restart an actor whenever it has reported that it is broken."""
    address, policy = assignment.address, RestartPolicy()
    index = instance.worker_index - assignment.worker_index
    began = monotonic()
    await instance.stopped.wait()
    error: Exception = InstanceBroken(instance)
    while instance.broken:
        if not restart or assignment.service.on_crash == "escalate":
            raise error
        runtime.broken[former := instance.id] = str(error)
        if assignment.service.on_crash == "stop":
            if not runtime.instances:
                raise error
            logger.warning("%s; its on_crash is stop", error)
            return
        pause = policy.pause_after(monotonic() - began, random.random())
        logger.warning("%s; restarting %s in %.1f s", error, address, pause)
        await anyio.sleep(pause)
        began = monotonic()
        try:
            instance = await runtime.serve(assignment.instance(runtime, index=index))
        except Exception as failure:
            logger.exception("%s failed to restart", address)
            error, began = failure, monotonic()
            continue
        del runtime.broken[former]
        await instance.stopped.wait()
        error = InstanceBroken(instance)


async def _drain(runtime: Runtime, ending: Ending) -> None:
    """Stop what others depend on last, all of it within one grace period."""
    grace = runtime.bus.config.drain_grace if ending.grace is None else ending.grace
    deadline = monotonic() + grace
    async with task_group() as tasks:
        tasks.start_soon(_stop_at_once, runtime, ending)
        for instances in dependents_first(runtime.instances.values(), _dependency_depth):
            await stop_all(instances, max(0.0, deadline - monotonic()))
        tasks.cancel_scope.cancel()


def _dependency_depth(instance: ServedInstance) -> int:
    try:
        if isinstance(instance, ActorInstance):
            return dependency_depth(type(instance.actor))
    except ConfigError as error:
        logger.warning("%s is drained with what depends on nobody: %s", instance.name, error)
    # What an actor serves beside itself depends on nobody that is known.
    return 0


async def _stop_at_once(runtime: Runtime, ending: Ending) -> None:
    await ending.at_once.wait()
    for instance in list(runtime.instances.values()):
        instance.stop_now()


def problems_of(runtime: Runtime) -> dict[str, str]:
    """The problems that keep a process from taking calls; callable from any thread."""
    problems = dict(stalls_of(runtime))
    problems |= runtime.broken
    if not runtime.is_connected:
        problems["bus"] = runtime.bus.data.state.value
    for instance in list(runtime.instances.values()):
        if instance.broken:
            problems[instance.id] = str(InstanceBroken(instance))
        elif instance.hung:
            problems[instance.id] = f"{instance.name} hangs: {instance.hung}"
        elif instance.state is not InstanceState.READY:
            problems[instance.id] = instance.state.value
    return problems


def stalls_of(runtime: Runtime) -> dict[str, str]:
    """The main loop's stall, by component, if it has been blocked for too long; callable from any
    thread.
    """
    blocked = runtime.bus.heartbeats.blocked
    if blocked > runtime.bus.config.stall_limit:
        return {"main_loop": f"blocked for {blocked:.1f} s"}
    return {}


def failure_of(error: BaseException) -> Failure:
    """The failure that an exception out of `serve`, or out of importing an actor, is to the
    user."""
    if isinstance(error, StartFailed):
        return Failure(exit_codes.START_FAILED, str(error), users_traceback(error.__cause__))
    if isinstance(error, ConfigError):
        cause = error.__cause__
        # The message says what to do; of the way there, users want their own lines alone.
        shown = users_traceback(cause) if cause is not None and _is_users(cause) else ""
        return Failure(exit_codes.CONFIG_ERROR, str(error), shown)
    if isinstance(error, InstanceBroken):
        return Failure(exit_codes.ESCALATED, str(error))
    if isinstance(error, Unavailable | PermissionDenied):
        return Failure(exit_codes.NO_SERVER, str(error))
    return Failure(exit_codes.START_FAILED, with_root_cause(error), users_traceback(error))


def with_root_cause(error: BaseException) -> str:
    """An exception in one line, and the one at the bottom of it: engines wrap what is wrong with
    their configuration in an error that says no more than to look above."""
    top = root = only_cause(error)
    seen = {id(root)}
    while (below := _below(root)) is not None and id(only_cause(below)) not in seen:
        root = only_cause(below)
        seen.add(id(root))
    description = describe_exception(top)
    return description if root is top else f"{description}; the cause: {describe_exception(root)}"


def _below(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def users_traceback(error: BaseException | None) -> str:
    """The traceback of an exception from where it leaves dynbus's own code.

    What dynbus itself raises at a mistake in the user's code ends at the user's line, and
    without the message, which is told anyway.
    """
    if error is None:
        return ""
    report = traceback.TracebackException.from_exception(error)
    mine = [
        number for number, frame in enumerate(report.stack) if not _is_machinery(frame.filename)
    ]
    if isinstance(error, DynbusError):
        users = report.stack[mine[0] : mine[-1] + 1] if mine else []
        head = "Traceback (most recent call last):\n"
        return head + "".join(traceback.format_list(users)) if users else ""
    if isinstance(error, SyntaxError) and not mine:
        return "".join(report.format_exception_only())
    if mine:
        del report.stack[: mine[0]]
    return "".join(report.format())


def _is_users(error: BaseException) -> bool:
    """True if an exception is of the user's code, or of a file that cannot be parsed."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, SyntaxError) or not all(
        _is_machinery(frame.filename) for frame in frames
    )


_PACKAGE: Final = f"{Path(__file__).parents[2]}{os.sep}"
_STANDARD_LIBRARY: Final = sysconfig.get_path("stdlib") + os.sep
_INSTALLED: Final = ("site-packages", "dist-packages")


def _is_machinery(file: str) -> bool:
    """True if a file is dynbus's own, or of Python's library."""
    if file == "<string>" or file.startswith(("<frozen importlib", _PACKAGE)):
        # The constructor of a dataclass has no file.
        return True
    is_standard = file.startswith(_STANDARD_LIBRARY)
    return is_standard and not any(name in Path(file).parts for name in _INSTALLED)


# The end of the process ---------------------------------------------------------------------


def leave_within(
    code: int, seconds: float = LEAVE_SECONDS, say: Callable[[], None] | None = None
) -> threading.Timer:
    """End this process with the exit code `code` unless it has ended within `seconds`.

    Call it when all that matters is done. From then on the interpreter itself would wait without
    bound: for each task that ignores its cancellation when a loop closes, for the threads of an
    executor, and for all other threads at its exit.

    Args:
        say: called before that end.

    Returns:
        The timer, which can be cancelled.
    """
    timer = threading.Timer(seconds, leave_behind, (code, say))
    timer.daemon = True
    timer.start()
    return timer


def leave_behind(code: int, say: Callable[[], None] | None = None) -> None:
    """End this process now, although users' code still runs in it, and say so."""
    names = ", ".join(thread.name for thread in running_threads())
    if names:
        logger.error("abandoning threads that still run, since nothing can cancel them: %s", names)
    else:
        logger.error("abandoning a task that ignores its cancellation")
    if say is not None:
        say()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit, at which the interpreter would wait for those threads.
    os._exit(code)


def running_threads() -> list[threading.Thread]:
    """The threads for which the interpreter waits before it ends."""
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon
        and thread is not threading.main_thread()
        and thread is not threading.current_thread()
    ]
