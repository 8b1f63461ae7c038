"""Requests to APIs of nats-server, and the replies that they wait for."""

from __future__ import annotations

import asyncio
import itertools
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from dynbus.bus.drops import DropReason
from dynbus.bus.errors import DynbusError, Unavailable
from dynbus.bus.protocol import headers as header_block
from dynbus.bus.transport import Message

if TYPE_CHECKING:
    from .connection import NatsConnection


FIRST_REPEAT: Final = 0.5
"""Seconds after which a question is asked again; each pause is twice as long as the last."""


class NoResponders(Unavailable):
    """Raised when nobody serves the subject of a request."""


class _Waiting(NamedTuple):
    subject: str
    reply: asyncio.Future[Message]


class ServerRequests:
    """The requests of one connection. All replies come to one subscription of its inbox."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._waiting: dict[str, _Waiting] = {}
        self._numbers = itertools.count(1)
        self._subscribed = False

    def __repr__(self) -> str:
        return f"<ServerRequests [waiting: {len(self._waiting)}]>"

    async def send(
        self, subject: str, data: bytes, headers: bytes, timeout: float, *, repeat: bool = False
    ) -> Message:
        """One request and its reply.

        Args:
            repeat: send it again while no reply comes. Servers of a cluster answer some
                requests only once they have elected a leader, and forget those before.

        Raises:
            NoResponders: nobody serves the subject.
            PermissionDenied: the server does not let us ask.
            Unavailable: no reply came in time.
        """
        connection = self._connection
        if not self._subscribed:
            connection.subscribe(f"{connection.inbox}.*", self._receive)
            self._subscribed = True
        token = str(next(self._numbers))
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[token] = _Waiting(subject, reply)
        try:
            async with asyncio.timeout(timeout):
                await connection.wait_connected()
                where = f"{connection.inbox}.{token}"
                pause = FIRST_REPEAT if repeat else timeout
                while True:
                    connection.publish(subject, data, reply=where, headers=headers)
                    await asyncio.wait([reply], timeout=pause)
                    if reply.done():
                        return reply.result()
                    pause *= 2
        except TimeoutError:
            raise Unavailable(f"{subject} did not answer within {timeout} s") from None
        finally:
            self._waiting.pop(token, None)

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
        if header_block.status(message.headers) == header_block.NO_RESPONDERS:
            reply.set_exception(NoResponders("nobody serves the subject: is JetStream enabled?"))
        else:
            reply.set_result(message)


def _fail(reply: asyncio.Future[Message], error: DynbusError) -> None:
    if not reply.done():
        reply.set_exception(error)
        # Whoever waits may have been cancelled in this very turn.
        reply.exception()


def unix_seconds(time: str) -> float:
    """Unix seconds of a time as the server writes it: RFC 3339, to the nanosecond.

    Raises:
        ValueError: it is none.
    """
    return datetime.fromisoformat(time).timestamp()
