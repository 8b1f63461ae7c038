"""`python -m benchmarks.disaggregated`: a prefill and a decode engine against engines that do both.

`idle`: one request after the other, on nothing else; `load`: how evenly streams go on while long
prompts arrive.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import anyio
import click
import numpy as np
from rich.console import Console
from rich.table import Table

from dynbus.llm.worker import ModelWorker

from .asking import ask, decode_meanwhile, prompt
from .deployment import deployed, transferred
from .engines import Part, Whole

LENGTHS: Final = (128, 512, 1000, 1500, 3000, 6000)
LONG: Final = 1500
CHUNKS: Final = (128, 256, 512)
ANSWER: Final = 4
PATIENCE: Final = 300.0
"""Seconds that prompts may wait in line."""


def engine(kind: str, **settings: Any) -> dict[str, Any]:
    """Settings of a node: float32 on one core, with room for all that is asked."""
    return {"class": kind, "model_name": kind, "threads": 1, "blocks": 1024, **settings}


def parts(**settings: Any) -> dict[str, dict[str, Any]]:
    """A prefill and a decode engine."""
    return {
        "prefill": engine("Part", **settings),
        "decode": engine("Part", disaggregation={"mode": "remote"}, **settings),
    }


class Idle(NamedTuple):
    """Of one length in one round; times are in seconds.

    Attributes:
        whole, parted: to the first token, of one engine and of the two.
        whole_gap, gap: from the first token to the second, likewise.
        transfer, transfer_bytes: the time that the blocks took, and their bytes.
    """

    whole: float
    whole_gap: float
    parted: float
    gap: float
    transfer: float
    transfer_bytes: float


async def idle(rounds: int, lengths: tuple[int, ...]) -> dict[int, list[Idle]]:
    """The same prompts at one engine and at the two, in turn."""
    random = Random(0)
    found: dict[int, list[Idle]] = {length: [] for length in lengths}
    nodes = {**parts(), "whole": engine("Whole")}
    async with deployed(nodes) as runtime:
        whole = runtime.client(Whole, node="whole", timeout=PATIENCE)
        decode = runtime.client(Part, node="decode", timeout=PATIENCE)
        for one in (whole, decode):
            await ask(one, prompt(random, 600), ANSWER)
        for _ in range(rounds):
            for length in lengths:
                tokens = prompt(random, length)
                alone = await ask(whole, tokens, ANSWER)
                before = await transferred(runtime)
                parted = await ask(decode, tokens, ANSWER)
                after = await transferred(runtime)
                found[length].append(
                    Idle(
                        alone.first,
                        alone.second,
                        parted.first,
                        parted.second,
                        after.seconds - before.seconds,
                        after.bytes - before.bytes,
                    )
                )
    return found


class Load(NamedTuple):
    """Of streams while long prompts arrived.

    Attributes:
        gaps: seconds between tokens.
        firsts: seconds to the first token of each long prompt.
    """

    gaps: list[float]
    firsts: list[float]

    def gap_ms(self, percentile: float) -> float:
        return 1e3 * float(np.percentile(self.gaps, percentile))


async def load(
    nodes: Mapping[str, Mapping[str, Any]],
    asked: tuple[type[ModelWorker], str],
    streams: int,
    seconds: float,
    interval: float,
) -> Load:
    """Streams of short prompts that go on for some time, and a long prompt each `interval`."""
    random = Random(1)
    firsts: list[float] = []

    async with deployed(nodes) as runtime:
        client = runtime.client(asked[0], node=asked[1], timeout=PATIENCE)
        await asyncio.gather(*(ask(client, prompt(random, 600), ANSWER) for _ in range(2)))

        async def one() -> None:
            firsts.append((await ask(client, prompt(random, LONG), 1)).first)

        async def arrive() -> None:
            end = perf_counter() + seconds
            async with anyio.create_task_group() as group:
                while perf_counter() < end:
                    group.start_soon(one)
                    await anyio.sleep(interval)

        return Load(await decode_meanwhile(client, streams, random, arrive), firsts)


def show_idle(found: Mapping[int, list[Idle]], console: Console) -> None:
    table = Table(
        *("prompt", "TTFT one engine, ms", "of two, ms", "ratio"),
        *("first to second token: one, ms", "two, ms", "two / prefill"),
        *("transfer, ms", "GB/s", "transfer / prefill"),
        title="idle; medians",
    )
    for length, rows in found.items():
        table.add_row(
            str(length),
            f"{1e3 * median(one.whole for one in rows):.0f}",
            f"{1e3 * median(one.parted for one in rows):.0f}",
            f"{median(one.parted / one.whole for one in rows):.3f}",
            f"{1e3 * median(one.whole_gap for one in rows):.0f}",
            f"{1e3 * median(one.gap for one in rows):.0f}",
            f"{median(one.gap / one.whole for one in rows):.3f}",
            f"{1e3 * median(one.transfer for one in rows):.1f}",
            f"{median(one.transfer_bytes / (one.transfer or 1) for one in rows) / 1e9:.2f}",
            f"{median(one.transfer / one.whole for one in rows):.4f}",
        )
    console.print(table)
    goals: list[tuple[str, float, Callable[[Idle], float], int]] = [
        ("TTFT of two engines to one, worst length", 1.1, lambda one: one.parted / one.whole, 0),
        (
            f"first to second token to prefill, from {LONG}",
            0.05,
            lambda one: one.gap / one.whole,
            LONG,
        ),
        ("transfer to prefill, from 1,000", 0.05, lambda one: one.transfer / one.whole, 1000),
    ]
    for name, goal, ratio, least in goals:
        found_at = [
            (median(ratio(one) for one in rows), length)
            for length, rows in found.items()
            if length >= least
        ]
        if not found_at:
            continue
        worst = max(found_at)
        reached = "" if worst[0] <= goal else ": NOT REACHED"
        console.print(f"{name}: {worst[0]:.3f} (at {worst[1]}), at most {goal}{reached}")


def show_load(found: Mapping[str, Load], console: Console) -> None:
    table = Table(
        *("engines", "tokens", "gap p50, ms", "p90", "p99", "longest", "TTFT of long prompts, ms"),
        title=f"streams while prompts of {LONG} tokens arrive",
    )
    for name, one in found.items():
        table.add_row(
            name,
            str(len(one.gaps)),
            *(f"{one.gap_ms(percentile):.0f}" for percentile in (50, 90, 99, 100)),
            f"{1e3 * median(one.firsts):.0f}",
        )
    console.print(table)
    parted, *whole = (one.gap_ms(99) for one in found.values())
    reached = "" if parted < min(whole) else ": NOT REACHED"
    console.print(f"p99 to the best of the others: {parted / min(whole):.2f}, below 1{reached}")


@click.command()
@click.option("--only", type=click.Choice(["idle", "load"]), help="Do one alone.")
@click.option("--rounds", default=5, show_default=True, help="Of each length.")
@click.option("--lengths", default=",".join(map(str, LENGTHS)), show_default=True)
@click.option("--streams", default=4, show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="Of each deployment under load.")
@click.option("--interval", default=10.0, show_default=True, help="Seconds between long prompts.")
@click.option("--chunks", default=",".join(map(str, CHUNKS)), show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures here.")
def main(
    only: str | None,
    rounds: int,
    lengths: str,
    streams: int,
    seconds: float,
    interval: float,
    chunks: str,
    file: Path | None,
) -> None:
    """A prefill and a decode engine on a core each, against engines that do both."""
    console = Console(width=150)
    told: dict[str, Any] = {}
    if only != "load":
        by_length = asyncio.run(idle(rounds, tuple(map(int, lengths.split(",")))))
        show_idle(by_length, console)
        told["idle"] = {
            length: [one._asdict() for one in rows] for length, rows in by_length.items()
        }
    if only != "idle":
        loads: dict[str, Load] = {}
        loads["one prefill, one decode"] = asyncio.run(
            load(parts(), (Part, "decode"), streams, seconds, interval)
        )
        for chunk in map(int, chunks.split(",")):
            nodes = {"whole": engine("Whole", workers=2, max_num_batched_tokens=chunk)}
            loads[f"two that do both, chunks of {chunk}"] = asyncio.run(
                load(nodes, (Whole, "whole"), streams, seconds, interval)
            )
        show_load(loads, console)
        told["load"] = {name: one._asdict() for name, one in loads.items()}
    if file is not None:
        file.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
