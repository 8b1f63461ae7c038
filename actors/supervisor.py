"""The parent of `dynbus run`: one child process per instance, restarted when it crashes.

Dependencies are started before what depends on them and drained after it. The first start
decides: an actor that does not come up ends the run with its reason. An instance that ends
later is started again, after a pause that doubles, until it has ended too often.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from dynbus.bus import exit_codes
from dynbus.bus.clock import monotonic
from dynbus.bus.logs import LogFormat

from .configuration import Text
from .loader import level, reference
from .serving import Assignment, Failure
from .worker import (
    CollectMetrics,
    Command,
    Drain,
    Failed,
    Health,
    Load,
    Loaded,
    Metrics,
    Ready,
    Report,
    Start,
    Stop,
)

MAX_RESTARTS: Final = 5
RESTART_WINDOW: Final = 60.0
FIRST_PAUSE: Final = 0.2
LONGEST_PAUSE: Final = 10.0
STOP_SECONDS: Final = 2.0
"""Seconds that a child has to end after the last word; then it is killed."""
DRAIN_SLACK: Final = 5.0
"""Seconds beyond the grace period for `on_stop` and for leaving the bus."""
FAILED_GRACE: Final = 2.0
"""Seconds that the others have to end when an actor does not start."""
MAX_REPORT: Final = 64 * 1024 * 1024

logger = logging.getLogger(__name__)


class RestartPolicy:
    """Decides whether and when an instance that ended is started again, without clock or I/O."""

    def __init__(self, limit: int = MAX_RESTARTS, window: float = RESTART_WINDOW) -> None:
        self.limit = limit
        self.window = window
        self._ends: list[float] = []

    def __repr__(self) -> str:
        return f"<RestartPolicy [{len(self._ends)} of {self.limit} in {self.window:g} s]>"

    def pause_after(self, now: float, jitter: float) -> float | None:
        """Seconds to wait after an end; None when there were too many.

        Args:
            now: when it ended, in seconds of a monotonic clock.
            jitter: from 0 to 1; the higher, the longer the pause.
        """
        self._ends = [end for end in self._ends if now - end < self.window]
        self._ends.append(now)
        if len(self._ends) > self.limit:
            return None
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (len(self._ends) - 1))
        return pause * (0.5 + jitter / 2)


class ChildState(enum.Enum):
    """Where a child process is in its life."""

    LOADING = "loading"
    LOADED = "loaded"
    READY = "ready"
    RESTARTING = "restarting"
    ENDED = "ended"


class WorkerSettings(NamedTuple):
    """What all children of a run have in common; see `worker.Load`."""

    bus: Mapping[str, Any]
    log_format: LogFormat | None = None
    log_level: str = "info"
    otlp_endpoint: str | None = None
    metrics: bool = False


class Child:
    """One instance of a run, through any number of processes.

    Attributes:
        label: `namespace.component/number`, as messages and the process list name it.
    """

    def __init__(self, assignment: Assignment, number: int, settings: WorkerSettings) -> None:
        actor = assignment.actor
        self.label = f"{actor.__dynbus_namespace__}.{actor.__dynbus_component__}/{number}"
        self.level = level(actor)
        self.state = ChildState.LOADING
        self.instance_id = ""
        self.failure: Failure | None = None
        self.problems: Mapping[str, str] = {}
        self.metrics: asyncio.Future[str] | None = None
        self.has_been_ready = asyncio.Event()
        self.ended = asyncio.Event()
        self._last_word: Drain | Stop | None = None
        self._load = _load_command(assignment, settings)
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None

    def __repr__(self) -> str:
        return f"<Child {self.label} [{self.state.value} | pid {self.pid}]>"

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self, spawning: asyncio.Lock, loaded: Callable[[], None]) -> int:
        """Run one process to its end and return its exit code, negative for a signal.

        Args:
            spawning: held while the process is made.
            loaded: called when it waits for `start`.
        """
        self.state, self.failure = ChildState.LOADING, None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                async with spawning:
                    self._process = await _spawn(theirs.fileno(), self.label)
            reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_REPORT)
        except BaseException:
            ours.close()
            self.kill()
            raise
        self.send(self._load)
        if self._last_word is not None:
            self.send(self._last_word)
        reading = asyncio.ensure_future(self._read(reader, loaded))
        try:
            code = await self._process.wait()
            # What it said last; processes that it left behind may keep the socket open.
            await asyncio.wait({reading}, timeout=1.0)
        finally:
            reading.cancel()
            self._writer.close()
            self._writer = None
        return code

    def send(self, command: Command) -> None:
        """Tell the process; one that has ended is told nothing."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(command) + b"\n")

    def end(self, word: Drain | Stop) -> None:
        """Tell the process to end, and so one that is being made now."""
        self._last_word = word
        self.send(word)

    def kill(self) -> None:
        """End the process with SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _read(self, reader: asyncio.StreamReader, loaded: Callable[[], None]) -> None:
        decoder = msgspec.json.Decoder(Report)
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._take(decoder.decode(line), loaded)

    def _take(self, report: Report, loaded: Callable[[], None]) -> None:
        if isinstance(report, Loaded):
            self.state = ChildState.LOADED
            loaded()
        elif isinstance(report, Ready):
            self.state, self.instance_id, self.problems = ChildState.READY, report.instance_id, {}
            self.has_been_ready.set()
        elif isinstance(report, Failed):
            self.failure = Failure(report.code, report.message, report.traceback)
        elif isinstance(report, Health):
            self.problems = report.problems
        elif self.metrics is not None and not self.metrics.done():
            assert isinstance(report, Metrics)
            self.metrics.set_result(report.page)


class Supervisor:
    """Runs the children of one `dynbus run`. `run` carries it out; the rest steers it.

    Args:
        drain_grace: seconds that all children together have to end tidily.

    Raises:
        ConfigError: another process could not find one of the classes.
    """

    def __init__(
        self,
        assignments: Sequence[Assignment],
        settings: WorkerSettings,
        *,
        drain_grace: float,
        policy: Callable[[], RestartPolicy] = RestartPolicy,
    ) -> None:
        self.children = [
            Child(assignment, number, settings)
            for assignment in assignments
            for number in range(1, assignment.workers + 1)
        ]
        self.failure: Failure | None = None
        self._grace = drain_grace
        self._policy = policy
        self._begun = asyncio.Event()
        self._asked = asyncio.Event()
        self._at_once = asyncio.Event()
        self._spawning = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        ready = sum(child.state is ChildState.READY for child in self.children)
        return f"<Supervisor [{ready} of {len(self.children)} ready]>"

    def begin(self) -> None:
        """Let the children start: the server is there."""
        self._begun.set()

    def drain(self) -> None:
        """Ask for a tidy end; more calls change nothing."""
        self._asked.set()

    def stop(self) -> None:
        """Ask for the end at once."""
        self._asked.set()
        self._at_once.set()

    async def run(self) -> int:
        """Run the children until the end is asked for or one has failed for good.

        Returns the exit code; `failure` says why when it is neither `OK` nor `INTERRUPTED`. No
        child is left when this returns or raises.
        """
        try:
            self._tasks = {asyncio.create_task(self._keep(child)) for child in self.children}
            await self._asked.wait()
            await self._end()
        finally:
            await asyncio.shield(asyncio.ensure_future(self._leave_none()))
        if self._at_once.is_set():
            return exit_codes.INTERRUPTED
        return self.failure.code if self.failure is not None else exit_codes.OK

    def problems(self) -> dict[str, str]:
        """What keeps the run from being ready, by child."""
        found: dict[str, str] = {}
        for child in self.children:
            if child.state is not ChildState.READY:
                found[child.label] = child.state.value
            elif child.problems:
                found[child.label] = "; ".join(f"{k}: {v}" for k, v in child.problems.items())
        if self._asked.is_set():
            found["run"] = "draining"
        return found

    async def metrics(self, timeout: float = 2.0) -> list[tuple[Child, str]]:
        """The metrics page of each child that gives one within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        asked: dict[asyncio.Future[str], Child] = {}
        for child in self.children:
            if child.state is ChildState.READY:
                if child.metrics is None or child.metrics.done():
                    child.metrics = loop.create_future()
                    child.send(CollectMetrics())
                asked[child.metrics] = child
        if not asked:
            return []
        done, _ = await asyncio.wait(asked, timeout=timeout)
        return [(asked[page], page.result()) for page in done]

    # One child -----------------------------------------------------------------------------

    async def _keep(self, child: Child) -> None:
        policy = self._policy()
        starting: set[asyncio.Task[None]] = set()

        def loaded() -> None:
            task = asyncio.ensure_future(self._start(child))
            starting.add(task)
            task.add_done_callback(starting.discard)

        try:
            while not self._asked.is_set():
                code = await child.run(self._spawning, loaded)
                if self._asked.is_set():
                    return
                if not child.has_been_ready.is_set():
                    self._fail(child.failure or _silent_end(child, code))
                    return
                pause = policy.pause_after(monotonic(), random.random())
                why = child.failure.message if child.failure else _exit_text(code)
                if pause is None:
                    text = f"{child.label} ended {policy.limit + 1} times within "
                    text += f"{policy.window:g} s, the last time: {why}"
                    trace = child.failure.traceback if child.failure else ""
                    self._fail(Failure(exit_codes.GAVE_UP, text, trace))
                    return
                logger.warning("%s ended: %s; it is started again in %.1f s", child, why, pause)
                child.state = ChildState.RESTARTING
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._asked.wait()
        finally:
            for task in starting:
                task.cancel()
            child.state = ChildState.ENDED
            child.ended.set()

    async def _start(self, child: Child) -> None:
        """Start a child that has loaded, once the server and its dependencies are there."""
        await self._begun.wait()
        below = [other for other in self.children if other.level < child.level]
        await _all_set(other.has_been_ready for other in below)
        child.send(Start())

    def _fail(self, failure: Failure) -> None:
        if self.failure is None and not self._asked.is_set():
            self.failure = failure
            if failure.code != exit_codes.GAVE_UP:
                self._grace = min(self._grace, FAILED_GRACE)
        self._asked.set()

    # The end -------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Drain level by level, dependencies last, until all have ended or time is over."""
        deadline = monotonic() + self._grace
        stopping = asyncio.ensure_future(_all_set([self._at_once]))
        try:
            for one in sorted({child.level for child in self.children}, reverse=True):
                children = [child for child in self.children if child.level == one]
                left = max(0.0, deadline - monotonic())
                for child in children:
                    child.end(Drain(left))
                ended = asyncio.ensure_future(_all_set(child.ended for child in children))
                await asyncio.wait(
                    {ended, stopping},
                    timeout=left + DRAIN_SLACK,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                ended.cancel()
        finally:
            stopping.cancel()

    async def _leave_none(self) -> None:
        """Tell what still runs to end at once, and kill it when it does not."""
        self._asked.set()
        if not self._tasks:
            return
        for child in self.children:
            child.end(Stop())
        await asyncio.wait(self._tasks, timeout=STOP_SECONDS)
        for child in self._alive():
            logger.error("%s did not end and was killed", child)
            child.kill()
        await asyncio.wait(self._tasks, timeout=STOP_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _alive(self) -> list[Child]:
        return [child for child in self.children if child.pid is not None]


async def _all_set(events: Iterable[asyncio.Event]) -> None:
    for event in list(events):
        await event.wait()


async def _spawn(fd: int, label: str) -> asyncio.subprocess.Process:
    """Start a child process with SIGINT blocked, until it has had time to ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # what lies in the working directory is not to be taken for our own imports
            "-m",
            "dynbus.actors.worker",
            str(fd),
            label,
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(fd,),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _load_command(assignment: Assignment, settings: WorkerSettings) -> Load:
    arguments = assignment.arguments
    return Load(
        path=list(sys.path),
        actor=reference(assignment.actor),
        values={name: v for name, v in arguments.items() if not isinstance(v, Text)},
        texts={name: str(v) for name, v in arguments.items() if isinstance(v, Text)},
        bus=dict(settings.bus),
        log_format=settings.log_format,
        log_level=settings.log_level,
        otlp_endpoint=settings.otlp_endpoint,
        metrics=settings.metrics,
    )


def _silent_end(child: Child, code: int) -> Failure:
    text = f"{child.label} ended before it was ready: {_exit_text(code)}"
    return Failure(exit_codes.START_FAILED, text)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
