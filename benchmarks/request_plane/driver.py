"""Runs the systems side by side and collects their figures.

In each run every system has a server and a client process. Each workload is measured on one
system after the other before the next workload begins, so that a machine that changes its
speed changes it for all. The processes of the others idle meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .children import Child, Failed, Missing
from .cpu import cpu_seconds, cpu_used
from .startup import measure_hello, measure_import
from .workloads import WORKLOADS

START_SECONDS = 120.0


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        workloads: of `WORKLOADS`, and `idle` and `startup`.
        duration: seconds per workload.
        idle: seconds for which the idle instances are watched.
        pythons: system to the Python that has its library; ours for the others.
    """

    systems: Sequence[str]
    workloads: Sequence[str]
    runs: int
    duration: float
    idle: float
    pythons: dict[str, str]


@dataclass
class Results:
    """What was measured.

    Attributes:
        samples: system to metric to one value per run, None where the run failed.
        notes: system to why it, or a part of it, has no figures.
    """

    samples: dict[str, dict[str, list[float | None]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    notes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, run: int, system: str, figures: dict[str, float]) -> None:
        """Enter the figures of a run; runs that brought none before stay None."""
        for key, value in figures.items():
            values = self.samples[system].setdefault(key, [])
            values.extend([None] * (run + 1 - len(values)))
            values[run] = value

    def note(self, system: str, text: str) -> None:
        """Say once why figures are missing."""
        if text not in self.notes[system]:
            self.notes[system].append(text)
            _say(f"{system}: {text}")


@dataclass(frozen=True)
class Pair:
    """The two processes of one system."""

    name: str
    server: Child
    client: Child
    broker: int | None

    def serving(self) -> list[int]:
        """The process ids of the serving side, without the broker."""
        return [pid for pid in self.server.family() if pid != self.broker]


async def measure(options: Options) -> Results:
    """Measure everything that `options` names; a system that fails is noted and left out."""
    results = Results()
    missing: set[str] = set()
    for run in range(options.runs):
        _say(f"run {run + 1} of {options.runs}")
        await _run(options, run, results, missing)
    return results


async def _run(options: Options, run: int, results: Results, missing: set[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        async with AsyncExitStack() as stack:
            pairs: dict[str, Pair] = {}
            for name in options.systems:
                if name in missing:
                    continue
                python = options.pythons.get(name, sys.executable)
                try:
                    pair = _pair(name, python, Path(folder) / name)
                    pairs[name] = await stack.enter_async_context(pair)
                except Missing as error:
                    missing.add(name)
                    results.note(name, f"not installed ({error})")
                except Failed as error:
                    results.note(name, f"did not start: {error}")
            if "idle" in options.workloads:
                await _watch_idle(options.idle, run, results, pairs)
            for workload in options.workloads:
                if workload in WORKLOADS:
                    await _interleave(workload, options.duration, run, results, pairs)
        if "startup" in options.workloads and "dynbus" in set(options.systems) - missing:
            await _start_up(run, results, Path(folder))


@asynccontextmanager
async def _pair(name: str, python: str, folder: Path) -> AsyncGenerator[Pair, None]:
    await asyncio.to_thread(folder.mkdir)
    log = folder.with_suffix(".log")
    server, served = await Child.start(python, ["server", name, str(folder)], log, START_SECONDS)
    try:
        address = served["address"]
        client, _ = await Child.start(python, ["client", name, address], log, START_SECONDS)
        try:
            yield Pair(name, server, client, served["broker"])
        finally:
            await client.stop()
    finally:
        await server.stop()


async def _interleave(
    workload: str, duration: float, run: int, results: Results, pairs: dict[str, Pair]
) -> None:
    for name, pair in list(pairs.items()):
        command = {
            "workload": workload,
            "duration": duration,
            "server": pair.serving(),
            "broker": pair.broker,
        }
        try:
            figures = await pair.client.ask(command, timeout=20.0 + 10.0 * duration)
        except Failed as error:
            results.note(name, f"{workload}: {error}")
            # Its processes may still be busy with the workload that failed.
            del pairs[name]
            await pair.client.stop()
            await pair.server.stop()
        else:
            results.add(run, name, figures)
            shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            _say(f"  {workload:18} {name:7} {shown}")


async def _watch_idle(seconds: float, run: int, results: Results, pairs: dict[str, Pair]) -> None:
    serving = {name: pair.serving() for name, pair in pairs.items()}
    every = [pid for pids in serving.values() for pid in pids]
    await asyncio.sleep(1.0)  # what a start leaves to do is not idling
    before = cpu_seconds(every)
    await asyncio.sleep(seconds)
    used = cpu_used(before, cpu_seconds(every))
    for name, pids in serving.items():
        percent = sum(used.get(pid, 0.0) for pid in pids) / seconds * 100
        results.add(run, name, {"idle_percent": percent})
        _say(f"  {'idle':18} {name:7} {percent:.2f} %")


async def _start_up(run: int, results: Results, folder: Path) -> None:
    hello = folder / "hello"
    await asyncio.to_thread(hello.mkdir)
    try:
        figures = {"import_s": await measure_import(sys.executable)}
        figures["hello_s"] = await measure_hello(hello)
    except Failed as error:
        results.note("dynbus", f"startup: {error}")
        return
    results.add(run, "dynbus", figures)
    _say(f"  {'startup':18} dynbus  " + ", ".join(f"{k} {v:.3g}" for k, v in figures.items()))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
