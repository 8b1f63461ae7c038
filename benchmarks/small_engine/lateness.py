"""How late a timer of the event loop is while an engine decodes in a thread of the same process.

python -m benchmarks.small_engine.lateness MODEL [--backend numpy] [--streams 8]
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

import click
import numpy as np

from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.small import SmallConfig, SmallEngine
from dynbus.llm.small.engine import BackendName

INTERVAL: Final = 0.005


async def lateness(seconds: float, engine: SmallEngine | None) -> list[float]:
    """Milliseconds by which each timer was late; `engine` steps meanwhile."""
    ends = time.perf_counter() + seconds
    late: list[float] = []

    async def stepping() -> None:
        while engine is not None and engine.has_work and time.perf_counter() < ends:
            await asyncio.to_thread(engine.step)

    steps = asyncio.create_task(stepping())
    while time.perf_counter() < ends:
        due = time.perf_counter() + INTERVAL
        await asyncio.sleep(INTERVAL)
        late.append((time.perf_counter() - due) * 1e3)
    await steps
    return late


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--backend", type=click.Choice(["numpy", "torch"]), default="numpy")
@click.option("--streams", default=8, show_default=True)
@click.option("--seconds", default=5.0, show_default=True)
def main(model: Path, backend: BackendName, streams: int, seconds: float) -> None:
    """Measure a GGUF file or folder."""
    engine = SmallEngine(
        model, SmallConfig(backend=backend, max_num_seqs=streams, blocks=128 * streams)
    )
    random = np.random.default_rng(0)
    for at in range(streams):
        prompt = [int(token) for token in random.integers(20, 40_000, 64)]
        engine.add(
            str(at),
            GenerateRequest(prompt, 1900, sampling=Sampling(temperature=0), ignore_eos=True),
        )
    for _ in range(4):
        engine.step()
    for name, stepped in (("idle", None), (f"{streams} streams decode", engine)):
        late = np.array(asyncio.run(lateness(seconds, stepped)))
        click.echo(
            f"{name}: {len(late)} timers late by p50 {np.percentile(late, 50):.2f} ms, "
            f"p99 {np.percentile(late, 99):.2f} ms, at most {late.max():.1f} ms"
        )


if __name__ == "__main__":
    main()
