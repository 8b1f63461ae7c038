"""Compare HTTP servers: `python -m benchmarks.http_servers.compare [--seconds 5]`.

Opens 256 and 4,096 streams and prints for each server the CPU time of an event, the memory of an
open stream, and how long after a client has left the server takes to close its side.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import psutil
import uvloop

SERVERS = (
    ("uvicorn-h11", "task"),
    ("uvicorn-httptools", "task"),
    ("uvicorn-httptools", "step"),
    ("aiohttp", "task"),
    ("aiohttp", "step"),
    ("granian", "task"),
    ("hypercorn", "task"),
)
REQUEST = b"POST /stream HTTP/1.1\r\nHost: bench\r\nContent-Length: 2\r\n\r\n{}"


class Reader(asyncio.Protocol):
    """Counts the events of one stream."""

    def __init__(self) -> None:
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")


def tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes)


def memory(processes: list[psutil.Process]) -> int:
    return sum(one.memory_info().rss for one in processes)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, for a minute at most."""
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.1)


async def measure(name: str, how: str, streams: int, seconds: float) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.http_servers.servers", name, str(port), how]
    process = await asyncio.to_thread(subprocess.Popen, command, stderr=subprocess.DEVNULL)
    loop = asyncio.get_running_loop()
    readers: list[Reader] = []
    try:
        while True:
            try:
                _, first = await loop.create_connection(Reader, "127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(0.1)
        await until(lambda: first.events > 0)
        processes = tree(process)
        before = memory(processes)
        for begin in range(0, streams, 64):
            opened = await asyncio.gather(
                *(
                    loop.create_connection(Reader, "127.0.0.1", port)
                    for _ in range(min(64, streams - begin))
                )
            )
            readers += [reader for _, reader in opened]
            await asyncio.sleep(0.02)
        await until(lambda: all(reader.events > 1 for reader in readers))
        await asyncio.sleep(1.0)
        per_stream = (memory(processes) - before) / streams
        used, events = cpu(processes), sum(reader.events for reader in readers)
        begun = time.monotonic()
        await asyncio.sleep(seconds)
        took = time.monotonic() - begun
        used, events = cpu(processes) - used, sum(reader.events for reader in readers) - events
        rate = events / took
        return (
            f"{name:18} {how:5} {streams:5}  {used / events * 1e6:6.1f} us/event  "
            f"{per_stream / 1024:6.1f} KiB/stream  {rate:7.0f} of {streams * 20} events/s"
        )
    finally:
        for reader in readers:
            reader.transport.abort()
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()


async def main(seconds: float, only: str) -> None:
    for name, how in SERVERS:
        if only in f"{name} {how}":
            for streams in (256, 4096):
                print(await measure(name, how, streams, seconds), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", default="", help="such as aiohttp, or step")
    options = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    assert Path.cwd().joinpath("benchmarks").is_dir(), "run it in the root of the repository"
    uvloop.run(main(options.seconds, options.only))
