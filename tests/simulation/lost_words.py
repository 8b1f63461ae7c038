"""The story of calls that are left while their requests are late, and of words about that which are
lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Final

import anyio
import msgspec

from dynbus import Actor, DynbusError, call_options, context, depends, handler
from dynbus.bus.protocol.wire import Cancel, Open, decode_batch
from dynbus.bus.transport import Message
from dynbus.testing import Simulation

from .rest import rest

CALLERS = 6
LATE = 1.5
"""Seconds by which requests and results of an instance are late at most."""
SAID = 0.2
"""Seconds in which an instance hears that a call was left, where that is not lost."""
BEAT = 0.5
KILLED = 1.0
"""Seconds after which a call is killed that was left and goes on."""
UNLISTED = 2.0 + 2 * 3 * BEAT
"""Seconds for which a call goes on that heartbeats do not list: they give a new one time, and every
second one at least is not lost."""
REST = 4.0
LOST: Final = ((), (Cancel,), (Cancel, Open))
"""The words that are lost: each seed has one of these."""


class Task(msgspec.Struct, frozen=True):
    """A request that takes `seconds`."""

    name: str
    seconds: float


class Worker(Actor, namespace="simulated"):
    """Works on, in parts until it is asked to stop, and notes what it should not have done."""

    simulation: ClassVar[Simulation]
    left: ClassVar[dict[str, float]]
    lost: ClassVar[tuple[type, ...]]
    wrong: ClassVar[list[str]]

    @handler
    async def work(self, task: Task) -> str:
        if Open not in self.lost:
            self._check(task.name, "began", self._said)
        await self._work(task)
        return task.name

    @handler
    async def part(self, task: Task) -> str:
        # What kills it comes when its caller is killed; what asks it to stop comes at once.
        if Open not in self.lost:
            self._check(task.name, "began", KILLED + 2 * self._said)
        await self._work(task, heeds=True)
        return task.name

    @property
    def _said(self) -> float:
        return SAID + 2 * BEAT * bool(self.lost)

    def _check(self, name: str, what: str, most: float, since: float = 0.0) -> None:
        now = self.simulation.now
        over = now - max(since, self.left.get(name, now))
        if over > most:
            self.wrong.append(f"{name} {what} {over:.2f} s after it was left")

    async def _work(self, task: Task, *, heeds: bool = False) -> None:
        began = self.simulation.now
        most = UNLISTED if Open in self.lost else KILLED + 2 * self._said
        if heeds and not self.lost:
            most = 2 * SAID
        while self.simulation.now < began + task.seconds and not (heeds and context().is_stopped()):
            await asyncio.sleep(0.1)
            self._check(task.name, "went on", most, began)


class Chief(Actor, namespace="simulated"):
    """Has others work."""

    worker = depends(Worker)

    @handler
    async def have_done(self, task: Task) -> str:
        # The second one may begin when it was asked to stop.
        half = msgspec.structs.replace(task, seconds=task.seconds / 2)
        await self.worker.part(half)
        return await self.worker.part(half)


def _losing(lost: tuple[type, ...], chance: Callable[[], float]) -> Callable[[Message], bool]:
    """The draw that loses every second message which says that calls were left or are over, but no
    two heartbeats one after the other."""
    last: dict[str, int] = {}

    def lose(message: Message) -> bool:
        batch = decode_batch(message.data)
        for frame in batch.frames if batch is not None else ():
            if not isinstance(frame, lost):
                continue
            if isinstance(frame, Cancel):
                return chance() < 0.5
            if isinstance(frame, Open) and frame.done and last.get(message.reply) != frame.beat - 1:
                last[message.reply] = frame.beat
                return chance() < 0.5
        return False

    return lose


async def lost_words(simulation: Simulation) -> None:
    """A call that is left before it comes does not begin, and one that runs ends soon, with what it
    called, however late its request was and whatever word of it is lost: to be told with an empty
    plan."""
    chance = simulation.random
    Worker.simulation, Worker.lost = simulation, LOST[int(len(LOST) * chance.random())]
    wrong = Worker.wrong = []
    left = Worker.left = dict[str, float]()
    for _ in range(2):
        instance = await simulation.start(Worker)
        process = simulation.kit.process_of(instance.actor.runtime)
        process.data.way = lambda: LATE * chance.random() ** 2
    await simulation.start(Chief)
    worker = simulation.client(Worker, timeout=30.0)
    chief = simulation.client(Chief, timeout=30.0)

    async def call(caller: int) -> None:
        for number in range(6):
            task = Task(f"{caller}-{number}", 20.0 * chance.random() ** 3)
            method = (worker.work, chief.have_done)[(caller + number) % 2]
            patience = 2.5 * chance.random() ** 2
            once = call_options(retries=0)
            with suppress(DynbusError), anyio.move_on_after(patience) as scope, once:
                assert await method(task) == task.name
            if scope.cancelled_caught:
                left[task.name] = simulation.now
                await asyncio.sleep(chance.random())

    with simulation.kit.bus.drop("simulated.*._ctl.*", when=_losing(Worker.lost, chance.random)):
        async with anyio.create_task_group() as callers:
            for caller in range(CALLERS):
                callers.start_soon(call, caller)
    await rest(simulation, REST)
    assert not wrong, f"calls that were left: {wrong}"


class Seller(Actor, namespace="simulated"):
    """Notes each effect."""

    sold: ClassVar[Counter[str]]

    @handler
    async def sell(self, key: str) -> str:
        self.sold[key] += 1
        await asyncio.sleep(1.5 if key.endswith("0") else 0.2)
        return key


async def late_requests(simulation: Simulation) -> None:
    """A call that its instance took for lost, or forgot since it took its caller for dead, has no
    second effect, whatever word of it is lost: to be told with an empty plan."""
    chance, sold = simulation.random, Counter[str]()
    Seller.sold = sold
    for _ in range(2):
        await simulation.start(Seller)
    client = simulation.client(Seller, wait=10.0, timeout=30.0)
    own = simulation.kit.process_of(simulation.kit.caller)

    async def call(caller: int) -> None:
        for number in range(10):
            key, happened = f"{caller}-{number}", True
            try:
                assert await client.sell(key) == key
            except DynbusError as error:
                simulation.counts[f"sell: {error.code}"] += 1
                happened = error.started
            assert sold[key] == 1 or not happened, f"{key} was sold {sold[key]} times"
            await asyncio.sleep(0.3 * chance.random())

    with simulation.kit.bus.drop("simulated.*._ctl.*", when=_losing((Open,), chance.random)):
        async with anyio.create_task_group() as callers:
            for caller in range(CALLERS):
                callers.start_soon(call, caller)
            for _ in range(2):
                await asyncio.sleep(1.0 + chance.random())
                if chance.random() < 0.5:
                    silence = simulation.kit.bus.partition(
                        own.data, notice_after=0.9 + 0.6 * chance.random(), arrives_late=True
                    )
                    await asyncio.sleep(2.0 + 2.0 * chance.random())
                    silence.heal()
                else:
                    for link in own.connections:
                        link.disconnect()
                    await asyncio.sleep(1.0 + 2.0 * chance.random())
                    for link in own.connections:
                        link.reconnect()
    await asyncio.sleep(SAID)
    assert set(sold.values()) == {1}, f"sold were {sold}"
