"""Clients prefer instances of their own zone, on an in-memory bus."""

from __future__ import annotations

import asyncio

import pytest
from tests.story import on_a_kit

from dynbus import Actor, Overloaded, Runtime, handler
from dynbus.bus.calling.caller import REPORT_SECONDS
from dynbus.testing import TestKit


class Worker(Actor, namespace="zones"):
    @handler(concurrency=2, queue=0)
    async def where(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return self.instance_id


async def start(kit: TestKit, zone: str, *instance_ids: str) -> Runtime:
    """Instances of a zone, in a process of it."""
    runtime = await kit.runtime(zone=zone, host=f"host-{zone}")
    for instance_id in instance_ids:
        instance = await runtime.start(Worker, instance_id=instance_id)
        await kit.caller.discovery.wait_for_instance(instance.name)
    return runtime


async def asked(client: Worker, seconds: float, times: int) -> list[str]:
    """Who answers calls that are made together."""
    return sorted(await asyncio.gather(*(client.where(seconds) for _ in range(times))))


def test_calls_stay_in_the_zone_while_it_has_room() -> None:
    async def story(kit: TestKit) -> None:
        await start(kit, "east", "e1", "e2")
        await start(kit, "west", "w1", "w2")
        client = kit.client(Worker, routing="local_first")

        assert set([await client.where(0.0) for _ in range(20)]) <= {"e1", "e2"}
        assert await asked(client, 1.0, 6) == ["e1", "e1", "e2", "e2", "w1", "w2"]

    on_a_kit(story, zone="east")


def test_calls_go_elsewhere_while_the_zone_is_full_of_the_calls_of_others() -> None:
    async def story(kit: TestKit) -> None:
        east = await start(kit, "east", "e1")
        await start(kit, "west", "w1")
        busy = [asyncio.ensure_future(east.client(Worker).where(5.0)) for _ in range(2)]
        await asyncio.sleep(0.1)

        client = kit.client(Worker)

        # The first one is refused at e1, which its caller does not see.
        full = {await client.where(0.0) for _ in range(3)}
        await asyncio.gather(*busy)
        await asyncio.sleep(REPORT_SECONDS + 0.1)

        assert (full, await client.where(0.0)) == ({"w1"}, "e1")

    on_a_kit(story, zone="east", routing="local_first")


def test_calls_go_elsewhere_when_the_zone_is_gone() -> None:
    async def story(kit: TestKit) -> None:
        east = await start(kit, "east", "e1")
        await start(kit, "west", "w1")
        client = kit.client(Worker)

        before = await client.where(0.0)
        await east.close()

        assert (before, await client.where(0.0)) == ("e1", "w1")

    on_a_kit(story, zone="east", routing="local_first")


def test_a_process_without_a_zone_prefers_nobody() -> None:
    async def story(kit: TestKit) -> None:
        await start(kit, "", "a")
        await start(kit, "west", "w")

        client = await kit.caller.endpoint("zones.Worker.where").client()

        assert {await client.local_first(0.0) for _ in range(40)} == {"a", "w"}

    on_a_kit(story)


def test_an_instance_says_where_it_is_and_what_it_runs_at_a_time() -> None:
    async def story(kit: TestKit) -> None:
        await start(kit, "east", "e1")

        [instance] = kit.caller.discovery.view.everything()

        assert (instance.record.zone, instance.record.host) == ("east", "host-east")
        assert instance.record.limits["where"] == 2
        assert instance.near

    on_a_kit(story, zone="east")


def test_a_call_is_refused_when_every_zone_is_full() -> None:
    async def story(kit: TestKit) -> None:
        await start(kit, "east", "e1")
        await start(kit, "west", "w1")
        client = kit.client(Worker, routing="local_first")
        busy = [asyncio.ensure_future(client.where(5.0)) for _ in range(4)]
        await asyncio.sleep(0.1)

        with pytest.raises(Overloaded):
            await client.where(0.0)
        await asyncio.gather(*busy)

    on_a_kit(story, zone="east")
