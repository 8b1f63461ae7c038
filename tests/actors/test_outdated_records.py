"""A record that nobody renews, as a killed server may bring back, is no instance."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.story import on_a_kit

from dynbus import Actor, ConfigError, NoInstances, call_options, handler
from dynbus.bus.clock import monotonic
from dynbus.bus.protocol.names import InstanceName, control_subject
from dynbus.bus.protocol.wire import InstanceRecord, encode_record
from dynbus.bus.records.discovery import LAST_QUESTION, LOOK_PAUSE
from dynbus.bus.records.instance_records import INSTANCES_STREAM, record_subject
from dynbus.bus.records.instance_view import EXPIRY_GRACE
from dynbus.testing import TestKit

NAMES = ("outdated", "Worker")
NAME = InstanceName(*NAMES, "ghost")
GHOST = InstanceRecord(
    namespace=NAMES[0],
    component=NAMES[1],
    instance_id="ghost",
    incarnation="1",
    endpoints={"where": "unary"},
    started=0.0,
)


class Worker(Actor, namespace="outdated"):
    @handler
    async def where(self) -> str:
        return self.instance_id


async def write(kit: TestKit, record: InstanceRecord = GHOST) -> None:
    """Store a record that the server keeps for ever."""
    jetstream = kit.caller.bus.data.jetstream
    await jetstream.ensure_stream(INSTANCES_STREAM)
    await jetstream.publish(record_subject(*NAMES, record.instance_id), encode_record(record))


def lifetime(kit: TestKit) -> float:
    """Seconds after which a record that is not renewed is asked about, at most."""
    return kit.caller.bus.config.lease_ttl + EXPIRY_GRACE + LOOK_PAUSE


def test_a_record_that_nobody_renews_is_forgotten_when_nobody_listens() -> None:
    async def story(kit: TestKit) -> tuple[list[str], list[str]]:
        await kit.start(Worker, instance_id="true")
        await write(kit)
        await kit.caller.discovery.wait_for_instance(NAME)
        before = sorted(kit.caller.instance_ids(Worker))
        await asyncio.sleep(lifetime(kit) + 1.0)
        known = kit.caller.discovery.view.everything()
        return before, [one.id for one in known]

    assert on_a_kit(story) == (["ghost", "true"], ["true"])


def test_a_client_that_comes_later_never_counts_a_record_that_nobody_renews() -> None:
    async def story(kit: TestKit) -> tuple[list[str], list[str]]:
        await write(kit)
        await asyncio.sleep(60.0)
        await kit.start(Worker, instance_id="true")
        late = await kit.runtime()
        client = await late.endpoint("outdated.Worker.where").client()
        await client.wait_for_instances()
        found = late.instance_ids(Worker)
        with pytest.raises(NoInstances, match="1 of 2 found"):
            await client.wait_for_instances(count=2, timeout=30.0)
        return found, [one.id for one in late.discovery.view.everything()]

    assert on_a_kit(story) == (["true"], ["true"])


def test_a_call_with_nothing_but_such_records_finds_no_instances_without_delay() -> None:
    async def story(kit: TestKit) -> float:
        await write(kit)
        await asyncio.sleep(60.0)
        late = await kit.runtime()
        await late.discovery.wait_synchronized(5.0)
        await asyncio.sleep(1.0)
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoInstances):
            await late.client(Worker).where()
        return asyncio.get_running_loop().time() - began

    assert on_a_kit(story) < 0.1


def test_a_record_that_is_renewed_after_all_brings_its_instance_back_at_once() -> None:
    async def story(kit: TestKit) -> tuple[list[str], list[str]]:
        await write(kit)
        await kit.caller.discovery.wait_for_instance(NAME)
        await asyncio.sleep(lifetime(kit) + 1.0)
        gone = kit.caller.instance_ids(Worker)
        await write(kit, msgspec.structs.replace(GHOST, counter=2))
        await kit.caller.discovery.wait_for_instance(NAME, timeout=0.1)
        return gone, kit.caller.instance_ids(Worker)

    assert on_a_kit(story) == ([], ["ghost"])


def test_an_instance_that_listens_is_kept_although_it_cannot_renew_its_record() -> None:
    async def story(kit: TestKit) -> set[tuple[str, ...]]:
        other = await kit.bus.connect()
        other.subscribe(control_subject(*NAMES, "ghost"), lambda _: None)
        await write(kit)
        await asyncio.sleep(60.0)
        late = await kit.runtime()
        await late.discovery.wait_synchronized(5.0)
        seen: set[tuple[str, ...]] = set()
        for _ in range(int(3 * LAST_QUESTION)):
            seen.add(tuple(late.instance_ids(Worker)))
            await asyncio.sleep(1.0)
        return seen

    assert on_a_kit(story) == {("ghost",)}


def test_a_record_is_believed_for_as_long_as_its_own_ttl_says() -> None:
    async def story(kit: TestKit) -> tuple[list[str], list[str]]:
        jetstream = kit.caller.bus.data.jetstream
        await jetstream.ensure_stream(INSTANCES_STREAM)
        subject = record_subject(*NAMES, "ghost")
        await jetstream.publish(subject, encode_record(GHOST), ttl=120.0)
        await kit.caller.discovery.wait_for_instance(NAME)
        await asyncio.sleep(110.0)
        before = kit.caller.instance_ids(Worker)
        await asyncio.sleep(20.0)
        return before, kit.caller.instance_ids(Worker)

    assert on_a_kit(story) == (["ghost"], [])


async def start_again(kit: TestKit, actor: type[Actor], instance_id: str) -> float:
    """Start an actor in another process; the seconds that it takes."""
    begun = monotonic()
    instance = await (await kit.runtime()).start(actor, instance_id=instance_id)
    assert instance.id == instance_id
    return monotonic() - begun


class Other(Actor, namespace="outdated"):
    @handler
    async def where(self) -> str:
        return self.instance_id


@pytest.mark.parametrize("actor", [Worker, Other])
def test_an_id_whose_process_was_killed_is_taken_when_its_lease_has_expired(
    actor: type[Actor], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(kit: TestKit) -> tuple[float, float]:
        await kit.kill(await kit.start(Worker, instance_id="fixed"))
        caplog.clear()
        return await start_again(kit, actor, "fixed"), kit.caller.bus.config.lease_ttl

    took, ttl = on_a_kit(story)

    assert ttl / 2 < took <= ttl + EXPIRY_GRACE
    (told,) = [text for text in caplog.messages if "waits for" in text]
    assert told == (
        f"outdated.{actor.__name__}@fixed waits for the lease of a process that had its id and "
        "is gone: 13 s at most"
    )


def test_an_id_whose_record_never_expires_is_taken_after_its_lease() -> None:
    async def story(kit: TestKit) -> tuple[float, float, str]:
        await write(kit)
        took = await start_again(kit, Worker, "ghost")
        with call_options(instance="ghost", wait=5.0):
            answer = await kit.client(Worker).where()
        return took, kit.caller.bus.config.lease_ttl, answer

    took, ttl, answer = on_a_kit(story)

    assert took == pytest.approx(ttl + EXPIRY_GRACE, abs=0.5)
    assert answer == "ghost"


def test_an_id_whose_process_comes_back_before_its_lease_has_expired_stays_taken() -> None:
    async def story(kit: TestKit) -> None:
        first = await kit.start(Worker, instance_id="fixed")
        await kit.kill(first)
        starting = asyncio.create_task(start_again(kit, Worker, "fixed"))
        await asyncio.sleep(2.0)
        for connection in (first.runtime.bus.data, first.runtime.bus.lane.connection):
            connection.reconnect()  # type: ignore[attr-defined]

        with pytest.raises(ConfigError, match="'fixed' of outdated.Worker is in use"):
            await starting
        with call_options(wait=5.0):
            assert await kit.client(Worker).where() == "fixed"

    on_a_kit(story)
