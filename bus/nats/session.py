"""One session with nats-server: which server, the handshake, and raw bytes after it.

nats-py does TLS, credentials and the handshake; from then on it would read the connection
itself, and that part is taken from it. Its private parts are touched in `NatsSession` only.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import nats.aio.client
import nats.aio.transport
import nats.errors

from dynbus.bus.errors import PermissionDenied, Unavailable
from dynbus.bus.protocol.tokens import jitter

logger = logging.getLogger(__name__)

READ_BYTES: Final = 256 * 1024


class NatsSession(nats.aio.client.Client):
    """One TCP session: nats-py up to the end of the handshake, raw bytes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.handshaken: asyncio.Event = asyncio.Event()
        self._socket_number: int | None = None

    async def _read_loop(self) -> None:
        # nats-py starts this task as the last step of its handshake and would parse from
        # here on; the connection reads the transport itself instead.
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and writer.get_extra_info("ssl_object") is None:
            self._socket_number = writer.get_extra_info("socket").fileno()
        self.handshaken.set()

    async def _ping_interval(self) -> None:
        # The connection sends its own pings, through its own buffer.
        return

    async def read(self) -> bytes:
        return await self._open_transport.read(READ_BYTES)

    def write(self, data: bytes) -> None:
        # What is written in the last moments of a session is lost, as it is on the way.
        if not self._is_closing:
            self._open_transport.write(data)

    @property
    def _is_closing(self) -> bool:
        writer = getattr(self._transport, "_io_writer", None)
        return writer is None or writer.is_closing()

    def write_now(self, data: bytes) -> None:
        """Hand bytes to the operating system in this very moment where that is possible.

        uvloop sends at the end of a turn of the loop. In a turn that answers many calls the
        other side would wait for all of them, and neither side would ever work while the
        other does.
        """
        # A socket number may belong to another file as soon as the transport is closed.
        if self._socket_number is None or self._is_closing or self.write_buffer_size > 0:
            self.write(data)
            return
        try:
            sent = os.write(self._socket_number, data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            logger.debug("the socket is broken: %s", error)
            self.abort()
            return
        if sent < len(data):
            self.write(data[sent:])

    @property
    def write_buffer_size(self) -> int:
        writer = getattr(self._transport, "_io_writer", None)
        return writer.transport.get_write_buffer_size() if writer is not None else 0

    async def flush_transport(self) -> None:
        drain: Callable[[], Awaitable[None]] = self._open_transport.drain
        await drain()

    @property
    def _open_transport(self) -> nats.aio.transport.Transport:
        assert self._transport is not None, "the session is not open"
        return self._transport

    @property
    def info(self) -> dict[str, Any]:
        """The server's INFO, to be updated when it sends another."""
        return self._server_info

    @property
    def server_name(self) -> str:
        """The address connected to, without credentials."""
        url = self.connected_url
        return url.netloc.rpartition("@")[2] if url is not None else ""

    def abort(self) -> None:
        """Drop the socket without sending what is buffered."""
        for name in ("_reading_task", "_ping_interval_task", "_flusher_task"):
            task: asyncio.Task[Any] | None = getattr(self, name)
            if task is not None:
                task.cancel()
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


def candidates(
    servers: Sequence[str], *, advertised: Sequence[str] = (), avoid: str = ""
) -> list[str]:
    """The URLs to try next, in random order.

    Args:
        servers: URLs as configured.
        advertised: addresses (`host:port`) that a server named; tried with the scheme and
            credentials of the first of `servers`.
        avoid: the address of a server that is going away; it comes last.
    """
    found = list(servers)
    known = {urlsplit(server).netloc.rpartition("@")[2] for server in found}
    scheme, _, rest = found[0].partition("://")
    user = rest.rpartition("@")[0]
    for address in advertised:
        if address not in known:
            found.append(f"{scheme}://{user}@{address}" if user else f"{scheme}://{address}")
    jitter.shuffle(found)
    if avoid:
        found.sort(key=lambda server: server.endswith(avoid))
    return found


async def open_session(
    servers: Sequence[str], *, name: str, timeout: float, options: Mapping[str, Any]
) -> NatsSession:
    """A session with the first of `servers` that takes one.

    Args:
        timeout: seconds for each server.
        options: further arguments of nats-py's `connect`.

    Raises:
        PermissionDenied: a server refuses the credentials.
        Unavailable: no server could be reached.
    """
    failures: list[str] = []
    for server in servers:
        session = NatsSession()
        try:
            async with asyncio.timeout(timeout):
                await session.connect(
                    [server],
                    name=name,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    # nats-py would sleep after a refusal; the caller has a pause of its own.
                    reconnect_time_wait=0,
                    connect_timeout=max(1, int(timeout)),
                    error_cb=_ignore,
                    **options,
                )
                await session.handshaken.wait()
            return session
        except (OSError, TimeoutError, nats.errors.Error) as error:
            session.abort()
            text = str(error) or type(error).__name__
            if "authorization" in text.lower() or "authentication" in text.lower():
                raise PermissionDenied(
                    f"{_address(server)} refuses the credentials: {text}"
                ) from None
            failures.append(f"{_address(server)}: {text}")
        except BaseException:
            session.abort()
            raise
    raise Unavailable(
        f"no NATS server can be reached ({'; '.join(failures)}): start one there, or name another "
        "by its URL, for example nats://127.0.0.1:4222"
    )


async def _ignore(error: Exception) -> None:
    """nats-py reports each failed attempt here before it raises it."""


def _address(server: str) -> str:
    return (urlsplit(server).netloc or server).rpartition("@")[2]
