"""One call as the serving side sees it: framed for dynbus clients, plain for all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from . import headers
from .clock import monotonic
from .errors import STATUS_CODES, DynbusError
from .liveness import PeerLiveness
from .streams import StreamWriter
from .tokens import random_id
from .wire import Frame, Heartbeat

if TYPE_CHECKING:
    from .context import Context
    from .server import InstanceServer, ServedEndpoint
    from .telemetry import CallObservation


EARLY_ENDS: Final = 16


def _refuse(item: bytes) -> bool:
    raise NotImplementedError


class ServerCall:
    """A call that waits or runs at an instance.

    The subclass says how results leave. After `end` or `fail` nothing more does.

    Attributes:
        push: sends one item of a stream; False when `writable` must be awaited before the next.
    """

    __slots__ = (
        "__weakref__",
        "blocked_since",
        "context",
        "deadline_number",
        "ended",
        "entered",
        "error",
        "kill_timer",
        "last_progress",
        "observation",
        "push",
        "request",
        "seen_items",
        "served",
        "server",
        "started_at",
        "task",
        "waiter",
    )

    def __init__(
        self, server: InstanceServer, served: ServedEndpoint, context: Context, now: float
    ) -> None:
        self.server = server
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
        self.error: DynbusError | None = None
        self.started_at = self.last_progress = now
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

    async def writable(self) -> None:
        """Wait until the reader has granted credit, or the call has ended."""
        if not self.blocked or self.ended:
            return
        self.blocked_since = monotonic()
        waiter = self.waiter = self.server.bus.loop.create_future()
        try:
            await waiter
        finally:
            self.waiter = None
            self.last_progress = monotonic()
            telemetry = self.server.bus.telemetry
            if telemetry is not None:
                stalled = self.last_progress - self.blocked_since
                telemetry.credit_stall(self.served.address, stalled)
            self.blocked_since = None

    def wake(self) -> None:
        """Let `writable` look again."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def expire(self) -> None:
        """The deadline passed."""
        self.server.expire(self)

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

    __slots__ = ("peer", "released", "writer")

    def __init__(
        self,
        server: InstanceServer,
        served: ServedEndpoint,
        context: Context,
        now: float,
        peer: ClientPeer,
        writer: StreamWriter,
    ) -> None:
        super().__init__(server, served, context, now)
        self.peer = peer
        self.released = False
        self.writer = writer
        # The hot path of every stream: a call less per item.
        self.push = writer.push

    @property
    def blocked(self) -> bool:
        return self.writer.blocked

    @property
    def reader(self) -> str:
        return self.peer.base

    @property
    def sent_items(self) -> int:
        return self.writer.next_sequence

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

    def touch(self) -> None:
        """Have the fresh units sent at the end of this turn of the loop."""
        self.peer.touch(self.writer)

    def _finish(self) -> None:
        self.ended = True
        self.peer.touch_ended(self.writer)
        if self.waiter is not None:
            self.wake()


class PlainCall(ServerCall):
    """A call of a plain NATS client: JSON on its reply subject, a message per item."""

    __slots__ = ("_bounce", "_sent", "reply")

    def __init__(
        self,
        server: InstanceServer,
        served: ServedEndpoint,
        context: Context,
        now: float,
        reply: str,
    ) -> None:
        super().__init__(server, served, context, now)
        self.reply = reply
        self._sent = 0
        self.push = self._push
        bus = server.bus
        # Readers see the bounce subject; none must be able to guess those of others.
        token = f"p{random_id()}"
        self._bounce = bus.replies.bounce(token)
        bus.bounce_handlers[token] = self._gone

    @property
    def reader(self) -> str:
        return self.reply

    @property
    def sent_items(self) -> int:
        return self._sent

    def _push(self, item: bytes) -> bool:
        self.server.bus.data.publish(self.reply, item, reply=self._bounce)
        self._sent += 1
        return not self.ended

    def end(self, result: bytes | None = None) -> None:
        if not self.ended:
            self.server.bus.data.publish(self.reply, result or b"")
            self._finish()

    def fail(self, error: DynbusError) -> None:
        if self.ended:
            return
        self.label(error)
        self.error = error
        self._finish()
        self.server.bus.data.publish(self.reply, b"", headers=error_block(error))

    def _finish(self) -> None:
        self.ended = True
        self.server.bus.bounce_handlers.pop(self._bounce.rpartition(".")[2], None)

    def _gone(self) -> None:
        self.server.reader_gone(self)


def error_block(error: DynbusError, framing: str | None = None) -> bytes:
    """An error as the headers of the NATS services protocol.

    Args:
        framing: what a framed request said; repeated so that its sender believes the answer.
    """
    text = f"{error.code}: {error}".encode("ascii", "replace").decode()
    fields = {
        headers.SERVICE_ERROR: "".join(c if c.isprintable() else " " for c in text)[:1024],
        headers.SERVICE_ERROR_CODE: str(STATUS_CODES.get(error.code, 500)),
        headers.ERROR: error.code,
    }
    if framing and framing.isascii() and framing.isprintable() and len(framing) < 256:
        fields[headers.FRAMES] = framing
    return headers.encode(fields)


class ClientPeer:
    """A dynbus client with calls at this instance, and what is still to be sent to it."""

    def __init__(self, server: InstanceServer, base: str) -> None:
        self._server = server
        self.base = base
        self.client_id = base.rpartition(".")[2]
        self.frames_subject = f"{base}.f"
        self._control_subject = f"{base}.ctl.f"
        self.bounce = server.bus.replies.bounce(server.registry.bounce_token(self.client_id))
        self.liveness: PeerLiveness | None = None
        self.calls: dict[int, FramedCall] = {}
        self.kept: dict[int, StreamWriter] = {}
        self.kept_mark = 0
        self.dirty: list[StreamWriter] = []
        self.ended = 0
        self.parts: dict[int, list[bytes | None]] = {}
        self.incarnation = ""
        self.busy_at = monotonic()
        self.missing: dict[int, int] = {}

    @property
    def control_subject(self) -> str:
        return self._control_subject

    def has_work(self) -> bool:
        return bool(self.calls or self.kept)

    def beat(self) -> list[Frame]:
        server = self._server
        calls = [(number, call.writer.next_sequence) for number, call in list(self.calls.items())]
        # What ended since the last beat is most likely acknowledged before the next.
        kept = list(self.kept.items())
        calls += [
            (number, writer.next_sequence) for number, writer in kept if number <= self.kept_mark
        ]
        self.kept_mark = kept[-1][0] if kept else 0
        return [Heartbeat(server.bus.heartbeats.blocked, server.draining, calls)]

    def touch(self, writer: StreamWriter) -> None:
        """Have a writer's fresh units sent at the end of this turn of the loop."""
        if not writer.dirty:
            writer.dirty = True
            self.note_dirty(writer)

    def note_dirty(self, writer: StreamWriter) -> None:
        """A writer has something to send."""
        if not self.dirty:
            self._server.schedule_flush(self)
        self.dirty.append(writer)

    def touch_ended(self, writer: StreamWriter) -> None:
        """The same for a writer that has ended.

        Its caller has nothing to do until it hears so: a busy turn of the loop does not make
        many of them wait for the last.
        """
        self.touch(writer)
        self.ended += 1
        if self.ended >= EARLY_ENDS:
            self._server.flush_peer(self)

    def writer(self, number: int) -> StreamWriter | None:
        """The writer of a call that runs, or has ended and is not acknowledged yet."""
        call = self.calls.get(number)
        return call.writer if call is not None else self.kept.get(number)

    def gone(self) -> None:
        self._server.client_gone(self)
