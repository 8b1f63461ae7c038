"""Processes of the benchmark, each bounded and ended by its process id."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 10.0
_LOG_LINES = 4


class Failed(Exception):
    """A child did not do what it was asked to."""


class Missing(Exception):
    """The library that the child measures is not installed."""


def environment() -> dict[str, str]:
    """The variables of a child: like ours, with the repository on the path."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Child:
    """One end of a system in a process of its own; made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._family: list[psutil.Process] = []

    @classmethod
    async def start(
        cls, python: str, arguments: Sequence[str], log: Path, timeout: float
    ) -> tuple[Self, dict[str, Any]]:
        """Start an end; returns it and its first answer.

        Raises:
            Missing: the system is not installed for this Python.
            Failed: it did not get ready in `timeout` seconds.
        """
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                python,
                "-m",
                "benchmarks.request_plane.process",
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env=environment(),
                start_new_session=True,
            )
        child = cls(process, log)
        try:
            ready = await child._read(timeout)
        except BaseException:
            await child.stop()
            raise
        if "missing" in ready:
            await child.stop()
            raise Missing(ready["missing"])
        # Remembered: after a crash its children are no longer found below it.
        child._family = descendants(child.pid)
        return child, ready

    @property
    def pid(self) -> int:
        return self._process.pid

    def family(self) -> list[int]:
        """The process ids of the child and of all below it."""
        return [self.pid, *(process.pid for process in descendants(self.pid))]

    async def ask(self, command: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            Failed: it answered with an error, died, or took longer than `timeout` seconds.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        answer = await self._read(timeout)
        if "error" in answer:
            raise Failed(str(answer["error"]))
        return answer

    async def _read(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise Failed(f"no answer within {timeout:.0f} s{self._log_tail()}") from None
        if not line:
            raise Failed(f"the process died{self._log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _log_tail(self) -> str:
        tail = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "; its log ends: " + "\n".join(tail) if tail else ""

    async def stop(self) -> None:
        """End the process and all that it started: ask, then kill."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.shield(end_process(self._process, self._family))


async def end_process(
    process: asyncio.subprocess.Process, family: Sequence[psutil.Process] = ()
) -> None:
    """Wait for a child that was told to end; after 10 s kill it, and what is left below it."""
    family = [*{*family, *descendants(process.pid)}]
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 1.0)
    for survivor in alive:
        with suppress(psutil.NoSuchProcess):  # psutil compares start times, never only the id
            survivor.kill()


def descendants(pid: int) -> list[psutil.Process]:
    """The processes below `pid`, without itself; none if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
