"""The programs of the guides to workers, run as their users run them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from tests.conditions import eventually

from dynbus import Runtime, StreamLost
from dynbus.bus.nats.server_process import RunningServer
from dynbus.compat.runtime import Client, DistributedRuntime, Responses
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.models.catalog import Catalog

from .comparing import PROGRAMS
from .hub_cache import ROOT, make_hub_cache

pytestmark = pytest.mark.anyio

MODEL = "Qwen3-0.6B"


@asynccontextmanager
async def programs(server: RunningServer, home: Path, *names: str) -> AsyncGenerator[list[Any]]:
    """Programs that run until the block ends; they end by SIGTERM, without an error."""
    environment = {
        **os.environ,
        "NATS_URL": server.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    started = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAMS / f"{name}.py")),
            cwd=home,
            env=environment,
            stderr=asyncio.subprocess.PIPE,
        )
        for name in names
    ]
    try:
        yield started
    finally:
        for program in started:
            if program.returncode is None:
                program.send_signal(signal.SIGTERM)
        told = await asyncio.gather(*(program.communicate() for program in started))
    ended = [(program.returncode, error) for program, (_, error) in zip(started, told, strict=True)]
    assert [(code, error) for code, error in ended if code or b"Traceback" in error] == []


@asynccontextmanager
async def asked(server: RunningServer) -> AsyncGenerator[tuple[HttpFrontEnd, AsyncOpenAI]]:
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime.connect(server.url))
        catalog = await stack.enter_async_context(Catalog(runtime))
        settings = HttpSettings(port=0, grace=1.0)
        front = await stack.enter_async_context(HttpFrontEnd(runtime, catalog, settings))
        url = f"{front.url}/v1"
        yield (
            front,
            await stack.enter_async_context(
                AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
            ),
        )


async def chat(client: AsyncOpenAI, text: str) -> str:
    asked: Any = client.chat.completions.create
    answer = await asked(model=MODEL, messages=[{"role": "user", "content": text}])
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize("name", ["workers_guide_1", "workers_guide_earlier_1"])
async def test_the_model_of_a_guide_is_asked_by_its_name(
    name: str, nats_server: RunningServer, tmp_path: Path
) -> None:
    make_hub_cache(tmp_path)
    async with asked(nats_server) as (front, client):
        async with programs(nats_server, tmp_path, name):
            await eventually(lambda: MODEL in front.shared.models.names)

            answer = await chat(client, "The capital of France is Paris")

        await eventually(lambda: MODEL not in front.shared.models.names)

    assert "The capital of France is Paris" in answer


async def client_of(runtime: DistributedRuntime, endpoint: str, instances: int = 1) -> Client:
    client = await runtime.endpoint(endpoint).client()
    await eventually(lambda: len(client.instance_ids()) == instances)
    return client


async def test_requests_are_given_back_and_left(nats_server: RunningServer, tmp_path: Path) -> None:
    names = ("workers_guide_4", "workers_guide_4", "workers_guide_5")
    async with (
        Runtime.connect(nats_server.url) as bus,
        programs(nats_server, tmp_path, *names) as (leaving, other, _),
    ):
        runtime = DistributedRuntime(bus)
        migrating = await client_of(runtime, "guide.migrating.generate", 2)
        cancelling = await client_of(runtime, "guide.cancelling.generate")

        whole = [item.data() async for item in await migrating.generate({"count": 3})]
        answers = [await migrating.generate({"count": 100_000}) for _ in range(2)]
        firsts = [(await anext(answer)).data() for answer in answers]
        ends = asyncio.gather(*map(read_all, answers), return_exceptions=True)
        for program in (leaving, other):
            program.send_signal(signal.SIGTERM)
        errors = await ends
        await asyncio.gather(leaving.wait(), other.wait())

        answer = await cancelling.generate({"count": 100_000})
        await anext(answer)
        await answer.aclose()
        load = await client_of(runtime, "guide.cancelling.load_metrics")
        counts = [-1]

        async def stands_still() -> bool:
            [item] = [item.data() async for item in await load.generate({})]
            counts.append(item["made"])
            return counts[-1] == counts[-2]

        await eventually(stands_still)

    assert whole == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert firsts == whole[:1] * 2
    assert [type(error) for error in errors] == [StreamLost] * 2
    assert 0 < counts[-1] < 100_000


async def read_all(answer: Responses) -> list[Any]:
    return [item.data() async for item in answer]
