"""An engine hangs while its process is alive and its loop answers: it is noticed, withdrawn, its
streams go on elsewhere token for token, and another process is started."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from tests.conditions import PATIENCE, Stopwatch, eventually

from dynbus import Runtime
from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.mock.engine import MockConfig, MockEngine

from . import hanging_engine
from .hanging_engine import Engine
from .project import Folder

pytestmark = pytest.mark.anyio

LEAST: Final = 2.0
"""Seconds of the longest legal step: steps of a hundredth of a second are seen no shorter than a
quarter, of which four times are less."""
NOTICED_WITHIN: Final = LEAST + 3.0
OPTIONS: Final = (f"--Engine.hang_least={LEAST}", "--Engine.hang_limit=20")
STREAMS: Final = 12
TOKENS: Final = 600

ACTORS: Final = Path(hanging_engine.__file__).read_text()


def request_of(number: int, prompt: int = 40, tokens: int = TOKENS) -> GenerateRequest:
    """A request for an output that is always the same."""
    asked = [number + position % 97 for position in range(prompt)]
    return GenerateRequest(asked, tokens, sampling=Sampling(seed=number))


def expected(request: GenerateRequest) -> list[int]:
    engine = MockEngine(MockConfig(blocks=4096, block_size=16, max_num_batched_tokens=512))
    engine.add("it", request)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for _, item in engine.step().outputs for token in item.token_ids]
    return tokens


class Stream:
    """A stream that is read from its beginning to its end.

    Attributes:
        token_ids: that have come.
    """

    def __init__(self, client: Engine, request: GenerateRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.reading = asyncio.create_task(self._read(client))

    async def _read(self, client: Engine) -> None:
        async for item in client.generate(self.request):
            self.token_ids += item.token_ids

    async def check(self) -> None:
        """Wait for its end: nothing was lost, and nothing came twice."""
        await self.reading
        assert self.token_ids == expected(self.request)


@asynccontextmanager
async def engines(folder: Folder, count: int, *more: str) -> AsyncGenerator[Runtime]:
    """A run with so many engines, and a caller that knows them."""
    (folder.path / "engines.py").write_text(ACTORS)
    await asyncio.to_thread(
        folder.start_ready,
        *("engines.py:Engine", f"--Engine.workers={count}", *OPTIONS, *more),
        instances=count,
    )
    async with Runtime.connect(folder.url) as runtime:
        await runtime.discovery.wait_synchronized(PATIENCE)
        await eventually(lambda: len(runtime.instance_ids(Engine)) == count)
        yield runtime


def pids_of(folder: Folder) -> dict[str, int]:
    """The processes of the instances, by their ids."""
    rows = json.loads(folder.dynbus("ps", "--json").stdout)
    return {row["instance_id"]: int(row["address"].rpartition(":")[2]) for row in rows}


async def hang(folder: Folder, runtime: Runtime, way: str, victim: str) -> float:
    """Have an instance hang; seconds until nobody finds it any longer."""
    (folder.path / f"hang-{victim}").write_text(way)
    watch = Stopwatch()
    await eventually(
        lambda: victim not in runtime.instance_ids(Engine),
        what=lambda: folder.output(),
    )
    return watch.seconds()


@pytest.mark.parametrize("way", ["lock", "c", "loop", "scheduler"])
async def test_an_engine_that_hangs_is_withdrawn_its_streams_go_on_and_it_starts_again(
    way: str, folder: Folder
) -> None:
    async with engines(folder, 2) as runtime:
        client = runtime.client(Engine)
        streams = [Stream(client, request_of(number)) for number in range(STREAMS)]
        await eventually(lambda: all(len(stream.token_ids) > 20 for stream in streams))
        pids = await asyncio.to_thread(pids_of, folder)
        victim = runtime.instance_ids(Engine)[0]

        noticed = await hang(folder, runtime, way, victim)
        for stream in streams:
            await stream.check()
        # The one that took its place.
        await eventually(lambda: len(runtime.instance_ids(Engine)) == 2)
        await eventually(lambda: not os.path.exists(f"/proc/{pids[victim]}"))
        await Stream(client, request_of(99)).check()

    assert noticed < NOTICED_WITHIN * (2 if way == "scheduler" else 1)
    assert "its engine hangs: it has work and" in folder.output()
    assert "Thread engine:" in folder.output()
    assert "restarting in" in folder.output()
