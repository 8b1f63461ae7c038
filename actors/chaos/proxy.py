"""A TCP proxy that fails on command: between a client or a worker and nats-server."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType


class Faults:
    """The faults of the bytes that pass: of those of one connection, or of all.

    Attributes:
        delay: seconds that each chunk takes, in both directions.
        swallow_to_server, swallow_to_client: whether every byte in that direction is lost.
    """

    def __init__(self) -> None:
        self.delay = 0.0
        self.swallow_to_server = False
        self.swallow_to_client = False
        self._open = asyncio.Event()
        self._open.set()

    def freeze(self) -> None:
        """Forward nothing and close nothing: connections are half-open."""
        self._open.clear()

    def thaw(self) -> None:
        """The inverse of `freeze`; what was held back goes on."""
        self._open.set()

    async def passage(self) -> None:
        """Wait while this is frozen."""
        await self._open.wait()

    def swallows(self, *, to_server: bool) -> bool:
        """True if bytes in this direction are lost."""
        return self.swallow_to_server if to_server else self.swallow_to_client


class ProxiedConnection(Faults):
    """One proxied connection: two pumps and what is being done to them.

    Attributes:
        port: of the client.
    """

    def __init__(
        self,
        proxy: Proxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        super().__init__()
        self._proxy = proxy
        self.port: int = client[1].get_extra_info("peername")[1]
        self._writers = (client[1], server[1])
        self._tasks = (
            asyncio.create_task(self._pump(client[0], server[1], to_server=True)),
            asyncio.create_task(self._pump(server[0], client[1], to_server=False)),
        )
        for task in self._tasks:
            task.add_done_callback(self._forget)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_server: bool
    ) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(64 * 1024):
                await self._pass_by()
                if self.swallows(to_server=to_server) or self._proxy.swallows(to_server=to_server):
                    continue
                if delay := self._proxy.delay + self.delay:
                    await asyncio.sleep(delay)
                writer.write(chunk)
                await writer.drain()
        # While half-open neither side may learn that the other one has gone.
        await self._pass_by()
        writer.close()

    async def _pass_by(self) -> None:
        """Wait while the proxy or this link is frozen."""
        await self._proxy.passage()
        await self.passage()

    def cut(self) -> None:
        """Reset both sides."""
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()

    def _forget(self, task: asyncio.Task[None]) -> None:
        if all(each.done() for each in self._tasks):
            self._proxy.forget(self)


class Proxy(Faults):
    """Forwards connections to a port of 127.0.0.1; use it with `async with`.

    Attributes:
        accepted: connections taken so far.
        links: those that there are.
    """

    def __init__(self, target_port: int) -> None:
        super().__init__()
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self.links: list[ProxiedConnection] = []
        self._refuse = False
        self._silenced: Counter[int] = Counter()
        self.accepted = 0
        self.port = 0

    @property
    def url(self) -> str:
        """The URL that a client connects to."""
        return f"nats://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.refuse()
        self.cut()
        # One turn for the transports that were just aborted to close their sockets.
        await asyncio.sleep(0)

    def cut(self) -> None:
        """Reset every connection; new ones are taken unless `refuse` says otherwise."""
        links, self.links = self.links, []
        for link in links:
            link.cut()

    def refuse(self, refused: bool = True) -> None:
        """Reset new connections as soon as they come."""
        self._refuse = refused

    def silence(self, pid: int) -> None:
        """Freeze every connection of one process, and those that it opens from now on."""
        self._silenced[pid] += 1
        for link in links_of(pid, [self]):
            link.freeze()

    def hear(self, pid: int) -> None:
        """The inverse of `silence`; what was held back goes on."""
        self._silenced[pid] -= 1
        for link in links_of(pid, [self]):
            link.thaw()

    def forget(self, link: ProxiedConnection) -> None:
        """A connection has ended."""
        with suppress(ValueError):
            self.links.remove(link)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._refuse:
            writer.transport.abort()
            return
        try:
            server = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        if self._refuse:
            # Since it was taken.
            writer.transport.abort()
            server[1].transport.abort()
            return
        link = ProxiedConnection(self, (reader, writer), server)
        self.links.append(link)
        for pid, times in self._silenced.items():
            if times and link in links_of(pid, [self]):
                link.freeze()


def links_of(pid: int, proxies: Iterable[Proxy]) -> list[ProxiedConnection]:
    """The connections of one process through these proxies.

    All of them where the system does not tell whose they are, as others than Linux.
    """
    links = [link for proxy in proxies for link in proxy.links]
    try:
        ports = _ports_of(pid)
    except OSError:
        return [] if Path("/proc/net/tcp").exists() else links
    return [link for link in links if link.port in ports]


def _ports_of(pid: int) -> set[int]:
    """The ports of 127.0.0.1 from which a process is connected.

    Raises:
        OSError: the system does not tell, or the process is gone.
    """
    sockets: set[str] = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            kind, _, inode = os.readlink(each).partition(":")
            if kind == "socket":
                sockets.add(inode.strip("[]"))
    # sl local_address rem_address st tx:rx tr:tm retrnsmt uid timeout inode
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {int(row[1].partition(":")[2], 16) for row in rows if row[9] in sockets}
