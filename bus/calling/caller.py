"""`Caller`: the calls of one process, from the request to the last frame that comes back.

One `Caller` per process. It knows nothing of routing or types: `begin` sends bytes to one
instance and returns a `PendingCall`, which ends with bytes or one error, in time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from dynbus.bus.clock import monotonic
from dynbus.bus.deadlines import Deadlines
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import (
    STATUS_CODES,
    Cancelled,
    DeadlineExceeded,
    DynbusError,
    PayloadTooLarge,
    PermissionDenied,
    StreamLost,
    Unavailable,
    UnknownOutcome,
)
from dynbus.bus.heartbeats import Registry, Said
from dynbus.bus.inbox import ENTRY_COST, FRAME_COST
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.call_ranges import covers
from dynbus.bus.protocol.cancellation import OPERATOR, EndedCall
from dynbus.bus.protocol.liveness import HEARTBEAT_INTERVAL
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.protocol.wire import (
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
    Unknown,
    decode_batch,
)
from dynbus.bus.transport import ConnectionState, Message

from .open_calls import OpenCalls, Remote
from .pending_call import CallHead, PendingCall
from .remote_instance import RemoteInstance

if TYPE_CHECKING:
    from dynbus.bus.background import Work
    from dynbus.bus.bus import Bus

logger = logging.getLogger(__name__)

PART_HEADER_BYTES: Final = 64
SILENT_SECONDS: Final = 60.0
"""For which an instance is remembered that was not heard any more."""
REPORT_SECONDS: Final = 1.0
"""For which the load that an instance has reported is believed once nothing is open there."""
BEATS_PER_PING: Final = 10
DOUBT_SECONDS: Final = 1.0
"""For which a call waits, at most, for each word on whether its dead instance took it at all."""

_RESULTS = (Item, Items, End, Failed, Part)


class Silence(NamedTuple):
    """An instance that was not heard any more, and when that was found."""

    instance: InstanceName
    found_at: float


class Caller:
    """Sends requests for one process and hands the answers to the calls that wait.

    Call `start` once before anything else.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.registry: Registry[Remote] = Registry(bus.replies.base, self, {}, bus.to_main)
        self._open = OpenCalls(
            self.registry.remotes,
            self._make_remote,
            stream_window=bus.config.stream_window,
            connection_window=bus.config.connection_window,
        )
        self.deadlines = Deadlines(bus.loop, PendingCall.expire)
        # Made once: each call would make one more object for the garbage collector to look at.
        self._on_end = self._ended
        self._closed = False
        # Instances that were not heard any more, by id, and when that was found.
        self._silent: dict[str, Silence] = {}
        self._on_heard_again: list[Callable[[InstanceName], None]] = []
        self._looking: Work | None = None

    def __repr__(self) -> str:
        return f"<Caller [{len(self._open.calls)} calls]>"

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
        bus.cancels.add(self._cancel_requests)
        await bus.data.barrier()
        await bus.lane.run(self._start_control())

    async def _start_control(self) -> None:
        connection = self.bus.lane.connection
        connection.on_error(partial(self.bus.to_main, self._refused))
        connection.on_state(partial(self.bus.to_main, self._on_state))
        connection.subscribe(
            self.bus.replies.control_frames,
            partial(self.bus.heartbeats.receive, self.registry),
        )
        await connection.barrier()

    def open_calls(self) -> dict[str, int]:
        """Open calls by instance id."""
        return self._open.count_by_instance()

    def in_flight(self, instance: InstanceName) -> int:
        """Calls of this process that are open at an instance."""
        remote = self._open.find_remote(instance)
        return len(remote.calls) if remote is not None else 0

    def is_heard(self, instance: InstanceName) -> bool:
        """True if calls are open at an instance and its heartbeats arrive."""
        remote = self._open.find_remote(instance)
        liveness = remote.liveness if remote is not None else None
        return liveness is not None and liveness.is_heard(monotonic())

    def silent_since(self, instance: InstanceName) -> float | None:
        """The time at which an instance was found to be lost; None where that is long ago, and
        where anything came of it since."""
        silence = self._silent.get(instance.instance_id)
        if silence is None or silence.found_at + SILENT_SECONDS <= monotonic():
            return None
        return silence.found_at

    def on_heard_again(self, listener: Callable[[InstanceName], None]) -> None:
        """Call `listener(instance)` on the main loop when one that fell silent is heard again."""
        self._on_heard_again.append(listener)

    def load(self, instance: InstanceName) -> int:
        """Calls that an instance last reported to run or wait there; 0 where that was long ago, and
        nothing is open there that would bring a report."""
        remote = self._open.find_remote(instance)
        if remote is None:
            return 0
        if not remote.calls and remote.heard_at + REPORT_SECONDS < monotonic():
            return 0
        return remote.load

    def round_trip(self, instance: InstanceName) -> float | None:
        """Seconds of the way to an instance and back, over the server; None where it was not
        measured."""
        remote = self._open.find_remote(instance)
        return remote.round_trip if remote is not None else None

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
        endpoint, opened = head.endpoint, self._open
        call = PendingCall(
            head,
            opened.remote(endpoint, instance_id),
            opened.next_number(),
            window=opened.window(),
            max_item_bytes=config.max_item_bytes,
            now=now,
            on_end=self._on_end,
        )
        block = self._head_block(call, head, now)
        room = self.bus.data.max_payload - len(block) - PART_HEADER_BYTES
        if len(data) > room and len(data) > MAX_PARTS * room:
            raise PayloadTooLarge(
                f"a request of {len(data)} bytes with {len(block)} bytes of headers to "
                f"{endpoint} does not fit into {MAX_PARTS} messages of the server's "
                f"max_payload = {self.bus.data.max_payload}",
                request_id=head.request_id,
                started=False,
            )
        opened.add(call)
        if self.bus.telemetry is not None:
            self.bus.telemetry.in_flight(endpoint, 1, side="client")
        if head.deadline is not None:
            call.deadline_number = self.deadlines.arm(head.deadline, now, call)
        self._publish(endpoint.at(instance_id), call, block, data, room)
        return call

    async def close(self) -> None:
        """End every open call and say so to the far sides; no other begins."""
        self._closed = True
        self.bus.heartbeats.remove(self.registry)
        for remote in self._open.remotes():
            if remote.done:
                # Otherwise the instance would keep these results until it finds us dead.
                for frame in remote.beat(self.bus.heartbeats.number):
                    remote.send((frame,))
        for call in list(self._open.calls.values()):
            call.abandon()
        self.deadlines.clear()
        self.bus.cancels.remove(self._cancel_requests)

    def _cancel_requests(self, namespace: str, ids: Set[str]) -> list[EndedCall]:
        """End what an operator cancels on this side too, wherever it is and whatever becomes of it
        there."""
        ended: list[EndedCall] = []
        for call in list(self._open.calls.values()):
            if call.request_id in ids and call.endpoint.namespace == namespace:
                call.cancel(kill=True)
                call.fail(Cancelled(OPERATOR, hop=f"caller of {call.hop}"))
                ended.append(EndedCall(call.request_id))
        return ended

    # Internals ---------------------------------------------------------------------------

    def _make_remote(self, name: InstanceName) -> Remote:
        return RemoteInstance(self.bus, name, self.registry.bounce_token)

    def _ended(self, call: PendingCall) -> None:
        """A call has ended."""
        if call.deadline_number is not None:
            self.deadlines.disarm(call.deadline_number, call)
        if self._open.remove(call):
            if self.bus.telemetry is not None:
                self.bus.telemetry.in_flight(call.endpoint, -1, side="client")
            if call.doubt:
                self.bus.bounce_handlers.pop(call.doubt, None)

    def _head_block(self, call: PendingCall, head: CallHead, now: float) -> bytes:
        text = (
            f"NATS/1.0\r\n{headers.FRAMES}: {VERSION} {call.secret.hex()} {call.reader.window} "
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

    def _publish(
        self, subject: str, call: PendingCall, block: bytes, data: bytes, room: int
    ) -> None:
        """Send a request, in parts of at most `room` bytes."""
        bus = self.bus
        reply = bus.replies.request(call.number)
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
        call = self._open.calls.get(int(token))
        if call is None:
            self.bus.drop(DropReason.STALE)
            return
        if message.found_nobody:
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
        call.remote.send((call.resume_frame(monotonic()),), call.doubt)

    def _unreachable(self, call: PendingCall) -> None:
        """Neither a request nor the question after it found anybody."""
        call.unreachable = True
        if call.reader.has_begun:
            call.fail(StreamLost("the instance is gone", hop=call.hop))
        else:
            call.fail(Unavailable("the instance is gone", hop=call.hop, started=False))

    def _plain_answer(self, call: PendingCall, message: Message) -> None:
        """An answer without frames: a responder that refused the request as a whole."""
        fields = headers.decode(message.headers)
        text = fields.get(headers.SERVICE_ERROR)
        if text is None or call.secret.hex() not in fields.get(headers.FRAMES, ""):
            self.bus.drop(DropReason.UNEXPECTED)
            return
        status = fields.get(headers.SERVICE_ERROR_CODE, "")
        started = status not in {str(STATUS_CODES["Unavailable"]), str(STATUS_CODES["Overloaded"])}
        code = fields.get(headers.ERROR, DynbusError.code)
        call.fail(DynbusError.of_code(code, text, started=started))

    def _on_frames(self, message: Message) -> None:
        batch = decode_batch(message.data)
        if batch is None:
            self.bus.drop(DropReason.MALFORMED)
            return
        calls = self._open.calls
        proven: PendingCall | None = None
        for frame in batch.frames:
            # One by one, for what comes most often.
            if (
                type(frame) is not Item
                and type(frame) is not End
                and not isinstance(frame, _RESULTS)
            ):
                self.bus.drop(DropReason.UNEXPECTED)
                continue
            call = calls.get(frame.number)
            if call is None or frame.secret != call.secret or frame.attempt != call.attempt:
                self.bus.drop(DropReason.STALE)
                continue
            proven = call
            if call.reader.receive_next(frame):
                if type(frame) is End:
                    call.finish()
                if (gathering := call.gathering) is None:
                    call.wake()
                else:
                    # `add`, for the item that each of many streams gets at each step.
                    fresh = gathering.fresh
                    if not fresh:
                        gathering.begin()
                    fresh.append(call.member)
            else:
                call.receive(frame)
        if proven is not None:
            remote = proven.remote
            remote.load = batch.load
            remote.heard_at = monotonic()

    # What instances say on the control lane ----------------------------------------------

    def key_of(self, batch: Batch) -> str:
        """Instances are known by what only they were told, and none speaks for another with it.

        Those that ask for a proof say their whole name: an id alone may be another's, too.
        """
        remote = self.registry.remotes.get(batch.incarnation)
        if remote is None or batch.sender in (remote.name.instance_id, str(remote.name)):
            return batch.incarnation
        return ""

    def cost(self, frame: Frame, remote: Remote | None) -> int | DropReason:
        """The cost of hearing a frame; the reason for its drop, where no instance sends it."""
        if remote is None:
            return DropReason.STALE
        if isinstance(frame, Heartbeat):
            return FRAME_COST + ENTRY_COST * (len(frame.calls) + len(remote.calls))
        return FRAME_COST if isinstance(frame, Unknown) else DropReason.UNEXPECTED

    def heard_stranger(self, batch: Batch) -> None:
        """An instance that was taken for dead is heard again."""
        silence = self._silent.pop(batch.sender, None) if self._silent else None
        if silence is not None:
            for listener in self._on_heard_again:
                self.bus.to_main(listener, silence.instance)

    def heard_while_blocked(self, batch: Batch, remote: Remote | None) -> None:
        """It waits, like everything else that is read here."""

    def beat(self, remote: Remote, number: int) -> list[Frame]:
        """The heartbeat of a number to an instance, now and then with a ping that measures the way
        there; only a process that says where it is measures.
        """
        frames = remote.beat(number)
        if self.bus.config.zone and (remote.round_trip is None or number % BEATS_PER_PING == 0):
            remote.pinged = number, monotonic()
            frames.append(Ping(number))
        return frames

    def answered(self, remote: Remote, token: int, at: float) -> None:
        """An instance answers a ping: the shortest way of late counts, whatever was busy."""
        number, sent_at = remote.pinged
        if token == number:
            took, known = at - sent_at, remote.round_trip
            remote.round_trip = took if known is None else min(took, known + (took - known) / 8)

    def returned(self, remote: Remote) -> None:
        """An instance that could not be reached is heard again."""
        remote.returned()

    def gone(self, remote: Remote) -> None:
        """An instance died: end its calls. A call that never began is told apart by retries."""
        calls = list(remote.calls.values())
        # One that nobody waits for has left, as instances do.
        level = logging.WARNING if calls else logging.DEBUG
        logger.log(level, "%s is gone; calls that were open at it: %d", remote.name, len(calls))
        flight, name = self.bus.flight, remote.name
        if flight is not None:
            lost = partial(flight.note, name.namespace, "instance.lost", str(name))
            self.bus.to_main(partial(lost, calls=len(calls)))
        self._open.forget(remote)
        now = monotonic()
        silent = self._silent.copy().items()  # the lane takes some away
        self._silent = {key: one for key, one in silent if one.found_at + SILENT_SECONDS > now}
        self._silent[remote.name.instance_id] = Silence(remote.name, now)
        # A bus that has failed hears nothing more of any of them.
        failed = self.bus.failure is not None
        not_begun = [call for call in calls if not failed and not call.reader.has_begun]
        for call in calls:
            if failed or call.reader.has_begun:
                self._left_alone(call)
        if not_begun:
            self.bus.background.start(self._hear_who_took, not_begun, name="hear-who-took")

    async def _hear_who_took(self, calls: list[PendingCall]) -> None:
        """End calls of an instance that died, once the server has said which nobody took.

        The lane hears sooner than a loop that is slow, for which that word lies unread. The answer
        to a ping comes after all that the server had for us: what it says of the requests, and
        then of the questions that this led to.
        """
        try:
            for _ in range(2):
                with suppress(Unavailable, PermissionDenied):
                    await self.bus.data.barrier(timeout=DOUBT_SECONDS)
        finally:
            # The bus may fail meanwhile.
            for call in calls:
                self._left_alone(call)

    def _left_alone(self, call: PendingCall) -> None:
        """The instance of a call died, and nothing says that it never took it."""
        if not call.is_open:
            return
        call.unreachable = True
        if call.streaming:
            call.fail(StreamLost("the instance is gone", hop=call.hop))
        else:
            call.fail(
                UnknownOutcome(
                    "the instance is gone; the call may or may not have been carried out",
                    hop=call.hop,
                )
            )

    def hear(self, said: Said[Remote]) -> None:
        """Carry out what an instance says."""
        frame, remote = said.frame, said.remote
        if isinstance(frame, Heartbeat) and remote is not None:
            self._on_heartbeat(remote, frame)
        elif isinstance(frame, Unknown):
            call = self._open.calls.get(frame.number)
            if call is not None and frame.secret == call.secret:
                self._lost(call)
            else:
                self.bus.drop(DropReason.STALE)

    def _on_heartbeat(self, remote: Remote, frame: Heartbeat) -> None:
        if frame.blocked > self.bus.config.stall_limit:
            self.gone(remote)
            return
        if frame.blocked >= HEARTBEAT_INTERVAL:
            # Requests wait in front of its loop; asked for them now it would call them lost.
            return
        if frame.calls and not remote.has_work():
            # It keeps results that nobody waits for: what said so was lost.
            remote.send(remote.beat(self.bus.heartbeats.number))
            return
        sent = dict(frame.calls)
        calls = [call for call in remote.calls.values() if covers(frame, call.number)]
        now = monotonic()
        said = [call.compare(sent.get(call.number), now) for call in calls]
        remote.send([frame for frame in said if frame is not None])
        stalled = [call for call in calls if call.moves and call.is_stalled(now, remote.heard_at)]
        if stalled and not self.bus.failure and (self._looking is None or self._looking.ended):
            self._looking = self.bus.background.start(
                self._move_stalled, stalled, name="stalled-streams"
            )

    async def _move_stalled(self, calls: list[PendingCall]) -> None:
        """End streams whose instance is heard and whose items do not come, so that they move.

        What came may lie unread in front of this loop, or our own link be the one that is cut.
        """
        try:
            with suppress(PermissionDenied):
                await self.bus.data.barrier(timeout=DOUBT_SECONDS)
        except Unavailable:
            return
        now = monotonic()
        for call in calls:
            if call.is_stalled(now, call.remote.heard_at):
                call.unreachable = True
                call.cancel(kill=True)
                call.fail(
                    StreamLost("what it sends does not come, although it is heard", hop=call.hop)
                )

    def _lost(self, call: PendingCall) -> None:
        if call.reader.next_sequence == 0:
            call.unreachable = bool(call.doubt)
            call.fail(Unavailable("the request was lost on its way", hop=call.hop, started=False))
        else:
            call.fail(StreamLost("the instance does not know the stream any longer", hop=call.hop))

    def _refused(self, error: DynbusError, subject: str) -> None:
        """The server does not let us publish to a subject: end the calls that need it."""
        for call in list(self._open.calls.values()):
            remote = call.remote
            if subject in (call.endpoint.at(remote.name.instance_id), remote.control_subject):
                call.fail(PermissionDenied(error.message, hop=call.hop, started=False))

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            for remote in self._open.remotes():
                remote.returned()
