"""A client as the serving side sees it: its calls, and what is still to be sent to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dynbus.bus.clock import monotonic
from dynbus.bus.protocol.names import ANONYMOUS, turn_taker
from dynbus.bus.protocol.unread_bytes import ClientUnreadBytes, UnreadBytes

from .calls import Call, ServedEndpoint
from .reply import Reply

if TYPE_CHECKING:
    from dynbus.bus.context import Context
    from dynbus.bus.protocol.liveness import RemoteLiveness
    from dynbus.bus.protocol.stream_writer import StreamWriter
    from dynbus.bus.protocol.wire import Frame

    from .control import ServerControl
    from .outbox import Outbox

EARLY_ENDS: Final = 16
KEPT: Final = 32768
"""Ended calls that a client may leave unacknowledged."""
KEPT_SECONDS: Final = 15.0
"""How long one is kept at least, and twice as long at most: heartbeats acknowledge in one."""


def client_key(base: str, incarnation: str) -> str:
    """What a client is known by at an instance.

    Both know the incarnation, and nobody else does: whoever borrows the base of a client is
    another one.
    """
    return f"{base.rpartition('.')[2]}-{incarnation}"


class FramedCall(Call):
    """A call of a dynbus client.

    Attributes:
        released: whether the client has all that it wants of it.
    """

    __slots__ = ("client", "released", "writer")

    def __init__(
        self,
        served: ServedEndpoint,
        context: Context,
        reply: Reply,
        now: float,
        client: RemoteClient,
        writer: StreamWriter,
    ) -> None:
        super().__init__(
            served, context, reply, now, turn_taker=client.turn_taker, account=client.unread
        )
        self.client = client
        self.writer = writer
        self.released = False


class RemoteClient:
    """A dynbus client with calls at this instance.

    Attributes:
        base: its reply base; results go to one subject under it, control frames to another.
        incarnation: what its requests told, and control batches carry, both ways.
        key: what it is known by here.
        heard_at: when a request of it last arrived.
        turn_taker: whose turns its calls take, its own or its principal's.
        bounce: where the server says that nobody reads them.
        calls: calls that wait or run, by request number.
        kept: writers of ended calls that are not acknowledged yet.
        dirty: writers with something to send.
        ended: how many of those have ended.
        unread: what is kept for it.
        short_of_room: its calls that wait until it has taken more of that.
        missing: heartbeats in a row that did not list a call, by request number.
        busy_at: when it last had calls here, on the monotonic clock.
    """

    def __init__(
        self,
        control: ServerControl,
        outbox: Outbox,
        base: str,
        incarnation: str,
        bounce: str,
        unread: UnreadBytes,
    ) -> None:
        self._control = control
        self._outbox = outbox
        self.base = base
        self.incarnation = incarnation
        self.key = client_key(base, incarnation)
        self.heard_at = 0.0
        self.turn_taker = turn_taker(f"{base}.f")
        self.frames_subject = f"{base}.f"
        self._control_subject = f"{base}.ctl.f"
        self.bounce = bounce
        self.liveness: RemoteLiveness | None = None
        self.calls: dict[int, FramedCall] = {}
        self.kept: dict[int, StreamWriter] = {}
        self.kept_mark = 0
        self.unread = ClientUnreadBytes(unread)
        self.short_of_room: set[FramedCall] = set()
        self._old_kept: frozenset[int] = frozenset()
        self._looked_at = monotonic()
        self.dirty: list[StreamWriter] = []
        self.ended = 0
        self.busy_at = monotonic()
        self.missing: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<RemoteClient {self.base} [{len(self.calls)} calls, {len(self.kept)} kept]>"

    @property
    def control_subject(self) -> str:
        return self._control_subject

    @property
    def due_since(self) -> float | None:
        for call in list(self.calls.values()):
            # Of what has ended here or was left there the client need not know any longer.
            if not call.ended and not call.released and call.kill_timer is None:
                return call.started_at
        return None

    @property
    def label(self) -> str:
        """What messages call it: its id, as in the log of its process, and its principal."""
        _, principal, client_id = self.base.split(".")
        of = "" if principal == ANONYMOUS else f" of {principal}"
        return f"client {client_id[:8]}{of}"

    def has_work(self) -> bool:
        return bool(self.calls or self.kept)

    def beat(self) -> list[Frame]:
        calls = {number: call.writer.next_sequence for number, call in list(self.calls.items())}
        # What ended since the last beat is most likely acknowledged before the next.
        kept = list(self.kept.items())
        for number, writer in kept:
            if number <= self.kept_mark:
                calls[number] = writer.next_sequence
        self.kept_mark = kept[-1][0] if kept else 0
        return self._control.heartbeats(calls)

    def touch(self, writer: StreamWriter) -> None:
        """Have a writer's fresh units sent at the end of this turn of the loop."""
        if not writer.dirty:
            writer.dirty = True
            self.note_dirty(writer)

    def note_dirty(self, writer: StreamWriter) -> None:
        """A writer has something to send."""
        if not self.dirty:
            self._outbox.schedule(self)
        self.dirty.append(writer)

    def note_paused(self, writer: StreamWriter) -> None:
        """A writer may send nothing more for now."""
        call = self.calls.get(writer.number)
        if call is not None:
            call.reply.pause()
            if writer.is_short_of_room:
                self.short_of_room.add(call)

    def go_on(self, call: FramedCall) -> None:
        """A call may send more."""
        self.short_of_room.discard(call)
        call.reply.go_on()

    def touch_ended(self, writer: StreamWriter) -> None:
        """Have the units of a writer that has ended sent at the end of this turn, or sooner.

        Its caller has nothing to do until it hears so: a busy turn of the loop does not make
        many of them wait for the last.
        """
        self.touch(writer)
        self.ended += 1
        if self.ended >= EARLY_ENDS:
            self._outbox.flush_client(self)

    def touch_all(self) -> None:
        """Have everything sent that was not, and show the reader what was lost on its way."""
        for writer in (*(call.writer for call in self.calls.values()), *self.kept.values()):
            writer.repeat_last()
            if writer.has_fresh:
                self.touch(writer)

    def writer(self, number: int) -> StreamWriter | None:
        """The writer of a call that runs, or has ended and is not acknowledged yet."""
        call = self.calls.get(number)
        return call.writer if call is not None else self.kept.get(number)

    def returned(self) -> None:
        """It asks for what it misses."""

    def wake_for_room(self) -> None:
        """Let those of its calls go on for which there is room again."""
        for call in list(self.short_of_room):
            if not call.writer.blocked:
                self.go_on(call)

    def keep(self, writer: StreamWriter) -> None:
        """Keep the writer of a call that has ended until its results are acknowledged."""
        if len(self.kept) >= KEPT:
            self._control.give_up_kept(self, next(iter(self.kept)))
        self.kept[writer.number] = writer

    def sweep(self, now: float, *, cut_off: bool) -> None:
        """Keep nothing for ever that its reader does not acknowledge.

        Args:
            cut_off: whether it cannot, because we are not connected.
        """
        if cut_off:
            self._looked_at = now
            self._old_kept = frozenset()
            return
        if now - self._looked_at < KEPT_SECONDS:
            return
        self._looked_at = now
        for number in self._old_kept & self.kept.keys():
            self._control.give_up_kept(self, number)
        self._old_kept = frozenset(self.kept)

    def retire(self, call: FramedCall) -> None:
        """Forget a call; only what its reader has not acknowledged is kept."""
        number = call.writer.number
        self.forget_parts(number)
        self.short_of_room.discard(call)
        if self.calls.pop(number, None) is not None and not call.released:
            self.keep(call.writer)
        else:
            call.writer.forget()

    def is_partial(self, number: int) -> bool:
        """Whether parts of a request are still to come."""
        return (self.key, number) in self._control.partial

    def forget_parts(self, number: int) -> None:
        """No part of a request is to be kept any longer."""
        self._control.partial.remove((self.key, number))

    def gone(self) -> None:
        self._control.client_gone(self)
