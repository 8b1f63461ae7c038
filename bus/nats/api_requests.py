"""Requests to APIs of nats-server, the replies that they wait for, and JetStream's errors."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from dynbus.bus.clock import monotonic
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import DynbusError, PayloadTooLarge, Unavailable
from dynbus.bus.transport import (
    Callback,
    Connection,
    ConnectionState,
    Message,
    NoRollup,
    NoRoom,
    NoStream,
    StreamFull,
    SubjectTaken,
    Subscription,
    WrongLastSequence,
)

FIRST_REPEAT: Final = 0.5
"""Seconds after which a question is asked again; each pause is twice as long as the last."""
LEAST_WAIT: Final = 0.001
"""Seconds; less than that is no time left: timers of loops end a little early."""
_TOKEN_BYTES: Final = 8
_TOKENS: Final = 256
"""Tokens that are drawn at a time."""

WRONG_LAST_SEQUENCE: Final = 10071
WRONG_LAST_SEQUENCE_CONSTANT: Final = 10164
STREAM_NAME_IN_USE: Final = 10058
STREAM_NOT_FOUND: Final = 10059
CONSUMER_EXISTS: Final = 10148
CONSUMER_NOT_FOUND: Final = 10014
MESSAGE_NOT_FOUND: Final = 10037
SEQUENCE_NOT_FOUND: Final = 10043
NOT_DELETED: Final = 10057
NOT_STORED: Final = 10077
TOO_LARGE: Final = 10054
ROLLUP_REFUSED: Final = 10111
NO_PEERS: Final = 10005
ONE_SERVER: Final = 10074
NO_ROOM: Final = (10023, 10047)
NO_LEADER: Final = (10008, 10009)
"""A cluster that elects a leader, or a server of it that is not it any more."""
UNDER_WAY: Final = (10158, 10163, 10167)
"""A cluster that has not decided yet what becomes of an earlier message of the same id or subject,
or that has too many to decide about."""
REFUSED: Final = 10051


class ServerLink(Connection, Protocol):
    """The interface of a connection that requests to a server go over.

    Attributes:
        inbox: replies arrive below it.
        subscribe: with `reads_stream` for what a stream delivers, which is dropped elsewhere.
    """

    inbox: str

    @property
    def is_joined(self) -> bool:
        """True if the server belongs to a cluster, or is a leaf node."""
        ...

    def subscribe(
        self, subject: str, callback: Callback, *, queue: str = "", reads_stream: bool = False
    ) -> Subscription: ...
    async def wait_connected(self) -> None: ...
    def drop(self, reason: DropReason) -> None: ...
    def refusal_of(self, subject: str) -> str: ...
    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        headers: bytes = b"",
        timeout: float = 5.0,
        repeat: bool = False,
    ) -> Message: ...


class NoResponders(Unavailable):
    """Raised when nobody serves the subject of a request."""


class _Request:
    """A request that waits for its reply, and is sent again until it comes or its time is over.

    One timer and one future: jobs and events wait for two or three of them each, and asyncio's
    timeouts and `wait` would take longer than the rest of it.

    Args:
        pause: seconds until it is sent again, or given up.
        until: when it is given up, on the clock of the loop.
    """

    __slots__ = ("_pause", "_send", "_timeout", "_timer", "_until", "reply", "subject")

    def __init__(
        self, subject: str, send: Callable[[], object], pause: float, timeout: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self.subject = subject
        self.reply: asyncio.Future[Message] = loop.create_future()
        self._send = send
        self._pause = pause
        self._timeout = timeout
        self._until = loop.time() + timeout
        send()
        self._timer = loop.call_later(min(pause, timeout), self._no_reply)

    def end(self) -> None:
        self._timer.cancel()

    def _no_reply(self) -> None:
        if self.reply.done():
            return
        loop = self.reply.get_loop()
        left = self._until - loop.time()
        if left <= LEAST_WAIT:
            text = f"{self.subject} did not answer within {self._timeout:.1f} s"
            _fail(self.reply, Unavailable(text))
            return
        try:
            self._send()
        except DynbusError as error:
            _fail(self.reply, error)
            return
        self._pause *= 2
        self._timer = loop.call_later(min(self._pause, left), self._no_reply)


class ServerRequests:
    """The requests of one connection. All replies come to one subscription of its inbox."""

    def __init__(self, connection: ServerLink) -> None:
        self._connection = connection
        self._waiting: dict[str, _Request] = {}
        self._tokens: list[str] = []
        self._subscribed = False

    def __repr__(self) -> str:
        return f"<ServerRequests [waiting: {len(self._waiting)}]>"

    async def send(
        self,
        subject: str,
        data: bytes,
        *,
        headers: bytes = b"",
        timeout: float = 5.0,
        repeat: bool = False,
    ) -> Message:
        """One request and its reply, for APIs of the server.

        Args:
            repeat: send it again while no reply comes; for requests that may be carried out
                twice. Servers of a cluster answer some requests only once they have elected a
                leader, and forget those before.

        Raises:
            NoResponders: nobody serves the subject.
            PermissionDenied: the server does not let us ask.
            Unavailable: no reply came in time.
        """
        connection = self._connection
        if not self._subscribed:
            connection.subscribe(f"{connection.inbox}.*", self._receive)
            self._subscribed = True
        if connection.state is not ConnectionState.CONNECTED:
            timeout = await self._connected(subject, timeout)
        if not self._tokens:
            self._tokens = _drawn_tokens()
        token = self._tokens.pop()
        send = partial(
            connection.publish, subject, data, reply=f"{connection.inbox}.{token}", headers=headers
        )
        request = _Request(subject, send, FIRST_REPEAT if repeat else timeout, timeout)
        self._waiting[token] = request
        try:
            return await request.reply
        finally:
            request.end()
            del self._waiting[token]

    async def _connected(self, subject: str, timeout: float) -> float:
        """Wait until there is a session; the seconds that are left of `timeout`."""
        begun = monotonic()
        try:
            async with asyncio.timeout(timeout):
                await self._connection.wait_connected()
        except TimeoutError:
            raise Unavailable(f"{subject} did not answer within {timeout:.1f} s") from None
        return timeout - (monotonic() - begun)

    def lose(self) -> None:
        """The session has ended, and with it whatever was asked in it."""
        for waiting in self._waiting.values():
            _fail(waiting.reply, Unavailable("the connection to the server broke"))

    def refuse(self, subject: str, error: DynbusError) -> None:
        """The server does not let us publish to `subject`: nothing of it will be answered."""
        for waiting in self._waiting.values():
            if waiting.subject == subject:
                _fail(waiting.reply, error)

    def _receive(self, message: Message) -> None:
        waiting = self._waiting.get(message.subject.rpartition(".")[2])
        if waiting is None or waiting.reply.done():
            self._connection.drop(DropReason.STALE)
            return
        reply = waiting.reply
        if message.found_nobody:
            _fail(reply, NoResponders("nobody serves the subject: is JetStream enabled?"))
        else:
            reply.set_result(message)


def _drawn_tokens() -> list[str]:
    """Tokens of the subjects at which requests are answered.

    Whom a process calls knows its inbox, and may publish there: only the server is to know the rest
    of the subject.
    """
    drawn = secrets.token_hex(_TOKEN_BYTES * _TOKENS)
    size = 2 * _TOKEN_BYTES
    return [drawn[at : at + size] for at in range(0, len(drawn), size)]


def _fail(reply: asyncio.Future[Message], error: DynbusError) -> None:
    if not reply.done():
        reply.set_exception(error)
        # The waiting caller may have been cancelled in this very turn.
        reply.exception()


def unix_seconds(time: str) -> float:
    """Unix seconds of a time as the server writes it: RFC 3339, to the nanosecond.

    Raises:
        ValueError: it is none.
    """
    return datetime.fromisoformat(time).timestamp()


class JetStreamError(DynbusError):
    """Raised when the server refuses a JetStream request for a reason not named otherwise, or
    gives an answer that cannot be read.

    Attributes:
        error_code: the server's own number; 0 for an answer that cannot be read.
    """

    code = "JetStreamError"

    def __init__(self, message: str, error_code: int = 0) -> None:
        super().__init__(message)
        self.error_code = error_code


def _raise_for(error: Mapping[str, Any], what: str) -> None:
    code = int(error.get("err_code", 0))
    text = f"{what}: {error.get('description', 'refused')}"
    if code in (WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_CONSTANT):
        raise WrongLastSequence(text)
    if code in (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND):
        raise NoStream(text)
    if code == TOO_LARGE:
        raise PayloadTooLarge(text)
    if code == ROLLUP_REFUSED:
        raise NoRollup(text)
    if code == NOT_STORED and "maximum messages per subject" in text:
        raise SubjectTaken(text)
    if code == NOT_STORED and "maximum " in text:
        raise StreamFull(text)
    if code in NO_ROOM or (code == NOT_STORED and "creating store" in text):
        raise NoRoom(text)
    if code in NO_LEADER or code in UNDER_WAY:
        raise Unavailable(text)
    raise JetStreamError(text, code)


@contextmanager
def reading(what: str) -> Generator[None, None, None]:
    """Have an answer that cannot be read end `what` was asked with a `JetStreamError`."""
    try:
        yield
    except (
        msgspec.MsgspecError,
        AttributeError,
        LookupError,
        OverflowError,
        TypeError,
        ValueError,
    ) as error:
        raise _unreadable(what, error) from error


def _unreadable(what: str, error: Exception) -> JetStreamError:
    return JetStreamError(
        f"{what}: the server's answer cannot be read: {type(error).__name__}: {error}"
    )


class _Stored(msgspec.Struct):
    """The server's answer to a publish."""

    seq: int = 0
    error: dict[str, Any] | None = None


_read_stored = msgspec.json.Decoder(_Stored).decode


def read_sequence(data: bytes, subject: str) -> int:
    """The sequence that an answer to a publish says.

    Raises:
        DynbusError: the server refuses it, or its answer cannot be read.
    """
    try:
        stored = _read_stored(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable(f"publish to {subject}", error) from error
    if stored.error is not None:
        what = f"publish to {subject}"
        with reading(what):
            _raise_for(stored.error, what)
    if not stored.seq:
        raise _unreadable(f"publish to {subject}", KeyError("seq"))
    return stored.seq


def read_answer(data: bytes, what: str) -> dict[str, Any]:
    with reading(what):
        answer = msgspec.json.decode(data, type=dict[str, Any])
        if "error" in answer:
            _raise_for(answer["error"], what)
    return answer


def api_of(region: str) -> str:
    """The subject below which the JetStream API of a region is called; empty for the own one."""
    return f"$JS.{region}.API" if region else "$JS.API"


async def call_jetstream(
    link: ServerLink, call: str, request: Mapping[str, Any], *, timeout: float, region: str = ""
) -> dict[str, Any]:
    """One call of `$JS.API`, or of that of another region.

    Raises:
        NoStream, WrongLastSequence: the server refuses.
        JetStreamError: it refuses for another reason, or its answer cannot be read.
        Unavailable: it does not answer, or has no JetStream.
    """
    data = msgspec.json.encode(request) if request else b""
    reply = await link.request(f"{api_of(region)}.{call}", data, timeout=timeout, repeat=True)
    return read_answer(reply.data, call)
