"""Requests to APIs of nats-server, and the replies that they wait for."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from dynbus.bus import headers as header_block
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import Unavailable
from dynbus.bus.transport import Message

if TYPE_CHECKING:
    from .connection import NatsConnection


class NoResponders(Unavailable):
    """Raised when nobody serves the subject of a request."""


class ServerRequests:
    """The requests of one connection. All replies come to one subscription of its inbox."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self._subscribed = False

    def __repr__(self) -> str:
        return f"<ServerRequests [waiting: {len(self._waiting)}]>"

    async def send(self, subject: str, data: bytes, headers: bytes, timeout: float) -> Message:
        """One request and its reply.

        Raises:
            NoResponders: nobody serves the subject.
            Unavailable: no reply came in time.
        """
        connection = self._connection
        if not self._subscribed:
            connection.subscribe(f"{connection.inbox}.*", self._receive)
            self._subscribed = True
        token = str(next(self._numbers))
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[token] = reply
        try:
            async with asyncio.timeout(timeout):
                await connection.wait_connected()
                where = f"{connection.inbox}.{token}"
                connection.publish(subject, data, reply=where, headers=headers)
                return await reply
        except TimeoutError:
            raise Unavailable(f"{subject} did not answer within {timeout} s") from None
        finally:
            self._waiting.pop(token, None)

    def lose(self) -> None:
        """The session has ended, and with it whatever was asked in it."""
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(Unavailable("the connection to the server broke"))
                reply.exception()

    def _receive(self, message: Message) -> None:
        reply = self._waiting.get(message.subject.rpartition(".")[2])
        if reply is None or reply.done():
            self._connection.drop(DropReason.STALE)
            return
        if header_block.status(message.headers) == header_block.NO_RESPONDERS:
            reply.set_exception(NoResponders("nobody serves the subject: is JetStream enabled?"))
        else:
            reply.set_result(message)
