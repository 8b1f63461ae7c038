"""The serving side: takes requests for the endpoints of one instance, from `start` over a drain to
`stop`.

`InstanceServer` puts the parts together: `requests` reads what arrives, the `Ledger` says what
is to be done with it, `Execution` runs it, `Outbox` sends the results, `ServerControl` hears what
clients say of their calls. Everything here runs on the main loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Set
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Final

import anyio

from dynbus.bus.clock import monotonic
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import (
    ConfigError,
    Draining,
    DynbusError,
    InvalidRequest,
    PayloadTooLarge,
    StreamLost,
)
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.cancellation import OPERATOR, EndedCall
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import EndpointName, InstanceName, is_safe_reply, turn_taker
from dynbus.bus.protocol.stream_writer import StreamWriter
from dynbus.bus.transport import ConnectionState, Message, Subscription

from .calls import Call, ServedEndpoint
from .contracts import contracts_endpoint
from .control import STOP_TIMEOUT, ProofAnswer, ServerControl
from .execution import Execution, describe_calls
from .ledger import (
    Abort,
    Action,
    Dropped,
    FramedCall,
    GoOn,
    Ledger,
    MakeSure,
    NothingHere,
    Refuse,
    RemoteClient,
    Send,
    Stop,
    Tell,
)
from .outbox import ClientOutbox, Outbox
from .proofs import Proofs
from .reply import FramedReply, PlainReply, error_block
from .requests import read_context, read_fields, read_framing, read_part, read_reply

if TYPE_CHECKING:
    from dynbus.bus.bus import Bus
    from dynbus.bus.context import Context

logger = logging.getLogger(__name__)

SWEEP_INTERVAL: Final = 0.5
HAND_ON_AFTER: Final = 0.25
"""Seconds of a drain until all instances that drain together know that of each other, and callers
choose none of them."""
WAVE_INTERVAL: Final = 0.1
WAVES: Final = 8
LEAST_WAVE: Final = 16
"""Streams that are handed on at a time at least: an eighth of them, so that all go in a second."""


class InstanceServer:
    """Serves the endpoints of one instance, between `start` and `stop`.

    Attributes:
        execution: the calls that run or wait.
        ledger: the clients that made them, and what they are owed.
    """

    def __init__(
        self,
        bus: Bus,
        name: InstanceName,
        endpoints: Iterable[Endpoint],
    ) -> None:
        self.bus = bus
        self.name = name
        self._has_subscribed = False
        self.served: dict[str, ServedEndpoint] = {}
        contracts = contracts_endpoint(self.served)
        # Clients' own tokens never begin with `_`.
        subject = EndpointName(name.namespace, name.component, contracts.name)
        self._contracts = ServedEndpoint(subject, contracts, name.instance_id)
        self._outbox = Outbox(
            bus, name.instance_id, lambda: self.execution.load, self._does_not_fit
        )
        config = bus.config
        self.ledger = Ledger(
            str(name),
            max_request_bytes=config.max_request_bytes,
            instance_window=config.instance_window,
            reply_prefixes=config.reply_prefixes,
            open_outbox=self._open_outbox,
        )
        cancelled = bus.cancels.hear(name.namespace)
        self.execution = Execution(bus, name.instance_id, cancelled, self.ledger.finish)
        self._is_draining = self.execution.is_draining
        for endpoint in endpoints:
            self.add(endpoint)
        self.control = ServerControl(
            bus,
            name,
            self.ledger,
            self.execution,
            self._outbox,
            self._carry_out,
            self._answered,
        )
        self._proofs = Proofs(config.principal, config.max_request_bytes)
        self._queue_subscriptions: list[Subscription] = []
        self._subscriptions: list[Subscription] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._stop_listening: Callable[[], None] = _nothing

    def __repr__(self) -> str:
        state = "draining" if self.execution.draining else "serving"
        running, waiting = self._counts()
        return (
            f"<InstanceServer {self.name} [{state} | calls: {running} running, {waiting} waiting]>"
        )

    def add(self, endpoint: Endpoint) -> None:
        """Serve an endpoint: from the start on, or from now on where that is over.

        Raises:
            ConfigError: there is one of that name already.
        """
        if endpoint.name in self.served:
            raise ConfigError(f"{self.name} has two endpoints {endpoint.name!r}")
        address = EndpointName.of(self.name.namespace, self.name.component, endpoint.name)
        served = ServedEndpoint(address, endpoint, self.name.instance_id)
        self.execution.gather(served)
        self.served[endpoint.name] = served
        if self._has_subscribed:
            self._subscribe(served)

    async def start(self) -> None:
        """Subscribe; when this returns the server knows all of it.

        Raises:
            PermissionDenied: the server refuses one of the subjects.
        """
        data = self.bus.data
        self.bus.cancels.add(self._cancel_requests)
        await self.control.start()
        ask = self._contracts.address.at(self.name.instance_id)
        self._subscriptions.append(data.subscribe(ask, partial(self._receive, self._contracts)))
        self._has_subscribed = True
        for served in self.served.values():
            self._subscribe(served)
        await data.barrier()
        self.ledger.note_subscribed(monotonic())
        self._stop_listening = data.on_state(self._on_state)
        self._sweeper = self.bus.loop.call_later(SWEEP_INTERVAL, self._sweep)

    def _subscribe(self, served: ServedEndpoint) -> None:
        data = self.bus.data
        receive = partial(self._receive, served)
        self._subscriptions.append(
            data.subscribe(served.address.at(self.name.instance_id), receive)
        )
        self._queue_subscriptions.append(
            data.subscribe(str(served.address), receive, queue=self.name.component)
        )

    def _open_outbox(self, key: str, base: str) -> ClientOutbox:
        bounce = self.bus.replies.bounce(self.control.registry.bounce_token(key))
        return ClientOutbox(self._outbox, key, base, bounce)

    def _counts(self) -> tuple[int, int]:
        """The calls that run, and those that wait."""
        admissions = [served.admission for served in self.served.values()]
        return sum(each.running for each in admissions), sum(each.waiting for each in admissions)

    async def drain(
        self, grace: float, has_other: Callable[[EndpointName], bool] | None = None
    ) -> None:
        """Take no more calls, let those that are here finish within `grace` seconds, then end
        the rest with `Draining`.

        Streams with which their callers can go on at another instance are handed on as soon as
        there is one.

        Args:
            has_other: whether another instance takes calls of an endpoint; None for nobody knows.
        """
        # Plain clients do not try again, so what is on its way to us is still served.
        await _drain_all(self._queue_subscriptions)
        self.execution.begin_draining()
        with anyio.move_on_after(grace) as limit:
            async with anyio.create_task_group() as tasks:
                if has_other is not None:
                    tasks.start_soon(self._hand_on, has_other)
                await self.execution.idle()
                tasks.cancel_scope.cancel()
        counts = self._counts()
        # Without any grace it is cut short even where nothing runs.
        if limit.cancelled_caught and any(counts):
            logger.warning(
                "%s: %s after %g s of draining; they are ended",
                *(self.name, describe_calls(*counts), round(grace, 1)),
            )
        self.end_all("the instance is going away")

    async def _hand_on(self, has_other: Callable[[EndpointName], bool]) -> None:
        """End streams that go on elsewhere, some at a time, so that the others are not flooded."""
        await anyio.sleep(HAND_ON_AFTER)
        while True:
            movable = [
                call
                for call in self.ledger.calls()
                if call.can_move and not call.ended and has_other(call.served.address)
            ]
            if movable:
                logger.info(
                    "%s: %s handed on to other instances",
                    *(self.name, f"{n} streams are" if (n := len(movable)) > 1 else "1 stream is"),
                )
            wave = max(LEAST_WAVE, ceil(len(movable) / WAVES))
            for first in range(0, len(movable), wave):
                for call in movable[first : first + wave]:
                    if not call.ended:
                        self.execution.hand_on(call)
                await anyio.sleep(WAVE_INTERVAL)
            if not movable:
                await anyio.sleep(WAVE_INTERVAL)

    def end_all(self, why: str, *, broken: bool = False) -> None:
        """Take no more calls, and end every call now with `Draining`.

        Args:
            broken: whether one of them may have been the cause. Streams that go on elsewhere end
                with `StreamLost` then, which their callers count.
        """
        self.execution.draining = True
        for call in self.ledger.calls():
            if not call.ended:
                kind = StreamLost if broken and call.can_move else Draining
                self.execution.abort(call, kind(why))

    async def stop(self) -> None:
        """End what is left, say so, and unsubscribe."""
        self.end_all("the instance was stopped")
        try:
            await self.execution.stop()
            # What is on its way to us is refused, not lost: its callers try elsewhere at once.
            await _drain_all((*self._queue_subscriptions, *self._subscriptions))
            self._outbox.flush()
            await self.control.drain()
            if self.bus.data.state is ConnectionState.CONNECTED:
                await self.bus.data.barrier(timeout=STOP_TIMEOUT)
        except DynbusError as error:
            logger.warning("%r: the server did not confirm its stop: %s", self, error)
        finally:
            self._stop_listening()
            self.bus.cancels.remove(self._cancel_requests)
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
            if framing is not None:
                self._receive_framed(served, fields, framing, message, now)
                return
            call = self._plain_call(served, fields, message.reply, now)
        except DynbusError as error:
            self.bus.drop(DropReason.MALFORMED)
            logger.debug("%s: %s", served.address, error)
            if is_safe_reply(message.reply, self.bus.config.reply_prefixes):
                error.hop = served.hop
                self.bus.data.publish(message.reply, b"", headers=error_block(error, framing))
            return
        if call is None:
            return
        if (allowed := served.endpoint.allow) is not None:
            # Plain clients have no part in proofs.
            self.execution.refuse(call, self._proofs.of_nobody(allowed))
            return
        self.execution.admit(call, message.data, now)

    def _receive_framed(
        self,
        served: ServedEndpoint,
        fields: dict[str, str],
        framing: str,
        message: Message,
        now: float,
    ) -> None:
        """Take in a request of a dynbus client, or a part of one.

        Raises:
            InvalidRequest: it is not of the form that it should have.
        """
        base, number = read_reply(message.reply)
        secret, window, incarnation = read_framing(framing)
        context = read_context(
            fields,
            timeout=served.endpoint.timeout,
            hop=served.hop,
            draining=self._is_draining,
            now=now,
        )
        lookup = self.ledger.find(base, incarnation, number, secret, now)
        part = fields.get(headers.PART)
        if type(lookup) is RemoteClient:
            call = self._framed_call(served, context, lookup, number, secret, window, now)
            actions = self.ledger.begin(call)
            if actions:
                # One that is not to begin is ended by that.
                self._carry_out(actions)
                return
        elif isinstance(lookup, Dropped):
            self.bus.drop(lookup.reason)
            return
        elif part is None:
            # The rest of a request in parts is parts.
            self.bus.drop(DropReason.STALE)
            return
        else:
            assert isinstance(lookup, FramedCall)
            call = lookup
        data = message.data
        if part is not None:
            try:
                index, count = read_part(part)
            except InvalidRequest:
                self.ledger.forget(call)
                raise
            whole, actions = self.ledger.part(call, index, count, data)
            self._carry_out(actions)
            if whole is None:
                return
            data = whole
        if served.endpoint.allow is None:
            self.execution.admit(call, data, now)
        else:
            self._admit_allowed(call, served.endpoint.allow, data, now)

    def _admit_allowed(
        self, call: FramedCall, allowed: Collection[str], data: bytes, now: float
    ) -> None:
        """Let a call of an endpoint that is not for everybody run or wait, if its caller may call
        it, and as soon as that is proven.
        """
        client = call.client
        if (refusal := self._proofs.refusal(client.principal, allowed)) is not None:
            self.execution.refuse(call, refusal)
        elif self._proofs.is_proven(client):
            call.context.principal = client.principal
            self.execution.admit(call, data, now)
        else:
            is_to_be_asked, refused = self._proofs.hold(call, data)
            if is_to_be_asked:
                self.control.ask_for_proof(client)
            self._refuse_all(refused)

    def _answered(self, answer: ProofAnswer) -> None:
        """A client answers the question whose it is."""
        client, token = answer
        now = monotonic()
        for held in self._proofs.proven(client, token):
            if not held.call.ended:
                held.call.context.principal = client.principal
                self.execution.admit(held.call, held.data, now)

    def _refuse_all(self, refused: Iterable[tuple[FramedCall, DynbusError]]) -> None:
        for call, error in refused:
            if not call.ended:
                self.execution.refuse(call, error)

    def _plain_call(
        self, served: ServedEndpoint, fields: dict[str, str], reply: str, now: float
    ) -> Call | None:
        """The call of a plain NATS client; None for one that cannot be answered."""
        if not is_safe_reply(reply, self.bus.config.reply_prefixes):
            self.bus.drop(DropReason.UNSAFE_REPLY if reply else DropReason.NO_REPLY)
            return None
        context = read_context(
            fields,
            timeout=served.endpoint.timeout,
            hop=served.hop,
            draining=self._is_draining,
            now=now,
        )
        port = PlainReply(self.bus, served.address, served.hop, context.id, now, reply)
        call = Call(
            served,
            context,
            port,
            now,
            # Anybody may ask to be answered at anybody's inbox; a call of a dynbus client shares
            # no turns with such requests.
            turn_taker=f"plain {turn_taker(reply)}",
            account=self.ledger.plain_account,
        )
        port.when_gone(partial(self.execution.reader_gone, call))
        self.ledger.plain.add(call)
        return call

    def _framed_call(
        self,
        served: ServedEndpoint,
        context: Context,
        client: RemoteClient,
        number: int,
        secret: bytes,
        window: int,
        now: float,
    ) -> FramedCall:
        """The call of a dynbus client's new request."""
        config = self.bus.config
        most = config.stream_window
        writer = StreamWriter(
            number,
            secret,
            context.attempt,
            granted=window if 0 <= window < most else most if window > 0 else 0,
            max_unit_bytes=self._outbox.max_unit_bytes(),
            max_item_bytes=config.max_item_bytes,
            unread=client.unread,
            on_dirty=client.on_dirty,
            on_blocked=client.on_blocked,
        )
        port = FramedReply(
            self.bus, served.address, served.hop, context.id, now, writer, client.outbox
        )
        return FramedCall(served, context, port, now, client, writer)

    def _cancel_requests(self, namespace: str, ids: Set[str]) -> list[EndedCall]:
        """End what an operator cancels, whether it runs or waits."""
        if namespace != self.name.namespace:
            return []
        ended: list[EndedCall] = []
        for call in self.ledger.calls():
            if call.context.id in ids and not call.ended:
                self.execution.cancel(call, 0.0, OPERATOR)
                ended.append(EndedCall(call.context.id, str(self.name)))
        return ended

    # What the ledger asks for ------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        execution, control = self.execution, self.control
        for action in actions:
            match action:
                case GoOn(call):
                    call.reply.go_on()
                case Send(client, writer):
                    client.outbox.touch(writer)
                case Stop(call, kill_after):
                    execution.cancel(call, kill_after)
                case Abort(call, error):
                    execution.abort(call, error)
                case Refuse(call, error):
                    execution.refuse(call, error)
                case Dropped(reason):
                    self.bus.drop(reason)
                case MakeSure(inquiry):
                    control.make_sure(inquiry)
                case Tell(sender, frame):
                    control.tell(sender, frame)
                case NothingHere():
                    control.tell_nothing_here(action)
                case _:
                    control.send_failed(action.sender, action.frame)

    def _does_not_fit(
        self, outbox: ClientOutbox, writer: StreamWriter, error: PayloadTooLarge
    ) -> None:
        """End a call of which a piece fits no message any longer."""
        client = self.ledger.clients.get(outbox.key)
        call = client.calls.get(writer.number) if client is not None else None
        if call is not None:
            call.reply.label(error)
        writer.give_up(error, self._outbox.max_unit_bytes())
        if call is not None and not call.ended:
            self.execution.abort(call, error)
        else:
            outbox.touch(writer)

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._carry_out(self.ledger.reconnected(self._outbox.max_unit_bytes()))

    def _sweep(self) -> None:
        """End streams that are stuck, forget clients that are idle."""
        now = monotonic()
        cut_off = self.bus.data.state is not ConnectionState.CONNECTED
        self._carry_out(self.ledger.sweep(now, cut_off=cut_off))
        for call in self.ledger.calls():
            self.execution.end_if_stuck(call, now)
        lane_cut_off = self.bus.lane.connection.state is not ConnectionState.CONNECTED
        unproven, refused = self._proofs.sweep(cut_off=cut_off or lane_cut_off)
        self._refuse_all(refused)
        for client in unproven:
            self.control.ask_for_proof(client)
        self._sweeper = self.bus.loop.call_later(SWEEP_INTERVAL, self._sweep)


def _nothing() -> None:
    """There is nothing to end yet."""


async def _drain_all(subscriptions: Iterable[Subscription]) -> None:
    """Drain each of them, whatever becomes of the others.

    Raises:
        DynbusError: what the first of those raised that could not be drained.
    """
    errors: list[DynbusError] = []

    async def drain(subscription: Subscription) -> None:
        try:
            await subscription.drain(timeout=STOP_TIMEOUT)
        except DynbusError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        for subscription in subscriptions:
            tasks.start_soon(drain, subscription)
    if errors:
        raise errors[0]
