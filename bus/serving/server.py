"""The serving side: takes requests for the endpoints of one instance, from `start` to `stop`.

`InstanceServer` puts the parts together: `requests` reads what arrives, `Execution` runs it,
`Outbox` sends the results, `ServerControl` hears what clients say of their calls. Everything
here runs on the main loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from dynbus.bus.clock import monotonic
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import (
    DeadlineExceeded,
    Draining,
    DynbusError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import EndpointName, is_safe_reply, turn_taker
from dynbus.bus.protocol.stream_writer import StreamWriter
from dynbus.bus.transport import ConnectionState, Message, Subscription

from .calls import Call, ServedEndpoint
from .control import ServerControl
from .execution import Execution, calls_told
from .outbox import Outbox
from .partial_requests import Key
from .remote_client import FramedCall
from .reply import FramedReply, PlainReply, error_block
from .requests import read_context, read_fields, read_framing, read_part, read_reply

if TYPE_CHECKING:
    from dynbus.bus.bus import Bus
    from dynbus.bus.context import Context
    from dynbus.bus.heartbeats import Registry

    from .remote_client import RemoteClient

logger = logging.getLogger(__name__)

SWEEP_INTERVAL: Final = 0.5


class InstanceServer:
    """Serves the endpoints of one instance, between `start` and `stop`.

    Attributes:
        execution: the calls that run or wait.
        control: the clients that made them.
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
        self.served = {
            endpoint.name: ServedEndpoint(
                EndpointName.of(namespace, component, endpoint.name), endpoint, instance_id
            )
            for endpoint in endpoints
        }
        self.execution = Execution(bus, instance_id, self._retired)
        self._outbox = Outbox(bus, instance_id, self.execution)
        self.control = ServerControl(
            bus, namespace, component, instance_id, self.execution, self._outbox
        )
        self._queue_subscriptions: list[Subscription] = []
        self._subscriptions: list[Subscription] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._stop_listening: Callable[[], None] = _nothing

    def __repr__(self) -> str:
        state = "draining" if self.draining else "serving"
        running, waiting = self._counts()
        return (
            f"<InstanceServer {self.namespace}.{self.component}@{self.instance_id} "
            f"[{state} | calls: {running} running, {waiting} waiting]>"
        )

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self.execution.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self.execution.draining = draining

    @property
    def load(self) -> int:
        """Calls that run or wait here."""
        return self.execution.load

    @property
    def registry(self) -> Registry[RemoteClient]:
        """The dynbus clients with calls here."""
        return self.control.registry

    async def start(self) -> None:
        """Subscribe; when this returns the server knows all of it.

        Raises:
            PermissionDenied: the server refuses one of the subjects.
        """
        data = self.bus.data
        await self.control.start()
        for served in self.served.values():
            receive = partial(self._receive, served)
            self._subscriptions.append(data.subscribe(served.address.at(self.instance_id), receive))
            self._queue_subscriptions.append(
                data.subscribe(str(served.address), receive, queue=self.component)
            )
        await data.barrier()
        self.control.note_subscribed()
        self._stop_listening = data.on_state(self._on_state)
        self._sweeper = self.bus.loop.call_later(SWEEP_INTERVAL, self._sweep)

    def _retired(self, call: Call) -> None:
        self.control.retire(call)

    def _counts(self) -> tuple[int, int]:
        """The calls that run, and those that wait."""
        admissions = [served.admission for served in self.served.values()]
        return sum(each.running for each in admissions), sum(each.waiting for each in admissions)

    async def drain(self, grace: float) -> None:
        """Take no more calls, let those that are here finish within `grace` seconds, then end
        the rest with `Draining`."""
        # Plain clients do not try again, so what is on its way to us is still served.
        await _drain_all(self._queue_subscriptions)
        self.draining = True
        try:
            async with asyncio.timeout(grace):
                await self.execution.idle()
        except TimeoutError:
            logger.warning(
                "%s.%s@%s: %s after %g s of draining; they are ended",
                *(self.namespace, self.component, self.instance_id),
                *(calls_told(*self._counts()), round(grace, 1)),
            )
        self.end_all(lambda: Draining("the instance is going away"))

    def end_all(self, make_error: Callable[[], DynbusError]) -> None:
        """End every call now, each with an error of its own."""
        for call in self.control.calls():
            if not call.ended:
                self.execution.abort(call, make_error())

    async def stop(self) -> None:
        """End what is left, say so, and unsubscribe."""
        self.draining = True
        self.end_all(lambda: Draining("the instance was stopped"))
        try:
            await self.execution.stop()
            # What is on its way to us is refused, not lost: its callers try elsewhere at once.
            await _drain_all((*self._queue_subscriptions, *self._subscriptions))
            self._outbox.flush()
            if self.bus.data.state is ConnectionState.CONNECTED:
                await self.bus.data.barrier(timeout=1.0)
        except DynbusError as error:
            logger.warning("%r: the server did not confirm its stop: %s", self, error)
        finally:
            self._stop_listening()
            if self._sweeper is not None:
                self._sweeper.cancel()
            self.control.stop()

    # Requests ----------------------------------------------------------------------------

    def _receive(self, served: ServedEndpoint, message: Message) -> None:
        now = monotonic()
        framing: str | None = None
        try:
            fields = read_fields(message.headers)
            framing = fields.get(headers.FRAMES)
            if framing is None:
                plain = self._plain_call(served, fields, message.reply, now)
                if plain is not None:
                    self.execution.admit(plain, message.data, now)
                return
            call = self._framed_call(served, fields, framing, message.reply, now)
            if call is None:
                return
            data: bytes | None = message.data
            if headers.PART in fields:
                data = self._collect(call, fields[headers.PART], message.data)
            elif call.client.is_partial(call.writer.number):
                # The rest of a request in parts is parts.
                self.bus.drop(DropReason.STALE)
                return
        except DynbusError as error:
            self.bus.drop(DropReason.MALFORMED)
            logger.debug("%s: %s", served.address, error)
            if is_safe_reply(message.reply, self.bus.config.reply_prefixes):
                error.hop = served.hop
                self.bus.data.publish(message.reply, b"", headers=error_block(error, framing))
            return
        if data is not None:
            self.execution.admit(call, data, now)

    def _context(self, served: ServedEndpoint, fields: dict[str, str], now: float) -> Context:
        return read_context(
            fields,
            timeout=served.endpoint.timeout,
            hop=served.hop,
            draining=self.execution.is_draining,
            now=now,
        )

    def _plain_call(
        self, served: ServedEndpoint, fields: dict[str, str], reply: str, now: float
    ) -> Call | None:
        """The call of a plain NATS client; None for one that cannot be answered."""
        if not is_safe_reply(reply, self.bus.config.reply_prefixes):
            self.bus.drop(DropReason.UNSAFE_REPLY if reply else DropReason.NO_REPLY)
            return None
        context = self._context(served, fields, now)
        port = PlainReply(self.bus, served.address, served.hop, context.id, now, reply)
        call = Call(
            served,
            context,
            port,
            now,
            # Anybody may ask to be answered at anybody's inbox; a call of a dynbus client shares
            # no turns with such requests.
            turn_taker=f"plain {turn_taker(reply)}",
            account=self.control.plain_account,
        )
        port.when_gone(partial(self.execution.reader_gone, call))
        self.control.plain.add(call)
        return call

    def _framed_call(
        self,
        served: ServedEndpoint,
        fields: dict[str, str],
        framing: str,
        reply: str,
        now: float,
    ) -> FramedCall | None:
        """The call that a framed request begins or goes on with; None for one that is dropped."""
        base, number = read_reply(reply)
        secret, window, incarnation = read_framing(framing)
        context = self._context(served, fields, now)
        client = self.control.client(base, incarnation)
        if client is None:
            return None
        client.heard_at = now
        known = client.calls.get(number)
        if known is not None and client.is_partial(number) and known.writer.secret == secret:
            return known
        if known is not None or number in client.kept:
            self.bus.drop(DropReason.STALE)
            return None
        config = self.bus.config
        writer = StreamWriter(
            number,
            secret,
            context.attempt,
            granted=max(0, min(window, config.stream_window)),
            max_unit_bytes=self._outbox.max_unit_bytes(),
            max_item_bytes=config.max_item_bytes,
            unread=client.unread,
            on_dirty=client.note_dirty,
            on_blocked=client.note_paused,
        )
        port = FramedReply(self.bus, served.address, served.hop, context.id, now, writer, client)
        call = FramedCall(served, context, port, now, client, writer)
        client.calls[number] = call
        error = self.control.verdict(call)
        if error is not None:
            self.bus.drop(DropReason.REFUSED)
            self.execution.refuse(call, error)
            return None
        if client.unread.is_refused:
            text = (
                f"{client.unread.held} bytes of results wait for this client, and the instance has "
                "no room for more: read the open streams first"
            )
            self.execution.refuse(call, Overloaded(text, started=False))
            return None
        return call

    def _collect(self, call: FramedCall, part: str, data: bytes) -> bytes | None:
        """The whole request, or None while parts of it are still to come."""
        client, number = call.client, call.writer.number
        try:
            index, count = read_part(part)
        except InvalidRequest:
            client.calls.pop(number, None)
            client.forget_parts(number)
            raise
        incomplete = self.control.partial
        request = incomplete.add((client.key, number), index, count, data)
        most = self.bus.config.max_request_bytes
        if request.size > most:
            text = f"the request exceeds max_request_bytes = {most}"
            self.execution.refuse(call, PayloadTooLarge(text, started=False))
            return None
        whole = request.whole()
        if whole is not None:
            client.forget_parts(number)
        elif incomplete.is_too_much(client.key):
            text = "too many requests of this client are incomplete: send fewer at a time"
            self.execution.refuse(call, Overloaded(text, started=False))
        else:
            while (key := incomplete.excess()) is not None:
                text = (
                    "too many requests are incomplete, and this one has waited the longest for its "
                    "next part: send it again"
                )
                self._give_up_partial(key, Overloaded(text, started=False))
        return whole

    def _give_up_partial(self, key: Key, error: DynbusError) -> None:
        """End the call of a request that is not complete."""
        client = self.registry.remotes.get(key[0])
        call = client.calls.get(key[1]) if client is not None else None
        if call is None:
            self.control.partial.remove(key)
        else:
            self.execution.refuse(call, error)

    def _sweep_partial(self, now: float) -> None:
        """Give up the requests whose parts do not come, or whose time is over."""
        for key in self.control.partial.sweep():
            text = "parts of the request were lost on their way"
            self._give_up_partial(key, Unavailable(text, started=False))
        for client_key, number in self.control.partial:
            client = self.registry.remotes.get(client_key)
            call = client.calls.get(number) if client is not None else None
            deadline = call.context.deadline if call is not None else None
            if call is not None and deadline is not None and deadline <= now:
                text = "the deadline passed before all parts of the request had come"
                self.execution.refuse(call, DeadlineExceeded(text, started=False))

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self.control.reconnected()

    def _sweep(self) -> None:
        """End streams that are stuck, forget clients that are idle."""
        now = monotonic()
        self.control.forget_idle(now)
        self._sweep_partial(now)
        for call in self.control.calls():
            self.execution.end_if_stuck(call, now)
        self._sweeper = self.bus.loop.call_later(SWEEP_INTERVAL, self._sweep)


def _nothing() -> None:
    """There is nothing to end yet."""


async def _drain_all(subscriptions: Iterable[Subscription]) -> None:
    await asyncio.gather(*(subscription.drain(timeout=1.0) for subscription in subscriptions))
