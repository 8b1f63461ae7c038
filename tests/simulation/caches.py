"""The stories of routing by caches: what routers know of engines, and of what runs there."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import ClassVar

import anyio
import msgspec

from dynbus import Actor, DynbusError, handler
from dynbus.bus.background import Work
from dynbus.kvrouter import (
    BlockRemoved,
    BlockStored,
    Election,
    IndexFollower,
    KvEventPublisher,
    Rank,
    open_router,
)
from dynbus.kvrouter.routing.active_load import NO_LOAD
from dynbus.kvrouter.stream.digest import index_digest
from dynbus.testing import Simulation

from .rest import rest

ENGINES = 3
GATES = 2
CALLERS = 4
BLOCK = 4
"""Tokens of a block."""
KEPT = 4
"""Prompts in the cache of an engine."""


class Prompt(msgspec.Struct, frozen=True):
    """Asks for `items` items, of `token_ids`."""

    token_ids: list[int]
    items: int


class Engine(Actor, namespace="simulated"):
    """Caches the blocks of the last prompts, and says so."""

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": str(BLOCK), "kv_events": "true"}

    async def on_start(self) -> None:
        self.cached: dict[int, list[int]] = {}
        self.events = await KvEventPublisher.of(self).__aenter__()

    async def on_stop(self) -> None:
        await self.events.close()

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[int, None]:
        first = prompt.token_ids[0]
        if first not in self.cached:
            # Each block is stored by itself, as an engine computes it.
            names = [first + at for at in range(len(prompt.token_ids) // BLOCK)]
            self.cached[first] = names
            for at, name in enumerate(names):
                parent = names[at - 1] if at else None
                self.events.publish([BlockStored(parent, [name], [name])])
        while len(self.cached) > KEPT:
            self.events.publish([BlockRemoved(self.cached.pop(next(iter(self.cached)))[::-1])])
        for number in range(prompt.items):
            await asyncio.sleep(0.1)
            yield number


class Gate(Actor, namespace="simulated"):
    """Asks the engine that a router picks."""

    async def on_start(self) -> None:
        self.opened = open_router(self.runtime, Engine, share=True)
        self.router = await self.opened.__aenter__()
        self.engine = self.runtime.client(Engine, routing=self.router, wait=10.0)

    async def on_stop(self) -> None:
        await self.opened.__aexit__(None, None, None)

    @handler
    async def ask(self, prompt: Prompt) -> AsyncGenerator[int, None]:
        async for item in self.engine.generate(prompt):
            yield item


async def caches(simulation: Simulation) -> None:
    """When all rests each router knows what each engine that lives holds, and of no other, and that
    nothing runs there."""
    for _ in range(ENGINES):
        await simulation.start(Engine)
    for _ in range(GATES):
        await simulation.start(Gate)
    client = simulation.client(Gate, wait=10.0, timeout=15.0)

    async def ask(caller: int) -> None:
        for _ in range(10):
            first = 1000 * (1 + int(8 * simulation.random.random()))
            blocks = 1 + int(6 * simulation.random.random())
            prompt = Prompt(list(range(first, first + blocks * BLOCK)), caller)
            patience = 0.2 + 2.0 * simulation.random.random()
            with suppress(DynbusError), anyio.move_on_after(patience):
                async for _ in client.ask(prompt):
                    pass
            await asyncio.sleep(0.3 * simulation.random.random())

    async with anyio.create_task_group() as callers:
        for caller in range(CALLERS):
            callers.start_soon(ask, caller)
    actors = [instance.actor for instance in await rest(simulation)]
    engines = {one.instance_id: one for one in actors if isinstance(one, Engine)}
    for gate in (one for one in actors if isinstance(one, Gate)):
        running = {rank: gate.router.load(rank) for rank in map(_rank, engines)}
        assert set(running.values()) <= {NO_LOAD}, f"what runs when all rests: {running}"
        follower = gate.router.follower
        assert isinstance(follower, IndexFollower)
        known = {rank.instance for rank in follower.index.ranks}
        assert known <= engines.keys(), f"of {sorted(engines)} the caches of {known} are known"
        for name, engine in engines.items():
            said, held = index_digest(follower.index, _rank(name)), _held(engine)
            assert said == held, f"{name} holds {held}, and the router knows of {said}"


def _rank(instance: str) -> Rank:
    return Rank(instance, 0)


def _held(engine: Engine) -> object:
    return engine.events._logs[0].mirror.digest()


TTL = 1.0
ELECTED_WITHIN = 8.0
"""Seconds within which one is elected, once nothing disturbs them."""
LONG_WAY = 0.11
"""Seconds that a message of a candidate that is far away takes at most: it is written in time."""


class Candidate(Actor, namespace="simulated"):
    """Stands for election, and works while it is elected."""

    all: ClassVar[list[Candidate]]
    simulation: ClassVar[Simulation]

    async def on_start(self) -> None:
        bus, chance = self.runtime.bus, self.simulation.random
        if chance.random() < 0.5:
            for connection in self.simulation.kit.process_of(self.runtime).connections:
                connection.way = lambda: chance.random() * LONG_WAY
        self.election = await Election(
            bus.data.jetstream, "simulated", "Engine", self.instance_id, ttl=TTL, bus=bus
        ).__aenter__()
        self.late = 0
        self.all.append(self)
        self.work: Work = bus.background.start(self._work, name="the work of the elected one")

    async def on_stop(self) -> None:
        await self.work.end()
        await self.election.close()

    @handler
    async def is_elected(self) -> bool:
        return self.election.is_elected

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            if self.election.is_elected:
                with self.election.while_elected():
                    await self._turns()

    async def _turns(self) -> None:
        while True:
            # One that stood still may find its next turn due before its end.
            self.late = 0 if self.election.is_elected else self.late + 1
            assert self.late < 3, f"{self.instance_id} works on, and is not elected any more"
            await asyncio.sleep(0.2)


async def elections(simulation: Simulation) -> None:
    """There are never two that are elected, and when all is healed there is one."""
    candidates: list[Candidate] = []
    Candidate.all, Candidate.simulation = candidates, simulation

    def elected() -> list[Candidate]:
        return [one for one in candidates if one.election.is_elected]

    async def watch() -> None:
        while True:
            assert len(elected()) < 2, f"elected are {[one.instance_id for one in elected()]}"
            await asyncio.sleep(0.02)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        for _ in range(4):
            await simulation.start(Candidate)
        await simulation.over()
        await asyncio.sleep(ELECTED_WITHIN)
        tasks.cancel_scope.cancel()
    assert len(elected()) == 1, f"of {candidates} {elected()} are elected"
