"""One call as the serving side sees it: framed for dynbus clients, plain for all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import STATUS_CODES, DynbusError, safe_text
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import turn_taker
from dynbus.bus.protocol.tokens import random_id

if TYPE_CHECKING:
    from dynbus.bus.context import Context
    from dynbus.bus.protocol.stream_writer import StreamWriter
    from dynbus.bus.protocol.unread_bytes import ClientUnreadBytes
    from dynbus.bus.telemetry.telemetry import CallObservation

    from .execution import Execution
    from .remote_client import RemoteClient
    from .served_endpoint import ServedEndpoint

PLAIN_WINDOW: Final = 128 * 1024
"""Bytes of a plain call's items that may be on their way to the server."""


def _refuse(item: bytes) -> bool:
    raise NotImplementedError


class ServerCall:
    """A call that waits or runs at an instance.

    The subclass says how results leave. After `end` or `fail` nothing more does.

    Attributes:
        push: sends one item of a stream; False when none may follow at once: `writable` must be
            awaited first, or the call has ended.
        started_at: when the request arrived, on the monotonic clock.
        began_at: when its handler was started; None while it waits.
    """

    __slots__ = (
        "__weakref__",
        "began_at",
        "blocked_since",
        "context",
        "deadline_number",
        "ended",
        "entered",
        "error",
        "execution",
        "kill_timer",
        "last_progress",
        "observation",
        "push",
        "request",
        "seen_items",
        "served",
        "started_at",
        "task",
        "waiter",
        "waiting_bytes",
    )

    def __init__(
        self, execution: Execution, served: ServedEndpoint, context: Context, now: float
    ) -> None:
        self.execution = execution
        self.served = served
        self.context = context
        self.request: Any = None
        self.push: Callable[[bytes], bool] = _refuse
        self.task: asyncio.Task[None] | None = None
        self.entered = False
        self.deadline_number: int | None = None
        self.kill_timer: asyncio.TimerHandle | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.ended = False
        self.seen_items = 0
        self.waiting_bytes = 0
        self.error: DynbusError | None = None
        self.started_at = self.last_progress = now
        self.began_at: float | None = None
        self.blocked_since: float | None = None
        self.observation: CallObservation | None = None

    @property
    def blocked(self) -> bool:
        """Whether the reader must grant credit before the next item."""
        return False

    @property
    def sent_items(self) -> int:
        """How many items were sent, or a number that grows as they are."""
        raise NotImplementedError

    @property
    def reader(self) -> str:
        """Who reads the results, for logs."""
        raise NotImplementedError

    @property
    def turn_taker(self) -> str:
        """Whose turn the call takes where calls wait."""
        raise NotImplementedError

    def has_progressed(self) -> bool:
        """Whether items were sent since the last time this was asked."""
        progressed = self.sent_items != self.seen_items
        self.seen_items = self.sent_items
        return progressed

    def end(self, result: bytes | None = None) -> None:
        """End the call well, for a unary call with its result."""
        raise NotImplementedError

    def fail(self, error: DynbusError) -> None:
        """End the call with an error."""
        raise NotImplementedError

    def retire(self) -> None:
        """Forget the call; only what its reader has not acknowledged is kept."""
        raise NotImplementedError

    async def writable(self) -> None:
        """Wait until the reader has granted credit, or the call has ended."""
        if not self.blocked or self.ended:
            return
        self.blocked_since = monotonic()
        waiter = self.waiter = self.execution.bus.loop.create_future()
        try:
            await waiter
        finally:
            self.waiter = None
            self.last_progress = monotonic()
            telemetry = self.execution.bus.telemetry
            if telemetry is not None:
                stalled = self.last_progress - self.blocked_since
                telemetry.credit_stall(self.served.address, stalled)
            self.blocked_since = None

    @property
    def account(self) -> ClientUnreadBytes:
        """What the instance keeps for the call's client."""
        raise NotImplementedError

    def hold_request(self, size: int) -> None:
        """Count the request of a call that waits with what is kept for its client."""
        self.waiting_bytes = size
        self.account.add(size)

    def let_request_go(self) -> None:
        """The call waits no longer."""
        if self.waiting_bytes:
            self.account.add(-self.waiting_bytes)
            self.waiting_bytes = 0

    def wake(self) -> None:
        """Let `writable` look again."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def expire(self) -> None:
        """The deadline passed."""
        self.execution.expire(self)

    def label(self, error: DynbusError) -> None:
        """Complete an error with where and in which request it arose."""
        if not error.hop:
            error.hop = self.served.hop
        if not error.request_id:
            error.request_id = self.context.id


class FramedCall(ServerCall):
    """A call of a dynbus client.

    Attributes:
        released: whether the client has all that it wants of it.
    """

    __slots__ = ("client", "released", "writer")

    def __init__(
        self,
        execution: Execution,
        served: ServedEndpoint,
        context: Context,
        now: float,
        client: RemoteClient,
        writer: StreamWriter,
    ) -> None:
        super().__init__(execution, served, context, now)
        self.client = client
        self.released = False
        self.writer = writer
        # The hot path of every stream: a call less per item.
        self.push = writer.push

    @property
    def blocked(self) -> bool:
        return self.writer.blocked

    @property
    def reader(self) -> str:
        return self.client.base

    @property
    def turn_taker(self) -> str:
        return self.client.turn_taker

    @property
    def account(self) -> ClientUnreadBytes:
        return self.client.unread

    @property
    def sent_items(self) -> int:
        return self.writer.next_sequence

    async def writable(self) -> None:
        """Wait until the reader has granted credit and has taken enough, or the call has ended."""
        if self.writer.is_short_of_room:
            self.client.short_of_room.add(self)
        try:
            await super().writable()
        finally:
            self.client.short_of_room.discard(self)

    def end(self, result: bytes | None = None) -> None:
        if not self.ended:
            self.writer.end(result)
            self._finish()

    def fail(self, error: DynbusError) -> None:
        if not self.ended:
            self.label(error)
            self.error = error
            self.writer.fail(error)
            self._finish()

    def retire(self) -> None:
        number = self.writer.number
        client = self.client
        client.forget_parts(number)
        if client.calls.pop(number, None) is not None and not self.released:
            client.keep(self.writer)
        else:
            self.writer.forget()

    def _finish(self) -> None:
        self.ended = True
        self.client.touch_ended(self.writer)
        if self.waiter is not None:
            self.wake()


class PlainCall(ServerCall):
    """A call of a plain NATS client: JSON on its reply subject, a message per item.

    Args:
        calls: the plain calls of the instance, of which it is one until it is retired.
        account: what is kept for all plain clients.
    """

    __slots__ = ("_account", "_bounce", "_calls", "_sent", "_untaken", "reply")

    def __init__(
        self,
        execution: Execution,
        served: ServedEndpoint,
        context: Context,
        now: float,
        reply: str,
        calls: set[ServerCall],
        account: ClientUnreadBytes,
    ) -> None:
        super().__init__(execution, served, context, now)
        self.reply = reply
        self._sent = 0
        self._untaken = 0
        self.push = self._push
        bus = execution.bus
        # Readers see the bounce subject; none must be able to guess those of others.
        token = f"p{random_id()}"
        self._bounce = bus.replies.bounce(token)
        bus.bounce_handlers[token] = self._gone
        self._account = account
        self._calls = calls
        calls.add(self)

    @property
    def reader(self) -> str:
        return self.reply

    @property
    def turn_taker(self) -> str:
        # Anybody may ask to be answered at anybody's inbox; a call of a dynbus client shares no
        # turns with such requests.
        return f"plain {turn_taker(self.reply)}"

    @property
    def account(self) -> ClientUnreadBytes:
        return self._account

    @property
    def sent_items(self) -> int:
        return self._sent

    def _push(self, item: bytes) -> bool:
        self.execution.bus.data.publish(self.reply, item, reply=self._bounce)
        self._sent += 1
        self._untaken += len(item)
        return not self.ended and self._untaken < PLAIN_WINDOW

    async def writable(self) -> None:
        """Wait until the server has taken what was sent.

        Raises:
            Unavailable: it did not within the time that a reader may stall.
        """
        # A plain client grants no credit. nats-server slows down whoever sends to a client that
        # does not read, and with it all that leaves over the same connection.
        self._untaken = 0
        if not self.ended:
            bus = self.execution.bus
            await bus.data.barrier(timeout=bus.config.reader_stall_timeout)

    def end(self, result: bytes | None = None) -> None:
        if not self.ended:
            self.execution.bus.data.publish(self.reply, result or b"")
            self._finish()

    def fail(self, error: DynbusError) -> None:
        if self.ended:
            return
        self.label(error)
        self.error = error
        self._finish()
        self.execution.bus.data.publish(self.reply, b"", headers=error_block(error))

    def retire(self) -> None:
        self._calls.discard(self)

    def _finish(self) -> None:
        self.ended = True
        self.execution.bus.bounce_handlers.pop(self._bounce.rpartition(".")[2], None)

    def _gone(self) -> None:
        self.execution.reader_gone(self)


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
