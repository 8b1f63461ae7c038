"""A record that nobody renews, as a killed server may bring back, is no instance."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from dynbus import Actor, NoInstances, handler
from dynbus.bus.protocol.names import InstanceName, control_subject
from dynbus.bus.protocol.wire import InstanceRecord, encode_record
from dynbus.bus.records.discovery import LAST_QUESTION, LOOK_PAUSE
from dynbus.bus.records.instance_view import EXPIRY_GRACE
from dynbus.bus.records.leases import INSTANCES_STREAM, record_subject
from dynbus.testing import TestKit, run

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
    async def story() -> tuple[list[str], list[str]]:
        async with TestKit() as kit:
            await kit.start(Worker, instance_id="true")
            await write(kit)
            await kit.caller.discovery.wait_for_instance(NAME)
            before = sorted(kit.caller.instance_ids(Worker))
            await asyncio.sleep(lifetime(kit) + 1.0)
            known = kit.caller.discovery.view.everything()
            return before, [one.id for one in known]

    assert run(story()) == (["ghost", "true"], ["true"])


def test_a_client_that_comes_later_never_counts_a_record_that_nobody_renews() -> None:
    async def story() -> tuple[list[str], list[str]]:
        async with TestKit() as kit:
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

    assert run(story()) == (["true"], ["true"])


def test_a_call_with_nothing_but_such_records_finds_no_instances_without_delay() -> None:
    async def story() -> float:
        async with TestKit() as kit:
            await write(kit)
            await asyncio.sleep(60.0)
            late = await kit.runtime()
            await late.discovery.wait_synchronized(5.0)
            await asyncio.sleep(1.0)
            began = asyncio.get_running_loop().time()
            with pytest.raises(NoInstances):
                await late.client(Worker).where()
            return asyncio.get_running_loop().time() - began

    assert run(story()) < 0.1


def test_a_record_that_is_renewed_after_all_brings_its_instance_back_at_once() -> None:
    async def story() -> tuple[list[str], list[str]]:
        async with TestKit() as kit:
            await write(kit)
            await kit.caller.discovery.wait_for_instance(NAME)
            await asyncio.sleep(lifetime(kit) + 1.0)
            gone = kit.caller.instance_ids(Worker)
            await write(kit, msgspec.structs.replace(GHOST, counter=2))
            await kit.caller.discovery.wait_for_instance(NAME, timeout=0.1)
            return gone, kit.caller.instance_ids(Worker)

    assert run(story()) == ([], ["ghost"])


def test_an_instance_that_listens_is_kept_although_it_cannot_renew_its_record() -> None:
    async def story() -> set[tuple[str, ...]]:
        async with TestKit() as kit:
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

    assert run(story()) == {("ghost",)}


def test_a_record_is_believed_for_as_long_as_its_own_ttl_says() -> None:
    async def story() -> tuple[list[str], list[str]]:
        async with TestKit() as kit:
            jetstream = kit.caller.bus.data.jetstream
            await jetstream.ensure_stream(INSTANCES_STREAM)
            subject = record_subject(*NAMES, "ghost")
            await jetstream.publish(subject, encode_record(GHOST), ttl=120.0)
            await kit.caller.discovery.wait_for_instance(NAME)
            await asyncio.sleep(110.0)
            before = kit.caller.instance_ids(Worker)
            await asyncio.sleep(20.0)
            return before, kit.caller.instance_ids(Worker)

    assert run(story()) == (["ghost"], [])
