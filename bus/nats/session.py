"""One session with nats-server: the handshake (TLS, authentication) with the first that takes it,
raw bytes after it, and pings.

nats-py does TLS, credentials and the handshake; from then on it would read the connection
itself, and that part is taken from it. Its private parts are touched in `NatsSession` only.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import os
import socket
import ssl
import struct
import sys
import termios
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import anyio
import nats.aio.client
import nats.aio.transport
import nats.errors

from dynbus.bus.background import run_apart
from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig, is_loopback
from dynbus.bus.errors import PermissionDenied, Unavailable

from .neighbours import with_credential
from .server_process import DEFAULT_PORT
from .tls import ClientTls

logger = logging.getLogger(__name__)

READ_BYTES: Final = 256 * 1024
EARLY_WRITE_BYTES: Final = 8192
HEAD_START: Final = 0.15
"""Seconds that a server has before the next one is tried beside it."""
LAST_WORDS_SECONDS: Final = 1.0
BUSY_INTERVAL: Final = 0.25
"""Seconds between two pings while anything is sent."""
IDLE_INTERVAL: Final = 2.0
"""The same while nothing is."""
LEAST_INTERVAL: Final = 0.001
SILENT_AFTER: Final = 1.1
"""Seconds after a ping, or after the last that came, for which nothing comes from a server that is
silent; longer where its answers took long just now."""
SLOW_ANSWERS: Final = 4.0
"""The number of times the longest answer of late that a silence lasts at least."""
FORGETTING: Final = 0.75
"""The part of the longest answer that counts after another one."""
DEAF_AFTER: Final = 10.0
"""Seconds after a ping that is not answered, whatever else comes, of one that does not hear."""
PING: Final = b"PING\r\n"
_RESET: Final = struct.pack("ii", 1, 0)
"""To linger for no time: the socket is closed by a reset."""


class NatsSession(nats.aio.client.Client):
    """One TCP session: nats-py up to the end of the handshake, raw bytes after it.

    Args:
        encrypted: whether nothing is said without TLS, whatever the server says of it.

    Attributes:
        url: that it was opened with.
    """

    def __init__(self, url: str, *, encrypted: bool = False) -> None:
        super().__init__()
        self.url = url
        self._encrypted = encrypted
        self.handshaken: asyncio.Event = asyncio.Event()
        # Of a plain TCP connection, once the handshake is over.
        self._plain: asyncio.Transport | None = None
        self._socket_number = -1

    async def _read_loop(self) -> None:
        # nats-py starts this task as the last step of its handshake and would parse from
        # here on; the connection reads the transport itself instead.
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and writer.get_extra_info("ssl_object") is None:
            self._plain = writer.transport
            self._socket_number = writer.get_extra_info("socket").fileno()
        self.handshaken.set()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # Called before anything is written. nats-py goes on in the clear where the server, or
        # who stands between, says nothing of TLS.
        if self._encrypted and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise nats.errors.Error(
                    "the server offers no TLS, which is wanted of it: give it a block tls, or "
                    "write nats:// and set no tls_ca, tls_cert or tls_handshake_first"
                )
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _ping_interval(self) -> None:
        # The connection sends its own pings, through its own buffer.
        return

    async def receive(self, take: Callable[[bytes], object]) -> None:
        """Hand each chunk of bytes to `take` in the moment in which it arrives, until the server
        closes the session.

        Raises:
            OSError: the session broke.
            Exception: what `take` raised.
        """
        writer: asyncio.StreamWriter | None = getattr(self._transport, "_io_writer", None)
        reader: asyncio.StreamReader | None = getattr(self._transport, "_io_reader", None)
        if writer is None or reader is None:
            # A web socket has frames of its own.
            while chunk := await self._open_transport.read(READ_BYTES):
                take(chunk)
            return
        transport: Any = writer.transport
        arriving = _Arriving(take, transport.get_protocol())
        transport.set_protocol(arriving)
        buffer: bytearray = getattr(reader, "_buffer", bytearray())
        came_before = bytes(buffer)
        buffer.clear()
        if not (transport.is_reading() or transport.is_closing()):
            transport.resume_reading()
        if came_before:
            arriving.data_received(came_before)
        if reader.at_eof() or reader.exception() is not None:
            arriving.connection_lost(reader.exception())
        await arriving.ended

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
        plain = self._plain
        # A socket number may belong to another file as soon as the transport is closed.
        if plain is None or plain.is_closing() or plain.get_write_buffer_size() > 0:
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

    @property
    def server_id(self) -> str:
        """The id of the server, new with each start of it."""
        return str(self._server_info.get("server_id", ""))

    @property
    def unacknowledged(self) -> int:
        """Bytes that were written, and that the server's system has not said that it has."""
        waiting = self.write_buffer_size
        writer = getattr(self._transport, "_io_writer", None)
        if writer is None or writer.is_closing() or not sys.platform.startswith("linux"):
            return waiting
        with suppress(OSError):
            number = writer.get_extra_info("socket").fileno()
            waiting += struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)))[0]
        return waiting

    def first_fault(self, error: Exception) -> Exception:
        """The reason why a handshake failed, where `error` may tell only that the socket is closed.

        A server refuses a certificate by an alert that comes after its own part of the handshake,
        when we write already. A reset in that place says less than `error`.
        """
        reader = getattr(self._transport, "_io_reader", None)
        fault = reader.exception() if reader is not None else None
        return fault if isinstance(fault, ssl.SSLError) else error

    @property
    def is_linked(self) -> bool:
        """True if the server's system has taken the connection."""
        return getattr(self._transport, "_io_writer", None) is not None

    def abort(self) -> None:
        """Drop the socket, and whatever it holds: what a dead link would deliver once it is back
        is out of date by then."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and not writer.is_closing():
            with suppress(OSError):
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, _RESET
                )
        self.leave()

    def leave(self) -> None:
        """Close the socket; what the system holds of it is still sent."""
        for name in ("_reading_task", "_ping_interval_task", "_flusher_task"):
            task: asyncio.Task[Any] | None = getattr(self, name)
            if task is not None:
                task.cancel()
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


class _Arriving(asyncio.Protocol):
    """The bytes of a session, taken as they arrive.

    A task that waits for them and then reads would take a turn of the loop more for each chunk,
    and a future.

    Args:
        take: what it is to be done with each chunk; what it raises ends the session.
        before: the protocol of the handshake, which knows who waits for room to write.

    Attributes:
        ended: done when nothing more arrives; raises why where that is no tidy end.
    """

    def __init__(self, take: Callable[[bytes], object], before: asyncio.BaseProtocol) -> None:
        self._take = take
        self._before = before
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            self._take(data)
        except Exception as error:  # noqa: BLE001 - raised to the waiter for the end
            self._end(error)

    def eof_received(self) -> bool:
        self._end(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)
        self._before.connection_lost(exc)

    def pause_writing(self) -> None:
        self._before.pause_writing()

    def resume_writing(self) -> None:
        self._before.resume_writing()

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class NatsOutput:
    """Collects what is written in one turn of the loop and hands it to the session at once.

    Attributes:
        session: the latest session; what is written before the first one waits.
        writes: how often it was written to.
    """

    __slots__ = (
        "_chunks",
        "_flush_scheduled",
        "_loop",
        "_sent",
        "_size",
        "_writers",
        "session",
        "writes",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._chunks: list[bytes] = []
        self._size = 0
        self._flush_scheduled = False
        self._sent = 0
        self._writers: list[Callable[[], object]] = []
        self.session: NatsSession | None = None
        self.writes = 0

    def __repr__(self) -> str:
        return f"<NatsOutput [{self.backlog} bytes]>"

    @property
    def backlog(self) -> int:
        """Bytes that the operating system has not taken yet."""
        session = self.session
        return self._size + (session.write_buffer_size if session is not None else 0)

    @property
    def written(self) -> int:
        """Bytes that were written so far."""
        return self._sent + self._size

    @property
    def taken(self) -> int:
        """Bytes of them that the server's system has; grows while the link carries any."""
        session = self.session
        return self._sent - (session.unacknowledged if session is not None else 0)

    def write(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        self.writes += 1
        if self._size >= EARLY_WRITE_BYTES:
            self._write_out()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def before_flush(self, write: Callable[[], object]) -> None:
        """Have `write` called once before the next flush, which takes along what it writes."""
        self._writers.append(write)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand over what waits, now."""
        writers, self._writers = self._writers, []
        for write in writers:
            try:
                write()
            except Exception:
                # What all others have to send is to leave.
                logger.exception("what a turn brought could not be written")
        self._flush_scheduled = bool(self._writers)
        if self._flush_scheduled:
            self._loop.call_soon(self.flush)
        self._write_out()

    def clear(self) -> None:
        """Forget what waits: its session is over."""
        self._chunks.clear()
        self._size = 0

    def _write_out(self) -> None:
        if self._chunks and self.session is not None:
            data = b"".join(self._chunks) if len(self._chunks) > 1 else self._chunks[0]
            self._sent += self._size
            self._chunks = []
            self._size = 0
            self.session.write_now(data)


class Ping(NamedTuple):
    """One that the server has not answered yet.

    Attributes:
        position: bytes that were written when it was, itself included.
    """

    pong: asyncio.Future[None]
    sent_at: float
    position: int


class Pings:
    """The pings of one connection, session by session. Lives on one loop.

    A server is silent when nothing came for a while although it has a ping. Only time in which this
    process ran counts: what lies unread while its loop stands still says nothing. A server whose
    answers take long has longer: an overloaded one is not helped by clients that all leave it for
    the next, which has their handshakes to do then.

    Attributes:
        round_trip: seconds from the last ping to its answer; 0 before the first of a session.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, output: NatsOutput) -> None:
        self._loop = loop
        self._output = output
        self.round_trip = 0.0
        self._open: list[Ping] = []
        self._heard = False
        self._slowest = 0.0
        self._writes = 0
        # When the last ping was sent, and since when a silence counts.
        self._asked_at = 0.0
        self._quiet_since = 0.0
        # What the server had taken at the last look; and when the next one is due.
        self._taken = 0
        self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Pings [waiting: {len(self._open)}]>"

    def send(self) -> asyncio.Future[None]:
        """Send one; its future is done when the server has taken all that was written before.

        The future raises `ConnectionResetError` when the session ends first.
        """
        pong: asyncio.Future[None] = self._loop.create_future()
        self._asked_at = monotonic()
        if not self._open:
            self._taken = self._output.taken
        # First, since writing may find the session broken.
        self._open.append(Ping(pong, self._asked_at, self._output.written + len(PING)))
        self._writes += 1
        self._output.write(PING)
        return pong

    def watch(self, give_up: Callable[[], None], opened_in: float = 0.0) -> None:
        """Ping in a new session, often while anything is sent; `give_up` when the server is
        silent.

        Args:
            opened_in: seconds that the server took to take the connection.
        """
        self._slowest = max(opened_in, FORGETTING * self._slowest)
        self._quiet_since = self._asked_at = monotonic()
        self._writes = self._output.writes
        self._look_later(BUSY_INTERVAL, give_up)

    def unwatch(self) -> None:
        """The inverse of `watch`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        """Bytes arrived."""
        self._heard = True

    def answered(self) -> None:
        """A pong arrived: the server answers pings in their order."""
        if self._open:
            pong, sent_at, _ = self._open.pop(0)
            self.round_trip = monotonic() - sent_at
            self._slowest = max(self.round_trip, FORGETTING * self._slowest)
            if not pong.done():
                pong.set_result(None)

    def lose(self) -> None:
        """The session has ended, and nothing that was asked in it is answered any more."""
        pings, self._open = self._open, []
        self.round_trip = 0.0
        for ping in pings:
            if not ping.pong.done():
                ping.pong.set_exception(ConnectionResetError())
                ping.pong.exception()

    def _look(self, give_up: Callable[[], None]) -> None:
        now = monotonic()
        is_busy = self._output.writes != self._writes
        self._writes = self._output.writes
        if self._is_given_up(now):
            give_up()
            return
        if not self._open and (is_busy or now - self._asked_at >= IDLE_INTERVAL):
            self.send()
        seconds = IDLE_INTERVAL - (now - self._asked_at)
        if is_busy or self._open:
            seconds = min(BUSY_INTERVAL, max(LEAST_INTERVAL, self._silent_at() - now))
        self._look_later(seconds, give_up)

    def _is_given_up(self, now: float) -> bool:
        heard, self._heard = self._heard, False
        if not self._open:
            return False
        oldest = self._open[0]
        before, self._taken = self._taken, self._output.taken
        late = now - self._due_at
        if heard or before < self._taken < oldest.position:
            # A ping that waits behind much else is on its way as long as that moves on.
            self._quiet_since = now
        elif late > BUSY_INTERVAL:
            # What came meanwhile is read behind this.
            since = max(self._quiet_since, oldest.sent_at) + late
            self._quiet_since = max(since, now + BUSY_INTERVAL - self._silent_after)
        return now >= self._silent_at() or now - oldest.sent_at >= DEAF_AFTER

    def _silent_at(self) -> float:
        """The time when the server counts as silent, unless it is heard before."""
        if not self._open:
            return math.inf
        return max(self._quiet_since, self._open[0].sent_at) + self._silent_after

    @property
    def _silent_after(self) -> float:
        return min(max(SILENT_AFTER, SLOW_ANSWERS * self._slowest), DEAF_AFTER)

    def _look_later(self, seconds: float, give_up: Callable[[], None]) -> None:
        self._due_at = monotonic() + seconds
        self._timer = self._loop.call_later(seconds, self._look, give_up)


class TooSlow(Unavailable):
    """Raised when servers take connections, and do not get round to any of them in time: they, or
    this host, have more to do than they can."""


async def open_session(
    servers: Sequence[str],
    *,
    name: str,
    timeout: float,
    options: Mapping[str, Any],
    tls: ClientTls | None = None,
    tls_name: Callable[[str], str | None] = lambda _: None,
    head_start: float = HEAD_START,
) -> NatsSession:
    """A session with the first of `servers` that takes one; they are tried side by side, each with
    a head start before the next.

    Args:
        timeout: seconds for each server.
        options: further arguments of nats-py's `connect`.
        tls: the certificates; the system's authorities where they are wanted and it is None.
        tls_name: the name in the certificate of the server at a URL; None for its host.
        head_start: seconds.

    Raises:
        ConfigError: a file of `tls` cannot be used.
        PermissionDenied: a server refuses the credentials, or the certificate.
        TooSlow: no server could be reached, and one of them did not answer in time.
        Unavailable: no server could be reached, or trusted.
    """
    tls = tls or ClientTls(BusConfig())
    if any(map(tls.is_for, servers)):
        # Before there is any socket: what is wrong with a file is no fault of a server.
        tls.context()
    race = _Race(name, timeout, options, tls, tls_name)
    try:
        async with anyio.create_task_group() as group:
            for server in servers:
                over = anyio.Event()
                group.start_soon(race.run, server, over, group.cancel_scope)
                with anyio.move_on_after(head_start):
                    await over.wait()
    except BaseException:
        # Its opener is cancelled in the moment in which it is won.
        if race.won is not None:
            race.won.abort()
        raise
    if race.won is not None:
        return race.won
    if race.error is not None:
        raise race.error
    why = "; ".join(race.failures)
    if race.is_distrusted:
        raise Unavailable(f"no NATS server can be trusted: {why}")
    kind = TooSlow if race.is_slow else Unavailable
    raise kind(
        f"no NATS server can be reached ({why}): start one there, or name "
        "another by its URL, for example nats://127.0.0.1:4222"
    )


class _Race:
    """Servers that are tried side by side, until one takes a session or refuses the credentials.

    Attributes:
        won: the session of the first that took one.
        error: what ended the race in place of that.
        failures: what became of each server that could not be reached.
        is_distrusted: whether one of them was, and has a certificate that is not taken.
        is_slow: whether one of them took a connection, and said nothing in time.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        options: Mapping[str, Any],
        tls: ClientTls,
        tls_name: Callable[[str], str | None],
    ) -> None:
        self._name = name
        self._timeout = timeout
        self._options = options
        self._tls = tls
        self._tls_name = tls_name
        self.is_distrusted = self.is_slow = False
        self.won: NatsSession | None = None
        self.error: Exception | None = None
        self.failures: list[str] = []

    async def run(self, server: str, over: anyio.Event, race: anyio.CancelScope) -> None:
        """Try one server; `over` is set where that is in vain, and `race` ended where it is not."""
        session = NatsSession(server, encrypted=self._tls.is_for(server))
        try:
            with anyio.fail_after(self._timeout):
                connect = partial(
                    session.connect,
                    [server if self._options else with_credential(server)],
                    name=self._name,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    # nats-py would sleep after a refusal; the caller has a pause of its own.
                    reconnect_time_wait=0,
                    connect_timeout=max(1, int(self._timeout)),
                    error_cb=_ignore,
                    **self._options,
                    **self._tls_options(server),
                )
                # In a task of its own: nats-py waits by `asyncio.wait_for`, which on Python 3.11
                # loses the cancel of a task that comes just when what it waits for does.
                await run_apart(connect, name=f"connect {self._name}")
                await session.handshaken.wait()
        except (OSError, TimeoutError, nats.errors.Error) as late:
            error = session.first_fault(late)
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                error = await self._last_words(server) or error
            self.is_slow |= session.is_linked and isinstance(error, TimeoutError)
            session.abort()
            text = str(error) or type(error).__name__
            if problem := self._tls.problem(error):
                self.is_distrusted, text = True, problem
            elif refusal := self._tls.refusal(error):
                self.error = PermissionDenied(f"{_address(server)} {refusal}")
                race.cancel()
            elif "authorization" in text.lower() or "authentication" in text.lower():
                text += _hint(server, self._options)
                self.error = PermissionDenied(f"{_address(server)} refuses the credentials: {text}")
                race.cancel()
            self.failures.append(f"{_address(server)}: {text}")
            over.set()
        except Exception as error:  # noqa: BLE001 - raised to the opener of the session
            session.abort()
            self.error = error
            race.cancel()
        except BaseException:
            session.abort()
            raise
        else:
            if self.won is not None:
                session.abort()
            self.won = self.won or session
            race.cancel()

    async def _last_words(self, server: str) -> ssl.SSLError | None:
        """The alert with which a server refuses TLS, in another connection in which we say nothing:
        where we write, its reset may overtake its alert. None for none."""
        parts, tls = urlsplit(server), self._tls
        if not tls.is_for(server) or server.startswith("wss://") or not parts.hostname:
            return None
        context, name = tls.context(), self._tls_name(server) or parts.hostname
        own: dict[str, Any] = {"ssl": context, "server_hostname": name}
        writer: asyncio.StreamWriter | None = None
        try:
            with anyio.fail_after(LAST_WORDS_SECONDS):
                reader, writer = await asyncio.open_connection(
                    parts.hostname,
                    parts.port or DEFAULT_PORT,
                    **(own if tls.handshake_first else {}),
                )
                if not tls.handshake_first:
                    await reader.readline()
                    await writer.start_tls(context, server_hostname=name)
                await reader.read(1)
        except ssl.SSLError as alert:
            return alert
        except (OSError, TimeoutError, ValueError) as error:
            logger.debug("%s says nothing more: %s", _address(server), error)
        finally:
            if writer is not None:
                writer.transport.abort()
        return None

    def _tls_options(self, server: str) -> dict[str, Any]:
        """The arguments of nats-py's `connect` for TLS with a server."""
        tls = self._tls
        if not tls.is_for(server):
            return {}
        options: dict[str, Any] = {"tls": tls.context()}
        if not server.startswith("wss://"):
            # A web socket begins with TLS in any case.
            options["tls_handshake_first"] = tls.handshake_first
        if name := self._tls_name(server):
            options["tls_hostname"] = name
        return options


def _hint(server: str, options: Mapping[str, Any]) -> str:
    parts = urlsplit(server)
    if options or "@" in parts.netloc or not is_loopback(parts.hostname or ""):
        return ""
    return (
        " (the server that `dynbus run` starts takes its own user's programs; its URL with the "
        "credential is in .dynbus/nats.url of the folder where it was started. If that is another "
        "user's, choose a port for a server of your own: "
        f"export NATS_URL=nats://127.0.0.1:{(parts.port or DEFAULT_PORT) + 1})"
    )


async def _ignore(error: Exception) -> None:
    """nats-py reports each failed attempt here before it raises it."""


def _address(server: str) -> str:
    return (urlsplit(server).netloc or server).rpartition("@")[2]
