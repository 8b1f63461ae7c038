"""Liveness, readiness and metrics over HTTP (`/live`, `/ready`, `/metrics`), for orchestrators and
Prometheus.

A server of a few dozen lines on asyncio streams: GET only, one request per connection, with
bounds on size, time and number. It belongs to the loop that starts it. Run on the control
thread, it answers while a handler blocks the main loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self

import anyio

from dynbus.bus.background import Background
from dynbus.bus.errors import ConfigError
from dynbus.bus.extras import how_to_install

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MAX_REQUEST_BYTES: Final = 8192
MAX_CONNECTIONS: Final = 64
REQUEST_TIMEOUT: Final = 5.0
"""Seconds that a connection may last."""

_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """The result of a health check.

    Attributes:
        problems: what is not well, and why; empty when all is well.
        details: what else there is to know, which changes nothing.
    """

    problems: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    details: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class _Response:
    status: HTTPStatus
    body: bytes
    content_type: str = _JSON

    def encode(self, *, with_body: bool) -> bytes:
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            "Cache-Control: no-store\r\n"
            "Connection: close\r\n\r\n"
        ).encode("ascii")
        return head + self.body if with_body else head


def metrics_remedy() -> str:
    """The remedy where `/metrics` lacks its extra."""
    return f"needs an extra: {how_to_install('metrics')}, then start again"


def parse_address(text: str) -> tuple[str, int]:
    """Split `HOST:PORT`; an IPv6 host stands in brackets, port 0 takes a free one.

    Raises:
        ConfigError: it is not of this form.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if (
        not colon
        or not host
        or (":" in host and not bracketed)
        or not (port.isascii() and port.isdigit())
        or int(port) > 65535
    ):
        raise ConfigError(
            f"{text!r} is not an address: write HOST:PORT, for example 127.0.0.1:9090 or [::1]:9090"
        )
    return host, int(port)


def health_tls(cert: str, key: str, client_ca: str | None = None) -> ssl.SSLContext:
    """The TLS of a health server.

    Args:
        client_ca: a file of authorities; each client needs a certificate that one has signed.

    Raises:
        ConfigError: the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigError(
            f"the certificate {cert}, the key {key} and the authorities of clients "
            f"{client_ca or 'none'} cannot be used: {error}"
        ) from None
    return context


class HealthServer:
    """Answers `/live`, `/ready` and `/metrics` while it is open.

    Args:
        live: whether the process works at all; if not, an orchestrator restarts it.
        ready: whether it can take calls now.
        metrics: serve `/metrics`; without it the answer there is 501 with the remedy.
        registry: what `/metrics` shows; prometheus-client's own registry unless given, which
            `configure_telemetry(prometheus=True)` fills.
        tls: its certificate, and what it wants of clients; None for plain HTTP.

    `live` and `ready` are called in the server's loop. One that raises counts as not well. It has
    no credentials but those of `tls`: the operator who opens it decides who may reach its host.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        live: Callable[[], Status],
        ready: Callable[[], Status],
        metrics: bool = False,
        registry: CollectorRegistry | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        # localhost may stand for two addresses, which would get two different free ports.
        self.host = "127.0.0.1" if host.lower() == "localhost" else host
        self.port = port
        self._checks = {"/live": live, "/ready": ready}
        self._expose = _metrics_page(registry) if metrics else None
        self._server: asyncio.Server | None = None
        self._connections = 0
        self._background = Background(repr(self), self._failed)

    def __repr__(self) -> str:
        state = "open" if self._server is not None else "closed"
        return f"<HealthServer {self.url} [{state}]>"

    @property
    def has_metrics(self) -> bool:
        """True if `/metrics` has a page."""
        return self._expose is not None

    @property
    def url(self) -> str:
        """The URL at which it answers; with the actual port once it is open."""
        scheme = "https" if self._tls is not None else "http"
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Listen, and set `port` to the actual one.

        Raises:
            ConfigError: the address cannot be bound.
        """
        await self._background.open()
        try:
            self._server = await asyncio.start_server(
                self._accept, self.host, self.port, limit=MAX_REQUEST_BYTES, ssl=self._tls
            )
        except OSError as error:
            await self._background.close()
            raise ConfigError(
                f"the health server cannot listen at {self.host}:{self.port}: {error.strerror}"
            ) from error
        bound: tuple[str, int] = self._server.sockets[0].getsockname()
        self.port = bound[1]

    async def aclose(self) -> None:
        """Stop listening and drop what is still being answered; more calls change nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        await self._background.close()
        await server.wait_closed()

    def _failed(self, error: BaseException) -> None:
        """Answer nobody any more: a prober takes the process for what it is."""
        if self._server is not None:
            self._server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None or self._connections >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections += 1
        self._background.start(self._serve, reader, writer, name="health request")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # A client that stalls or leaves is owed nothing.
            with anyio.move_on_after(REQUEST_TIMEOUT), suppress(ConnectionError):
                method, response = await self._read_and_answer(reader)
                writer.write(response.encode(with_body=method != "HEAD"))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except Exception:
            # One request that fails keeps no other from its answer.
            logger.exception("a health request failed")
        finally:
            self._connections -= 1
            writer.transport.abort()

    async def _read_and_answer(self, reader: asyncio.StreamReader) -> tuple[str, _Response]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "", _problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except asyncio.IncompleteReadError:
            return "", _problem(HTTPStatus.BAD_REQUEST)
        line = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(line) != 3 or not line[2].startswith("HTTP/1."):
            return "", _problem(HTTPStatus.BAD_REQUEST)
        method, target, _ = line
        if method not in ("GET", "HEAD"):
            return method, _problem(HTTPStatus.METHOD_NOT_ALLOWED)
        return method, await self._answer(target.partition("?")[0])

    async def _answer(self, path: str) -> _Response:
        check = self._checks.get(path)
        if check is not None:
            return _answer_check(path, check)
        if path == "/metrics":
            if self._expose is None:
                text = f"/metrics {metrics_remedy()}\n".encode()
                return _Response(HTTPStatus.NOT_IMPLEMENTED, text, _TEXT)
            # Collecting takes the longer the more series there are, and this loop may also
            # be the one that sends heartbeats.
            content_type, page = await asyncio.to_thread(self._expose)
            return _Response(HTTPStatus.OK, page, content_type)
        return _problem(HTTPStatus.NOT_FOUND)


def _answer_check(path: str, check: Callable[[], Status]) -> _Response:
    try:
        status = check()
    except Exception as error:
        # A check that cannot be made has failed.
        logger.exception("the health check of %s raised", path)
        status = Status({"check": type(error).__name__})
    code = HTTPStatus.OK if status.ok else HTTPStatus.SERVICE_UNAVAILABLE
    body: dict[str, object] = {
        "status": "ok" if status.ok else "unavailable",
        "problems": dict(status.problems),
    }
    if status.details:
        body["details"] = dict(status.details)
    return _Response(code, json.dumps(body).encode() + b"\n")


def _problem(status: HTTPStatus) -> _Response:
    return _Response(status, json.dumps({"status": status.phrase}).encode() + b"\n")


def _metrics_page(registry: CollectorRegistry | None) -> Callable[[], tuple[str, bytes]]:
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

    collecting = threading.Lock()

    def page() -> tuple[str, bytes]:
        # OpenTelemetry's collector gives two that collect at once one page with all of it twice.
        with collecting:
            return CONTENT_TYPE_LATEST, generate_latest(registry or REGISTRY)

    return page
