"""A TCP proxy that fails on command: between a client or a worker and nats-server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType


class Link:
    """One proxied connection: two pumps and what is being done to them."""

    def __init__(
        self,
        proxy: Proxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy = proxy
        self._writers = (client[1], server[1])
        self._tasks = (
            asyncio.create_task(self._pump(client[0], server[1], to_server=True)),
            asyncio.create_task(self._pump(server[0], client[1], to_server=False)),
        )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_server: bool
    ) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(64 * 1024):
                await self._proxy.passage(to_server=to_server)
                if self._proxy.swallows(to_server=to_server):
                    continue
                if self._proxy.delay:
                    await asyncio.sleep(self._proxy.delay)
                writer.write(chunk)
                await writer.drain()
        # While half-open neither side may learn that the other one has gone.
        await self._proxy.passage(to_server=to_server)
        writer.close()

    def cut(self) -> None:
        """Reset both sides."""
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()


class Proxy:
    """Forwards connections to a port of 127.0.0.1; use it with `async with`.

    Attributes:
        delay: seconds that each chunk takes, in both directions.
        accepted: connections taken so far.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._links: list[Link] = []
        self._open = asyncio.Event()
        self._open.set()
        self._swallow_to_server = False
        self._swallow_to_client = False
        self._refuse = False
        self.delay = 0.0
        self.accepted = 0
        self.port = 0

    @property
    def url(self) -> str:
        """What a client connects to."""
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
        self.cut()
        # One turn for the transports that were just aborted to close their sockets.
        await asyncio.sleep(0)

    def cut(self) -> None:
        """Reset every connection; new ones are taken unless `refuse` says otherwise."""
        links, self._links = self._links, []
        for link in links:
            link.cut()

    def refuse(self, refused: bool = True) -> None:
        """Reset new connections as soon as they come."""
        self._refuse = refused

    def freeze(self) -> None:
        """Forward nothing and close nothing: the connections are half-open."""
        self._open.clear()

    def thaw(self) -> None:
        """The inverse of `freeze`; what was held back goes on."""
        self._open.set()

    def blackhole(self, *, to_server: bool = False, to_client: bool = False) -> None:
        """Lose every byte in the given directions; both False heals new connections only."""
        self._swallow_to_server = to_server
        self._swallow_to_client = to_client

    async def passage(self, *, to_server: bool) -> None:
        """Wait while the proxy is frozen."""
        await self._open.wait()

    def swallows(self, *, to_server: bool) -> bool:
        """Whether bytes in this direction are lost."""
        return self._swallow_to_server if to_server else self._swallow_to_client

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
        self._links.append(Link(self, (reader, writer), server))
