"""The two connections of a process are at one server, the nearest, and leave it together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.bus.servers import server_stopped
from tests.conditions import Stopwatch, eventually

from dynbus.actors.chaos.proxy import Proxy
from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.bus.nats import connection, own_host
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.bus.transport import ConnectionState

pytestmark = pytest.mark.anyio

CONNECTED_AGAIN_WITHIN = 2.5
"""Seconds from the silence of a process's server to its connections at another."""


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[list[RunningServer]]:
    """Two servers that know nothing of each other."""
    first = await run_server(store_dir=tmp_path / "1")
    async with server_stopped(first):
        second = await run_server(store_dir=tmp_path / "2")
        async with server_stopped(second):
            yield [first, second]


def is_at(own: str) -> Callable[[str], bool]:
    """Whether a host is this machine, where its address is `own`."""
    return lambda host: host == own


@pytest.fixture
def nobody_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no server for one on this machine, so that zones count."""
    for module in (connection, own_host):
        monkeypatch.setattr(module, "is_own_address", is_at("nowhere"))


@asynccontextmanager
async def presence(*servers: str, zone: str = "") -> AsyncGenerator[Bus]:
    bus = await Bus.connect(BusConfig(servers=servers, zone=zone), name="presence")
    try:
        yield bus
    finally:
        await bus.close()


def places(bus: Bus) -> set[str]:
    """The servers that a process is connected to."""
    both = (bus.data, bus.lane.connection)
    return {
        one.server_name if one.state is ConnectionState.CONNECTED else "nowhere" for one in both
    }


def at(url: str) -> set[str]:
    return {url.removeprefix("nats://")}


async def test_both_connections_are_at_one_server(servers: list[RunningServer]) -> None:
    for _ in range(10):
        async with presence(*(server.url for server in servers)) as bus:
            assert len(places(bus)) == 1


@pytest.mark.usefixtures("nobody_is_here")
async def test_a_server_of_the_own_zone_is_chosen_before_others(
    servers: list[RunningServer],
) -> None:
    urls = [f"{server.url}?zone=z{number}" for number, server in enumerate(servers)]

    for _ in range(5):
        async with presence(*urls, zone="z1") as bus:
            assert places(bus) == at(servers[1].url)


async def test_a_server_of_this_machine_is_chosen_before_others(
    servers: list[RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (connection, own_host):
        monkeypatch.setattr(module, "is_own_address", is_at("127.0.0.1"))
    here, there = (f"nats://127.0.0.{n}:{s.port}" for n, s in enumerate(servers, 1))

    for _ in range(5):
        async with presence(there, here) as bus:
            assert places(bus) == at(here)


@pytest.mark.usefixtures("nobody_is_here")
@pytest.mark.parametrize("which", ["both", "data", "control"])
async def test_both_leave_a_server_that_falls_silent_on_either_and_are_soon_at_another(
    servers: list[RunningServer], which: str
) -> None:
    async with (
        Proxy(servers[0].port) as proxy,
        presence(f"{proxy.url}?zone=near", servers[1].url, zone="near") as bus,
    ):
        assert places(bus) == at(proxy.url)
        data, control = proxy.links

        async def work() -> None:
            while True:
                bus.data.publish("work", b"")
                bus.lane.call(bus.lane.connection.publish, "work", b"")
                await asyncio.sleep(0.1)

        working = asyncio.create_task(work())
        if which == "both":
            # New ones, too.
            proxy.freeze()
        else:
            {"data": data, "control": control}[which].freeze()
        watch = Stopwatch()
        await eventually(lambda: places(bus) == at(servers[1].url))
        took = watch.seconds()
        working.cancel()

    assert took < CONNECTED_AGAIN_WITHIN


@pytest.mark.usefixtures("nobody_is_here")
async def test_a_connection_that_is_reset_comes_back_to_the_server_of_the_other(
    servers: list[RunningServer],
) -> None:
    async with (
        Proxy(servers[0].port) as proxy,
        presence(f"{proxy.url}?zone=near", servers[1].url, zone="near") as bus,
    ):
        for count in range(1, 4):
            proxy.links[0].cut()
            await eventually(
                lambda: proxy.accepted == 2 + count and "nowhere" not in places(bus)  # noqa: B023
            )
            assert places(bus) == at(proxy.url)


@pytest.mark.usefixtures("nobody_is_here")
async def test_the_other_connection_follows_one_that_its_server_takes_no_longer(
    servers: list[RunningServer],
) -> None:
    async with (
        Proxy(servers[0].port) as proxy,
        presence(f"{proxy.url}?zone=near", servers[1].url, zone="near") as bus,
    ):
        assert isinstance(bus.data, NatsConnection)
        proxy.refuse()

        proxy.links[0].cut()

        await eventually(lambda: places(bus) == at(servers[1].url))
