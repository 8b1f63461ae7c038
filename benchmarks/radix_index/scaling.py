"""`python -m benchmarks.radix_index.scaling`: look-ups by what is held and what is asked for."""

from __future__ import annotations

import time
from statistics import median

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from dynbus.kvrouter import BlockStored, RadixIndex
from dynbus.kvrouter.events import encode_events

INSTANCES = 64
ASKED = 64
"""Blocks of each prompt of the first table."""
HELD = (100_000, 1_000_000, 10_000_000)
LENGTHS = (16, 64, 256, 1024, 4096, 16_384)
LOOKUPS = 2000

Blocks = NDArray[np.uint64]


def hold(index: RadixIndex, chance: np.random.Generator, prompts: int, length: int) -> list[Blocks]:
    """Let every prompt be held by one instance; returns some of them."""
    asked: list[Blocks] = []
    for number in range(prompts):
        blocks = chance.integers(1, 1 << 63, length, dtype=np.uint64)
        event = BlockStored(None, blocks, blocks)
        message = encode_events([event], event_epoch=1, first_id=number // INSTANCES)
        index.apply(f"engine-{number % INSTANCES}", message)
        if number % max(1, prompts // LOOKUPS) == 0:
            asked.append(blocks)
    return asked


def microseconds(index: RadixIndex, prompts: list[Blocks]) -> float:
    """The median time of a look-up."""
    times: list[float] = []
    for number in range(LOOKUPS):
        prompt = prompts[number * 7919 % len(prompts)]
        begun = time.perf_counter()
        index.lookup(prompt)
        times.append(time.perf_counter() - begun)
    return median(times) * 1e6


@click.command()
@click.option("--most", type=click.IntRange(HELD[0]), default=HELD[-1], show_default=True)
def main(most: int) -> None:
    """Measure look-ups while ever more is held, and for prompts of ever more blocks."""
    chance = np.random.default_rng(1)
    by_held = Table("blocks held", f"look-up of {ASKED} blocks, p50")
    for held in HELD:
        if held <= most:
            index = RadixIndex(max_blocks=2 * most)
            prompts = hold(index, chance, held // ASKED, ASKED)
            by_held.add_row(f"{held:,}", f"{microseconds(index, prompts):.2f} us")
    by_length = Table("blocks of the prompt", "look-up, p50")
    for length in LENGTHS:
        index = RadixIndex()
        prompts = hold(index, chance, INSTANCES, length)
        by_length.add_row(f"{length:,}", f"{microseconds(index, prompts):.2f} us")
    console = Console()
    console.print(by_held)
    console.print(by_length)


if __name__ == "__main__":
    main()
