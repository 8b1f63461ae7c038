"""A graph of actors with jobs, a schedule and engines with caches, for users of their own."""

from __future__ import annotations

from dynbus import Actor, depends, every, handler, signal, step
from dynbus.kvrouter import RouterActor
from dynbus.llm import MockWorker


class Press(Actor, namespace="shop"):
    def __init__(self) -> None:
        self.firings = 0

    @handler(durable=True)
    async def book(self, title: str) -> str:
        stored = await step("bind", self.bind, title)
        return f"{stored}, approved {await signal('approved', str)}"

    async def bind(self, title: str) -> str:
        return f"{title} bound"

    @every("1s")
    async def clean(self) -> None:
        self.firings += 1

    @handler
    async def fired(self) -> int:
        return self.firings


class Counter(Actor, namespace="shop"):
    press = depends(Press)

    @handler
    async def order(self, title: str) -> str:
        job = await self.press.book.submit(title)
        await job.signal("approved", "by Ada")
        return await job.result(timeout=30.0)


class Engine(MockWorker, namespace="shop"):
    """Has a cache."""


class Router(RouterActor, namespace="shop"):
    """Routes to the engines."""

    def __init__(self) -> None:
        super().__init__("shop.Engine.generate")
