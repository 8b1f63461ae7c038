"""`python -m benchmarks.verifying MODEL`: what verified caches cost an engine under a light load.

One small engine in this process, in turn with and without verification: conversations whose turns
begin with what is cached come at random moments, the same ones in each round. It tells the
processor's seconds, the share of the time that verification took of the engine, and the seconds to
the first token.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import click

from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.worker import ModelWorker
from dynbus.testing import TestKit

TURN = 48
OUTPUT = 8


class Figures(NamedTuple):
    """The figures of a verification.

    Attributes:
        answers: by what became of them.
        tokens, seconds: that were computed again, and that this took of the engine.
        bounds: of norms, peaks and logits.
    """

    answers: dict[str, int]
    tokens: int
    seconds: float
    damages: int
    bounds: tuple[float, ...]


class Measured(ModelWorker, namespace="benchmark"):
    """An instance that tells what its verification did."""

    def figures(self) -> Figures | None:
        """The figures of its verification; None where that is off."""
        verifier = self.verification.verifier
        if verifier is None:
            return None
        known = verifier.figures
        return Figures(
            dict(known.answers),
            known.tokens,
            round(known.seconds, 3),
            verifier.findings.count,
            tuple(verifier.noise.bounds),
        )


class Round(NamedTuple):
    """One round.

    Attributes:
        cpu_s, wall_s: of the process while the load was on.
        first_s: to the first token, median and 95th percentile.
        verified: see `Measured.figures`.
    """

    verify: float
    requests: int
    cpu_s: float
    wall_s: float
    first_s: tuple[float, float]
    verified: Figures | None


async def measure(model: str, verify: float, budget: float, seconds: float, rate: float) -> Round:
    """A round with this verification."""
    draw = Random(7)
    firsts: list[float] = []

    async def turn(kit: TestKit, talk: list[int]) -> None:
        talk += [draw.randrange(1000, 40_000) for _ in range(TURN)]
        request = GenerateRequest(
            list(talk), OUTPUT, sampling=Sampling(temperature=0.0), ignore_eos=True
        )
        began = perf_counter()
        is_first = True
        async for item in kit.client(Measured).generate(request):
            if is_first:
                firsts.append(perf_counter() - began)
                is_first = False
            talk += item.token_ids

    async with TestKit() as kit:
        await kit.start(Measured, model=model, verify=verify, verify_budget=budget)
        [instance] = kit.started.values()
        worker = instance.actor
        assert isinstance(worker, Measured)
        talks: list[list[int]] = [[] for _ in range(8)]
        await turn(kit, [])
        firsts.clear()
        cpu, began = process_time(), perf_counter()
        async with asyncio.TaskGroup() as tasks:
            while perf_counter() - began < seconds:
                await asyncio.sleep(draw.expovariate(rate))
                talk = talks.pop(0)
                if len(talk) > 700:
                    talk.clear()
                talks.append(talk)
                tasks.create_task(turn(kit, talk))
        firsts.sort()
        return Round(
            verify,
            len(firsts),
            round(process_time() - cpu, 2),
            round(perf_counter() - began, 2),
            (round(median(firsts), 3), round(firsts[int(0.95 * len(firsts))], 3)),
            worker.figures(),
        )


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="Of a round.")
@click.option("--rate", default=0.5, show_default=True, help="Requests a second.")
@click.option("--verify", default=0.05, show_default=True)
@click.option("--budget", default=0.01, show_default=True)
def main(
    model: Path, rounds: int, seconds: float, rate: float, verify: float, budget: float
) -> None:
    """Measure the cost of verified caches with a model's files."""
    for _ in range(rounds):
        for share in (0.0, verify):
            row = asyncio.run(measure(str(model), share, budget, seconds, rate))
            click.echo(json.dumps(row._asdict()))


if __name__ == "__main__":
    main()
