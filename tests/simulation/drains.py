"""The story of instances that leave one after the other, as in a restart, under calls and streams
that notice nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from typing import ClassVar

import anyio

from dynbus import Actor, DynbusError, call_options, handler
from dynbus.bus.transport import Message
from dynbus.testing import Simulation

from .rest import BREATH, rest
from .stories import Items, Reading, Shop

INSTANCES = 3
SAID = 0.2
"""Seconds after which an instance that leaves has said so to its server."""
GONE = 5.0
"""Seconds after which nothing runs there: what goes on elsewhere is handed on, and what does not
takes no longer."""
LONG = Items(0, 40, 0.2)
SHORT = Items(0, 15, 0.1)
WAIT = 1.0
"""Seconds for which a call waits for company."""


class Leaver(Actor, namespace="simulated"):
    """Serves until it is told to leave, and notes what is late then."""

    simulation: ClassVar[Simulation]
    effects: ClassVar[Counter[str]]
    late: ClassVar[list[str]]

    def _leaving(self) -> float:
        """Seconds for which the instance has been leaving; 0 while it stays."""
        for one in self.simulation.troubles:
            if any(self is each.actor for process in one.processes for each in process.served):
                return self.simulation.now - one.began
        return 0.0

    @contextmanager
    def _serving(self, what: str) -> Generator[None]:
        """Note what begins, and what runs in the block."""
        if self._leaving() > SAID:
            self.late.append(f"{what} began {self._leaving():.2f} s after it was to leave")
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def on_start(self) -> None:
        self.running = 0

    async def on_stop(self) -> None:
        if self._leaving() > GONE or self.running:
            self.late.append(f"{self.running} ran, and it left after {self._leaving():.2f} s")

    @handler
    async def buy(self, key: str) -> str:
        with self._serving(key):
            self.effects[key] += 1
            await asyncio.sleep(0.6)
        return key

    @handler(batch=3, batch_wait=WAIT, concurrency=None)
    async def together(self, keys: list[str]) -> list[str]:
        with self._serving(f"a batch of {keys}"):
            await asyncio.sleep(0.3)
        return keys

    @handler(resume="replay", migration_limit=1)
    async def replayed(self, request: Items) -> AsyncGenerator[int, None]:
        with self._serving("a stream"):
            async for number in request.come():
                yield number

    @handler(resume="go_on", migration_limit=1)
    async def resumed(self, request: Items) -> AsyncGenerator[int, None]:
        with self._serving("a stream"):
            async for number in request.come():
                yield number

    @handler
    async def listed(self, request: Items) -> AsyncGenerator[int, None]:
        with self._serving("a stream"):
            async for number in request.come():
                yield number

    go_on = staticmethod(Shop.go_on)


async def drains(simulation: Simulation) -> None:
    """No call and no stream fails while instances leave, however few moves a stream may have, and
    none of them keeps its instance; once that was to leave nothing begins there: to be told with
    `Kind.LEAVE`."""
    Leaver.simulation, late, effects = simulation, list[str](), Counter[str]()
    Leaver.late, Leaver.effects = late, effects
    for _ in range(INSTANCES):
        await simulation.start(Leaver)
    client = simulation.client(Leaver, wait=10.0, timeout=120.0)

    async def buy(caller: int) -> None:
        for number in range(5):
            key = f"{caller}-{number}"
            assert await client.buy(key) == key
            assert effects[key] == 1, f"{key} was bought {effects[key]} times"
            assert await client.together(key) == key

    async def read(caller: int) -> None:
        way, request = (
            (client.resumed, LONG),
            (client.replayed, SHORT),
            (client.listed, SHORT),
        )[caller % 3]
        for _ in range(1 if request is LONG else 3):
            reading = Reading(simulation, request.end * request.pause)
            async for item in way(request):
                reading.item(item)
            assert reading.count == request.end, f"a stream ended after {reading.count} items"

    async def call_by_name() -> None:
        for number in range(60):
            await asyncio.sleep(0.2 * simulation.random.random())
            processes = simulation.kit.processes
            if simulation.troubles and simulation.random.random() < 0.8:
                processes = list(simulation.troubles[-1].processes)
            known = [one for process in processes for one in process.served]
            one, key = known[int(simulation.random.random() * len(known))], f"named {number}"
            bought = 1
            try:
                with call_options(instance=one.id, retries=0):
                    assert await client.buy(key) == key
            except DynbusError as error:
                bought = int(error.started)
            assert effects[key] == bought, f"{key} was bought {effects[key]} times, not {bought}"

    async def call_plainly() -> None:
        answers = asyncio.Queue[Message]()
        data = simulation.kit.caller.bus.data
        data.subscribe("_INBOX.plain", answers.put_nowait)
        for number in range(10):
            key = f"plain {number}"
            data.publish("simulated.Leaver.buy", f'"{key}"'.encode(), reply="_INBOX.plain")
            answer = await asyncio.wait_for(answers.get(), GONE)
            if not answer.found_nobody:
                assert (answer.data, answer.headers) == (f'"{key}"'.encode(), b""), f"{answer}"
            await asyncio.sleep(0.2)

    async with anyio.create_task_group() as callers:
        callers.start_soon(call_by_name)
        callers.start_soon(call_plainly)
        for caller in range(2):
            callers.start_soon(buy, caller)
        for caller in range(6):
            callers.start_soon(read, caller)
    await rest(simulation, BREATH)
    assert not late, f"of instances that leave: {late}"
