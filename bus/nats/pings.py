"""Pings to nats-server: answers for whoever waits, and the end of a session without any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

PING_INTERVAL: Final = 2.0
MAX_SILENT_PINGS: Final = 2
MAX_UNANSWERED_PINGS: Final = 5


class Pings:
    """The pings of one connection, session by session. Lives on one loop.

    Args:
        write: sends bytes to the server, behind all that was written before.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, write: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._write = write
        self._pongs: list[asyncio.Future[None]] = []
        self._silent = 0
        self._unanswered = 0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Pings [waiting: {len(self._pongs)}, unanswered: {self._unanswered}]>"

    def send(self) -> asyncio.Future[None]:
        """Send one; its future is done when the server has taken all that was written before.

        The future raises `ConnectionResetError` when the session ends first.
        """
        pong: asyncio.Future[None] = self._loop.create_future()
        self._pongs.append(pong)
        self._write(b"PING\r\n")
        return pong

    def watch(self, give_up: Callable[[], None]) -> None:
        """Ping at every interval of a new session; `give_up` when the server is silent."""
        self._silent = 0
        self._unanswered = 0
        self._timer = self._loop.call_later(PING_INTERVAL, self._tick, give_up)

    def unwatch(self) -> None:
        """The inverse of `watch`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> None:
        """Bytes arrived."""
        self._silent = 0

    def answered(self) -> None:
        """A pong arrived: the server answers pings in their order."""
        self._unanswered = 0
        if self._pongs:
            pong = self._pongs.pop(0)
            if not pong.done():
                pong.set_result(None)

    def lose(self) -> None:
        """The session has ended, and nothing that was asked in it is answered any more."""
        pongs, self._pongs = self._pongs, []
        for pong in pongs:
            if not pong.done():
                pong.set_exception(ConnectionResetError())
                pong.exception()

    def _tick(self, give_up: Callable[[], None]) -> None:
        # What arrives while no ping is answered comes over a link that is deaf the other way.
        if self._silent >= MAX_SILENT_PINGS or self._unanswered >= MAX_UNANSWERED_PINGS:
            give_up()
            return
        self._silent += 1
        self._unanswered += 1
        self.send()
        self._timer = self._loop.call_later(PING_INTERVAL, self._tick, give_up)
