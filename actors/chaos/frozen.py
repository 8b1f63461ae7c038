"""A process that is stopped, and goes on even if the process that stopped it dies."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio

_THAW: Final = """
import os, signal, sys, time
pid = int(sys.argv[1])
handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
def send(number):
    if handle is None:
        os.kill(pid, number)
    else:
        signal.pidfd_send_signal(handle, number)
try:
    at = time.monotonic()
    send(signal.SIGSTOP)
    print(at, flush=True)
    sys.stdin.read()
finally:
    send(signal.SIGCONT)
"""
"""Stops a process until its own input ends, which it does when its starter is gone. It holds
on to that very process: its number may be another's by then."""


@asynccontextmanager
async def frozen(pid: int) -> AsyncGenerator[float]:
    """The process is stopped (SIGSTOP) until the block ends, or this process does.

    Yields when that began, by `time.monotonic`. A process that is gone is no error.
    """
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _THAW, str(pid)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        # Ctrl-C in a terminal is for its starter.
        start_new_session=True,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        yield float(await program.stdout.readline() or time.monotonic())
    finally:
        with anyio.CancelScope(shield=True):
            program.stdin.close()
            with anyio.move_on_after(5.0):
                await program.wait()
            with suppress(ProcessLookupError):
                if program.returncode is None:
                    program.send_signal(signal.SIGKILL)
