"""`Connection` over nats-server.

nats-py opens each session: server choice, TLS, credentials, the handshake. From then on the
bytes are ours: `ServerReader` cannot be stopped by a message, delivery costs one call, and a
session that ends for whatever reason is followed by a new one, for ever. The pieces of
nats-py that are replaced are named in `_Session` only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import nats.aio.client
import nats.aio.transport
import nats.errors

from . import headers as header_block
from .errors import ConfigError, DynbusError, PayloadTooLarge, PermissionDenied, Unavailable
from .nats_jetstream import NatsJetStream
from .nats_protocol import ProtocolViolation, ServerReader
from .transport import Callback, ConnectionState, Message, Statistics

logger = logging.getLogger(__name__)

READ_BYTES: Final = 256 * 1024
LOW_BACKLOG: Final = 1024 * 1024
EARLY_WRITE_BYTES: Final = 4096
PING_INTERVAL: Final = 2.0
MAX_SILENT_PINGS: Final = 2
MAX_UNANSWERED_PINGS: Final = 5
FIRST_RECONNECT_DELAY: Final = 0.05
MAX_RECONNECT_DELAY: Final = 0.4
REFUSED_RECONNECT_DELAY: Final = 5.0


class _Session(nats.aio.client.Client):
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
        return self._server_info

    def abort(self) -> None:
        """Drop the socket without sending what is buffered."""
        for name in ("_reading_task", "_ping_interval_task", "_flusher_task"):
            task: asyncio.Task[Any] | None = getattr(self, name)
            if task is not None:
                task.cancel()
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


class NatsSubscription:
    """A subscription that each new session takes over."""

    __slots__ = ("_connection", "callback", "number", "queue", "subject")

    def __init__(
        self, connection: NatsConnection, number: int, subject: str, queue: str, callback: Callback
    ) -> None:
        self._connection = connection
        self.number = number
        self.subject = subject
        self.queue = queue
        self.callback = callback

    def command(self) -> bytes:
        return f"SUB {self.subject} {self.queue} {self.number}\r\n".encode()

    def unsubscribe(self) -> None:
        self._connection.remove(self.number)


class NatsConnection:
    """A connection that is open until `close`, through any number of sessions.

    Make one with `connect`.
    """

    def __init__(
        self, servers: Sequence[str], *, name: str, inbox: str, options: Mapping[str, Any]
    ) -> None:
        self.name = name
        self._servers = list(servers)
        self._options = dict(options)
        self.inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._state = ConnectionState.CONNECTING
        self._session: _Session | None = None
        self._subscriptions: dict[int, NatsSubscription] = {}
        self._numbers = itertools.count(1)
        self._listeners: list[Callable[[ConnectionState], None]] = []
        self._error_listeners: list[Callable[[DynbusError, str], None]] = []
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flush_scheduled = False
        self._pongs: list[asyncio.Future[None]] = []
        self._silent_pings = 0
        self._unanswered_pings = 0
        self._denied: dict[str, str] = {}
        self._requests: dict[str, asyncio.Future[Message]] = {}
        self._request_numbers = itertools.count(1)
        self._request_subscription: NatsSubscription | None = None
        self._lame_duck = False
        self._max_payload = 1024 * 1024
        self._task: asyncio.Task[None] | None = None
        self._reconnects = 0
        self._sent = 0
        self._received = 0
        self._dropped = 0
        self._malformed = 0
        self._callback_errors = 0
        self._jetstream = NatsJetStream(self)

    def __repr__(self) -> str:
        return (
            f"<NatsConnection {self.name} [{self._state.value} | {self.server_name}, "
            f"subscriptions: {len(self._subscriptions)}, reconnects: {self._reconnects}]>"
        )

    # What callers see -----------------------------------------------------------------

    @property
    def state(self) -> ConnectionState:
        return self._state

    @property
    def max_payload(self) -> int:
        return self._max_payload

    @property
    def backlog(self) -> int:
        session = self._session
        return self._out_bytes + (session.write_buffer_size if session is not None else 0)

    @property
    def server_name(self) -> str:
        session = self._session
        url = session.connected_url if session is not None else None
        return url.netloc.rpartition("@")[2] if url is not None else ""

    @property
    def server_info(self) -> Mapping[str, Any]:
        """The server's INFO; empty while disconnected."""
        return self._session.info if self._session is not None else {}

    @property
    def jetstream(self) -> NatsJetStream:
        return self._jetstream

    def statistics(self) -> Statistics:
        """What was counted since the connection was opened."""
        return Statistics(
            self._reconnects,
            self._sent,
            self._received,
            self._dropped,
            self._malformed,
            self._callback_errors,
        )

    def on_state(self, listener: Callable[[ConnectionState], None]) -> Callable[[], None]:
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    def on_error(self, listener: Callable[[DynbusError, str], None]) -> None:
        """Call `listener(error, subject)` when the server refuses a subject."""
        self._error_listeners.append(listener)

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: bytes = b"") -> None:
        size = len(data) + len(headers)
        if size > self._max_payload:
            raise PayloadTooLarge(
                f"a message of {size} bytes to {subject} exceeds the server's max_payload = "
                f"{self._max_payload}"
            )
        if self._state is not ConnectionState.CONNECTED:
            self._dropped += 1
            return
        self._sent += 1
        if headers:
            head = f"HPUB {subject} {reply} {len(headers)} {size}\r\n".encode()
            self._write(b"".join((head, headers, data, b"\r\n")))
        else:
            head = f"PUB {subject} {reply} {size}\r\n".encode()
            self._write(b"".join((head, data, b"\r\n")))

    def subscribe(self, subject: str, callback: Callback, *, queue: str = "") -> NatsSubscription:
        if not subject or any(c.isspace() for c in subject + queue):
            raise ConfigError(f"{subject!r} with queue {queue!r} is not a subject")
        subscription = NatsSubscription(self, next(self._numbers), subject, queue, callback)
        self._subscriptions[subscription.number] = subscription
        if self._state is ConnectionState.CONNECTED:
            self._write(subscription.command())
        return subscription

    def remove(self, number: int) -> None:
        """End the subscription of this number."""
        if self._subscriptions.pop(number, None) and self._state is ConnectionState.CONNECTED:
            self._write(f"UNSUB {number}\r\n".encode())

    async def barrier(self, *, timeout: float = 5.0) -> None:
        # SUB and PING go through one buffer in order, so one PONG proves all SUBs before it.
        denied_before = dict(self._denied)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    await self._connected()
                    pong: asyncio.Future[None] = self._loop.create_future()
                    self._pongs.append(pong)
                    self._write(b"PING\r\n")
                    try:
                        await pong
                        break
                    except ConnectionResetError:
                        continue
        except TimeoutError:
            raise Unavailable(f"the server did not answer a ping within {timeout} s") from None
        subjects = {subscription.subject for subscription in self._subscriptions.values()}
        for subject, text in self._denied.items():
            if subject in subjects and subject not in denied_before:
                raise PermissionDenied(text)

    async def drained(self, *, timeout: float = 5.0) -> None:
        try:
            async with asyncio.timeout(timeout):
                while self.backlog > LOW_BACKLOG:
                    session = self._session
                    if session is None:
                        return
                    self._flush()
                    with suppress(ConnectionError, RuntimeError):
                        await session.flush_transport()
                    await asyncio.sleep(0)
        except TimeoutError:
            raise Unavailable(f"the server took nothing for {timeout} s") from None

    async def request(
        self, subject: str, data: bytes, *, headers: bytes = b"", timeout: float = 5.0
    ) -> Message:
        """One request and its reply, for APIs of the server.

        Raises:
            Unavailable: no reply came in time, or nobody serves the subject.
        """
        if self._request_subscription is None:
            self._request_subscription = self.subscribe(f"{self.inbox}.*", self._on_reply)
        token = str(next(self._request_numbers))
        future: asyncio.Future[Message] = self._loop.create_future()
        self._requests[token] = future
        try:
            async with asyncio.timeout(timeout):
                await self._connected()
                self.publish(subject, data, reply=f"{self.inbox}.{token}", headers=headers)
                return await future
        except TimeoutError:
            raise Unavailable(f"{subject} did not answer within {timeout} s") from None
        finally:
            self._requests.pop(token, None)

    def reconnect(self) -> None:
        """Drop the session; the next one follows by itself."""
        if self._session is not None:
            self._session.abort()

    async def close(self) -> None:
        if self._state is ConnectionState.CLOSED:
            return
        session = self._session
        if session is not None and self._state is ConnectionState.CONNECTED:
            self._flush()
            with suppress(ConnectionError, RuntimeError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._settled(session)
        self._set_state(ConnectionState.CLOSED)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail_waiters()

    # Sessions -------------------------------------------------------------------------

    async def open(self, timeout: float) -> None:
        """Open the first session and keep the connection open from then on.

        Raises:
            PermissionDenied: the server refuses the credentials.
            Unavailable: no server could be reached within `timeout` seconds.
        """
        session = await self._open_session(timeout)
        self._begin(session)
        self._task = self._loop.create_task(self._run(session), name=f"nats-{self.name}")

    async def _open_session(self, timeout: float) -> _Session:
        failures: list[str] = []
        servers = self._candidates()
        for server in servers:
            session = _Session()
            try:
                async with asyncio.timeout(timeout):
                    await session.connect(
                        [server],
                        name=self.name,
                        allow_reconnect=False,
                        max_reconnect_attempts=1,
                        connect_timeout=max(1, int(timeout)),
                        error_cb=_ignore,
                        **self._options,
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
        raise Unavailable(f"no NATS server can be reached ({'; '.join(failures)})")

    def _candidates(self) -> list[str]:
        """The servers to try next: a lame duck's address last."""
        servers = list(self._servers)
        session = self._session
        if session is not None:
            known = {urlsplit(server).netloc.rpartition("@")[2] for server in servers}
            scheme, _, rest = servers[0].partition("://")
            user = rest.rpartition("@")[0]
            for uri in session.info.get("connect_urls") or ():
                if uri not in known:
                    servers.append(f"{scheme}://{user}@{uri}" if user else f"{scheme}://{uri}")
        random.shuffle(servers)
        if self._lame_duck:
            current = self.server_name
            servers.sort(key=lambda server: server.endswith(current))
        return servers

    async def _run(self, session: _Session) -> None:
        while True:
            try:
                await self._serve(session)
            except Exception:
                # Whatever ended a session, another one follows it.
                logger.exception("%s: the session broke", self.name)
            finally:
                session.abort()
            self._end()
            session = await self._reopen()

    async def _reopen(self) -> _Session:
        """Open and begin a session, for as long as it takes."""
        delay = FIRST_RECONNECT_DELAY
        while True:
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, MAX_RECONNECT_DELAY)
            try:
                session = await self._open_session(2.0)
            except PermissionDenied as error:
                logger.error("reconnect refused: %s", error)
                delay = REFUSED_RECONNECT_DELAY
            except Unavailable as error:
                logger.debug("not reconnected yet: %s", error)
            except Exception:
                # A server that is killed in the middle of a handshake leaves half a line.
                logger.exception("%s: the handshake broke", self.name)
            else:
                self._reconnects += 1
                self._begin(session)
                return session

    def _begin(self, session: _Session) -> None:
        self._session = session
        self._lame_duck = False
        self._silent_pings = 0
        self._unanswered_pings = 0
        self._max_payload = int(session.info.get("max_payload") or self._max_payload)
        for subscription in self._subscriptions.values():
            session.write(subscription.command())
        self._set_state(ConnectionState.CONNECTED)

    def _end(self) -> None:
        self._out.clear()
        self._out_bytes = 0
        self._set_state(ConnectionState.DISCONNECTED)
        self._fail_waiters()

    def _fail_waiters(self) -> None:
        pongs, self._pongs = self._pongs, []
        for pong in pongs:
            if not pong.done():
                pong.set_exception(ConnectionResetError())
                pong.exception()
        for future in self._requests.values():
            if not future.done():
                future.set_exception(Unavailable("the connection to the server broke"))
                future.exception()

    async def _serve(self, session: _Session) -> None:
        """Read until the session ends; never raises for what a server or peer sends."""
        reader = ServerReader(self._deliver, self._control)
        pinger = self._loop.call_later(PING_INTERVAL, self._ping, session)
        self._pinger = pinger
        try:
            while True:
                chunk = await session.read()
                if not chunk:
                    logger.info("%s: the server closed the connection", self.name)
                    return
                self._silent_pings = 0
                reader.feed(chunk)
        except (OSError, ProtocolViolation, asyncio.IncompleteReadError) as error:
            if isinstance(error, ProtocolViolation):
                self._malformed += 1
            logger.warning("%s: the session ended: %s", self.name, error)
        finally:
            self._pinger.cancel()

    def _ping(self, session: _Session) -> None:
        # What arrives while no ping is answered comes over a link that is deaf the other way.
        silent = self._silent_pings >= MAX_SILENT_PINGS
        if silent or self._unanswered_pings >= MAX_UNANSWERED_PINGS:
            logger.warning("%s: the server is silent, connecting anew", self.name)
            session.abort()
            return
        self._silent_pings += 1
        self._unanswered_pings += 1
        self._write(b"PING\r\n")
        self._pongs.append(self._loop.create_future())
        self._pinger = self._loop.call_later(PING_INTERVAL, self._ping, session)

    # Messages -------------------------------------------------------------------------

    def _deliver(self, number: int, message: Message) -> None:
        self._received += 1
        subscription = self._subscriptions.get(number)
        if subscription is None:
            return
        try:
            subscription.callback(message)
        except Exception:
            # One message must never stop the others.
            self._callback_errors += 1
            logger.exception("the callback of %s raised", subscription.subject)

    def _control(self, line: bytes) -> None:
        if line == b"PING":
            self._write(b"PONG\r\n")
        elif line == b"PONG":
            self._unanswered_pings = 0
            if self._pongs:
                pong = self._pongs.pop(0)
                if not pong.done():
                    pong.set_result(None)
        elif line.startswith(b"-ERR"):
            self._server_error(line[4:].decode("utf-8", "replace").strip(" '"))
        elif line.startswith(b"INFO "):
            self._info(line[5:])
        elif line != b"+OK":
            raise ProtocolViolation(f"an unknown line: {line[:80]!r}")

    def _server_error(self, text: str) -> None:
        logger.warning("%s: the server says: %s", self.name, text)
        if text.lower().startswith("permissions violation"):
            subject = text.partition('"')[2].partition('"')[0]
            self._denied[subject] = text
            for listener in self._error_listeners:
                listener(PermissionDenied(text), subject)

    def _info(self, line: bytes) -> None:
        session = self._session
        if session is None:
            return
        try:
            info = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            self._malformed += 1
            return
        session.info.update(info)
        if info.get("ldm") and not self._lame_duck:
            self._lame_duck = True
            if len(self._candidates()) > 1:
                logger.info("%s: the server is going away, moving on", self.name)
                self._flush()
                self._loop.call_later(random.uniform(0, 0.5), session.abort)

    def _on_reply(self, message: Message) -> None:
        future = self._requests.get(message.subject.rpartition(".")[2])
        if future is None or future.done():
            return
        if header_block.status(message.headers) == header_block.NO_RESPONDERS:
            future.set_exception(Unavailable("nobody serves the subject: is JetStream enabled?"))
        else:
            future.set_result(message)

    # Output ---------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes >= EARLY_WRITE_BYTES:
            self._write_out()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._write_out()

    def _write_out(self) -> None:
        if self._out and self._session is not None:
            data = b"".join(self._out)
            self._out.clear()
            self._out_bytes = 0
            self._session.write_now(data)

    async def _settled(self, session: _Session) -> None:
        """Wait until the server has taken all that was written."""
        pong: asyncio.Future[None] = self._loop.create_future()
        self._pongs.append(pong)
        self._write(b"PING\r\n")
        await pong

    async def _connected(self) -> None:
        if self._state is ConnectionState.CONNECTED:
            return
        if self._state is ConnectionState.CLOSED:
            raise Unavailable("the connection is closed")
        waiter: asyncio.Future[None] = self._loop.create_future()

        def listen(state: ConnectionState) -> None:
            if state is not ConnectionState.DISCONNECTED and not waiter.done():
                waiter.set_result(None)

        self._listeners.append(listen)
        try:
            await waiter
        finally:
            self._listeners.remove(listen)
        await self._connected()

    def _set_state(self, state: ConnectionState) -> None:
        if state is not self._state and self._state is not ConnectionState.CLOSED:
            self._state = state
            for listener in list(self._listeners):
                try:
                    listener(state)
                except Exception:
                    # One listener must not keep the others, or the reader, from going on.
                    self._callback_errors += 1
                    logger.exception("%s: a listener to the state raised", self.name)


async def connect(
    servers: Sequence[str],
    *,
    name: str = "dynbus",
    inbox: str = "",
    timeout: float = 5.0,
    options: Mapping[str, Any] | None = None,
) -> NatsConnection:
    """Open a connection to one of `servers`.

    Args:
        servers: URLs such as `nats://127.0.0.1:4222`, tried in random order.
        inbox: the subject under which replies of server APIs arrive.
        timeout: seconds for each server.
        options: credentials and TLS as nats-py's `connect` takes them: `user`, `password`,
            `token`, `user_credentials`, `nkeys_seed`, `tls`, `tls_hostname`.

    Raises:
        PermissionDenied: the server refuses the credentials.
        Unavailable: no server could be reached.
    """
    connection = NatsConnection(
        servers,
        name=name,
        inbox=inbox or f"_INBOX.{secrets.token_hex(16)}",
        options=options or {},
    )
    await connection.open(timeout)
    return connection


async def _ignore(error: Exception) -> None:
    """nats-py reports each failed attempt here before it raises it."""


def _address(server: str) -> str:
    return urlsplit(server).netloc.rpartition("@")[2] or server
