"""A connection of a front end: uvicorn's protocol with httptools, within bounds of its own."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .exchange import ABORT, KNOWN, WRITE
from .settings import HttpSettings

PIPELINED: Final = 4
"""Requests of a connection that are read while another one's answer is awaited."""

PIECE: Final = 8192
"""Bytes that are parsed at once: of all that comes in one piece, no more requests are made than
fit into so many."""

MAX_FRAMING: Final = 16 * 1024
"""Bytes of a chunked body that are none of its content, beside `CHUNK_FRAMING` for each chunk."""

CHUNK_FRAMING: Final = 16

LINGER: Final = 5.0
"""Seconds that the rest of a request is read for whose answer is there: a connection that is closed
with something unread is reset, and its client might lose the answer."""

LOOK_INTERVAL: Final = 0.02
"""Seconds between two looks whether a client has left whose connection is not read."""

_PROBE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The interim answer that every client of HTTP/1.1 accepts before an answer; the system of one that
is gone resets the connection for it.
"""

_ESTABLISHED: Final = 1
_CLOSE_WAIT: Final = 8
"""States of a TCP connection, by Linux: that neither end has closed, and that the other end has."""

_REASONS: Final = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}

_NO_HTTP: Final = "the request is not HTTP/1.1; check its first line, its headers and its framing"


Connection = TypeVar("Connection", bound=Hashable)


class Strangers(Generic[Connection]):
    """The connections that nobody has vouched for: they may not take the room of all others.

    The oldest one makes room for the next: who has a key shows it at once, so that the one that
    waits longest is the least likely to have one.

    Args:
        per_address: how many may come from one address.
        total: how many there may be.
    """

    def __init__(self, per_address: int, total: int) -> None:
        self._per_address = per_address
        self._total = total
        # Both in the order of their arrival.
        self._addresses: dict[Connection, str] = {}
        self._by_address: dict[str, dict[Connection, None]] = {}

    def __repr__(self) -> str:
        return f"<Strangers [{len(self)} of {len(self._by_address)} addresses]>"

    def __len__(self) -> int:
        return len(self._addresses)

    def came(self, connection: Connection, address: str) -> Connection | None:
        """A connection was made; returns the one that has to go for it."""
        near = self._by_address.get(address, {})
        leaving: Connection | None = None
        if len(near) >= self._per_address:
            leaving = next(iter(near))
        elif len(self) >= self._total:
            leaving = next(iter(self._addresses))
        if leaving is not None:
            self.forget(leaving)
        self._addresses[connection] = address
        self._by_address.setdefault(address, {})[connection] = None
        return leaving

    def forget(self, connection: Connection) -> None:
        """A connection has shown a key, or is gone."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        near = self._by_address[address]
        del near[connection]
        if not near:
            del self._by_address[address]


def network_of(address: str) -> str:
    """The network of an address: an IPv6 address is one of 2**64 that a single client has."""
    if ":" not in address:
        return address
    try:
        full = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if full.ipv4_mapped is not None:
        return str(full.ipv4_mapped)
    return str(ipaddress.IPv6Network((full, 64), strict=False))


class RequestParser(httptools.HttpRequestParser):
    """A parser that stops after the headers of a request which asks for another protocol.

    Attributes:
        rest: what came after those headers; None as long as there were none.
    """

    rest: bytes | None = None

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        """Parse what came next.

        Raises:
            HttpParserError: it is no request.
            HttpParserUpgrade: it is a tunnel that is asked for.
        """
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.offers_another():
                raise
            self.rest = data[upgrade.args[0] :]

    def offers_another(self) -> bool:
        """True if the request may as well be answered by another protocol, such as HTTP/2."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on what a client may send, and the time that it may take.

    Args:
        strangers: the connections that nobody has vouched for, this one among them at first.
        rest: what uvicorn makes its protocol with.
    """

    def __init__(
        self, settings: HttpSettings, strangers: Strangers[asyncio.Transport], **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.parser: RequestParser = RequestParser(self)
        self._settings = settings
        self._strangers = strangers
        self._wire: asyncio.Transport
        # Whether the client may be sending the rest of a request.
        self._is_sending = False
        self._head_bytes = 0
        self._framing = 0
        self._in_head = True
        self._keeps = False
        self._stops = False
        self._is_half_closed = False
        self._why = ""
        self._held = b""
        self._deadline: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []

    # The transport's callbacks -------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._wire = transport
        self._closing = ClosingTransport(transport, self._close)
        super().connection_made(cast("asyncio.Transport", self._closing))
        self.flow = self._flow = _Flow(self.transport, self._may_read)
        self._deadline = self.loop.call_later(self._settings.header_timeout, self._too_late)
        leaving = self._strangers.came(transport, network_of(self.client[0] if self.client else ""))
        if leaving is not None:
            leaving.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.forget(self._wire)
        self._stop_clock()
        for timer in (self._next_look, self._stuck):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # uvicorn tells the last request alone, which may wait for another one's answer.
        self._drop_requests()
        # They hold this, which holds them: only a collection would find them.
        self._closing.release()
        self._flow.release()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            # Of a request that is answered already.
            return
        if self._held:
            self._held += data
        elif len(data) <= PIECE:
            self._parse(data)
        else:
            self._parse_pieces(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Returns whether it may still wait for an answer."""
        return self._half_closed()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None and not self.transport.is_closing():
            self._stuck.cancel()
            self._stuck = None

    # What comes ----------------------------------------------------------------------------

    def _parse_pieces(self, data: bytes) -> None:
        for begin in range(0, len(data), PIECE):
            if len(self.pipeline) > PIPELINED:
                self._held = data[begin:]
                self.flow.pause_reading()
                return
            self._parse(data[begin : begin + PIECE])
            if self.transport.is_closing():
                return

    def _parse_held(self) -> None:
        held, self._held = self._held, b""
        if not self.transport.is_closing():
            self._parse_pieces(held)
            self.flow.resume_reading()

    def _may_read(self) -> bool:
        return not self._held and len(self.pipeline) <= PIPELINED

    def _parse(self, data: bytes) -> None:
        if self._in_head:
            # Of the piece in which the headers end some bytes are the body's: those count
            # for nothing, since `on_headers_complete` comes before the next piece.
            self._head_bytes += min(len(data), self._settings.max_header_bytes + 1)
            if self._head_bytes > self._settings.max_header_bytes and not _ends_head(
                data, self._settings.max_header_bytes
            ):
                self._refuse(431, f"the headers have more than {self._settings.max_header_bytes} B")
                return
            if self._deadline is None:
                self._deadline = self.loop.call_later(self._settings.header_timeout, self._too_late)
        else:
            self._framing += len(data)
        super().data_received(data)
        while (rest := self.parser.rest) is not None:
            head = self._head_without_upgrade()
            self.parser = RequestParser(self)
            super().data_received(head + rest)
        if self._framing > MAX_FRAMING and not self.transport.is_closing():
            self._refuse(400, "the body has too much between its chunks; send larger ones")
        elif self.pipeline and self._next_look is None:
            self._look()

    def _head_without_upgrade(self) -> bytes:
        """The request as it is that no other protocol is asked for: the parser takes no body of one
        that does, and Java's client offers HTTP/2 with each."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._in_head = True
        self._is_sending = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            # They would be taken for headers, such as a key.
            self._why = "a body with trailers is not taken; send headers before it"
            raise ValueError(self._why)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.offers_another():
            return
        self._in_head = False
        self._head_bytes = self._framing = 0
        self._stop_clock()
        extensions: dict[str, Any] = {ABORT: self.transport.abort, KNOWN: self._known}
        self.scope["extensions"] = extensions
        super().on_headers_complete()
        extensions[WRITE] = partial(_write_piece, self.cycle)
        # An answer before the end of the request ends the connection.
        upgrades = self.parser.should_upgrade()
        self._keeps = self.cycle.keep_alive and not upgrades
        self.cycle.keep_alive = False
        self._cycles = [*self._pending(), self.cycle]
        if 0 < len(self.pipeline) <= PIPELINED:
            # uvicorn reads nothing now, and would not see that the client leaves.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._framing = max(0, self._framing - len(body))
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._framing = max(0, self._framing - CHUNK_FRAMING)

    def on_message_complete(self) -> None:
        if self.parser.offers_another():
            return
        self._framing = 0
        if not self.cycle.response_started and not self._stops:
            self.cycle.keep_alive = self._keeps
        super().on_message_complete()
        self._in_head = True
        self._is_sending = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held and len(self.pipeline) <= PIPELINED:
            self.loop.call_soon(self._parse_held)

    def _known(self) -> None:
        """Note that the sender on this connection has a key."""
        self._strangers.forget(self._wire)

    # Clients that leave --------------------------------------------------------------------

    def _half_closed(self) -> bool:
        """The client has closed its side: all that is left may be to read the answer.

        Whether it has closed the other one too is seen when something is written.
        """
        pending = self._pending()
        if (
            sys.platform != "linux"
            or not self._wire.can_write_eof()
            or self.transport.is_closing()
            or not pending
            or self._is_sending
            or self.scope["http_version"] != "1.1"
        ):
            return False
        if not self._is_half_closed:
            self._is_half_closed = self._stops = True
            self.cycle.keep_alive = False
            if not pending[0].response_started:
                self.transport.write(_PROBE)
            if self._next_look is None:
                self._next_look = self.loop.call_later(LOOK_INTERVAL, self._look)
        return True

    def _look(self) -> None:
        """See that the client leaves, although what it sent before is not read."""
        self._next_look = None
        is_unread = bool(self.pipeline) and self.flow.read_paused
        if self.transport.is_closing() or not (is_unread or self._is_half_closed):
            return
        state = _state(self.transport.get_extra_info("socket"))
        if state == _ESTABLISHED or (state == _CLOSE_WAIT and self._half_closed()):
            self._next_look = self.loop.call_later(LOOK_INTERVAL, self._look)
        else:
            self.transport.abort()

    def _drop_requests(self) -> None:
        for cycle in self._pending():
            cycle.disconnected = True
            cycle.message_event.set()

    def _pending(self) -> list[RequestResponseCycle]:
        """The requests whose answers are not complete, in their order."""
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    # Ends ----------------------------------------------------------------------------------

    def _close(self) -> None:
        """End the connection: what is written arrives, unless the client does not read it."""
        self._stop_clock()
        if not self._is_sending:
            self._wire.close()
            self._watch_reader()
            return
        if self._wire.can_write_eof():
            self._wire.write_eof()
        if self.flow.read_paused:
            self._wire.resume_reading()
        self._stuck = self.loop.call_later(LINGER, self._wire.abort)

    def shutdown(self) -> None:
        self._stops = True
        if not self._pending():
            # Nothing is to be said of what may have come of a request.
            self._is_sending = False
        super().shutdown()

    def _watch_reader(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
        waiting = self._wire.get_write_buffer_size()
        self._stuck = self.loop.call_later(
            self._settings.write_timeout, self._check_reader, waiting
        )

    def _check_reader(self, before: int) -> None:
        """Drop a client that has read nothing for so long."""
        if self._wire.get_write_buffer_size() >= before:
            self._wire.abort()
        else:
            self._watch_reader()

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what uvicorn's parser refuses."""
        self._refuse(400, self._why or _NO_HTTP)

    def _refuse(self, status: int, why: str) -> None:
        """Refuse what is no request, and take nothing else from this connection."""
        pending = self._pending()
        is_own = not self._in_head and pending == [self.cycle]
        self._drop_requests()
        if pending and not (is_own and not self.cycle.response_started):
            # What would be written would be part of another answer.
            self.transport.abort()
            return
        error = {"message": why, "type": "invalid_request_error", "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (status, _REASONS[status], len(body), body)
        )
        self._is_sending = True
        self.transport.close()


class ClosingTransport:
    """A transport whose `close` is the protocol's, which bounds the time that it takes.

    Args:
        close: ends the connection, once.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], object]) -> None:
        self._transport = transport
        self._close = close
        self._is_closing = False
        # Called for each piece of each answer.
        self.write = transport.write
        self.abort = transport.abort
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info

    def is_closing(self) -> bool:
        """True if nothing more is written."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """End the connection when what was written has been sent."""
        if not self.is_closing():
            self._is_closing = True
            self._close()

    def release(self) -> None:
        """Let go of the protocol: the connection has ended."""
        self._is_closing = True
        del self._close


class _Flow(FlowControl):
    """uvicorn's flow control; it reads on when that is allowed."""

    def __init__(self, transport: asyncio.Transport, may_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read: Callable[[], bool] | None = may_read

    def resume_reading(self) -> None:
        """Read on, unless enough is there to do."""
        if self._may_read is not None and self._may_read():
            super().resume_reading()

    def release(self) -> None:
        """Let go of the protocol: the connection has ended."""
        self._may_read = None


def _state(connection: socket.socket) -> int:
    """The state of a TCP connection; where the system does not tell, that neither end has left."""
    if sys.platform != "linux":
        return _ESTABLISHED
    (state,) = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state


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
    """True if headers end within the first `limit` bytes of a piece."""
    return b"\r\n\r\n" in data[:limit]
