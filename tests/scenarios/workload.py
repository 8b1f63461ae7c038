"""The actors that the failure stories call, and that their worker processes serve."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncGenerator

from pydantic import BaseModel, Field

from dynbus import Actor, call_options, context, depends, handler


class Count(BaseModel):
    """Up to which item to send, of how many bytes, with how many seconds between them."""

    items: int
    start: int = 0
    size: int = 0
    pause: float = 0.0
    tag: str = ""


class Item(BaseModel):
    index: int
    instance: str
    text: str = ""


class Wait(BaseModel):
    seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    tag: str = ""


class Text(BaseModel):
    text: str


class Done(BaseModel):
    instance: str
    attempt: int = 1
    stopped: bool = False


class Journal(BaseModel):
    """What happened in one instance: how often handlers began, and how they were left."""

    begun: list[str] = []
    finished: list[str] = []
    cancelled: list[str] = []
    stopped: list[str] = []

    @property
    def running(self) -> int:
        return len(self.begun) - len(self.finished) - len(self.cancelled)


class Census(BaseModel):
    """What a serving process holds; the call that asks is one of each.

    Attributes:
        tasks: of its main loop.
        served: calls that wait or run at its instances.
        kept: results that are kept until their callers have them, which takes a heartbeat.
        pending: calls that its own clients wait for.
        blocks: of memory that Python holds, garbage collected.
    """

    tasks: int
    served: int
    kept: int
    pending: int
    blocks: int


def payload(index: int, size: int) -> str:
    """The text of the item at `index`: whoever reads a stream can check every byte of it."""
    seed = f"{index}:"
    return (seed * (size // len(seed) + 1))[:size]


class Source(Actor, namespace="scenario"):
    """Handlers for every story; `journal` tells what became of their calls."""

    def __init__(self) -> None:
        self._journal = Journal()

    @handler
    async def journal(self) -> Journal:
        return self._journal

    @handler
    async def census(self) -> Census:
        gc.collect()
        instances = self.runtime.instances.values()
        peers = [peer for one in instances for peer in one.server.control.registry.remotes.values()]
        return Census(
            tasks=len(asyncio.all_tasks()),
            served=sum(len(peer.calls) for peer in peers),
            kept=sum(len(peer.kept) for peer in peers),
            pending=sum(self.runtime.caller.open_calls().values()),
            blocks=sys.getallocatedblocks(),
        )

    @handler
    async def where(self) -> Done:
        return Done(instance=self.instance_id, attempt=context().attempt)

    @handler(resume="rest_of")
    async def lasting(self, request: Count) -> AsyncGenerator[Item, None]:
        for index in range(request.start, request.items):
            yield Item(index=index, instance=self.instance_id)
            await asyncio.sleep(request.pause)

    @staticmethod
    def rest_of(request: Count, items: list[Item]) -> Count:
        return request.model_copy(update={"start": len(items)})

    @handler(concurrency=None)
    async def count(self, request: Count) -> AsyncGenerator[Item, None]:
        tag = request.tag
        self._journal.begun.append(tag)
        try:
            for index in range(request.items):
                if context().is_stopped():
                    self._journal.stopped.append(tag)
                    break
                text = payload(index, request.size)
                yield Item(index=index, instance=self.instance_id, text=text)
                if request.pause:
                    await asyncio.sleep(request.pause)
        except (asyncio.CancelledError, GeneratorExit):
            self._journal.cancelled.append(tag)
            raise
        self._journal.finished.append(tag)

    @handler(timeout=None)
    async def work(self, request: Wait) -> Done:
        """Takes its time, and may have had its effect when it dies."""
        return await self._wait(request)

    @handler(timeout=None, idempotent=True)
    async def repeatable(self, request: Wait) -> Done:
        return await self._wait(request)

    @handler(timeout=None)
    async def stubborn(self, request: Wait) -> Done:
        """Goes on when it is cancelled."""
        self._journal.begun.append(request.tag)
        ends = time.monotonic() + request.seconds
        while (left := ends - time.monotonic()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                self._journal.stopped.append(request.tag)
        self._journal.finished.append(request.tag)
        return Done(instance=self.instance_id)

    @handler(timeout=None)
    async def tidy(self, request: Wait) -> Done:
        """Needs `seconds` to put things in order once it is asked to stop."""
        self._journal.begun.append(request.tag)
        try:
            await context().stopped()
            self._journal.stopped.append(request.tag)
            await asyncio.sleep(request.seconds)
        except asyncio.CancelledError:
            self._journal.cancelled.append(request.tag)
            raise
        self._journal.finished.append(request.tag)
        return Done(instance=self.instance_id, stopped=True)

    @handler(timeout=None)
    async def block(self, request: Wait) -> Done:
        """Says so in the output, and does what no handler should: it blocks the event loop."""
        print("blocking", flush=True)
        time.sleep(request.seconds)  # noqa: ASYNC251 - that is the story
        return Done(instance=self.instance_id)

    @handler
    async def length(self, request: Text) -> int:
        return len(request.text)

    @handler
    async def grow(self, size: int) -> Text:
        return Text(text="x" * size)

    @handler
    async def raise_error(self, size: int) -> Text:
        raise ValueError("\udcff" + "x" * size)

    @handler(concurrency=1, queue=8)
    async def mailbox(self, request: Wait) -> Done:
        return await self._wait(request)

    @handler(concurrency=4)
    async def few(self, request: Wait) -> Done:
        """Runs four at a time."""
        return await self._wait(request)

    async def _wait(self, request: Wait) -> Done:
        self._journal.begun.append(request.tag)
        try:
            await asyncio.sleep(request.seconds)
        except asyncio.CancelledError:
            self._journal.cancelled.append(request.tag)
            raise
        self._journal.finished.append(request.tag)
        return Done(instance=self.instance_id, attempt=context().attempt)


class Relay(Actor, namespace="scenario"):
    """A hop between a caller and `Source`."""

    source = depends(Source)

    @handler(concurrency=None)
    async def count(self, request: Count) -> AsyncGenerator[Item, None]:
        async for item in self.source.count(request):
            yield item

    @handler(timeout=None)
    async def work(self, request: Wait) -> Done:
        return await self.source.work(request)

    @handler(timeout=None)
    async def stop_child(self, request: Count) -> int:
        """Stops its own sub-calls after the first item; returns how many items came."""
        seen = 0
        async for _ in self.source.count(request):
            seen += 1
            context().stop_generating()
        return seen

    @handler(timeout=None)
    async def short(self, request: Wait) -> Done:
        """Gives its sub-call less time than it has itself."""
        with call_options(timeout=0.3):
            return await self.source.work(request)


class Top(Actor, namespace="scenario"):
    """A second hop: `Source` is its grandchild."""

    relay = depends(Relay)

    @handler(concurrency=None)
    async def count(self, request: Count) -> AsyncGenerator[Item, None]:
        async for item in self.relay.count(request):
            yield item

    @handler(timeout=None)
    async def work(self, request: Wait) -> Done:
        return await self.relay.work(request)


ACTORS: dict[str, type[Actor]] = {actor.__name__: actor for actor in (Source, Relay, Top)}
