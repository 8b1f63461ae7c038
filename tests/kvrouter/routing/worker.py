"""A worker whose calls are routed, and that holds them while it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from pydantic import BaseModel

from dynbus import Actor, handler
from dynbus.kvrouter.routing.router import KvRouter
from dynbus.testing import TestKit

from .routing_fixtures import BLOCK


class Prompt(BaseModel):
    token_ids: list[int]
    max_tokens: int = 3
    hold: bool = False


class Worker(Actor, namespace="llm"):
    """Says its name for each token; holds before the first while it is told to."""

    def __init__(self, name: str, metadata: Mapping[str, str]) -> None:
        self.name = name
        self.metadata = {"kv_block_size": str(BLOCK)} | dict(metadata)
        self.held = asyncio.Event()

    def instance_metadata(self) -> Mapping[str, str]:
        return self.metadata

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[str, None]:
        if prompt.hold:
            await self.held.wait()
        for _ in range(prompt.max_tokens):
            yield self.name


def prompt(blocks: int = 4, of: int = 0, *, hold: bool = False) -> Prompt:
    start = of * 10_000
    return Prompt(token_ids=list(range(start, start + blocks * BLOCK)), hold=hold)


async def start(kit: TestKit, *names: str, **metadata: str) -> dict[str, Worker]:
    """Workers by name, which is their id as well."""
    workers: dict[str, Worker] = {}
    for name in names:
        instance = await kit.start(
            Worker,
            instance_id=name,
            name=name,
            metadata={f"kv_{key}": text for key, text in metadata.items()},
        )
        assert isinstance(instance.actor, Worker)
        workers[name] = instance.actor
    return workers


async def where(client: Worker, request: Prompt) -> str:
    """The name of the worker that served a request."""
    names = {name async for name in client.generate(request)}
    (name,) = names
    return name


def waiting(router: KvRouter) -> int:
    return router.statistics().waiting


def running(router: KvRouter) -> int:
    return router.statistics().running
