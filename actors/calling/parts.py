"""`Parts`: a stream that goes on as several calls, read as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from dynbus.bus.background import Background
from dynbus.bus.errors import Cancelled, DynbusError, Unavailable, describe_exception

logger = logging.getLogger(__name__)


class ReadCall(Protocol):
    """A streaming call, as it is read from its first item to its end."""

    @property
    def request_id(self) -> str:
        """Of its request."""
        ...

    @property
    def instance_ids(self) -> list[str]:
        """The instances that serve it now."""
        ...

    async def items(self) -> list[bytes]:
        """The next items; empty at the end. The first call sends the request."""
        ...

    def consumed(self, size: int) -> None:
        """Items of so many bytes were read."""
        ...

    def abandon(self, error: DynbusError | None = None) -> None:
        """Leave it."""
        ...


class Parts:
    """Several streaming calls that are read as one: each item as it comes, and one end.

    The first error of one ends all. Of each no more is read ahead than has come at once.

    Args:
        background: carries out the reading.

    Raises:
        Cancelled: nothing is carried out there any longer.
    """

    def __init__(self, calls: Sequence[ReadCall], background: Background) -> None:
        self._calls = calls
        self._open = len(calls)
        self._error: DynbusError | None = None
        self._arrived: list[bytes] = []
        self._news = asyncio.Event()
        # Set when the reader has read what it was given, and what it will be given next.
        self._given, self._wanted = asyncio.Event(), asyncio.Event()
        try:
            self._works = [
                background.start(self._read, call, name=f"a part of {call.request_id}")
                for call in calls
            ]
        except (RuntimeError, Unavailable) as error:
            raise Cancelled("the runtime is closed") from error

    def __repr__(self) -> str:
        return f"<Parts [{self._open} of {len(self._calls)} open]>"

    @property
    def instance_ids(self) -> list[str]:
        """The instances that serve them now."""
        return [instance_id for call in self._calls for instance_id in call.instance_ids]

    async def items(self) -> list[bytes]:
        """The next items, once those before were read; empty when all have ended.

        Raises:
            DynbusError: how one of them ended; the others are left.
        """
        self._given.set()
        while not self._arrived:
            if self._error is not None:
                self.abandon(self._error)
                raise self._error
            if not self._open:
                return []
            self._news.clear()
            await self._news.wait()
        items, self._arrived = self._arrived, []
        self._given, self._wanted = self._wanted, asyncio.Event()
        return items

    def abandon(self, error: DynbusError | None = None) -> None:
        """Leave all of them."""
        for call, work in zip(self._calls, self._works, strict=True):
            call.abandon(error)
            work.cancel()

    async def _read(self, call: ReadCall) -> None:
        end: DynbusError | None = None
        try:
            while items := await call.items():
                self._arrived += items
                self._news.set()
                await self._wanted.wait()
                call.consumed(sum(map(len, items)))
        except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001 - it ends the stream
            end = ending_of(raised, call.request_id)
        self._open -= 1
        self._error = self._error or end
        self._news.set()


def ending_of(raised: BaseException, request_id: str) -> DynbusError:
    """The end of a stream whose next attempt, made beside all else, raised an exception.

    Whatever of the user's raises there ends this stream, and not the work beside it.
    """
    if isinstance(raised, DynbusError):
        return raised
    if isinstance(raised, asyncio.CancelledError):
        # The runtime is closed, or what a router of the user's waited for was cancelled.
        return Cancelled("the stream was not tried again", request_id=request_id)
    logger.error("the stream %s could not be tried again", request_id, exc_info=raised)
    return DynbusError(describe_exception(raised), request_id=request_id)
