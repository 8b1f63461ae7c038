"""The sink of one call's results: frames for dynbus clients, JSON messages for all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import STATUS_CODES, DynbusError, safe_text
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.protocol.stream_writer import StreamWriter

if TYPE_CHECKING:
    from dynbus.bus.background import Work
    from dynbus.bus.bus import Bus

    from .outbox import ClientOutbox

PLAIN_WINDOW: Final = 128 * 1024
"""Bytes of a plain call's items that may be on their way to the server."""


def _refuse(item: bytes) -> bool:
    raise NotImplementedError


class CallReply:
    """The results of one call: a `ReplyPort`; the subclass says how they leave.

    Args:
        address: the endpoint that was called.
        hop: where errors say that they arose.

    Attributes:
        push: sends one item of a stream; False when none may follow at once.
        paused: whether none may follow until the reader has taken more.
        paused_since: since when, on the monotonic clock.
        progressed_at: when it last was seen to go on.
        error: with what the call ended, if it did not end well.
    """

    __slots__ = (
        "_address",
        "_bus",
        "_closing",
        "_hop",
        "_request_id",
        "_resuming",
        "_seen_items",
        "_waiting",
        "ended",
        "error",
        "paused",
        "paused_since",
        "progressed_at",
        "push",
    )

    def __init__(
        self, bus: Bus, address: EndpointName, hop: str, request_id: str, now: float
    ) -> None:
        self.push: Callable[[bytes], bool] = _refuse
        self.paused = False
        self.paused_since = self.progressed_at = now
        self.ended = False
        self.error: DynbusError | None = None
        self._bus = bus
        self._address = address
        self._hop = hop
        self._request_id = request_id
        self._seen_items = 0
        self._waiting: list[asyncio.Future[None]] | None = None
        self._closing: list[asyncio.Future[None]] | None = None
        self._resuming: list[Callable[[], object]] | None = None

    @property
    def sent_items(self) -> int:
        """The number of items that were sent, or one that grows as they are."""
        raise NotImplementedError

    def end(self, result: bytes | None = None) -> None:
        raise NotImplementedError

    def fail(self, error: DynbusError) -> None:
        raise NotImplementedError

    async def writable(self) -> None:
        while self.paused:
            if self._waiting is None:
                self._waiting = []
            await _turn(self._bus, self._waiting)

    def when_writable(self, then: Callable[[], object]) -> None:
        if not self.paused:
            self._bus.loop.call_soon(then)
        elif self._resuming is None:
            self._resuming = [then]
        else:
            self._resuming.append(then)

    async def closed(self) -> None:
        while not self.ended:
            if self._closing is None:
                self._closing = []
            await _turn(self._bus, self._closing)

    def has_progressed(self, now: float) -> bool:
        """True if items were sent since the last time this was asked."""
        sent = self.sent_items
        if sent == self._seen_items:
            return False
        self._seen_items = sent
        self.progressed_at = now
        return True

    def pause(self) -> None:
        """No item may follow until `go_on`."""
        if not self.paused:
            self.paused = True
            self.paused_since = monotonic()

    def go_on(self) -> None:
        """Items may follow again, or none ever will."""
        if not self.paused:
            return
        self.paused = False
        self.progressed_at = monotonic()
        if self._bus.telemetry is not None:
            self._bus.telemetry.credit_stall(self._address, self.progressed_at - self.paused_since)
        if self._waiting is not None:
            _wake(self._waiting)
        if self._resuming is not None:
            resuming, self._resuming = self._resuming, None
            for then in resuming:
                self._bus.loop.call_soon(then)

    def observe(self, sent: Callable[[int], object]) -> None:
        """Have `sent` called with the number of items as they are pushed."""
        push = self.push

        def observed(item: bytes) -> bool:
            sent(1)
            return push(item)

        self.push = observed

    def label(self, error: DynbusError) -> None:
        """Complete an error with where and in which request it arose."""
        if not error.hop:
            error.hop = self._hop
        if not error.request_id:
            error.request_id = self._request_id

    def _finish(self) -> None:
        self.ended = True
        if self.paused:
            self.go_on()
        if self._closing is not None:
            _wake(self._closing)


class FramedReply(CallReply):
    """The results of a call of a dynbus client, as frames."""

    __slots__ = ("_outbox", "writer")

    def __init__(
        self,
        bus: Bus,
        address: EndpointName,
        hop: str,
        request_id: str,
        now: float,
        writer: StreamWriter,
        outbox: ClientOutbox,
    ) -> None:
        super().__init__(bus, address, hop, request_id, now)
        self.writer = writer
        self._outbox = outbox
        # The hot path of every stream: a call less per item.
        self.push = writer.push

    @property
    def sent_items(self) -> int:
        return self.writer.next_sequence - self.writer.ended  # the end is a unit too

    def end(self, result: bytes | None = None) -> None:
        if not self.ended:
            self.writer.end(result)
            self._finish()
            self._outbox.touch_ended(self.writer)

    def fail(self, error: DynbusError) -> None:
        if not self.ended:
            self.label(error)
            self.error = error
            self.writer.fail(error)
            self._finish()
            self._outbox.touch_ended(self.writer)


class PlainReply(CallReply):
    """The results of a call of a plain NATS client: JSON on its reply subject, a message per item.

    A plain client grants no credit. nats-server slows down the sender to a client that does
    not read, and with it all that leaves over the same connection.

    Args:
        subject: where the client listens.
    """

    __slots__ = ("_barrier", "_bounce", "_broken", "_sent", "_subject", "_untaken")

    def __init__(
        self,
        bus: Bus,
        address: EndpointName,
        hop: str,
        request_id: str,
        now: float,
        subject: str,
    ) -> None:
        super().__init__(bus, address, hop, request_id, now)
        self.push = self._push
        self._subject = subject
        self._sent = 0
        self._untaken = 0
        self._barrier: Work | None = None
        self._broken: DynbusError | None = None
        # Readers see the bounce subject; none must be able to guess those of others.
        self._bounce = bus.replies.bounce(f"p{random_id()}")

    @property
    def sent_items(self) -> int:
        return self._sent

    def when_gone(self, gone: Callable[[], None]) -> None:
        """Have `gone` called when the server says that nobody reads the results."""
        self._bus.bounce_handlers[self._bounce.rpartition(".")[2]] = gone

    async def writable(self) -> None:
        await super().writable()
        if self._broken is not None and not self.ended:
            raise self._broken

    def end(self, result: bytes | None = None) -> None:
        if not self.ended:
            self._bus.data.publish(self._subject, result or b"")
            self._finish()

    def fail(self, error: DynbusError) -> None:
        if self.ended:
            return
        self.label(error)
        self.error = error
        self._finish()
        self._bus.data.publish(self._subject, b"", headers=error_block(error))

    def _push(self, item: bytes) -> bool:
        if self.ended:
            return False
        self._bus.data.publish(self._subject, item, reply=self._bounce)
        self._sent += 1
        self._untaken += len(item)
        if self._untaken >= PLAIN_WINDOW and not self.paused:
            self.pause()
            self._barrier = self._bus.background.start(
                self._wait_until_taken, name=f"results for {self._subject}"
            )
        return not self.paused

    async def _wait_until_taken(self) -> None:
        """Go on when the server has taken what was sent, or raise in `writable` that it did not."""
        try:
            await self._bus.data.barrier(timeout=self._bus.config.reader_stall_timeout)
        except DynbusError as error:
            self._broken = error
        self._untaken = 0
        self._barrier = None
        self.go_on()

    def _finish(self) -> None:
        super()._finish()
        if self._barrier is not None:
            self._barrier.cancel()
        self._bus.bounce_handlers.pop(self._bounce.rpartition(".")[2], None)


async def _turn(bus: Bus, waiting: list[asyncio.Future[None]]) -> None:
    waiter = bus.loop.create_future()
    waiting.append(waiter)
    try:
        await waiter
    finally:
        if waiter in waiting:
            waiting.remove(waiter)


def _wake(waiting: list[asyncio.Future[None]]) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)


def _header_text(value: object, most: int) -> str:
    """At most `most` characters that a header can carry."""
    text = safe_text(value).encode("ascii", "replace").decode()
    return "".join(c if c.isprintable() else " " for c in text)[:most]


def error_block(error: DynbusError, framing: str | None = None) -> bytes:
    """An error as the headers of the NATS services protocol.

    Args:
        framing: what a framed request said; repeated so that its sender believes the answer.
    """
    # Handlers raise what they like, also with a code that no header can carry.
    code = _header_text(error.code, 128)
    fields = {
        headers.SERVICE_ERROR: _header_text(f"{code}: {safe_text(error)}", 1024),
        headers.SERVICE_ERROR_CODE: str(STATUS_CODES.get(code, 500)),
        headers.ERROR: code,
    }
    if framing and framing.isascii() and framing.isprintable() and len(framing) < 256:
        fields[headers.FRAMES] = framing
    return headers.encode(fields)
