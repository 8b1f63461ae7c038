"""`FlightFollower`: has a view take the flights of namespaces, as their streams grow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio

from dynbus.bus.clock import unix_time
from dynbus.bus.commands.listing import pages
from dynbus.bus.errors import DynbusError
from dynbus.bus.flight import (
    FLIGHTS,
    EntryReader,
    flight_stream,
    message_at,
    namespace_of_flight,
)
from dynbus.bus.transport import NoStream

from .flight_view import FlightView

if TYPE_CHECKING:
    from dynbus.bus.commands.server import Server
    from dynbus.bus.transport import OrderedConsumer, StoredMessage

logger = logging.getLogger(__name__)

HOW_TO_RECORD: Final = "set DYNBUS_FLIGHT=true where its processes are"


class FlightFollower:
    """Follows the flights that a view is to show.

    Args:
        namespace: whose; None for all that are there.
        window: seconds of the latest time that are looked at.

    Attributes:
        view: of all of them.
        namespaces: that are followed.
    """

    def __init__(self, server: Server, namespace: str | None, window: float) -> None:
        self.view = FlightView(unix_time() - window, keep=window)
        self.namespaces: set[str] = set()
        self._server = server
        self._namespace = namespace
        self._since = unix_time() - window
        self._consumers: list[OrderedConsumer] = []
        # Flights of which it is not read yet what they held when they were begun to be followed.
        self._unread: set[str] = set()
        self._caught_up = asyncio.Event()

    def __repr__(self) -> str:
        return f"<FlightFollower of {', '.join(sorted(self.namespaces)) or 'nothing'}>"

    @property
    def is_caught_up(self) -> bool:
        """True if all was read that the streams held when they were first looked at."""
        return not self._unread

    async def catch_up(self, within: float) -> bool:
        """Wait until all was read that the streams held, for so many seconds at most; True if it
        was."""
        with anyio.move_on_after(within):
            while self._unread:
                self._caught_up.clear()
                await self._caught_up.wait()
        return self.is_caught_up

    async def look(self) -> None:
        """Follow the flights that have begun since the last look.

        Raises:
            PermissionDenied, Unavailable: the server does not say which there are.
        """
        for namespace in await self._recorded() - self.namespaces:
            reader = EntryReader()
            take = partial(self._take, namespace, reader)
            stream = flight_stream(namespace).name
            self._unread.add(namespace)
            try:
                consumer = await self._server.connection.jetstream.consume(
                    stream, take, on_caught_up=partial(self._has_read, namespace)
                )
            except NoStream:
                self._has_read(namespace)
                continue
            self._consumers.append(consumer)
            self.namespaces.add(namespace)

    async def close(self) -> None:
        """Follow them no longer."""
        for consumer in self._consumers:
            await consumer.stop()

    async def _recorded(self) -> set[str]:
        """The namespaces with a flight, of those that are asked for."""
        if self._namespace is not None:
            return {self._namespace}
        names: set[str] = set()
        jetstream = self._server.connection.jetstream
        async for page in pages(jetstream, "STREAM.NAMES", {"subject": FLIGHTS}):
            names.update(map(namespace_of_flight, page["streams"] or ()))
        return names - {""}

    def _has_read(self, namespace: str) -> None:
        self._unread.discard(namespace)
        self._caught_up.set()

    def _take(self, namespace: str, reader: EntryReader, stored: StoredMessage) -> None:
        if stored.time < self._since:
            return
        message = message_at(stored.subject, namespace, stored.data)
        if message is None:
            return
        self.view.move_on(unix_time())
        for entry in reader.take(message):
            self.view.take(entry)


@asynccontextmanager
async def following(
    server: Server, namespace: str | None, window: float
) -> AsyncGenerator[FlightFollower]:
    """A follower, which is closed at the end."""
    follower = FlightFollower(server, namespace, window)
    try:
        yield follower
    finally:
        with anyio.CancelScope(shield=True):
            try:
                await follower.close()
            except DynbusError as error:
                # The server forgets who does not ask.
                logger.debug("%r: %s", follower, error)
