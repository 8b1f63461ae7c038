"""Prompts that one vLLM computes and another goes on from: the same tokens, whatever fails."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.conditions import eventually
from tests.vllm.conftest import ENGINE, START_TIMEOUT, Run
from tests.vllm.test_vllm_worker import GREEDY, Engine, items_of, processes_below, prompt

from dynbus import Runtime, call_options
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
from dynbus.llm.vllm.handing_over import HandOver, PromptToCompute

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

LEASE = 8


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, nats_server: RunningServer, tiny_model: Path
) -> Iterator[Run]:
    """A prefill engine and a decode engine."""
    engine = {**ENGINE, "class": "Engine", "model": str(tiny_model)}
    engine |= {"model_name": "pair", "enable_lora": False}
    settings = {"local_prompt_tokens": 64}
    folder = tmp_path_factory.mktemp("pair")
    nodes = {
        "prefill": {**engine, "kv_lease": LEASE},
        "decode": {**engine, "disaggregation_settings": settings},
    }
    (folder / "pair.yaml").write_bytes(msgspec.yaml.encode(nodes))
    run = Run(folder, nats_server.url, ["-f", "pair.yaml"], namespace="pair")
    try:
        yield run
    finally:
        run.stop()


@asynccontextmanager
async def calling(run: Run, url: str) -> AsyncGenerator[tuple[Runtime, Engine, Engine]]:
    """Clients of the prefill engine and of the decode engine."""
    async with Runtime.connect(url) as runtime:

        def is_ready() -> bool:
            assert run.process.poll() is None, run.output[-3000:]
            return all(runtime.instance_ids("pair", one) for one in ("prefill", "decode"))

        await eventually(is_ready, START_TIMEOUT, what="the engines are announced")
        yield (
            runtime,
            runtime.client(Engine, node="prefill", namespace="pair"),
            runtime.client(Engine, node="decode", namespace="pair"),
        )


def tokens_of(items: list[Generated]) -> list[int]:
    return [token for item in items for token in item.token_ids]


async def test_explore(pair: Run, nats_server: RunningServer, fleet: Run) -> None:
    async with calling(pair, nats_server.url) as (runtime, prefill, decode):
        aggregated = runtime.client(Engine)
        for length in (100, 200, 640, 31, 900, 257):
            asked = GenerateRequest(prompt(f"a {length}", length), 24, sampling=GREEDY, ignore_eos=True)
            t = time.monotonic()
            expected = await items_of(aggregated, asked)
            t1 = time.monotonic()
            stamps = []
            items = []
            async for item in decode.generate(asked):
                items.append(item)
                stamps.append(time.monotonic() - t1)
            print(length, t1 - t, [round(1000*x) for x in stamps[:3]], tokens_of(items) == tokens_of(expected), [i.cached_tokens for i in items[:3]])
            print(await prefill.load_metrics())
        await asyncio.sleep(1)
        print(await prefill.load_metrics())
        print(pair.output[-6000:])
