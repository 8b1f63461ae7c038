"""The control subject of an instance: what clients say of their calls, and what they are told.

Control messages reach the lane of the instance and are carried out on the main loop, where the
ledger says what is to be done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

from dynbus.bus.clock import monotonic
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import DynbusError
from dynbus.bus.heartbeats import Registry, Said
from dynbus.bus.inbox import ENTRY_COST, FRAME_COST, Inbox
from dynbus.bus.protocol.call_ranges import CALL_BYTES, heartbeat_room, split_calls
from dynbus.bus.protocol.names import InstanceName, is_safe_reply
from dynbus.bus.protocol.wire import Batch, Failed, Frame, Heartbeat, Open, Ping, encode_batch

from .ledger import Action, Inquiry, Ledger, NothingHere, RemoteClient, Sender, client_key
from .requests import PlainCancel, read_cancel

if TYPE_CHECKING:
    from dynbus.bus.background import Work
    from dynbus.bus.bus import Bus
    from dynbus.bus.transport import Message, Subscription

    from .execution import Execution
    from .outbox import Outbox

logger = logging.getLogger(__name__)

BARRIER_TIMEOUT: Final = 5.0
STOP_TIMEOUT: Final = 1.0
"""Seconds for each answer of the server while an instance stops."""
UNSURE: Final = 32768
"""Questions that may wait until all requests before them are read."""
ANSWERS_PER_TURN: Final = 256


class ProofAnswer(NamedTuple):
    """A client answers the question whose it is, with a token."""

    client: RemoteClient
    token: int


class ServerControl:
    """The control subject of one instance.

    Args:
        carry_out: does what the ledger asks for; called on the main loop.
        answered: called on the main loop when a client answers the question whose it is.

    Attributes:
        registry: the dynbus clients with calls here, by key.
    """

    def __init__(
        self,
        bus: Bus,
        name: InstanceName,
        ledger: Ledger,
        execution: Execution,
        outbox: Outbox,
        carry_out: Callable[[list[Action]], None],
        answered: Callable[[ProofAnswer], None],
    ) -> None:
        self.registry: Registry[RemoteClient] = Registry(
            name.instance_id, self, ledger.clients, bus.to_main
        )
        self._cancels: Inbox[PlainCancel] = Inbox(self._cancel_plain, bus.to_main)
        self._answers: Inbox[ProofAnswer] = Inbox(answered, bus.to_main)
        # Questions after requests that may have arrived, but were not read yet.
        self._unsure: list[Inquiry] = []
        self._making_sure: Work | None = None
        self._bus = bus
        self._ledger = ledger
        self._execution = execution
        self._outbox = outbox
        self._carry_out = carry_out
        self._name = str(name)
        self._subject = name.control_subject
        self._subscription: Subscription | None = None

    def __repr__(self) -> str:
        return f"<ServerControl {self._subject} [{len(self._unsure)} questions]>"

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

    async def drain(self) -> None:
        """Answer the questions that are on their way, and have later ones find nobody.

        A caller whose request found nobody asks once more here. If its question came to an instance
        that leaves without a word, it would have to take the call for one that may have begun.

        Raises:
            Unavailable: the control lane is not connected, or closed.
        """
        subscription, lane = self._subscription, self._bus.lane
        if subscription is None:
            return
        with anyio.move_on_after(BARRIER_TIMEOUT) as limit:
            await lane.run(subscription.drain(timeout=STOP_TIMEOUT))
            await self.registry.inbox.carried_out()
            if self._making_sure is not None:
                await self._making_sure.wait()
            # Answers go before the lane does.
            await lane.run(lane.connection.barrier(timeout=STOP_TIMEOUT))
        if limit.cancelled_caught:
            logger.warning("%s: questions of callers are not answered any more", self._name)

    def stop(self) -> None:
        """Beat and hear no more."""
        self._bus.heartbeats.remove(self.registry)
        if self._making_sure is not None:
            self._making_sure.cancel()
        if self._subscription is not None:
            self._bus.lane.call(self._subscription.unsubscribe)

    # On the lane -------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        if not message.headers:
            self._bus.heartbeats.receive(self.registry, message)
            return
        cancel = read_cancel(message.headers)
        if cancel is None:
            self._bus.to_main(self._bus.drop, DropReason.MALFORMED)
        elif not self._cancels.put("", cancel, FRAME_COST + ENTRY_COST * len(self._ledger.plain)):
            self._bus.to_main(self._bus.drop, DropReason.EXCESS)

    def key_of(self, batch: Batch) -> str:
        return client_key(batch.sender, batch.incarnation)

    def cost(self, frame: Frame, remote: RemoteClient | None) -> int | DropReason:
        return self._ledger.cost(frame, remote)

    def heard_stranger(self, batch: Batch) -> None:
        """Clients come and go."""

    def answered(self, remote: RemoteClient, token: int, at: float) -> None:
        """A client hears what is answered to its principal, if it is that which it was asked."""
        if (
            token
            and token == remote.proof
            and not self._answers.put(remote.key, ProofAnswer(remote, token), FRAME_COST)
        ):
            self._bus.to_main(self._bus.drop, DropReason.EXCESS)

    def heard_while_blocked(self, batch: Batch, remote: RemoteClient | None) -> None:
        """The requests of a client that is not known yet wait in front of the blocked main loop."""
        if remote is not None and remote.has_work():
            return
        sender = Sender(batch.sender, batch.incarnation, "")
        for frame in batch.frames:
            if isinstance(frame, Open) and frame.calls:
                self.tell_nothing_here(
                    NothingHere(sender, frame.first, frame.last), self._bus.heartbeats.blocked
                )

    def beat(self, remote: RemoteClient, number: int) -> list[Frame]:
        most = heartbeat_room(self._bus.lane.connection.max_payload) // CALL_BYTES
        blocked, draining = self._bus.heartbeats.blocked, self._execution.draining
        ranges = split_calls(remote.positions(), most)
        return [Heartbeat(number, blocked, draining, *part) for part in ranges]

    # On the main loop --------------------------------------------------------------------

    def hear(self, said: Said[RemoteClient]) -> None:
        sender = Sender(said.batch.sender, said.batch.incarnation, said.key)
        self._carry_out(self._ledger.hear(sender, said.frame, at=said.at, now=monotonic()))

    def _cancel_plain(self, cancel: PlainCancel) -> None:
        self._carry_out(self._ledger.cancel_plain(cancel))

    def returned(self, remote: RemoteClient) -> None:
        """It asks for what it misses."""

    def gone(self, remote: RemoteClient) -> None:
        dropped = len(remote.kept)
        actions = self._ledger.client_gone(remote, monotonic())
        # Callers come and go: what is left of them ends here.
        logger.log(
            logging.INFO if actions or dropped else logging.DEBUG,
            "%s: a caller is gone, %s; its calls that are cancelled: %d, its results dropped: %d",
            *(self._ledger.name, remote.label, len(actions), dropped),
        )
        self._carry_out(actions)

    def make_sure(self, inquiry: Inquiry) -> None:
        """Look again when all that the server had for us is read."""
        if len(self._unsure) >= UNSURE:
            # It is asked again at the next heartbeats.
            self._bus.drop(DropReason.EXCESS)
            return
        self._unsure.append(inquiry)
        if self._making_sure is None or self._making_sure.ended:
            self._making_sure = self._bus.background.start(
                self._answer_unsure, name=f"questions at {self._subject}"
            )

    async def _answer_unsure(self) -> None:
        while self._unsure:
            unsure, self._unsure = self._unsure, []
            try:
                await self._bus.data.barrier(timeout=BARRIER_TIMEOUT)
            except DynbusError as error:
                # A client that misses an answer asks again at its next heartbeats.
                logger.debug("%s cannot tell what has arrived: %s", self._subject, error)
                continue
            for count, inquiry in enumerate(unsure, 1):
                try:
                    self._carry_out(self._ledger.answer(inquiry, monotonic()))
                except Exception:
                    # Whatever is wrong with one inquiry, the others are to be answered.
                    logger.exception("%s: an inquiry could not be answered", self._subject)
                if count % ANSWERS_PER_TURN == 0:
                    await asyncio.sleep(0)

    # From either loop --------------------------------------------------------------------

    def tell(self, sender: Sender, frame: Frame, identity: str = "") -> None:
        """Send one frame to the control lane of a client that need not have calls here.

        Args:
            identity: what the instance calls itself; its id unless given.
        """
        subject = f"{sender.base}.ctl.f"
        if not is_safe_reply(subject, self._bus.config.reply_prefixes):
            self._bus.to_main(self._bus.drop, DropReason.UNSAFE_REPLY)
            return
        identity, load = identity or self.registry.identity, self._execution.load
        batch = encode_batch(identity, sender.incarnation, load, [frame])
        self._bus.lane.call(self._bus.lane.connection.publish, subject, batch)

    def ask_for_proof(self, client: RemoteClient) -> None:
        """Ask a client to prove whose it is."""
        sender = Sender(client.base, client.incarnation, client.key)
        # Its whole name: an instance of another component may have taken the same id, to have its
        # own clients answer in its place what they are asked here.
        self.tell(sender, Ping(client.proof), self._name)

    def tell_nothing_here(self, gone: NothingHere, blocked: float = 0.0) -> None:
        """Tell a client that none of some calls is here.

        Args:
            blocked: seconds for which the main loop has not run.
        """
        number, draining = self._bus.heartbeats.number, self._execution.draining
        self.tell(gone.sender, Heartbeat(number, blocked, draining, [], gone.first, gone.last))

    def send_failed(self, sender: Sender, frame: Failed) -> None:
        """End a call at its reader, which need not have calls here."""
        subject = f"{sender.base}.f"
        if not is_safe_reply(subject, self._bus.config.reply_prefixes):
            self._bus.drop(DropReason.UNSAFE_REPLY)
            return
        self._bus.data.publish(subject, self._outbox.encode([frame]))
