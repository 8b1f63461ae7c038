"""The HTTP server: uvicorn with httptools, within bounds that they do not set themselves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Generator
from functools import partial
from typing import Any, Final, cast

import anyio
import uvicorn

from dynbus import ConfigError

from .application import Application
from .connection import LimitedProtocol, Strangers
from .settings import HttpSettings

logger = logging.getLogger(__name__)

KEEP_ALIVE: Final = 75
"""Seconds that a connection is kept between two requests: more than clients and proxies keep
theirs, so that they are the ones to close it."""

BACKLOG: Final = 4096

SEND_BUFFER: Final = 128 * 1024
"""Bytes of a connection that wait in the kernel; it takes twice as many."""


_UNLIMITED: Final = 2**20
"""Descriptors where the system has no limit of them."""


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
        protocol = partial(LimitedProtocol, settings, _strangers(settings))
        config = uvicorn.Config(
            application,
            # Called as a class is.
            http=cast("type[LimitedProtocol]", protocol),
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
                f"the certificate {settings.tls_cert}, the key {settings.tls_key} and the "
                f"authorities of clients {settings.tls_client_ca or 'none'} cannot be used: {error}"
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


def _strangers(settings: HttpSettings) -> Strangers[asyncio.Transport]:
    """Those who have shown no key, for whom there never are more than half of the descriptors."""
    descriptors = _raised_descriptors()
    return Strangers(min(settings.max_strangers, descriptors // 4), descriptors // 2)


def _raised_descriptors() -> int:
    """The number of files and connections that the process may have: as many as the system allows
    it, which is more than it gives without being asked.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        # Some systems say that there is no limit, and have one.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _listen(settings: HttpSettings) -> socket.socket:
    """A socket that listens where the settings say.

    Raises:
        ConfigError: that is not possible.
    """
    try:
        addresses = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = addresses[0]
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
        remedy = (
            ": give another port (`dynbus http --port=8001`; `dynbus run` with --Front.port=8001, "
            "where Front is the name of the actor), or port 0 for any free one"
        )
        raise ConfigError(
            f"the front end cannot listen at {settings.host}:{settings.port}: "
            f"{error.strerror or error}{remedy if is_taken else ''}"
        ) from None
    listener.setblocking(False)
    return listener


def _context_factory(settings: HttpSettings) -> Any:
    """The function that makes the context of TLS for uvicorn; None without TLS."""
    certificate, key = settings.tls_cert, settings.tls_key
    if certificate is None or key is None:
        return None

    def make(config: uvicorn.Config, default: Any) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(certificate, key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return make
