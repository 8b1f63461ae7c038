"""The processes that render chat templates, seen from the one that they render for."""

from __future__ import annotations

import atexit
import contextlib
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec

from dynbus.llm.cores import usable_cores

from . import rendering
from .rendering import RenderAnswer


class RendererEnded(Exception):
    """A process ended while it rendered.

    Attributes:
        time_is_over: the system ended it, since it took too much processor time.
    """

    def __init__(self, *, time_is_over: bool) -> None:
        super().__init__("its processor time is over" if time_is_over else "it has ended")
        self.time_is_over = time_is_over


class Renderers:
    """Processes that render, each started when it is needed. They end with this one.

    Args:
        limit: how many there are at most; who needs another waits.
    """

    def __init__(self, limit: int) -> None:
        self._free = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[_Renderer] = []

    @property
    def idle(self) -> list[int]:
        """The process ids of those that have nothing to do."""
        with self._lock:
            return [renderer.process.pid for renderer in self._idle]

    def ask(self, request: bytes) -> RenderAnswer:
        """The answer to an encoded request. Waits: to be called in a thread.

        Raises:
            RendererEnded: there is none.
            OSError: no process can be started.
        """
        with self._free:
            while (renderer := self._take()) is not None:
                try:
                    return self._ask(renderer, request)
                except RendererEnded as error:
                    # It may have been ended before it was asked.
                    if error.time_is_over:
                        raise
            return self._ask(_Renderer(), request)

    def close(self) -> None:
        """End the processes that have nothing to do."""
        while (renderer := self._take()) is not None:
            renderer.end()

    def _take(self) -> _Renderer | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _ask(self, renderer: _Renderer, request: bytes) -> RenderAnswer:
        try:
            answer = renderer.ask(request)
        except BaseException:
            renderer.end()
            raise
        with self._lock:
            self._idle.append(renderer)
        return answer


class _Renderer:
    """One process; one thread at a time uses it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            # Its own folder must not be on the path.
            [sys.executable, "-P", str(Path(rendering.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._decoder = msgspec.json.Decoder(RenderAnswer)

    def ask(self, request: bytes) -> RenderAnswer:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(request + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise RendererEnded(time_is_over=self.process.wait() == -signal.SIGPROF)
        return self._decoder.decode(line)

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # Something was not written any more.
                pipe.close()
        self.process.wait()


RENDERERS: Final = Renderers(usable_cores())
"""Those of this process."""

atexit.register(RENDERERS.close)
