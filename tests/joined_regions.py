"""Regions on this machine: a server with JetStream for each, or a cluster, and one server without
that joins them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.conditions import eventually

from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.bus.protocol.names import REGIONAL
from dynbus.bus.transport import Message


def _backbone(folder: Path, port: int) -> RunningServer:
    """The server that hears leaf nodes at a port."""
    return RunningServer(
        free_port(),
        store_dir=folder / "backbone",
        config=f'jetstream: disabled\nleafnodes {{ listen: "127.0.0.1:{port}" }}',
    )


def _server(folder: Path, region: str, joining: int, *, more: str = "") -> RunningServer:
    """A server of a region, which keeps what it stores in a folder.

    Args:
        joining: the port of the backbone.
    """
    kept = json.dumps(REGIONAL)
    return RunningServer(
        free_port(),
        store_dir=folder,
        config=f"jetstream: {{ domain: {region}, store_dir: {json.dumps(str(folder))} }}\n"
        f'leafnodes {{ reconnect: "0.2s", remotes: [{{ url: "nats-leaf://127.0.0.1:{joining}", '
        f"deny_imports: {kept}, deny_exports: {kept} }}] }}\n{more}",
    )


@asynccontextmanager
async def joined_regions(
    folder: Path, names: Sequence[str]
) -> AsyncGenerator[dict[str, RunningServer]]:
    """The server of each region by its name, once messages go from each to each."""
    port = free_port()
    regions = {name: _server(folder / name, name, port) for name in names}
    async with AsyncExitStack() as exits:
        for server in (_backbone(folder, port), *regions.values()):
            await exits.enter_async_context(server)
        await _hear_each_other(list(regions.values()))
        yield regions


@asynccontextmanager
async def cluster_joined_with_server(
    folder: Path, cluster: str, other: str
) -> AsyncGenerator[tuple[list[RunningServer], RunningServer]]:
    """The three servers of a region that is a cluster, each of them a leaf node, and the server of
    another region, once messages go from each to each."""
    port, ports = free_port(), [free_port() for _ in range(3)]
    routes = ", ".join(f'"nats://127.0.0.1:{one}"' for one in ports)
    servers = [
        _server(
            folder / f"{cluster}-{one}",
            cluster,
            port,
            more=f'cluster {{ name: {cluster}, listen: "127.0.0.1:{one}", routes: [{routes}] }}',
        )
        for one in ports
    ]
    server = _server(folder / other, other, port)
    async with AsyncExitStack() as exits:
        for one in (_backbone(folder, port), *servers, server):
            await exits.enter_async_context(one)
        await _hear_each_other([*servers, server])
        yield servers, server


async def _hear_each_other(servers: Sequence[RunningServer]) -> None:
    heard: set[tuple[int, bytes]] = set()
    async with AsyncExitStack() as exits:
        connections = [await connect([server.url]) for server in servers]
        for number, connection in enumerate(connections):
            exits.push_async_callback(connection.close)

            def hear(message: Message, number: int = number) -> None:
                heard.add((number, message.data))

            connection.subscribe("joined", hear)
            await connection.barrier()

        async def do_all() -> bool:
            for number, connection in enumerate(connections):
                connection.publish("joined", b"%d" % number)
                await connection.barrier()
            return len(heard) == len(connections) ** 2

        await eventually(do_all)
