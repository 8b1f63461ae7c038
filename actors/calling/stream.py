"""The stream of a call, as its caller iterates over it: its items."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dynbus.bus.calling.pending_call import PendingCall
from dynbus.bus.errors import InvalidResponse, ResumeMismatch

from .stream_invocation import OfInvocation, StreamInvocation

T = TypeVar("T")


class Stream(OfInvocation, AsyncGenerator[T, None]):
    """The items of one streaming call, in order and once.

    Iterating sends the request. Leaving early (`break`, an exception, `aclose`) cancels the
    far side; so does dropping the stream.
    """

    __slots__ = (
        "_call",
        "_closed",
        "_continues",
        "_decode",
        "_decode_many",
        "_failure",
        "_index",
        "_items",
        "_size",
    )

    def __init__(
        self,
        invocation: StreamInvocation,
        decode: Callable[[bytes], Any],
        decode_many: Callable[[Sequence[bytes]], list[Any]],
    ) -> None:
        self._invocation = invocation
        self._decode = decode
        self._decode_many = decode_many
        self._call: PendingCall | None = None
        self._items: list[Any] = []
        self._index = 0
        self._size = 0
        self._closed = False
        # Whether what is read from `_call` has to pass the call, since it can go on elsewhere.
        self._continues = False
        self._failure: InvalidResponse | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Stream {self._invocation.endpoint} {self.id} [{state}]>"

    if not TYPE_CHECKING:  # the type checkers refuse `await` by themselves

        def __await__(self) -> NoReturn:
            raise TypeError(
                f"{self._invocation.endpoint} is a stream, which is not awaited: "
                "write `async for item in ...`"
            )

    def __aiter__(self) -> Stream[T]:
        return self

    async def __anext__(self) -> T:
        index = self._index
        items = self._items
        if index < len(items):
            self._index = index + 1
            return items[index]  # type: ignore[no-any-return]
        call = self._call
        if call is None:
            return await self._refill()
        # Once items flow everything happens here: a coroutine less per wake-up is a tenth of
        # what a token costs its reader.
        reader = call.reader
        if self._size:
            call.consumed(self._size)
            self._size = 0
        while True:
            while not reader.ready:
                if not call.is_open:
                    return await self._refill()
                waiter = call.wait()
                try:
                    await waiter
                except asyncio.CancelledError:
                    self._close()
                    raise
                if self._closed:
                    return await self._refill()
            raw = reader.ready
            if not self._continues:
                break
            reader.ready = []
            raw = self._arrived(raw)
            if raw:
                break
        if len(raw) == 1:
            data = raw.pop()
            self._size = len(data)
            try:
                return self._decode(data)  # type: ignore[no-any-return]
            except Exception:  # noqa: BLE001 - becomes the error of the stream
                return await self._take([data])
        if not self._continues:
            reader.ready = []
        return await self._take(raw)

    async def asend(self, value: None, /) -> T:
        return await self.__anext__()

    async def athrow(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> T:
        self._close()
        raise typ if isinstance(typ, BaseException) else typ()

    def hand_over(
        self,
    ) -> tuple[StreamInvocation, Callable[[bytes], Any], Callable[[Sequence[bytes]], list[Any]]]:
        """Close the stream for somebody who reads in its place.

        Returns:
            The call, and how an item is read, or many of them.

        Raises:
            RuntimeError: it was iterated over already, or is closed.
        """
        if self._closed or self._invocation.is_open:
            raise RuntimeError(f"{self!r} is read already: make another call")
        self._closed = True
        return self._invocation, self._decode, self._decode_many

    async def aclose(self) -> None:
        """Leave the stream; the far side stops."""
        self._close()

    def __del__(self) -> None:
        if self._closed or not self._invocation.is_open:
            return
        try:
            # Garbage is collected on whatever thread happens to allocate, the lane's too.
            self._invocation.side.bus.loop.call_soon_threadsafe(self._invocation.abandon)
        except RuntimeError:
            # The loop is closed, and the connection with it: the far side sees that.
            return

    async def _refill(self) -> T:
        if self._closed:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            raise StopAsyncIteration
        invocation = self._invocation
        if self._size:
            invocation.consumed(self._size)
            self._size = 0
        try:
            raw = await invocation.items()
        except BaseException:
            self._close()
            raise
        if self._closed:
            return await self._refill()
        if not raw:
            self._closed = True
            self._call = None
            raise StopAsyncIteration
        # After a move it is another call, and maybe one that is looked at.
        self._call = None if invocation.is_observed else invocation.call
        self._continues = invocation.continues
        return await self._take(raw)

    def _arrived(self, raw: list[bytes]) -> list[bytes]:
        """The items for the reader among those that have arrived."""
        try:
            return self._invocation.arrived(raw)
        except ResumeMismatch:
            self._close()
            raise

    async def _take(self, raw: list[bytes]) -> T:
        self._size = sum(map(len, raw))
        items, failure = decode_to_misfit(self._invocation, self._decode_many, raw)
        if failure is not None:
            # The far side stops, and the error follows what fits.
            self._close(failure)
            self._failure = failure
            if not items:
                return await self._refill()
        self._items = items
        self._index = 1
        return items[0]  # type: ignore[no-any-return]

    def _close(self, error: InvalidResponse | None = None) -> None:
        self._closed = True
        self._call = None
        self._items = []
        self._index = 0
        self._failure = None
        self._invocation.abandon(error)


def decode_to_misfit(
    invocation: StreamInvocation,
    decode_many: Callable[[Sequence[bytes]], list[Any]],
    raw: Sequence[bytes],
) -> tuple[list[Any], InvalidResponse | None]:
    """Items as values, up to the first that does not fit, and the error that it is."""
    try:
        return decode_many(raw), None
    except Exception:  # noqa: BLE001 - found again item by item
        good: list[Any] = []
        try:
            for data in raw:
                good += decode_many([data])
        except Exception as error:  # noqa: BLE001 - validators of users raise what they like
            return good, invocation.misfit("an item", error)
        return good, None
