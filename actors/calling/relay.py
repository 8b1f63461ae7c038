"""Reading many streams at once: few calls for all that a message brought, no task per stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar, cast

from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.bus.background import Work
from dynbus.bus.calling.pending_call import Gathering, PendingCall
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import (
    Cancelled,
    ConfigError,
    DynbusError,
    ResumeMismatch,
    Unavailable,
)

from .parts import ending_of
from .stream import Stream, decode_to_misfit
from .stream_invocation import OfInvocation, StreamInvocation

logger = logging.getLogger(__name__)

MOST_ARRIVALS: Final = 64
"""Streams that one call of `deliver` tells of.

The items of more, alive all at once, would set off Python's garbage collection at every step of an
engine, and every so many steps that of the whole process, for which all streams wait.
"""

HELD: Final = 0.01
"""Seconds for which the loop is held to pass items on: more are passed on in its next turns.

What a step of an engine with thousands of streams brings takes a good part of a second.
"""

T = TypeVar("T")
K = TypeVar("K")


class Arrival(NamedTuple, Generic[K, T]):
    """The items of one stream that have arrived, and its end.

    Attributes:
        items: those that came since the last time, in order; there may be none at the end.
        ended: whether nothing more will come.
        error: how the stream ended, when it did not end well.
    """

    stream: RelayedStream[K]
    items: Sequence[T]
    ended: bool = False
    error: DynbusError | None = None


# Without the frame of Python's that `Arrival(...)` runs in.
_arrival: Callable[[tuple[RelayedStream[Any], Sequence[Any], bool, None]], Arrival[Any, Any]] = (
    partial(cast("Any", tuple).__new__, Arrival)
)


class Relay(Generic[K, T]):
    """Reads many streams for somebody who passes their items on, such as a router or a gateway.

    What one message of the bus brings is few calls of `deliver`, each for up to 64 streams. Leaving
    the `with` block of a relay cancels every stream that is open.

    Args:
        deliver: called on the event loop with an `Arrival` for each stream that has news; it must
            return at once. Then the items count as consumed, which grants the far side credit,
            except those of a stream that is paused. When it raises, the streams that it was
            called with are cancelled.
    """

    def __init__(self, deliver: Callable[[list[Arrival[K, T]]], object]) -> None:
        self._deliver = deliver
        self._open: set[RelayedStream[K]] = set()
        self._gathering: Gathering[RelayedStream[K]] = Gathering(self._pass_on)
        self._closed = False
        # Streams with news that are still to be passed on, in order.
        self._behind: dict[RelayedStream[K], None] = {}

    def __repr__(self) -> str:
        return f"<Relay [{len(self._open)} streams]>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel every stream that is open; no other is opened."""
        self._closed = True
        for stream in list(self._open):
            stream.cancel()

    async def open(self, stream: AsyncIterable[T], key: K) -> RelayedStream[K]:
        """Send the request of a stream; from now on its items are delivered.

        Args:
            stream: what a client's streaming method returned, not iterated over yet, or an untyped
                call of a streaming endpoint, also a `raw` one.
            key: what the stream is to be known by when it is delivered.

        Raises:
            ConfigError: it is no such stream.
            RuntimeError: it was iterated over or relayed already.
            Cancelled: the relay is closed.
            DynbusError: the request could not be sent.
        """
        reading: Any = aiter(stream)
        if not isinstance(reading, Stream):
            raise ConfigError(
                f"{brief_repr(stream)} cannot be relayed: give the stream that a client's method "
                "returns"
            )
        relayed = RelayedStream(key, *reading.hand_over(), self._gathering, self._open.discard)
        self._open.add(relayed)
        if self._closed:
            relayed.cancel()
        await relayed.begin()
        return relayed

    def _pass_on(self, streams: list[RelayedStream[K]]) -> None:
        if self._behind:
            self._behind.update(dict.fromkeys(streams))
        elif len(streams) <= MOST_ARRIVALS:
            self._pass_on_some(streams)
        else:
            self._behind = dict.fromkeys(streams)
            self._catch_up()

    def _catch_up(self) -> None:
        """Pass on what is there, for as long as the loop may be held."""
        end = monotonic() + HELD
        while self._behind:
            some = list(islice(self._behind, MOST_ARRIVALS))
            for stream in some:
                del self._behind[stream]
            self._pass_on_some(some)
            if self._behind and monotonic() >= end:
                asyncio.get_running_loop().call_soon(self._catch_up)
                return

    def _pass_on_some(self, streams: list[RelayedStream[K]]) -> None:
        arrivals: list[Arrival[K, T]] = []
        for stream in streams:
            arrival = stream.collect()
            if arrival is not None:
                arrivals.append(arrival)
        if not arrivals:
            return
        try:
            self._deliver(arrivals)
        except Exception as error:
            # What became of their items nobody knows; the other streams go on.
            logger.exception("%r failed to deliver", self)
            for arrival in arrivals:
                arrival.stream.lose(error)
            return
        for stream in streams:
            if stream.unread_bytes >= stream.grain:
                stream.delivered()


class RelayedStream(OfInvocation, Generic[K]):
    """One stream of a `Relay`. Leaving its `with` block cancels it, unless it has ended.

    Attributes:
        key: what it was opened with.
        is_over: whether it has ended, or was cancelled.
        is_paused: whether what is delivered does not count as consumed.
        unread_bytes: of what was delivered, what does not count as consumed yet.
        grain: bytes from which on it is told to the far side.
    """

    __slots__ = (
        "_call",
        "_decode",
        "_decode_many",
        "_error",
        "_gathering",
        "_is_direct",
        "_over",
        "_raw",
        "_room",
        "_undelivered",
        "_waiting",
        "_work",
        "grain",
        "is_over",
        "is_paused",
        "key",
        "unread_bytes",
    )

    def __init__(
        self,
        key: K,
        invocation: StreamInvocation,
        decode: Callable[[bytes], Any],
        decode_many: Callable[[Sequence[bytes]], list[Any]],
        gathering: Gathering[RelayedStream[K]],
        over: Callable[[RelayedStream[K]], object],
    ) -> None:
        self.key = key
        self.is_over = False
        self._invocation = invocation
        self._decode = decode
        self._decode_many = decode_many
        self._gathering = gathering
        self._over = over
        self._call: PendingCall | None = None
        self.grain = 1
        self._is_direct = True
        self.is_paused = False
        self.unread_bytes = 0
        # How it ended while no call was open, where nobody has been told so.
        self._undelivered: Arrival[K, Any] | None = None
        # What has come where no call is open here, and what says that there is room for more.
        self._raw: list[bytes] = []
        self._room: asyncio.Event | None = None
        # What makes the next attempt.
        self._work: Work | None = None
        self._error: BaseException | None = None
        self._waiting: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "over" if self.is_over else "paused" if self.is_paused else "open"
        return f"<RelayedStream {self._invocation.endpoint} {self.id} [{state}]>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def pause(self) -> None:
        """Let the items from the present delivery on not count as consumed, until `resume`.

        The far side stops when it has used up its credit; what it has sent by then is delivered.
        """
        self.is_paused = True

    def resume(self) -> None:
        """Let the items that were delivered count as consumed."""
        self.is_paused = False
        self.delivered()

    def cancel(self, error: BaseException | None = None) -> None:
        """Leave the stream: the far side stops, and nothing more is delivered.

        Args:
            error: what `ended` raises, in place of `Cancelled`.
        """
        if self.is_over:
            return
        self._finish(error or Cancelled("the relay left the stream", request_id=self.id))
        if self._work is not None:
            self._work.cancel()
        self._invocation.abandon(error if isinstance(error, DynbusError) else None)

    async def ended(self) -> None:
        """Wait until the stream has ended and all of it was delivered.

        Raises:
            DynbusError: how it ended otherwise.
            BaseException: what `deliver` raised.
        """
        while not self.is_over:
            if self._waiting is None:
                self._waiting = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._waiting)
        if self._error is not None:
            raise self._error

    # Called by the relay -----------------------------------------------------------------

    async def begin(self) -> None:
        """Send the request."""
        try:
            call = await self._invocation.open()
        except BaseException as error:
            self._finish(error)
            raise
        if call is not None:
            self._listen(call)
        elif not self.is_over and not self._read_on():
            closed = Cancelled("the runtime is closed", request_id=self.id)
            self._finish(closed)
            raise closed

    def collect(self) -> Arrival[K, Any] | None:
        """The items that have arrived since the last time, and the end; None for nothing."""
        call = self._call
        if call is None:
            return self._take_uncalled()
        items: Sequence[Any] = ()
        reader = call.reader
        raw = reader.ready
        if raw:
            reader.ready = []
            if not self._is_direct:
                try:
                    raw = self._invocation.arrived(raw)
                except ResumeMismatch as mismatch:
                    self._finish(mismatch)
                    return Arrival(self, (), True, mismatch)
        if raw:
            try:
                if len(raw) == 1:
                    self.unread_bytes += len(raw[0])
                    items = [self._decode(raw[0])]
                else:
                    self.unread_bytes += sum(map(len, raw))
                    items = self._decode_many(raw)
            except Exception:  # noqa: BLE001 - found again item by item
                items, failure = decode_to_misfit(self._invocation, self._decode_many, raw)
                if failure is not None:
                    self.cancel(failure)
                    return Arrival(self, items, True, failure)
        error = call.error
        if error is None and reader.terminal is None:
            return _arrival((self, items, False, None)) if items else None
        if error is not None and self._invocation.may_follow and self._read_on(error):
            self._call = None
            # The next writer has credit of its own.
            self.unread_bytes = 0
            return _arrival((self, items, False, None)) if items else None
        error = self._invocation.finish(error)
        self._finish(error)
        return Arrival(self, items, True, error)

    def _take_uncalled(self) -> Arrival[K, Any] | None:
        """The arrival where no call is open here, with the reason why none will be."""
        raw, end = self._raw, self._undelivered
        self._raw, self._undelivered = [], None
        if self.is_over:
            return None
        items: Sequence[Any] = ()
        if raw:
            self.unread_bytes += sum(map(len, raw))
            items, failure = decode_to_misfit(self._invocation, self._decode_many, raw)
            if failure is not None:
                self.cancel(failure)
                return Arrival(self, items, True, failure)
        if end is not None:
            self._finish(end.error)
            return end._replace(items=items)
        return Arrival(self, items, False, None) if items else None

    def lose(self, error: BaseException) -> None:
        """Note that what was collected was not delivered, and that nothing else will be."""
        if not self.is_over:
            self.cancel(error)
        elif self._error is None:
            # It ended well with what was lost: its reader has not been told so yet.
            self._error = error

    def delivered(self) -> None:
        """Count what was collected as consumed, unless the stream is paused."""
        if self.is_paused:
            return
        if self._room is not None:
            self._room.set()
        if self.unread_bytes:
            if self._call is not None:
                self._call.consumed(self.unread_bytes)
            self.unread_bytes = 0

    # Internals -----------------------------------------------------------------------------

    def _listen(self, call: PendingCall) -> None:
        if self.is_over:
            return
        self._call = call
        # Credit is granted for half of a window; what was read is told in no smaller pieces.
        self.grain = max(1, call.reader.window // 8)
        self._is_direct = self._invocation.is_direct
        call.gathering, call.member = self._gathering, self

    def _read_on(self, error: DynbusError | None = None) -> bool:
        """Make the call once more, or read what comes in its place, beside all else; False where
        no work is begun any longer.

        Args:
            error: how the last attempt ended, where another follows.
        """
        try:
            self._work = self._invocation.side.bus.background.start(
                self._reading_on, error, name=f"another attempt at stream {self.id}"
            )
        except (RuntimeError, Unavailable):
            return False
        return True

    async def _reading_on(self, error: DynbusError | None) -> None:
        end: DynbusError | None = None
        try:
            if error is not None:
                call = await self._invocation.open_again(error)
                if call is not None:
                    self._listen(call)
                    return
            await self._read_parts()
        except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001 - it ends the stream
            end = ending_of(raised, self.id)
        self._undelivered = Arrival(self, (), True, end)
        self._gathering.add(self)

    async def _read_parts(self) -> None:
        """Read what goes on in the call's place, to its end."""
        # Each piece is told that was delivered.
        self.grain = 0
        while self._invocation.is_open and (raw := await self._invocation.items()):
            self._raw, self._room = raw, asyncio.Event()
            self._gathering.add(self)
            await self._room.wait()
        self._room = None

    def _finish(self, error: BaseException | None) -> None:
        self.is_over = True
        self._error = error
        if self._call is not None:
            # What reads it holds it: only a collection would find what holds each other.
            self._call.gathering = self._call.member = None
            self._call = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        self._over(self)
