"""Processes that do what a stranger may have made dangerous, seen from the one that they do it for.

What a request or a model brings along may compute without end, take all memory, or end the process.
Each program of a sandbox limits its own time and memory. It reads requests and writes answers, each
one line of JSON, and ends when its input does.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path


class SandboxEnded(Exception):
    """A process ended while it worked.

    Attributes:
        time_is_over: the system ended it, since it took too much processor time.
    """

    def __init__(self, *, time_is_over: bool) -> None:
        super().__init__("its processor time is over" if time_is_over else "it has ended")
        self.time_is_over = time_is_over


class Sandbox:
    """Processes that run one program, each started when it is needed. They end with this one, or
    when nobody has the sandbox any more.

    Args:
        program: its path.
        limit: how many there are at most; who needs another waits.
        first: a line that each of them reads before all requests; none where it is empty.
    """

    def __init__(self, program: Path, limit: int, *, first: bytes = b"") -> None:
        self._program = program
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

    def ask(self, request: bytes) -> bytes:
        """The answer to a request, each a line without its end. Waits: to be called in a thread.

        Raises:
            SandboxEnded: there is none.
            OSError: no process can be started.
        """
        with self._free:
            while (process := self._pop_idle()) is not None:
                try:
                    return self._ask(process, request)
                except SandboxEnded as error:
                    # It may have been ended before it was asked.
                    if error.time_is_over:
                        raise
            return self._ask(_Process(self._program, self._first), request)

    def _pop_idle(self) -> _Process | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _ask(self, process: _Process, request: bytes) -> bytes:
        try:
            answer = process.ask(request)
        except BaseException:
            process.end()
            raise
        with self._lock:
            self._idle.append(process)
        return answer


def _end(idle: list[_Process]) -> None:
    for process in idle:
        process.end()


class _Process:
    """One process; one thread at a time uses it."""

    def __init__(self, program: Path, first: bytes) -> None:
        self._first = first
        self.process = subprocess.Popen(
            # Its own folder must not be on the path.
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, request: bytes) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if self._first:
                self.process.stdin.write(self._first + b"\n")
                self._first = b""
            self.process.stdin.write(request + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise SandboxEnded(time_is_over=self.process.wait() == -signal.SIGPROF)
        return line[:-1]

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # Something was not written any more.
                pipe.close()
        self.process.wait()
