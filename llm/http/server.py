"""The HTTP server: uvicorn with httptools, within bounds that they do not set themselves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import sys
from collections.abc import Generator
from functools import partial
from typing import Any, Final

import anyio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dynbus.bus.errors import ConfigError

from .application import Application
from .exchange import ABORT, WRITE
from .settings import HttpSettings

logger = logging.getLogger(__name__)

KEEP_ALIVE: Final = 75
"""Seconds that a connection is kept between two requests: more than clients and proxies keep
theirs, so that they are the ones to close it."""

BACKLOG: Final = 4096

PIPELINED: Final = 4
"""Requests of a connection that are read while another one's answer is awaited."""

LOOK_INTERVAL: Final = 0.02
"""Seconds between two looks whether a client has left whose connection is not read."""

SEND_BUFFER: Final = 128 * 1024
"""Bytes of a connection that wait in the kernel; it takes twice as many."""


def limited_protocol(settings: HttpSettings) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, with limits on the size of headers and the time that they take."""

    class LimitedProtocol(HttpToolsProtocol):
        """One connection."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._head_bytes = 0
            self._in_head = True
            self._deadline: asyncio.TimerHandle | None = None
            self._next_look: asyncio.TimerHandle | None = None
            self._cycles: list[RequestResponseCycle] = []

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._deadline = self.loop.call_later(settings.header_timeout, self._too_late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_clock()
            if self._next_look is not None:
                self._next_look.cancel()
            super().connection_lost(exc)
            # uvicorn tells the last request alone, which may wait for another one's answer.
            for cycle in self._cycles:
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                # Of the piece in which the headers end some bytes are the body's: those count
                # for nothing, since `on_headers_complete` comes before the next piece.
                self._head_bytes += min(len(data), settings.max_header_bytes + 1)
                if self._head_bytes > settings.max_header_bytes and not _ends_head(
                    data, settings.max_header_bytes
                ):
                    self._refuse_head()
                    return
                if self._deadline is None:
                    self._deadline = self.loop.call_later(settings.header_timeout, self._too_late)
            super().data_received(data)
            if self.pipeline and self._next_look is None:
                self._look()

        def _look(self) -> None:
            """See that the client leaves, although what it sent before is not read."""
            self._next_look = None
            if self.transport.is_closing() or not (self.pipeline and self.flow.read_paused):
                return
            if _has_left(self.transport.get_extra_info("socket")):
                self.transport.abort()
            else:
                self._next_look = self.loop.call_later(LOOK_INTERVAL, self._look)

        def on_message_begin(self) -> None:
            self._in_head = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_bytes = 0
            self._stop_clock()
            extensions: dict[str, Any] = {ABORT: self.transport.abort}
            self.scope["extensions"] = extensions
            super().on_headers_complete()
            extensions[WRITE] = partial(_write_piece, self.cycle)
            self._cycles = [each for each in self._cycles if not each.response_complete]
            self._cycles.append(self.cycle)
            if 0 < len(self.pipeline) <= PIPELINED:
                # uvicorn reads nothing now, and would not see that the client leaves.
                self.flow.resume_reading()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_head = True

        def _stop_clock(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_late(self) -> None:
            self._deadline = None
            if not self.transport.is_closing():
                self.transport.abort()

        def _refuse_head(self) -> None:
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                b"content-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()

    return LimitedProtocol


def _has_left(connection: socket.socket) -> bool:
    """Whether the other end has closed its side; False where the system does not tell."""
    if sys.platform != "linux":
        return False
    (state,) = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state != _ESTABLISHED


_ESTABLISHED: Final = 1
"""The state of a TCP connection that neither end has closed, by Linux."""


def _write_piece(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Write a piece of an answer that is sent in chunks, as `RequestResponseCycle.send` does.

    Returns:
        False, and nothing is written, where the client does not read, or `send` has more to do.
    """
    if cycle.flow.write_paused or not cycle.chunked_encoding or cycle.response_complete:
        return False
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


def _ends_head(data: bytes, limit: int) -> bool:
    """Whether headers end within the first `limit` bytes of a piece."""
    return b"\r\n\r\n" in data[:limit]


class _Server(uvicorn.Server):
    """uvicorn's server without its handling of signals, which the process does."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class HttpServer:
    """A front end's server, while it is open.

    Attributes:
        url: where it answers, with the actual port.
    """

    def __init__(self, application: Application, settings: HttpSettings) -> None:
        self._settings = settings
        self._socket = _listen(settings)
        config = uvicorn.Config(
            application,
            http=limited_protocol(settings),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=max(1, round(settings.grace)),
            backlog=BACKLOG,
            ssl_context_factory=_context_factory(settings),
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            self._socket.close()
            raise ConfigError(
                f"the certificate {settings.tls_cert} and the key {settings.tls_key} cannot be "
                f"used: {error}"
            ) from None
        self._server = _Server(config)
        host, port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if settings.tls_cert else ''}://{shown}:{port}"

    def __repr__(self) -> str:
        return f"<HttpServer {self.url}>"

    async def serve(self) -> None:
        """Answer requests until `stop`, and then finish those that run."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Take no more requests; those that run have their grace."""
        self._server.should_exit = True

    async def started(self) -> None:
        """Wait until requests are answered."""
        await self._server.is_up.wait()


def _listen(settings: HttpSettings) -> socket.socket:
    """A socket that listens where the settings say.

    Raises:
        ConfigError: that is not possible.
    """
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Its connections have it too: the kernel keeps no more for a client that does not read.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = ": give another port, or port 0 for any free one" if is_taken else ""
        raise ConfigError(
            f"the front end cannot listen at {settings.host}:{settings.port}: "
            f"{error.strerror or error}{remedy}"
        ) from None
    listener.setblocking(False)
    return listener


def _context_factory(settings: HttpSettings) -> Any:
    """What makes the context of TLS for uvicorn; None without TLS."""
    certificate, key = settings.tls_cert, settings.tls_key
    if certificate is None or key is None:
        return None

    def make(config: uvicorn.Config, default: Any) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(certificate, key)
        return context

    return make
