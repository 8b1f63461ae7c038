"""A subscription of a NATS connection, which outlives the connection's sessions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dynbus.bus.errors import DynbusError
from dynbus.bus.transport import Callback, ConnectionState

if TYPE_CHECKING:
    from .connection import NatsConnection

logger = logging.getLogger(__name__)


class NatsSubscription:
    """A subscription that each new session takes over.

    Attributes:
        ending: whether the server was told to send nothing more.
    """

    __slots__ = ("_connection", "callback", "ending", "number", "queue", "subject")

    def __init__(
        self, connection: NatsConnection, number: int, subject: str, queue: str, callback: Callback
    ) -> None:
        self._connection = connection
        self.number = number
        self.subject = subject
        self.queue = queue
        self.ending = False
        self.callback = callback

    def __repr__(self) -> str:
        state = "ending" if self.ending else "open"
        return f"<NatsSubscription {self.number} [{state} | {self.subject}, queue: {self.queue}]>"

    def command(self) -> bytes:
        """What asks the server for it."""
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
