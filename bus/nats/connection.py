"""`Connection` over nats-server.

`nats/session.py` opens each session. From then on the bytes are ours: `ServerReader` cannot be
stopped by a message, delivery costs one call, and a session that ends for whatever reason is
followed by a new one, for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import anyio.lowlevel
import msgspec

from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import (
    ConfigError,
    DynbusError,
    PayloadTooLarge,
    PermissionDenied,
    Unavailable,
)
from dynbus.bus.identity.credentials import CredentialFile
from dynbus.bus.protocol.headers import OF_STREAM
from dynbus.bus.protocol.random_ids import jitter
from dynbus.bus.transport import REPLICAS, Callback, ConnectionState, Message, WatchedConnection

from .api_requests import ServerRequests
from .jetstream import NatsJetStream
from .own_host import find_own_hosts, is_own_address
from .protocol import ProtocolViolation, ServerReader, heard_by
from .server_choice import ServerAddress, ServerChoice
from .session import HEAD_START, NatsOutput, NatsSession, Pings, TooSlow, open_session
from .tls import ClientTls

logger = logging.getLogger(__name__)

LOW_BACKLOG: Final = 1024 * 1024
FIRST_RECONNECT_DELAY: Final = 0.05
MAX_RECONNECT_DELAY: Final = 0.2
RECONNECT_PATIENCE: Final = 2.0
MAX_SLOW_DELAY: Final = 3.2
MAX_PATIENCE: Final = 16.0
MAX_HEAD_START: Final = 1.2
"""Seconds of a `ReconnectPace`; the latter three where servers are slow."""
REFUSED_RECONNECT_DELAY: Final = 5.0
CLOSE_SECONDS: Final = 5.0
MAX_DENIED: Final = 1024
SILENT: Final = "the server is silent"
FIRST_REPORT: Final = 5.0
"""Seconds for which an outage is not spoken of: a server that is started again is back by then."""
MAX_PAUSE: Final = 600.0
"""Seconds between two reports of a long outage, at most."""
_SPACE: Final = re.compile(r"\s")


class NatsSubscription:
    """A subscription that each new session takes over.

    Attributes:
        ending: whether the server was told to send nothing more.
        hears: whether a message to a subject is for it, where it has wildcards.
        reads_stream: whether it is what a stream delivers to: messages with subjects of theirs.
    """

    __slots__ = (
        "_connection",
        "callback",
        "ending",
        "hears",
        "number",
        "queue",
        "reads_stream",
        "subject",
    )

    def __init__(
        self,
        connection: NatsConnection,
        number: int,
        subject: str,
        queue: str,
        callback: Callback,
        reads_stream: bool = False,
    ) -> None:
        self._connection = connection
        self.number = number
        self.subject = subject
        self.queue = queue
        self.ending = False
        self.callback = callback
        self.hears = heard_by(subject)
        self.reads_stream = reads_stream

    def __repr__(self) -> str:
        state = "ending" if self.ending else "open"
        return f"<NatsSubscription {self.number} [{state} | {self.subject}, queue: {self.queue}]>"

    def command(self) -> bytes:
        """The command that asks the server for it."""
        return f"SUB {self.subject} {self.queue} {self.number}\r\n".encode()

    def unsubscribe(self) -> None:
        self._connection.remove(self.number)

    async def drain(self, *, timeout: float = 5.0) -> None:
        self.ending = True
        self._connection.stop_delivery(self.number)
        # Without a session nothing is on its way, and the next one does not ask for this.
        if self._connection.state is ConnectionState.CONNECTED:
            try:
                # What the server sent before it read this comes before its answer to a ping.
                await self._connection.barrier(timeout=timeout)
            except DynbusError as error:
                logger.debug("%s: not drained: %s", self.subject, error)
        self._connection.remove(self.number)


class Outage:
    """An outage that began at `lost_at`: when an operator is told that it goes on. No I/O here."""

    def __init__(self, lost_at: float) -> None:
        self._lost_at = lost_at
        self._pause = FIRST_REPORT
        self._next = lost_at + FIRST_REPORT

    def __repr__(self) -> str:
        return f"<Outage [since: {self._lost_at:.3f}, next report: {self._next:.3f}]>"

    def lasted(self, now: float) -> float:
        """Its seconds until now."""
        return now - self._lost_at

    def is_report_due(self, now: float) -> bool:
        """True if another log line is due; each time the pause until the next one doubles."""
        if now < self._next:
            return False
        self._pause = min(self._pause * 2, MAX_PAUSE)
        self._next = now + self._pause
        return True


class ReconnectPace:
    """The pause before each try to connect again, and the time that a try has. No I/O, no clock.

    Servers that are not there are asked again soon, which costs nobody anything. Those that are,
    and do not get round to a connection in time, have more clients at once than they can take: a
    try that is given up was work for nothing, and another one soon would keep them from getting
    done. So each has more time than the one before, and comes later.

    Attributes:
        delay: seconds before the next try.
        patience: seconds that it has.
        head_start: seconds that a server has before the next one is tried beside it.
    """

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.patience = RECONNECT_PATIENCE
        self.head_start = HEAD_START
        self._longest = MAX_RECONNECT_DELAY

    def __repr__(self) -> str:
        return f"<ReconnectPace [delay: {self.delay:g}, patience: {self.patience:g}]>"

    def failed(self, *, is_slow: bool) -> None:
        """A try has failed.

        Args:
            is_slow: whether a server took the connection, and did not get round to it.
        """
        if is_slow:
            self.patience = min(2 * self.patience, MAX_PATIENCE)
            self.head_start = min(2 * self.head_start, MAX_HEAD_START)
            self._longest = min(2 * self._longest, MAX_SLOW_DELAY)
        self.delay = min(max(2 * self.delay, FIRST_RECONNECT_DELAY), self._longest)


class NatsConnection(WatchedConnection):
    """A connection that is open until `close`, through any number of sessions.

    Make one with `connect`.

    Args:
        choice: which server the connections of this process are at.

    Attributes:
        inbox: replies of server APIs arrive below it.
        request: `ServerRequests.send` over this connection.
        max_payload: bytes of the largest message that the server takes.
    """

    def __init__(
        self,
        choice: ServerChoice,
        *,
        name: str,
        inbox: str,
        options: Callable[[], Mapping[str, Any]],
        replicas: int = REPLICAS,
        tls: ClientTls | None = None,
    ) -> None:
        super().__init__(name, ConnectionState.CONNECTING)
        self._choice = choice
        self._options = options
        self._tls = tls
        self.inbox = inbox
        self._session: NatsSession | None = None
        self._subscriptions: dict[int, NatsSubscription] = {}
        self._numbers = itertools.count(1)
        self._error_listeners: list[Callable[[DynbusError, str], None]] = []
        self._peer_lost_listeners: list[Callable[[], None]] = []
        self._output = NatsOutput(self._loop)
        self._denied: dict[str, str] = {}
        self._lame_duck = False
        self._left_for_others = False
        self.max_payload = 1024 * 1024
        self._pings = Pings(self._loop, self._output)
        self._opened_in = 0.0
        self._requests = ServerRequests(self)
        self.request = self._requests.send
        self._jetstream = NatsJetStream(self, replicas)

    def __repr__(self) -> str:
        return (
            f"<NatsConnection {self.name} [{self._state.value} | {self.server_name}, "
            f"subscriptions: {len(self._subscriptions)}, sessions: {self.sessions}]>"
        )

    # What callers see -----------------------------------------------------------------

    @property
    def backlog(self) -> int:
        return self._output.backlog

    @property
    def round_trip(self) -> float:
        return self._pings.round_trip

    @property
    def server_name(self) -> str:
        return self._session.server_name if self._session is not None else ""

    @property
    def server_urls(self) -> tuple[str, ...]:
        """All servers: those that are configured, then those that these tell of."""
        return self._choice.urls

    @property
    def server_info(self) -> Mapping[str, Any]:
        """The server's INFO; empty while disconnected."""
        return self._session.info if self._session is not None else {}

    @property
    def jetstream(self) -> NatsJetStream:
        return self._jetstream

    def on_error(self, listener: Callable[[DynbusError, str], None]) -> None:
        self._error_listeners.append(listener)

    @property
    def region(self) -> str:
        return str(self.server_info.get("domain") or "")

    @property
    def is_joined(self) -> bool:
        """True if the server belongs to a cluster, or is a leaf node; False while disconnected."""
        return bool(self.server_info.get("cluster"))

    @property
    def has_peers(self) -> bool:
        # A leaf node that is alone calls itself a cluster, by its own name.
        info = self.server_info
        return info.get("cluster", "") not in ("", info.get("server_name"))

    def on_peer_lost(self, listener: Callable[[], None]) -> None:
        self._peer_lost_listeners.append(listener)

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: bytes = b"") -> None:
        size = len(data) + len(headers)
        if size > self.max_payload:
            raise PayloadTooLarge(
                f"a message of {size} bytes to {subject} exceeds the server's max_payload = "
                f"{self.max_payload}"
            )
        if self._state is not ConnectionState.CONNECTED:
            self.drop(DropReason.DISCONNECTED)
            return
        if headers:
            head = f"HPUB {subject} {reply} {len(headers)} {size}\r\n".encode()
            self._output.write(b"".join((head, headers, data, b"\r\n")))
        else:
            head = f"PUB {subject} {reply} {size}\r\n".encode()
            self._output.write(b"".join((head, data, b"\r\n")))

    def before_sending(self, publish: Callable[[], object]) -> None:
        self._output.before_flush(publish)

    def send_now(self) -> None:
        self._output.flush()

    def subscribe(
        self, subject: str, callback: Callback, *, queue: str = "", reads_stream: bool = False
    ) -> NatsSubscription:
        if not subject or _SPACE.search(subject + queue):
            raise ConfigError(f"{subject!r} with queue {queue!r} is not a subject")
        subscription = NatsSubscription(
            self, next(self._numbers), subject, queue, callback, reads_stream
        )
        self._subscriptions[subscription.number] = subscription
        self._denied.pop(subject, None)
        if self._state is ConnectionState.CONNECTED:
            self._output.write(subscription.command())
        return subscription

    def remove(self, number: int) -> None:
        """End the subscription of this number."""
        subscription = self._subscriptions.pop(number, None)
        if subscription is not None and not subscription.ending:
            self.stop_delivery(number)

    def stop_delivery(self, number: int) -> None:
        """Have the server send nothing more for this number."""
        if self._state is ConnectionState.CONNECTED:
            self._output.write(f"UNSUB {number}\r\n".encode())

    async def barrier(self, *, timeout: float = 5.0) -> None:
        # SUB and PING go through one buffer in order, so one PONG proves all SUBs before it.
        try:
            with anyio.fail_after(timeout):
                while True:
                    await self.wait_connected()
                    try:
                        await self._pings.send()
                        break
                    except ConnectionResetError:
                        continue
        except TimeoutError:
            raise Unavailable(f"the server did not answer a ping within {timeout} s") from None
        subjects = {subscription.subject for subscription in self._subscriptions.values()}
        for subject, text in self._denied.items():
            if subject in subjects:
                raise PermissionDenied(text)

    async def drained(self, *, timeout: float = 5.0) -> None:
        try:
            with anyio.fail_after(timeout):
                while self.backlog > LOW_BACKLOG:
                    session = self._session
                    if session is None:
                        return
                    self._output.flush()
                    with suppress(ConnectionError, RuntimeError):
                        await session.flush_transport()
                    await anyio.lowlevel.checkpoint()
        except TimeoutError:
            raise Unavailable(f"the server took nothing for {timeout} s") from None

    def refusal_of(self, subject: str) -> str:
        """The reason for which the server refused a subject in this session; empty when it did
        not."""
        return self._denied.get(subject, "")

    def reconnect(self) -> None:
        """Drop the session; the next one follows by itself."""
        if self._session is not None:
            self._session.abort()

    def leave_server(self, why: str) -> None:
        server = self.server_name
        if self._choice.abandon(self, monotonic()):
            logger.warning("%s: %s is left for another server: %s", self.name, server, why)

    async def close(self) -> None:
        if self._state is ConnectionState.CLOSED:
            return
        session = self._session
        if session is not None and self._state is ConnectionState.CONNECTED:
            self._output.flush()
            with suppress(ConnectionError, RuntimeError, TimeoutError):
                with anyio.fail_after(1.0):
                    # The pong says that the server has taken all that was written.
                    await self._pings.send()
        self._set_state(ConnectionState.CLOSED)
        self._choice.unregister(self)
        with anyio.move_on_after(CLOSE_SECONDS) as closing:
            # nats-py swallows a cancellation in the middle of a handshake, so that it takes more
            # than one.
            await self.background.close()
        if closing.cancelled_caught:
            logger.error("%s: its work does not end", self.name)
        self._fail_waiters()

    # Sessions -------------------------------------------------------------------------

    async def open(self, timeout: float) -> None:
        """Open the first session and keep the connection open from then on.

        Raises:
            ConfigError: a file with a certificate cannot be used.
            PermissionDenied: the server refuses the credentials.
            Unavailable: no server could be reached within `timeout` seconds.
        """
        await self.background.open()
        self._choice.register(self, self._follow_soon)
        try:
            session = await self._open_session(timeout)
        except BaseException:
            self._choice.unregister(self)
            with anyio.CancelScope(shield=True):
                await self.background.close()
            raise
        self._begin(session)
        self.background.start(self._run, session, name=f"nats {self.name}")

    async def _open_session(self, timeout: float, head_start: float = HEAD_START) -> NatsSession:
        """A session with the server that the other connections of the process are at, or else
        with the one that they are to follow to.

        Args:
            timeout, head_start: as of `open_session`.

        Raises:
            ConfigError, PermissionDenied, Unavailable: as `open_session`.
        """
        choice = self._choice
        avoided: set[str] = set()
        while True:
            begun = monotonic()
            plan = choice.plan(begun, avoided)
            session = await open_session(
                plan.urls,
                name=self.name,
                timeout=timeout,
                options=self._options(),
                tls=self._tls,
                tls_name=choice.tls_name,
                head_start=head_start,
            )
            place = ServerAddress(session.url, session.server_id)
            self._opened_in = monotonic() - begun
            is_last = avoided.issuperset(plan.urls)
            if choice.arrive(self, place, plan, monotonic(), is_last=is_last):
                if is_last:
                    logger.info(
                        "%s: no address leads to the server of the process's other connection; "
                        "this one is at %s",
                        *(self.name, session.server_name),
                    )
                return session
            session.abort()
            avoided.add(session.url)

    def _follow_soon(self) -> None:
        """Called from any thread."""
        with suppress(RuntimeError):  # the loop is closed, and the connection with it
            self._loop.call_soon_threadsafe(self._follow)

    def _follow(self) -> None:
        session = self._session
        if session is not None and self._choice.is_astray(self, monotonic()):
            self._left_for_others = True
            self._output.flush()
            session.abort()

    async def _run(self, session: NatsSession) -> None:
        while True:
            why = "the session broke"
            try:
                why = await self._serve(session)
            except Exception:
                # Whatever ended a session, another one follows it.
                logger.exception("%s: the session broke", self.name)
            finally:
                if self._state is ConnectionState.CLOSED:
                    session.leave()
                else:
                    session.abort()
            outage = Outage(monotonic())
            # A server that goes away in order has said so, and is left for another.
            level = logging.INFO if self._lame_duck or self._left_for_others else logging.WARNING
            logger.log(
                level,
                "%s: the connection to %s is lost: %s; connecting again",
                self.name,
                session.server_name,
                why,
            )
            self._end()
            self._choice.leave(self, monotonic(), shun=self._lame_duck or why == SILENT)
            session = await self._reopen(outage, level)
            # A listener that saw the loss is to see that it is over.
            logger.log(
                level,
                "%s: connected again, to %s, after %.2f s",
                self.name,
                session.server_name,
                outage.lasted(monotonic()),
            )

    async def _reopen(self, outage: Outage, level: int) -> NatsSession:
        """Open and begin a session, for as long as it takes."""
        # A connection that follows comes alone; all clients of a server that ended come together.
        pace = ReconnectPace(0.0 if self._left_for_others else FIRST_RECONNECT_DELAY)
        is_refusal_logged = False
        while True:
            await anyio.sleep(pace.delay * jitter.uniform(0.5, 1.0))
            try:
                session = await self._open_session(pace.patience, pace.head_start)
            except PermissionDenied as error:
                if not is_refusal_logged:
                    logger.error("%s: %s; trying again", self.name, error)
                is_refusal_logged = True
                pace.delay = REFUSED_RECONNECT_DELAY
            except (Unavailable, ConfigError) as error:
                # A certificate that is being replaced may have the key of the last for a moment.
                pace.failed(is_slow=isinstance(error, TooSlow))
                now = monotonic()
                if outage.is_report_due(now):
                    text = "%s: not connected again for %.0f s: %s"
                    logger.log(level, text, self.name, outage.lasted(now), error)
            except Exception:
                # A server that is killed in the middle of a handshake leaves half a line.
                pace.failed(is_slow=False)
                logger.exception("%s: the handshake broke", self.name)
            else:
                self._begin(session)
                return session

    def _begin(self, session: NatsSession) -> None:
        self._session = self._output.session = session
        self._lame_duck = self._left_for_others = False
        self._choice.advertise(session.info.get("connect_urls") or ())
        self._denied.clear()
        self.max_payload = int(session.info.get("max_payload") or self.max_payload)
        for subscription in self._subscriptions.values():
            if not subscription.ending:
                session.write(subscription.command())
        self._set_state(ConnectionState.CONNECTED)

    def _end(self) -> None:
        self._output.clear()
        self._set_state(ConnectionState.DISCONNECTED)
        self._fail_waiters()

    def _fail_waiters(self) -> None:
        self._pings.lose()
        self._requests.lose()

    async def _serve(self, session: NatsSession) -> str:
        """Read until the session ends, and return why it did; never raises for what a server or
        peer sends."""
        reader = ServerReader(self._deliver, self._control)
        pings = self._pings
        given_up = False

        def give_up() -> None:
            nonlocal given_up
            given_up = True
            session.abort()

        def feed(chunk: bytes) -> None:
            pings.heard()
            reader.feed(chunk)

        pings.watch(give_up, self._opened_in)
        try:
            await session.receive(feed)
            return self._why(given_up, "the server closed it")
        except (OSError, ProtocolViolation, asyncio.IncompleteReadError) as error:
            return self._why(given_up, str(error) or type(error).__name__)
        finally:
            pings.unwatch()

    def _why(self, is_silent: bool, otherwise: str) -> str:
        """The reason for which a session has ended."""
        if is_silent:
            return SILENT
        if self._left_for_others:
            return "all connections of the process go to another"
        return otherwise

    # Messages -------------------------------------------------------------------------

    def _deliver(self, number: int, message: Message) -> None:
        subscription = self._subscriptions.get(number)
        if subscription is None:
            self.drop(DropReason.UNSUBSCRIBED)
            return
        # Who may read a stream may have it deliver to any subject, with the server's rights.
        if not subscription.reads_stream and (
            OF_STREAM in message.headers
            or (
                message.subject != subscription.subject
                and (subscription.hears is None or not subscription.hears(message.subject))
            )
        ):
            self.drop(DropReason.FROM_STREAM)
            return
        try:
            subscription.callback(message)
        except Exception:
            # One message must never stop the others.
            logger.exception("the callback of %s raised", subscription.subject)

    def _control(self, line: bytes) -> None:
        if line == b"PING":
            self._output.write(b"PONG\r\n")
        elif line == b"PONG":
            self._pings.answered()
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
            if len(self._denied) > MAX_DENIED:
                # Reply subjects are chosen by others, and there is no end to them.
                del self._denied[next(iter(self._denied))]
            if "for publish to" in text.lower():
                self._requests.refuse(subject, PermissionDenied(text))
            for listener in self._error_listeners:
                listener(PermissionDenied(text), subject)

    def _info(self, line: bytes) -> None:
        session = self._session
        if session is None:
            return
        try:
            info = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            return
        before = set(session.info.get("connect_urls") or ())
        session.info.update(info)
        self._choice.advertise(session.info.get("connect_urls") or ())
        if before - set(session.info.get("connect_urls") or ()):
            for listener in self._peer_lost_listeners:
                listener()
        if info.get("ldm") and not self._lame_duck:
            self._lame_duck = True
            self._choice.shun(self, monotonic())
            if self._choice.has_other(self, monotonic()):
                logger.info("%s: the server is going away, moving on", self.name)
                self._output.flush()
                self._loop.call_later(jitter.uniform(0, 0.5), session.abort)


async def connect(
    servers: Sequence[str] | ServerChoice,
    *,
    name: str = "dynbus",
    inbox: str = "",
    timeout: float = 5.0,
    options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    replicas: int = REPLICAS,
    tls: ClientTls | None = None,
) -> NatsConnection:
    """Open a connection to one of `servers`.

    Args:
        servers: URLs such as `nats://127.0.0.1:4222`, or a choice that the connection shares with
            others.
        inbox: the subject under which replies of server APIs arrive.
        timeout: seconds for each server; they are tried side by side.
        options: credentials as nats-py's `connect` takes them: `user`, `password`, `token`,
            `user_credentials`, `nkeys_seed`; or what gives them for each session.
        replicas: how many servers of a cluster keep a stream that does not say so itself.
        tls: the certificates; without them the system's authorities are trusted.

    Raises:
        ConfigError: a file with a certificate cannot be used.
        PermissionDenied: the server refuses the credentials.
        Unavailable: no server could be reached.
    """
    connection = NatsConnection(
        servers if isinstance(servers, ServerChoice) else ServerChoice(servers),
        name=name,
        inbox=inbox or f"_INBOX.{secrets.token_hex(16)}",
        options=options if callable(options) else partial(dict[str, Any], options or {}),
        replicas=replicas,
        tls=tls,
    )
    await connection.open(timeout)
    return connection


async def choose_server(config: BusConfig) -> ServerChoice:
    """A choice among the servers of a configuration, for all connections of a process."""
    own = await find_own_hosts(config.servers)
    return ServerChoice(
        config.servers, zone=config.zone, is_own=lambda host: host in own or is_own_address(host)
    )


async def connect_as(
    config: BusConfig, *, name: str, inbox: str, choice: ServerChoice | None = None
) -> NatsConnection:
    """Open a connection to the servers of a configuration, with its credentials.

    Args:
        name, inbox: as `connect` takes them.
        choice: that it shares with other connections of the process.

    Raises:
        ConfigError: a file with its credentials or certificates cannot be used.
        PermissionDenied: the server refuses the credentials, or the certificate.
        Unavailable: no server could be reached, or trusted.
    """
    return await connect(
        choice or await choose_server(config),
        name=name,
        inbox=inbox,
        timeout=config.connect_timeout,
        options=CredentialFile(config.credentials).options,
        replicas=config.replicas,
        tls=ClientTls(config),
    )
