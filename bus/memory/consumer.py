"""`OrderedConsumer` without a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from dynbus.bus.transport import StoredMessage

if TYPE_CHECKING:
    from .connection import MemoryConnection
    from .jetstream import JetStreamServer


class MemoryOrderedConsumer:
    """Reads a stream in order; the connection and the server start it over.

    Attributes:
        generation: how often the server has begun to feed it; what an earlier start still
            delivers is left out.
    """

    def __init__(
        self,
        connection: MemoryConnection,
        server: JetStreamServer,
        stream: str,
        on_message: Callable[[StoredMessage], None],
        *,
        pattern: str,
        next_sequence: int,
        last_per_subject: bool,
        created: float | None,
        on_restart: Callable[[], None] | None,
        on_recreated: Callable[[], None] | None,
        on_caught_up: Callable[[], None] | None,
    ) -> None:
        self.connection = connection
        self.stream = stream
        self.pattern = pattern
        self.next_sequence = next_sequence
        self.last_per_subject = last_per_subject
        self.generation = 0
        self._server = server
        self._created = created
        self._on_message = on_message
        self._on_restart = on_restart
        self._on_recreated = on_recreated
        self._on_caught_up = on_caught_up
        self._begun = False
        self._stopped = False

    def __repr__(self) -> str:
        return f"<MemoryOrderedConsumer {self.stream} [next: {self.next_sequence}]>"

    async def stop(self) -> None:
        self._stopped = True
        self._server.remove(self)

    def restart(self) -> None:
        """Have the server feed it anew, in later turns."""
        if not self._stopped:
            self.connection.send(self._attach)

    def start_of(self, created: float) -> int:
        """The first sequence that it wants of a stream made at `created`."""
        return 1 if self._created not in (None, created) else self.next_sequence

    def begin(self, created: float, generation: int) -> None:
        """Take note of a start, before all that is delivered after it."""
        if self._stopped or generation != self.generation:
            return
        if self._created not in (None, created):
            self.next_sequence = 1
            self._call(self._on_recreated)
        self._created = created
        if self._begun and self.last_per_subject:
            self._call(self._on_restart)
        self._begun = True

    def receive(self, message: StoredMessage, generation: int) -> None:
        """Take a delivery."""
        if not self._stopped and generation == self.generation:
            self.next_sequence = message.sequence + 1
            self._call(partial(self._on_message, message))

    def caught_up(self, generation: int) -> None:
        """Take note that all that the stream held at the last start was delivered."""
        if not self._stopped and generation == self.generation:
            self._call(self._on_caught_up)

    def _call(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            self.connection.call(callback, self.stream)

    def _attach(self) -> None:
        if not (self._stopped or self._server.stalled):
            # While its stream is missing it waits to be started when that is made.
            self._server.attach(self)
