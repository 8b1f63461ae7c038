"""`python -m benchmarks.transfer`: throughput and latency of blocks between two processes.

All ways are measured in turn in each round, for each case. Ratios are medians of those within a
round.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import tempfile
import time
from asyncio import Runner
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path as File
from statistics import median
from time import perf_counter

import anyio
import click
from rich.console import Console
from rich.table import Table

from dynbus.bus.lane import new_event_loop
from dynbus.bus.nats.server_process import run_server

from .cases import KIB, MIB, Case, cases
from .holder import hold
from .paths import Once, Reader

IDLE_SECONDS = 3.0
LOOKS_EVERY = 0.01
"""Seconds. Even over shared memory, UCX needs the other side for what is about a connection."""

Times = dict[Case, dict[str, list[float]]]
"""Seconds for one transfer by each way, in each round."""


async def one_round(once: Once, seconds: float) -> float:
    """The median of as many runs as take so long, three at least."""
    await once()
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < 3 or perf_counter() < end:
        begun = perf_counter()
        await once()
        times.append(perf_counter() - begun)
    return median(times)


async def measure(
    reader: Reader, case: Case, rounds: int, seconds: float, pause: float
) -> dict[str, list[float]]:
    """Seconds for one transfer by each way, in each round.

    Args:
        pause: between the holder's looks at its bare agent while that is read and written.
    """
    paths = reader.paths()
    times: dict[str, list[float]] = {path.name: [] for path in paths}
    with ExitStack() as prepared:
        ways = [(path, prepared.enter_context(path.prepared(case))) for path in paths]
        for path, once in ways:
            reader.command("drive", 0.0 if path.is_bare else None)
            await reader.check(case, path, once)
        for _ in range(rounds):
            for path, once in ways:
                reader.command("drive", pause if path.is_bare else None)
                times[path.name].append(await one_round(once, seconds))
        reader.command("drive", None)
    return times


def figures(times: Times) -> list[dict[str, object]]:
    """What `--json` writes."""
    return [
        {
            "path": name,
            "layout": case.layout,
            "block_bytes": case.block_bytes,
            "blocks": case.blocks,
            "gb_per_s": case.bytes / median(each) / 1e9,
            "latency_us": 1e6 * median(each),
        }
        for case, by_path in times.items()
        for name, each in by_path.items()
    ]


def show(times: Times, console: Console) -> None:
    names = list(next(iter(times.values())))
    for title, unit in (("GB/s", "rate"), ("us for a transfer", "time")):
        table = Table("case", *names, title=title)
        for case, by_path in times.items():
            cells = [
                f"{case.bytes / median(each) / 1e9:.2f}"
                if unit == "rate"
                else f"{1e6 * median(each):,.1f}"
                for each in by_path.values()
            ]
            table.add_row(case.name, *cells)
        console.print(table)


def goals(times: Times, tcp: bool) -> list[tuple[str, float, str, bool]]:
    """What was to be reached: its name, what was found, the goal, and whether it is reached."""
    found: list[tuple[str, float, str, bool]] = []

    def rate(case: Case, path: str, other: str) -> float:
        """How much faster a path is than another."""
        by_path = times[case]
        return median(b / a for a, b in zip(by_path[path], by_path[other], strict=True))

    def at_least(name: str, value: float, goal: float) -> None:
        found.append((name, value, f"at least {goal}", value >= goal))

    def at_most(name: str, value: float, goal: float) -> None:
        found.append((name, value, f"at most {goal:g}", value <= goal))

    for case, by_path in times.items():
        if "dynbus" not in by_path:
            continue
        if case.bytes >= 16 * MIB:
            read = rate(case, "dynbus", "nixl")
            write = rate(case, "dynbus-write", "nixl-write")
            if tcp:
                fastest = min(("nixl", "nixl-write"), key=lambda name: median(by_path[name]))
                ours = min(("dynbus", "dynbus-write"), key=lambda name: median(by_path[name]))
                at_least(f"{case.name}: {ours} to {fastest}", rate(case, ours, fastest), 0.9)
            else:
                at_least(f"{case.name}: READ to bare NIXL", read, 0.9)
                at_least(f"{case.name}: WRITE to bare NIXL", write, 0.9)
        if not tcp and case == Case("scattered", 64 * KIB, 1000):
            at_least(f"{case.name}: READ to memcpy", rate(case, "dynbus", "memcpy"), 0.65)
        if case.blocks == 1 and 64 * KIB <= case.block_bytes <= MIB:
            pairs = zip(by_path["dynbus"], by_path["nixl"], strict=True)
            at_most(f"{case.name}: us above bare", 1e6 * median(a - b for a, b in pairs), 150)
    return found


async def idle(reader: Reader, seconds: float) -> float:
    """The share of a core that agents take on both sides while nothing is transferred.

    Both have transferred before; their buses are connected, and take a part of it.
    """
    begun, cpu = perf_counter(), time.process_time() + reader.command("cpu")
    await anyio.sleep(seconds)
    used: float = time.process_time() + reader.command("cpu") - cpu
    return used / (perf_counter() - begun)


async def run(
    wanted: Sequence[Case], tcp: bool, rounds: int, seconds: float, console: Console
) -> tuple[Times, float]:
    """Measure everything in this process and one that holds the memory."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    times: Times = {}
    used = 0.0
    # Over TCP the bare agent's answers are its speed.
    pause = 0.0 if tcp else LOOKS_EVERY
    with tempfile.TemporaryDirectory(prefix="transfer-") as folder:
        server = await run_server(store_dir=File(folder))
        process = spawning.Process(target=hold, args=(theirs, server.url), daemon=True)
        process.start()
        try:
            reader = Reader(ours, server.url)
            for block_bytes, of_size in groupby(wanted, lambda case: case.block_bytes):
                async with reader.agents(block_bytes):
                    for case in of_size:
                        times[case] = await measure(reader, case, rounds, seconds, pause)
                        console.print(f"{case.name}: done", style="dim")
                    used = max(used, await idle(reader, IDLE_SECONDS))
            reader.stop()
            process.join(10.0)
        finally:
            process.kill()
            await server.stop()
    return times, used


@click.command()
@click.option("--json", "file", type=click.Path(path_type=File), help="Write the figures here.")
@click.option("--tcp", is_flag=True, help="Let NIXL use TCP alone, as between two hosts.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=0.03, show_default=True, help="Of each way in each round.")
@click.option("--only", default="", help="Cases whose name has this text.")
def main(file: File | None, tcp: bool, rounds: int, seconds: float, only: str) -> None:
    """Blocks from one process's memory to another's, by NIXL and by what else moves bytes."""
    if tcp:
        os.environ["UCX_TLS"] = "tcp"
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    # What holds the event loop is measured.
    logging.getLogger("dynbus").setLevel(logging.ERROR)
    console = Console(width=150)
    wanted = [case for case in cases() if only in case.name]
    if not wanted:
        names = ", ".join(case.name for case in cases())
        raise click.BadParameter(f"no case has {only!r} in its name: {names}", param_hint="--only")
    with Runner(loop_factory=new_event_loop) as runner:
        times, used = runner.run(run(wanted, tcp, rounds, seconds, Console(stderr=True)))
    show(times, console)
    table = Table("goal", "found", "wanted", "")
    for name, value, goal, is_reached in goals(times, tcp):
        table.add_row(name, f"{value:.2f}", goal, "" if is_reached else "NOT REACHED")
    console.print(table)
    console.print(f"idle agents of both sides, with their buses: {used:.2%} of a core")
    if file is not None:
        file.write_text(json.dumps(figures(times), indent=1))


if __name__ == "__main__":
    main()
