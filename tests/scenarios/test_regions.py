"""Regions with JetStream of their own: calls stay, go abroad when nobody is at home, and go on
elsewhere when the region that serves them is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest
from tests.conditions import eventually
from tests.joined_regions import joined_regions

from dynbus import Actor, ConfigError, NoInstances, Runtime, call_options, handler
from dynbus.bus.commands.diagnosis import diagnose
from dynbus.bus.commands.needed import NeededStream
from dynbus.bus.commands.survey import Survey, survey
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import BusConfig
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.records.abroad import HEARD_WITHIN
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.llm.commands.setting_up import Status, needed_in, set_up
from dynbus.llm.needed_streams import abroad_streams

pytestmark = pytest.mark.anyio


class Counter(Actor, namespace="demo"):
    """Counts, and says where it does."""

    @handler
    async def where(self) -> str:
        return self.instance_id

    @handler(resume="replay")
    async def count(self, most: int) -> AsyncIterator[int]:
        for number in range(most):
            yield number
            await anyio.sleep(0.01)


async def look(server: RunningServer) -> Survey:
    async with terminal.server(BusConfig(servers=(server.url,)), "test") as reached:
        return await survey(reached)


async def test_a_call_goes_abroad_while_nobody_is_at_home(tmp_path: Path) -> None:
    async with joined_regions(tmp_path, ("eu", "us")) as regions, AsyncExitStack() as exits:
        connect = [Runtime.connect(regions[name].url) for name in ("eu", "us")]
        eu, us = [await exits.enter_async_context(one) for one in connect]
        await us.start(Counter, instance_id="in-us")
        staying, spilling = eu.client(Counter), eu.client(Counter, spill="region")

        with call_options(wait=30.0):
            assert await spilling.where() == "in-us"
        assert [number async for number in spilling.count(3)] == [0, 1, 2]
        with pytest.raises(NoInstances):
            await staying.where()
        with call_options(spill="never"), pytest.raises(NoInstances):
            await eu.client(Counter).where()
        at_home = await eu.start(Counter, instance_id="in-eu")
        await eventually(lambda: "in-eu" in eu.instance_ids(Counter))
        assert {await spilling.where() for _ in range(5)} == {"in-eu"}

        seen = await look(regions["eu"])
        assert [(row.instance_id, row.state, row.region) for row in seen.rows] == [
            ("in-us", "serving", "us"),
            ("in-eu", "serving", ""),
        ]
        [us_seen] = seen.abroad
        assert (seen.region, us_seen.name) == ("eu", "us")
        assert us_seen.silent < HEARD_WITHIN
        await at_home.stop()
        assert await spilling.where() == "in-us"


async def test_an_id_is_taken_in_all_regions(tmp_path: Path) -> None:
    async with joined_regions(tmp_path, ("eu", "us")) as regions, AsyncExitStack() as exits:
        connect = [Runtime.connect(regions[name].url) for name in ("eu", "us")]
        eu, us = [await exits.enter_async_context(one) for one in connect]
        there = await us.start(Counter, instance_id="c-0")
        # The servers between them pass on who listens a moment after it does.
        await eventually(lambda: eu.bus.questions.is_there(there.name))

        with pytest.raises(ConfigError, match="in use in another region.* such as c-0-eu"):
            await eu.start(Counter, instance_id="c-0")
        await there.stop()
        await eu.start(Counter, instance_id="c-0")


async def test_a_region_of_one_server_is_no_cluster(tmp_path: Path) -> None:
    async with (
        joined_regions(tmp_path, ("eu", "us")) as regions,
        Runtime.connect(regions["eu"].url) as runtime,
    ):
        await runtime.start(Counter)

        assert not runtime.bus.data.has_peers
        info = await runtime.bus.data.jetstream.stream_info(INSTANCES_STREAM.name)
        assert not info.in_cluster


async def test_a_stream_goes_on_in_another_region_when_its_own_is_lost(tmp_path: Path) -> None:
    names = ("eu", "us", "ap")
    async with joined_regions(tmp_path, names) as regions, AsyncExitStack() as exits:
        eu = await exits.enter_async_context(Runtime.connect(regions["eu"].url, spill="region"))
        for name in ("us", "ap"):
            there = await exits.enter_async_context(
                Runtime.connect(regions[name].url, lease_ttl=3.0)
            )
            await there.start(Counter, instance_id=f"in-{name}")
        counter = eu.client(Counter)
        answered: set[str] = set()

        async def know_both() -> bool:
            with call_options(wait=30.0):
                answered.add(await counter.where())
            return answered == {"in-us", "in-ap"}

        await eventually(know_both)

        async def read(all_read: list[list[int]]) -> None:
            numbers: list[int] = []
            all_read.append(numbers)
            async for number in counter.count(300):
                numbers.append(number)

        streams: list[list[int]] = []
        async with anyio.create_task_group() as reading:
            for _ in range(20):
                reading.start_soon(read, streams)
            await eventually(lambda: len(streams) == 20 and all(len(s) > 20 for s in streams))
            regions["us"].kill()

        assert all(numbers == list(range(300)) for numbers in streams)
        assert {await counter.where() for _ in range(5)} == {"in-ap"}

        async def is_forgotten() -> bool:
            seen = await look(regions["eu"])
            return [row.instance_id for row in seen.rows] == ["in-ap"]

        await eventually(is_forgotten)


async def test_an_operator_makes_the_stream_of_a_region_and_of_no_other_server(
    tmp_path: Path, own_server: RunningServer
) -> None:
    async with joined_regions(tmp_path, ("eu",)) as regions:
        for server, made in ((regions["eu"], ["DYNBUS_ABROAD"]), (own_server, [])):
            async with terminal.server(BusConfig(servers=(server.url,)), "test") as reached:
                needed = NeededStream.of_region(reached.connection.region)
                outcomes = await set_up(reached.connection.jetstream, needed)
            assert [one.stream for one in outcomes if one.status is Status.MADE] == made


async def test_what_a_region_stores_is_stored_in_no_other_one_but_what_is_said_abroad(
    tmp_path: Path,
) -> None:
    async with joined_regions(tmp_path, ("eu", "us")) as regions:
        for name, server in regions.items():
            async with terminal.server(BusConfig(servers=(server.url,)), "test") as reached:
                needed = needed_in("demo", [], ["sold"], ["Desk.settle"])
                outcomes = await set_up(
                    reached.connection.jetstream, [*needed, *abroad_streams(name)]
                )
            assert {one.status for one in outcomes} == {Status.MADE}

        for server in regions.values():
            checks = await diagnose(BusConfig(servers=(server.url,)))
            assert [one.found for one in checks if one.name == "regions"] == [
                "what is published is stored once"
            ]


async def test_a_call_that_may_leave_and_has_no_other_region_fails_as_any(
    own_server: RunningServer,
) -> None:
    async with Runtime.connect(own_server.url, spill="region") as runtime:
        with pytest.raises(NoInstances, match=r"no instance serves demo.Counter.where$"):
            await runtime.client(Counter).where()
