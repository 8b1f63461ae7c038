"""A subscription to the in-memory bus."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from dynbus.bus.errors import Unavailable
from dynbus.bus.transport import Callback, ConnectionState, Message

if TYPE_CHECKING:
    from .connection import MemoryConnection


class MemorySubscription:
    """A subscription of a `MemoryConnection`."""

    __slots__ = ("_callback", "active", "connection", "number", "queue", "subject")

    def __init__(
        self,
        connection: MemoryConnection,
        number: int,
        subject: str,
        queue: str,
        callback: Callback,
    ) -> None:
        self.connection = connection
        self.number = number
        self.subject = subject
        self.queue = queue
        self.active = True
        self._callback = callback

    def unsubscribe(self) -> None:
        if self.active:
            self.active = False
            self.connection.remove(self)

    async def drain(self, *, timeout: float = 5.0) -> None:
        if self.active:
            self.connection.remove(self)
            if self.connection.state is ConnectionState.CONNECTED:
                with suppress(Unavailable):
                    await self.connection.barrier(timeout=timeout)
            self.active = False

    def receive(self, message: Message) -> None:
        self._callback(message)
