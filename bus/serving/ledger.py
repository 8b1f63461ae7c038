"""The ledger of an instance: calls of its clients, results they have yet to acknowledge, and words
about requests that have not arrived.

The one owner of that knowledge, without I/O or clock. The reader of a message tells the ledger,
and carries out what it returns. A control frame may overtake the request that it speaks of, or
come when all of it is over: what was said is remembered for as long as that can matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from dynbus.bus.drops import DropReason
from dynbus.bus.errors import (
    Cancelled,
    DeadlineExceeded,
    DynbusError,
    Overloaded,
    PayloadTooLarge,
    StreamLost,
    Unavailable,
    UnknownOutcome,
)
from dynbus.bus.inbox import ENTRY_COST, FRAME_COST
from dynbus.bus.protocol.call_ranges import covers
from dynbus.bus.protocol.names import ANONYMOUS, is_safe_reply, principal_of, turn_taker
from dynbus.bus.protocol.unread_bytes import ClientUnreadBytes, UnreadBytes
from dynbus.bus.protocol.wire import (
    Cancel,
    Credit,
    Failed,
    Frame,
    Open,
    Resume,
    Unknown,
    failed_frame,
)

from .calls import Call, ServedEndpoint, no_room
from .partial_requests import PartialRequests
from .remembered_requests import RememberedRequests
from .request_digests import RequestDigests
from .requests import PlainCancel

if TYPE_CHECKING:
    from dynbus.bus.context import Context
    from dynbus.bus.protocol.liveness import RemoteLiveness
    from dynbus.bus.protocol.stream_writer import StreamWriter

    from .outbox import ClientOutbox
    from .reply import CallReply

KEPT: Final = 32768
"""Ended calls that a client may leave unacknowledged."""
KEPT_SECONDS: Final = 15.0
"""Seconds for which one is kept at least, and twice as long at most: heartbeats acknowledge in
one.
"""
CLIENTS: Final = 16384
"""Clients that may have calls here. Who does not live is forgotten within seconds."""
IDLE_CLIENT_SECONDS: Final = 5.0
LOST_CANCEL_BEATS: Final = 3
ARRIVAL_GRACE: Final = 2.0
KILL_AFTER: Final = 1.0
MAX_KILL_AFTER: Final = 60.0
FLIGHT_SECONDS: Final = 0.25
"""Seconds that an inquiry may have been on its way, by which its request may seem to be sent
later.
"""
NOT_KEPT: Final = "the call began here, and nothing of it is kept any longer"


# What is to be done --------------------------------------------------------------------------


class Dropped(NamedTuple):
    """Count something that came as dropped."""

    reason: DropReason


class Refuse(NamedTuple):
    """End a call that was not admitted."""

    call: FramedCall
    error: DynbusError


class Abort(NamedTuple):
    """End a call with an error, and drop it."""

    call: Call
    error: DynbusError


class Stop(NamedTuple):
    """Ask a call to stop; kill it `kill_after` seconds later unless that is negative."""

    call: Call
    kill_after: float


class GoOn(NamedTuple):
    """Let a call send more."""

    call: FramedCall


class Send(NamedTuple):
    """Send what a writer has."""

    client: RemoteClient
    writer: StreamWriter


class Tell(NamedTuple):
    """Send a frame to the control lane of a client that need not have calls here."""

    sender: Sender
    frame: Frame


class NothingHere(NamedTuple):
    """Tell a client that of the calls which a part of its heartbeat lists none is here.

    Attributes:
        first, last: the numbers that the part speaks of.
    """

    sender: Sender
    first: int
    last: int | None


class SendFailed(NamedTuple):
    """End a call at its reader, of which nothing is here."""

    sender: Sender
    frame: Failed


class MakeSure(NamedTuple):
    """Ask `Ledger.answer` once all that had arrived before this inquiry is read."""

    inquiry: Inquiry


Action = Dropped | Refuse | Abort | Stop | GoOn | Send | Tell | NothingHere | SendFailed | MakeSure


# What is known -------------------------------------------------------------------------------


class Sender(NamedTuple):
    """The sender of a control message, by its own account.

    Attributes:
        base: its reply base.
        incarnation: what control messages between the two carry.
        key: what it is known by here, see `client_key`.
    """

    base: str
    incarnation: str
    key: str


class Inquiry(NamedTuple):
    """A client asks for what it misses of a call that may not have arrived.

    Attributes:
        at: when the inquiry arrived, on the monotonic clock.
    """

    sender: Sender
    frame: Resume
    at: float


# Every request asks for it, and a client's requests all carry the same.
@lru_cache(1024)
def client_key(base: str, incarnation: str) -> str:
    """The key by which a client is known at an instance.

    Both know the incarnation, and nobody else does: one that borrows the base of a client is
    another one.
    """
    return f"{base.rpartition('.')[2]}-{incarnation}"


class FramedCall(Call):
    """A call of a dynbus client.

    Attributes:
        released: whether the client has all that it wants of it.
        stopping: whether it is killed after a while.
        in_parts: whether its request comes in several messages.
    """

    __slots__ = ("client", "in_parts", "released", "stopping", "writer")

    def __init__(
        self,
        served: ServedEndpoint,
        context: Context,
        reply: CallReply,
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
        self.stopping = False
        self.in_parts = False


class RemoteClient:
    """A dynbus client with calls at this instance.

    The control lane reads it at every heartbeat; the main loop alone changes it.

    Attributes:
        base: its reply base; results go to one subject under it, control frames to another.
        incarnation: what its requests told, and control batches carry, both ways.
        key: what it is known by here.
        heard_at: when a request of it last arrived.
        turn_taker: whose turns its calls take, its own or its principal's.
        outbox: what is ready for it.
        on_dirty, on_blocked: what its writers call, see `StreamWriter`.
        calls: calls that wait or run, by request number.
        kept: writers of ended calls that are not acknowledged yet.
        unread: what is kept for it.
        short_of_room: its calls that wait until it has taken more of that.
        missing: heartbeats in a row that did not list a call, by request number.
        busy_at: when it last had calls here, on the monotonic clock.
        principal: whose it is by its reply base, which it chose itself.
        proof: the token by which it is asked to prove that; 0 while it is not asked.
        proven_at: the sweep at which it last has, as `Proofs` counts them; None before.
    """

    def __init__(
        self,
        base: str,
        incarnation: str,
        unread: ClientUnreadBytes,
        outbox: ClientOutbox,
        now: float,
    ) -> None:
        self.base = base
        self.incarnation = incarnation
        self.key = client_key(base, incarnation)
        self.heard_at = 0.0
        self.turn_taker = turn_taker(f"{base}.f")
        self.control_subject = f"{base}.ctl.f"
        self.outbox = outbox
        # Made once: each call would make two more objects, which are kept as long as its results.
        self.on_dirty = outbox.note_dirty
        self.on_blocked = self.note_blocked
        self.liveness: RemoteLiveness | None = None
        self.calls: dict[int, FramedCall] = {}
        self.kept: dict[int, StreamWriter] = {}
        self.unread = unread
        self.short_of_room: set[FramedCall] = set()
        self.missing: dict[int, int] = {}
        self.busy_at = now
        self.principal = principal_of(base)
        self.proof = 0
        self.proven_at: int | None = None
        self._old_kept: frozenset[int] = frozenset()
        self._looked_at = now
        self._last_kept = 0

    def __repr__(self) -> str:
        return f"<RemoteClient {self.base} [{len(self.calls)} calls, {len(self.kept)} kept]>"

    @property
    def due_since(self) -> float | None:
        for call in list(self.calls.values()):
            # Of what has ended here or was left there the client need not know any longer.
            if not call.ended and not call.released and not call.stopping:
                return call.started_at
        return None

    @property
    def label(self) -> str:
        """The name of the client in messages: its id, as in the log of its process, and its
        principal."""
        client_id = self.base.rpartition(".")[2]
        of = "" if self.principal == ANONYMOUS else f" of {self.principal}"
        return f"client {client_id[:8]}{of}"

    def has_work(self) -> bool:
        return bool(self.calls or self.kept)

    def positions(self) -> dict[int, int]:
        """The sequence after the last unit of each call that the next heartbeat tells of."""
        # Copies: the lane asks, and a list of pairs may set off a garbage collection, in which the
        # main loop may run and change what is being listed.
        open_calls = self.calls.copy()
        calls = {number: call.writer.next_sequence for number, call in open_calls.items()}
        # What ended since the last beat is most likely acknowledged before the next.
        kept = list(self.kept.copy().items())
        for number, writer in kept:
            if number <= self._last_kept:
                calls[number] = writer.next_sequence
        self._last_kept = kept[-1][0] if kept else 0
        return calls

    def writer(self, number: int) -> StreamWriter | None:
        """The writer of a call that runs, or has ended and is not acknowledged yet."""
        call = self.calls.get(number)
        return call.writer if call is not None else self.kept.get(number)

    def note_blocked(self, writer: StreamWriter) -> None:
        """A writer may send nothing more for now."""
        call = self.calls.get(writer.number)
        if call is not None:
            call.reply.pause()
            if writer.is_short_of_room:
                self.short_of_room.add(call)

    def outdated(self, now: float, *, cut_off: bool) -> list[int]:
        """The kept calls that its reader will hardly acknowledge any more.

        Args:
            cut_off: whether it cannot, because we are not connected.
        """
        if cut_off:
            self._looked_at = now
            self._old_kept = frozenset()
            return []
        if now - self._looked_at < KEPT_SECONDS:
            return []
        self._looked_at = now
        outdated = self._old_kept & self.kept.keys()
        self._old_kept = frozenset(self.kept.keys() - outdated)
        return list(outdated)


class Ledger:
    """The calls of one instance, and the clients that made them.

    Args:
        max_request_bytes: bytes of the largest request.
        instance_window: bytes of results that may be kept for all clients.
        reply_prefixes: subjects under which clients may be answered.
        open_outbox: makes what collects the results of a new client, by its key and base.

    Attributes:
        name: of the instance, for messages.
        clients: the dynbus clients with calls here, by key.
        plain: the calls of plain NATS clients.
        unread: what is kept for all of them.
        plain_account: what of it is kept for plain NATS clients.
        partial: requests of which parts are still to come.
    """

    def __init__(
        self,
        name: str,
        *,
        max_request_bytes: int,
        instance_window: int,
        reply_prefixes: Iterable[str],
        open_outbox: Callable[[str, str], ClientOutbox],
    ) -> None:
        self.clients: dict[str, RemoteClient] = {}
        self.plain: set[Call] = set()
        self.unread = UnreadBytes(instance_window)
        self.plain_account = ClientUnreadBytes(self.unread)
        self.partial = PartialRequests(max_request_bytes)
        self.name = name
        self._max_request_bytes = max_request_bytes
        self._reply_prefixes = tuple(reply_prefixes)
        self._open_outbox = open_outbox
        # Requests that were given up, and may not begin when they arrive.
        self._refused = RememberedRequests()
        # Requests that were asked to stop before they arrived.
        self._stopped = RememberedRequests()
        # Requests whose sender was told that they did not arrive.
        self._lost = RequestDigests()
        # Those that began here, and of which nothing else is known any longer.
        self._forgotten = RequestDigests()
        self._heard_since = float("inf")
        # Every request asks them, and almost always there is nothing in them.
        self._has_memories = False

    def __repr__(self) -> str:
        return f"<Ledger {self.name} [{len(self.clients)} clients, {len(self.plain)} plain calls]>"

    def calls(self) -> list[Call]:
        """Every call that waits or runs here, or whose request is not complete."""
        calls = list(self.plain)
        for client in self.clients.values():
            calls.extend(client.calls.values())
        return calls

    def note_subscribed(self, now: float) -> None:
        """Requests arrive here from now on."""
        self._heard_since = now

    # Requests ----------------------------------------------------------------------------

    def find(
        self, base: str, incarnation: str, number: int, secret: bytes, now: float
    ) -> RemoteClient | FramedCall | Dropped:
        """The client or the call that a request belongs to.

        Returns:
            The client of a new request; the call of a further part; a drop for a request that may
            not be answered, or was here before.
        """
        client = self.clients.get(client_key(base, incarnation))
        if client is None:
            return self._new_client(base, incarnation, now)
        if client.base != base:
            return Dropped(DropReason.CLIENT_ID_TAKEN)
        client.heard_at = now
        call = client.calls.get(number)
        if call is not None and call.in_parts and call.writer.secret == secret:
            return call
        if call is not None or number in client.kept:
            return Dropped(DropReason.STALE)
        return client

    def _new_client(self, base: str, incarnation: str, now: float) -> RemoteClient | Dropped:
        if base.count(".") != 2 or not is_safe_reply(base, self._reply_prefixes):
            return Dropped(DropReason.UNSAFE_REPLY)
        if len(self.clients) >= CLIENTS:
            # It is told that its request is not here when it asks, and sends it again.
            return Dropped(DropReason.EXCESS)
        key = client_key(base, incarnation)
        unread = ClientUnreadBytes(self.unread)
        outbox = self._open_outbox(key, base)
        client = self.clients[key] = RemoteClient(base, incarnation, unread, outbox, now)
        return client

    def begin(self, call: FramedCall) -> list[Action]:
        """Take in the call of a new request; what is returned ends it where it may not begin.

        A call that was asked to stop before it came may begin, and is asked again here.
        """
        client = call.client
        client.calls[call.writer.number] = call
        error = self._said_before(call) if self._has_memories else None
        if error is not None:
            return [Dropped(DropReason.REFUSED), Refuse(call, error)]
        if self.unread.free <= 0 and (refused := no_room(client.unread)) is not None:
            return [Refuse(call, refused)]
        return []

    def _said_before(self, call: FramedCall) -> DynbusError | None:
        """The reason why a request may not begin, from messages that arrived before it."""
        request = call.client.key, call.writer.number, call.writer.secret
        if self._stopped.has(*request):
            call.context.stop_generating()
        if self._refused.has(*request):
            return Cancelled("the call was given up before it arrived", started=False)
        if self._lost.has(*request):
            # Its sender was told so, and may have sent another; this error has it do that.
            return Unavailable("the request came too late", started=False)
        return None

    def part(
        self, call: FramedCall, index: int, count: int, data: bytes
    ) -> tuple[bytes | None, list[Action]]:
        """Take in a part of a request.

        Args:
            index: of the part, from 1.

        Returns:
            The whole request, or None while parts of it are to come; and what is to be done.
        """
        client = call.client
        key = client.key, call.writer.number
        call.in_parts = True
        request = self.partial.add(key, index, count, data)
        most = self._max_request_bytes
        if request.size > most:
            text = f"the request exceeds max_request_bytes = {most}"
            return None, [Refuse(call, PayloadTooLarge(text, started=False))]
        whole = request.whole()
        if whole is not None:
            self._forget_parts(call)
            return whole, []
        if self.partial.is_too_much(client.key):
            text = "too many requests of this client are incomplete: send fewer at a time"
            return None, [Refuse(call, Overloaded(text, started=False))]
        actions: list[Action] = []
        while (excess := self.partial.excess()) is not None:
            text = (
                "too many requests are incomplete, and this one has waited the longest for its "
                "next part: send it again"
            )
            actions += self._give_up_partial(excess, Overloaded(text, started=False))
        return None, actions

    def forget(self, call: FramedCall) -> None:
        """A request cannot be read: it never was here."""
        call.client.calls.pop(call.writer.number, None)
        self._forget_parts(call)

    def finish(self, call: Call, now: float) -> None:
        """A call is over; what its reader has not acknowledged is kept."""
        if type(call) is not FramedCall:
            self.plain.discard(call)
            return
        client, writer = call.client, call.writer
        if call.in_parts:
            self._forget_parts(call)
        if client.short_of_room:
            client.short_of_room.discard(call)
        was_open = writer.number in client.calls
        if was_open:
            del client.calls[writer.number]
        if not was_open or call.released:
            writer.forget()
            return
        if len(client.kept) >= KEPT:
            self._give_up_kept(client, next(iter(client.kept)), now)
        client.kept[writer.number] = writer

    def _forget_parts(self, call: FramedCall) -> None:
        call.in_parts = False
        self.partial.remove((call.client.key, call.writer.number))

    def _give_up_partial(self, key: tuple[str, int], error: DynbusError) -> list[Action]:
        """End the call of a request that is not complete."""
        self.partial.remove(key)
        client = self.clients.get(key[0])
        call = client.calls.get(key[1]) if client is not None else None
        return [] if call is None else [Refuse(call, error)]

    # What clients say --------------------------------------------------------------------

    def cost(self, frame: Frame, client: RemoteClient | None) -> int | DropReason:
        """The cost of taking in a control frame; the reason for its drop, where no client sends
        it."""
        if isinstance(frame, Credit | Cancel | Resume):
            return FRAME_COST
        if isinstance(frame, Open):
            here = 0 if client is None else len(client.calls) + len(client.kept)
            return FRAME_COST + ENTRY_COST * (len(frame.calls) + len(frame.done) + here)
        return DropReason.UNEXPECTED

    def hear(self, sender: Sender, frame: Frame, *, at: float, now: float) -> list[Action]:
        """Take in a control frame.

        Args:
            at: when it arrived.
        """
        client = self.clients.get(sender.key)
        if isinstance(frame, Open):
            actions = self._acknowledge(client, sender, frame, now)
        elif isinstance(frame, Credit):
            actions = self._credit(client, frame)
        elif isinstance(frame, Cancel):
            actions = self._cancel(client, sender, frame, now)
        elif isinstance(frame, Resume):
            actions = self._ask(client, Inquiry(sender, frame, at))
        else:
            return [Dropped(DropReason.UNEXPECTED)]
        if client is not None and client.short_of_room:
            actions += self.room(client)
        return actions

    def room(self, client: RemoteClient) -> list[Action]:
        """The calls of a client for which there is room again."""
        unblocked = [call for call in client.short_of_room if not call.writer.blocked]
        client.short_of_room.difference_update(unblocked)
        return [GoOn(call) for call in unblocked]

    def _acknowledge(
        self,
        client: RemoteClient | None,
        sender: Sender,
        frame: Open,
        now: float,
    ) -> list[Action]:
        """Carry out a heartbeat of a client."""
        actions: list[Action] = []
        for number, secret in frame.done:
            writer = client.writer(number) if client is not None else None
            if client is None or writer is None:
                # A request that is still on its way, or waits in front of a blocked loop.
                self._has_memories = True
                self._refused.add(sender.key, number, secret, now)
            elif writer.secret == secret:
                actions += self._release(client, number)
        if client is not None:
            client.missing = _missing(client, frame, now)
            for number, beats in client.missing.items():
                if beats >= LOST_CANCEL_BEATS:
                    actions += self._unlisted(client, number, now)
        if frame.calls and (client is None or not client.has_work()):
            # None of them is here; told so twice the client asks for each.
            actions.append(NothingHere(sender, frame.first, frame.last))
        return actions

    def _unlisted(self, client: RemoteClient, number: int, now: float) -> list[Action]:
        """A client does not list a call any longer: what said that it left was lost."""
        writer, call = client.writer(number), client.calls.get(number)
        if writer is not None:
            self._note_forgotten(client, writer, now)
        actions = self._release(client, number)
        if call is not None and not call.ended:
            # Should the reader be there after all, its call was lost, and may go on elsewhere.
            return [Abort(call, _loss_of(call, "the caller does not list the call any longer"))]
        return actions

    def _release(self, client: RemoteClient, number: int) -> list[Action]:
        """The reader has all that it wants of a call."""
        writer = client.kept.pop(number, None)
        if writer is not None:
            writer.forget()
        call = client.calls.get(number)
        if call is None:
            return []
        call.released = True
        if call.stopping:
            return []
        # The cancel that a reader sends when it leaves was lost on the way.
        call.stopping = True
        return [Stop(call, KILL_AFTER)]

    def _credit(self, client: RemoteClient | None, frame: Credit) -> list[Action]:
        writer = client.writer(frame.number) if client is not None else None
        if client is None or writer is None or not _is_of(frame, writer):
            return [Dropped(DropReason.STALE)]
        writer.credit(frame.granted, frame.received)
        call = client.calls.get(frame.number)
        if call is None or not call.reply.paused:
            return []
        if not writer.blocked:
            client.short_of_room.discard(call)
            return [GoOn(call)]
        if writer.is_short_of_room:
            # It waited for credit, and waits for room from now on.
            client.short_of_room.add(call)
        return []

    def _cancel(
        self, client: RemoteClient | None, sender: Sender, frame: Cancel, now: float
    ) -> list[Action]:
        writer = client.writer(frame.number) if client is not None else None
        if client is None or writer is None:
            # A request that is still on its way, or waits in front of a blocked loop.
            memory = self._stopped if frame.kill_after < 0 else self._refused
            self._has_memories = True
            memory.add(sender.key, frame.number, frame.secret, now)
            return []
        if not _is_of(frame, writer):
            return [Dropped(DropReason.STALE)]
        call = client.calls.get(frame.number)
        if call is None:
            return []
        call.stopping |= frame.kill_after > 0
        return [Stop(call, min(frame.kill_after, MAX_KILL_AFTER))]

    def cancel_plain(self, cancel: PlainCancel) -> list[Action]:
        """Cancel the calls of plain clients that carry a request id.

        Calls of dynbus clients have a secret for this; an id alone does not end them.
        """
        return [
            Stop(call, 0.0 if cancel.kills else -1.0)
            for call in self.plain
            if call.context.id == cancel.request_id
        ]

    # Questions after what is missing -----------------------------------------------------

    def _ask(self, client: RemoteClient | None, inquiry: Inquiry) -> list[Action]:
        """Send again what a reader misses, or say that nothing of it is here."""
        frame = inquiry.frame
        writer = client.writer(frame.number) if client is not None else None
        if client is None or writer is None:
            # Questions come on the lane. They overtake requests that wait in the other connection
            # while this process has more to do than it can.
            return [MakeSure(inquiry)]
        if not _is_of(frame, writer):
            return [Dropped(DropReason.STALE)]
        call = client.calls.get(frame.number)
        if call is not None and call.in_parts:
            return [MakeSure(inquiry)]
        return self._resume(client, writer, inquiry)

    def answer(self, inquiry: Inquiry, now: float) -> list[Action]:
        """Answer an inquiry now that all requests which came before it were read."""
        sender, frame, _ = inquiry
        client = self.clients.get(sender.key)
        writer = client.writer(frame.number) if client is not None else None
        if client is None or writer is None:
            return [self._say_unknown(inquiry, now)]
        if not _is_of(frame, writer):
            return [Dropped(DropReason.STALE)]
        call = client.calls.get(frame.number)
        if call is not None and call.in_parts:
            # Parts of the request were lost: it has not begun, and is to be sent anew.
            self.forget(call)
            writer.forget()
            call.context.kill()
            return [self._say_unknown(inquiry, now)]
        return self._resume(client, writer, inquiry)

    def _resume(self, client: RemoteClient, writer: StreamWriter, inquiry: Inquiry) -> list[Action]:
        if not writer.resume(inquiry.frame.resume_from):
            return [self._say_begun(inquiry, NOT_KEPT)]
        return [Send(client, writer)] if writer.has_fresh else []

    def _say_unknown(self, inquiry: Inquiry, now: float) -> Action:
        """Tell a client that its request is not here, and never accept it any more.

        It is said only where it is proven: a client that hears it may send the request again.
        """
        sender, frame, _ = inquiry
        request = sender.key, frame.number, frame.secret
        if self._forgotten.has(*request):
            return self._say_begun(inquiry, NOT_KEPT)
        self._has_memories = True
        if not self._would_know(inquiry) or not self._lost.add(*request, now):
            return self._say_begun(inquiry, "the instance cannot tell whether the call began")
        return Tell(sender, Unknown(frame.number, frame.secret, frame.attempt))

    def _would_know(self, inquiry: Inquiry) -> bool:
        """True if the request of an inquiry would be known, had it begun at this instance's id."""
        forgotten = self._forgotten.complete_since
        if inquiry.frame.age is None:
            return forgotten < self._heard_since
        sent_at = inquiry.at - inquiry.frame.age
        # An instance takes longer to start than an inquiry to arrive.
        return sent_at > self._heard_since and sent_at - FLIGHT_SECONDS > forgotten

    def _say_begun(self, inquiry: Inquiry, text: str) -> Action:
        """End a call at its client, as one that did begin here or may have.

        Of which endpoint it was is not known any longer, so the client adds the hop.
        """
        frame = inquiry.frame
        kind = StreamLost if frame.resume_from else UnknownOutcome
        failed = failed_frame(
            frame.number,
            frame.secret,
            frame.attempt,
            frame.resume_from,
            kind(text),
        )
        return SendFailed(inquiry.sender, failed)

    # Time and the connection -------------------------------------------------------------

    def reconnected(self, max_unit_bytes: int) -> list[Action]:
        """Have everything sent that was not, now that the data connection is back.

        Bytes of the last moments may be lost. The last unit of each call is sent again, so that
        a client that misses some asks for them at once.
        """
        actions: list[Action] = []
        for client in self.clients.values():
            for call in client.calls.values():
                # It may be another server, with another limit.
                call.writer.limit_units(max_unit_bytes)
            for writer in (*(call.writer for call in client.calls.values()), *client.kept.values()):
                writer.repeat_last()
                if writer.has_fresh:
                    actions.append(Send(client, writer))
        return actions

    def sweep(self, now: float, *, cut_off: bool) -> list[Action]:
        """Forget what is too old to matter, and give up requests whose parts do not come.

        Args:
            cut_off: whether nobody can acknowledge anything, because we are not connected.
        """
        for memory in (self._refused, self._stopped, self._lost, self._forgotten):
            memory.forget_old(now)
        self._has_memories = bool(self._refused or self._stopped or self._lost)
        actions: list[Action] = []
        for key, client in list(self.clients.items()):
            for number in client.outdated(now, cut_off=cut_off):
                self._give_up_kept(client, number, now)
            if client.has_work():
                client.busy_at = now
            elif now - client.busy_at > IDLE_CLIENT_SECONDS:
                del self.clients[key]
                client.unread.close()
            actions += self.room(client)
        for partial in self.partial.sweep():
            text = "parts of the request were lost on their way"
            actions += self._give_up_partial(partial, Unavailable(text, started=False))
        for partial in self.partial:
            sender = self.clients.get(partial[0])
            call = sender.calls.get(partial[1]) if sender is not None else None
            deadline = call.context.deadline if call is not None else None
            if deadline is not None and deadline <= now:
                text = "the deadline passed before all parts of the request had come"
                actions += self._give_up_partial(partial, DeadlineExceeded(text, started=False))
        return actions

    def client_gone(self, client: RemoteClient, now: float) -> list[Action]:
        """A client died: forget it, but know its calls should it come back; they are ended."""
        if self.clients.get(client.key) is client:
            del self.clients[client.key]
        for number in (*client.calls, *client.kept):
            writer = client.writer(number)
            if writer is not None:
                self._note_forgotten(client, writer, now)
        actions: list[Action] = []
        for call in client.calls.values():
            if not call.ended:
                actions.append(Abort(call, _loss_of(call, "the instance took its caller for dead")))
        client.kept.clear()
        client.unread.close()
        return actions

    def _give_up_kept(self, client: RemoteClient, number: int, now: float) -> None:
        """Keep the results of a call no longer, though they were not acknowledged."""
        writer = client.kept.pop(number)
        writer.forget()
        self._note_forgotten(client, writer, now)

    def _note_forgotten(self, client: RemoteClient, writer: StreamWriter, now: float) -> None:
        """A request that did begin is about to be forgotten, and its reader did not say so."""
        self._forgotten.add(client.key, writer.number, writer.secret, now)


def _loss_of(call: FramedCall, text: str) -> DynbusError:
    """The error that ends a running call whose reader seems to be gone."""
    return StreamLost(text) if call.served.endpoint.streaming else UnknownOutcome(text)


def _is_of(frame: Credit | Cancel | Resume, writer: StreamWriter) -> bool:
    return writer.secret == frame.secret and writer.attempt == frame.attempt


def _missing(client: RemoteClient, frame: Open, now: float) -> dict[int, int]:
    """The calls here that heartbeats do not list, and how many in a row did not."""
    known = dict(frame.calls)
    newest = max(known, default=-1)
    missing: dict[int, int] = {}
    for number in (*client.calls, *client.kept):
        if not covers(frame, number):
            # Another message of this heartbeat tells of it.
            if number in client.missing:
                missing[number] = client.missing[number]
            continue
        if number in known:
            # Soon and often: what is kept for long is memory that is never warm.
            writer = client.writer(number)
            if writer is not None:
                writer.acknowledge(known[number])
            continue
        call = client.calls.get(number)
        # A request may overtake a heartbeat that was written before it.
        young = call is not None and now - call.started_at < ARRIVAL_GRACE
        if call is not None and (call.released or (number > newest and young)):
            continue
        # The reader does not list it: a cancel or an acknowledgement was lost on the way.
        missing[number] = client.missing.get(number, 0) + 1
    return missing
