"""A cluster of three servers loses one at a time: whoever was on it goes on at another."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.conditions import eventually

from dynbus import Runtime
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.server_process import RunningServer, free_port

from .observation import leftovers
from .processes import Processes
from .workload import Count, Done, Source, payload

pytestmark = pytest.mark.anyio

ITEMS = 400


class Cluster:
    """Three servers that know each other."""

    def __init__(self, servers: list[RunningServer]) -> None:
        self.servers = servers

    @property
    def url(self) -> str:
        """What a process connects to: any of them."""
        return ",".join(server.url for server in self.servers)

    def server_of(self, runtime: Runtime) -> RunningServer:
        """The server that carries the requests and results of a process."""
        connection = runtime.bus.data
        assert isinstance(connection, NatsConnection)
        name = connection.server_name
        return next(server for server in self.servers if name.endswith(f":{server.port}"))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster with JetStream, once it can store records."""
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = [
        RunningServer(
            free_port(),
            store_dir=tmp_path / str(port),
            config=f"""
            lame_duck_duration: "30s"
            lame_duck_grace_period: "1s"
            cluster {{ name: "c", listen: "127.0.0.1:{port}", routes: [{routes}] }}
            """,
        )
        for port in ports
    ]
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        running = Cluster(servers)
        async with Runtime.connect(running.url) as runtime:
            await runtime.discovery.wait_synchronized(20.0)
        yield running


async def read(source: Source) -> int:
    """Read one stream to its end, and check every byte of it."""
    count = 0
    async for item in source.count(Count(items=ITEMS, size=700, pause=0.01)):
        assert (item.index, item.text) == (count, payload(count, 700))
        count += 1
    return count


@pytest.mark.parametrize("end", ["killed", "told to go"])
async def test_streams_go_on_when_the_server_of_their_caller_ends(
    cluster: Cluster, processes: Processes, end: str
) -> None:
    await processes.worker(cluster.url)
    async with Runtime.connect(cluster.url) as runtime:
        source = runtime.client(Source)
        await runtime.discovery.wait_synchronized(5.0)
        streams = [asyncio.create_task(read(source)) for _ in range(32)]
        await asyncio.sleep(1.0)
        left = cluster.server_of(runtime)

        if end == "killed":
            await asyncio.to_thread(left.kill)
        else:
            os.kill(left.pid, signal.SIGUSR2)  # lame duck
        counts = await asyncio.gather(*streams)
        moved_to = cluster.server_of(runtime)

        assert counts == [ITEMS] * 32
        assert moved_to is not left
        assert leftovers(runtime) == {}


async def test_streams_and_calls_go_on_while_every_server_is_restarted_in_turn(
    cluster: Cluster, processes: Processes
) -> None:
    await processes.worker(cluster.url, ttl=10.0)
    async with Runtime.connect(cluster.url) as runtime:
        source = runtime.client(Source)
        await runtime.discovery.wait_synchronized(5.0)
        results: list[Done | int] = []
        rolled = asyncio.Event()

        async def keep_calling() -> None:
            while not rolled.is_set():
                results.append(await source.where())
                results.append(await read(source))

        calling = [asyncio.create_task(keep_calling()) for _ in range(8)]
        for server in cluster.servers:
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(1.0)
            await server.start()
            await eventually(lambda: runtime.is_connected, 5.0)
            await asyncio.sleep(1.0)
        rolled.set()
        await asyncio.gather(*calling)

        assert {result for result in results if isinstance(result, int)} == {ITEMS}
        assert leftovers(runtime) == {}
