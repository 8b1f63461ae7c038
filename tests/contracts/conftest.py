"""The contract suite runs on the in-memory bus and on a real nats-server alike."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import pytest
from tests.conditions import PATIENCE

from dynbus.bus.clock import JumpingLoop
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection
from dynbus.bus.nats.connection import NatsConnection, connect
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.transport import Connection, ConnectionState, StreamConfig, StreamLimits


class Received(list[Any]):
    """A callback that keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived = asyncio.Event()

    def __call__(self, message: Any) -> None:
        self.append(message)
        self._arrived.set()

    async def wait(self, count: int, timeout: float = PATIENCE) -> Received:
        """Wait until at least `count` messages are there."""
        async with asyncio.timeout(timeout):
            while len(self) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self


class Bus(Protocol):
    """A server under test."""

    async def connect(self) -> Connection:
        """A connection that is closed when the test ends."""
        ...

    async def break_connection(self, connection: Connection) -> None:
        """Break a connection and wait until it is back."""
        ...

    async def stream(
        self,
        limits: StreamLimits = StreamLimits(),  # noqa: B008 - a frozen named tuple
        *,
        marker_ttl: float | None = None,
        rollup: bool = False,
        in_memory: bool = True,
        work_queue: bool = False,
    ) -> str:
        """Make a stream that takes `NAME.>` and return its name; deleted when the test ends."""
        ...

    async def make_again(self, stream: str) -> None:
        """Delete a stream that `stream` has made and make it again, empty."""
        ...

    async def restart_server(self) -> None:
        """Kill the server and start it again; for the fixture `own_bus` only."""
        ...

    async def close(self) -> None: ...


async def settled(*connections: Connection) -> None:
    """Wait until everything published so far on `connections` has been delivered on them."""
    for connection in connections:
        await connection.barrier()
    for connection in connections:
        await connection.barrier()


async def eventually(condition: Callable[[], Any], timeout: float = PATIENCE) -> None:
    """Wait until `condition()` holds; it is looked at every 20 ms."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.02)


class _Connections:
    def __init__(self) -> None:
        self._opened: list[Connection] = []
        self._streams: dict[str, StreamConfig] = {}

    async def open(self) -> Connection:
        raise NotImplementedError

    def disturb(self, connection: Connection) -> None:
        raise NotImplementedError

    async def restart_server(self) -> None:
        raise NotImplementedError

    async def connect(self) -> Connection:
        connection = await self.open()
        self._opened.append(connection)
        return connection

    async def break_connection(self, connection: Connection) -> None:
        states: list[ConnectionState] = []
        connection.on_state(states.append)
        self.disturb(connection)
        await eventually(lambda: ConnectionState.CONNECTED in states)

    async def stream(
        self,
        limits: StreamLimits = StreamLimits(),  # noqa: B008 - a frozen named tuple
        *,
        marker_ttl: float | None = None,
        rollup: bool = False,
        in_memory: bool = True,
        work_queue: bool = False,
    ) -> str:
        name = f"S{secrets.token_hex(6)}"
        config = StreamConfig(
            name,
            (f"{name}.>",),
            limits,
            marker_ttl=marker_ttl,
            rollup=rollup,
            in_memory=in_memory,
            work_queue=work_queue,
        )
        connection = self._opened[0] if self._opened else await self.connect()
        await connection.jetstream.ensure_stream(config)
        self._streams[name] = config
        return name

    async def make_again(self, stream: str) -> None:
        jetstream = self._opened[0].jetstream
        await jetstream.delete_stream(stream)
        await jetstream.ensure_stream(self._streams[stream])

    async def close(self) -> None:
        for name in self._streams:
            await self._opened[0].jetstream.delete_stream(name)
        for connection in self._opened:
            await connection.close()


class InMemory(_Connections):
    def __init__(self) -> None:
        super().__init__()
        self.bus = MemoryBus()

    async def open(self) -> Connection:
        return await self.bus.connect()

    def disturb(self, connection: Connection) -> None:
        assert isinstance(connection, MemoryConnection)
        connection.disconnect()
        connection.reconnect()

    async def restart_server(self) -> None:
        self.bus.stop()
        self.bus.start()


class OverNats(_Connections):
    def __init__(self, url: str, server: RunningServer | None = None) -> None:
        super().__init__()
        self.url = url
        self.server = server

    async def open(self) -> Connection:
        return await connect([self.url])

    def disturb(self, connection: Connection) -> None:
        assert isinstance(connection, NatsConnection)
        connection.reconnect()

    async def restart_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        await self.server.restart()


@pytest.fixture(params=["memory", "nats"])
def bus_kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def anyio_backend(bus_kind: str) -> tuple[str, dict[str, Any]]:
    """The in-memory bus on a clock that jumps, the real one on a clock that does not."""
    return ("asyncio", {"loop_factory": JumpingLoop} if bus_kind == "memory" else {})


@pytest.fixture
def server_url(bus_kind: str, request: pytest.FixtureRequest) -> str:
    """The real server's address; empty for the in-memory bus, which needs none."""
    if bus_kind == "memory":
        return ""
    server: RunningServer = request.getfixturevalue("nats_server")
    return server.url


@pytest.fixture
async def bus(server_url: str) -> AsyncIterator[Bus]:
    world = OverNats(server_url) if server_url else InMemory()
    try:
        yield world
    finally:
        await world.close()


@pytest.fixture
def killable_server(bus_kind: str, request: pytest.FixtureRequest) -> RunningServer | None:
    """A real server of this test alone; None for the in-memory bus, which needs none."""
    if bus_kind == "memory":
        return None
    server: RunningServer = request.getfixturevalue("own_server")
    return server


@pytest.fixture
async def own_bus(killable_server: RunningServer | None) -> AsyncIterator[Bus]:
    """A bus for one test, which may restart its server."""
    server = killable_server
    world = InMemory() if server is None else OverNats(server.url, server)
    try:
        yield world
    finally:
        await world.close()


@pytest.fixture
def subject() -> str:
    """A subject that no other test uses."""
    return f"t{secrets.token_hex(8)}"
