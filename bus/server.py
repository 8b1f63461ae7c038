"""The serving side: takes requests for one instance, runs its handlers, sends results.

`InstanceServer` is the I/O around pure parts: `Admission` decides who runs, `StreamWriter`
what is sent, `PeerLiveness` who is still there. Everything here runs on the main loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from . import headers
from .admission import Admission, Verdict
from .clock import monotonic
from .context import Context, enter_context
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
    Unavailable,
)
from .heartbeats import Registry
from .names import (
    EndpointName,
    control_subject,
    is_safe_reply,
    split_request_reply,
)
from .server_calls import ClientPeer, FramedCall, PlainCall, ServerCall
from .streams import StreamWriter
from .transport import ConnectionState, Message, Subscription
from .wire import (
    BATCH_OVERHEAD,
    SECRET_BYTES,
    VERSION,
    Batch,
    Cancel,
    Credit,
    Frame,
    Open,
    Resume,
    Unknown,
    encode_batch,
)

if TYPE_CHECKING:
    from .bus import Bus

logger = logging.getLogger(__name__)

TURN_ITEMS: Final = 64
HIGH_BACKLOG: Final = 8 * 1024 * 1024
FLUSH_BYTES: Final = 256 * 1024
SWEEP_INTERVAL: Final = 0.5
MAX_PARTS: Final = 4096
REMEMBERED_REFUSALS: Final = 1024
LOST_CANCEL_BEATS: Final = 3


class ServedEndpoint:
    """An endpoint of this instance, with its admission and figures."""

    def __init__(self, address: EndpointName, endpoint: Endpoint) -> None:
        self.address = address
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
                EndpointName.of(namespace, component, endpoint.name), endpoint
            )
            for endpoint in endpoints
        }
        self.registry: Registry[ClientPeer] = Registry(instance_id, self._on_control)
        # Handlers start from the variables of whoever started the instance: those of the
        # message that happens to be read would leak one caller's into another's call.
        self._variables = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._plain: set[ServerCall] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._dirty: list[ClientPeer] = []
        self._flush_scheduled = False
        self._flushes = 0
        self._queue_subscriptions: list[Subscription] = []
        self._subscriptions: list[Subscription] = []
        self._sweeper: asyncio.TimerHandle | None = None

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
        return sum(s.admission.running + s.admission.waiting for s in self.served.values())

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
        data.on_state(self._on_state)
        self._sweeper = self.bus.loop.call_later(SWEEP_INTERVAL, self._sweep)

    async def _start_control(self) -> None:
        connection = self.bus.lane.connection
        subject = control_subject(self.namespace, self.component, self.instance_id)
        self._control_subscription = connection.subscribe(
            subject, lambda message: self.bus.heartbeats.receive(self.registry, message)
        )
        await connection.barrier()

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
        if self._sweeper is not None:
            self._sweeper.cancel()
        try:
            await self.bus.data.barrier(timeout=1.0)
        except Unavailable:
            logger.warning("%r: stopped while the bus was out of reach", self)
        self.bus.heartbeats.remove(self.registry)
        self.bus.lane.call(self._control_subscription.unsubscribe)

    # Requests ------------------------------------------------------------------------------

    def _receive(self, served: ServedEndpoint, message: Message) -> None:
        reply = message.reply
        if not is_safe_reply(reply, self.bus.config.reply_prefixes):
            self.bus.drop("unsafe_reply" if reply else "no_reply")
            return
        fields = headers.decode(message.headers)
        framing = fields.get(headers.FRAMES)
        try:
            if framing is None:
                self._admit(self._plain_call(served, fields, reply), message.data, fields)
                return
            call = self._framed_call(served, fields, framing, reply)
            if call is None:
                return
            data = self._assemble(call, fields, message.data)
        except DynbusError as error:
            self.bus.drop("malformed_request")
            logger.debug("%s: %s", served.address, error)
            return
        if data is not None:
            self._admit(call, data, fields)

    def _context(self, served: ServedEndpoint, fields: dict[str, str]) -> Context:
        deadline: float | None = None
        if served.endpoint.timeout is not None:
            deadline = monotonic() + served.endpoint.timeout
        if (text := fields.get(headers.DEADLINE)) is not None:
            try:
                given = monotonic() + int(text) / 1000
            except ValueError:
                raise InvalidRequest(f"{headers.DEADLINE}: {text[:40]!r} is no number") from None
            deadline = given if deadline is None else min(given, deadline)
        trace: dict[str, str] = {
            key: fields[key]
            for key in (headers.TRACEPARENT, headers.TRACESTATE, headers.BAGGAGE)
            if key in fields
        }
        metadata = fields.get(headers.METADATA)
        attempt = fields.get(headers.ATTEMPT, "1")
        priority = fields.get(headers.PRIORITY, "0")
        return Context(
            fields.get(headers.REQUEST_ID, "")[:128],
            deadline=deadline,
            metadata=headers.decode_metadata(metadata) if metadata else {},
            attempt=int(attempt) if attempt.isdigit() and len(attempt) < 6 else 1,
            priority=int(priority) if priority.lstrip("-").isdigit() and len(priority) < 6 else 0,
            trace_headers=trace,
            hop=served.address.hop(self.instance_id),
            draining=self._is_draining,
        )

    def _is_draining(self) -> bool:
        return self.draining

    def _plain_call(self, served: ServedEndpoint, fields: dict[str, str], reply: str) -> ServerCall:
        call = PlainCall(self, served, self._context(served, fields), reply)
        self._plain.add(call)
        return call

    def _framed_call(
        self, served: ServedEndpoint, fields: dict[str, str], framing: str, reply: str
    ) -> FramedCall | None:
        """The call that a framed request begins; None for one that is already known."""
        words = framing.split(" ")
        target = split_request_reply(reply)
        if target is None or len(words) < 3 or words[0] != str(VERSION):
            raise InvalidRequest(f"{headers.FRAMES}: {framing[:80]!r} to {reply[:80]!r}")
        base, number = target
        try:
            secret, window = bytes.fromhex(words[1]), int(words[2])
        except ValueError:
            raise InvalidRequest(f"{headers.FRAMES}: {framing[:80]!r}") from None
        if len(secret) != SECRET_BYTES:
            raise InvalidRequest(f"{headers.FRAMES}: the secret has {len(secret)} bytes")
        client_id = base.rpartition(".")[2]
        peer = self.registry.peers.get(client_id)
        if peer is None:
            peer = ClientPeer(self, base)
            self.registry.peers[client_id] = peer
        context = self._context(served, fields)
        known = peer.calls.get(number)
        if known is not None:
            return known if number in peer.parts and known.writer.secret == secret else None
        if peer.refused.get(number, 0) >= context.attempt:
            self.bus.drop("refused_request")
            return None
        config = self.bus.config
        writer = StreamWriter(
            number,
            secret,
            context.attempt,
            granted=min(window, config.stream_window),
            max_unit_bytes=min(FLUSH_BYTES, self.bus.data.max_payload - 4 * BATCH_OVERHEAD),
            max_item_bytes=config.max_item_bytes,
        )
        call = FramedCall(self, served, context, peer, writer)
        peer.calls[number] = call
        return call

    def _assemble(self, call: FramedCall, fields: dict[str, str], data: bytes) -> bytes | None:
        """The whole request, or None while parts of it are still to come."""
        part = fields.get(headers.PART)
        if part is None:
            return data
        number = call.writer.number
        index, _, count = part.partition("/")
        if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count) <= MAX_PARTS):
            call.peer.calls.pop(number, None)
            raise InvalidRequest(f"{headers.PART}: {part[:40]!r}")
        parts = call.peer.parts.setdefault(number, [None] * int(count))
        if len(parts) == int(count):
            parts[int(index) - 1] = data
        if sum(len(piece) for piece in parts if piece) > self.bus.config.max_request_bytes:
            del call.peer.parts[number]
            call.fail(
                PayloadTooLarge(
                    f"the request exceeds max_request_bytes = {self.bus.config.max_request_bytes}",
                    started=False,
                )
            )
            return None
        if any(piece is None for piece in parts):
            return None
        del call.peer.parts[number]
        return b"".join(piece for piece in parts if piece is not None)

    def _admit(self, call: ServerCall, data: bytes, fields: dict[str, str]) -> None:
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
        if deadline is not None and deadline <= monotonic():
            self._refuse(call, DeadlineExceeded("the deadline passed on the way", started=False))
            return
        try:
            call.request = served.endpoint.decode(data)
        except DynbusError as error:
            error.started = False
            self._refuse(call, error)
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
        self._idle.clear()
        if deadline is not None:
            delay = deadline - monotonic()
            call.timers.append(self.bus.loop.call_later(max(0.0, delay), self._expire, call))
        if verdict is Verdict.RUN:
            self._run(call)

    def _refuse(self, call: ServerCall, error: DynbusError) -> None:
        call.fail(error)
        self._settle(call)

    # Running -------------------------------------------------------------------------------

    def _run(self, call: ServerCall) -> None:
        call.started_at = call.last_progress = monotonic()
        task = self.bus.loop.create_task(self._handle(call), context=self._variables.copy())
        call.task = task
        self._tasks.add(task)
        # A callback rather than a `finally` in the task: a task that is cancelled before its
        # first step never enters its body.
        task.add_done_callback(partial(self._left, call))

    async def _handle(self, call: ServerCall) -> None:
        enter_context(call.context)
        observation = call.observation
        token = observation.activate() if observation is not None else None
        endpoint = call.served.endpoint
        try:
            if endpoint.streaming:
                await self._stream(call)
                call.end()
            else:
                call.end(endpoint.encode(await endpoint.invoke(call.request)))
        except DynbusError as error:
            call.fail(self._outgoing(error))
        except GeneratorExit:
            call.fail(Migrate("the handler asks for another instance"))
        except asyncio.CancelledError:
            if not call.ended:
                call.fail(Cancelled("the handler was cancelled"))
            if not call.context.is_killed():
                raise
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            call.fail(self._handler_error(call, error))
        finally:
            if observation is not None:
                observation.deactivate(token)

    async def _stream(self, call: ServerCall) -> None:
        """Send what a streaming handler yields, as fast as the reader allows."""
        bus = self.bus
        encode = call.served.endpoint.encode
        observation = call.observation
        items = call.served.endpoint.invoke(call.request)
        seen = self._flushes
        burst = TURN_ITEMS - 1  # the first item goes out before the second is asked for
        try:
            async for item in items:
                if call.ended:
                    return
                call.push(encode(item))
                call.last_progress = monotonic()
                if observation is not None:
                    observation.items(1)
                if seen != self._flushes:
                    seen = self._flushes
                    burst = 0
                burst += 1
                if call.blocked:
                    await call.writable()
                elif bus.data.backlog > HIGH_BACKLOG:
                    await bus.data.drained(timeout=bus.config.reader_stall_timeout)
                elif burst >= TURN_ITEMS:
                    burst = 0
                    await asyncio.sleep(0)
        finally:
            await items.aclose()

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

    def _left(self, call: ServerCall, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not call.ended:
            call.fail(Cancelled("the handler was cancelled"))
        self._settle(call)
        following = call.served.admission.leave()
        if following is not None:
            self._run(following)
        self._note_idle()

    def _settle(self, call: ServerCall) -> None:
        """Account for a call that neither runs nor waits any longer."""
        for timer in call.timers:
            timer.cancel()
        call.timers.clear()
        seconds = monotonic() - call.started_at if call.task is not None else 0.0
        call.served.finished(seconds, call.error)
        if call.observation is not None:
            call.observation.end(call.error)
        self._plain.discard(call)

    def _note_idle(self) -> None:
        if self.load == 0:
            self._idle.set()

    def _expire(self, call: ServerCall) -> None:
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
        elif call.served.admission.withdraw(call):
            self._settle(call)
            self._note_idle()

    # Cancellation and death ------------------------------------------------------------------

    def cancel(self, call: ServerCall, kill_after: float) -> None:
        """Stop a call, and kill it `kill_after` seconds later unless that is negative."""
        if call.ended:
            return
        if kill_after == 0:
            call.fail(Cancelled("the caller cancelled the call"))
            self._kill(call)
            return
        call.context.stop_generating()
        if call.observation is not None:
            call.observation.cancelled()
        if kill_after > 0:
            call.timers.append(self.bus.loop.call_later(kill_after, self.cancel, call, 0.0))

    def reader_gone(self, call: ServerCall) -> None:
        """Whoever reads this call's results does not exist any longer."""
        self.bus.drop("reader_gone")
        self.cancel(call, 0.0)

    def client_gone(self, peer: ClientPeer) -> None:
        """A client died: stop its calls and forget it."""
        for call in list(peer.calls.values()):
            self.cancel(call, 0.0)
        self.registry.peers.pop(peer.client_id, None)

    # Results ---------------------------------------------------------------------------------

    def schedule_flush(self, peer: ClientPeer) -> None:
        """Send what `peer` has to get at the end of this turn of the loop."""
        if len(peer.dirty) == 1:
            self._dirty.append(peer)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.bus.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._flushes += 1
        peers, self._dirty = self._dirty, []
        limit = min(FLUSH_BYTES, self.bus.data.max_payload - 3 * BATCH_OVERHEAD)
        for peer in peers:
            calls, peer.dirty = peer.dirty, []
            room = limit
            frames: list[Frame] = []
            for call in calls:
                call.dirty = False
                writer = call.writer
                while writer.has_fresh:
                    frames += writer.take(room)
                    room -= writer.taken_bytes + 48
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
                    self._on_open(peer, frame)
            elif isinstance(frame, Credit | Cancel | Resume):
                self._on_call_control(peer, batch.sender, frame)

    def _on_open(self, peer: ClientPeer, frame: Open) -> None:
        for number, secret in frame.done:
            call = peer.calls.get(number)
            if call is not None and call.writer.secret == secret:
                self.cancel(call, 0.0)
                del peer.calls[number]
                peer.parts.pop(number, None)
        known = set(frame.numbers)
        newest = max(known, default=-1)
        for number, call in list(peer.calls.items()):
            if number in known or number > newest >= 0:
                peer.missing.pop(number, None)
                continue
            # The reader does not list it: a cancel or an acknowledgement was lost on the way.
            peer.missing[number] = peer.missing.get(number, 0) + 1
            if peer.missing[number] >= LOST_CANCEL_BEATS:
                del peer.missing[number]
                self.cancel(call, 0.0)
                del peer.calls[number]

    def _on_call_control(
        self, peer: ClientPeer | None, sender: str, frame: Credit | Cancel | Resume
    ) -> None:
        call = peer.calls.get(frame.number) if peer is not None else None
        if call is None:
            if isinstance(frame, Resume):
                self._say_unknown(sender, frame)
            return
        if call.writer.secret != frame.secret or call.writer.attempt != frame.attempt:
            self.bus.drop("stale_control")
            return
        if isinstance(frame, Credit):
            call.writer.credit(frame.granted, frame.received)
            if not call.blocked:
                call.wake()
        elif isinstance(frame, Cancel):
            self.cancel(call, frame.kill_after)
        elif call.writer.resume(frame.resume_from):
            if call.writer.has_fresh:
                call.touch()
        else:
            self._say_unknown(sender, frame)

    def _say_unknown(self, sender: str, frame: Resume) -> None:
        """Tell a client that its request is not here, and never accept it any more."""
        client_id = sender.rpartition(".")[2]
        if not is_safe_reply(f"{sender}.ctl.f", self.bus.config.reply_prefixes):
            self.bus.drop("unsafe_reply")
            return
        peer = self.registry.peers.get(client_id)
        if peer is None:
            peer = ClientPeer(self, sender)
            self.registry.peers[client_id] = peer
        peer.refused[frame.number] = frame.attempt
        while len(peer.refused) > REMEMBERED_REFUSALS:
            del peer.refused[next(iter(peer.refused))]
        unknown = Unknown(frame.number, frame.secret, frame.attempt)
        self.bus.lane.call(
            partial(
                self.bus.lane.connection.publish,
                peer.control_subject,
                encode_batch(self.instance_id, self.bus.incarnation, self.load, [unknown]),
            )
        )

    def _on_state(self, state: ConnectionState) -> None:
        if state is not ConnectionState.CONNECTED:
            return
        # Bytes of the last moments may be lost; whoever misses some asks, see `Resume`.
        for peer in list(self.registry.peers.values()):
            for call in peer.calls.values():
                if call.writer.has_fresh:
                    call.touch()

    def _sweep(self) -> None:
        """End streams whose handler or reader has done nothing for too long."""
        now = monotonic()
        for call in self._all_calls():
            if call.ended or call.task is None or not call.served.endpoint.streaming:
                continue
            idle = call.served.endpoint.idle_timeout
            if call.blocked_since is not None:
                if now - call.blocked_since > self.bus.config.reader_stall_timeout:
                    call.fail(ReaderStalled("the reader granted no credit"))
                    self._kill(call)
            elif idle is not None and now - call.last_progress > idle:
                call.fail(DeadlineExceeded(f"the handler yielded nothing for {idle} s"))
                self._kill(call)
        self._sweeper = self.bus.loop.call_later(SWEEP_INTERVAL, self._sweep)

    def _all_calls(self) -> list[ServerCall]:
        calls = list(self._plain)
        for peer in self.registry.peers.values():
            calls.extend(peer.calls.values())
        return calls
