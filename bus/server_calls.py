"""One call as the serving side sees it: framed for dynbus clients, plain for all others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from . import headers
from .clock import monotonic
from .errors import STATUS_CODES, DynbusError
from .liveness import PeerLiveness
from .streams import StreamWriter
from .wire import Frame, Heartbeat

if TYPE_CHECKING:
    from .context import Context
    from .server import InstanceServer, ServedEndpoint
    from .telemetry import CallObservation


class ServerCall:
    """A call that waits or runs at an instance.

    The subclass says how results leave. After `end` or `fail` nothing more does.
    """

    __slots__ = (
        "__weakref__",
        "blocked_since",
        "context",
        "ended",
        "error",
        "last_progress",
        "observation",
        "request",
        "served",
        "server",
        "started_at",
        "task",
        "timers",
        "waiter",
    )

    def __init__(self, server: InstanceServer, served: ServedEndpoint, context: Context) -> None:
        self.server = server
        self.served = served
        self.context = context
        self.request: Any = None
        self.task: asyncio.Task[None] | None = None
        self.timers: list[asyncio.TimerHandle] = []
        self.waiter: asyncio.Future[None] | None = None
        self.ended = False
        self.error: DynbusError | None = None
        self.started_at = self.last_progress = monotonic()
        self.blocked_since: float | None = None
        self.observation: CallObservation | None = None

    @property
    def blocked(self) -> bool:
        """Whether the reader must grant credit before the next item."""
        return False

    @property
    def reader(self) -> str:
        """Who reads the results, for logs."""
        raise NotImplementedError

    def push(self, item: bytes) -> None:
        """Send one item of a stream."""
        raise NotImplementedError

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

    def label(self, error: DynbusError) -> None:
        """Complete an error with where and in which request it arose."""
        if not error.hop:
            error.hop = self.served.address.hop(self.server.instance_id)
        if not error.request_id:
            error.request_id = self.context.id


class FramedCall(ServerCall):
    """A call of a dynbus client."""

    __slots__ = ("dirty", "finished_at", "peer", "writer")

    def __init__(
        self,
        server: InstanceServer,
        served: ServedEndpoint,
        context: Context,
        peer: ClientPeer,
        writer: StreamWriter,
    ) -> None:
        super().__init__(server, served, context)
        self.peer = peer
        self.writer = writer
        self.dirty = False
        self.finished_at = 0.0

    @property
    def blocked(self) -> bool:
        return self.writer.blocked

    @property
    def reader(self) -> str:
        return self.peer.base

    def push(self, item: bytes) -> None:
        self.writer.push(item)
        self.touch()

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
        if not self.dirty:
            self.dirty = True
            self.peer.dirty.append(self)
            self.server.schedule_flush(self.peer)

    def _finish(self) -> None:
        self.ended = True
        self.finished_at = monotonic()
        self.touch()
        self.wake()


class PlainCall(ServerCall):
    """A call of a plain NATS client: JSON on its reply subject, a message per item."""

    __slots__ = ("_bounce", "reply")

    def __init__(
        self, server: InstanceServer, served: ServedEndpoint, context: Context, reply: str
    ) -> None:
        super().__init__(server, served, context)
        self.reply = reply
        bus = server.bus
        token = f"p{next(bus.bounce_tokens)}"
        self._bounce = bus.replies.bounce(token)
        bus.bounce_handlers[token] = self._gone

    @property
    def reader(self) -> str:
        return self.reply

    def push(self, item: bytes) -> None:
        self.server.bus.data.publish(self.reply, item, reply=self._bounce)

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


def error_block(error: DynbusError) -> bytes:
    """An error as the headers of the NATS services protocol."""
    text = f"{error.code}: {error}".encode("ascii", "replace").decode()
    return headers.encode(
        {
            headers.SERVICE_ERROR: "".join(c if c.isprintable() else " " for c in text)[:1024],
            headers.SERVICE_ERROR_CODE: str(STATUS_CODES.get(error.code, 500)),
            "Dynbus-Error": error.code,
        }
    )


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
        self.dirty: list[FramedCall] = []
        self.parts: dict[int, list[bytes | None]] = {}
        self.refused: dict[int, int] = {}
        self.missing: dict[int, int] = {}

    @property
    def control_subject(self) -> str:
        return self._control_subject

    def has_work(self) -> bool:
        return bool(self.calls)

    def beat(self) -> list[Frame]:
        server = self._server
        recent = monotonic() - 0.2
        calls = [
            (number, call.writer.next_sequence)
            for number, call in list(self.calls.items())
            if not call.ended or call.finished_at < recent
        ]
        return [Heartbeat(server.bus.heartbeats.blocked, server.draining, calls)]

    def gone(self) -> None:
        self._server.client_gone(self)
