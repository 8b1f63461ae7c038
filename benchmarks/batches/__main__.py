"""`python -m benchmarks.batches`: what a batch costs the interactive requests beside it, and how
much of what these leave it uses.

A mock engine, `dynbus http --batches` and nats-server, a process each. Interactive requests come by
chance at a part of the engine's capacity, the same ones in each round: alone, and while a batch
runs that does not end.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final

import click
import httpx2

from benchmarks.serving.engines import EngineSettings
from benchmarks.serving.load import Spec
from benchmarks.serving.model import NAME, words, write_model
from benchmarks.serving.processes import child, module
from benchmarks.serving.rounds import Rounds, p99
from benchmarks.serving.stack import Stack, stack
from benchmarks.serving.workload import Workload

POLLS: Final = 300
PLACES: Final = 32
STEP_MS: Final = 20.0
PROMPT: Final = 100
OUTPUT: Final = 64
CHAT: Final = "/v1/chat/completions"
CAPACITY: Final = PLACES * 1000.0 / STEP_MS
"""Tokens a second of the engine while all of its places are taken, without its prompts."""


class Batch:
    """A batch that runs longer than it is looked at."""

    def __init__(self, client: httpx2.AsyncClient, id: str) -> None:
        self._client = client
        self._id = id

    async def done(self) -> int:
        """The lines that are answered.

        Raises:
            RuntimeError: some failed, or there are no more.
        """
        batch = (await self._client.get(f"/v1/batches/{self._id}")).json()
        counts = batch["request_counts"]
        if counts["failed"] or batch["status"] not in ("validating", "in_progress"):
            raise RuntimeError(f"the batch does not go on: {batch}")
        return int(counts["completed"])

    async def rate(self, seconds: float) -> float:
        """Tokens a second for a while."""
        before, begun = await self.done(), perf_counter()
        await asyncio.sleep(seconds)
        return (await self.done() - before) * OUTPUT / (perf_counter() - begun)

    async def cancel(self) -> None:
        """Have it end."""
        await self._client.post(f"/v1/batches/{self._id}/cancel")
        for _ in range(POLLS):
            batch = (await self._client.get(f"/v1/batches/{self._id}")).json()
            if batch["status"] == "cancelled":
                return
            await asyncio.sleep(0.2)
        raise RuntimeError("the batch was not cancelled in time")


async def begin_batch(client: httpx2.AsyncClient, lines: int, seed: int) -> Batch:
    """A batch, once its first lines are answered."""
    body: dict[str, Any] = {"model": NAME, "max_tokens": OUTPUT, "ignore_eos": True}
    asked = (
        {**body, "messages": [{"role": "user", "content": words(PROMPT, seed + number)}]}
        for number in range(lines)
    )
    data = b"".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": CHAT, "body": one}).encode()
        + b"\n"
        for n, one in enumerate(asked)
    )
    files = {"file": ("lines.jsonl", data)}
    sent = await client.post("/v1/files", data={"purpose": "batch"}, files=files)
    file = sent.raise_for_status().json()
    fields = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    made = (await client.post("/v1/batches", json=fields)).raise_for_status().json()
    batch = Batch(client, made["id"])
    for _ in range(POLLS):
        if await batch.done() >= PLACES:
            return batch
        await asyncio.sleep(0.2)
    raise RuntimeError("the batch did not begin in time")


async def interactive(served: Stack, rate: float, seconds: float) -> list[float]:
    """Milliseconds to the first token of the interactive requests, the same ones each time."""
    workload = Workload(
        prefixes=1,
        prefix_tokens=1,
        own_tokens=PROMPT,
        max_tokens=OUTPUT,
        rate=rate,
        seconds=seconds,
    )
    told = await served.measure("poisson", Spec(workload=workload, seconds=seconds))
    return [1e3 * one for one in told["ttft"]]


async def compare(rounds: int, seconds: float, part: float, *, apart: bool) -> None:
    """Print what is found."""
    settings = dict[str, Any](
        max_num_seqs=PLACES,
        context_length=8192,
        prefill_ms=(0.5, 0.005, 0.0),
        decode_ms=(STEP_MS, 0.0, 0.0),
    )
    seeds = count(1)
    rows = Rounds()
    async with AsyncExitStack() as exits:
        folder = exits.enter_context(TemporaryDirectory())
        model = write_model(Path(folder) / "model", 8192)
        engine = EngineSettings(str(model), **settings)
        options = ["--batches", *(("--batch-concurrency", "0") if apart else ())]
        served = await exits.enter_async_context(stack(engine, options=options))
        if apart:
            worker = module("front", "run", "dynbus.llm.batches:BatchWorker", "--nats", served.bus)
            await exits.enter_async_context(child(["nice", "-n", "10", *worker]))
        client = await exits.enter_async_context(
            httpx2.AsyncClient(base_url=served.http, timeout=120.0)
        )

        async def begin() -> Batch:
            lines = int(2 * CAPACITY / OUTPUT * (seconds + 10.0))
            return await begin_batch(client, lines, 1_000_000 * next(seeds))

        rate = part * CAPACITY / OUTPUT
        for _ in range(rounds):
            alone = await interactive(served, rate, seconds)
            batch = await begin()
            filled, beside = await asyncio.gather(
                batch.rate(seconds), interactive(served, rate, seconds)
            )
            await batch.cancel()
            left = CAPACITY - len(beside) * OUTPUT / seconds
            found = {
                "requests": float(len(beside)),
                "p99 alone, ms": p99(alone),
                "p99 beside, ms": p99(beside),
                "p99: ratio": p99(beside) / p99(alone),
                "median alone, ms": median(alone),
                "median beside, ms": median(beside),
                "batch, tokens/s": filled,
                "of the tokens/s left": filled / left,
            }
            rows.add(found)
    rows.print()


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="of each measurement")
@click.option("--part", default=0.7, show_default=True, help="of the capacity, interactive")
@click.option(
    "--apart", is_flag=True, help="Have the lines asked by a process of their own, of low priority."
)
def main(rounds: int, seconds: float, part: float, apart: bool) -> None:
    asyncio.run(compare(rounds, seconds, part, apart=apart))


if __name__ == "__main__":
    main()
