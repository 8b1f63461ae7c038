"""The stories that simulations tell, each with what has to hold whatever goes wrong."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import ClassVar, TypeVar

import anyio
import msgspec

from dynbus import (
    Actor,
    DynbusError,
    Overloaded,
    StreamLost,
    Topic,
    Unavailable,
    call_options,
    context,
    depends,
    handler,
    signal,
    sleep_until,
    step,
    subscribe,
)
from dynbus.testing import Kind, Simulation

from .rest import rest

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
    plain = simulation.client(Shop, timeout=10.0)
    claims: dict[str, bool] = {}

    async def read(caller: int) -> None:
        for number in range(8):
            assert await patient.read(number) == number + 1
            await asyncio.sleep(simulation.random.random())

    async def buy(caller: int) -> None:
        for number in range(12):
            key = f"{caller}-{number}{SLOW * (number % 2)}"
            try:
                assert await plain.buy(key) == key
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
        assert number == 1, f"{key} was bought {number} times"
    for key, happened in claims.items():
        assert effects[key] == happened, f"{key} was bought {effects[key]} times: {happened}"
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


ACK_WAIT = 5.0


async def interrupted_streams(simulation: Simulation) -> None:
    """Streams go on as soon as the server is back, before any heartbeat: to be told with
    `Kind.SERVER`."""
    await streams(simulation, still=AT_ONCE)


class Order(msgspec.Struct, frozen=True):
    number: int


class Billing(Actor, namespace="simulated"):
    """Does jobs, and notes each try and the receipts that its step came to."""

    tries: ClassVar[Counter[int]]
    charges: ClassVar[Counter[int]]
    receipts: ClassVar[defaultdict[int, set[str]]]

    @handler(durable=True, tries=20, backoff=0.5, ack_wait=ACK_WAIT)
    async def bill(self, order: Order) -> str:
        self.tries[order.number] += 1
        receipt = await step("charge", self.charge, order.number)
        self.receipts[order.number].add(receipt)
        # The first one takes longer than the server waits for a word of it.
        await asyncio.sleep(0.8 if order.number else 2.5 * ACK_WAIT)
        return f"{order.number} {self.tries[order.number]}"

    async def charge(self, number: int) -> str:
        self.charges[number] += 1
        receipt = f"receipt {self.charges[number]}"
        await asyncio.sleep(0.2)
        return receipt

    @handler(durable=True, tries=20, backoff=0.5, ack_wait=ACK_WAIT)
    async def hear(self, last: int) -> list[int]:
        heard = [-1]
        while heard[-1] != last:
            heard.append(await signal("said", int))
        await sleep_until(timedelta(seconds=7.0))
        return heard[1:]


async def repeated(simulation: Simulation, send: Callable[[], Awaitable[T]]) -> T:
    """Send until it is confirmed."""
    while True:
        try:
            return await send()
        except (Unavailable, Overloaded):
            simulation.counts["repeated"] += 1
            await asyncio.sleep(0.5)


async def jobs(simulation: Simulation) -> None:
    """A job that was submitted is done, and has one result, whoever asks for it how often; a step
    that is finished is not begun again, so that all tries go on from one receipt. Where nothing
    goes wrong there is one try."""
    tries, charges = Counter[int](), Counter[int]()
    Billing.tries, Billing.charges, Billing.receipts = tries, charges, defaultdict(set)
    for _ in range(INSTANCES):
        await simulation.start(Billing)
    client = simulation.client(Billing)

    async def submit(number: int) -> None:
        await asyncio.sleep(4.0 * simulation.random.random())
        key = f"order-{number}"
        submit = partial(client.bill.submit, Order(number), idempotency_key=key)
        job = await repeated(simulation, submit)
        result = await job.result(timeout=300.0)
        assert result.partition(" ")[0] == str(number), f"job {number} has the result {result!r}"
        await asyncio.sleep(10.0 * simulation.random.random())
        # Its key is known, and begins nothing.
        again = await (await repeated(simulation, submit)).result(timeout=300.0)
        assert again == result, f"job {number} has the results {result!r} and {again!r}"

    async with anyio.create_task_group() as submitters:
        for number in range(8):
            submitters.start_soon(submit, number)
    for number, receipts in Billing.receipts.items():
        assert len(receipts) == 1, f"job {number} went on from {sorted(receipts)}"
    if not simulation.troubles:
        assert tries.total() == 8, f"tries beyond the first, and nothing went wrong: {tries}"
    simulation.counts["tries beyond the first"] += tries.total() - 8
    simulation.counts["steps begun again"] += charges.total() - 8


async def signals(simulation: Simulation) -> None:
    """A job that waits has each signal, in the order in which they were sent, and goes on in time;
    one of which the sender does not know whether it arrived may come again where it is repeated."""
    for _ in range(INSTANCES):
        await simulation.start(Billing)
    client = simulation.client(Billing)

    async def say(number: int) -> None:
        key = f"hear-{number}"
        job = await repeated(simulation, partial(client.hear.submit, 3, idempotency_key=key))
        sent = Counter[int]()

        async def send(value: int) -> None:
            sent[value] += 1
            await job.signal("said", value)

        for value in range(4):
            await asyncio.sleep(10.0 * simulation.random.random() ** 2)
            await repeated(simulation, partial(send, value))
        heard = await job.result(timeout=300.0)
        assert heard == sorted(heard), f"heard were {heard}"
        assert set(heard) == set(sent), f"{sent} were heard as {heard}"
        assert all(heard.count(value) <= sent[value] for value in sent), f"{sent}: {heard}"
        simulation.counts["signals heard again"] += len(heard) - len(sent)

    async with anyio.create_task_group() as speakers:
        for number in range(4):
            speakers.start_soon(say, number)


class Closed(msgspec.Struct, frozen=True):
    number: int


EVENTS = 10
closed = Topic("closed", Closed, namespace="simulated", retain="1h")


class Archive(Actor, namespace="simulated"):
    """Hears each event once for its group."""

    heard: ClassVar[Counter[int]]
    complete: ClassVar[asyncio.Event]

    @subscribe(closed, group="archive", ack_wait=5.0, backoff=0.5)
    async def keep(self, event: Closed) -> None:
        self.heard[event.number] += 1
        await asyncio.sleep(0.5)
        if len(self.heard) == EVENTS:
            self.complete.set()


async def events(simulation: Simulation) -> None:
    """An event that was published reaches its group."""
    heard = Archive.heard = Counter()
    Archive.complete = asyncio.Event()
    for _ in range(INSTANCES):
        await simulation.start(Archive)

    async def publish(number: int) -> None:
        await asyncio.sleep(6.0 * simulation.random.random())
        event, key, runtime = Closed(number), str(number), simulation.kit.caller
        await repeated(
            simulation, partial(closed.publish, event, runtime=runtime, idempotency_key=key)
        )

    async with anyio.create_task_group() as publishers:
        for number in range(EVENTS):
            publishers.start_soon(publish, number)
    await simulation.over()
    with anyio.move_on_after(200.0):
        await Archive.complete.wait()
    assert sorted(heard) == list(range(EVENTS)), f"the group heard {sorted(heard)}"
    simulation.counts["events heard again"] += heard.total() - EVENTS


MOST_STILL = 0.8
MOST_CUT_OFF = 0.5
"""Seconds of a hiccup, with which no heartbeat is due for as long as it takes."""


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


async def interrupted_calls(simulation: Simulation) -> None:
    """No call fails, whether it is open or begins while the server is away: to be told with
    `Kind.SERVER`."""
    await light_load(simulation, SLOW)


async def hiccups(simulation: Simulation) -> None:
    """No call fails where a process now and then stands still, or is cut off, for less time than it
    takes to count as dead: to be told with an empty plan."""
    chance = simulation.random

    async def disturb() -> None:
        while True:
            await asyncio.sleep(2.0 + 3.0 * chance.random())
            processes = list(simulation.kit.alive())
            one = processes[int(chance.random() * len(processes))]
            if chance.random() < 0.5 and one.instances:
                one.freeze()
                await asyncio.sleep(MOST_STILL * chance.random())
                one.thaw()
            else:
                for connection in one.connections:
                    connection.disconnect()
                await asyncio.sleep(MOST_CUT_OFF * chance.random())
                for connection in one.connections:
                    connection.reconnect()

    disturbing = asyncio.ensure_future(disturb())
    await light_load(simulation, SLOW)
    disturbing.cancel()


async def discovery(simulation: Simulation) -> None:
    """When all is healed, the caller knows the instances that live, and no others."""
    await _open_shop(simulation)
    await simulation.over()
    await asyncio.sleep(40.0)
    alive = {instance.id for one in simulation.kit.alive() for instance in one.instances}
    known = set(simulation.kit.caller.instance_ids(Shop))
    assert known == alive, f"known are {sorted(known)}, alive are {sorted(alive)}"
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
