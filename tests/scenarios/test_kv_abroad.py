"""A router whose region has nobody sends a prompt to who holds most of it in another region."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pydantic import BaseModel
from tests.conditions import eventually
from tests.joined_regions import joined_regions

from dynbus import Actor, Runtime, call_options, handler
from dynbus.kvrouter import BlockStored, KvEventPublisher, block_hashes, open_router
from dynbus.kvrouter.names import kv_abroad_subject

pytestmark = pytest.mark.anyio

BLOCK = 16
INTERVAL = 0.1


class Prompt(BaseModel):
    token_ids: list[int]


def prompt_of(number: int) -> Prompt:
    return Prompt(token_ids=list(range(1000 * number, 1000 * number + 8 * BLOCK)))


class Engine(Actor, namespace="demo"):
    """Holds the prompt of its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": str(BLOCK), "kv_events": "true"}

    async def on_start(self) -> None:
        self.events = KvEventPublisher.of(self)
        await self.events.__aenter__()
        held = block_hashes(prompt_of(self.number).token_ids, BLOCK)
        self.events.publish([BlockStored(None, held, held)])

    async def on_stop(self) -> None:
        await self.events.close()

    @handler
    async def generate(self, prompt: Prompt) -> str:
        return self.instance_id


async def test_a_prompt_goes_to_the_instance_abroad_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynbus.kvrouter.stream.publisher.SUMMARY_INTERVAL", INTERVAL)
    async with joined_regions(tmp_path, ("eu", "us")) as regions, AsyncExitStack() as exits:
        eu = await exits.enter_async_context(Runtime.connect(regions["eu"].url, spill="region"))
        us = await exits.enter_async_context(Runtime.connect(regions["us"].url))
        for number in range(4):
            await us.start(Engine, number=number, instance_id=f"us-{number}")
        router = await exits.enter_async_context(open_router(eu, "demo.Engine"))
        client = eu.client(Engine, routing=router)
        heard: set[str] = set()
        every = kv_abroad_subject("us", "demo", "Engine", "*", "*")
        eu.bus.data.subscribe(every, lambda message: heard.add(message.subject))
        await eventually(lambda: len(heard) == 4)
        known: set[str] = set()

        async def know_all() -> bool:
            with call_options(wait=30.0):
                known.add(await eu.client(Engine).generate(prompt_of(0)))
            return len(known) == 4

        await eventually(know_all)

        for number in (1, 2, 3, 0):
            assert await client.generate(prompt_of(number)) == f"us-{number}"
        assert [one.told_reuse for one in router.latest_decisions(4)] == [7 * BLOCK] * 4
