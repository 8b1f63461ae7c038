"""One child process of `dynbus run`, which serves one instance.

`fork_server.py` makes it, with the arguments FD and LABEL.

Parent and child exchange the messages of `child_messages.py` over a socket pair, whose descriptor
the child gets as FD. When the parent dies, however it does, the socket ends, and so does the child.
A thread reads the socket, so that this holds even while a handler blocks the main loop.

The child leads a session and so a process group of its own, with all that it starts. `group_guard`
ends those when the child is gone, however it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import gc
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final

import anyio
import msgspec

from dynbus.actors.declaring.actor import check_servable, keep_dependencies
from dynbus.actors.declaring.actor_config import ActorConfig, publish_config
from dynbus.actors.declaring.arguments import Text
from dynbus.actors.placing.applying import take_place
from dynbus.actors.placing.memory_limit import MemoryLimit
from dynbus.actors.runtime import Actor, Runtime
from dynbus.actors.serving.instance import InstanceBroken, new_instance_id
from dynbus.bus import exit_codes
from dynbus.bus.errors import ConfigError, PermissionDenied, Unavailable
from dynbus.bus.lane import new_event_loop
from dynbus.bus.telemetry.logs import configure_logging
from dynbus.bus.telemetry.process_status import StartStep

from . import group_guard
from .child_messages import (
    STACKS_SIGNAL,
    ActorLoaded,
    Alive,
    Announced,
    CollectFiles,
    CollectMetrics,
    Command,
    DrainInstance,
    FilesCollected,
    HealthChanged,
    InstanceFailed,
    InstanceHangs,
    InstanceReady,
    LoadActor,
    MetricsCollected,
    Report,
    SayAlive,
    StartInstance,
    StepsChanged,
    StopInstance,
)
from .in_process import (
    Assignment,
    Ending,
    StartFailed,
    failure_of,
    leave_behind,
    leave_within,
    problems_of,
    serve,
)
from .loaded_files import loaded_files
from .loader import resolve
from .plan import PlannedNode

BLOCKED_SECONDS: Final = 3.0
"""Seconds after which a start that blocks the loop is ended, once the end was asked for."""
ORPHAN_SECONDS: Final = 2.0
"""Seconds after its parent's death within which a child has ended."""
GUARD_PAUSE: Final = 0.5
"""Seconds before a guard that ended is started again."""
HEALTH_INTERVAL: Final = 0.5
STEPS_INTERVAL: Final = 0.2
HUNG_SECONDS: Final = 15.0
"""Seconds that a child has to end once its instance hangs."""

_FAILURES: Final = (ConfigError, InstanceBroken, PermissionDenied, StartFailed, Unavailable)

logger = logging.getLogger(__name__)


class Channel:
    """The child's end of the socket.

    Args:
        orphaned: called on the reading thread when the parent is gone.
        end_asked: called on the reading thread before a word to end is delivered.
        metrics_asked: called on the reading thread, also while the loop is blocked.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        orphaned: Callable[[], None],
        metrics_asked: Callable[[], None],
        end_asked: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._orphaned = orphaned
        self._end_asked = end_asked
        self._metrics_asked = metrics_asked
        self._sending = threading.Lock()
        self._early: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._deliver: Callable[[Command], None] = self._take_early
        self._thread = threading.Thread(target=self._read, name="dynbus-parent", daemon=True)

    def open(self) -> None:
        """Begin to read."""
        self._thread.start()

    def receive(self) -> Command:
        """Wait for the next command before `deliver_to`, for as long as the parent lives."""
        return self._early.get()

    def deliver_to(self, loop: asyncio.AbstractEventLoop, take: Callable[[Command], None]) -> None:
        """Have all further commands taken on the loop."""

        def deliver(command: Command) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: we are at the end
                loop.call_soon_threadsafe(take, command)

        self._deliver = deliver
        with contextlib.suppress(queue.Empty):
            while True:
                deliver(self._early.get_nowait())

    def send(self, report: Report) -> None:
        """Tell the parent; one that is gone is told nothing. Callable from any thread."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(msgspec.json.encode(report) + b"\n")

    def _take_early(self, command: Command) -> None:
        if isinstance(command, DrainInstance | StopInstance):
            os._exit(exit_codes.OK)  # nothing has been started that could be ended tidily
        self._early.put(command)

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(Command)
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    command = decoder.decode(line)
                    if isinstance(command, CollectMetrics):
                        self._metrics_asked()
                        continue
                    if isinstance(command, CollectFiles):
                        self.send(FilesCollected(loaded_files()))
                        continue
                    if isinstance(command, SayAlive):
                        self.send(Alive())
                        continue
                    if isinstance(command, DrainInstance | StopInstance):
                        self._end_asked()
                    self._deliver(command)
        except OSError:
            pass  # a reset is an end as well
        self._orphaned()


class Worker:
    """The child process from its first command to its exit code.

    Args:
        label: `namespace.component/number`, as the parent names the child.
    """

    def __init__(self, connection: socket.socket, label: str) -> None:
        self._channel = Channel(
            connection,
            orphaned=self._on_orphaned,
            metrics_asked=self._on_metrics_asked,
            end_asked=self._on_end_asked,
        )
        self._label = label
        self._instance_id = new_instance_id()
        self._announced = False
        self._config: ActorConfig | None = None
        self._shut_telemetry: Callable[[], object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: Ending | None = None
        self._memory: MemoryLimit | None = None
        self._hangs = False

    def run(self) -> int:
        """Serve until told to end; returns the exit code.

        Once it has returned, the process ends within `LEAVE_SECONDS`, whatever still runs in it.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        self._channel.open()
        load = self._channel.receive()
        if not isinstance(load, LoadActor):
            raise RuntimeError(f"the parent began with {load!r}")
        try:
            assignment = self._load(load)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the parent
            return self._fail(error)
        self._channel.send(ActorLoaded())
        while not isinstance(self._channel.receive(), StartInstance):
            pass
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            code = exit_codes.FAILURE
            try:
                code = runner.run(self._serve(assignment, load))
            except SystemExit as error:
                # A handler's, which has been logged. Text is no code, and means a failure.
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
            finally:
                if self._shut_telemetry is not None:
                    self._shut_telemetry()
                leave_within(code)
        return code

    def _load(self, load: LoadActor) -> Assignment:
        from dynbus.bus.telemetry import telemetry

        settings, node = load.settings, load.node
        sys.path[:] = settings.path
        configure_logging(
            settings.log_format, settings.log_level, actor=node.address, instance=self._instance_id
        )
        self._memory = take_place(self._label, load.placed)
        namespace, _, component = node.address.partition(".")
        given = arguments_of(node)
        self._config = ActorConfig(component, given)
        actor = load_class(node, self._config)
        if settings.otlp_endpoint or settings.metrics:
            self._shut_telemetry = telemetry.configure_telemetry(
                service_name=component,
                service_namespace=namespace,
                instance_id=self._instance_id,
                otlp_endpoint=settings.otlp_endpoint,
                prometheus=settings.metrics,
            ).shutdown
        else:
            telemetry.configure_from_environment(
                service_name=component,
                service_namespace=namespace,
                instance_id=self._instance_id,
            )
        return Assignment(
            actor,
            given,
            dataclasses.replace(node.service, namespace=namespace, workers=1),
            instance_id=self._instance_id,
            node=component,
            worker_index=load.placed.index,
        )

    async def _serve(self, assignment: Assignment, load: LoadActor) -> int:
        self._loop = asyncio.get_running_loop()
        self._ending = Ending()
        self._channel.deliver_to(self._loop, self._obey)
        try:
            await serve(
                *([assignment], load.settings.bus, self._ending),
                connected=self._connected,
                started=self._started,
                addresses=load.settings.addresses,
            )
        except (*_FAILURES, MemoryError) as error:
            return self._fail(error)
        return exit_codes.OK

    def _connected(self, runtime: Runtime) -> None:
        runtime.bus.status.announcer = lambda line, details: self._channel.send(
            Announced(line, details)
        )
        lane = runtime.bus.lane
        # On the lane, as what loads a model may hold this loop.
        lane.call(
            partial(lane.background.start, self._watch_steps, runtime, name="start of the worker")
        )

    async def _watch_steps(self, runtime: Runtime) -> None:
        sent: list[StartStep] = []
        while not self._announced:
            steps = runtime.bus.status.steps()
            if steps != sent:
                sent = steps
                self._channel.send(StepsChanged(steps))
            await anyio.sleep(STEPS_INTERVAL)

    async def _started(self, runtime: Runtime) -> None:
        # What the actor itself serves beside comes after it.
        instance = next(iter(runtime.instances.values()))
        self._announced = True
        # What the actor has imported and loaded stays. With vLLM a collection that looks at it all
        # takes a third of a second, in which no thread runs, the control lane's neither.
        gc.freeze()
        self._channel.send(InstanceReady(instance.id))
        lane = runtime.bus.lane
        # On the lane: it goes on while a handler blocks this loop, and ends with the lane.
        lane.call(
            partial(lane.background.start, self._watch_health, runtime, name="health of the worker")
        )

    async def _watch_health(self, runtime: Runtime) -> None:
        known: dict[str, str] = {}
        sent_details: dict[str, str] = {}
        while True:
            self._watch_hangs(runtime)
            problems, details = problems_of(runtime), dict(runtime.bus.status.read())
            if self._memory is not None:
                self._watch_memory(self._memory, runtime, details)
            if problems.keys() != known.keys() or details != sent_details:
                known, sent_details = problems, details
                self._channel.send(HealthChanged(problems, details))
            await anyio.sleep(HEALTH_INTERVAL)

    def _watch_hangs(self, runtime: Runtime) -> None:
        """Have this process end soon whose instance hangs, and at once where its loop is held."""
        for instance in list(runtime.instances.values()):
            if not instance.hung:
                continue
            if not self._hangs:
                self._tell_hang(instance.hung)
                leave_within(exit_codes.FAILURE, HUNG_SECONDS)
            elif not instance.broken:
                # Half a second later the main loop has not heard of it.
                leave_behind(exit_codes.FAILURE)

    def _tell_hang(self, reason: str) -> None:
        if not self._hangs:
            self._hangs = True
            self._channel.send(InstanceHangs(reason))

    def _watch_memory(self, limit: MemoryLimit, runtime: Runtime, details: dict[str, str]) -> None:
        if detail := limit.detail():
            details["memory"] = detail
        for instance in list(runtime.instances.values()):
            execution = instance.server.execution
            refused, execution.memory_refused = execution.memory_refused, False
            if refused and (reason := limit.reason_to_end()):
                instance.report_broken(reason)

    def _obey(self, command: Command) -> None:
        assert self._ending is not None
        if isinstance(command, DrainInstance):
            self._ending.drain(command.grace)
        elif isinstance(command, StopInstance):
            self._ending.stop()

    def _on_end_asked(self) -> None:
        if not self._announced:
            timer = threading.Timer(BLOCKED_SECONDS, self._leave_blocked_start)
            timer.daemon = True
            timer.start()

    def _leave_blocked_start(self) -> None:
        if self._ending is None or not self._ending.asked.is_set():
            logger.error(
                "the start of %s blocks its event loop and cannot be stopped: abandoning it",
                self._label,
            )
            os._exit(exit_codes.OK)

    def _on_metrics_asked(self) -> None:
        # Neither on the loop, which may be blocked, nor here: this thread hears the parent's death.
        threading.Thread(target=self._send_metrics, name="dynbus-metrics", daemon=True).start()

    def _send_metrics(self) -> None:
        page = ""
        try:
            from prometheus_client import generate_latest

            page = generate_latest().decode()
        except Exception:
            logger.exception("cannot collect the metrics of this process")
        self._channel.send(MetricsCollected(page))

    def _fail(self, error: BaseException) -> int:
        failure = failure_of(error)
        if isinstance(error, InstanceBroken) and error.hung:
            self._tell_hang(error.hung)
        if self._memory is not None:
            message = failure.message + self._memory.explain(error)
            failure = failure._replace(message=message)
        self._channel.send(InstanceFailed(*failure))
        return failure.code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._loop is None or self._ending is None:
            os._exit(exit_codes.OK)
        self._loop.call_soon_threadsafe(self._ending.drain)

    def _on_orphaned(self) -> None:
        logger.warning("dynbus run has died: stopping its instance")
        if self._loop is not None and self._ending is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ending.stop)
            time.sleep(ORPHAN_SECONDS)
        os._exit(exit_codes.FAILURE)


def arguments_of(node: PlannedNode) -> dict[str, Any]:
    """The constructor arguments of a node; texts are still to be read."""
    return node.values | {name: Text(text) for name, text in node.texts.items()}


def load_class(node: PlannedNode, config: ActorConfig) -> type[Actor]:
    """Import the class of a node, with the dependencies that the node has, and make its codecs.

    Args:
        config: of the node; its module may read it while it is imported.

    Raises:
        ConfigError: there is no such class, or it cannot be served.
    """
    component = node.address.partition(".")[2]
    class_name = node.actor.rpartition(":")[2].rpartition(".")[2]
    publish_config(config, component, class_name)
    actor = resolve(node.actor)
    # The links may have been made by a module that this process does not import.
    keep_dependencies(actor, list(node.dependencies))
    # Makes its codecs, which takes a while: better now than on the loop.
    check_servable(actor)
    return actor


def guard_group(connection: socket.socket) -> None:
    """Have a guard end this process's group when this process has ended.

    It is a child of this process. Programs that end all their children before they end themselves
    end it too, so it is started again.
    """

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", group_guard.__file__]
            + [str(os.getpid()), str(connection.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(connection.fileno(),),
        )

    def keep(guard: subprocess.Popen[bytes]) -> None:
        while True:
            code = guard.wait()
            logger.debug("the guard of this process's group ended with %d", code)
            time.sleep(GUARD_PAUSE)
            guard = start()

    # Before any code of a user's runs, and so before there is anything to guard.
    threading.Thread(target=keep, args=(start(),), name="dynbus-guard", daemon=True).start()


def main() -> None:
    """Run the child that the command line describes."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    if os.getpgrp() == os.getpid():
        guard_group(connection)
    sys.exit(Worker(connection, sys.argv[2]).run())
