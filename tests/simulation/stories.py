"""The stories that simulations tell, each with what has to hold whatever goes wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import suppress
from typing import ClassVar, TypeVar

import anyio
import msgspec

from dynbus import (
    Actor,
    DynbusError,
    StreamLost,
    call_options,
    context,
    depends,
    handler,
)
from dynbus.testing import Kind, Simulation

from .rest import known, rest

T = TypeVar("T")

CALLERS = 3
BURST = 3
SLOW = " slowly"
INSTANCES = 3
MOVES = 100
"""As often as a stream may move: faults hit the same one again and again."""


class Items(msgspec.Struct, frozen=True):
    """A request for items `start` to `end`, three at a time, `pause` seconds apart in the mean."""

    start: int
    end: int
    pause: float

    async def come(self) -> AsyncGenerator[int, None]:
        for number in range(self.start, self.end):
            if number % BURST == 0:
                await asyncio.sleep(BURST * self.pause)
            yield number


class Shop(Actor, namespace="simulated"):
    """Answers by what was asked alone, and notes each effect."""

    effects: ClassVar[Counter[str]]

    @handler(idempotent=True)
    async def read(self, number: int) -> int:
        await asyncio.sleep(0.05)
        return number + 1

    @handler
    async def buy(self, key: str) -> str:
        self.effects[key] += 1
        # Some take long enough to be open when something goes wrong.
        await asyncio.sleep(1.0 if key.endswith(SLOW) else 0.05)
        return key

    @handler(idempotent=True)
    async def note(self, key: str) -> str:
        return await self.buy(key)

    @handler
    async def order(self, key: str) -> str:
        self.effects[key] += 1
        with call_options(instance="nobody"):
            return await self.runtime.client(Shop).buy(f"{key}, elsewhere")

    @handler(timeout=60.0)
    async def rest(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @handler(resume="replay", migration_limit=MOVES)
    async def replayed(self, request: Items) -> AsyncGenerator[int, None]:
        async for number in request.come():
            yield number

    @handler(resume="go_on", migration_limit=MOVES)
    async def resumed(self, request: Items) -> AsyncGenerator[int, None]:
        async for number in request.come():
            yield number

    @handler
    async def listed(self, request: Items) -> AsyncGenerator[int, None]:
        async for number in request.come():
            yield number

    @staticmethod
    def go_on(request: Items, items: Sequence[int]) -> Items | None:
        start = request.start + len(items)
        return msgspec.structs.replace(request, start=start) if start < request.end else None


async def _open_shop(simulation: Simulation) -> Counter[str]:
    Shop.effects = Counter()
    for _ in range(INSTANCES):
        await simulation.start(Shop)
    return Shop.effects


async def calls(simulation: Simulation) -> None:
    """A call that may be repeated has its answer; one that may not has its effect once at most, and
    an error that says that it did not begin is right."""
    effects = await _open_shop(simulation)
    patient = simulation.client(Shop, wait=30.0, retries=30, timeout=90.0)
    plain = simulation.client(Shop, timeout=10.0, retries=3)
    claims: dict[str, bool] = {}

    async def read(caller: int) -> None:
        for number in range(8):
            assert await patient.read(number) == number + 1
            await asyncio.sleep(simulation.random.random())

    async def buy(caller: int) -> None:
        for number in range(12):
            key = f"{caller}-{number}{SLOW * (number % 2)}"
            # What says of a handler's own call that it did not begin says nothing of the handler.
            way = (plain.buy, plain.note, plain.order, plain.buy)[number % 4]
            if way == plain.note:
                key = f"again {key}"
            try:
                assert await way(key) == key
                claims[key] = True
            except DynbusError as error:
                simulation.counts[f"buy: {error.code}"] += 1
                if not error.started:
                    claims[key] = False
            await asyncio.sleep(simulation.random.random())

    async with anyio.create_task_group() as callers:
        for caller in range(CALLERS):
            callers.start_soon(read, caller)
            callers.start_soon(buy, caller)
    instances = await rest(simulation)
    for key, number in effects.items():
        assert number == 1 or key.startswith("again"), f"{key} was bought {number} times"
    for key, happened in claims.items():
        assert bool(effects[key]) == happened, f"{key} was bought {effects[key]} times: {happened}"
    for instance in instances:
        with call_options(instance=instance.id, retries=0):
            assert await plain.buy(f"at last {instance.id}") == f"at last {instance.id}"


STILL = 5.0
"""Seconds for which a stream may stand still once nothing disturbs it any more."""


AT_ONCE = 0.3
"""Seconds within which one goes on that nothing but its server has held up."""


class Reading:
    """The items of a stream as they come: in order, each once, and none too late."""

    def __init__(
        self,
        simulation: Simulation,
        pause: float,
        despite: Collection[Kind] = (),
        still: float = STILL,
    ) -> None:
        self.simulation = simulation
        self.count = 0
        self._still = still + BURST * pause
        self._despite = despite
        self._last = simulation.now

    def item(self, item: int) -> None:
        """The next one came."""
        assert item == self.count, f"item {item} came after {self.count} items"
        self.count += 1
        self.in_time()

    def in_time(self) -> None:
        """It is not too late."""
        # One fault after the other may hold it up for longer than one.
        began = [one.began for one in self.simulation.troubles if one.fault.kind in self._despite]
        last = max([self._last, *began])
        still = self.simulation.undisturbed(last, despite=self._despite)
        assert still <= self._still, f"a stream stood still for {still:.1f} s, undisturbed"
        self._last = self.simulation.now


async def streams(
    simulation: Simulation, despite: Collection[Kind] = (), still: float = STILL
) -> None:
    """A stream that says how it goes on has all of its items, once and in order; any other has its
    first ones, and ends with `StreamLost` where it has not all. None stands still."""
    await _open_shop(simulation)
    client = simulation.client(Shop, wait=30.0, retries=30, timeout=120.0)

    async def whole(caller: int) -> None:
        way, replays = ((client.replayed, True), (client.resumed, False))[caller % 2]
        pause = 0.02 + 0.3 * simulation.random.random()
        # What is replayed is computed again.
        reading = Reading(simulation, 30 * pause if replays else pause, despite, still)
        async for item in way(Items(0, 30, pause)):
            reading.item(item)
        assert reading.count == 30, f"a stream ended after {reading.count} of 30 items"

    async def first_ones(caller: int) -> None:
        for _ in range(3):
            reading = Reading(simulation, 0.1, still=still)
            try:
                async for item in client.listed(Items(0, 20, 0.1)):
                    reading.item(item)
                assert reading.count == 20, f"a stream ended well after {reading.count} items"
            except StreamLost:
                simulation.counts["listed: StreamLost"] += 1
            reading.in_time()

    async with anyio.create_task_group() as callers:
        for caller in range(2 * CALLERS):
            callers.start_soon(whole, caller)
        for caller in range(CALLERS):
            callers.start_soon(first_ones, caller)
    await rest(simulation)


async def split_streams(simulation: Simulation) -> None:
    """Streams that go on do so while servers have lost each other: to be told with `Kind.SPLIT`."""
    await streams(simulation, despite={Kind.SPLIT})


async def interrupted_streams(simulation: Simulation) -> None:
    """Streams go on as soon as the server is back, before any heartbeat: to be told with
    `Kind.SERVER`."""
    await streams(simulation, still=AT_ONCE)


MOST_STILL = 0.8
MOST_CUT_OFF = 0.5
"""Seconds of a hiccup, with which no heartbeat is due for as long as it takes."""
MOST_DEAF = 3.0
"""Seconds for which nothing comes over a control link: what is sent over it arrives."""
SETTLED = 5.0
"""Seconds after which all who are there may be chosen again, where none was away for long."""


async def light_load(simulation: Simulation, slow: str = "") -> None:
    """Without faults no call fails, and nothing is logged: to be told with an empty plan."""
    effects = await _open_shop(simulation)
    client = simulation.client(Shop)

    async def buy(caller: int) -> None:
        for number in range(30):
            key = f"{caller}-{number}{slow * (number % 2)}"
            assert await client.buy(key) == key
            await asyncio.sleep(0.3 * simulation.random.random())

    async with anyio.create_task_group() as callers:
        for caller in range(CALLERS):
            callers.start_soon(buy, caller)
    assert set(effects.values()) == {1}


MANY = 300
SMALL_PAYLOAD = 800
"""Bytes of a message, with some of the calls in a heartbeat."""


async def many_calls(simulation: Simulation) -> None:
    """No call fails where several messages are needed to list them: to be told with an empty
    plan."""
    await _open_shop(simulation)
    simulation.kit.bus.max_payload = SMALL_PAYLOAD
    client = simulation.client(Shop)

    async def rest(number: int) -> None:
        seconds = 1.0 + 3.0 * simulation.random.random()
        assert await client.rest(seconds) == seconds

    async with anyio.create_task_group() as callers:
        for number in range(MANY):
            callers.start_soon(rest, number)


async def interrupted_calls(simulation: Simulation) -> None:
    """No call fails, whether it is open or begins while the server is away: to be told with
    `Kind.SERVER`."""
    await light_load(simulation, SLOW)


async def hiccups(simulation: Simulation) -> None:
    """No call fails where a process now and then stands still, is cut off or does not hear others,
    for less time than it takes to count as dead: to be told with an empty plan."""
    effects = await _open_shop(simulation)
    client = simulation.client(Shop)
    chance = simulation.random

    done = asyncio.Event()

    async def disturb() -> None:
        while not done.is_set():
            await asyncio.sleep(1.0 + 2.0 * chance.random())
            processes = list(simulation.kit.alive())
            one, way = processes[int(chance.random() * len(processes))], chance.random()
            if way < 0.3 and one.instances:
                one.freeze()
                await asyncio.sleep(MOST_STILL * chance.random())
                one.thaw()
            elif way < 0.6:
                one.control.deafen(True)
                await asyncio.sleep(MOST_DEAF * chance.random())
                one.control.deafen(False)
            else:
                for connection in one.connections:
                    connection.disconnect()
                await asyncio.sleep(MOST_CUT_OFF * chance.random())
                for connection in one.connections:
                    connection.reconnect()

    async def call(caller: int) -> None:
        for number in range(5):
            seconds, key = 1.0 + 3.0 * chance.random(), f"{caller}-{number}{SLOW}"
            assert await client.rest(seconds) == seconds
            assert await client.buy(key) == key

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(disturb)
        async with anyio.create_task_group() as callers:
            for caller in range(CALLERS):
                callers.start_soon(call, caller)
        done.set()
    await rest(simulation, SETTLED)
    assert set(effects.values()) == {1}


async def returns(simulation: Simulation) -> None:
    """Who was away for less time than a lease may be chosen again soon, and answers: to be told
    without faults that end processes."""
    await _open_shop(simulation)
    client = simulation.client(Shop, wait=20.0, retries=30, timeout=40.0)

    async def read(caller: int) -> None:
        for number in range(25):
            assert await client.read(number) == number + 1
            await asyncio.sleep(0.6 * simulation.random.random())

    async with anyio.create_task_group() as callers:
        for caller in range(CALLERS):
            callers.start_soon(read, caller)
    await simulation.over()
    await asyncio.sleep(SETTLED)
    for instance in known(simulation):
        with call_options(instance=instance.id, retries=0):
            assert await client.read(1) == 2


NOTICED = 2.5
"""Seconds after which callers know of an instance that it stands still."""


async def avoided(simulation: Simulation) -> None:
    """Calls keep their pace while an instance stands still that was found to do so, and go there
    again when it does not any more: to be told with an empty plan."""
    await _open_shop(simulation)
    client = simulation.client(Shop)
    process = next(one for one in simulation.kit.alive() if one.instances)
    slow: list[str] = []

    async def read(caller: int) -> None:
        for number in range(50):
            began = simulation.now
            assert await client.read(number) == number + 1
            took = simulation.now - began
            if took > NOTICED or (
                took > 1.0 and frozen_at + NOTICED < began < frozen_at + 3 * NOTICED
            ):
                slow.append(f"{took:.2f} s, from {began - frozen_at:.2f} s on")
            await asyncio.sleep(0.3 * simulation.random.random())

    frozen_at = simulation.now + simulation.random.random()
    async with anyio.create_task_group() as callers:
        for caller in range(CALLERS):
            callers.start_soon(read, caller)
        await asyncio.sleep(frozen_at - simulation.now)
        process.freeze()
        await asyncio.sleep(3 * NOTICED)
        process.thaw()
        await asyncio.sleep(SETTLED)
        known(simulation)
    assert not slow, f"calls beside an instance that stands still took {slow}"


async def discovery(simulation: Simulation) -> None:
    """When all is healed, the caller knows the instances that live, and no others."""
    await _open_shop(simulation)
    await simulation.over()
    await asyncio.sleep(40.0)
    alive = {instance.id for one in simulation.kit.alive() for instance in one.instances}
    ids = set(simulation.kit.caller.instance_ids(Shop))
    assert ids == alive, f"known are {sorted(ids)}, alive are {sorted(alive)}"
    known(simulation)
    client = simulation.client(Shop, timeout=5.0)
    with call_options(retries=0):
        for number in range(2 * INSTANCES):
            assert await client.read(number) == number + 1


class Inner(Actor, namespace="simulated"):
    """The innermost of three."""

    @handler(resume="replay", migration_limit=1)
    async def count(self, request: Items) -> AsyncGenerator[int, None]:
        for number in range(request.start, request.end):
            await asyncio.sleep(request.pause)
            yield number


class Middle(Actor, namespace="simulated"):
    """Counts by another, and notes where each of its streams began."""

    inner = depends(Inner)
    begun: ClassVar[dict[str, list[str]]]

    @handler(resume="replay", migration_limit=MOVES)
    async def count(self, request: Items) -> AsyncGenerator[int, None]:
        self.begun.setdefault(context().id, []).append(self.instance_id)
        async for number in self.inner.count(request):
            yield number


async def levels(simulation: Simulation) -> None:
    """A stream moves for the loss of its own instance alone, and not for that of one which its
    handler called: to be told with `Kind.KILL`."""
    begun = Middle.begun = {}
    for actor in (Inner, Middle):
        for _ in range(INSTANCES):
            await simulation.start(actor)
    client = simulation.client(Middle, wait=30.0, timeout=60.0)

    async def read(caller: int) -> None:
        with suppress(StreamLost, DynbusError), call_options(request_id=f"stream-{caller}"):
            reading = Reading(simulation, 60.0)
            async for item in client.count(Items(0, 30, 0.2)):
                reading.item(item)

    async with anyio.create_task_group() as callers:
        for caller in range(CALLERS):
            callers.start_soon(read, caller)
    killed = {
        instance.id
        for one in simulation.troubles
        for process in one.processes
        for instance in process.served
    }
    for request, instances in begun.items():
        left = set(instances[:-1]) - killed
        assert not left, f"{request} moved away from {sorted(left)}, which nothing happened to"


LEFT_AFTER = 4.0
"""Seconds after which all are connected by other links than the one that fell silent."""


async def long_calls(simulation: Simulation) -> None:
    """A call that begins after a link was left ends well, whatever the link still delivers: to be
    told with `Kind.LATE`."""
    await _open_shop(simulation)
    client = simulation.client(Shop, wait=10.0, timeout=60.0)
    failures: list[tuple[float, str]] = []

    async def rest(caller: int) -> None:
        for number in range(6):
            began, seconds = simulation.now, 0.5 + 4.0 * simulation.random.random()
            try:
                assert await client.rest(seconds) == seconds
            except DynbusError as error:
                simulation.counts[f"rest: {error.code}"] += 1
                failures.append((began, f"call {number} of {caller}: {error}"))

    async with anyio.create_task_group() as callers:
        for caller in range(2 * CALLERS):
            callers.start_soon(rest, caller)
    # All that a link does to calls that began before it was left, or while it was.
    begun = [one.began for one in simulation.troubles]
    in_peace = [text for began, text in failures if all(at + LEFT_AFTER < began for at in begun)]
    assert not in_peace, f"failed in peace: {in_peace}"
