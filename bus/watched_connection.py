"""The part that every connection has: its state, the work beside its callers, and who is told of
both and of what is dropped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from .background import Background
from .drops import DropReason
from .errors import Unavailable
from .transport import ConnectionState

logger = logging.getLogger(__name__)


class WatchedConnection:
    """A connection's state and background work, with listeners. Lives on one event loop.

    Attributes:
        background: what reads and watches for the connection; it ends with it.
        sessions: how often it has been connected.
    """

    def __init__(self, name: str, state: ConnectionState) -> None:
        self.name = name
        self._state = state
        self.sessions = int(state is ConnectionState.CONNECTED)
        self._loop = asyncio.get_running_loop()
        self._listeners: list[Callable[[ConnectionState], None]] = []
        self._drop_listeners: list[Callable[[DropReason], None]] = []
        self.background = Background(name)

    @property
    def state(self) -> ConnectionState:
        return self._state

    def on_state(self, listener: Callable[[ConnectionState], None]) -> Callable[[], None]:
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    def on_drop(self, listener: Callable[[DropReason], None]) -> None:
        self._drop_listeners.append(listener)

    def drop(self, reason: DropReason) -> None:
        """Tell the listeners that a message is dropped, and why."""
        for listener in self._drop_listeners:
            listener(reason)

    async def wait_connected(self) -> None:
        """Wait until there is a session.

        Raises:
            Unavailable: the connection is closed.
        """
        while self._state is not ConnectionState.CONNECTED:
            if self._state is ConnectionState.CLOSED:
                raise Unavailable("the connection is closed")
            waiter: asyncio.Future[None] = self._loop.create_future()

            def wake(_: ConnectionState, waiter: asyncio.Future[None] = waiter) -> None:
                if not waiter.done():
                    waiter.set_result(None)

            end = self.on_state(wake)
            try:
                await waiter
            finally:
                end()

    def _set_state(self, state: ConnectionState) -> None:
        if state is self._state or self._state is ConnectionState.CLOSED:
            return
        self._state = state
        self.sessions += state is ConnectionState.CONNECTED
        for listener in list(self._listeners):
            try:
                listener(state)
            except Exception:
                # One listener must not keep the others, or the reader, from going on.
                logger.exception("%s: a listener to the state raised", self.name)
