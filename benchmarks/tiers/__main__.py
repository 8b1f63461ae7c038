"""`python -m benchmarks.tiers`: a prefix that is fetched from a peer, against one that is computed.

Two instances of the small engine in one process, on NIXL. Each prompt is computed by one of them,
and then asked of the other one, which fetches it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import click

from dynbus import call_options
from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.worker import ModelWorker
from dynbus.testing import TestKit

BLOCK = 16
OUTPUT = 4


class Measured(ModelWorker, namespace="benchmark"):
    """An instance that tells what its fetches took."""

    @property
    def fetch_seconds(self) -> float:
        assert self.tiers.fetcher is not None
        return self.tiers.fetcher.statistics.seconds


class Row(NamedTuple):
    """Seconds of one prompt.

    Attributes:
        computed_s, fetched_s: to its first token, where it is computed and where it is fetched.
        fetch_s: of the fetch alone: asking, reading and settling; 0 where none came about.
        is_same: whether both gave the same tokens.
    """

    computed_s: float
    fetched_s: float
    fetch_s: float
    is_same: bool


async def ask(
    kit: TestKit, instance: str, prompt: Sequence[int], peer: str = ""
) -> tuple[float, list[int]]:
    """Seconds to the first token of a prompt, and its tokens."""
    blocks = str((len(prompt) - 1) // BLOCK)
    metadata = {"kv_peer": peer, "kv_peer_blocks": blocks} if peer else {}
    request = GenerateRequest(
        list(prompt), OUTPUT, sampling=Sampling(temperature=0.0), ignore_eos=True
    )
    began, first, tokens = perf_counter(), 0.0, list[int]()
    with call_options(instance=instance, metadata=metadata):
        async for item in kit.client(Measured).generate(request):
            first = first or perf_counter() - began
            tokens += item.token_ids
    return first, tokens


async def measure(model: str, tokens: int, prompts: int) -> list[Row]:
    async with TestKit() as kit:
        workers: list[Measured] = []
        for name in ("one", "other"):
            started = await kit.start(
                Measured,
                instance_id=name,
                model=model,
                block_size=BLOCK,
                blocks=(prompts + 2) * (tokens // BLOCK + 2),
                pooling="none",
                fetch_prefixes=True,
            )
            assert isinstance(started.actor, Measured)
            workers.append(started.actor)
        other = workers[1]
        # How fast it computes is measured before it decides.
        await ask(kit, "other", [9] * 600)
        rows: list[Row] = []
        for number in range(prompts):
            prompt = [(number * 131 + at * 7) % 4000 + 10 for at in range(tokens + 1)]
            computed_s, expected = await ask(kit, "one", prompt)
            before = other.fetch_seconds
            fetched_s, made = await ask(kit, "other", prompt, peer="one")
            fetch_s = other.fetch_seconds - before
            rows.append(Row(computed_s, fetched_s, fetch_s, made == expected))
        return rows


@click.command()
@click.option("--model", default="smollm2", show_default=True)
@click.option("--tokens", type=click.IntRange(2 * BLOCK), default=1500, show_default=True)
@click.option("--prompts", type=click.IntRange(1), default=5, show_default=True)
@click.option("--json", "path", type=click.Path(), help="Where the figures go.")
def main(model: str, tokens: int, prompts: int, path: str | None) -> None:
    """Compare the time of fetching a prefix with that of computing it; medians."""
    rows = asyncio.run(measure(model, tokens, prompts))
    fetched = [row for row in rows if row.fetch_s]
    if not fetched:
        raise click.ClickException("no prefix was fetched: the log says why")
    figures = {
        "tokens": tokens,
        "prompts": prompts,
        "fetched": len(fetched),
        "same_tokens": all(row.is_same for row in rows),
        "computed_s": median(row.computed_s for row in fetched),
        "fetched_s": median(row.fetched_s for row in fetched),
        "fetch_s": median(row.fetch_s for row in fetched),
        "fetch_of_computing": median(row.fetch_s / row.computed_s for row in fetched),
        "first_token_of_computing": median(row.fetched_s / row.computed_s for row in fetched),
    }
    for name, value in figures.items():
        click.echo(f"{name:26} {value if isinstance(value, bool | int) else f'{value:.4f}'}")
    if path is not None:
        with open(path, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
