"""Processes of a measurement: each answers in JSON lines and ends when its standard input does."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 10.0


class Child:
    """A process that this one started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def line(self, timeout: float = START_SECONDS) -> bytes:
        """The next line that it writes.

        Raises:
            RuntimeError: it ended, or wrote nothing in time.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise RuntimeError(f"process {self.pid} said nothing within {timeout:g} s") from None
        if not line:
            raise RuntimeError(f"process {self.pid} ended; what it wrote is above")
        return line

    async def answer(self, timeout: float = START_SECONDS) -> Any:
        """The next thing that it answers."""
        return json.loads(await self.line(timeout))


@asynccontextmanager
async def child(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> AsyncGenerator[Child]:
    """A process that runs while the block does; its errors go to where ours go.

    Args:
        environment: all of its variables; ours unless given.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=environment,
        limit=1 << 26,
    )
    try:
        yield Child(process)
    finally:
        await asyncio.shield(_end(process))


def module(name: str, *arguments: str) -> list[str]:
    """The command for a module of this package."""
    return [sys.executable, "-m", f"benchmarks.serving.{name}", *arguments]


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    if process.returncode is None and process.stdout is not None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                # What it still writes would fill the pipe.
                await process.stdout.read()
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


# In such a process -----------------------------------------------------------------------------


def answer(value: Any) -> None:
    """Answer the process that started this one."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def until_closed() -> None:
    """Wait until standard input ends."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def allow_many_files() -> None:
    """Raise the limit on open files as far as it goes."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def memory_of(pid: int) -> int:
    """The resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()
