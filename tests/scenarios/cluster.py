"""Three servers that know each other, for stories in which one of them ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from dynbus import Runtime
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.server_process import RunningServer, free_port


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


@asynccontextmanager
async def three_servers(folder: Path) -> AsyncGenerator[Cluster]:
    """A cluster with JetStream, once it can store records."""
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = [
        RunningServer(
            free_port(),
            store_dir=folder / str(port),
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
            await runtime.discovery.wait_synchronized(60.0)
        yield running
