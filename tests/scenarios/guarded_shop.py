"""A graph of actors with jobs, a schedule, topics and engines with caches, each with its user."""

from __future__ import annotations

from dynbus import Actor, Migrate, Topic, context, depends, every, handler, signal, step, subscribe
from dynbus.kvrouter import RouterActor
from dynbus.llm import MockWorker

ordered = Topic("book.ordered", str, namespace="shop", retain="1h")
returned = Topic("book.returned", str, namespace="shop", retain="1h")
asked = Topic("price.asked", str, namespace="shop", retain=None)
UNPAID = "unpaid"


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


class Counter(Actor, namespace="shop", publishes=[ordered, returned, asked]):
    press = depends(Press)

    @handler
    async def order(self, title: str) -> str:
        await asked.publish(title)
        await ordered.publish(title, key=title)
        await ordered.publish(UNPAID)
        job = await self.press.book.submit(title)
        await job.signal("approved", "by Ada")
        return await job.result(timeout=30.0)

    @handler(allow=("billing",))
    async def refund(self) -> str:
        return context().principal


class Heard(Actor, namespace="shop", abstract=True):
    def __init__(self) -> None:
        self.titles: list[str] = []

    @handler
    async def heard(self) -> list[str]:
        return self.titles


class Window(Heard, namespace="shop"):
    @subscribe(ordered)
    async def show(self, title: str) -> None:
        self.titles.append(title)

    @subscribe(asked)
    async def note(self, title: str) -> None:
        self.titles.append(f"{title}?")


class Ledger(Heard, namespace="shop"):
    @subscribe(ordered, group="ledger", tries=1)
    async def book(self, title: str) -> None:
        if title == UNPAID:
            raise ValueError("nobody pays for it")
        self.titles.append(title)


class Audit(Heard, namespace="shop"):
    def __init__(self) -> None:
        super().__init__()
        self.begun: set[str] = set()

    @subscribe(ordered, group="audit", ordered=True)
    async def check(self, title: str) -> None:
        if title not in self.begun:
            self.begun.add(title)
            # That was no try, which the log of the method keeps.
            raise Migrate("after a pause")
        self.titles.append(title)


class Engine(MockWorker, namespace="shop"):
    """Has a cache."""


class Router(RouterActor, namespace="shop"):
    """Routes to the engines."""

    def __init__(self) -> None:
        super().__init__("shop.Engine.generate")
