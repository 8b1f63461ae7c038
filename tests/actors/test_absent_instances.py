"""Instances that died, drain or fell silent: a call waits for another, and goes to others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tests.story import on_a_kit

from dynbus import (
    Actor,
    ActorInstance,
    DynbusError,
    NoInstances,
    StreamLost,
    Unavailable,
    UnknownOutcome,
    handler,
)
from dynbus.bus.clock import monotonic
from dynbus.bus.memory.bus import MemoryConnection
from dynbus.bus.protocol.liveness import SILENCE_LIMIT
from dynbus.bus.records.discovery import HEARD_AGAIN
from dynbus.bus.records.instance_view import EXPIRY_GRACE, RETURN_SECONDS, SUSPECT_SECONDS
from dynbus.testing import TestKit


class Worker(Actor, namespace="absent"):
    @handler
    async def where(self) -> str:
        return self.instance_id

    @handler
    async def stream(self) -> AsyncGenerator[str, None]:
        while True:
            yield self.instance_id
            await asyncio.sleep(0.1)

    @handler
    async def hold(self) -> None:
        await asyncio.Event().wait()

    @handler(idempotent=True)
    async def hold_once(self) -> str:
        if self.instance_id == "a":
            await asyncio.Event().wait()
        return self.instance_id


def stopped(kit: TestKit, instance: ActorInstance) -> Any:
    """What SIGSTOP does: nothing arrives and nothing leaves, and no connection is closed."""
    bus = instance.actor.runtime.bus
    links: Any = (bus.data, bus.lane.connection)
    return kit.bus.partition(*links, notice_after=3600.0)


async def outcome(call: Any) -> tuple[str, float]:
    """The result or the error's code, and after how many seconds."""
    begun = monotonic()
    try:
        return await call, monotonic() - begun
    except DynbusError as error:
        return error.code, monotonic() - begun


def test_a_call_that_waits_goes_to_the_instance_that_follows_the_one_that_just_died() -> None:
    async def story(kit: TestKit) -> tuple[str, float]:
        first = await kit.start(Worker, instance_id="a")
        worker = kit.client(Worker, wait=10.0)
        assert await worker.where() == "a"
        await kit.kill(first)
        waiting = asyncio.ensure_future(outcome(worker.where()))
        await asyncio.sleep(4.0)
        await kit.start(Worker, instance_id="b")
        return await waiting

    name, seconds = on_a_kit(story)

    assert name == "b"
    assert 3.999 <= seconds < 5.0


@pytest.mark.parametrize("wait", [3.0, 30.0])
def test_a_call_waits_no_longer_than_it_said_when_nobody_follows(wait: float) -> None:
    async def story(kit: TestKit) -> tuple[str, float, int]:
        first = await kit.start(Worker, instance_id="a")
        worker = kit.client(Worker, wait=wait)
        await worker.where()
        await kit.kill(first)
        with kit.bus.duplicate("absent.Worker.where.a") as requests:
            code, seconds = await outcome(worker.where())
        return code, seconds, requests.hits

    code, seconds, requests = on_a_kit(story)

    assert code == NoInstances.code
    assert wait - 0.1 <= seconds <= wait + 0.1
    assert requests <= 1 + wait / SUSPECT_SECONDS


def test_a_call_that_does_not_wait_is_told_at_once_that_the_instance_is_gone() -> None:
    async def story(kit: TestKit) -> tuple[str, float]:
        first = await kit.start(Worker, instance_id="a")
        worker = kit.client(Worker)
        await worker.where()
        await kit.kill(first)
        return await outcome(worker.where())

    code, seconds = on_a_kit(story)

    assert code == Unavailable.code
    assert seconds < 0.1


def test_in_a_cluster_a_call_waits_for_an_instance_that_changes_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MemoryConnection, "has_peers", True)

    async def story(kit: TestKit) -> tuple[tuple[str, float], tuple[str, float]]:
        instance = await kit.start(Worker, instance_id="a")
        # Who has just come waits longer for instances: a server may have been lost.
        await kit.client(Worker).where()
        await asyncio.sleep(EXPIRY_GRACE)
        bus = instance.actor.runtime.bus
        links: Any = (bus.data, bus.lane.connection)
        with kit.bus.partition(*links, notice_after=0.0):
            asking = asyncio.ensure_future(outcome(kit.client(Worker).where()))
            await asyncio.sleep(RETURN_SECONDS / 2)
        returned = await asking
        await kit.kill(instance)
        await outcome(kit.client(Worker).where())
        return returned, await outcome(kit.client(Worker).where())

    (name, _), (code, waited) = on_a_kit(story)

    assert name == "a"
    assert code == NoInstances.code
    assert waited <= RETURN_SECONDS


def test_a_call_that_waits_goes_to_the_instance_that_follows_one_that_drains() -> None:
    async def story(kit: TestKit) -> tuple[str, float]:
        first = await kit.start(Worker, instance_id="a")
        worker = kit.client(Worker, wait=10.0)
        held = asyncio.ensure_future(outcome(worker.hold()))
        await asyncio.sleep(0.1)
        # It refuses calls before its record says so.
        first.server.execution.draining = True
        waiting = asyncio.ensure_future(outcome(worker.where()))
        await asyncio.sleep(1.0)
        await kit.start(Worker, instance_id="b")
        result = await waiting
        held.cancel()
        return result

    name, seconds = on_a_kit(story)

    assert name == "b"
    assert 1.0 <= seconds < 2.0


def test_a_call_that_may_be_repeated_waits_for_the_next_instance_after_its_own_died() -> None:
    async def story(kit: TestKit) -> tuple[str, float]:
        first = await kit.start(Worker, instance_id="a")
        waiting = asyncio.ensure_future(outcome(kit.client(Worker, wait=5.0).hold_once()))
        # Longer than it waits for an instance: it had one.
        await asyncio.sleep(10.0)
        await kit.kill(first)
        await asyncio.sleep(4.0)
        await kit.start(Worker, instance_id="b")
        return await waiting

    name, _ = on_a_kit(story)

    assert name == "b"


@pytest.mark.parametrize("by_a_stream", [False, True])
def test_an_instance_that_fell_silent_gets_no_call_while_its_lease_lives(by_a_stream: bool) -> None:
    async def story(kit: TestKit) -> tuple[str, list[tuple[str, float]]]:
        instances = [await kit.start(Worker, instance_id=name) for name in ("a", "b")]
        ttl = instances[0].actor.runtime.bus.config.lease_ttl
        silent = kit.client(Worker, routing=Always("a"))
        if by_a_stream:
            items = silent.stream()
            await anext(items)
            seeing = asyncio.ensure_future(outcome(drained(items)))
        else:
            seeing = asyncio.ensure_future(outcome(silent.hold()))
            await asyncio.sleep(0.1)
        with stopped(kit, instances[0]):
            seen, _ = await seeing
            worker = kit.client(Worker)
            found: list[tuple[str, float]] = []
            for _ in range(int(4 * (ttl + EXPIRY_GRACE))):
                found.append(await outcome(worker.where()))
                await asyncio.sleep(0.25)
        return seen, found

    seen, found = on_a_kit(story)

    assert seen == (StreamLost if by_a_stream else UnknownOutcome).code
    assert {name for name, _ in found} == {"b"}
    assert max(seconds for _, seconds in found) < SILENCE_LIMIT / 2


def test_a_silent_instance_is_called_again_once_it_is_heard() -> None:
    async def story(kit: TestKit) -> list[str]:
        instances = [await kit.start(Worker, instance_id=name) for name in ("a", "b")]
        with stopped(kit, instances[0]), pytest.raises(UnknownOutcome):
            await kit.client(Worker, routing=Always("a")).hold()
        await asyncio.sleep(0.5)
        worker = kit.client(Worker)
        return sorted([await worker.where() for _ in range(4)])

    assert on_a_kit(story) == ["a", "a", "b", "b"]


@pytest.mark.parametrize("notice_after", [1.0, 3600.0])
def test_instances_that_nobody_reached_are_found_again_although_no_record_is_renewed(
    notice_after: float,
) -> None:
    """Where their connections broke, the server says that nobody listens; else all are silent."""

    async def story(kit: TestKit) -> tuple[set[str], list[str]]:
        instances = [await kit.start(Worker, instance_id=name) for name in ("a", "b")]
        buses = [one.actor.runtime.bus for one in instances]
        links: Any = [link for bus in buses for link in (bus.data, bus.lane.connection)]
        worker = kit.client(Worker)
        held = [asyncio.ensure_future(outcome(worker.hold())) for _ in range(4)]
        await asyncio.sleep(0.1)
        kit.bus.jetstream.stall()
        with kit.bus.partition(*links, notice_after=notice_after):
            await asyncio.wait(held)
            lost = {(await outcome(worker.where()))[0] for _ in range(4)}
            # In which the pauses between questions grow.
            await asyncio.sleep(buses[0].config.lease_ttl / 2)
        await asyncio.sleep(HEARD_AGAIN)
        await outcome(worker.where())
        await asyncio.sleep(0.1)
        return lost, sorted([(await outcome(worker.where()))[0] for _ in range(4)])

    lost, found = on_a_kit(story)

    assert not lost & {"a", "b"}
    assert found == ["a", "a", "b", "b"]


def test_an_instance_that_comes_back_with_nothing_to_say_drives_nobody_from_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[str] = []

    def leave(connection: MemoryConnection, why: str) -> None:
        left.append(why)

    monkeypatch.setattr(MemoryConnection, "leave_server", leave)

    async def story(kit: TestKit) -> list[str]:
        instances = [await kit.start(Worker, instance_id=name) for name in ("a", "b")]
        bus = instances[0].actor.runtime.bus
        links: Any = (bus.data, bus.lane.connection)
        # It takes its caller for dead meanwhile, and what it said before is lost.
        with kit.bus.partition(*links, notice_after=1.0):
            with pytest.raises(UnknownOutcome):
                await kit.client(Worker, routing=Always("a")).hold()
            await asyncio.sleep(SILENCE_LIMIT)
        await asyncio.sleep(bus.config.lease_ttl)
        worker = kit.client(Worker)
        return sorted([await worker.where() for _ in range(4)])

    assert on_a_kit(story) == ["a", "a", "b", "b"]
    assert left == []


def test_without_another_instance_a_silent_one_is_waited_for() -> None:
    async def story(kit: TestKit) -> tuple[tuple[str, float], tuple[str, float]]:
        instance = await kit.start(Worker, instance_id="a")
        with stopped(kit, instance):
            with pytest.raises(UnknownOutcome):
                await kit.client(Worker).hold()
            at_once = await outcome(kit.client(Worker).where())
            waiting = asyncio.ensure_future(outcome(kit.client(Worker, wait=30.0).where()))
            await asyncio.sleep(2.0)
        return at_once, await waiting

    (code, at_once), (name, waited) = on_a_kit(story)

    assert code == NoInstances.code
    assert at_once < 0.1
    assert name == "a"
    assert waited < 10.0


async def drained(items: AsyncGenerator[str, None]) -> str:
    async for _ in items:
        pass
    return "complete"


class Always:
    """Prefers one instance while it is offered."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def route(self, request: Any, instances: Any) -> str:
        ids = [one.id for one in instances]
        return self._name if self._name in ids else str(ids[0])
