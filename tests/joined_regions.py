"""Regions on this machine: a server with JetStream for each, and one without that joins them."""

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


@asynccontextmanager
async def joined_regions(
    folder: Path, names: Sequence[str]
) -> AsyncGenerator[dict[str, RunningServer]]:
    """The server of each region by its name, once messages go from each to each."""
    port = free_port()
    kept = json.dumps(REGIONAL)
    backbone = RunningServer(
        free_port(),
        store_dir=folder / "backbone",
        config=f'jetstream: disabled\nleafnodes {{ listen: "127.0.0.1:{port}" }}',
    )
    regions = {
        name: RunningServer(
            free_port(),
            store_dir=folder / name,
            config=f"jetstream: {{ domain: {name}, store_dir: {json.dumps(str(folder / name))} }}\n"
            f'leafnodes {{ reconnect: "0.2s", remotes: [{{ url: "nats-leaf://127.0.0.1:{port}", '
            f"deny_imports: {kept}, deny_exports: {kept} }}] }}",
        )
        for name in names
    }
    async with AsyncExitStack() as exits:
        for server in (backbone, *regions.values()):
            await exits.enter_async_context(server)
        await _hear_each_other(list(regions.values()))
        yield regions


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
