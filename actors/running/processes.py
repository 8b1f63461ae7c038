"""The processes of a run, as the process that runs them sees them; `fork_server.py` makes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final, Literal, Self

import anyio
import msgspec

MAX_REPORT: Final = 64 * 1024 * 1024
"""Bytes in a line that a process tells."""
FORK_SECONDS: Final = 30.0
"""Seconds that a process may take to be made, with the imports of a new fork server before it."""

PRELOADED: Final = (
    "anyio._backends._asyncio",
    "dynbus.bus.nats.connection",
    "pydantic.main",
    "structlog.stdlib",
    "uvloop",
)
"""The modules that a process that serves imports only when it comes to need them."""
STOP_SECONDS: Final = 2.0
"""Seconds that a fork server has to end when nobody needs it."""

logger = logging.getLogger(__name__)


class ForkProcess(msgspec.Struct, frozen=True):
    """Make a process.

    Attributes:
        role: what it is to do: serve an instance, or plan a run.
        label: `namespace.component/number` of an instance, as the list of processes shows it.
    """

    role: Literal["planner", "worker"]
    label: str = ""


class ProcessForked(msgspec.Struct, frozen=True, tag="forked"):
    """There is a process; or there is none, and `error` says why."""

    pid: int
    error: str = ""


class ProcessEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A process has ended, with a code that is negative for a signal."""

    pid: int
    code: int


ForkReport = ProcessForked | ProcessEnded


class ForkServerDied(OSError):
    """Raised when the fork server died before it told whether it has made a process.

    One that it has made hears that nobody wants it when the other end of its socket is closed.
    """

    def __init__(self) -> None:
        super().__init__("the fork server died")


class Process:
    """A process that the fork server has made.

    Attributes:
        returncode: negative for a signal; None while it runs, and when nobody can tell.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        # It names this process and no later one; the system's way to wait for a process that is
        # not our child. Linux only.
        self._handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def __repr__(self) -> str:
        state = "runs" if self.is_alive else f"ended with {self.returncode}"
        return f"<Process {self.pid} [{state}]>"

    @property
    def is_alive(self) -> bool:
        """True if it has not ended yet, as far as is known."""
        return not self._ended.is_set()

    async def wait(self) -> int | None:
        """Wait for its end, and return its code."""
        await self._ended.wait()
        return self.returncode

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing to one that has ended."""
        if self._ended.is_set():
            return
        with contextlib.suppress(ProcessLookupError):
            if self._handle is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self._handle, number)

    def take_end(self, code: int | None) -> None:
        """It has ended."""
        self.returncode = code
        self._ended.set()
        if self._handle is not None:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None

    def watch_alone(self) -> None:
        """Watch for its end without the fork server, which has died."""
        if self._handle is not None:
            asyncio.get_running_loop().add_reader(self._handle, self.take_end, None)
        else:
            self.kill()
            self.take_end(-signal.SIGKILL)


class ForkServer:
    """Makes processes while its block runs; it starts with the first, and again should it die.

    What it made goes on without it: the owner of a process ends it.

    Args:
        preload: names of further modules that every process will import.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = (*PRELOADED, *preload)
        self._program: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._received = b""
        self._forking = asyncio.Lock()
        self._forked: asyncio.Future[ProcessForked] | None = None
        self._processes: dict[int, Process] = {}

    def __repr__(self) -> str:
        state = "runs" if self._socket is not None else "does not run"
        return f"<ForkServer [{state} | {len(self._processes)} processes]>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        with anyio.CancelScope(shield=True):
            self._hang_up()
            if self._program is not None:
                await _end(self._program)

    async def open(
        self, asked: ForkProcess
    ) -> tuple[Process, asyncio.StreamReader, asyncio.StreamWriter]:
        """Make a process, and a connection to it. Once begun, this ends before it is cancelled.

        Raises:
            OSError: none could be made.
        """
        opened: tuple[Process, asyncio.StreamReader, asyncio.StreamWriter] | None = None
        # A process that is being made cannot be ended yet.
        with anyio.CancelScope(shield=True):
            try:
                opened = await self._open(asked)
            except ForkServerDied:
                # A process of the old one's has a socket that ended: this is the only one.
                opened = await self._open(asked)
        assert opened is not None
        return opened

    async def _open(
        self, asked: ForkProcess
    ) -> tuple[Process, asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        process: Process | None = None
        try:
            with theirs:
                process = await self.fork(asked, theirs.fileno())
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_REPORT)
        except BaseException:
            ours.close()
            if process is not None:
                process.kill()
            raise
        return process, reader, writer

    async def fork(self, asked: ForkProcess, fd: int) -> Process:
        """Make a process; `fd` is its end of a socket to the asker.

        It leads a session of its own. Once begun, this is not to be cancelled: there may be a
        process already.

        Raises:
            ForkServerDied: it may have made one.
            OSError: none could be made.
        """
        async with self._forking:
            with anyio.fail_after(FORK_SECONDS):
                if self._socket is None:
                    await self._start()
                assert self._socket is not None
                self._forked = asyncio.get_running_loop().create_future()
                try:
                    socket.send_fds(self._socket, [msgspec.json.encode(asked)], [fd])
                except ConnectionError:
                    self._on_death()
                forked = await self._forked
        if forked.error:
            raise OSError(forked.error)
        return self._processes[forked.pid]

    async def _start(self) -> None:
        if self._program is not None:
            await _end(self._program)
        ours, theirs = socket.socketpair()
        with theirs:
            self._program = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # what lies in the working directory is not to be taken for our own imports
                "-m",
                "dynbus.actors.running.fork_server",
                str(theirs.fileno()),
                *self._preload,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.setblocking(False)
        self._socket, self._received = ours, b""
        asyncio.get_running_loop().add_reader(ours, self._hear)

    def _hear(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._on_death()
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._receive(msgspec.json.decode(line, type=ForkReport))

    def _receive(self, report: ForkReport) -> None:
        if isinstance(report, ProcessEnded):
            self._processes.pop(report.pid).take_end(report.code)
            return
        if report.pid:
            # Before its end can be told.
            self._processes[report.pid] = Process(report.pid)
        if self._forked is not None and not self._forked.done():
            self._forked.set_result(report)

    def _on_death(self) -> None:
        logger.error("the fork server has died; its processes go on, a new one makes the next")
        self._hang_up()

    def _hang_up(self) -> None:
        """Part from the program; it ends when it hears of it, unless it has."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        if self._forked is not None and not self._forked.done():
            self._forked.set_exception(ForkServerDied())
        for process in self._processes.values():
            process.watch_alone()
        self._processes.clear()


async def _end(program: asyncio.subprocess.Process) -> None:
    """Reap a fork server that we have parted from, by force when it does not end by itself."""
    with anyio.move_on_after(STOP_SECONDS):
        await program.wait()
        return
    with contextlib.suppress(ProcessLookupError):
        program.kill()
    await program.wait()


def exit_text(code: int | None) -> str:
    """The end of a process, in words: a negative code is a signal's."""
    if code is None:
        return "how is not known: the fork server had died before it"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
