"""`python -m benchmarks.cancel`: how soon an operator's cancel has ended a handler and its caller's
wait, on an idle instance and on one at 80 % of its capacity, and how many it missed.

One instance in a process of its own; load, callers and operator share another. Each cancel is one
message, sent when the one before has taken effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from time import monotonic

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from dynbus import Cancelled, Runtime, call_options
from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.names import cancel_subject

from .actors import Held

READY_SECONDS = 60.0
MISSED_SECONDS = 5.0
LOAD = 0.8
CALLERS = 64
TICK = 0.005


@contextlib.contextmanager
def served(folder: Path, url: str) -> Generator[None]:
    """A `dynbus run` of the actor, once it is ready."""
    log = folder / "run.log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "dynbus", "run", "benchmarks.cancel.actors"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "NATS_URL": url},
        )
    try:
        deadline = monotonic() + READY_SECONDS
        while " is ready" not in log.read_text():
            if run.poll() is not None or monotonic() > deadline:
                raise SystemExit(f"the run is not ready: {log.read_text()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(0.05)
        yield
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait()


async def capacity(runtime: Runtime, seconds: float) -> float:
    """Calls per second of callers without a pause."""
    client, end = runtime.client(Held), monotonic() + seconds

    async def call() -> int:
        calls = 0
        while monotonic() < end:
            await client.echo("text")
            calls += 1
        return calls

    return sum(await asyncio.gather(*(call() for _ in range(CALLERS)))) / seconds


async def load(runtime: Runtime, rate: float) -> None:
    """Make so many calls per second, until cancelled; none while as many are open as those callers
    had whose rate this is a part of: a machine that has less to give than before is not flooded."""
    client, calls = runtime.client(Held), set[asyncio.Task[None]]()

    async def call() -> None:
        with contextlib.suppress(DynbusError):
            await client.echo("text")

    begun, made = monotonic(), 0
    try:
        while True:
            due = int((monotonic() - begun) * rate)
            for _ in range(min(due - made, CALLERS - len(calls))):
                task = asyncio.ensure_future(call())
                calls.add(task)
                task.add_done_callback(calls.discard)
            made = due
            await asyncio.sleep(TICK)
    finally:
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def cancels(runtime: Runtime, count: int) -> dict[str, float]:
    """Cancel held calls one after the other; latencies in milliseconds, and those missed."""
    client, lane = runtime.client(Held), runtime.bus.lane
    before = await client.count()
    calls: dict[str, asyncio.Task[str]] = {}
    for number in range(count):
        with call_options(request_id=f"held-{before + number}", timeout=600.0):
            calls[f"held-{before + number}"] = asyncio.ensure_future(client.hold())
    for _ in range(1200):
        if await client.count() == before + count:
            break
        await asyncio.sleep(0.05)
    sent: dict[str, float] = {}
    told: dict[str, float] = {}
    for request_id, call in calls.items():
        sent[request_id] = monotonic()
        lane.call(lane.connection.publish, cancel_subject("bench"), request_id.encode())
        try:
            async with asyncio.timeout(MISSED_SECONDS):
                await call
        except Cancelled:
            told[request_id] = monotonic()
        except (TimeoutError, DynbusError) as error:
            click.echo(f"{request_id}: {error!r}", err=True)
        await asyncio.sleep(0.002)
    ended = await client.journal()
    stopped = [1000 * (ended[one] - sent[one]) for one in calls if one in ended]
    left = [1000 * (told[one] - sent[one]) for one in told]
    return {
        "cancels": count,
        "missed": 2 * count - len(stopped) - len(left),
        "handler_p50_ms": float(np.percentile(stopped, 50)),
        "handler_p99_ms": float(np.percentile(stopped, 99)),
        "caller_p50_ms": float(np.percentile(left, 50)),
        "caller_p99_ms": float(np.percentile(left, 99)),
    }


async def measure(url: str, count: int, seconds: float) -> dict[str, dict[str, float]]:
    """Figures of both states."""
    async with Runtime.connect(url) as runtime:
        await (await runtime.endpoint("bench.Held.echo").client()).wait_for_instances()
        idle = await cancels(runtime, count)
        rate = LOAD * await capacity(runtime, seconds)
        loading = asyncio.create_task(load(runtime, rate))
        await asyncio.sleep(1.0)
        busy = await cancels(runtime, count)
        loading.cancel()
        await asyncio.wait([loading])
    return {"idle": idle, "loaded": {**busy, "calls_per_second": rate}}


@click.command(help=__doc__)
@click.option("--count", default=1000, show_default=True, help="Cancels in each state.")
@click.option("--seconds", default=3.0, show_default=True, help="To find out the capacity.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here.")
def main(count: int, seconds: float, path: Path | None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="cancel-") as folder, served(Path(folder), url):
        figures = asyncio.run(measure(url, count, seconds))
    table = Table("", "p50 handler", "p99 handler", "p50 caller", "p99 caller", "missed")
    for state, found in figures.items():
        latencies = [
            f"{found[f'{who}_{of}_ms']:.2f} ms"
            for who, of in (
                ("handler", "p50"),
                ("handler", "p99"),
                ("caller", "p50"),
                ("caller", "p99"),
            )
        ]
        table.add_row(state, *latencies, f"{found['missed']:g} of {found['cancels']:g}")
    Console().print(table)
    Console().print(f"load: {figures['loaded']['calls_per_second']:.0f} calls/s")
    if path is not None:
        path.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
