"""The story of readers that are slow or read no more, beside others that go on."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import ClassVar, Final

import anyio

from dynbus import Actor, ActorInstance, DeadlineExceeded, ReaderStalled, handler
from dynbus.bus.protocol.unread_bytes import LEAST_PER_STREAM, UNIT_COST
from dynbus.testing import Simulation

from .rest import BREATH, rest

CLIENTS = 3
ITEM = 3000
ITEMS = 90
STALL = 3
IDLE = 1.0
SWEEP = 0.7
"""Seconds between two looks at what is stuck, and until its reader hears of it."""
SETTINGS: Final = {
    "stream_window": 90_000,
    "instance_window": 300_000,
    "reader_stall_timeout": STALL,
}


class Fountain(Actor, namespace="simulated"):
    """Gives items as fast as they may be sent."""

    instance: ClassVar[ActorInstance]
    given: ClassVar[Counter[str]]
    held: ClassVar[list[int]]

    @handler
    async def flow(self, name: str) -> AsyncGenerator[str, None]:
        for number in range(ITEMS):
            self.given[name] += 1
            self.held.append(self.instance.server.ledger.unread.held)
            yield f"{number} ".ljust(ITEM)

    @handler(idle_timeout=IDLE)
    async def dry_up(self, name: str) -> AsyncGenerator[str, None]:
        yield name
        await asyncio.sleep(0.7 * IDLE)
        yield name
        await asyncio.sleep(10 * IDLE)


async def slow_readers(simulation: Simulation) -> None:
    """A reader that is slow gets all, one that reads no more is given up, and both cost a bounded
    amount; a handler that yields nothing is given up, too: to be told with an empty plan."""
    given = Fountain.given = Counter()
    held = Fountain.held = list[int]()
    instance = Fountain.instance = await simulation.start(Fountain)
    chance = simulation.random

    async def read(client: Fountain, name: str, pause: float, stuck: bool) -> None:
        count, end = 0, 1 + int(ITEMS * chance.random() / 2) if stuck else ITEMS
        async with aclosing(client.flow(name)) as items:
            async for item in items:
                assert item == f"{count} ".ljust(ITEM), f"{item[:9]} came after {count} items"
                count += 1
                ahead = (given[name] - count) * ITEM
                assert ahead <= SETTINGS["stream_window"], f"{name} is {ahead} ahead"
                if count == end and stuck:
                    break
                if not count % 30:
                    await asyncio.sleep(pause * chance.random())
            else:
                assert count == ITEMS, f"{name} ended after {count} items"
                return
            # Its writer goes on for a while, as there is room.
            await asyncio.sleep(2 * STALL)
            stalled = False
            try:
                count += len([item async for item in items])
            except ReaderStalled:
                stalled = True
            assert stalled, f"{name} read {count} items, and was not given up"

    async def see_dry_up(client: Fountain) -> None:
        came, ended = list[float](), False
        try:
            async for _ in client.dry_up("dry"):
                came.append(simulation.now)
        except DeadlineExceeded:
            ended = True
        took = simulation.now - came[-1]
        assert (ended, len(came)) == (True, 2), f"{len(came)} came, and it has ended: {ended}"
        assert IDLE < took < IDLE + 2 * SWEEP, f"it was given up after {took:.2f} s"

    async with anyio.create_task_group() as readers:
        for of in range(CLIENTS):
            runtime = await simulation.kit.runtime()
            await runtime.discovery.wait_for_instance(instance.name)
            client = runtime.client(Fountain)
            readers.start_soon(read, client, f"quick {of}", 0.0, False)
            readers.start_soon(read, client, f"slow {of}", STALL - SWEEP, False)
            readers.start_soon(read, client, f"stuck {of}", 0.0, True)
            await asyncio.sleep(0.2 * chance.random())
        readers.start_soon(see_dry_up, client)
    least = 3 * CLIENTS * (LEAST_PER_STREAM + ITEM + UNIT_COST)
    assert max(held) <= SETTINGS["instance_window"] + least, f"{max(held)} bytes were kept"
    await rest(simulation, BREATH)
