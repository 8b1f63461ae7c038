"""The story of calls that their callers leave, of what these have called, and of few places."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import ClassVar

import anyio
import msgspec

from dynbus import Actor, DynbusError, call_options, context, depends, handler
from dynbus.testing import Simulation

from .rest import rest

CALLERS = 6
INSTANCES = 3
TIMEOUT = 8.0
PLACES = 2
MOST = 3
"""Calls of a batch."""
GOES_ON = 4.0
"""Seconds for which what was left may go on where nothing disturbs it: one until it is killed, and
the heartbeats after which a cancel that was lost is made good."""


class Work(msgspec.Struct, frozen=True):
    """A request that takes `seconds`."""

    name: str
    seconds: float


class Left:
    """The calls that were left, by name, and when.

    Attributes:
        too_long: those that went on all the same.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.at: dict[str, float] = {}
        self.too_long: list[str] = []

    def goes_on(self, name: str) -> None:
        """A call does something."""
        at = self.at.get(name)
        if at is not None and (for_ := self.simulation.undisturbed(at)) > GOES_ON:
            self.too_long.append(f"{name} for {for_:.1f} s")


class Few(Actor, namespace="simulated"):
    """Has few places, and does not heed a request to stop."""

    left: ClassVar[Left]
    running: ClassVar[Counter[str]]

    @handler(concurrency=PLACES, queue=3)
    async def work(self, work: Work) -> str:
        time_left = context().time_left()
        assert (time_left or TIMEOUT) <= TIMEOUT + 1e-6, f"{work.name} has {time_left} s"
        with self._place("work"):
            end = self.left.simulation.now + work.seconds
            while self.left.simulation.now < end:
                await asyncio.sleep(0.1)
                self.left.goes_on(work.name)
        return work.name

    @handler(batch=MOST, batch_wait=0.3, concurrency=PLACES)
    async def together(self, works: list[Work]) -> list[str]:
        with self._place("together"):
            await asyncio.sleep(max(one.seconds for one in works))
        return [one.name for one in works]

    @contextmanager
    def _place(self, kind: str) -> Generator[None]:
        place = f"{kind} at {self.instance_id}"
        self.running[place] += 1
        assert self.running[place] <= PLACES, f"{self.running[place]} run: {place}"
        try:
            yield
        finally:
            self.running[place] -= 1


class Boss(Actor, namespace="simulated"):
    """Has others work, some of them patiently."""

    few = depends(Few)

    @handler
    async def have_done(self, work: Work) -> str:
        with call_options(timeout=60.0, wait=5.0):
            first = await self.few.work(work)
            assert first == work.name
            second = await self.few.work(work)
        assert not context()._listeners, "a call that has ended is still told of a cancel"
        return second


async def left_calls(simulation: Simulation) -> None:
    """A call that is left, or whose time is over, ends soon at its instance, and with it what it
    called; the limits of its handler hold, and at last all its places are free."""
    left = Few.left = Left(simulation)
    Few.running = Counter()
    for _ in range(INSTANCES):
        await simulation.start(Few)
    for _ in range(2):
        await simulation.start(Boss)
    few = simulation.client(Few, wait=5.0, timeout=TIMEOUT)
    boss = simulation.client(Boss, wait=5.0, timeout=TIMEOUT)

    async def call(caller: int) -> None:
        for number in range(8):
            chance = simulation.random.random()
            work = Work(f"{caller}-{number}", 12.0 * simulation.random.random() ** 4)
            method = (few.work, few.together, boss.have_done)[(caller + number) % 3]
            patience = 0.01 + 4.0 * simulation.random.random()
            if chance < 0.3:
                # Some leave when their request has just been sent, or is on its way.
                patience *= max(0.0, chance - 0.15) / 10
            timeout = call_options(timeout=patience if chance > 0.8 else TIMEOUT)
            with suppress(DynbusError), anyio.move_on_after(patience) as scope, timeout:
                assert await method(work) == work.name
            # Also where it failed, or is done, nobody waits for it any more.
            left.at[work.name] = simulation.now
            simulation.counts["left"] += scope.cancelled_caught

    async with anyio.create_task_group() as callers:
        for caller in range(CALLERS):
            callers.start_soon(call, caller)
    instances = await rest(simulation)
    assert not left.too_long, f"went on after they were left: {left.too_long}"
    for instance in instances:
        with call_options(instance=instance.id, retries=0):
            if isinstance(instance.actor, Few):
                assert await few.work(Work("at last", 0.1)) == "at last"


class Cache(Actor, namespace="simulated"):
    """Is told what all instances are to know, and notes how often."""

    left: ClassVar[Left]
    heard: ClassVar[Counter[tuple[str, str]]]

    @handler
    async def reload(self, work: Work) -> str:
        self.heard[work.name, self.instance_id] += 1
        end = self.left.simulation.now + work.seconds
        while self.left.simulation.now < end:
            await asyncio.sleep(0.1)
            self.left.goes_on(work.name)
        return self.instance_id


async def broadcasts(simulation: Simulation) -> None:
    """A broadcast has of each instance its result or an error, in time, and reaches each once; one
    that is left ends everywhere."""
    left = Cache.left = Left(simulation)
    heard = Cache.heard = Counter()
    for _ in range(INSTANCES):
        await simulation.start(Cache)
    client = simulation.client(Cache, wait=5.0, timeout=TIMEOUT)
    chance = simulation.random

    async def tell(caller: int) -> None:
        for number in range(6):
            work = Work(f"{caller}-{number}", 6.0 * chance.random() ** 2)
            patience = 3.0 * chance.random() if chance.random() < 0.4 else 2 * TIMEOUT
            began, answers = simulation.now, dict[str, str | DynbusError]()
            there = {one.id for process in simulation.kit.alive() for one in process.instances}
            with anyio.move_on_after(patience) as scope, suppress(DynbusError):
                answers = await client.broadcast(Cache.reload, work)
            if scope.cancelled_caught:
                left.at[work.name] = simulation.now
                continue
            assert simulation.now < began + TIMEOUT + 2.0, f"{work} took too long"
            results = {name for name, answer in answers.items() if answer == name}
            others = [one for one in answers.values() if not isinstance(one, DynbusError)]
            assert len(others) == len(results), f"{work} has {answers}"
            assert all(heard[work.name, name] for name in results), f"{work} was heard by {heard}"
            assert simulation.troubles or results == there, f"of {there} {results} have answered"

    async with anyio.create_task_group() as callers:
        for caller in range(3):
            callers.start_soon(tell, caller)
    await rest(simulation)
    assert not left.too_long, f"went on after they were left: {left.too_long}"
    assert set(heard.values()) == {1}, f"heard were {heard}"
