"""The calling side: sends requests to instances and takes in what comes back.

One `Caller` per process. It knows nothing of routing or types: `begin` sends bytes to one
instance and returns a `PendingCall`, which ends with bytes or one error, in time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from dynbus.bus.clock import monotonic
from dynbus.bus.deadlines import Deadlines
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import (
    STATUS_CODES,
    DeadlineExceeded,
    DynbusError,
    PayloadTooLarge,
    PermissionDenied,
    StreamLost,
    Unavailable,
    UnknownOutcome,
    make_error,
)
from dynbus.bus.heartbeats import Registry
from dynbus.bus.inbox import ENTRY_COST, FRAME_COST, Inbox
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.liveness import HEARTBEAT_INTERVAL
from dynbus.bus.protocol.tokens import random_id
from dynbus.bus.protocol.wire import (
    BATCH_OVERHEAD,
    MAX_PARTS,
    VERSION,
    Batch,
    End,
    Failed,
    Frame,
    Heartbeat,
    Item,
    Items,
    Part,
    Ping,
    Pong,
    Unknown,
    decode_batch,
    encode_batch,
)
from dynbus.bus.telemetry.call_spans import covers
from dynbus.bus.transport import ConnectionState, Message

from .pending_call import CallHead as CallHead
from .pending_call import PendingCall as PendingCall
from .remote_instance import RemoteInstance

if TYPE_CHECKING:
    from dynbus.bus.bus import Bus

logger = logging.getLogger(__name__)

SMALLEST_WINDOW: Final = 16 * 1024
PART_HEADER_BYTES: Final = 64
CONTROL_FRAME_BYTES: Final = 64
MAX_CONTROL_FRAMES: Final = 1024
MAX_IDLE_REMOTES: Final = 1024

_ITEMS = (Item, Items)
_RESULTS = (Item, Items, End, Failed, Part)


class _Said(NamedTuple):
    """What an instance says on the control lane, until the main loop comes to it."""

    remote: RemoteInstance
    frame: Heartbeat | Unknown


class Caller:
    """Sends requests for one process and hands the answers to the calls that wait.

    Call `start` once before anything else.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.registry: Registry[RemoteInstance] = Registry(
            bus.replies.base, lambda batch: batch.incarnation, self._on_batch
        )
        self._inbox: Inbox[_Said] = Inbox(self._carry_out, bus.to_main)
        self.deadlines = Deadlines(bus.loop)
        # Those of the registry by their place on the bus: an id alone may be another's, too.
        self._remotes: dict[tuple[str, str, str], RemoteInstance] = {}
        self._closed = False
        self._calls: dict[int, PendingCall] = {}
        self._number = 0
        self._window_left = bus.config.connection_window

    def __repr__(self) -> str:
        return f"<Caller [{len(self._calls)} calls]>"

    async def start(self) -> None:
        """Begin to hear answers.

        Raises:
            PermissionDenied: the server refuses the reply subjects.
        """
        bus = self.bus
        bus.data.subscribe(bus.replies.data_wildcard, self._on_data)
        bus.data.on_state(self._on_state)
        bus.data.on_error(self._refused)
        bus.heartbeats.add(self.registry)
        await bus.data.barrier()
        await bus.lane.run(self._start_control())

    async def _start_control(self) -> None:
        connection = self.bus.lane.connection
        connection.on_error(self._refused_on_lane)
        connection.on_state(lambda state: self.bus.to_main(self._on_state, state))
        connection.subscribe(
            self.bus.replies.control_frames,
            lambda message: self.bus.heartbeats.receive(self.registry, message),
        )
        await connection.barrier()

    def statistics(self) -> dict[str, int]:
        """Open calls by instance id."""
        open_calls = Counter[str]()
        for remote in self._remotes.values():
            if remote.calls:
                open_calls[remote.instance_id] += len(remote.calls)
        return dict(open_calls)

    def in_flight(self, namespace: str, component: str, instance_id: str) -> int:
        """Calls of this process that are open at an instance."""
        remote = self._remotes.get((namespace, component, instance_id))
        return len(remote.calls) if remote is not None else 0

    def is_heard(self, namespace: str, component: str, instance_id: str) -> bool:
        """Whether calls are open at an instance and its heartbeats arrive."""
        remote = self._remotes.get((namespace, component, instance_id))
        liveness = remote.liveness if remote is not None else None
        return liveness is not None and liveness.is_heard(monotonic())

    def load(self, namespace: str, component: str, instance_id: str) -> int:
        """Calls that an instance last reported to run or wait there."""
        remote = self._remotes.get((namespace, component, instance_id))
        return remote.load if remote is not None else 0

    def begin(self, head: CallHead, instance_id: str, data: bytes) -> PendingCall:
        """Send a request to one instance.

        Raises:
            PayloadTooLarge: it exceeds `max_request_bytes`; nothing was sent.
            DeadlineExceeded: the deadline has passed; nothing was sent.
            ConfigError: a header value is not printable ASCII.
            Unavailable: the caller is closed; nothing was sent.
        """
        config = self.bus.config
        if len(data) > config.max_request_bytes:
            raise PayloadTooLarge(
                f"a request of {len(data)} bytes to {head.endpoint} exceeds "
                f"max_request_bytes = {config.max_request_bytes}",
                request_id=head.request_id,
                started=False,
            )
        now = monotonic()
        self.bus.check()
        if self._closed:
            raise Unavailable("the runtime is closed", request_id=head.request_id, started=False)
        place = (head.endpoint.namespace, head.endpoint.component, instance_id)
        remote = self._remotes.get(place) or self._new_remote(place)
        self._number = number = self._number + 1
        window = self._window()
        call = PendingCall(self, remote, number, head, window, now)
        block = self._head_block(call, head, window, now)
        self._check_parts(head, block, data)
        self._window_left -= window
        self._calls[number] = call
        if self.bus.telemetry is not None:
            self.bus.telemetry.in_flight(head.endpoint, 1, side="client")
        remote.calls[number] = call
        if head.deadline is not None:
            call.arm(head.deadline, now)
        self._publish(head.endpoint.at(instance_id), call, block, data)
        return call

    def send(self, remote: RemoteInstance, *frames: Frame) -> None:
        """Send control frames to an instance, from the main loop, in as few messages as fit."""
        self._send_control(remote, frames, self.registry.bounce_token(remote.incarnation))

    def _send_control(
        self, remote: RemoteInstance, frames: Sequence[Frame], bounce_token: str
    ) -> None:
        bus = self.bus
        reply = bus.replies.bounce(bounce_token)
        room = (bus.data.max_payload - BATCH_OVERHEAD) // CONTROL_FRAME_BYTES
        room = min(room, MAX_CONTROL_FRAMES)
        for first in range(0, len(frames), room):
            batch = list(frames[first : first + room])
            data = encode_batch(bus.replies.base, remote.incarnation, 0, batch)
            bus.data.publish(remote.control_subject, data, reply=reply)

    def forget(self, call: PendingCall) -> None:
        """A call has ended."""
        if self._calls.pop(call.number, None) is not None:
            if self.bus.telemetry is not None:
                self.bus.telemetry.in_flight(call.endpoint, -1, side="client")
            call.remote.calls.pop(call.number, None)
            call.remote.done.append((call.number, call.secret))
            self._window_left += call.reader.window
            if call.doubt:
                self.bus.bounce_handlers.pop(call.doubt, None)

    def ask_anew(self, remote: RemoteInstance) -> None:
        """Tell an instance again where its calls stand: what was said last may be lost."""
        if self.bus.data.state is ConnectionState.CONNECTED:
            calls = list(remote.calls.values())
            self.send(remote, *(frame for call in calls for frame in call.standing()))

    def instance_gone(self, remote: RemoteInstance) -> None:
        """An instance died: end its calls. A call that never began is told apart by retries."""
        calls = list(remote.calls.values())
        # One that nobody waits for has left, as instances do.
        level = logging.WARNING if calls else logging.DEBUG
        logger.log(level, "%s is gone; open calls to it that end: %d", remote.name, len(calls))
        for call in calls:
            hop = call.endpoint.hop(remote.instance_id)
            call.unreachable = True
            if call.streaming:
                call.fail(StreamLost("the instance is gone", hop=hop))
            else:
                call.fail(
                    UnknownOutcome(
                        "the instance is gone; the call may or may not have been carried out",
                        hop=hop,
                    )
                )
        remote.done.clear()
        self._forget_remote(remote)

    async def close(self) -> None:
        """End every open call and say so to the far sides; no other begins."""
        self._closed = True
        self.bus.heartbeats.remove(self.registry)
        for remote in self.registry.remotes.values():
            if remote.done:
                # Otherwise the instance would keep these results until it finds us dead.
                for frame in remote.beat():
                    self.send(remote, frame)
        for call in list(self._calls.values()):
            call.abandon()
        self.deadlines.clear()

    # Internals ---------------------------------------------------------------------------

    def _new_remote(self, place: tuple[str, str, str]) -> RemoteInstance:
        if len(self._remotes) >= MAX_IDLE_REMOTES:
            for idle in [remote for remote in self._remotes.values() if not remote.has_work()]:
                self._forget_remote(idle)
        remote = self._remotes[place] = RemoteInstance(self, *place)
        self.registry.remotes[remote.incarnation] = remote
        return remote

    def _forget_remote(self, remote: RemoteInstance) -> None:
        if self.registry.remotes.pop(remote.incarnation, None) is not None:
            del self._remotes[remote.place]

    def _window(self) -> int:
        config = self.bus.config
        return min(config.stream_window, max(SMALLEST_WINDOW, self._window_left // 8))

    def _check_parts(self, head: CallHead, block: bytes, data: bytes) -> None:
        """Make sure that the request can be carried at all, before anything of it is sent."""
        room = self._room(block)
        if len(data) > room and len(data) > MAX_PARTS * room:
            raise PayloadTooLarge(
                f"a request of {len(data)} bytes with {len(block)} bytes of headers to "
                f"{head.endpoint} does not fit into {MAX_PARTS} messages of the server's "
                f"max_payload = {self.bus.data.max_payload}",
                request_id=head.request_id,
                started=False,
            )

    def _room(self, block: bytes) -> int:
        return self.bus.data.max_payload - len(block) - PART_HEADER_BYTES

    def _head_block(self, call: PendingCall, head: CallHead, window: int, now: float) -> bytes:
        text = (
            f"NATS/1.0\r\n{headers.FRAMES}: {VERSION} {call.secret.hex()} {window} "
            f"{call.remote.incarnation}\r\n"
            f"{headers.REQUEST_ID}: {head.request_id}\r\n"
        )
        if head.deadline is not None:
            left = head.deadline - now
            if left <= 0:
                raise DeadlineExceeded(
                    f"the deadline passed before {head.endpoint} was called",
                    request_id=head.request_id,
                    started=False,
                )
            text += f"{headers.DEADLINE}: {max(1, round(left * 1000))}\r\n"
        if head.attempt > 1:
            text += f"{headers.ATTEMPT}: {head.attempt}\r\n"
        if head.fields:
            text += headers.encode_lines(head.fields)
        return f"{text}\r\n".encode("ascii")

    def _publish(self, subject: str, call: PendingCall, block: bytes, data: bytes) -> None:
        bus = self.bus
        reply = bus.replies.request(call.number)
        room = self._room(block)
        if len(data) <= room:
            bus.data.publish(subject, data, reply=reply, headers=block)
            return
        count = -(-len(data) // room)
        fields = headers.decode(block)
        for index in range(count):
            part = headers.encode(fields | {headers.PART: f"{index + 1}/{count}"})
            chunk = data[index * room : (index + 1) * room]
            bus.data.publish(subject, chunk, reply=reply, headers=part)

    def _on_data(self, message: Message) -> None:
        token = message.subject.rpartition(".")[2]
        if token == "f":
            self._on_frames(message)
            return
        if not (token.isascii() and token.isdigit() and len(token) <= 18):
            self.bus.drop(DropReason.UNEXPECTED)
            return
        call = self._calls.get(int(token))
        if call is None:
            self.bus.drop(DropReason.STALE)
            return
        if headers.status(message.headers) == headers.NO_RESPONDERS:
            self._doubt(call)
            return
        self._plain_answer(call, message)

    def _doubt(self, call: PendingCall) -> None:
        """The server says that nobody took a request: make sure of it.

        Requests are numbered one by one, so others than the server could say so, and a call that
        did begin would be made a second time. The instance is asked; that nobody hears the
        question either is said at a subject that only the server knows.
        """
        if call.doubt:
            return
        call.doubt = random_id()
        self.bus.bounce_handlers[call.doubt] = partial(self._unreachable, call)
        self._send_control(call.remote, (call.resume_frame(),), call.doubt)

    def _unreachable(self, call: PendingCall) -> None:
        """Neither a request nor the question after it found anybody."""
        call.unreachable = True
        hop = call.endpoint.hop(call.remote.instance_id)
        if call.reader.has_begun:
            call.fail(StreamLost("the instance is gone", hop=hop))
        else:
            call.fail(Unavailable("the instance is gone", hop=hop, started=False))

    def _plain_answer(self, call: PendingCall, message: Message) -> None:
        """An answer without frames: a responder that refused the request as a whole."""
        fields = headers.decode(message.headers)
        text = fields.get(headers.SERVICE_ERROR)
        if text is None or call.secret.hex() not in fields.get(headers.FRAMES, ""):
            self.bus.drop(DropReason.UNEXPECTED)
            return
        status = fields.get(headers.SERVICE_ERROR_CODE, "")
        started = status not in {str(STATUS_CODES["Unavailable"]), str(STATUS_CODES["Overloaded"])}
        call.fail(make_error(fields.get(headers.ERROR, DynbusError.code), text, started=started))

    def _on_frames(self, message: Message) -> None:
        batch = decode_batch(message.data)
        if batch is None:
            self.bus.drop(DropReason.MALFORMED)
            return
        calls = self._calls
        proven: PendingCall | None = None
        for frame in batch.frames:
            if not isinstance(frame, _RESULTS):
                self.bus.drop(DropReason.UNEXPECTED)
                continue
            call = calls.get(frame.number)
            if call is None or frame.secret != call.secret or frame.attempt != call.attempt:
                self.bus.drop(DropReason.STALE)
                continue
            proven = call
            if isinstance(frame, _ITEMS) and call.reader.receive_next(frame):
                call.wake()
            else:
                call.receive(frame)
        if proven is not None:
            remote = proven.remote
            remote.load = batch.load
            remote.heard_at = monotonic()

    def _on_batch(self, batch: Batch) -> None:
        """Have what an instance says carried out when it is its turn; called on the lane."""
        bus = self.bus
        remote = self.registry.remotes.get(batch.incarnation)
        if remote is None:
            bus.to_main(bus.drop, DropReason.STALE)
            return
        dropped: set[DropReason] = set()
        for frame in batch.frames:
            if isinstance(frame, Heartbeat):
                cost = FRAME_COST + ENTRY_COST * (len(frame.calls) + len(remote.calls))
            elif isinstance(frame, Unknown):
                cost = FRAME_COST
            else:
                if not isinstance(frame, Ping | Pong):
                    dropped.add(DropReason.UNEXPECTED)
                continue
            if not self._inbox.put(batch.sender, _Said(remote, frame), cost):
                dropped.add(DropReason.EXCESS)
        for reason in dropped:
            bus.to_main(bus.drop, reason)

    def _carry_out(self, said: _Said) -> None:
        frame = said.frame
        if isinstance(frame, Heartbeat):
            self._on_heartbeat(said.remote, frame)
            return
        call = self._calls.get(frame.number)
        if call is not None and frame.secret == call.secret:
            self._lost(call)
        else:
            self.bus.drop(DropReason.STALE)

    def _on_heartbeat(self, remote: RemoteInstance, frame: Heartbeat) -> None:
        if frame.blocked > self.bus.config.stall_limit:
            self.instance_gone(remote)
            return
        if frame.blocked >= HEARTBEAT_INTERVAL:
            # Requests wait in front of its loop; asked for them now it would call them lost.
            return
        if frame.calls and not remote.has_work():
            # It keeps results that nobody waits for: what said so was lost.
            self.send(remote, *remote.beat())
            return
        sent = dict(frame.calls)
        calls = [call for call in remote.calls.values() if covers(frame, call.number)]
        said = [call.compare(sent.get(call.number)) for call in calls]
        self.send(remote, *(frame for frame in said if frame is not None))

    def _lost(self, call: PendingCall) -> None:
        hop = call.endpoint.hop(call.remote.instance_id)
        if call.reader.next_sequence == 0:
            call.unreachable = bool(call.doubt)
            call.fail(Unavailable("the request was lost on its way", hop=hop, started=False))
        else:
            call.fail(StreamLost("the instance does not know the stream any longer", hop=hop))

    def _refused_on_lane(self, error: DynbusError, subject: str) -> None:
        self.bus.to_main(self._refused, error, subject)

    def _refused(self, error: DynbusError, subject: str) -> None:
        """The server does not let us publish to a subject: end the calls that need it."""
        for call in list(self._calls.values()):
            remote = call.remote
            if subject in (call.endpoint.at(remote.instance_id), remote.control_subject):
                call.fail(
                    PermissionDenied(
                        error.message, hop=call.endpoint.hop(remote.instance_id), started=False
                    )
                )

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            for remote in list(self.registry.remotes.values()):
                self.ask_anew(remote)
