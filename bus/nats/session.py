"""One session with nats-server: which server, the handshake, raw bytes after it, and pings.

nats-py does TLS, credentials and the handshake; from then on it would read the connection
itself, and that part is taken from it. Its private parts are touched in `NatsSession` only.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import nats.aio.client
import nats.aio.transport
import nats.errors

from dynbus.bus.background import run_apart
from dynbus.bus.errors import PermissionDenied, Unavailable
from dynbus.bus.protocol.tokens import jitter

logger = logging.getLogger(__name__)

READ_BYTES: Final = 256 * 1024
EARLY_WRITE_BYTES: Final = 8192
PING_INTERVAL: Final = 2.0
MAX_SILENT_PINGS: Final = 2
MAX_UNANSWERED_PINGS: Final = 5


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


class NatsOutput:
    """Collects what is written in one turn of the loop and hands it to the session at once.

    Attributes:
        session: the latest session; what is written before the first one waits.
    """

    __slots__ = ("_chunks", "_flush_scheduled", "_loop", "_size", "session")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._chunks: list[bytes] = []
        self._size = 0
        self._flush_scheduled = False
        self.session: NatsSession | None = None

    def __repr__(self) -> str:
        return f"<NatsOutput [{self.backlog} bytes]>"

    @property
    def backlog(self) -> int:
        """Bytes that the operating system has not taken yet."""
        session = self.session
        return self._size + (session.write_buffer_size if session is not None else 0)

    def write(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if self._size >= EARLY_WRITE_BYTES:
            self._write_out()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand over what waits, now."""
        self._flush_scheduled = False
        self._write_out()

    def clear(self) -> None:
        """Forget what waits: its session is over."""
        self._chunks.clear()
        self._size = 0

    def _write_out(self) -> None:
        if self._chunks and self.session is not None:
            data = b"".join(self._chunks)
            self.clear()
            self.session.write_now(data)


class Pings:
    """The pings of one connection, session by session. Lives on one loop.

    Args:
        write: sends bytes to the server, behind all that was written before.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, write: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._write = write
        self._pongs: list[asyncio.Future[None]] = []
        self._silent = 0
        self._unanswered = 0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Pings [waiting: {len(self._pongs)}, unanswered: {self._unanswered}]>"

    def send(self) -> asyncio.Future[None]:
        """Send one; its future is done when the server has taken all that was written before.

        The future raises `ConnectionResetError` when the session ends first.
        """
        pong: asyncio.Future[None] = self._loop.create_future()
        self._pongs.append(pong)
        self._write(b"PING\r\n")
        return pong

    def watch(self, give_up: Callable[[], None]) -> None:
        """Ping at every interval of a new session; `give_up` when the server is silent."""
        self._silent = 0
        self._unanswered = 0
        self._timer = self._loop.call_later(PING_INTERVAL, self._tick, give_up)

    def unwatch(self) -> None:
        """The inverse of `watch`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        """Bytes arrived."""
        self._silent = 0

    def answered(self) -> None:
        """A pong arrived: the server answers pings in their order."""
        self._unanswered = 0
        if self._pongs:
            pong = self._pongs.pop(0)
            if not pong.done():
                pong.set_result(None)

    def lose(self) -> None:
        """The session has ended, and nothing that was asked in it is answered any more."""
        pongs, self._pongs = self._pongs, []
        for pong in pongs:
            if not pong.done():
                pong.set_exception(ConnectionResetError())
                pong.exception()

    def _tick(self, give_up: Callable[[], None]) -> None:
        # What arrives while no ping is answered comes over a link that is deaf the other way.
        if self._silent >= MAX_SILENT_PINGS or self._unanswered >= MAX_UNANSWERED_PINGS:
            give_up()
            return
        self._silent += 1
        self._unanswered += 1
        self.send()
        self._timer = self._loop.call_later(PING_INTERVAL, self._tick, give_up)


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
            with anyio.fail_after(timeout):
                connect = partial(
                    session.connect,
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
                # In a task of its own: nats-py waits by `asyncio.wait_for`, which on Python 3.11
                # loses the cancel of a task that comes just when what it waits for does.
                await run_apart(connect, name=f"connect {name}")
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
