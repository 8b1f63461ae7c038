"""The nats-servers of a run: its own, at ports of their own, and gone with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

import anyio
import msgspec

from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import DynbusError
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.bus.transport import Message

from .frozen import frozen
from .proxy import Proxy

T = TypeVar("T")

ANSWER_SECONDS: Final = 1.0
ANSWER_QUIET: Final = 0.5
"""Seconds for a server's answers about itself: they come soon, or not at all."""
STREAM_LIST: Final = "$JS.API.STREAM.LIST"
ACCOUNT_STATE: Final = "$SYS.REQ.ACCOUNT.PING.STATZ"


class ServerHoldings(msgspec.Struct, frozen=True):
    """The resources that the run's servers hold together.

    Attributes:
        messages: of all streams, the records of instances among them.
        bytes: of these messages, as they are stored.
    """

    connections: int
    subscriptions: int
    consumers: int
    messages: int
    bytes: int


class OwnServers:
    """One server, or several that are a cluster; each perhaps behind proxies.

    Attributes:
        servers: as processes.
        for_workers, for_callers: a proxy in front of each server; none where nothing is proxied.
        down: the servers that are not running, by their index.
    """

    def __init__(self, servers: list[RunningServer]) -> None:
        self.servers = servers
        self.for_workers: list[Proxy] = []
        self.for_callers: list[Proxy] = []
        self.down: set[int] = set()

    @property
    def worker_url(self) -> str:
        """The URL that instances connect to."""
        return ",".join(each.url for each in self.for_workers or self.servers)

    @property
    def caller_url(self) -> str:
        """The URL that callers connect to."""
        return ",".join(each.url for each in self.for_callers or self.servers)

    async def kill(self, index: int) -> None:
        """kill -9 of one."""
        self.down.add(index)
        await asyncio.to_thread(self.servers[index].kill)

    async def start(self, index: int) -> None:
        """Start it again, at its port and with its data."""
        await self.servers[index].start()
        self.down.discard(index)

    @asynccontextmanager
    async def frozen(self, index: int, *, is_killed: bool) -> AsyncGenerator[float]:
        """One is stopped (SIGSTOP) while the block runs, so that nobody is told.

        Yields when that began, by `time.monotonic`.

        Args:
            is_killed: whether it does not go on then, but is killed and started again.
        """
        self.down.add(index)
        try:
            async with frozen(self.servers[index].pid) as at:
                try:
                    yield at
                finally:
                    if is_killed:
                        with anyio.CancelScope(shield=True):
                            await self.kill(index)
        finally:
            if is_killed:
                with anyio.CancelScope(shield=True):
                    await self.start(index)
            self.down.discard(index)

    async def leader(self) -> int | None:
        """The server that leads the records of instances; None where it is not known now."""
        names = await self._ask([f"$JS.API.STREAM.INFO.{INSTANCES_STREAM.name}"], _leader_of)
        known = {server.name: index for index, server in enumerate(self.servers)}
        return known.get(names[0]) if names else None

    async def holdings(self) -> ServerHoldings | None:
        """The resources that the servers hold together; None where they cannot be asked now."""
        answers = await self._ask([STREAM_LIST, ACCOUNT_STATE], _lists_of)
        accounts = [one for answer in answers for one in answer.data.account_statz]
        streams = [one.state for answer in answers for one in answer.streams]
        if not accounts or not streams:
            return None
        return ServerHoldings(
            connections=sum(each.conns for each in accounts),
            subscriptions=sum(each.num_subscriptions for each in accounts),
            consumers=sum(each.consumer_count for each in streams),
            messages=sum(each.messages for each in streams),
            bytes=sum(each.bytes for each in streams),
        )

    async def _ask(self, subjects: Sequence[str], read: Callable[[Message], T | None]) -> list[T]:
        """The servers' answers; none where they cannot be asked now."""
        config = BusConfig(servers=tuple(server.url for server in self.servers))
        with suppress(DynbusError):
            async with terminal.server(config, "dynbus-chaos") as server:
                return await server.ask(
                    subjects, b"{}", read, seconds=ANSWER_SECONDS, quiet=ANSWER_QUIET
                )
        return []


class _Account(msgspec.Struct):
    conns: int
    num_subscriptions: int


class _Accounts(msgspec.Struct):
    account_statz: list[_Account] = []


class _StreamState(msgspec.Struct):
    messages: int
    bytes: int
    consumer_count: int


class _ListedStream(msgspec.Struct):
    state: _StreamState


class _Lists(msgspec.Struct):
    """The answer to either question: it has one of the two."""

    data: _Accounts = msgspec.field(default_factory=_Accounts)
    streams: list[_ListedStream] = []


def _lists_of(answer: Message) -> _Lists | None:
    try:
        return msgspec.json.decode(answer.data, type=_Lists)
    except msgspec.DecodeError:
        return None


class _Cluster(msgspec.Struct):
    leader: str = ""


class _StreamInfo(msgspec.Struct):
    cluster: _Cluster = msgspec.field(default_factory=_Cluster)


def _leader_of(answer: Message) -> str | None:
    try:
        return msgspec.json.decode(answer.data, type=_StreamInfo).cluster.leader or None
    except msgspec.DecodeError:
        return None


@asynccontextmanager
async def own_servers(folder: Path, count: int, *, proxied: bool) -> AsyncGenerator[OwnServers]:
    """Start the servers, with their data in `folder`; they end with the block.

    Raises:
        ConfigError: there is no nats-server, or it does not start.
        Unavailable: one did not answer in time.
    """
    routes_at = [free_port() for _ in range(count)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes_at)
    servers: list[RunningServer] = []
    for number, port in enumerate(routes_at, 1):
        # Servers of a cluster tell their clients of each other: a way round the proxies.
        hidden = "no_advertise: true" if proxied else ""
        listen = f'listen: "127.0.0.1:{port}"'
        cluster = f"cluster {{ name: chaos, {listen}, routes: [{routes}], {hidden} }}"
        servers.append(
            RunningServer(
                free_port(),
                store_dir=folder / f"server-{number}",
                config=cluster if count > 1 else "",
                bound=True,
            )
        )
    async with AsyncExitStack() as stack:
        async with anyio.create_task_group() as starting:
            for server in servers:
                stack.push_async_callback(_end, server)
                starting.start_soon(server.start)
        running = OwnServers(servers)
        for server in servers if proxied else ():
            running.for_workers.append(await stack.enter_async_context(Proxy(server.port)))
            running.for_callers.append(await stack.enter_async_context(Proxy(server.port)))
        yield running


async def _end(server: RunningServer) -> None:
    with anyio.CancelScope(shield=True):
        await server.stop()
