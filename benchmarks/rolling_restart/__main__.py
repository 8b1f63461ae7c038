"""`python -m benchmarks.rolling_restart`: the latency of calls while `dynbus restart` replaces all
instances of a run, beside that before it.

Callers call one after the other, without a pause, and nothing else runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from dynbus import Runtime
from dynbus.actors.running.control import Done, RestartNodes, ask
from dynbus.bus.errors import DynbusError

READY_SECONDS = 60.0
ACTOR = """
from dynbus import Actor, handler

class Echo(Actor, namespace="bench"):
    @handler
    async def echo(self, text: str) -> str:
        return text
"""


class Figures(NamedTuple):
    """Of one run; latencies in milliseconds."""

    quiet_p50: float
    quiet_p99: float
    restart_p50: float
    restart_p99: float
    restart_seconds: float
    calls: int
    errors: int

    @property
    def ratio(self) -> float:
        """Of the p99 during the restart to the quiet one."""
        return self.restart_p99 / self.quiet_p99


class Callers:
    """Callers without a pause, and the latencies of their calls since `take`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._latencies: list[float] = []
        self.errors = 0

    def take(self) -> list[float]:
        """The latencies since the last time, in seconds."""
        taken, self._latencies = self._latencies, []
        return taken

    async def call(self) -> None:
        """Be one of them, until cancelled."""
        echo = await self._runtime.endpoint("bench.Echo.echo").client()
        while True:
            begun = perf_counter()
            try:
                await echo.round_robin("text")
            except DynbusError as error:
                click.echo(f"a call failed: {error!r}", err=True)
                self.errors += 1
            self._latencies.append(perf_counter() - begun)


@contextlib.contextmanager
def served(folder: Path, url: str, workers: int) -> Generator[int]:
    """A `dynbus run` of the actor, once all its instances are ready; its process."""
    (folder / "echo.py").write_text(ACTOR)
    log = folder / "run.log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "dynbus", "run", "echo.py", f"--Echo.workers={workers}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={**os.environ, "NATS_URL": url},
        )
    try:
        deadline = perf_counter() + READY_SECONDS
        while log.read_text().count(" is ready") < workers:
            if run.poll() is not None or perf_counter() > deadline:
                raise SystemExit(f"the run is not ready: {log.read_text()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(0.05)
        yield run.pid
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait()


def restart(run: int) -> None:
    """Have a run replace all its instances, and wait until it has."""
    if not any(isinstance(answer, Done) for answer in ask(run, RestartNodes())):
        raise SystemExit("the restart did not come to its end")


async def measure(run: int, url: str, callers: int, seconds: float) -> Figures:
    """Measure calls without, and then during a restart."""
    async with Runtime.connect(url) as runtime:
        calling = Callers(runtime)
        tasks = [asyncio.create_task(calling.call()) for _ in range(callers)]
        try:
            await asyncio.sleep(1.0)  # until all is warm
            calling.take()
            await asyncio.sleep(seconds)
            quiet = calling.take()
            begun = perf_counter()
            await asyncio.to_thread(restart, run)
            took = perf_counter() - begun
            during = calling.take()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def percentile(taken: list[float], share: int) -> float:
        return float(np.percentile(taken, share)) * 1000

    return Figures(
        *(percentile(quiet, 50), percentile(quiet, 99)),
        *(percentile(during, 50), percentile(during, 99)),
        took,
        calls=len(quiet) + len(during),
        errors=calling.errors,
    )


@click.command()
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True)
@click.option("--workers", type=click.IntRange(1), default=4, show_default=True)
@click.option("--callers", type=click.IntRange(1), default=16, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.5), default=5.0, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(runs: int, workers: int, callers: int, seconds: float, as_json: bool) -> None:
    """Measure calls during a rolling restart; medians of several runs."""
    found: list[Figures] = []
    with tempfile.TemporaryDirectory() as name:
        folder, url = Path(name), f"nats://127.0.0.1:{_free_port()}"
        with served(folder, url, workers) as run, contextlib.chdir(folder):
            found += [asyncio.run(measure(run, url, callers, seconds)) for _ in range(runs)]
    if as_json:
        click.echo(json.dumps([each._asdict() | {"ratio": each.ratio} for each in found]))
        return
    table = Table("", "quiet", "during the restart", box=None)
    for title, quiet, during in (
        ("p50, ms", "quiet_p50", "restart_p50"),
        ("p99, ms", "quiet_p99", "restart_p99"),
    ):
        table.add_row(title, *(_median(found, field) for field in (quiet, during)))
    console = Console()
    console.print(table)
    ratios = sorted(each.ratio for each in found)
    console.print(
        f"p99 during the restart to the quiet one: {statistics.median(ratios):.1f} "
        f"({ratios[0]:.1f} to {ratios[-1]:.1f}); {workers} instances replaced in "
        f"{_median(found, 'restart_seconds')} s; {sum(each.calls for each in found)} calls, "
        f"{sum(each.errors for each in found)} errors"
    )


def _median(found: list[Figures], field: str) -> str:
    return f"{statistics.median(getattr(each, field) for each in found):.2f}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
