"""Processes that do what a stranger may have made dangerous, seen from the one that they do it for.

What a request or a model brings along may compute without end, take all memory, or end the process.
Each program of a sandbox limits its own time and memory. It reads requests and writes answers, each
one line of JSON, and ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Final

MOST_AT_ONCE: Final = 32 * 1024
"""Bytes of a request that is written on the event loop: a pipe takes more, so that nobody waits."""

_PIECE: Final = 64 * 1024

ANSWER_SECONDS: Final = 120.0
"""In which a process answers, or is ended. Its own limits are of processor time, of which one that
is stopped or waits for a disk takes none."""

_END_SECONDS: Final = 0.5
"""In which a process that writes no more has ended: what it had is given back in a few ms."""


class SandboxEnded(Exception):
    """A process ended while it worked.

    Attributes:
        by: the number of the signal that ended it; 0 where it ended by itself.
        time_is_over: the system ended it, since it took too much processor time.
    """

    def __init__(self, by: int) -> None:
        self.by = by
        self.time_is_over = by in (signal.SIGPROF, signal.SIGVTALRM)
        super().__init__("its processor time is over" if self.time_is_over else "it has ended")


class Sandbox:
    """Processes that run one program, each started when it is needed. They end with this one, or
    when nobody has the sandbox any more.

    Args:
        program: its path.
        limit: how many there are at most; who needs another waits.
        first: a line that each of them reads before all requests; none where it is empty.
        seconds: in which one answers, or is ended.
    """

    def __init__(
        self, program: Path, limit: int, *, first: bytes = b"", seconds: float = ANSWER_SECONDS
    ) -> None:
        self._program = program
        self._seconds = seconds
        self._first = first
        self._free = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        weakref.finalize(self, _end, self._idle)

    @property
    def idle(self) -> list[int]:
        """The process ids of those that have nothing to do."""
        with self._lock:
            return [one.process.pid for one in self._idle]

    async def ask_idle(self, request: bytes) -> bytes | None:
        """The answer to a short request of a process that has nothing to do, which is waited for on
        the event loop; None where there is no such process, or the request is not short.

        Raises:
            SandboxEnded: it ended, perhaps before it was asked.
        """
        if len(request) > MOST_AT_ONCE or not self._free.acquire(blocking=False):
            return None
        process = self._pop_idle()
        if process is None:
            self._free.release()
            return None
        try:
            answer = await process.ask_on_loop(request)
        except asyncio.CancelledError:
            # It works on, and is there for others when its answer was read.
            threading.Thread(target=self._finish, args=(process,), daemon=True).start()
            raise
        except BaseException:
            process.end()
            self._free.release()
            raise
        self._keep(process)
        self._free.release()
        return answer

    def _finish(self, process: _Process) -> None:
        try:
            process.finish()
            self._keep(process)
        except BaseException as error:
            process.end()
            if not isinstance(error, SandboxEnded):
                raise
        finally:
            self._free.release()

    def ask(self, request: bytes) -> bytes:
        """The answer to a request, each a line without its end. Waits: to be called in a thread.

        Raises:
            SandboxEnded: there is none.
            OSError: no process can be started.
        """
        with self._free:
            process = self._pop_idle()
            if process is not None:
                try:
                    return self._ask(process, request)
                except SandboxEnded as error:
                    # It may have been ended before it was asked. Others are not tried: a request
                    # that ends one would end them all.
                    if error.time_is_over:
                        raise
            return self._ask(_Process(self._program, self._first, self._seconds), request)

    def _pop_idle(self) -> _Process | None:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.process.poll() is None:
                    return process
                process.end()
        return None

    def _ask(self, process: _Process, request: bytes) -> bytes:
        try:
            answer = process.ask(request)
        except BaseException:
            process.end()
            raise
        self._keep(process)
        return answer

    def _keep(self, process: _Process) -> None:
        with self._lock:
            self._idle.append(process)


def _end(idle: list[_Process]) -> None:
    for process in idle:
        process.end()


class _Process:
    """One process; one thread at a time uses it."""

    def __init__(self, program: Path, first: bytes, seconds: float) -> None:
        self._seconds = seconds
        self._first = first + b"\n" if first else b""
        self._pieces: list[bytes] = []
        self._is_read = True
        # Ctrl-C goes to the whole group, also before a program says that it ignores it. It stays in
        # the group, with which what is left of a worker is killed.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process = subprocess.Popen(
                # Its own folder must not be on the path.
                [sys.executable, "-P", str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert self.process.stdout is not None
        self._output = self.process.stdout.fileno()

    def ask(self, request: bytes) -> bytes:
        with self._ended_late():
            self._write(request)
            return self._read_rest()

    def finish(self) -> None:
        """Read the rest of an answer that nobody waits for any more."""
        with self._ended_late():
            self._read_rest()

    @contextlib.contextmanager
    def _ended_late(self) -> Generator[None]:
        """Ends it if it takes too long, which ends reads and writes of its pipes."""
        timer = threading.Timer(self._seconds, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    async def ask_on_loop(self, request: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        read: asyncio.Future[None] = loop.create_future()

        def read_some() -> None:
            if self._read_some() and not read.done():
                read.set_result(None)

        self._write(request)
        loop.add_reader(self._output, read_some)
        timer = loop.call_later(self._seconds, self.process.kill)
        try:
            await read
        finally:
            timer.cancel()
            loop.remove_reader(self._output)
            # uvloop has made reads return at once, which a thread that asks next has to wait for.
            os.set_blocking(self._output, True)
        return self._read_rest()

    def _write(self, request: bytes) -> None:
        assert self.process.stdin is not None
        self._pieces, self._is_read = [], False
        try:
            self.process.stdin.write(self._first + request + b"\n")
            self.process.stdin.flush()
        except OSError:
            # It has ended, and so has its output.
            pass
        self._first = b""

    def _read_some(self) -> bool:
        """Read what is there of the answer, or wait for more; whether it is whole, or there is no
        more."""
        piece = os.read(self._output, _PIECE)
        self._pieces.append(piece)
        self._is_read = not piece or piece.endswith(b"\n")
        return self._is_read

    def _read_rest(self) -> bytes:
        """The answer, for whose rest it waits.

        Raises:
            SandboxEnded: there is none.
        """
        while not self._is_read:
            self._read_some()
        line, self._pieces = b"".join(self._pieces), []
        if not line.endswith(b"\n"):
            raise SandboxEnded(self._signal())
        return line[:-1]

    def _signal(self) -> int:
        """The signal that ended it, once it writes no more; 0 for none."""
        try:
            return max(0, -self.process.wait(_END_SECONDS))
        except subprocess.TimeoutExpired:
            # It lives on without its output, and is ended by who hears that it is of no use.
            return 0

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # Something was not written any more.
                pipe.close()
        self.process.wait()
