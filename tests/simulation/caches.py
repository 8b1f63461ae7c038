"""The stories of routing by caches: what routers know of engines, and of what runs there."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import ClassVar, TypeVar

import anyio
import msgspec

from dynbus import Actor, DynbusError, Unavailable, handler
from dynbus.bus.background import Work
from dynbus.kvrouter import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Election,
    IndexFollower,
    KvEventPublisher,
    Rank,
    open_router,
)
from dynbus.kvrouter.names import kv_event_stream
from dynbus.kvrouter.routing.active_load import RankLoad
from dynbus.kvrouter.stream.awareness import AwarenessLevel
from dynbus.kvrouter.stream.digest import index_digest
from dynbus.testing import Simulation

A = TypeVar("A", bound=Actor)

ENGINES = 3
GATES = 2
CALLERS = 4
BLOCK = 4
"""Tokens of a block."""
KEPT = 4
"""Prompts in the cache of an engine."""
SETTLED = 16.0
"""Seconds in which routers know what engines hold, whatever was purged."""
FORGOTTEN = 12.0
"""Seconds after which an engine that is gone is known no longer: its lease is over."""
KNOWN_AGAIN = 5.0
"""Seconds after a deletion, or the last fault, after which they do where nothing was purged."""
ROUNDED = 0.01
AT_HAND = 3.0
"""Seconds in which requests run and stay so, longer than between a router's heartbeats."""


class Prompt(msgspec.Struct, frozen=True):
    """Asks for `items` items, of `token_ids`.

    Attributes:
        clears: whether the engine drops its cache first.
        stays: seconds for which it runs on after its first item.
    """

    token_ids: list[int]
    items: int
    clears: bool = False
    stays: float = 0.0


class Engine(Actor, namespace="simulated"):
    """Caches the blocks of the last prompts, and says so."""

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": str(BLOCK), "kv_events": "true"}

    async def on_start(self) -> None:
        self.cached: dict[int, list[int]] = {}
        self.running: list[Prompt] = []
        self.events = await KvEventPublisher.of(self).__aenter__()

    async def on_stop(self) -> None:
        await self.events.close()

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[int, None]:
        if prompt.clears:
            self.cached.clear()
            self.events.publish([AllBlocksCleared()])
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
        self.running.append(prompt)
        try:
            for number in range(prompt.items):
                await asyncio.sleep(0.1)
                yield number
                await asyncio.sleep(prompt.stays)
        finally:
            self.running.remove(prompt)


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

    @property
    def follower(self) -> IndexFollower:
        follower = self.router.follower
        assert isinstance(follower, IndexFollower)
        return follower


def _living(simulation: Simulation, kind: type[A]) -> dict[str, A]:
    """The actors of a kind that live, by their instances."""
    instances = [instance for one in simulation.kit.alive() for instance in one.instances]
    return {one.id: one.actor for one in instances if isinstance(one.actor, kind)}


async def caches(simulation: Simulation) -> None:
    """A router that says so knows exactly what the engines hold of which it has the last word. When
    all rests each knows that of all that live, of no other, and what runs there, whichever of them
    sent it; also after the stream was deleted, or its messages dropped before they were read."""
    chance = simulation.random
    for _ in range(ENGINES):
        await simulation.start(Engine)
    for _ in range(GATES):
        await simulation.start(Gate)
    client = simulation.client(Gate, wait=10.0, timeout=20.0)

    async def ask(prompt: Prompt, patience: float) -> None:
        with suppress(DynbusError), anyio.move_on_after(patience):
            async for _ in client.ask(prompt):
                pass

    def drawn(items: int, *, stays: float = 0.0) -> Prompt:
        first = 1000 * (1 + int(8 * chance.random()))
        blocks = 1 + int(6 * chance.random())
        clears = not stays and chance.random() < 0.05
        return Prompt(list(range(first, first + blocks * BLOCK)), items, clears, stays)

    async def call(caller: int) -> None:
        for _ in range(6):
            await ask(drawn(caller), 0.2 + 2.0 * chance.random())
            await asyncio.sleep(0.3 * chance.random())

    way = chance.random()

    async def damage() -> None:
        """Delete the stream once, or now and then drop its messages while a gate does not hear."""
        jetstream, stream = simulation.kit.caller.bus.data.jetstream, kv_event_stream("simulated")
        if way < 0.3:
            await asyncio.sleep(8.0 * chance.random())
            with suppress(Unavailable):
                await jetstream.delete_stream(stream)
                deleted = simulation.now
                await asyncio.sleep(KNOWN_AGAIN)
                if simulation.undisturbed(deleted) >= KNOWN_AGAIN - ROUNDED:
                    await _agree(simulation)
        while way > 0.6:
            await asyncio.sleep(chance.random())
            gates = list(_living(simulation, Gate).values())
            for gate in gates[:1]:
                link = simulation.kit.process_of(gate.runtime).data
                link.disconnect()
                try:
                    await asyncio.sleep(0.5 * chance.random())
                    with suppress(Unavailable):
                        await jetstream.purge(stream, timeout=0.5)
                finally:
                    link.reconnect()

    async def watch() -> None:
        seen: dict[tuple[Gate, str], object] = {}
        while True:
            await asyncio.sleep(0.1)
            engines = _living(simulation, Engine)
            for gate in _living(simulation, Gate).values():
                if gate.follower.awareness().level is not AwarenessLevel.EXACT:
                    continue
                for name, engine in engines.items():
                    last = _last_word(gate.follower, name, engine)
                    if last is not None and seen.get((gate, name)) != last:
                        wrong = _differs(gate.follower, name, engine)
                        assert not wrong, f"{wrong}, and says that it is exact"
                        seen[gate, name] = last

    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        async with anyio.create_task_group() as callers:
            callers.start_soon(damage)
            for caller in range(CALLERS):
                callers.start_soon(call, caller)
            await simulation.over()
            # Ends what may have no end.
            callers.cancel_scope.deadline = anyio.current_time() + 8.0
        if way < 0.6:
            await asyncio.sleep(KNOWN_AGAIN)
            await _agree(simulation)
        else:
            await asyncio.sleep(SETTLED - AT_HAND)
        async with anyio.create_task_group() as callers:
            for _ in range(CALLERS):
                callers.start_soon(ask, drawn(1, stays=AT_HAND), 2 * AT_HAND)
                callers.start_soon(ask, drawn(2, stays=0.5), AT_HAND)
            await asyncio.sleep(AT_HAND - 0.5)
            _check(simulation)
        await asyncio.sleep(0.5)
        _check(simulation)
        watching.cancel_scope.cancel()


async def _agree(simulation: Simulation) -> None:
    """See that each router knows what each engine holds, but for events under way, unless a fault
    begins."""
    gates, engines = _living(simulation, Gate).values(), _living(simulation, Engine)
    left = {(gate, name) for gate in gates for name in engines}
    end = simulation.now + 1.0
    while left and simulation.now < end:
        left = {(one, name) for one, name in left if _differs(one.follower, name, engines[name])}
        await asyncio.sleep(0.05)
    names = sorted(name for _, name in left)
    assert not left or not simulation.undisturbed(end - 1.0), f"{names} are not known in time"


def _check(simulation: Simulation) -> None:
    engines = _living(simulation, Engine)
    for gate in _living(simulation, Gate).values():
        known = {rank.instance for rank in gate.follower.index.ranks}
        gone = known - engines.keys() if simulation.undisturbed(0.0) > FORGOTTEN else set[str]()
        assert not gone, f"the caches of {gone} are known, of which {sorted(engines)} live"
        for name, engine in engines.items():
            wrong = _differs(gate.follower, name, engine)
            assert not wrong, wrong
            blocks = {(one.token_ids[0], at) for one in engine.running for at in _blocks(one)}
            load = RankLoad(0, len(blocks), len(engine.running))
            said = gate.router.load(_rank(name))
            assert said == load, f"{name} has {load}, and a router says {said}"


def _blocks(prompt: Prompt) -> range:
    return range(len(prompt.token_ids) // BLOCK)


def _last_word(follower: IndexFollower, name: str, engine: Engine) -> object:
    """The last message of an engine, where a router knows the engine and has all that it said;
    else None."""
    state, log = follower.index.ranks.get(_rank(name)), engine.events._logs[0]
    if state is None or log._waiting or not follower._live.members.is_known(name):
        return None
    known = state.event_epoch, state.next_id
    return known if known == (log.event_epoch, log._next_id) else None


def _differs(follower: IndexFollower, name: str, engine: Engine) -> str:
    """What a router does not know of the cache of an engine; empty for nothing."""
    held = engine.events._logs[0].mirror.digest()
    said = index_digest(follower.index, _rank(name))
    return "" if said == held else f"{name} holds {held}, and a router knows of {said}"


def _rank(instance: str) -> Rank:
    return Rank(instance, 0)


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
