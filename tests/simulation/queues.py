"""The story of calls of unequal clients that wait for few places, with unequal deadlines."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import ClassVar

import anyio
import msgspec

from dynbus import Actor, DeadlineExceeded, Overloaded, call_options, handler
from dynbus.testing import Simulation

from .rest import rest

CALLERS = (6, 2, 1)
"""Of each client."""
PLACES = 2
QUEUE = 5
TIMEOUT = 60.0
TOOK_PLACE = "took this one's place"
REST = 3.0
"""Seconds after which heartbeats have said enough: that a call is left they may say before its
request comes, and no more then."""
WAYS = 0.05
"""Seconds that a message and what it sets off take at most."""


class Errand(msgspec.Struct, frozen=True):
    """A request that takes `seconds`."""

    name: str
    seconds: float


class Sent(msgspec.Struct):
    """A call as its caller knows it, and when it began."""

    client: int
    sent: float
    began: float = math.inf
    over: float = math.inf

    def waited(self, at: float) -> bool:
        """True if it was in the queue then, whatever time messages took."""
        return self.sent + WAYS < at < min(self.began, self.over - WAYS)


class Line:
    """The calls of one handler, which begin in the right order."""

    def __init__(self, simulation: Simulation, places: int) -> None:
        self.calls: dict[str, Sent] = {}
        # And whether they had waited for a place that another client's call took.
        self.refused: list[tuple[Sent, bool]] = []
        self._simulation = simulation
        self._places = places
        self._running = 0
        self._free_since = 0.0

    @contextmanager
    def place(self, name: str) -> Generator[None]:
        """A call runs in the block."""
        call = self.calls[name]
        call.began = self._simulation.now
        assert self._running < self._places, f"{name} runs beside {self._running}"
        self._running += 1
        waited = call.began - max(call.sent, self._free_since)
        assert waited < WAYS, f"{name} waited for {waited:.2f} s beside a free place"
        try:
            yield
        finally:
            if self._running == self._places:
                self._free_since = self._simulation.now
            self._running -= 1

    def beside(self, call: Sent) -> int:
        """Calls that may have been in the queue while another one was on its way."""
        others = (one for one in self.calls.values() if one is not call)
        return sum(min(one.began, one.over) > call.sent - WAYS for one in others)

    def _check_refused(self, call: Sent, *, displaced: bool) -> None:
        """See whether a call was refused for the queue of all, and not for its client's part."""
        now, others = call.over, Counter[int]()
        for one in self.calls.values():
            others[one.client] += one.waited(call.sent) and one.waited(now)
        own = [one for one in self.calls.values() if one.client == call.client and one is not call]
        if displaced:
            newer = [one for one in own if one.sent > call.sent + WAYS and one.waited(now - WAYS)]
            assert not newer, f"{call} gave its place up, and not {newer}"
        else:
            most = sum(min(one.began, one.over) >= call.sent for one in own) + 1
            assert max(others.values()) <= most, f"{call} was refused, and of clients wait {others}"

    def check(self) -> None:
        """See whether all began in order, now that they are over."""
        for call, displaced in self.refused:
            self._check_refused(call, displaced=displaced)
        turns: dict[int, float] = {}
        began = [call for call in self.calls.values() if call.began < math.inf]
        for call in sorted(began, key=lambda call: call.began):
            waiting = [one for one in self.calls.values() if one.waited(call.began)]
            assert len(waiting) <= QUEUE, f"{waiting} wait"
            if self._places == 1:
                first = [one for one in waiting if one.sent + WAYS < call.sent]
            else:
                turn = turns.get(call.client, 0.0)
                passed = [of for of in range(len(CALLERS)) if turns.get(of, 0.0) < turn]
                first = [one for one in waiting if one.client in passed and one.waited(turn)]
                turns[call.client] = call.began
            assert not first, f"{call} began before {first}"


class Office(Actor, namespace="simulated"):
    """Has few places, and a mailbox."""

    desks: ClassVar[Line]
    mailbox: ClassVar[Line]

    @handler(concurrency=PLACES, queue=QUEUE)
    async def come(self, errand: Errand) -> str:
        with self.desks.place(errand.name):
            await asyncio.sleep(errand.seconds)
        return errand.name

    @handler(concurrency=1, queue=QUEUE)
    async def write(self, errand: Errand) -> str:
        with self.mailbox.place(errand.name):
            await asyncio.sleep(errand.seconds)
        return errand.name


async def queues(simulation: Simulation) -> None:
    """Calls begin as soon as there is a place for them, the clients by turns and those of a mailbox
    in the order of their arrival; none is refused without need: to be told with an empty plan."""
    desks = Office.desks = Line(simulation, PLACES)
    mailbox = Office.mailbox = Line(simulation, 1)
    instance = await simulation.start(Office)
    chance = simulation.random

    async def call(client: Office, of: int, caller: int) -> None:
        for number in range(10):
            await asyncio.sleep(0.4 * chance.random())
            line, way = ((desks, client.come), (mailbox, client.write))[number % 2]
            name, seconds = f"{of}-{caller}-{number}", 0.05 + 0.5 * chance.random() ** 2
            timeout = TIMEOUT if chance.random() < 0.5 else 0.1 + 1.5 * chance.random()
            patience = TIMEOUT if chance.random() < 0.85 else chance.random() ** 4
            sent, began = Sent(of, simulation.now), True
            line.calls[name] = sent
            try:
                with anyio.move_on_after(patience), call_options(timeout=timeout):
                    assert await way(Errand(name, seconds)) == name
            except DeadlineExceeded as error:
                began = error.started
                assert simulation.now > sent.sent + timeout - WAYS, f"{name} was not late"
            except Overloaded as error:
                began, beside = error.started, line.beside(sent)
                assert timeout < TIMEOUT or beside >= QUEUE, f"{name} was refused beside {beside}"
                if timeout == TIMEOUT:
                    line.refused.append((sent, TOOK_PLACE in error.message))
            assert began or sent.began == math.inf, f"{name} did begin"
            sent.over = simulation.now

    async with anyio.create_task_group() as callers:
        for of, number in enumerate(CALLERS):
            runtime = await simulation.kit.runtime()
            await runtime.discovery.wait_for_instance(instance.name)
            for caller in range(number):
                callers.start_soon(call, runtime.client(Office), of, caller)
    desks.check()
    mailbox.check()
    await rest(simulation, REST)
