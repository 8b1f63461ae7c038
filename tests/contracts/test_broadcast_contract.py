"""What broadcasts promise, in memory and over nats-server."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator

import anyio
import pytest
from tests.conditions import eventually

from dynbus import (
    Actor,
    ActorInstance,
    DeadlineExceeded,
    HandlerError,
    Runtime,
    call_options,
    context,
    handler,
    with_options,
)
from dynbus.bus.bus import Bus as Presence
from dynbus.bus.config import BusConfig

from .conftest import Bus

pytestmark = pytest.mark.anyio


class Cache(Actor, abstract=True):
    """A cache whose instances wait for their `gate` before they have reloaded."""

    def __init__(self, breaks: bool = False) -> None:
        self.breaks = breaks
        self.seen: Counter[str] = Counter()
        self.gate = asyncio.Event()

    @handler
    async def reload(self, version: int) -> str:
        if self.breaks:
            raise LookupError("no such version")
        return f"{version} for {context().metadata.get('tenant')} in {context().id}"

    @handler
    async def warm(self, version: int) -> int:
        self.seen["begun"] += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.seen["cancelled"] += 1
            raise
        return version


class Fleet:
    """Caches on the bus under test, and a client of them in a process of its own."""

    def __init__(self, bus: Bus, runtime: Runtime, kind: type[Cache]) -> None:
        self.bus = bus
        self.kind = kind
        self.runtimes = [runtime]
        self.client = runtime.client(kind)
        self.caches: dict[str, Cache] = {}

    async def start(self, name: str, *, breaks: bool = False) -> ActorInstance:
        """Start an instance, and wait until the client knows it."""
        runtime = await new_runtime(self.bus)
        self.runtimes.append(runtime)
        instance = await runtime.start(self.kind, instance_id=name, breaks=breaks)
        assert isinstance(instance.actor, self.kind)
        self.caches[name] = instance.actor
        await self.runtimes[0].discovery.wait_for_instance(instance.name)
        return instance

    def seen(self, what: str) -> dict[str, int]:
        return {name: cache.seen[what] for name, cache in self.caches.items()}


async def new_runtime(bus: Bus) -> Runtime:
    return await Runtime.over(
        await Presence.over(BusConfig(), await bus.connect(), await bus.connect())
    )


@pytest.fixture
async def fleet(bus: Bus) -> AsyncIterator[Fleet]:
    class OwnCache(Cache, namespace=f"n{secrets.token_hex(6)}", component="Cache"):
        pass

    made = Fleet(bus, await new_runtime(bus), OwnCache)
    yield made
    for cache in made.caches.values():
        cache.gate.set()
    for runtime in made.runtimes[::-1]:
        await runtime.close()


async def test_each_instance_gives_its_result_or_its_error(fleet: Fleet) -> None:
    for name in ("a", "b"):
        await fleet.start(name)
    await fleet.start("c", breaks=True)

    with call_options(request_id="r1", metadata={"tenant": "t"}):
        answers = await fleet.client.broadcast.reload(7)

    error = answers.pop("c")
    assert answers == dict.fromkeys(("a", "b"), "7 for t in r1")
    assert isinstance(error, HandlerError)
    assert error.error_type == "LookupError"


async def test_who_joins_while_a_broadcast_runs_is_no_part_of_it(fleet: Fleet) -> None:
    for name in ("a", "b"):
        await fleet.start(name)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(fleet.client.broadcast.warm(version=1))
        await eventually(lambda: fleet.seen("begun") == {"a": 1, "b": 1})
        await fleet.start("c")
        for cache in fleet.caches.values():
            cache.gate.set()

    assert running.result() == {"a": 1, "b": 1}


async def test_who_does_not_answer_by_the_deadline_gives_that_as_its_error(fleet: Fleet) -> None:
    for name in ("a", "b"):
        await fleet.start(name)
    fleet.caches["a"].gate.set()

    answers = await with_options(fleet.client, timeout=0.5).broadcast.warm(1)

    assert answers["a"] == 1
    assert isinstance(answers["b"], DeadlineExceeded)


async def test_a_broadcast_that_is_left_is_cancelled_at_all_instances(fleet: Fleet) -> None:
    for name in ("a", "b"):
        await fleet.start(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.client.broadcast.warm, 1)
        await eventually(lambda: fleet.seen("begun") == {"a": 1, "b": 1})
        tasks.cancel_scope.cancel()

    await eventually(lambda: fleet.seen("cancelled") == {"a": 1, "b": 1})


async def test_an_instance_that_drains_is_no_part_of_a_broadcast(fleet: Fleet) -> None:
    first = await fleet.start("a")
    await fleet.start("b")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(with_options(fleet.client, instance="a").warm(1))
        await eventually(lambda: fleet.seen("begun")["a"] == 1)
        tasks.create_task(first.stop())
        await eventually(lambda: fleet.runtimes[0].instance_ids(fleet.kind) == ["b"])
        answers = await fleet.client.broadcast.reload(1)
        fleet.caches["a"].gate.set()

    assert list(answers) == ["b"]


async def test_a_broadcast_to_nobody_is_empty_after_its_wait(fleet: Fleet) -> None:
    assert await fleet.client.broadcast.reload(1) == {}
    assert await with_options(fleet.client, wait=0.1).broadcast.reload(1) == {}

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(with_options(fleet.client, wait=30.0).broadcast.reload(1))
        await fleet.start("a")

    assert list(waiting.result()) == ["a"]
