"""An HTTP/1.1 client for one server: connections that are kept, and answers read as they come.

Each token of each stream of a server passes here. httptools parses in C, and a piece of a body is
handed on with what else the same read brought.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import urlsplit

import anyio

from dynbus import ConfigError
from dynbus.spi import describe_exception, how_to_install, monotonic

try:
    import httptools
except ImportError as error:
    raise ImportError(f"servers are asked over HTTP: {how_to_install('http')} ({error})") from error

CONNECT_TIMEOUT: Final = 5.0
KEPT_FOR: Final = 3.0
"""Seconds for which a connection is kept that nobody uses: less than servers keep it."""
MAX_KEPT: Final = 256
MAX_HEADERS: Final = 64 * 1024
READ_SIZE: Final = 64 * 1024
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A server whose machine is gone is noticed within half a minute."""


class NotReached(Exception):
    """Raised when a request did not get to the server."""


class BrokenOff(Exception):
    """Raised when the connection ended before the answer did."""


class ServerAddress(NamedTuple):
    """The address of a server.

    Attributes:
        base: the path of its OpenAI-compatible routes, such as `/v1`.
        root: the path of what else it serves.
    """

    host: str
    port: int
    tls: bool
    base: str
    root: str

    @property
    def authority(self) -> str:
        """Host and port as a header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.authority}{self.base}"

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """The address in a URL; without a path, its routes are below `/v1`.

        Raises:
            ConfigError: it is no such URL.
        """
        problem = ""
        try:
            parts = urlsplit(url.strip())
            port = parts.port
            (parts.hostname or "").encode("idna")
        except ValueError as error:
            raise ConfigError(f"url = {url!r} is not usable: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            problem = "give http://HOST:PORT or https://HOST"
        elif parts.username is not None or parts.password is not None:
            raise ConfigError("url has a password: give key_file or key_variable instead")
        elif parts.query or parts.fragment or not parts.path.isascii() or " " in parts.path:
            problem = "it may have a path, and neither a query nor a fragment"
        if problem:
            raise ConfigError(f"url = {url!r} is not usable: {problem}")
        assert parts.hostname is not None
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/")
        base = path or "/v1"
        root = path.removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, base, root)


class Trust(NamedTuple):
    """The files by which a server is known, and by which it knows us; empty for the system's
    authorities, and for no certificate.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""

    def context(self) -> ssl.SSLContext:
        """The context of connections.

        Raises:
            ConfigError: the files cannot be used.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key, password=_refuse_password)
        except OSError as error:
            raise ConfigError(
                f"tls_ca = {self.ca!r}, tls_cert = {self.cert!r} and tls_key = {self.key!r} cannot "
                f"be used: {error}"
            ) from None
        return context


def _refuse_password(*_: Any) -> NoReturn:
    """Refuse a key that is encrypted, for whose password OpenSSL would ask the terminal."""
    raise OSError("the key has a password")


class Answer:
    """The answer of a server, whose headers are there.

    Attributes:
        headers: their names in lower case.
    """

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = connection.parser.get_status_code()
        self.headers = connection.headers

    @property
    def content_type(self) -> str:
        """The media type, in lower case."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            BrokenOff: the connection ended before it.
        """
        connection = self._connection
        while True:
            if connection.body:
                yield connection.read_arrived()
            if connection.is_complete:
                return
            await connection.read()

    async def finish(self) -> None:
        """Read what is left of the body, which nobody wants.

        Raises:
            BrokenOff: the connection ended before it.
        """
        async for _ in self.pieces():
            pass

    async def body(self, limit: int) -> bytes:
        """The whole body.

        Raises:
            BrokenOff: the connection ended before it.
            ValueError: it has more than `limit` bytes.
        """
        data = bytearray()
        async for piece in self.pieces():
            data += piece
            if len(data) > limit:
                raise ValueError(f"the answer has more than {limit} bytes")
        return bytes(data)


class HttpClient:
    """Sends requests to one server. Close it in the end.

    Args:
        address: where it is.
        trust: the certificates, or a context made of them, where it is spoken to by TLS.
        at: IP addresses of its host, of which the first one that answers is connected to; what its
            name says unless given.

    Raises:
        ConfigError: their files cannot be used.
    """

    def __init__(
        self,
        address: ServerAddress,
        trust: Trust | ssl.SSLContext | None = None,
        at: Sequence[str] = (),
    ) -> None:
        self.address = address
        self._at = at or (address.host,)
        self._ssl: ssl.SSLContext | None = None
        if address.tls:
            made = trust if isinstance(trust, ssl.SSLContext) else None
            self._ssl = made or (trust if isinstance(trust, Trust) else Trust()).context()
        self._kept: deque[_Connection] = deque()

    def __repr__(self) -> str:
        return f"<HttpClient {self.address} [{len(self._kept)} kept]>"

    def close(self) -> None:
        """Close the connections that are kept."""
        for connection in self._kept:
            connection.close()
        self._kept.clear()

    @asynccontextmanager
    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> AsyncGenerator[Answer]:
        """Send a request; its answer, once the headers are there.

        A connection whose answer is not read to its end is closed, by which the server learns that
        nobody wants it.

        Raises:
            NotReached: the server cannot be reached.
            BrokenOff: the connection ended before the headers came.
        """
        data = self._written(method, path, headers, body)
        connection = await self._begin(data)
        try:
            yield Answer(connection)
        finally:
            if connection.may_be_kept and len(self._kept) < MAX_KEPT:
                connection.kept_since = monotonic()
                self._kept.append(connection)
            else:
                connection.close()

    def _written(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.address.authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        text = "\r\n".join([*lines, "Accept-Encoding: identity", "", ""])
        # A header of a caller must not become two.
        if text.count("\n") != len(lines) + 2 or text.count("\r") != len(lines) + 2:
            raise ValueError("a header has a line break")
        return text.encode("latin-1", "replace") + (body or b"")

    async def _begin(self, data: bytes) -> _Connection:
        """A connection on which the headers of the answer have come."""
        while True:
            connection, is_new = self._take_kept(), False
            if connection is None:
                connection, is_new = await self._connect(), True
            try:
                await connection.send(data)
                return connection
            except BrokenOff:
                connection.close()
                # The server may have closed what it had kept, in the same moment.
                if is_new or connection.has_begun:
                    raise
            except BaseException:
                connection.close()
                raise

    def _take_kept(self) -> _Connection | None:
        kept, now = self._kept, monotonic()
        while kept and now - kept[0].kept_since >= KEPT_FOR:
            kept.popleft().close()
        while kept:
            connection = kept.pop()
            if connection.is_open:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        *others, last = self._at
        for host in others:
            with suppress(NotReached):
                return await self._connect_to(host)
        return await self._connect_to(last)

    async def _connect_to(self, host: str) -> _Connection:
        address = self.address
        # The certificate is that of the name, wherever it leads.
        name = address.host if address.tls else None
        try:
            with anyio.fail_after(CONNECT_TIMEOUT):
                reader, writer = await asyncio.open_connection(
                    host, address.port, ssl=self._ssl, server_hostname=name
                )
        except TimeoutError:
            raise NotReached(f"there is no connection within {CONNECT_TIMEOUT:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise NotReached(
                f"its certificate is not taken ({error.verify_message}): tls_ca names the file of "
                "its authority"
            ) from error
        except OSError as error:
            raise NotReached(describe_exception(error)) from error
        connected = writer.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return _Connection(reader, writer)


class _Connection:
    """A connection, and what its parser found of the present answer.

    Attributes:
        has_begun: whether anything of the answer has come.
        is_complete: whether all of it has.
        has_excess: whether more came than the answer.
        keeps_alive: whether the server takes another request after it.
        body: pieces that were not taken yet.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.kept_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self.parser: Any = httptools.HttpResponseParser(self)
        self.headers: dict[str, str] = {}
        self.body: list[bytes] = []
        self.has_begun = self.has_headers = self.is_complete = self.has_excess = False
        self.keeps_alive = False

    @property
    def is_open(self) -> bool:
        return not (self._writer.is_closing() or self._reader.at_eof())

    @property
    def may_be_kept(self) -> bool:
        is_tidy = self.is_complete and not self.has_excess
        return is_tidy and self.is_open and self.keeps_alive

    def close(self) -> None:
        self._writer.close()

    async def send(self, data: bytes) -> None:
        """Send a request, and read until the headers of its answer are there."""
        self._begin()
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise BrokenOff(describe_exception(error)) from error
        size = 0
        while not self.has_headers:
            size += await self.read()
            if size > MAX_HEADERS and not self.has_headers:
                raise BrokenOff(f"the headers have more than {MAX_HEADERS} bytes")

    async def read(self) -> int:
        """Read on; returns how many bytes came.

        Raises:
            BrokenOff: the connection ended, or what came is no HTTP.
        """
        try:
            data = await self._reader.read(READ_SIZE)
        except OSError as error:
            raise BrokenOff(describe_exception(error)) from error
        if not data:
            self._end()
            return 0
        self.has_begun = True
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise BrokenOff(f"the server does not answer by HTTP: {error}") from error
        return len(data)

    def read_arrived(self) -> bytes:
        """The bytes of the body that have come since the last time."""
        body, self.body = self.body, []
        return body[0] if len(body) == 1 else b"".join(body)

    def _end(self) -> None:
        bounded = "content-length" in self.headers or "transfer-encoding" in self.headers
        if not self.has_headers or bounded:
            raise BrokenOff("the server closed the connection")
        # An answer without a length ends with its connection.
        self.is_complete = True

    # What the parser calls ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.has_excess = self.is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_excess:
            return
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.has_excess:
            return
        # One of an interim answer is followed by another.
        self.has_headers = self.parser.get_status_code() >= 200
        # The parser forgets with the end of the answer how that was found.
        self.keeps_alive = self.parser.should_keep_alive()
        if not self.has_headers:
            self.headers = {}

    def on_body(self, data: bytes) -> None:
        if not self.has_excess:
            self.body.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = self.has_headers
