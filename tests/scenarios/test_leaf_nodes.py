"""A leaf node joins two servers that keep their own streams: what both would store is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conditions import eventually

from dynbus import ConfigError, EndpointName
from dynbus.bus.bus import Bus
from dynbus.bus.commands.diagnosis import diagnose
from dynbus.bus.config import BusConfig
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.bus.work_queue import WorkQueue
from dynbus.kvrouter.stream import KvEventPublisher

pytestmark = pytest.mark.anyio

QUEUE = EndpointName("demo", "Printer", "print")
APART = '["*.*._work.>", "*.*._dead.*.*", "*.*._kv.*.*", "_streams.>"]'


class Regions(NamedTuple):
    """Two servers with JetStream, joined by a leaf node."""

    hub: RunningServer
    leaf: RunningServer


@asynccontextmanager
async def joined(
    folder: Path, remote: str = "", *, has_domains: bool = False
) -> AsyncGenerator[Regions]:
    """The two servers, once messages go from one to the other.

    Args:
        remote: further settings of the leaf node's remote.
        has_domains: whether JetStream of each has a domain.
    """
    port = free_port()

    def domain(name: str) -> str:
        if not has_domains:
            return ""
        return f"jetstream: {{ domain: {name}, store_dir: {json.dumps(str(folder / name))} }}"

    hub = RunningServer(
        free_port(),
        store_dir=folder / "hub",
        config=f'leafnodes {{ listen: "127.0.0.1:{port}" }}\n{domain("hub")}',
    )
    leaf = RunningServer(
        free_port(),
        store_dir=folder / "leaf",
        config=f'leafnodes {{ remotes: [{{ url: "nats-leaf://127.0.0.1:{port}"{remote} }}] }}\n'
        f"{domain('leaf')}",
    )
    async with AsyncExitStack() as exits:
        for server in (hub, leaf):
            await exits.enter_async_context(server)
        near = await connect([hub.url])
        exits.push_async_callback(near.close)
        far = await connect([leaf.url])
        exits.push_async_callback(far.close)
        heard: list[bytes] = []
        near.subscribe("joined", lambda message: heard.append(message.data))
        await near.barrier()

        async def is_joined() -> bool:
            far.publish("joined", b"")
            await far.barrier()
            return bool(heard)

        await eventually(is_joined)
        yield Regions(hub, leaf)


async def queue_at(exits: AsyncExitStack, server: RunningServer) -> WorkQueue:
    bus = await Bus.connect(BusConfig(servers=(server.url,)))
    exits.push_async_callback(bus.close)
    return WorkQueue(bus, QUEUE)


@pytest.mark.parametrize("has_domains", [False, True])
@pytest.mark.parametrize("first", ["hub", "leaf"])
async def test_a_queue_that_another_region_keeps_is_refused_to_its_takers(
    tmp_path: Path, first: str, has_domains: bool
) -> None:
    """Each job would be carried out in both."""
    async with joined(tmp_path, has_domains=has_domains) as regions, AsyncExitStack() as exits:
        second = regions.leaf if first == "hub" else regions.hub
        here = await queue_at(exits, getattr(regions, first))
        there = await queue_at(exits, second)
        async with here.take():
            pass

        with pytest.raises(ConfigError, match="stored in another region as well.*deny_imports"):
            async with there.take():
                pass
        await there.put(b"", job_id="one")
        async with here.take() as taker:
            await (await anext(taker)).ack()

        assert (await here.depth(max_age=0.0)).jobs == 0


async def test_a_queue_that_both_regions_keep_since_before_is_refused_on_the_leaf_nodes_side(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as apart:
        for name in ("hub", "leaf"):
            server = RunningServer(free_port(), store_dir=tmp_path / name)
            await apart.enter_async_context(server)
            async with (await queue_at(apart, server)).take():
                pass

    async with joined(tmp_path) as regions, AsyncExitStack() as exits:
        taking = await queue_at(exits, regions.leaf)
        with pytest.raises(ConfigError, match="stored in another region as well"):
            async with taking.take():
                pass
        for server in regions:
            checks = await diagnose(BusConfig(servers=(server.url,)))
            found = [check for check in checks if check.name == "regions"]
            assert [check.status for check in found] == ["fail"]
            assert "DYNBUS_WORK_demo+Printer+print" in found[0].found
            assert "deny_imports" in found[0].remedy


async def test_events_that_another_region_keeps_are_refused_to_their_publisher(
    tmp_path: Path,
) -> None:
    async with joined(tmp_path) as regions, AsyncExitStack() as exits:
        for server, is_refused in zip(regions, (False, True), strict=True):
            bus = await Bus.connect(BusConfig(servers=(server.url,)))
            exits.push_async_callback(bus.close)
            publisher = KvEventPublisher(
                bus.data, "demo", "Engine", "one", background=bus.background
            )
            if is_refused:
                with pytest.raises(ConfigError, match="stored in another region as well"):
                    await exits.enter_async_context(publisher)
            else:
                await exits.enter_async_context(publisher)


async def test_regions_that_are_kept_apart_each_have_a_queue(tmp_path: Path) -> None:
    remote = f", deny_imports: {APART}, deny_exports: {APART}"
    async with joined(tmp_path, remote) as regions, AsyncExitStack() as exits:
        queues = [await queue_at(exits, server) for server in regions]
        for queue in queues:
            async with queue.take():
                pass

        await queues[0].put(b"", job_id="one")

        assert [(await queue.depth(max_age=0.0)).jobs for queue in queues] == [1, 0]
        for server in regions:
            checks = await diagnose(BusConfig(servers=(server.url,)))
            assert [check.status for check in checks if check.name == "regions"] == ["ok"]
