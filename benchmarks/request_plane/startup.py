"""How long dynbus takes to be there: its import, and `dynbus run` up to the first answer."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nats import errors as nats_errors

from dynbus.bus.nats.neighbours import with_credential

from .children import Failed, end_process, environment

IMPORT_SECONDS = 30.0
HELLO_SECONDS = 60.0

# nats-py has types in part only.
_nats: Any = importlib.import_module("nats")

_IMPORT = """
import time
begun = time.perf_counter()
import dynbus
dynbus.Actor, dynbus.Runtime
print(time.perf_counter() - begun)
"""

_HELLO = """
from dynbus import Actor, handler
from pydantic import BaseModel


class Name(BaseModel):
    name: str


class Hello(Actor, namespace="demo"):
    @handler
    async def greet(self, name: Name) -> str:
        return f"hello {name.name}"
"""


async def measure_import(python: str) -> float:
    """Seconds of `import dynbus` in a fresh process, the start of Python not counted.

    Raises:
        Failed: dynbus cannot be imported.
    """
    process = await asyncio.create_subprocess_exec(
        python,
        "-c",
        _IMPORT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    try:
        async with asyncio.timeout(IMPORT_SECONDS):
            output, errors = await process.communicate()
    except TimeoutError:
        raise Failed(f"import dynbus took over {IMPORT_SECONDS:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await asyncio.shield(process.wait())
    if process.returncode != 0:
        raise Failed(errors.decode(errors="replace").strip().rpartition("\n")[2])
    return float(output)


async def measure_hello(folder: Path) -> float:
    """Seconds from spawning `dynbus run hello.py` to the first answer to a plain NATS client.

    No nats-server runs: the embedded one is started, so its start is counted.

    Raises:
        Failed: no answer within 60 s.
    """
    (folder / "hello.py").write_text(_HELLO)
    url = f"nats://127.0.0.1:{_free_port()}"
    log = folder / "hello.log"
    begun = time.perf_counter()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dynbus",
            "run",
            "hello.py",
            "--nats",
            url,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={**environment(), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            await _first_answer(url, process)
        return time.perf_counter() - begun
    except TimeoutError:
        raise Failed(f"no answer within {HELLO_SECONDS:.0f} s: {_tail(log)}") from None
    except Failed as error:
        raise Failed(f"{error}: {_tail(log)}") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
        await asyncio.shield(end_process(process))


async def _first_answer(url: str, process: asyncio.subprocess.Process) -> None:
    while process.returncode is None:
        if await _is_answered(url):
            return
        await asyncio.sleep(0.005)
    raise Failed(f"dynbus run ended with exit code {process.returncode}")


async def _is_answered(url: str) -> bool:
    try:
        client = await _nats.connect(with_credential(url), allow_reconnect=False, error_cb=_expect)
    except (OSError, nats_errors.Error):  # not listening yet
        return False
    try:
        await client.request("demo.Hello.greet", b'{"name":"you"}', timeout=1.0)
    except (nats_errors.NoRespondersError, nats_errors.TimeoutError):
        return False
    finally:
        await client.close()
    return True


async def _expect(error: Exception) -> None:
    """Failed attempts are what waiting for a server is made of: not to be logged."""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-500:]
