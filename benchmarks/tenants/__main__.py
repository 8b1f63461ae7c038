"""`python -m benchmarks.tenants`: the first tokens of a tenant beside one that asks for 50 times
its part of an engine, against those beside one that keeps to it.

A mock engine, `dynbus http` with a key for each, nats-server, and a process for each tenant's
requests, which come by chance.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import click

from benchmarks.serving.engines import EngineSettings
from benchmarks.serving.load import Spec
from benchmarks.serving.model import write_model
from benchmarks.serving.rounds import Rounds, p99
from benchmarks.serving.stack import Stack, stack
from benchmarks.serving.workload import Workload

KEYS: Final = {"ada": "key-of-ada", "bob": "key-of-bob"}
PLACES: Final = 32
PREFILL_MS: Final = (0.5, 0.03, 0.0)
PROMPT: Final = 200


async def first_tokens(
    served: Stack, tenant: str, rate: float, output: int, seconds: float, seed: int
) -> Any:
    """Milliseconds to the first token of a tenant's requests, and how many were refused."""
    workload = Workload(
        prefixes=1,
        prefix_tokens=1,
        own_tokens=PROMPT,
        max_tokens=output,
        rate=rate,
        seconds=seconds,
        seed=seed,
    )
    spec = Spec(workload=workload, seconds=seconds, key=KEYS[tenant])
    told = await served.measure("poisson", spec)
    return [1e3 * one for one in told["ttft"]], told["refused"]


async def compare(
    rounds: int, seconds: float, part: float, times: float, step_ms: float, output: int
) -> None:
    """Print what is found."""
    rows = Rounds()
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(TemporaryDirectory()))
        keys = folder / "keys"
        keys.write_text("".join(f"{tenant} {key}\n" for tenant, key in KEYS.items()))
        engine = EngineSettings(
            str(write_model(folder / "model", 8192)),
            max_num_seqs=PLACES,
            max_num_batched_tokens=1024,
            context_length=8192,
            prefill_ms=PREFILL_MS,
            decode_ms=(step_ms, 0.0, 0.0),
        )
        served = await exits.enter_async_context(stack(engine, options=("--api-keys", str(keys))))
        # Of the requests a second that the engine has places for.
        rate = part * PLACES * 1000.0 / step_ms / output
        for seed in range(rounds):
            found: dict[str, float] = {}
            for name, others in (("in its part", rate), ("flooding", times * rate)):
                (ours, _), (theirs, refused) = await asyncio.gather(
                    first_tokens(served, "ada", rate, output, seconds, 2 * seed),
                    first_tokens(served, "bob", others, output, seconds, 2 * seed + 1),
                )
                found |= {
                    f"{name}: p99, ms": p99(ours),
                    f"{name}: median, ms": median(ours),
                    f"{name}: requests": float(len(ours)),
                    f"{name}: of the other": float(len(theirs)),
                    f"{name}: of it refused": float(refused),
                }
            for which in ("p99", "median"):
                found[f"ratio of the {which}"] = (
                    found[f"flooding: {which}, ms"] / found[f"in its part: {which}, ms"]
                )
            rows.add(found)
    rows.print()


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="of each measurement")
@click.option("--part", default=0.1, show_default=True, help="of the capacity, of a tenant")
@click.option("--times", default=50.0, show_default=True, help="its part that the other asks for")
@click.option("--step-ms", default=10.0, show_default=True, help="of a step of the engine")
@click.option("--output", default=128, show_default=True, help="tokens of an answer")
def main(
    rounds: int, seconds: float, part: float, times: float, step_ms: float, output: int
) -> None:
    asyncio.run(compare(rounds, seconds, part, times, step_ms, output))


if __name__ == "__main__":
    main()
