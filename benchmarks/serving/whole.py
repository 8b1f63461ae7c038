"""What an answer costs that nobody wants as a stream: `python -m benchmarks.serving.whole`.

Requests side by side, once as streams and once not: CPU of front end, engine and nats-server for
each token, over what they use when nobody asks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import psutil

from .engines import EngineSettings
from .model import NAME, words, write_model
from .stack import Stack, stack

CONTEXT = 8192


async def ask(url: str, number: int, tokens: int, *, streams: bool) -> None:
    """Have one request answered."""
    prompt = words(32, number)
    body = json.dumps(
        {
            "model": NAME,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "stream": streams,
        }
    ).encode()
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    if b" 200 " not in answer[:20]:
        raise RuntimeError(answer[:500].decode(errors="replace"))


def used(served: Stack) -> float:
    """Seconds on a core that its processes have used."""
    processes = map(psutil.Process, (served.front, served.engines, served.broker))
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure(served: Stack, first: int, count: int, tokens: int, *, streams: bool) -> float:
    """Microseconds of CPU for each token."""
    before, began = used(served), time.monotonic()
    numbers = range(first, first + count)
    await asyncio.gather(*(ask(served.http, one, tokens, streams=streams) for one in numbers))
    busy, seconds = used(served) - before, time.monotonic() - began
    before = used(served)
    await asyncio.sleep(seconds)
    return (busy - (used(served) - before)) / (count * tokens) * 1e6


async def main(runs: int, count: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), CONTEXT)
        settings = EngineSettings(folder, context_length=CONTEXT, max_num_seqs=count)
        async with stack(settings) as served:
            found: dict[bool, list[float]] = {True: [], False: []}
            for run in range(runs):
                for streams in (True, False):
                    first = (2 * run + streams) * count
                    cost = await measure(served, first, count, tokens, streams=streams)
                    found[streams].append(cost)
    for streams, costs in found.items():
        name = "streams" if streams else "whole answers"
        print(f"{name}: {median(costs):.1f} us of CPU for each token")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    options = parser.parse_args()
    asyncio.run(main(options.runs, options.requests, options.tokens))
