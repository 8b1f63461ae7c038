"""Measure the front end: `python -m benchmarks.front_end [--seconds 5]`.

Prints the time to first token and between two tokens of one stream, over HTTP and over the bus
alone; CPU of a token at 256 streams, of engine and reader, over HTTP and over the bus alone; and
the memory of an open stream at 4,096.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop

from dynbus.bus.nats.server_process import RunningServer, run_server

BODY = json.dumps(
    {
        "model": "bench",
        "stream": True,
        "messages": [{"role": "user", "content": "thirty-two characters of a prompt"}],
    }
).encode()


def request(connection: str = "keep-alive") -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n"
        b"Connection: %b\r\n\r\n%b" % (len(BODY), connection.encode(), BODY)
    )


class Stream(asyncio.Protocol):
    """A client of one stream, which counts its events."""

    def __init__(self) -> None:
        self.events = 0
        self.first = asyncio.get_running_loop().create_future()
        self.times: list[float] = []
        self.timed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.sent = time.perf_counter()
        self.transport.write(request())

    def data_received(self, data: bytes) -> None:
        count = data.count(b"data: ")
        self.events += count
        if count and not self.first.done():
            self.first.set_result(time.perf_counter() - self.sent)
        if self.timed:
            self.times.append(time.perf_counter())


@contextmanager
def process(role: str, url: str, **options: Any) -> Generator[tuple[Any, dict[str, Any]]]:
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.front_end.processes", role, url, *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        yield child, json.loads(child.stdout.readline())
    finally:
        child.kill()
        child.wait()


def cpu(*processes: Any) -> float:
    return sum(sum(psutil.Process(one.pid).cpu_times()[:2]) for one in processes)


def tell(what: str, value: str) -> None:
    print(f"{what:58} {value}", flush=True)


async def over_http(server: RunningServer, seconds: float, engine: Any, pause: float) -> None:
    loop = asyncio.get_running_loop()
    with process("front", server.url) as (child, ready):
        port = int(ready["ready"].rpartition(":")[2])
        if pause:
            tell("front end's process", str(child.pid))

        async def opened() -> Stream:
            _, stream = await loop.create_connection(Stream, "127.0.0.1", port)
            return stream

        firsts: list[float] = []
        for _ in range(60):
            stream = await opened()
            firsts.append(await stream.first)
            stream.transport.abort()
        tell("HTTP: first token, one stream, p50", f"{statistics.median(firsts[10:]) * 1e3:.2f} ms")
        streams = [await opened() for _ in range(256)]
        await asyncio.gather(*(stream.first for stream in streams))
        await asyncio.sleep(1.0)
        used, front_used, broker = cpu(engine, child), cpu(child), cpu(server)
        events = sum(stream.events for stream in streams)
        await asyncio.sleep(max(seconds, pause))
        used, front_used = cpu(engine, child) - used, cpu(child) - front_used
        broker = cpu(server) - broker
        events = sum(stream.events for stream in streams) - events
        tell(
            "HTTP: CPU of a token, 256 streams",
            f"{used / events * 1e6:.1f} us, {front_used / events * 1e6:.1f} of them the front end, "
            f"and {broker / events * 1e6:.1f} of nats-server",
        )
        for stream in streams:
            stream.transport.abort()


async def many_streams(url: str, seconds: float) -> None:
    """4,096 streams of an engine that is slow enough for two cores."""
    loop = asyncio.get_running_loop()
    streams: list[Stream] = []
    with process("front", url) as (child, ready):
        port = int(ready["ready"].rpartition(":")[2])

        async def opened() -> Stream:
            _, stream = await loop.create_connection(Stream, "127.0.0.1", port)
            await stream.first
            return stream

        streams += await asyncio.gather(*(opened() for _ in range(16)))
        before = psutil.Process(child.pid).memory_info().rss
        while len(streams) < 4096:
            streams += await asyncio.gather(*(opened() for _ in range(16)))
        await asyncio.sleep(5.0)
        grown = psutil.Process(child.pid).memory_info().rss - before
        tell("HTTP: memory of an open stream, 4,096 streams", f"{grown / 4080 / 1024:.1f} KiB")
        counts = [stream.events for stream in streams]
        await asyncio.sleep(2 * seconds)
        rates = [stream.events - count for stream, count in zip(streams, counts, strict=True)]
        tell(
            "HTTP: events of 4,096 streams, fewest and median",
            f"{min(rates)} and {statistics.median(rates):.0f} in {2 * seconds:g} s",
        )
        for stream in streams:
            stream.transport.abort()


async def over_bus(server: RunningServer, seconds: float, engine: Any) -> None:
    with process("relay", server.url, streams=256) as (child, ready):
        tell("bus alone: first token, one stream, p50", f"{ready['first_ms']:.2f} ms")

        def count() -> int:
            child.stdin.write("count\n")
            child.stdin.flush()
            return int(json.loads(child.stdout.readline())["count"])

        await asyncio.sleep(1.0)
        used, broker, events = cpu(engine, child), cpu(server), count()
        await asyncio.sleep(seconds)
        used, broker = cpu(engine, child) - used, cpu(server) - broker
        events = count() - events
        tell(
            "bus alone: CPU of a token, 256 streams",
            f"{used / events * 1e6:.1f} us, and {broker / events * 1e6:.1f} of nats-server",
        )


async def main(seconds: float, pause: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = await run_server(store_dir=Path(folder))
        try:
            with process("engine", server.url, interval=0.05) as (engine, _):
                await over_bus(server, seconds, engine)
                await over_http(server, seconds, engine, pause)
            # Its record goes with its lease.
            await asyncio.sleep(11.0)
            with process("engine", server.url, interval=0.5):
                await many_streams(server.url, seconds)
        finally:
            await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds at 256 for a profiler")
    options = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    uvloop.run(main(options.seconds, options.pause))
