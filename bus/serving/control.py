"""What clients say of their calls: credit, cancels, acknowledgements, what they miss.

Control frames reach the lane of the instance and are carried out on the main loop, against the
calls of the client that sent them. A frame may overtake the request that it speaks of, or come
when all of it is over: what was said is remembered for as long as that can matter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from dynbus.bus.clock import monotonic
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import (
    Cancelled,
    DynbusError,
    StreamLost,
    Unavailable,
    UnknownOutcome,
)
from dynbus.bus.heartbeats import Registry
from dynbus.bus.inbox import ENTRY_COST, FRAME_COST, Inbox
from dynbus.bus.protocol.liveness import HEARTBEAT_INTERVAL
from dynbus.bus.protocol.names import control_subject, is_safe_reply
from dynbus.bus.protocol.unread_bytes import ClientUnreadBytes, UnreadBytes
from dynbus.bus.protocol.wire import (
    Batch,
    Cancel,
    Credit,
    Frame,
    Heartbeat,
    Open,
    Ping,
    Pong,
    Resume,
    Unknown,
    encode_batch,
    failed_frame,
)
from dynbus.bus.telemetry.call_spans import CALL_BYTES, covers, span_room, split_calls
from dynbus.bus.transport import ConnectionState

from .partial_requests import PartialRequests
from .remembered_requests import RememberedRequests
from .remote_client import FramedCall, RemoteClient, client_key
from .request_digests import RequestDigests
from .requests import PlainCancel, read_cancel

if TYPE_CHECKING:
    from dynbus.bus.bus import Bus
    from dynbus.bus.protocol.stream_writer import StreamWriter
    from dynbus.bus.transport import Message, Subscription

    from .calls import Call
    from .execution import Execution
    from .outbox import Outbox

logger = logging.getLogger(__name__)

BARRIER_TIMEOUT: Final = 5.0
LOST_CANCEL_BEATS: Final = 3
ARRIVAL_GRACE: Final = 2.0
IDLE_CLIENT_SECONDS: Final = 5.0
CLIENTS: Final = 16384
"""Clients that may have calls here. Who does not live is forgotten within seconds."""
KILL_AFTER: Final = 1.0
MAX_KILL_AFTER: Final = 60.0
UNSURE: Final = 32768
"""Questions that may wait until all requests before them are read."""
ANSWERS_PER_TURN: Final = 256
NOT_KEPT: Final = "the call began here, and nothing of it is kept any longer"
FLIGHT_SECONDS: Final = 0.25
"""How long a question may have been on its way, and its request seem to be sent the later."""


class Sender(NamedTuple):
    """Who sends a control batch, as the batch says.

    Attributes:
        base: its reply base.
        incarnation: what batches between the two carry.
    """

    base: str
    incarnation: str

    @property
    def key(self) -> str:
        return client_key(self.base, self.incarnation)


class _Said(NamedTuple):
    """What a client says, until the main loop comes to it.

    Attributes:
        at: when it arrived, on the monotonic clock.
    """

    sender: Sender
    frame: Open | Credit | Cancel | Resume
    at: float


class ServerControl:
    """The clients of one instance, and what they say on its control subject.

    Attributes:
        registry: the dynbus clients with calls here, by client id.
        plain: the calls of plain NATS clients.
        unread: what is kept for all of them.
        plain_account: what of it is kept for plain NATS clients.
        refused: requests that were given up, and may not begin when they arrive.
        lost: requests whose sender was told that they did not arrive.
        stopped: requests that were asked to stop before they arrived.
        partial: requests of which parts are still to come.
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        component: str,
        instance_id: str,
        execution: Execution,
        outbox: Outbox,
    ) -> None:
        self.registry: Registry[RemoteClient] = Registry(
            instance_id,
            lambda batch: client_key(batch.sender, batch.incarnation),
            self._on_batch,
        )
        self._inbox: Inbox[_Said | PlainCancel] = Inbox(self._carry_out, bus.to_main)
        self.plain: set[Call] = set()
        self.refused = RememberedRequests()
        self.lost = RequestDigests()
        self.stopped = RememberedRequests()
        self.partial = PartialRequests(bus.config.max_request_bytes)
        # Those that began here, and of which nothing else is known any longer.
        self._forgotten = RequestDigests()
        self._heard_since = float("inf")
        # Questions after requests that may have arrived, but were not read yet, and since when.
        self._unsure: list[tuple[Sender, Resume, float]] = []
        self._making_sure: asyncio.Task[None] | None = None
        self.unread = UnreadBytes(bus.config.instance_window)
        self.plain_account = ClientUnreadBytes(self.unread)
        self._bus = bus
        self._execution = execution
        self._outbox = outbox
        self._subject = control_subject(namespace, component, instance_id)
        self._hop = f"{namespace}.{component}@{instance_id}"
        self._subscription: Subscription | None = None

    def __repr__(self) -> str:
        clients = len(self.registry.remotes)
        return f"<ServerControl {self._hop} [{clients} clients, {len(self.plain)} plain calls]>"

    async def start(self) -> None:
        """Beat for the clients and hear them; when this returns the server knows of it.

        Raises:
            PermissionDenied: the server refuses the control subject.
        """
        self._bus.heartbeats.add(self.registry)
        await self._bus.lane.run(self._subscribe())

    async def _subscribe(self) -> None:
        connection = self._bus.lane.connection
        self._subscription = connection.subscribe(self._subject, self._on_message)
        await connection.barrier()

    def note_subscribed(self) -> None:
        """Requests arrive here from now on."""
        self._heard_since = monotonic()

    def stop(self) -> None:
        """Beat and hear no more."""
        self._bus.heartbeats.remove(self.registry)
        if self._making_sure is not None:
            self._making_sure.cancel()
        if self._subscription is not None:
            self._bus.lane.call(self._subscription.unsubscribe)

    # Clients and their calls -------------------------------------------------------------

    def client(self, base: str, incarnation: str) -> RemoteClient | None:
        """The client that reads at `base`; None for one that may not be answered."""
        key = client_key(base, incarnation)
        client = self.registry.remotes.get(key)
        if client is None:
            return self._new_client(key, base, incarnation)
        if client.base != base:
            self._bus.drop(DropReason.CLIENT_ID_TAKEN)
            return None
        return client

    def _new_client(self, key: str, base: str, incarnation: str) -> RemoteClient | None:
        if base.count(".") != 2 or not is_safe_reply(base, self._bus.config.reply_prefixes):
            self._bus.drop(DropReason.UNSAFE_REPLY)
            return None
        if len(self.registry.remotes) >= CLIENTS:
            # It is told that its request is not here when it asks, and sends it again.
            self._bus.drop(DropReason.EXCESS)
            return None
        bounce = self._bus.replies.bounce(self.registry.bounce_token(key))
        client = RemoteClient(self, self._outbox, base, incarnation, bounce, self.unread)
        self.registry.remotes[key] = client
        return client

    def verdict(self, call: FramedCall) -> DynbusError | None:
        """What was said of a request before it arrived: an error when it may not begin.

        A call that was asked to stop may begin, and is asked again here.
        """
        request = call.client.key, call.writer.number, call.writer.secret
        if self.stopped.has(*request):
            call.context.stop_generating()
        if self.refused.has(*request):
            return Cancelled("the call was given up before it arrived", started=False)
        if self.lost.has(*request):
            # Its sender was told so, and may have sent another; this error has it do that.
            return Unavailable("the request came too late", started=False)
        return None

    def retire(self, call: Call) -> None:
        """Forget a call that is over; what its reader has not acknowledged is kept."""
        if isinstance(call, FramedCall):
            call.client.retire(call)
        else:
            self.plain.discard(call)

    def calls(self) -> list[Call]:
        """Every call that waits or runs here, or whose request is not complete."""
        calls = list(self.plain)
        for client in self.registry.remotes.values():
            calls.extend(client.calls.values())
        return calls

    def heartbeats(self, calls: Mapping[int, int]) -> list[Frame]:
        """What a client with these calls is told at every beat; called on the lane.

        Args:
            calls: the sequence after the last unit of each, by number.
        """
        blocked, draining = self._bus.heartbeats.blocked, self._execution.draining
        most = span_room(self._bus.lane.connection.max_payload) // CALL_BYTES
        return [Heartbeat(blocked, draining, *span) for span in split_calls(calls, most)]

    def reconnected(self) -> None:
        """Have everything sent that was not, now that the data connection is back.

        Bytes of the last moments may be lost. The last unit of each call is sent again, so that
        whoever misses some asks for them at once.
        """
        most = self._outbox.max_unit_bytes()
        for client in list(self.registry.remotes.values()):
            for call in client.calls.values():
                # It may be another server, with another limit.
                call.writer.limit_units(most)
            client.touch_all()

    def forget_idle(self, now: float) -> None:
        """Forget clients that have had no call here for a while, and what is too old to matter."""
        for memory in (self.refused, self.stopped, self.lost, self._forgotten):
            memory.forget_old(now)
        cut_off = self._bus.data.state is not ConnectionState.CONNECTED
        for key, client in list(self.registry.remotes.items()):
            client.sweep(now, cut_off=cut_off)
            if client.calls or client.kept or client.dirty:
                client.busy_at = now
            elif now - client.busy_at > IDLE_CLIENT_SECONDS:
                del self.registry.remotes[key]
                client.unread.close()
            client.wake_for_room()

    def client_gone(self, client: RemoteClient) -> None:
        """A client died: stop its calls and forget it, but know them should it come back."""
        if self.registry.remotes.get(client.key) is client:
            del self.registry.remotes[client.key]
        for number in (*client.calls, *client.kept):
            writer = client.writer(number)
            if writer is not None:
                self._note_forgotten(client, writer)
        # Callers come and go: what is left of them ends here.
        logger.info(
            "%s: a caller is gone, %s; its calls that are cancelled: %d, its results dropped: %d",
            self._hop,
            client.label,
            sum(not call.ended for call in client.calls.values()),
            len(client.kept),
        )
        for call in list(client.calls.values()):
            if not call.ended:
                kind = StreamLost if call.served.endpoint.streaming else UnknownOutcome
                self._execution.abort(call, kind("the instance took its caller for dead"))
        client.kept.clear()
        client.unread.close()

    def give_up_kept(self, client: RemoteClient, number: int) -> None:
        """Keep the results of a call no longer, though they were not acknowledged."""
        writer = client.kept.pop(number)
        writer.forget()
        self._note_forgotten(client, writer)

    def _note_forgotten(self, client: RemoteClient, writer: StreamWriter) -> None:
        """A request that did begin is about to be forgotten, and its reader did not say so."""
        self._forgotten.add(client.key, writer.number, writer.secret, monotonic())

    # Frames ------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        """A message to the instance's control subject; called on the lane."""
        if not message.headers:
            self._bus.heartbeats.receive(self.registry, message)
            return
        cancel = read_cancel(message.headers)
        if cancel is None:
            self._bus.to_main(self._bus.drop, DropReason.MALFORMED)
        elif not self._inbox.put("", cancel, FRAME_COST + ENTRY_COST * len(self.plain)):
            self._bus.to_main(self._bus.drop, DropReason.EXCESS)

    def _cancel_plain(self, cancel: PlainCancel) -> None:
        """Cancel the calls of plain clients that carry a request id.

        Calls of dynbus clients have a secret for this; an id alone does not end them.
        """
        for call in list(self.plain):
            if call.context.id == cancel.request_id:
                self._execution.cancel(call, 0.0 if cancel.kills else -1.0)

    def _on_batch(self, batch: Batch) -> None:
        """Have what a client says carried out when it is its turn; called on the lane."""
        sender = Sender(batch.sender, batch.incarnation)
        client = self.registry.remotes.get(sender.key)
        blocked = self._bus.heartbeats.blocked
        # The requests of one that is not known yet wait in front of the blocked main loop.
        is_kept_waiting = blocked >= HEARTBEAT_INTERVAL and (
            client is None or not client.has_work()
        )
        # Names cost nothing: all who have no call here share one turn.
        peer = "" if client is None else sender.key
        now = monotonic()
        dropped: set[DropReason] = set()
        for frame in batch.frames:
            cost = FRAME_COST
            if isinstance(frame, Open):
                here = 0 if client is None else len(client.calls) + len(client.kept)
                cost += ENTRY_COST * (len(frame.calls) + len(frame.done) + here)
            elif not isinstance(frame, Credit | Cancel | Resume):
                if not isinstance(frame, Ping | Pong):
                    dropped.add(DropReason.UNEXPECTED)
                continue
            if is_kept_waiting and isinstance(frame, Open) and frame.calls:
                self._say_nothing_is_here(sender, frame, blocked)
            said = _Said(sender, frame, now)
            if not self._inbox.put(peer, said, cost):
                dropped.add(DropReason.EXCESS)
        for reason in dropped:
            self._bus.to_main(self._bus.drop, reason)

    def _carry_out(self, said: _Said | PlainCancel) -> None:
        if isinstance(said, PlainCancel):
            self._cancel_plain(said)
            return
        client = self.registry.remotes.get(said.sender.key)
        self._hear(client, said)
        if client is not None and client.short_of_room:
            client.wake_for_room()

    def _hear(self, client: RemoteClient | None, said: _Said) -> None:
        frame = said.frame
        if not isinstance(frame, Open):
            self._on_call_control(client, frame, said)
            return
        if client is not None:
            self._on_open(client, frame)
        if frame.calls and (client is None or not client.has_work()):
            # None of them is here; told so twice the client asks for each.
            self._say_nothing_is_here(said.sender, frame, 0.0)

    def _say_nothing_is_here(self, sender: Sender, frame: Open, blocked: float) -> None:
        heartbeat = Heartbeat(blocked, self._execution.draining, [], frame.first, frame.last)
        self._answer_control(sender, heartbeat)

    def _on_open(self, client: RemoteClient, frame: Open) -> None:
        for number, secret in frame.done:
            writer = client.writer(number)
            if writer is None:
                # A request that is still on its way, or waits in front of a blocked loop.
                self.refused.add(client.key, number, secret, monotonic())
            elif writer.secret == secret:
                self._release(client, number)
        client.missing = self._missing(client, frame)
        for number, beats in client.missing.items():
            if beats < LOST_CANCEL_BEATS:
                continue
            call = client.calls.get(number)
            if call is not None and not call.ended:
                # Not a tidy end: should the reader be there after all, it must not take it for
                # the end of the stream.
                gone = Cancelled("the caller does not list the call any longer")
                self._execution.abort(call, gone)
            writer = client.writer(number)
            if writer is not None:
                self._note_forgotten(client, writer)
            self._release(client, number)

    @staticmethod
    def _missing(client: RemoteClient, frame: Open) -> dict[int, int]:
        """The calls here that heartbeats do not list, and how many in a row did not."""
        known = dict(frame.calls)
        newest = max(known, default=-1)
        now = monotonic()
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

    def _release(self, client: RemoteClient, number: int) -> None:
        """The reader has all that it wants of a call."""
        writer = client.kept.pop(number, None)
        if writer is not None:
            writer.forget()
        call = client.calls.get(number)
        if call is not None:
            call.released = True
            if call.kill_timer is None:
                # The cancel that a reader sends when it leaves was lost on the way.
                self._execution.cancel(call, KILL_AFTER)

    def _on_call_control(
        self, client: RemoteClient | None, frame: Credit | Cancel | Resume, said: _Said
    ) -> None:
        """Carry out a frame that speaks of one call."""
        writer = client.writer(frame.number) if client is not None else None
        if client is None or writer is None:
            if isinstance(frame, Credit):
                self._bus.drop(DropReason.STALE)
            elif not isinstance(frame, Resume):
                # A request that is still on its way, or waits in front of a blocked loop.
                memory = self.stopped if frame.kill_after < 0 else self.refused
                memory.add(said.sender.key, frame.number, frame.secret, monotonic())
            else:
                self._make_sure(frame, said)
            return
        if writer.secret != frame.secret or writer.attempt != frame.attempt:
            self._bus.drop(DropReason.STALE)
            return
        call = client.calls.get(frame.number)
        if isinstance(frame, Credit):
            writer.credit(frame.granted, frame.received)
            if call is not None and not writer.blocked:
                client.go_on(call)
            elif call is not None and call.reply.paused and writer.is_short_of_room:
                # It waited for credit, and waits for room from now on.
                client.short_of_room.add(call)
        elif isinstance(frame, Cancel):
            if call is not None:
                self._execution.cancel(call, min(frame.kill_after, MAX_KILL_AFTER))
        elif call is not None and client.is_partial(frame.number):
            self._make_sure(frame, said)
        else:
            self._resume(client, writer, said.sender, frame)

    def _resume(
        self, client: RemoteClient, writer: StreamWriter, sender: Sender, frame: Resume
    ) -> None:
        """Send again what a reader misses."""
        if not writer.resume(frame.resume_from):
            self._say_begun(sender, frame, NOT_KEPT)
        elif writer.has_fresh:
            client.touch(writer)

    def _make_sure(self, frame: Resume, said: _Said) -> None:
        """Look again when all that the server had for us is read.

        Questions come on the lane. They overtake requests that wait in the other connection
        while this process has more to do than it can.
        """
        if len(self._unsure) >= UNSURE:
            # It is asked again at the next heartbeats.
            self._bus.drop(DropReason.EXCESS)
            return
        self._unsure.append((said.sender, frame, said.at))
        if self._making_sure is None or self._making_sure.done():
            self._making_sure = self._bus.loop.create_task(self._answer_unsure())

    async def _answer_unsure(self) -> None:
        while self._unsure:
            unsure, self._unsure = self._unsure, []
            try:
                await self._bus.data.barrier(timeout=BARRIER_TIMEOUT)
            except DynbusError as error:
                # Whoever misses an answer asks again at its next heartbeats.
                logger.debug("%s cannot tell what has arrived: %s", self._hop, error)
                continue
            for count, (sender, frame, asked_at) in enumerate(unsure, 1):
                self._answer_sure(sender, frame, asked_at)
                if count % ANSWERS_PER_TURN == 0:
                    await asyncio.sleep(0)

    def _answer_sure(self, sender: Sender, frame: Resume, asked_at: float) -> None:
        """Answer a question now that all requests which came before it were read."""
        client = self.registry.remotes.get(sender.key)
        writer = client.writer(frame.number) if client is not None else None
        if client is None or writer is None:
            self._say_unknown(sender, frame, asked_at)
        elif writer.secret != frame.secret or writer.attempt != frame.attempt:
            self._bus.drop(DropReason.STALE)
        elif client.is_partial(frame.number):
            # Parts of the request were lost: it has not begun, and is to be sent anew.
            call = client.calls[frame.number]
            call.released = True
            self._execution.kill(call)
            self._say_unknown(sender, frame, asked_at)
        else:
            self._resume(client, writer, sender, frame)

    def _say_unknown(self, sender: Sender, frame: Resume, asked_at: float) -> None:
        """Tell a client that its request is not here, and never accept it any more.

        It is said only where it is proven: whoever hears it may send the request again.
        """
        request = sender.key, frame.number, frame.secret
        if self._forgotten.has(*request):
            self._say_begun(sender, frame, NOT_KEPT)
        elif not self._would_know(frame, asked_at) or not self.lost.add(*request, monotonic()):
            self._say_begun(sender, frame, "the instance cannot tell whether the call began")
        else:
            self._answer_control(sender, Unknown(frame.number, frame.secret, frame.attempt))

    def _would_know(self, frame: Resume, asked_at: float) -> bool:
        """Whether the request of a question would be known, had it begun at this instance's id."""
        forgotten = self._forgotten.complete_since
        if frame.age is None:
            return forgotten < self._heard_since
        sent_at = asked_at - frame.age
        # An instance takes longer to start than a question to arrive.
        return sent_at > self._heard_since and sent_at - FLIGHT_SECONDS > forgotten

    def _say_begun(self, sender: Sender, frame: Resume, text: str) -> None:
        """End a call at its client, as one that did begin here or may have."""
        subject = f"{sender.base}.f"
        if not is_safe_reply(subject, self._bus.config.reply_prefixes):
            self._bus.drop(DropReason.UNSAFE_REPLY)
            return
        kind = StreamLost if frame.resume_from else UnknownOutcome
        failed = failed_frame(
            frame.number,
            frame.secret,
            frame.attempt,
            frame.resume_from,
            kind(text, hop=self._hop),
        )
        self._bus.data.publish(subject, self._outbox.encode([failed]))

    def _answer_control(self, sender: Sender, frame: Frame) -> None:
        """Send one frame to the control lane of a client that need not have calls here."""
        subject = f"{sender.base}.ctl.f"
        if not is_safe_reply(subject, self._bus.config.reply_prefixes):
            self._bus.to_main(self._bus.drop, DropReason.UNSAFE_REPLY)
            return
        identity, load = self.registry.identity, self._execution.load
        batch = encode_batch(identity, sender.incarnation, load, [frame])
        self._bus.lane.call(self._bus.lane.connection.publish, subject, batch)
