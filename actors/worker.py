"""One child process of `dynbus run`: `python -m dynbus.actors.worker FD LABEL` serves one instance.

Parent and child speak JSON lines over a socket pair, whose number the child gets as FD. The
parent sends `Load`, `Start`, `Drain` and `Stop`; the child answers with the reports below. The
end of the socket means that the parent is dead, however it died, and ends the child. A thread
reads it, so that this holds also while a handler blocks the main loop.

`Ctrl-C` in a terminal reaches every process of the run: the child leaves it to its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import msgspec

from dynbus.bus import exit_codes
from dynbus.bus.errors import ConfigError, PermissionDenied, Unavailable
from dynbus.bus.lane import new_event_loop
from dynbus.bus.logs import LogFormat, configure_logging

from .actor import check_startable
from .configuration import Text
from .loader import resolve
from .runtime import Runtime
from .serving import Assignment, Ending, StartFailed, describe, problems_of, serve

ORPHAN_SECONDS: Final = 2.0
"""Seconds after its parent's death within which a child has ended."""
HEALTH_INTERVAL: Final = 0.5

logger = logging.getLogger(__name__)


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Parent to child, first: what to import and how to log.

    Attributes:
        path: the parent's `sys.path`, so that both import the same files.
        actor: `module:Name`.
        values, texts: constructor arguments; the texts are still to be read.
        bus: for `load_config`.
    """

    path: list[str]
    actor: str
    values: dict[str, Any]
    texts: dict[str, str]
    bus: dict[str, Any]
    log_format: LogFormat | None
    log_level: str
    otlp_endpoint: str | None
    metrics: bool


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Parent to child: the server and the dependencies are there."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Parent to child: take no more calls, and end within `grace` seconds."""

    grace: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Parent to child: end at once."""


class CollectMetrics(msgspec.Struct, frozen=True, tag="collect_metrics"):
    """Parent to child: answer with `Metrics`."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Child to parent: imported, and waiting for `Start`."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Child to parent: the instance is announced."""

    instance_id: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Child to parent: the instance does not start; the child ends with the exit code."""

    code: int
    message: str
    traceback: str = ""


class Health(msgspec.Struct, frozen=True, tag="health"):
    """Child to parent, at each change: what keeps the instance from taking calls."""

    problems: dict[str, str]


class Metrics(msgspec.Struct, frozen=True, tag="metrics"):
    """Child to parent: its metrics in the Prometheus text format."""

    page: str


Command = Load | Start | Drain | Stop | CollectMetrics
Report = Loaded | Ready | Failed | Health | Metrics


class Channel:
    """The child's end of the socket.

    Args:
        orphaned: called on the reading thread when the parent is gone.
    """

    def __init__(self, connection: socket.socket, orphaned: Callable[[], None]) -> None:
        self._connection = connection
        self._orphaned = orphaned
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
        if isinstance(command, Drain | Stop):
            os._exit(exit_codes.OK)  # nothing has been started that could be ended tidily
        self._early.put(command)

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(Command)
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    self._deliver(decoder.decode(line))
        except OSError:
            pass  # a reset is an end as well
        self._orphaned()


class Worker:
    """The child process from its first command to its exit code."""

    def __init__(self, connection: socket.socket) -> None:
        self._channel = Channel(connection, self._on_orphaned)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: Ending | None = None

    def run(self) -> int:
        """Serve until told to end; returns the exit code."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._channel.open()
        load = self._channel.receive()
        if not isinstance(load, Load):
            raise RuntimeError(f"the parent began with {load!r}")
        try:
            assignment = self._load(load)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the parent
            return self._fail(error)
        self._channel.send(Loaded())
        while not isinstance(self._channel.receive(), Start):
            pass
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(self._serve(assignment, load))

    def _load(self, load: Load) -> Assignment:
        from dynbus.bus import telemetry

        sys.path[:] = load.path
        configure_logging(load.log_format, load.log_level)
        actor = resolve(load.actor)
        # Makes its codecs, which takes a while: better now than on the loop.
        check_startable(actor)
        if load.otlp_endpoint or load.metrics:
            import atexit

            shutdown = telemetry.configure(
                service_name="dynbus", otlp_endpoint=load.otlp_endpoint, prometheus=load.metrics
            )
            atexit.register(shutdown.shutdown)
        texts = {name: Text(text) for name, text in load.texts.items()}
        return Assignment(actor, {**load.values, **texts}, 1)

    async def _serve(self, assignment: Assignment, load: Load) -> int:
        self._loop = asyncio.get_running_loop()
        self._ending = Ending()
        self._channel.deliver_to(self._loop, self._obey)
        try:
            await serve([assignment], load.bus, self._ending, started=self._started)
        except (ConfigError, PermissionDenied, Unavailable, StartFailed) as error:
            return self._fail(error)
        return exit_codes.OK

    async def _started(self, runtime: Runtime) -> None:
        (instance,) = runtime.instances.values()
        self._channel.send(Ready(instance.id))
        # On the lane: it goes on while a handler blocks this loop, and ends with the lane.
        runtime.bus.lane.call(self._watch_health, runtime)

    def _watch_health(self, runtime: Runtime) -> None:
        loop = asyncio.get_running_loop()
        known: dict[str, str] = {}

        def look() -> None:
            nonlocal known
            found = problems_of(runtime)
            if found.keys() != known.keys():
                known = found
                self._channel.send(Health(found))
            loop.call_later(HEALTH_INTERVAL, look)

        look()

    def _obey(self, command: Command) -> None:
        assert self._ending is not None
        if isinstance(command, Drain):
            self._ending.drain(command.grace)
        elif isinstance(command, Stop):
            self._ending.stop()
        elif isinstance(command, CollectMetrics):
            threading.Thread(target=self._send_metrics, name="dynbus-metrics", daemon=True).start()

    def _send_metrics(self) -> None:
        from prometheus_client import generate_latest

        self._channel.send(Metrics(generate_latest().decode()))

    def _fail(self, error: BaseException) -> int:
        failure = describe(error)
        self._channel.send(Failed(*failure))
        return failure.code

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._loop is None or self._ending is None:
            os._exit(exit_codes.OK)
        self._loop.call_soon_threadsafe(self._ending.drain)

    def _on_orphaned(self) -> None:
        logger.warning("dynbus run is gone: its instance ends")
        if self._loop is not None and self._ending is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ending.stop)
            time.sleep(ORPHAN_SECONDS)
        os._exit(exit_codes.FAILURE)


def main() -> None:
    """Run the child that the command line describes."""
    # Ignored first: the parent started us with it blocked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    sys.exit(Worker(connection).run())


if __name__ == "__main__":
    main()
