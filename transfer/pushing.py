"""Reads that the peer carries out: it writes what this side wants to read.

Over TCP alone UCX has the peer's process send what a READ asks for. That is slower than a WRITE of
the peer, and when the reader dies meanwhile, UCX may abort the process that it reads from. A writer
just gets an error.

What is pushed lands in memory that an agent of its own has registered, one for each peer. It is
destroyed when a peer that was told to stop does not say that it has, or says that it had to break
off: nothing lands after that, not even what was on its way.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import anyio
import anyio.to_thread
import numpy as np

from dynbus import ConfigError, DynbusError
from dynbus.spi import (
    Background,
    Bus,
    Message,
    describe_exception,
    monotonic,
    random_id,
)
from dynbus.transfer.names import transfer_subject

from . import messages
from .binding import NixlAgent
from .config import TransferConfig
from .descriptors import AgentDescription, decode, encode
from .errors import BadDescription, InvalidTransfer, LeaseLost, TransferFailed
from .exchange import check_life
from .layout import KvMemory
from .leases import LeaseTable
from .links import Moved, nixl_name
from .messages import AgentMessage, Here, Push, Pushed, Stop, Unknown
from .states import is_over
from .transfers import Transfer

logger = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.25
"""After which a peer that is gone is noticed while it should push, and a lost message."""
_REMEMBERED: Final = 4096
"""Pushes that are over, whose end is told again to a reader that did not hear of it."""
_NUMBER: Final = ">"
"""Between the epoch of an agent and the number of its landing."""

Write = Callable[[AgentDescription, Moved, float], Transfer]
"""Begins to write to a landing, for so many seconds at most."""


class Life(NamedTuple):
    """Of a peer."""

    agent: str
    epoch: str


def life_of(description: AgentDescription) -> Life:
    """The life of an agent that a description is of; a landing's has its number in the epoch."""
    return Life(description.agent, description.epoch.partition(_NUMBER)[0])


_Key: TypeAlias = tuple[str, str, int]
"""A push at its source: the reader's name and epoch, and the number of its transfer."""


@dataclass
class _Asked:
    """A transfer that a peer was asked for.

    Attributes:
        look: the reader's last one before. What the peer says of a later one is true of it: the
            bus keeps the order.
        error: how the peer says that it ended, where some of it may be on its way still.
    """

    transfer: Transfer
    look: int = 0
    error: DynbusError | None = None


@dataclass
class _Landing:
    """The memory to which one life of a peer pushes.

    Attributes:
        name: of its agent.
        token: under which the server says that nobody hears the peer's subject any more.
        envelope: what the peer has to know of it.
        asked: transfers that the peer was asked for and that are not over, by their numbers.
    """

    name: str
    token: str
    agent: NixlAgent
    envelope: bytes
    asked: dict[int, _Asked] = field(default_factory=dict[int, _Asked])


class Pushes:
    """The pushes of an agent: those that its peers make for it, and those that it makes for
    peers."""

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
        self._looks = 0
        self._served: dict[_Key, Transfer] = {}
        self._answers: OrderedDict[_Key, Pushed] = OrderedDict()
        self._subscription = bus.data.subscribe(transfer_subject(name, epoch), self._heard)

    def __repr__(self) -> str:
        return (
            f"<Pushes {self._name} [{len(self._landings)} landings | {len(self._served)} served]>"
        )

    @property
    def landings(self) -> int:
        """The number of peers that may push at this moment."""
        return len(self._landings)

    # The reader -------------------------------------------------------------------------------

    def pull(self, transfer: Transfer) -> None:
        """Have the peer push what a transfer reads."""
        self._background.start(self._pull, transfer, name=f"have {transfer.peer} push")

    async def _pull(self, transfer: Transfer) -> None:
        ticket = transfer.ticket
        assert ticket is not None
        try:
            landing = await self._landing_of(Life(ticket.agent, ticket.epoch))
        except DynbusError as error:
            transfer.fail(error)
            return
        if not transfer.begin_apart(landing.name, partial(self._stop, transfer)):
            return
        asked = landing.asked[transfer.number] = _Asked(transfer)
        try:
            self._ask(landing, asked)
        except DynbusError as error:
            del landing.asked[transfer.number]
            transfer.end_apart(error)
            return
        if not self._is_watching:
            self._is_watching = True
            self._background.start(self._watch, name=f"{self._name} watches who pushes")

    def _ask(self, landing: _Landing, asked: _Asked) -> None:
        """Ask the peer for a transfer.

        Raises:
            DynbusError: that is not possible now.
        """
        transfer, moved, ticket = asked.transfer, asked.transfer.moved, asked.transfer.ticket
        assert ticket is not None
        asked.look = self._looks
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
            # Of one that was given up only the answer is wanted that nothing is on its way.
            0.0 if is_over(transfer.state) else transfer.deadline - monotonic(),
        )
        self._tell(Life(ticket.agent, ticket.epoch), push, landing)

    def _ask_again(self, unknown: Unknown) -> None:
        """Ask once more for what the peer has not heard of."""
        for landing in self._landings.values():
            for number in unknown.numbers:
                asked = landing.asked.get(number)
                if asked is None or asked.look >= unknown.look:
                    continue
                logger.info("%s is asked again to push: it had not heard it", asked.transfer.peer)
                try:
                    self._ask(landing, asked)
                except DynbusError as error:
                    # The next look asks whether it has come.
                    logger.debug("%s was not asked again: %s", asked.transfer.peer, error)

    def _tell(self, life: Life, message: AgentMessage, landing: _Landing | None = None) -> None:
        """Send a message; with a landing, hear if nobody gets it."""
        reply = "" if landing is None else self._bus.replies.bounce(landing.token)
        self._bus.data.publish(transfer_subject(*life), messages.encode(message), reply=reply)

    async def _watch(self) -> None:
        """See that those who push are there and have heard of it, for as long as any does."""
        try:
            while any(landing.asked for landing in self._landings.values()):
                await anyio.sleep(_LOOK_SECONDS)
                self._looks += 1
                for life, landing in list(self._landings.items()):
                    if landing.asked:
                        numbers = tuple(landing.asked)
                        here = Here(self._name, self._epoch, self._looks, numbers)
                        self._tell(life, here, landing)
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
            if not landing.asked:
                self.ask_for(life, partial(self._answered, life, landing))

    def _answered(self, life: Life, landing: _Landing, there: bool | None) -> None:
        if there is False and not landing.asked:
            self._gone(life, landing)

    def ask_for(self, life: Life, answer: Callable[[bool | None], None]) -> None:
        """Ask whether a life of an agent is on the bus still: see `Questions.ask`."""
        here = messages.encode(Here())
        self._bus.questions.ask(transfer_subject(*life), lambda _: here, answer)

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

    def _pushed(self, pushed: Pushed) -> None:
        for life, landing in self._landings.items():
            asked = landing.asked.get(pushed.number)
            if asked is None:
                continue
            error = DynbusError.of_code(pushed.code, pushed.message) if pushed.code else None
            if pushed.is_cut_off:
                asked.error = error
                self._remove(life, landing, f"{life.agent} had to break off what it pushed")
            else:
                del landing.asked[pushed.number]
                asked.transfer.end_apart(error, pushed.bytes)
            return

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
        for asked in landing.asked.values():
            error = asked.error or TransferFailed(f"{why}: nothing of it lands any more")
            asked.transfer.end_apart(error)

    # The source -------------------------------------------------------------------------------

    def _heard(self, message: Message) -> None:
        try:
            decoded = messages.decode(message.data)
        except BadDescription as error:
            logger.warning("%s: %s", message.subject, error)
            return
        if isinstance(decoded, Pushed):
            self._pushed(decoded)
        elif isinstance(decoded, Unknown):
            self._ask_again(decoded)
        elif isinstance(decoded, Here):
            self._look(decoded)
        elif isinstance(decoded, Stop):
            transfer = self._served.get((decoded.reader, decoded.epoch, decoded.number))
            if transfer is not None:
                transfer.cancel()
        else:
            self._push(decoded)

    def _look(self, here: Here) -> None:
        """Tell a reader what it has missed of what it waits for."""
        if not here.numbers or not self._is_somebody(here):
            return
        unknown: list[int] = []
        for number in here.numbers:
            key = here.reader, here.epoch, number
            if (answer := self._answers.get(key)) is not None:
                self._reply(Life(here.reader, here.epoch), answer)
            elif key not in self._served:
                unknown.append(number)
        if unknown:
            self._reply(Life(here.reader, here.epoch), Unknown(here.look, tuple(unknown)))

    def _is_somebody(self, asked: Push | Here) -> bool:
        try:
            check_life(asked.reader, asked.epoch)
        except ConfigError as error:
            # It cannot even be answered.
            logger.warning("%s is asked to push to nobody: %s", self._name, error)
            return False
        return True

    def _push(self, push: Push) -> None:
        key = push.reader, push.epoch, push.number
        if key in self._served or not self._is_somebody(push):
            return
        if (answer := self._answers.get(key)) is not None:
            # The reader's memory may be in other use by now.
            self._reply(Life(push.reader, push.epoch), answer)
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
        # Written so that a NaN stays one, which is refused.
        seconds = min(push.seconds, lease.deadline - monotonic())
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
        return self._write(landing, moved, seconds)

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
            self._answer(push, transfer.bytes, error, is_cut_off=transfer.is_cut_off)

    def _answer(
        self, push: Push, size: int, error: DynbusError | None, *, is_cut_off: bool = False
    ) -> None:
        answer = Pushed(push.number, size)
        if error is not None:
            answer = Pushed(push.number, 0, error.code, error.message, is_cut_off)
        self._answers[push.reader, push.epoch, push.number] = answer
        while len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)
        self._reply(Life(push.reader, push.epoch), answer)

    def _reply(self, life: Life, message: AgentMessage) -> None:
        try:
            self._tell(life, message)
        except DynbusError as problem:
            logger.debug("%s was not answered: %s", life.agent, problem)

    # Life -------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Destroy all landings, in bounded time; what was to land there has failed."""
        self._subscription.unsubscribe()
        landings, self._landings = self._landings, {}
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            for life, landing in landings.items():
                del self._bus.bounce_handlers[landing.token]
                await anyio.to_thread.run_sync(landing.agent.close, abandon_on_cancel=True)
                for asked in landing.asked.values():
                    asked.transfer.end_apart(TransferFailed(f"the way from {life.agent} is closed"))
