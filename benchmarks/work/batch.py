"""`python -m benchmarks.work.batch`: calls a second of a handler that takes 1 ms, and 0.1 ms for
each request: one by one, and in batches of 32.

The handler takes its time in a thread, as a model does, and one run at a time. It is served by a
process of its own; callers call one after the other, without a pause.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import anyio.to_thread
import click
import uvloop

from dynbus import Actor, Runtime, handler
from dynbus.testing import run_server

FIXED = 0.001
EACH = 0.0001
"""Seconds of a run, and of each request in it."""
MOST = 32


class Model(Actor, namespace="bench"):
    @handler(concurrency=1)
    async def single(self, number: int) -> int:
        await anyio.to_thread.run_sync(time.sleep, FIXED + EACH)
        return number

    @handler(batch=MOST, batch_wait="1ms")
    async def batched(self, numbers: list[int]) -> list[int]:
        await anyio.to_thread.run_sync(time.sleep, FIXED + EACH * len(numbers))
        return numbers


def serve(url: str) -> None:
    """Be the process of the handler, until it is terminated."""

    async def served() -> None:
        async with Runtime.connect(url) as runtime:
            await runtime.start(Model)
            await asyncio.Event().wait()

    uvloop.run(served())


async def measure(url: str, callers: int, seconds: float) -> dict[str, Any]:
    """Calls a second and the median of their latency in milliseconds, of each kind."""
    async with Runtime.connect(url) as runtime:
        client = runtime.client(Model, wait=10.0)
        figures: dict[str, Any] = {}
        for kind, call in (("single", client.single), ("batched", client.batched)):
            await call(0)
            latencies: list[float] = []
            until = time.perf_counter() + seconds

            async def calls(number: int, call: Any = call, until: float = until) -> None:
                while (begun := time.perf_counter()) < until:
                    assert await call(number) == number
                    latencies.append(time.perf_counter() - begun)  # noqa: B023

            await asyncio.gather(*map(calls, range(callers)))
            figures[kind] = {
                "calls_per_second": round(len(latencies) / seconds),
                "p50_ms": round(median(latencies) * 1000, 1),
            }
        ratio = figures["batched"]["calls_per_second"] / figures["single"]["calls_per_second"]
        return {**figures, "ratio": round(ratio, 2)}


async def compare(callers: int, seconds: float, runs: int) -> None:
    """Measure, and print each run as a line of JSON."""
    with TemporaryDirectory() as folder:
        server = await run_server(store_dir=Path(folder))
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(server.url,))
        process.start()
        try:
            for _ in range(runs):
                click.echo(json.dumps(await measure(server.url, callers, seconds)))
        finally:
            process.terminate()
            process.join()
            await server.stop()


@click.command()
@click.option("--callers", default=64, show_default=True)
@click.option("--seconds", default=3.0, show_default=True, help="Of each kind.")
@click.option("--runs", default=3, show_default=True)
def main(callers: int, seconds: float, runs: int) -> None:
    """Measure calls by themselves and in batches."""
    uvloop.run(compare(callers, seconds, runs))


if __name__ == "__main__":
    main()
