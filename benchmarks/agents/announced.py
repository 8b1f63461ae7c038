"""`python -m benchmarks.agents.announced`: what it saves to say that a conversation goes on soon.

The small engine has a cache for one conversation of two, and both on its host. They go on in turn:
one half of the time the blocks come back with the request, the other half when it was announced.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import click

from dynbus.llm.generation import Announced, Announcement, GenerateRequest, Sampling, Session
from dynbus.llm.worker import ModelWorker
from dynbus.testing import TestKit

BLOCK: Final = 16


class Small(ModelWorker, namespace="announced"):
    """Computes a model."""


class Figures(NamedTuple):
    """Seconds to first tokens.

    Attributes:
        computed, brought, announced: where the prompt is computed, comes back with the request, and
            came back before it.
        announcing: that an announcement takes.
    """

    computed: list[float]
    brought: list[float]
    announced: list[float]
    announcing: list[float]


async def _ask(client: Any, prompt: Sequence[int], session: str) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt were not computed."""
    request = GenerateRequest(
        [*prompt],
        2,
        sampling=Sampling(temperature=0.0),
        ignore_eos=True,
        session=Session(session, 3600.0),
    )
    began, first, cached = perf_counter(), 0.0, 0
    async for item in client.generate(request):
        first = first or perf_counter() - began
        cached = max(cached, item.cached_tokens or 0)
    return first, cached


async def measure(model: str, tokens: int, rounds: int) -> Figures:
    """Have two conversations go on in turn."""
    prompts = {
        name: [(number * 131 + at * 7) % 4000 + 10 for at in range(tokens + 1)]
        for number, name in enumerate(("one", "other"))
    }
    figures = Figures([], [], [], [])
    async with TestKit() as kit:
        blocks = tokens // BLOCK + 8
        await kit.start(
            Small,
            model=model,
            block_size=BLOCK,
            blocks=blocks,
            host_memory_mib=1024,
            pooling="none",
            hang_limit=0,
            context_length=tokens + BLOCK,
        )
        client: Any = kit.client(Small)
        for name, prompt in prompts.items():
            figures.computed.append((await _ask(client, prompt, name))[0])
        for number in range(2 * rounds):
            for name, prompt in prompts.items():
                if number % 2:
                    began = perf_counter()
                    ready: Announced = await client.announce(Announcement(name))
                    figures.announcing.append(perf_counter() - began)
                    assert ready.tokens >= tokens - BLOCK > 0 < ready.brought, ready
                seconds, cached = await _ask(client, prompt, name)
                assert cached >= tokens - BLOCK, f"{cached} of {tokens} were there"
                (figures.announced if number % 2 else figures.brought).append(seconds)
    return figures


@click.command()
@click.option("--model", default="smollm2", show_default=True)
@click.option("--tokens", type=click.IntRange(2 * BLOCK), default=1500, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--json", "path", type=click.Path(), help="Where the figures go.")
def main(model: str, tokens: int, rounds: int, path: str | None) -> None:
    """Print medians of the seconds to the first token."""
    figures = asyncio.run(measure(model, tokens, rounds))
    medians = {f"{name}_s": median(seconds) for name, seconds in figures._asdict().items()}
    for name, value in medians.items():
        click.echo(f"{name:14} {value:.4f}")
    if path is not None:
        with open(path, "w") as file:
            json.dump({"tokens": tokens, **medians}, file, indent=2)


if __name__ == "__main__":
    main()
