"""The story of many streams that lose their instances at once, again and again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, TypeVar

import anyio
import msgspec

from dynbus import Actor, Arrival, Relay, ResumeMismatch, StreamLost, call_options, context, handler
from dynbus.testing import Simulation

from .rest import rest
from .stories import Items, Reading

T = TypeVar("T")

INSTANCES = 2
STREAMS = 20
"""More than may be on their way to one instance at a time."""
LIMIT = 2
FIRST = 0.5
"""Seconds to a first item."""
COMMON = 5
"""The last item that all instances have alike."""


class Mover(Actor, namespace="simulated"):
    """Begins slowly, and notes how often each stream has begun."""

    begun: ClassVar[Counter[str]]

    @handler(resume="go_on", migration_limit=LIMIT)
    async def resumed(self, request: Items) -> AsyncGenerator[int, None]:
        self.begun[context().id] += 1
        await asyncio.sleep(FIRST)
        async for number in request.come():
            yield number

    @handler(resume="replay", migration_limit=LIMIT)
    async def lying(self, request: Items) -> AsyncGenerator[tuple[int, str], None]:
        # From some item on each instance has others.
        async for number in request.come():
            yield number, self.instance_id if number > COMMON else ""

    @staticmethod
    def go_on(request: Items, items: Sequence[int]) -> Items | None:
        start = request.start + len(items)
        assert items == list(range(request.start, start)), f"{items} were kept"
        return msgspec.structs.replace(request, start=start) if start < request.end else None


Heard = asyncio.Queue[Arrival[Any, Any]]


def new_relay() -> Relay[Heard, Any]:
    """A relay whose streams are known by the queue of what arrives of them."""

    def deliver(arrivals: list[Arrival[Heard, Any]]) -> None:
        for arrival in arrivals:
            arrival.stream.key.put_nowait(arrival)

    return Relay(deliver)


async def relayed(relay: Relay[Heard, Any], stream: AsyncIterable[T]) -> AsyncGenerator[T, None]:
    """The items of a stream that a relay reads."""
    heard = Heard()
    opened = await relay.open(stream, heard)
    try:
        while True:
            arrival = await heard.get()
            for item in arrival.items:
                yield item
            if arrival.error is not None:
                raise arrival.error
            if arrival.ended:
                return
    finally:
        opened.cancel()


async def moves(simulation: Simulation) -> None:
    """A stream moves as often as it may, and is lost where it would have to once more; none is put
    together of what differs, or keeps a place in the line of those that move: to be told with
    `Kind.KILL`."""
    begun = Mover.begun = Counter()
    for _ in range(INSTANCES):
        await simulation.start(Mover)
    client = simulation.client(Mover, wait=30.0, timeout=60.0)
    # A stream that passes middleware cannot be relayed.
    plain = simulation.kit.client(Mover, wait=30.0, timeout=60.0)
    chance, relay = simulation.random, new_relay()

    async def read(caller: int) -> None:
        name, began = f"stream-{caller}", simulation.now
        patience = 8.0 * chance.random() if chance.random() < 0.4 else 60.0
        lost, request = False, Items(0, 18, 0.2)
        reading = Reading(simulation, request.pause + FIRST)
        with call_options(request_id=name), anyio.move_on_after(patience) as scope:
            try:
                stream = client.resumed(request)
                if caller % 2:
                    stream = relayed(relay, plain.resumed(request))
                async with aclosing(stream) as items:
                    async for item in items:
                        reading.item(item)
            except StreamLost:
                lost = True
        assert begun[name] <= LIMIT + 1, f"{name} began {begun[name]} times"
        if lost:
            kills = sum(one.began >= began for one in simulation.troubles)
            assert kills > LIMIT, f"{name} was lost by {kills} kills"
            simulation.counts["lost"] += 1
        elif not scope.cancelled_caught:
            assert reading.count == request.end, f"{name} ended after {reading.count} items"

    async def read_lies() -> None:
        items, differed = list[tuple[int, str]](), False
        try:
            async for item in client.lying(Items(0, 18, 0.2)):
                items.append(item)
            assert len(items) == 18, f"a stream ended after {len(items)} items"
        except (StreamLost, ResumeMismatch) as error:
            simulation.counts[f"lies: {error.code}"] += 1
            differed = isinstance(error, ResumeMismatch)
        assert len(items) > COMMON + 1 or not differed, f"{items} do not differ"
        assert [number for number, _ in items] == list(range(len(items))), f"{items}"
        sources = {source for _, source in items[COMMON + 1 :]}
        assert len(sources) < 2, f"a stream was put together of those of {sources}"

    async with anyio.create_task_group() as callers:
        for _ in range(3):
            callers.start_soon(read_lies)
        for caller in range(STREAMS):
            callers.start_soon(read, caller)
            await asyncio.sleep(0.2 * chance.random())
    await rest(simulation)


async def stalled_streams(simulation: Simulation) -> None:
    """Streams go on elsewhere, and soon, where what an instance sends does not come although it is
    heard: to be told with an empty plan."""
    Mover.begun = Counter()
    instances = [await simulation.start(Mover) for _ in range(INSTANCES)]
    client = simulation.client(Mover, wait=30.0, timeout=60.0)
    kit, chance = simulation.kit, simulation.random

    async def read() -> None:
        request = Items(0, 30, 0.2)
        reading = Reading(simulation, request.pause + FIRST)
        async for item in client.resumed(request):
            reading.item(item)
        assert reading.count == request.end, f"a stream ended after {reading.count} items"

    async with anyio.create_task_group() as readers:
        for _ in range(6):
            readers.start_soon(read)
        await asyncio.sleep(1.0 + 2.0 * chance.random())
        home = kit.process_of(instances[0].actor.runtime)
        with kit.bus.partition(home.data, notice_after=60.0):
            await asyncio.sleep(12.0)
    await rest(simulation)
