"""Reads that the peer carries out: it writes what this side wants to read.

Over TCP alone UCX has the peer's process send what a READ asks for. That is slower than a WRITE of
the peer, and when the reader dies meanwhile, UCX may abort the process that it reads from. A writer
just gets an error.

What is pushed lands in memory that an agent of its own has registered, one for each peer. It is
destroyed when a peer that was told to stop does not say that it has: nothing lands after that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from dynbus.bus.background import Background
from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError, DynbusError, describe_exception, make_error
from dynbus.bus.protocol.names import transfer_subject
from dynbus.bus.protocol.tokens import random_id
from dynbus.bus.records.presence import ask_subject
from dynbus.bus.transport import Message

from . import messages
from .binding import NixlAgent
from .config import TransferConfig
from .descriptors import AgentDescription, decode, encode
from .errors import BadDescription, InvalidTransfer, LeaseLost, TransferFailed
from .exchange import check_life
from .layout import KvMemory
from .leases import LeaseTable
from .links import Moved, nixl_name
from .messages import Here, Push, Pushed, Stop, Told
from .transfers import Transfer

logger = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.25
"""After which a peer that is gone is noticed while it should push."""
_NUMBER: Final = ">"
"""Between the epoch of an agent and the number of its landing."""

Write = Callable[[AgentDescription, Moved, float], Transfer]
"""Begins to write to a landing, for so many seconds at most."""


class Life(NamedTuple):
    """Of a peer."""

    agent: str
    epoch: str


def life_of(description: AgentDescription) -> Life:
    """Which life of an agent a description is of; a landing's has its number in the epoch."""
    return Life(description.agent, description.epoch.partition(_NUMBER)[0])


@dataclass
class _Landing:
    """Where one life of a peer pushes to.

    Attributes:
        name: of its agent.
        token: under which the server says that nobody hears the peer's subject any more.
        envelope: what the peer has to know of it.
        transfers: that the peer was asked for and that are not over, by their numbers.
    """

    name: str
    token: str
    agent: NixlAgent
    envelope: bytes
    transfers: dict[int, Transfer] = field(default_factory=dict[int, Transfer])


class Pushes:
    """What an agent has peers push, and what it pushes for peers."""

    def __init__(
        self,
        bus: Bus,
        background: Background,
        name: str,
        epoch: str,
        memory: KvMemory,
        config: TransferConfig,
        leases: LeaseTable,
        write: Write,
    ) -> None:
        self._bus = bus
        self._background = background
        self._name = name
        self._epoch = epoch
        self._memory = memory
        self._config = config
        self._leases = leases
        self._write = write
        self._made = 0
        self._making: dict[Life, anyio.Lock] = {}
        self._landings: dict[Life, _Landing] = {}
        self._is_watching = False
        self._served: dict[tuple[str, str, int], Transfer] = {}
        self._subscription = bus.data.subscribe(transfer_subject(name, epoch), self._heard)

    def __repr__(self) -> str:
        return (
            f"<Pushes {self._name} [{len(self._landings)} landings | {len(self._served)} served]>"
        )

    @property
    def landings(self) -> int:
        """How many peers may push at this moment."""
        return len(self._landings)

    # The reader -------------------------------------------------------------------------------

    def pull(self, transfer: Transfer) -> None:
        """Have the peer push what a transfer reads."""
        self._background.start(self._pull, transfer, name=f"have {transfer.peer} push")

    async def _pull(self, transfer: Transfer) -> None:
        ticket, moved = transfer.ticket, transfer.moved
        assert ticket is not None
        try:
            landing = await self._landing_of(Life(ticket.agent, ticket.epoch))
        except DynbusError as error:
            transfer.fail(error)
            return
        if not transfer.begin_apart(landing.name, partial(self._stop, transfer)):
            return
        landing.transfers[transfer.number] = transfer
        try:
            push = Push(
                transfer.number,
                self._name,
                self._epoch,
                landing.envelope,
                ticket,
                tuple(moved.remote_blocks.tolist()),
                tuple(moved.local_blocks.tolist()),
                moved.tokens,
                moved.remote_start,
                moved.local_start,
                transfer.deadline - monotonic(),
            )
            self._tell(Life(ticket.agent, ticket.epoch), push, landing)
        except DynbusError as error:
            del landing.transfers[transfer.number]
            transfer.end_apart(error)
            return
        if not self._is_watching:
            self._is_watching = True
            self._background.start(self._watch, name=f"{self._name} watches who pushes")

    def _tell(self, life: Life, told: Told, landing: _Landing | None = None) -> None:
        """Send a message; with a landing, hear if nobody gets it."""
        reply = "" if landing is None else self._bus.replies.bounce(landing.token)
        self._bus.data.publish(transfer_subject(*life), messages.encode(told), reply=reply)

    async def _watch(self) -> None:
        """See that those who push are there, for as long as any does."""
        try:
            while any(landing.transfers for landing in self._landings.values()):
                await anyio.sleep(_LOOK_SECONDS)
                for life, landing in list(self._landings.items()):
                    if landing.transfers:
                        self._tell(life, Here(), landing)
        finally:
            self._is_watching = False

    def _gone(self, life: Life, landing: _Landing) -> None:
        if self._landings.get(life) is landing:
            self._remove(life, landing, f"agent {life.agent} is gone from the bus")

    async def _landing_of(self, life: Life) -> _Landing:
        async with self._making.setdefault(life, anyio.Lock()):
            landing = self._landings.get(life)
            if landing is None:
                for other, known in list(self._landings.items()):
                    if other.agent == life.agent:
                        self._remove(other, known, f"agent {life.agent} has another life")
                self._ask_for_others()
                self._made += 1
                epoch = f"{self._epoch}{_NUMBER}{self._made}"
                landing = await anyio.to_thread.run_sync(self._make, epoch)
                self._landings[life] = landing
                self._bus.bounce_handlers[landing.token] = partial(self._gone, life, landing)
            return landing

    def _ask_for_others(self) -> None:
        """Remove the landings of peers that are gone: nothing else tells of those that are idle."""
        for life, landing in self._landings.items():
            if not landing.transfers:
                self.ask_for(life, partial(self._answered, life, landing))

    def _answered(self, life: Life, landing: _Landing, there: bool | None) -> None:
        if there is False and not landing.transfers:
            self._gone(life, landing)

    def ask_for(self, life: Life, answer: Callable[[bool | None], None]) -> None:
        """Ask whether a life of an agent is on the bus still: see `presence.ask`."""
        here = messages.encode(Here())
        ask_subject(self._bus, transfer_subject(*life), lambda _: here, answer)

    def _make(self, epoch: str) -> _Landing:
        name = nixl_name(self._name, epoch)
        agent = NixlAgent(name, wakes_every=self._config.idle_wait, ucx=self._config.ucx)
        agent.register(self._memory.regions)
        description = AgentDescription(
            self._name, epoch, self._memory.layout, self._memory.regions, agent.metadata()
        )
        return _Landing(name, random_id(), agent, encode(description))

    def _stop(self, transfer: Transfer) -> None:
        assert transfer.ticket is not None
        try:
            self._tell(
                Life(transfer.ticket.agent, transfer.ticket.epoch),
                Stop(transfer.number, self._name, self._epoch),
            )
        except DynbusError as error:
            # The landing is destroyed in time.
            logger.debug("%s was not told to stop: %s", transfer.peer, error)

    def _pushed(self, told: Pushed) -> None:
        for landing in self._landings.values():
            transfer = landing.transfers.pop(told.number, None)
            if transfer is not None:
                error = make_error(told.code, told.message) if told.code else None
                transfer.end_apart(error, told.bytes)

    def destroy(self, name: str) -> bool:
        """Destroy a landing, so that nothing lands there any more; False for no landing's name."""
        for life, landing in self._landings.items():
            if landing.name == name:
                why = f"{life.agent} was told to stop pushing, and did not say that it has"
                self._remove(life, landing, why)
                return True
        return False

    def _remove(self, life: Life, landing: _Landing, why: str) -> None:
        del self._landings[life]
        if (making := self._making.get(life)) is not None and not making.locked():
            del self._making[life]
        del self._bus.bounce_handlers[landing.token]
        self._background.start(self._destroy, landing, why, name=f"destroy {landing.name}")

    async def _destroy(self, landing: _Landing, why: str) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(landing.agent.close)
        for transfer in landing.transfers.values():
            transfer.end_apart(TransferFailed(f"{why}: nothing of it lands any more"))

    # The source -------------------------------------------------------------------------------

    def _heard(self, message: Message) -> None:
        try:
            told = messages.decode(message.data)
        except BadDescription as error:
            logger.warning("%s: %s", message.subject, error)
            return
        if isinstance(told, Pushed):
            self._pushed(told)
        elif isinstance(told, Stop):
            transfer = self._served.get((told.reader, told.epoch, told.number))
            if transfer is not None:
                transfer.cancel()
        elif isinstance(told, Push):
            self._push(told)

    def _push(self, push: Push) -> None:
        key = push.reader, push.epoch, push.number
        if key in self._served:
            return
        try:
            check_life(push.reader, push.epoch)
        except ConfigError as error:
            # It cannot even be answered.
            logger.warning("%s is asked to push to nobody: %s", self._name, error)
            return
        try:
            transfer = self._begin(push)
        except DynbusError as error:
            self._answer(push, 0, error)
            return
        except (TypeError, ValueError, OverflowError) as error:
            self._answer(push, 0, BadDescription(describe_exception(error)))
            return
        self._served[key] = transfer
        self._background.start(self._serve, push, transfer, name=f"push to {push.reader}")

    def _begin(self, push: Push) -> Transfer:
        ticket = push.ticket
        lease = self._leases.held(ticket.lease_id, ticket.epoch, monotonic())
        if lease is None:
            raise LeaseLost(f"{self._name} does not hold these blocks any more")
        if not push.source_blocks or not set(push.source_blocks).issubset(lease.blocks):
            raise InvalidTransfer("the lease is not of these blocks")
        landing = decode(push.landing)
        if (landing.agent, life_of(landing).epoch) != (push.reader, push.epoch):
            raise BadDescription(
                f"{push.reader} of epoch {push.epoch} has sent a description of {landing.agent} "
                f"of epoch {landing.epoch}"
            )
        moved = Moved(
            "write",
            np.array(push.reader_blocks, np.int32),
            np.array(push.source_blocks, np.int32),
            push.tokens,
            push.reader_start,
            push.source_start,
        )
        return self._write(landing, moved, push.seconds)

    async def _serve(self, push: Push, transfer: Transfer) -> None:
        error: DynbusError | None = None
        try:
            await transfer.result()
        except DynbusError as problem:
            error = problem
        finally:
            with anyio.CancelScope(shield=True):
                await transfer.quiet()
            del self._served[push.reader, push.epoch, push.number]
            self._answer(push, transfer.bytes, error)

    def _answer(self, push: Push, size: int, error: DynbusError | None) -> None:
        told = Pushed(push.number, size)
        if error is not None:
            told = Pushed(push.number, 0, error.code, error.message)
        try:
            self._tell(Life(push.reader, push.epoch), told)
        except DynbusError as problem:
            logger.debug("%s was not answered: %s", push.reader, problem)

    # Life -------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Destroy all landings, in bounded time; what was to land there has failed."""
        self._subscription.unsubscribe()
        landings, self._landings = self._landings, {}
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            for life, landing in landings.items():
                del self._bus.bounce_handlers[landing.token]
                await anyio.to_thread.run_sync(landing.agent.close, abandon_on_cancel=True)
                for transfer in landing.transfers.values():
                    transfer.end_apart(TransferFailed(f"the way from {life.agent} is closed"))
