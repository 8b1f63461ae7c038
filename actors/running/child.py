"""One instance of a run in a child process: making the process, and talking with it.

`child_messages.py` has what is said; `child_process.py` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from dynbus.actors.declaring.resources import memory_text
from dynbus.actors.placing.allotment import Placement
from dynbus.bus import exit_codes
from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic
from dynbus.bus.config import load_config
from dynbus.bus.telemetry.process_status import StartStep

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
    Report,
    SayAlive,
    StepsChanged,
    StopInstance,
    WorkerSettings,
)
from .in_process import Failure
from .plan import PlannedNode
from .processes import ForkProcess, ForkServer, Process

STOP_SECONDS: Final = 2.0
"""Seconds that a child has to end after the last word; then it is killed."""
LAST_WORDS_SECONDS: Final = 1.0
GROUP_SECONDS: Final = 3.0
"""Seconds that what a process started has to be gone after it: its guard kills it."""
GROUP_POLL: Final = 0.02
ASK_INTERVAL: Final = 1.0
"""Seconds between two questions to a child whether it is alive."""
HELD_UP_SECONDS: Final = 5.0
"""Seconds for which a process is held up before that is said."""
HELD_UP: Final = "it answers nothing, as it is stopped (SIGSTOP) or waits for a disk"
STACKS_SECONDS: Final = 1.0
"""Seconds that a child which hangs has to write the stacks of its threads."""

_OUT_OF_MEMORY: Final = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
"""The exit statuses of programs that were refused memory and could not say so."""

logger = logging.getLogger(__name__)


class ChildState(enum.Enum):
    """The state of a child process."""

    LOADING = "loading"
    LOADED = "loaded"
    READY = "ready"
    RESTARTING = "restarting"
    ENDED = "ended"


class Child:
    """One instance of a run, through any number of processes.

    Attributes:
        label: `namespace.component/number`, as messages and the process list name it.
        node: what it is an instance of.
        placed: what its process has of the machine.
        index: which of its instances it is, from 0; the one that replaces it has it too.
        required: whether the run ends where it does not start.
        keeping: cancelled to end it now.
        settled: set when it has been ready, or has ended.
        leaving: set when it was told to end.
        ready_at: when the process that runs now, or ran last, became ready; None when it did not.
        hangs: how often its instance has hung.
        crash: how the process before ended, when that was not asked for; empty once it is ready.
        files: those of the user's that its process had loaded when it was asked last; None when
            it has never said so.
        held_up: seconds for which its process answers nothing, being stopped or waiting for a disk.
        steps: what its process does before it is ready.
        news: set when `steps` or `announced` have changed.
        announced: what people are to read, and have not yet: lines, and what to add to each.
    """

    def __init__(
        self,
        node: PlannedNode,
        number: int,
        settings: WorkerSettings,
        *,
        placed: Placement = Placement(),  # noqa: B008 - nothing can change it
        required: bool = False,
        news: asyncio.Event | None = None,
    ) -> None:
        self.node = node
        self.number = number
        self.placed = placed
        self.index = placed.index
        self.required = required
        self.keeping = anyio.CancelScope()
        self.label = f"{node.address}/{number}"
        self.state = ChildState.LOADING
        self.instance_id = ""
        self.failure: Failure | None = None
        self.ready_at: float | None = None
        self.hangs = 0
        self.crash = ""
        self.files: Collection[str] | None = None
        self.problems: Mapping[str, str] = {}
        self.held_up = 0.0
        self.details: Mapping[str, str] = {}
        self.steps: Sequence[StartStep] = ()
        self.news = news or asyncio.Event()
        self.announced: list[tuple[str, str]] = []
        self.has_been_ready = asyncio.Event()
        self.settled = asyncio.Event()
        self.leaving = asyncio.Event()
        self.ended = asyncio.Event()
        self._last_word: DrainInstance | StopInstance | None = None
        self._load = LoadActor(node, settings, placed)
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._metrics: asyncio.Future[str] | None = None
        self._files_reported = asyncio.Event()
        self._is_alive = True
        self._mute_limit = load_config(settings.bus, unknown_variables="warn").mute_limit

    def __repr__(self) -> str:
        return f"<Child {self.label} [{self.state.value} | pid {self.pid}]>"

    @property
    def is_leaving(self) -> bool:
        """True if it was told to end."""
        return self.leaving.is_set()

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        process = self._process
        return process.pid if process is not None and process.is_alive else None

    async def run(
        self, forks: ForkServer, loaded: Callable[[], Coroutine[Any, Any, None]]
    ) -> int | None:
        """Run one process to its end, and that of all that it started.

        When it is cancelled, it ends the process first.

        Returns its exit code, negative for a signal; None when nobody can tell.

        Args:
            forks: makes the process.
            loaded: run when it waits for `StartInstance`.

        Raises:
            OSError: there is no process, since none could be made.
        """
        self.state, self.failure, self.ready_at = ChildState.LOADING, None, None
        self.details, self.steps = {}, ()
        process, reader, writer = await forks.open(ForkProcess("worker", self.label))
        self._process, self._writer, heard = process, writer, asyncio.Event()
        self.send(self._load)
        if self._last_word is not None:
            self.send(self._last_word)

        async def ended() -> int | None:
            code = await process.wait()
            self.state = ChildState.ENDED
            # What it said last; processes that it left behind may keep the socket open.
            with anyio.move_on_after(LAST_WORDS_SECONDS):
                await heard.wait()
            self.state = ChildState.ENDED  # whatever that was
            self.steps = ()
            self.news.set()
            await self._group_ended(process.pid)
            return code

        try:
            async with task_group() as tasks:
                tasks.start_soon(self._read, reader, partial(tasks.start_soon, loaded), heard)
                tasks.start_soon(self._watch_answers, process)
                code = await self._wait_or_end(ended)
                tasks.cancel_scope.cancel()
        finally:
            writer.close()
            self._writer = None
            self._files_reported.set()
            if self._metrics is not None:
                self._metrics.cancel()
        return code

    async def _wait_or_end(self, ended: Callable[[], Awaitable[int | None]]) -> int | None:
        """Wait until the process has ended; when that is cancelled, bring it about."""
        try:
            return await ended()
        except asyncio.CancelledError:
            self.send(StopInstance())
            with anyio.move_on_after(STOP_SECONDS, shield=True):
                await ended()
            if self.pid is not None:
                logger.error("%s (process %s) did not end and was killed", self.label, self.pid)
                self.kill()
                with anyio.move_on_after(STOP_SECONDS, shield=True):
                    await ended()
            raise

    async def _watch_answers(self, process: Process) -> None:
        """End a process none of whose threads gets the interpreter, since one of them holds it.

        Time counts only as far as this process ran itself, and that one could: it is not stopped,
        and waits for no disk.
        """
        silent, last = 0.0, monotonic()
        self._is_alive, self.held_up = True, 0.0
        while silent <= self._mute_limit:
            await anyio.sleep(ASK_INTERVAL)
            now = monotonic()
            seconds, last = min(now - last, ASK_INTERVAL), now
            if self._is_alive or self.state is not ChildState.READY:
                self._note_held_up(0.0)
                silent = 0.0
                self._is_alive = False
                self.send(SayAlive())
            elif _is_held_up(process.pid):
                self._note_held_up(self.held_up + seconds)
                silent = 0.0
            else:
                silent += seconds
        self._hung(f"{self.label} (process {process.pid}) has answered nothing for {silent:.0f} s")
        process.send_signal(STACKS_SIGNAL)
        await anyio.sleep(STACKS_SECONDS)
        process.kill()

    def _note_held_up(self, seconds: float) -> None:
        """Note for how long it has been held up, and say so once, and when it goes on."""
        before, self.held_up = self.held_up, seconds
        if before <= HELD_UP_SECONDS < seconds:
            logger.warning("%s (process %s): %s", self.label, self.pid, HELD_UP)
        elif seconds <= HELD_UP_SECONDS < before:
            logger.info("%s (process %s) goes on", self.label, self.pid)

    def _hung(self, message: str) -> None:
        self.hangs += 1
        self.failure = Failure(exit_codes.FAILURE, message)
        logger.error("%s: it hangs, and is ended", message)

    def memory_note(self, code: int | None) -> str:
        """The note on the memory limit of a process that has ended so."""
        limit = self.node.service.resources.memory
        if limit is None:
            return ""
        if "memory" in self.details:
            return f"; {self.details['memory']} was in use"
        if code in _OUT_OF_MEMORY:
            return f"; its memory limit is {memory_text(limit)}"
        return ""

    def collect_metrics(self) -> asyncio.Future[str]:
        """Ask the process for its metrics page; cancelled when it ends before it answers.

        Who asks while an answer is due gets the same one.
        """
        if self._metrics is None or self._metrics.done():
            self._metrics = asyncio.get_running_loop().create_future()
            self.send(CollectMetrics())
        return self._metrics

    async def collect_files(self) -> None:
        """Have the process say what `files` are; returns when it has, or has ended."""
        self._files_reported.clear()
        self.send(CollectFiles())
        if self.pid is not None:
            await self._files_reported.wait()

    def send(self, command: Command) -> None:
        """Tell the process; one that has ended is told nothing."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(command) + b"\n")

    def request_end(self, word: DrainInstance | StopInstance) -> None:
        """Tell the process to end, and so one that is being made now."""
        self._last_word = word
        self.leaving.set()
        self.send(word)

    def kill(self) -> None:
        """End the process with SIGKILL."""
        if self._process is not None:
            self._process.kill()

    async def _group_ended(self, pid: int) -> None:
        """Wait until the guard of the process's group has ended what the process left behind.

        The next process may need the memory that it holds.
        """
        deadline = monotonic() + GROUP_SECONDS
        while _group_lives(pid):
            if monotonic() > deadline:
                logger.error(
                    "processes that %s (process %d) started still run after it ended",
                    self.label,
                    pid,
                )
                return
            await anyio.sleep(GROUP_POLL)

    async def _read(
        self, reader: asyncio.StreamReader, loaded: Callable[[], object], heard: asyncio.Event
    ) -> None:
        decoder = msgspec.json.Decoder(Report)
        try:
            while line := await reader.readline():
                self._receive(decoder.decode(line), loaded)
        except ConnectionError:
            pass  # it has ended, which `run` waits for
        except (msgspec.DecodeError, ValueError) as error:  # a ValueError: over `MAX_REPORT`
            text = f"{self.label} sent an invalid report: {error}"
            self.failure = Failure(exit_codes.START_FAILED, text)
            self.kill()
        finally:
            heard.set()

    def _receive(self, report: Report, loaded: Callable[[], object]) -> None:
        if isinstance(report, ActorLoaded):
            self.state = ChildState.LOADED
            loaded()
        elif isinstance(report, InstanceReady):
            self.state, self.instance_id = ChildState.READY, report.instance_id
            self.ready_at, self.crash = monotonic(), ""
            self.problems, self.details, self.steps = {}, {}, ()
            self.news.set()
            self.has_been_ready.set()
            self.settled.set()
        elif isinstance(report, StepsChanged):
            self.steps = report.steps
            self.news.set()
        elif isinstance(report, Announced):
            self.announced.append((report.line, report.details))
            self.news.set()
        elif isinstance(report, Alive):
            self._is_alive = True
        elif isinstance(report, InstanceHangs):
            self._hung(f"{self.label}: {report.message}")
        elif isinstance(report, InstanceFailed):
            self.failure = Failure(report.code, report.message, report.traceback)
        elif isinstance(report, HealthChanged):
            self.problems, self.details = report.problems, report.details
        elif isinstance(report, FilesCollected):
            self.files = report.files
            self._files_reported.set()
        elif self._metrics is not None and not self._metrics.done():
            self._metrics.set_result(report.page)


def _group_lives(leader: int) -> bool:
    """True if a process lives in the group of a worker that has ended. The group is only asked,
    never signalled: its number may be that of others by now.

    It is only asked, never signalled: its number may be that of others by now.
    """
    with contextlib.suppress(ChildProcessError):
        # As the first process of a container we are the parent of what is left, dead or alive.
        os.waitpid(-leader, os.WNOHANG)
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return False
    # The dead count as well until their new parent has asked for them, which may take seconds.
    statuses = list(Path("/proc").glob("[0-9]*/stat"))
    return not statuses or any(_is_alive_in(leader, status) for status in statuses)


def _is_held_up(pid: int) -> bool:
    """True if a thread of a process is stopped, or waits for a disk or a device."""
    statuses = Path(f"/proc/{pid}/task").glob("*/stat")
    return any(_state_and_group(status)[0] in ("T", "t", "D") for status in statuses)


def _is_alive_in(group: int, status: Path) -> bool:
    state, of_group = _state_and_group(status)
    return of_group == str(group) and state not in ("Z", "X")


def _state_and_group(status: Path) -> tuple[str, str]:
    """The state of a process or a thread, and its group; nothing of one that has ended."""
    try:
        state, _, group, *_ = status.read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return state, group
