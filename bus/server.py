"""The serving side: takes requests for one instance, runs its handlers, sends results.

`InstanceServer` is the I/O around pure parts: `Admission` decides who runs, `StreamWriter`
what is sent, `PeerLiveness` who is still there. Everything here runs on the main loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Iterable
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from . import headers
from .admission import Admission, Verdict
from .clock import monotonic
from .context import Context, enter_context
from .deadlines import Deadlines
from .drops import DropReason
from .endpoint import Endpoint
from .errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    DynbusError,
    HandlerError,
    InvalidRequest,
    Migrate,
    Overloaded,
    PayloadTooLarge,
    ReaderStalled,
    StreamLost,
    Unavailable,
    UnknownOutcome,
)
from .heartbeats import Registry
from .names import EndpointName, control_subject, is_safe_reply
from .server_calls import ClientPeer, FramedCall, PlainCall, ServerCall, error_block
from .streams import StreamWriter
from .tokens import random_id
from .transport import ConnectionState, Message, Subscription
from .wire import (
    BATCH_OVERHEAD,
    MAX_PARTS,
    SECRET_BYTES,
    VERSION,
    Batch,
    Cancel,
    Credit,
    Frame,
    Heartbeat,
    Open,
    Resume,
    Unknown,
    encode_batch,
    failed_frame,
)

if TYPE_CHECKING:
    from .bus import Bus

logger = logging.getLogger(__name__)

TURN_ITEMS: Final = 256
LEAST_TURN_ITEMS: Final = 16
HIGH_BACKLOG: Final = 8 * 1024 * 1024
FLUSH_BYTES: Final = 256 * 1024
FRAME_OVERHEAD: Final = 48
SWEEP_INTERVAL: Final = 0.5
REMEMBERED_REQUESTS: Final = 8192
LOST_CANCEL_BEATS: Final = 3
ARRIVAL_GRACE: Final = 2.0
IDLE_PEER_SECONDS: Final = 5.0
KILL_AFTER: Final = 1.0
MAX_KILL_AFTER: Final = 60.0

_VERSION_WORD = str(VERSION)


class ServedEndpoint:
    """An endpoint of this instance, with its admission and figures."""

    def __init__(self, address: EndpointName, endpoint: Endpoint, instance_id: str) -> None:
        self.address = address
        self.hop = address.hop(instance_id)
        self.endpoint = endpoint
        self.admission: Admission[ServerCall] = Admission(endpoint.concurrency, endpoint.queue)
        self.requests = 0
        self.errors = 0
        self.last_error = ""
        self.processing_time = 0.0
        self.mean_time = 0.0

    def finished(self, seconds: float, error: DynbusError | None) -> None:
        """Count a call that ran for `seconds`."""
        self.requests += 1
        self.processing_time += seconds
        self.mean_time += 0.1 * (seconds - self.mean_time)
        if error is not None:
            self.errors += 1
            self.last_error = f"{error.code}: {error.message}"[:200]

    def retry_after(self) -> float:
        """Seconds in which the queue will probably have moved by one full turn."""
        slots = max(1, self.admission.running)
        return min(30.0, max(0.05, self.mean_time * self.admission.waiting / slots))


class InstanceServer:
    """Serves the endpoints of one instance, between `start` and `stop`.

    Attributes:
        draining: whether new requests are refused.
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        component: str,
        instance_id: str,
        endpoints: Iterable[Endpoint],
    ) -> None:
        self.bus = bus
        self.namespace = namespace
        self.component = component
        self.instance_id = instance_id
        self.draining = False
        self.served = {
            endpoint.name: ServedEndpoint(
                EndpointName.of(namespace, component, endpoint.name), endpoint, instance_id
            )
            for endpoint in endpoints
        }
        self.registry: Registry[ClientPeer] = Registry(instance_id, self._on_control)
        # Handlers start from the variables of whoever started the instance: those of the
        # message that happens to be read would leak one caller's into another's call.
        self._variables = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._plain: set[ServerCall] = set()
        # By client id and request number, with the request's secret; the oldest are dropped.
        self._refused: dict[tuple[str, int], bytes] = {}
        self._stopped: dict[tuple[str, int], bytes] = {}
        self._forgotten: dict[tuple[str, int], bytes] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._dirty: list[ClientPeer] = []
        self._flush_scheduled = False
        self._flushes = 0
        self._load = 0
        self._deadlines = Deadlines(bus.loop)
        self._queue_subscriptions: list[Subscription] = []
        self._subscriptions: list[Subscription] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._control_subscription: Subscription | None = None
        self._stop_listening: Callable[[], None] = _nothing

    def __repr__(self) -> str:
        state = "draining" if self.draining else "serving"
        running = sum(served.admission.running for served in self.served.values())
        waiting = sum(served.admission.waiting for served in self.served.values())
        return (
            f"<InstanceServer {self.namespace}.{self.component}@{self.instance_id} "
            f"[{state} | calls: {running} running, {waiting} waiting]>"
        )

    @property
    def load(self) -> int:
        """Calls that run or wait here."""
        return self._load

    async def start(self) -> None:
        """Subscribe; when this returns the server knows all of it.

        Raises:
            PermissionDenied: the server refuses one of the subjects.
        """
        data = self.bus.data
        self.bus.heartbeats.add(self.registry)
        await self.bus.lane.run(self._start_control())
        for served in self.served.values():
            receive = partial(self._receive, served)
            self._subscriptions.append(data.subscribe(served.address.at(self.instance_id), receive))
            self._queue_subscriptions.append(
                data.subscribe(str(served.address), receive, queue=self.component)
            )
        await data.barrier()
        self._stop_listening = data.on_state(self._on_state)
        self._sweeper = self.bus.loop.call_later(SWEEP_INTERVAL, self._sweep)

    async def _start_control(self) -> None:
        connection = self.bus.lane.connection
        subject = control_subject(self.namespace, self.component, self.instance_id)
        self._control_subscription = connection.subscribe(subject, self._on_control_message)
        await connection.barrier()

    def _on_control_message(self, message: Message) -> None:
        """A message to the instance's control subject; called on the lane."""
        if not message.headers:
            self.bus.heartbeats.receive(self.registry, message)
            return
        fields = headers.decode(message.headers)
        if fields.get(headers.CANCEL) in ("stop", "kill") and fields.get(headers.REQUEST_ID):
            self.bus.loop.call_soon_threadsafe(self._cancel_plain, fields)
        else:
            self.bus.loop.call_soon_threadsafe(self.bus.drop, DropReason.MALFORMED)

    def _cancel_plain(self, fields: dict[str, str]) -> None:
        """Cancel the calls of plain clients that carry a request id.

        Calls of dynbus clients have a secret for this; an id alone does not end them.
        """
        for call in list(self._plain):
            if call.context.id == fields[headers.REQUEST_ID]:
                self.cancel(call, 0.0 if fields[headers.CANCEL] == "kill" else -1.0)

    async def drain(self, grace: float) -> None:
        """Take no more calls, let those that are here finish within `grace` seconds, then end
        the rest with `Draining`."""
        self.draining = True
        for subscription in self._queue_subscriptions:
            subscription.unsubscribe()
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%r: ending what is left after %.1f s", self, grace)
        self.end_all(Draining("the instance is going away"))

    def end_all(self, error: DynbusError) -> None:
        """End every call now."""
        for call in self._all_calls():
            if not call.ended:
                call.fail(type(error)(error.message))
                self._kill(call)

    async def stop(self) -> None:
        """End what is left, say so, and unsubscribe."""
        self.draining = True
        self.end_all(Draining("the instance was stopped"))
        if self._tasks:
            _, stuck = await asyncio.wait(self._tasks, timeout=5.0)
            for task in stuck:
                logger.error("a handler ignores its cancellation: %r", task)
        self._flush()
        for subscription in (*self._queue_subscriptions, *self._subscriptions):
            subscription.unsubscribe()
        self._stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._deadlines.clear()
        try:
            await self.bus.data.barrier(timeout=1.0)
        except Unavailable:
            logger.warning("%r: stopped while the bus was out of reach", self)
        self.bus.heartbeats.remove(self.registry)
        if self._control_subscription is not None:
            self.bus.lane.call(self._control_subscription.unsubscribe)

    # Requests ------------------------------------------------------------------------------

    def _receive(self, served: ServedEndpoint, message: Message) -> None:
        now = monotonic()
        fields = headers.decode(message.headers) if message.headers else {}
        framing = fields.get(headers.FRAMES)
        try:
            if framing is None:
                plain = self._plain_call(served, fields, message.reply, now)
                if plain is not None:
                    self._admit(plain, message.data, fields, now)
                return
            call = self._framed_call(served, fields, framing, message.reply, now)
            if call is None:
                return
            data: bytes | None = message.data
            if headers.PART in fields:
                data = self._assemble(call, fields[headers.PART], message.data)
        except DynbusError as error:
            self.bus.drop(DropReason.MALFORMED)
            logger.debug("%s: %s", served.address, error)
            if is_safe_reply(message.reply, self.bus.config.reply_prefixes):
                error.hop = served.hop
                self.bus.data.publish(message.reply, b"", headers=error_block(error, framing))
            return
        if data is not None:
            self._admit(call, data, fields, now)

    def _context(self, served: ServedEndpoint, fields: dict[str, str], now: float) -> Context:
        deadline: float | None = None
        if served.endpoint.timeout is not None:
            deadline = now + served.endpoint.timeout
        if (text := fields.get(headers.DEADLINE)) is not None:
            if not (text.isascii() and text.isdigit() and len(text) < 16):
                raise InvalidRequest(f"{headers.DEADLINE}: {text[:40]!r} is no number")
            given = now + int(text) / 1000
            deadline = given if deadline is None else min(given, deadline)
        context = Context(
            _request_id(fields.get(headers.REQUEST_ID)),
            deadline=deadline,
            trace_headers=_trace_headers(fields) if headers.TRACEPARENT in fields else None,
            hop=served.hop,
            draining=self._is_draining,
        )
        if headers.METADATA in fields:
            context.metadata = MappingProxyType(headers.decode_metadata(fields[headers.METADATA]))
        if headers.ATTEMPT in fields:
            context.attempt = _small_number(fields[headers.ATTEMPT], 1)
        if headers.PRIORITY in fields:
            context.priority = _small_number(fields[headers.PRIORITY], 0)
        if headers.IDEMPOTENCY_KEY in fields:
            context.idempotency_key = fields[headers.IDEMPOTENCY_KEY][:128]
        return context

    def _is_draining(self) -> bool:
        return self.draining

    def _plain_call(
        self, served: ServedEndpoint, fields: dict[str, str], reply: str, now: float
    ) -> ServerCall | None:
        if not is_safe_reply(reply, self.bus.config.reply_prefixes):
            self.bus.drop(DropReason.UNSAFE_REPLY if reply else DropReason.NO_REPLY)
            return None
        call = PlainCall(self, served, self._context(served, fields, now), now, reply)
        self._plain.add(call)
        return call

    def _framed_call(
        self,
        served: ServedEndpoint,
        fields: dict[str, str],
        framing: str,
        reply: str,
        now: float,
    ) -> FramedCall | None:
        """The call that a framed request begins; None for one that is already known."""
        base, _, digits = reply.rpartition(".")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            raise InvalidRequest(f"{headers.FRAMES} needs a numbered reply, not {reply[:80]!r}")
        number = int(digits)
        secret, window, incarnation = _parse_framing(framing)
        context = self._context(served, fields, now)
        peer = self.registry.peers.get(base.rpartition(".")[2])
        if peer is None or peer.base != base:
            peer = self._new_peer(base)
            if peer is None:
                return None
            peer.incarnation = incarnation
        known = peer.calls.get(number)
        if known is not None:
            return known if number in peer.parts and known.writer.secret == secret else None
        if number in peer.kept:
            return None
        config = self.bus.config
        writer = StreamWriter(
            number,
            secret,
            context.attempt,
            granted=max(0, min(window, config.stream_window)),
            max_unit_bytes=self._max_unit_bytes(),
            max_item_bytes=config.max_item_bytes,
            on_dirty=peer.note_dirty,
        )
        call = FramedCall(self, served, context, now, peer, writer)
        peer.calls[number] = call
        if self._stopped and self._stopped.get((peer.client_id, number)) == secret:
            context.stop_generating()
        if self._refused and self._refused.get((peer.client_id, number)) == secret:
            self.bus.drop(DropReason.REFUSED)
            call.fail(Cancelled("the call was given up before it arrived", started=False))
            self._retire(call)
            return None
        return call

    def _max_unit_bytes(self) -> int:
        return min(FLUSH_BYTES, self.bus.data.max_payload - 4 * BATCH_OVERHEAD)

    def _new_peer(self, base: str) -> ClientPeer | None:
        """Begin to answer a client; None for one that may not be answered."""
        if base.count(".") != 2 or not is_safe_reply(base, self.bus.config.reply_prefixes):
            self.bus.drop(DropReason.UNSAFE_REPLY)
            return None
        client_id = base.rpartition(".")[2]
        if client_id in self.registry.peers:
            self.bus.drop(DropReason.CLIENT_ID_TAKEN)
            return None
        peer = self.registry.peers[client_id] = ClientPeer(self, base)
        return peer

    def _assemble(self, call: FramedCall, part: str, data: bytes) -> bytes | None:
        """The whole request, or None while parts of it are still to come."""
        number = call.writer.number
        index, _, count = part.partition("/")
        numbers = _small_number(index, 0), _small_number(count, 0)
        if not 1 <= numbers[0] <= numbers[1] <= MAX_PARTS:
            call.peer.calls.pop(number, None)
            raise InvalidRequest(f"{headers.PART}: {part[:40]!r}")
        parts = call.peer.parts.setdefault(number, [None] * int(count))
        if len(parts) == int(count):
            parts[int(index) - 1] = data
        if sum(len(piece) for piece in parts if piece) > self.bus.config.max_request_bytes:
            call.fail(
                PayloadTooLarge(
                    f"the request exceeds max_request_bytes = {self.bus.config.max_request_bytes}",
                    started=False,
                )
            )
            self._retire(call)
            return None
        if any(piece is None for piece in parts):
            return None
        del call.peer.parts[number]
        return b"".join(piece for piece in parts if piece is not None)

    def _admit(self, call: ServerCall, data: bytes, fields: dict[str, str], now: float) -> None:
        served = call.served
        telemetry = self.bus.telemetry
        if telemetry is not None:
            call.observation = telemetry.server_call(
                served.address,
                self.instance_id,
                fields,
                streaming=served.endpoint.streaming,
                request_id=call.context.id,
            )
            call.context.set_trace_headers(call.observation.trace_headers)
        if self.draining:
            self._refuse(call, Draining("the instance is going away", started=False))
            return
        deadline = call.context.deadline
        if deadline is not None and deadline <= now:
            self._refuse(call, DeadlineExceeded("the deadline passed on the way", started=False))
            return
        try:
            call.request = served.endpoint.decode(data)
        except DynbusError as error:
            error.started = False
            self._refuse(call, error)
            return
        except Exception as error:
            logger.exception("%s: the request could not be read", served.address)
            text = f"the request could not be read: {type(error).__name__}: {error}"
            self._refuse(call, InvalidRequest(text, started=False))
            return
        verdict = served.admission.enter(call)
        if verdict is Verdict.REFUSE:
            overloaded = Overloaded(
                f"{served.admission.running} calls run and {served.admission.waiting} wait",
                retry_after=served.retry_after(),
                started=False,
            )
            self._refuse(call, overloaded)
            return
        self._load += 1
        self._idle.clear()
        if telemetry is not None:
            telemetry.in_flight(served.address, 1)
        if deadline is not None:
            call.deadline_number = self._deadlines.arm(deadline, now, call.expire)
        if verdict is Verdict.RUN:
            self._run(call)

    def _refuse(self, call: ServerCall, error: DynbusError) -> None:
        call.fail(error)
        self._retire(call)
        served = call.served
        served.finished(0.0, error)
        if call.observation is not None:
            call.observation.end(error)

    # Running -------------------------------------------------------------------------------

    def _run(self, call: ServerCall) -> None:
        work = self._stream(call) if call.served.endpoint.streaming else self._answer(call)
        task = self.bus.loop.create_task(work, context=self._variables.copy())
        call.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: ServerCall) -> None:
        """Run a unary handler."""
        token = self._enter(call)
        endpoint = call.served.endpoint
        try:
            call.end(endpoint.encode(await endpoint.invoke(call.request)))
        except BaseException as error:
            if not self._conclude(call, error):
                raise
        finally:
            self._leave(call, token)

    async def _stream(self, call: ServerCall) -> None:
        """Run a streaming handler and send what it yields, as fast as the reader allows."""
        token = self._enter(call)
        bus = self.bus
        push = call.push
        encode = call.served.endpoint.encode
        observation = call.observation
        left = 1  # the first item goes out before the second is asked for
        try:
            items = call.served.endpoint.invoke(call.request)
            try:
                async for item in items:
                    may_go_on = push(encode(item))
                    if observation is not None:
                        observation.items(1)
                    left -= 1
                    if not may_go_on:
                        await call.writable()
                        if call.ended:
                            break
                    elif left <= 0:
                        # A turn of the loop is shared by all streams that never wait.
                        left = max(LEAST_TURN_ITEMS, TURN_ITEMS // self._load)
                        if bus.data.backlog > HIGH_BACKLOG:
                            await bus.data.drained(timeout=bus.config.reader_stall_timeout)
                        else:
                            await asyncio.sleep(0)
            finally:
                await items.aclose()
            call.end()
        except BaseException as error:
            if not self._conclude(call, error):
                raise
        finally:
            self._leave(call, token)

    def _enter(self, call: ServerCall) -> Any:
        call.entered = True
        enter_context(call.context)
        return call.observation.activate() if call.observation is not None else None

    def _leave(self, call: ServerCall, token: Any) -> None:
        if call.observation is not None:
            call.observation.deactivate(token)
        self._left(call)

    def _conclude(self, call: ServerCall, error: BaseException) -> bool:
        """End a call as its handler's exception says; False when that must go on upwards."""
        if isinstance(error, DynbusError):
            call.fail(self._outgoing(error))
        elif isinstance(error, GeneratorExit):
            call.fail(Migrate("the handler asks for another instance"))
        elif isinstance(error, asyncio.CancelledError):
            call.fail(Cancelled("the handler was cancelled"))
            return call.context.is_killed()
        elif isinstance(error, Exception):
            call.fail(self._handler_error(call, error))
        else:
            call.fail(Draining("the instance was stopped"))
            return False
        return True

    def _handler_error(self, call: ServerCall, error: Exception) -> DynbusError:
        logger.exception(
            "%s raised in request %s", call.served.address, call.context.id, exc_info=error
        )
        failure = HandlerError(f"{type(error).__name__}: {error}")
        if self.bus.config.debug:
            import traceback

            failure.remote_traceback = "".join(traceback.format_exception(error))
        return failure

    @staticmethod
    def _outgoing(error: DynbusError) -> DynbusError:
        """A handler's own or a sub-call's error, as this hop's caller may see it."""
        # The handler did run, whatever a sub-call said of itself.
        error.started = True
        return error

    def _left(self, call: ServerCall) -> None:
        """A handler has been left, or will never be entered."""
        if not call.ended:
            call.fail(Cancelled("the handler was cancelled"))
        self._settle(call)
        following = call.served.admission.leave()
        if following is not None:
            self._run(following)

    def _settle(self, call: ServerCall) -> None:
        """Account for a call that neither runs nor waits any longer."""
        if call.deadline_number is not None:
            self._deadlines.disarm(call.deadline_number, call.expire)
        if call.kill_timer is not None:
            call.kill_timer.cancel()
        seconds = monotonic() - call.started_at if call.entered else 0.0
        call.served.finished(seconds, call.error)
        if call.observation is not None:
            call.observation.end(call.error)
        self._retire(call)
        if self.bus.telemetry is not None:
            self.bus.telemetry.in_flight(call.served.address, -1)
        self._load -= 1
        if self._load == 0:
            self._idle.set()

    def _retire(self, call: ServerCall) -> None:
        """Forget a call; only what its reader has not acknowledged is kept."""
        if isinstance(call, FramedCall):
            number = call.writer.number
            call.peer.parts.pop(number, None)
            if call.peer.calls.pop(number, None) is not None and not call.released:
                call.peer.kept[number] = call.writer
        else:
            self._plain.discard(call)

    def expire(self, call: ServerCall) -> None:
        """The deadline of a call passed."""
        if call.ended:
            return
        waited = call.task is None
        message = (
            "the deadline passed while the call waited"
            if waited
            else ("the deadline passed while the handler ran")
        )
        call.fail(DeadlineExceeded(message, started=not waited))
        self._kill(call)

    def _kill(self, call: ServerCall) -> None:
        """Drop a call now, wherever it is."""
        call.context.kill()
        if call.task is not None:
            call.task.cancel()
            if not call.entered:
                # A task that is cancelled before its first step never enters its body.
                call.entered = True
                self._left(call)
        elif call.served.admission.withdraw(call):
            self._settle(call)
        else:
            # Parts of its request are still to come.
            self._retire(call)

    # Cancellation and death ------------------------------------------------------------------

    def cancel(self, call: ServerCall, kill_after: float) -> None:
        """Stop a call, and kill it `kill_after` seconds later unless that is negative."""
        if call.ended:
            return
        if self.bus.telemetry is not None:
            kind = "kill" if kill_after == 0 else "stop"
            self.bus.telemetry.cancellation(call.served.address, kind)
        if kill_after == 0:
            call.fail(Cancelled("the caller cancelled the call"))
            self._kill(call)
            return
        call.context.stop_generating()
        if call.observation is not None:
            call.observation.cancelled()
        if kill_after > 0 and call.kill_timer is None:
            call.kill_timer = self.bus.loop.call_later(kill_after, self.cancel, call, 0.0)

    def reader_gone(self, call: ServerCall) -> None:
        """Whoever reads this call's results does not exist any longer."""
        self.bus.drop(DropReason.READER_GONE)
        self.cancel(call, 0.0)

    def client_gone(self, peer: ClientPeer) -> None:
        """A client died: stop its calls and forget it, but know them should it come back."""
        if self.registry.peers.get(peer.client_id) is peer:
            del self.registry.peers[peer.client_id]
        for number in (*peer.calls, *peer.kept):
            writer = peer.writer(number)
            if writer is not None:
                _remember(self._forgotten, (peer.client_id, number), writer.secret)
        for call in list(peer.calls.values()):
            if not call.ended:
                kind = StreamLost if call.served.endpoint.streaming else UnknownOutcome
                call.fail(kind("the instance took its caller for dead"))
                self._kill(call)
        peer.kept.clear()

    # Results ---------------------------------------------------------------------------------

    def schedule_flush(self, peer: ClientPeer) -> None:
        """Send what `peer` has to get at the end of this turn of the loop."""
        self._dirty.append(peer)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.bus.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._flushes += 1
        peers, self._dirty = self._dirty, []
        for peer in peers:
            try:
                self.flush_peer(peer)
            except Exception:
                # The other clients must get theirs; this one asks for what it misses.
                logger.exception("results for %s could not be sent", peer.base)

    def flush_peer(self, peer: ClientPeer) -> None:
        """Send everything that is ready for one client, in as few messages as it fits."""
        writers, peer.dirty = peer.dirty, []
        peer.ended = 0
        limit = room = min(FLUSH_BYTES, self.bus.data.max_payload - 3 * BATCH_OVERHEAD)
        frames: list[Frame] = []
        for writer in writers:
            writer.dirty = False
            frame = writer.take_items(room)
            if frame is not None:
                frames.append(frame)
                room -= writer.taken_bytes + FRAME_OVERHEAD
                continue
            while writer.has_fresh:
                frames += writer.take(room)
                room -= writer.taken_bytes + FRAME_OVERHEAD
                if room <= 0 or writer.has_fresh:
                    self._send(peer, frames)
                    frames, room = [], limit
        if frames:
            self._send(peer, frames)

    def _send(self, peer: ClientPeer, frames: list[Frame]) -> None:
        self.bus.data.publish(
            peer.frames_subject,
            encode_batch(self.instance_id, self.bus.incarnation, self.load, frames),
            reply=peer.bounce,
        )

    # Control ---------------------------------------------------------------------------------

    def _on_control(self, batch: Batch) -> None:
        peer = self.registry.peers.get(batch.sender.rpartition(".")[2])
        for frame in batch.frames:
            if isinstance(frame, Open):
                if peer is not None:
                    self._on_open(peer, batch.incarnation, frame)
                elif frame.calls:
                    # None of them is here; told so twice the client asks for each.
                    self._answer_control(batch.sender, Heartbeat(0.0, self.draining, []))
            elif isinstance(frame, Credit | Cancel | Resume):
                self._on_call_control(peer, batch.sender, frame)

    def _on_open(self, peer: ClientPeer, incarnation: str, frame: Open) -> None:
        if incarnation != peer.incarnation:
            self.bus.drop(DropReason.STALE)
            return
        for number, secret in frame.done:
            writer = peer.writer(number)
            if writer is None:
                # A request that is still on its way, or waits in front of a blocked loop.
                _remember(self._refused, (peer.client_id, number), secret)
            elif writer.secret == secret:
                self._release(peer, number)
        known = dict(frame.calls)
        newest = max(known, default=-1)
        now = monotonic()
        missing: dict[int, int] = {}
        for number in (*peer.calls, *peer.kept):
            if number in known:
                # Soon and often: what is kept for long is memory that is never warm.
                writer = peer.writer(number)
                if writer is not None:
                    writer.acknowledge(known[number])
                continue
            call = peer.calls.get(number)
            # A request may overtake a heartbeat that was written before it.
            young = call is not None and now - call.started_at < ARRIVAL_GRACE
            if call is not None and (call.released or (number > newest and young)):
                continue
            # The reader does not list it: a cancel or an acknowledgement was lost on the way.
            missing[number] = peer.missing.get(number, 0) + 1
        peer.missing = missing
        for number, beats in missing.items():
            if beats < LOST_CANCEL_BEATS:
                continue
            call = peer.calls.get(number)
            if call is not None and not call.ended:
                # Not a tidy end: should the reader be there after all, it must not take it for
                # the end of the stream.
                call.fail(Cancelled("the caller does not list the call any longer"))
                self._kill(call)
            self._release(peer, number)

    def _release(self, peer: ClientPeer, number: int) -> None:
        """The reader has all that it wants of a call."""
        peer.kept.pop(number, None)
        call = peer.calls.get(number)
        if call is not None:
            call.released = True
            if call.kill_timer is None:
                # The cancel that a reader sends when it leaves was lost on the way.
                self.cancel(call, KILL_AFTER)

    def _on_call_control(
        self, peer: ClientPeer | None, sender: str, frame: Credit | Cancel | Resume
    ) -> None:
        writer = peer.writer(frame.number) if peer is not None else None
        if peer is None or writer is None:
            if isinstance(frame, Resume):
                self._say_unknown(sender, frame)
            elif isinstance(frame, Cancel):
                # A request that is still on its way, or waits in front of a blocked loop.
                self._refuse_request(sender, frame)
            return
        if writer.secret != frame.secret or writer.attempt != frame.attempt:
            self.bus.drop(DropReason.STALE)
            return
        call = peer.calls.get(frame.number)
        if isinstance(frame, Credit):
            writer.credit(frame.granted, frame.received)
            if call is not None and not writer.blocked:
                call.wake()
        elif isinstance(frame, Cancel):
            if call is not None:
                self.cancel(call, min(frame.kill_after, MAX_KILL_AFTER))
        elif call is not None and frame.number in peer.parts:
            # Parts of the request were lost: it has not begun, and is to be sent anew.
            call.released = True
            self._kill(call)
            self._say_unknown(sender, frame)
        elif writer.resume(frame.resume_from):
            if writer.has_fresh:
                peer.touch(writer)
        else:
            self._say_unknown(sender, frame)

    def _say_unknown(self, sender: str, frame: Resume) -> None:
        """Tell a client that its request is not here, and never accept it any more."""
        if self._forgotten.get((sender.rpartition(".")[2], frame.number)) == frame.secret:
            self._say_forgotten(sender, frame)
            return
        self._refuse_request(sender, frame)
        self._answer_control(sender, Unknown(frame.number, frame.secret, frame.attempt))

    def _say_forgotten(self, sender: str, frame: Resume) -> None:
        """Tell a client that was taken for dead that its request did begin here."""
        subject = f"{sender}.f"
        if not is_safe_reply(subject, self.bus.config.reply_prefixes):
            self.bus.drop(DropReason.UNSAFE_REPLY)
            return
        kind = StreamLost if frame.resume_from else UnknownOutcome
        failed = failed_frame(
            frame.number,
            frame.secret,
            frame.attempt,
            frame.resume_from,
            kind(
                "the instance took its caller for dead",
                hop=f"{self.namespace}.{self.component}@{self.instance_id}",
            ),
        )
        batch = encode_batch(self.instance_id, self.bus.incarnation, self.load, [failed])
        self.bus.data.publish(subject, batch)

    def _refuse_request(self, sender: str, frame: Cancel | Resume) -> None:
        if len(frame.secret) == SECRET_BYTES:
            only_stops = isinstance(frame, Cancel) and frame.kill_after < 0
            memory = self._stopped if only_stops else self._refused
            _remember(memory, (sender.rpartition(".")[2], frame.number), frame.secret)

    def _answer_control(self, sender: str, frame: Frame) -> None:
        """Send one frame to the control lane of a client that need not have calls here."""
        subject = f"{sender}.ctl.f"
        if not is_safe_reply(subject, self.bus.config.reply_prefixes):
            self.bus.drop(DropReason.UNSAFE_REPLY)
            return
        batch = encode_batch(self.instance_id, self.bus.incarnation, self.load, [frame])
        self.bus.lane.call(self.bus.lane.connection.publish, subject, batch)

    def _on_state(self, state: ConnectionState) -> None:
        if state is not ConnectionState.CONNECTED:
            return
        # Bytes of the last moments may be lost; whoever misses some asks, see `Resume`.
        for peer in list(self.registry.peers.values()):
            for writer in (*(call.writer for call in peer.calls.values()), *peer.kept.values()):
                if writer.has_fresh:
                    peer.touch(writer)

    def _sweep(self) -> None:
        """End streams whose handler or reader has done nothing for too long, and forget
        clients that have had no call here for a while."""
        now = monotonic()
        for client_id, peer in list(self.registry.peers.items()):
            if peer.calls or peer.kept or peer.dirty:
                peer.busy_at = now
            elif now - peer.busy_at > IDLE_PEER_SECONDS:
                del self.registry.peers[client_id]
        for call in self._all_calls():
            if call.ended or call.task is None or not call.served.endpoint.streaming:
                continue
            idle = call.served.endpoint.idle_timeout
            if call.blocked_since is not None:
                if now - call.blocked_since > self.bus.config.reader_stall_timeout:
                    call.fail(ReaderStalled("the reader granted no credit"))
                    self._kill(call)
            elif call.has_progressed():
                call.last_progress = now
            elif idle is not None and now - call.last_progress > idle:
                call.fail(DeadlineExceeded(f"the handler yielded nothing for {idle} s"))
                self._kill(call)
        self._sweeper = self.bus.loop.call_later(SWEEP_INTERVAL, self._sweep)

    def _all_calls(self) -> list[ServerCall]:
        calls = list(self._plain)
        for peer in self.registry.peers.values():
            calls.extend(peer.calls.values())
        return calls


def _nothing() -> None:
    """There is nothing to end yet."""


def _remember(memory: dict[tuple[str, int], bytes], key: tuple[str, int], secret: bytes) -> None:
    memory[key] = secret
    if len(memory) > REMEMBERED_REQUESTS:
        del memory[next(iter(memory))]


def _parse_framing(framing: str) -> tuple[bytes, int, str]:
    """The (secret, window, incarnation of the client) of a `Dynbus-Frames` header.

    Raises:
        InvalidRequest: it is not one of version 1.
    """
    words = framing.split(" ")
    if len(words) >= 4 and words[0] == _VERSION_WORD and len(words[1]) == 2 * SECRET_BYTES:
        try:
            return bytes.fromhex(words[1]), int(words[2]), words[3]
        except ValueError:
            pass
    raise InvalidRequest(f"{headers.FRAMES}: {framing[:80]!r} is not of version {VERSION}")


def _request_id(text: str | None) -> str:
    """A request id as given, unless it could not be sent on as a header."""
    if text and len(text) <= 128 and text.isascii() and text.isprintable():
        return text
    return random_id()


def _trace_headers(fields: dict[str, str]) -> dict[str, str]:
    found = {headers.TRACEPARENT: fields[headers.TRACEPARENT]}
    for key in (headers.TRACESTATE, headers.BAGGAGE):
        if key in fields:
            found[key] = fields[key]
    return {
        key: text
        for key, text in found.items()
        if len(text) <= 4096 and text.isascii() and text.isprintable()
    }


def _small_number(text: str, default: int) -> int:
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 6 else default
