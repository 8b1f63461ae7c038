"""`GetServer`: answers GET over HTTP, for probers, Prometheus and the browser of an operator.

A server of a few dozen lines on asyncio streams: one request per connection, with bounds on size,
time and number. It belongs to the loop that starts it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import ClassVar, Final, Self

import anyio

from dynbus.bus.background import Background
from dynbus.bus.errors import ConfigError

MAX_REQUEST_BYTES: Final = 8192
MAX_CONNECTIONS: Final = 64
REQUEST_TIMEOUT: Final = 5.0
"""Seconds that a connection may last."""

JSON: Final = "application/json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Response:
    """An answer.

    Attributes:
        headers: beside those of its length and type.
    """

    status: HTTPStatus
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def encode(self, *, with_body: bool) -> bytes:
        """The bytes on the wire."""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            + "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
            + "Cache-Control: no-store\r\n"
            "Connection: close\r\n\r\n"
        ).encode("ascii")
        return head + self.body if with_body else head


def problem(status: HTTPStatus) -> Response:
    """The answer where there is none but a status."""
    return Response(status, json.dumps({"status": status.phrase}).encode() + b"\n")


class GetServer(ABC):
    """Answers while it is open. `answer` says what.

    Args:
        tls: its certificate, and what it wants of clients; None for plain HTTP.

    Attributes:
        title: the server, in texts of errors.
    """

    title: ClassVar[str]

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        # localhost may stand for two addresses, which would get two different free ports.
        self.host = "127.0.0.1" if host.lower() == "localhost" else host
        self.port = port
        self._server: asyncio.Server | None = None
        self._connections = 0
        self._background = Background(repr(self), self._failed)

    def __repr__(self) -> str:
        state = "open" if self._server is not None else "closed"
        return f"<{type(self).__name__} {self.url} [{state}]>"

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

    @abstractmethod
    async def answer(self, path: str, query: str) -> Response:
        """The answer to a GET of a path, with the query behind its question mark."""

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
                f"{self.title} cannot listen at {self.host}:{self.port}: {error.strerror}"
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
        self._background.start(self._serve, reader, writer, name="a request")

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
            logger.exception("a request to %s failed", self.title)
        finally:
            self._connections -= 1
            writer.transport.abort()

    async def _read_and_answer(self, reader: asyncio.StreamReader) -> tuple[str, Response]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "", problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except asyncio.IncompleteReadError:
            return "", problem(HTTPStatus.BAD_REQUEST)
        line = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(line) != 3 or not line[2].startswith("HTTP/1."):
            return "", problem(HTTPStatus.BAD_REQUEST)
        method, target, _ = line
        if method not in ("GET", "HEAD"):
            return method, problem(HTTPStatus.METHOD_NOT_ALLOWED)
        path, _, query = target.partition("?")
        return method, await self.answer(path, query)
