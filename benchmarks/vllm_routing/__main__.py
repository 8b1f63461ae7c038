"""`python -m benchmarks.vllm_routing`: two engines of vLLM, with prompts that share beginnings.

`speed`: the time to the first token and the share of prompt tokens that were found in a cache, by
round robin and by the KV router in turn, with empty caches each time. `agreement`: of requests in
growing conversations, some of which are asked again, and caches that hold a part of them, how
often the reuse that the router expected is vLLM's `num_cached_tokens`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from statistics import fmean, median
from time import perf_counter
from typing import Final, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from benchmarks.serving.model import VOCABULARY, Size, write_model
from dynbus import Runtime, call_options
from dynbus.bus.nats.server_process import run_server
from dynbus.kvrouter import open_router
from dynbus.llm.generation import GenerateRequest, Sampling

from .engine import Engine

ENGINES: Final = 2
START_SECONDS: Final = 240.0
BLOCK: Final = 32
CONTEXT: Final = 1024

LARGER: Final = Size(layers=6, hidden=512, intermediate=1536, heads=8, kv_heads=4)
"""20 million weights beside its words: a thousand tokens take a core of this machine a second."""

DOCUMENTS: Final = 16
DOCUMENT_TOKENS: Final = 768
QUESTION_TOKENS: Final = 41
ANSWER_TOKENS: Final = 4
CALLERS: Final = 4

CONVERSATIONS: Final = 8
TURN_TOKENS: Final = (20, 90)
WARM_UP: Final = 48
"""Requests that are asked first and not counted: each document is new once, by whatever policy."""

AGAIN: Final = 0.2
"""Share of the turns that are asked again."""

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Several engines share the cores: none may take one for itself.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class Speed(NamedTuple):
    """Of one policy in one run: seconds to the first token on the mean, and the hit rate."""

    ttft: float
    hit_rate: float


@asynccontextmanager
async def engines(size: Size, blocks: int) -> AsyncGenerator[Runtime]:
    """Two engines whose caches have so many blocks, and a runtime that reaches them."""
    with tempfile.TemporaryDirectory(prefix="vllm-routing-") as name:
        folder = Path(name)
        write_model(folder / "model", CONTEXT, size)
        server = await run_server(store_dir=folder / "store")
        log = (folder / "run.log").open("wb")
        options = {
            "model": folder / "model",
            "workers": ENGINES,
            "dtype": "float32",
            "max_model_len": CONTEXT,
            "enforce_eager": "true",
            "block_size": BLOCK,
            "num_gpu_blocks_override": blocks,
            "max_num_seqs": 8,
        }
        command = [
            *(sys.executable, "-m", "dynbus", "run", f"{Engine.__module__}:Engine"),
            *("--nats", server.url),
            *(f"--Engine.{key}={value}" for key, value in options.items()),
        ]
        run = await asyncio.create_subprocess_exec(
            *command, env=os.environ | ENVIRONMENT, stdin=DEVNULL, stdout=log, stderr=log
        )
        try:
            async with Runtime.connect(server.url) as runtime:
                client = await runtime.endpoint("bench.Engine.generate").client()
                ready = asyncio.create_task(client.wait_for_instances(START_SECONDS, count=ENGINES))
                ended = asyncio.create_task(run.wait())
                await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    raise RuntimeError((folder / "run.log").read_text(errors="replace")[-3000:])
                await ready
                yield runtime
                ended.cancel()
        finally:
            if run.returncode is None:
                run.terminate()
                await run.wait()
            log.close()
            await server.stop()


def tokens(name: str, count: int) -> list[int]:
    """A text as token ids, always the same for a name."""
    random = Random(name)
    return [random.randrange(VOCABULARY) for _ in range(count)]


async def ask(engine: Engine, prompt: list[int], count: int) -> tuple[float, int, list[int]]:
    """Seconds to the first token, prompt tokens that were found in the cache, and the answer."""
    request = GenerateRequest(prompt, count, sampling=Sampling(temperature=0), ignore_eos=True)
    begun, first, cached = perf_counter(), 0.0, 0
    answer: list[int] = []
    async for item in engine.generate(request):
        first = first or perf_counter() - begun
        cached = item.cached_tokens or cached
        answer += item.token_ids
    return first, cached, answer


# Speed ---------------------------------------------------------------------------------------


async def measure(engine: Engine, requests: int, seed: int) -> Speed:
    """Callers that ask questions about documents, one after the other."""
    random = Random(seed)
    questions = [
        [
            *tokens(f"{seed}, document {random.randrange(DOCUMENTS)}", DOCUMENT_TOKENS),
            *tokens(f"{seed}, question {number}", QUESTION_TOKENS),
        ]
        for number in range(requests + WARM_UP)
    ]
    asked, times, cached = 0, list[float](), 0

    async def call() -> None:
        nonlocal asked, cached
        while questions:
            question, is_counted = questions.pop(), len(questions) < requests
            first, found, _ = await ask(engine, question, ANSWER_TOKENS)
            if is_counted:
                times.append(first)
                asked, cached = asked + len(question), cached + found

    async with asyncio.TaskGroup() as callers:
        for _ in range(CALLERS):
            callers.create_task(call())
    return Speed(fmean(times), cached / asked)


async def speed(runs: int, requests: int, blocks: int) -> list[tuple[Speed, Speed]]:
    """By round robin and by the KV router, for each run."""
    found: list[tuple[Speed, Speed]] = []
    async with engines(LARGER, blocks) as runtime:
        plain = runtime.client(Engine, routing="round_robin")
        for run in range(runs):
            for _ in range(ENGINES):
                assert await plain.reset_prefix_cache()
            by_turns = await measure(plain, requests, run)
            for _ in range(ENGINES):
                assert await plain.reset_prefix_cache()
            async with open_router(runtime, Engine) as router:
                routed = runtime.client(Engine, routing=router)
                by_cache = await measure(routed, requests, run)
            found.append((by_turns, by_cache))
    return found


# Agreement -----------------------------------------------------------------------------------


async def agreement(count: int, pause: float, blocks: int) -> Mapping[str, object]:
    """How often the router was right, one request after the other."""
    random = Random("conversations")
    conversations: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    wrong: list[str] = []
    reused = asked = again = 0
    async with engines(Size(), blocks) as runtime, open_router(runtime, Engine) as router:
        engine = runtime.client(Engine, routing=router)
        last: list[int] = []
        for number in range(count):
            if last and random.random() < AGAIN:
                prompt, again = last, again + 1
            else:
                at = random.randrange(CONVERSATIONS)
                turn = tokens(f"turn {number}", random.randrange(*TURN_TOKENS))
                if len(conversations[at]) + len(turn) + ANSWER_TOKENS > CONTEXT:
                    conversations[at] = []
                prompt = [*conversations[at], *turn]
            with call_options(request_id=f"ask-{number}"):
                _, cached, answer = await ask(engine, prompt, ANSWER_TOKENS)
            if prompt is not last:
                conversations[at] = [*prompt, *answer]
                last = prompt
            [decision] = router.decisions(f"ask-{number}")
            asked, reused = asked + len(prompt), reused + cached
            if cached != decision.expected_reuse:
                wrong.append(f"{number}: {cached}, expected {decision.expected_reuse}")
            await asyncio.sleep(pause)
    return {
        "requests": count,
        "asked again": again,
        "hit rate": round(reused / asked, 3),
        "equal": count - len(wrong),
        "equal, %": round(100 * (count - len(wrong)) / count, 2),
        "differing": wrong[:10],
    }


@click.command()
@click.option("--only", type=click.Choice(["speed", "agreement"]), help="Do one alone.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True)
@click.option("--requests", default=200, show_default=True, help="Of each policy in each run.")
@click.option("--blocks", default=240, show_default=True, help="Of each cache, for the speed.")
@click.option("--turns", default=2000, show_default=True, help="Requests for the agreement.")
@click.option("--pause", default=0.02, show_default=True, help="Seconds between two of these.")
def main(only: str | None, runs: int, requests: int, blocks: int, turns: int, pause: float) -> None:
    """Two engines of vLLM on this machine's CPUs, by round robin and by the KV router."""
    console = Console()
    if only != "agreement":
        found = asyncio.run(speed(runs, requests, blocks))
        table = Table(
            *("run", "TTFT rr, ms", "TTFT kv, ms", "ratio", "hits rr", "hits kv", "ratio"),
            title=f"{ENGINES} engines, {DOCUMENTS} documents of {DOCUMENT_TOKENS} tokens, caches "
            f"of {blocks * BLOCK:,}",
        )
        for run, (turns_, cache) in enumerate(found):
            table.add_row(
                str(run),
                f"{1e3 * turns_.ttft:.0f}",
                f"{1e3 * cache.ttft:.0f}",
                f"{turns_.ttft / cache.ttft:.2f}",
                f"{turns_.hit_rate:.3f}",
                f"{cache.hit_rate:.3f}",
                f"{cache.hit_rate / turns_.hit_rate:.2f}",
            )
        console.print(table)
        console.print(
            f"medians: TTFT {median(a.ttft / b.ttft for a, b in found):.2f}, hit rate "
            f"{median(b.hit_rate / a.hit_rate for a, b in found):.2f}"
        )
    if only != "speed":
        for name, value in asyncio.run(agreement(turns, pause, 96)).items():
            console.print(f"{name}: {value}")


if __name__ == "__main__":
    main()
