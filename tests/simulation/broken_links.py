"""The story of streams and large calls over links that break, lose and delay for a moment."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator
from typing import ClassVar

import anyio
import msgspec

from dynbus import Actor, handler
from dynbus.bus.memory.bus import MemoryConnection
from dynbus.bus.protocol.wire import Cancel, Heartbeat, Open, decode_batch
from dynbus.bus.transport import Message
from dynbus.testing import Simulation

from .moves import new_relay, relayed
from .rest import rest

INSTANCES = 2
MAX_PAYLOAD = 4096
LARGEST = 10_000
"""Characters of an item, which is sent in parts beyond those of a message."""
MOST_AWAY = 0.4
"""Seconds for which a link is away."""
AT_ONCE = 0.3
"""Seconds after which what was lost is there once the links are back, before any heartbeat."""
ASKED = 2.0
"""Seconds after which it is there where questions for it are lost, too."""
ANSWERED = 5.0
"""Seconds in which a call is answered of which requests, parts and results are lost."""
SHARE_LOST = 0.2
STREAM_WINDOW = 30_000
"""Bytes, of three large items or so."""
REST = 4.0


class Wanted(msgspec.Struct, frozen=True):
    """Asks for `items` items, `pause` seconds apart, some of them large."""

    name: str
    items: int
    pause: float
    large: int = 0

    def item(self, number: int) -> str:
        return f"{self.name} {number} ".ljust(self.large if number % 2 else 0, "x")


class Source(Actor, namespace="simulated"):
    """Gives items, and notes when."""

    simulation: ClassVar[Simulation]
    given: ClassVar[defaultdict[str, list[float]]]
    taken: ClassVar[Counter[str]]

    @handler
    async def stream(self, wanted: Wanted) -> AsyncGenerator[str, None]:
        for number in range(wanted.items):
            await asyncio.sleep(wanted.pause)
            self.given[wanted.name].append(self.simulation.now)
            yield wanted.item(number)

    @handler
    async def take(self, text: str) -> str:
        self.taken[text] += 1
        await asyncio.sleep(0.05)
        return text


class Disturbed:
    """The disturbance of the links, and since when there is none.

    Args:
        loses: whether messages are lost and late; otherwise links break.
    """

    def __init__(self, simulation: Simulation, *, loses: bool) -> None:
        self.since = 0.0
        self.is_over = False
        self._simulation = simulation
        self._chance = simulation.random
        self._disturb = self._lose if loses else self._cut

    async def run(self) -> None:
        while not self.is_over:
            await asyncio.sleep(0.2 + 1.2 * self._chance.random())
            await self._disturb()
            self.since = self._simulation.now

    async def _cut(self) -> None:
        """Links break as a request or a result reaches the server, one or all, and are back one
        after the other."""
        links = [link for one in self._simulation.kit.alive() for link in one.connections]
        if self._chance.random() < 0.5:
            links = [links[int(self._chance.random() * len(links))]]
        broken = asyncio.Event()

        def cut(message: Message | None) -> None:
            if not broken.is_set() and (message is None or _is_of_calls(message)):
                broken.set()
                self.since = math.inf
                for link in links:
                    link.disconnect()

        observers = self._simulation.kit.bus.observers
        observers.append(cut)
        with anyio.move_on_after(MOST_AWAY):
            await broken.wait()
        observers.remove(cut)
        cut(None)
        async with anyio.create_task_group() as tasks:
            for link in links:
                tasks.start_soon(self._back, link)

    async def _back(self, link: MemoryConnection) -> None:
        await asyncio.sleep(MOST_AWAY * self._chance.random())
        link.reconnect()

    async def _lose(self) -> None:
        """Results are lost now and then, and what is said to go on with them, while a link is
        slow."""
        self.since = math.inf
        processes = list(self._simulation.kit.alive())
        link = processes[int(self._chance.random() * len(processes))].data
        before, link.way = link.way, lambda: 0.2 * self._chance.random()
        with self._simulation.kit.bus.drop(">", when=self._is_lost):
            await asyncio.sleep(2 * MOST_AWAY * self._chance.random())
        link.way = before

    def _is_lost(self, message: Message) -> bool:
        batch = None if message.headers else decode_batch(message.data)
        return (
            batch is not None
            and not any(isinstance(frame, Open | Heartbeat | Cancel) for frame in batch.frames)
            and self._chance.random() < SHARE_LOST
        )


def _is_of_calls(message: Message) -> bool:
    """True if a message is a request, a part of one, or has results."""
    subject = message.subject
    return not subject.startswith("$") and "ctl." not in subject


async def broken_links(simulation: Simulation) -> None:
    """Links that are away for a moment lose nothing of streams and double nothing, and what was
    lost comes as soon as they are back; calls are carried out once: to be told with an empty
    plan."""
    chance = simulation.random
    Source.simulation, given, taken = (
        simulation,
        defaultdict[str, list[float]](list),
        Counter[str](),
    )
    Source.given, Source.taken = given, taken
    for _ in range(INSTANCES):
        await simulation.start(Source)
    simulation.kit.bus.max_payload = MAX_PAYLOAD
    client = simulation.client(Source, wait=5.0, timeout=60.0, retries=20)
    plain = simulation.kit.client(Source, wait=5.0, timeout=60.0, retries=20)
    loses, relay = chance.random() < 0.5, new_relay()
    disturbed = Disturbed(simulation, loses=loses)
    most = ASKED if loses else AT_ONCE
    # Where all are slow, nothing comes soon behind what was lost.
    kinds = ((0,), (1,), (2,), (0, 1, 2))[int(4 * chance.random())]

    async def read(caller: int) -> None:
        wanted = (
            Wanted(f"fast {caller}", 200, 0.02),
            Wanted(f"slow {caller}", 6, 1.2),
            Wanted(f"large {caller}", 20, 0.1, LARGEST),
        )[kinds[caller % len(kinds)]]
        count = 0

        def in_time() -> None:
            late = simulation.now - max(given[wanted.name][count - 1], disturbed.since)
            assert late < most, f"what follows {count} items of {wanted} was {late:.2f} s late"

        stream = client.stream(wanted)
        if caller >= len(kinds):
            stream = relayed(relay, plain.stream(wanted))
        async for item in stream:
            assert item == wanted.item(count), f"after {count} items of {wanted} came {item[:20]}"
            count += 1
            in_time()
        assert count == wanted.items, f"{wanted} ended after {count} items"
        in_time()

    async def call(caller: int) -> None:
        for number in range(20):
            text = f"{caller} {number} ".ljust(LARGEST * (number % 2), "x")
            began = simulation.now
            assert await client.take(text) == text
            took = simulation.now - began
            assert took < ANSWERED, f"call {number} of {caller} took {took:.2f} s"
            await asyncio.sleep(0.3 * chance.random())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(disturbed.run)
        async with anyio.create_task_group() as callers:
            for caller in range(6):
                callers.start_soon(read, caller)
            for caller in range(2):
                callers.start_soon(call, caller)
        disturbed.is_over = True
    assert set(taken.values()) == {1}, f"taken were {taken}"
    await rest(simulation, REST)
