"""Cards on the bus: published, kept alive by a lease for as long as somebody serves the model,
and refused where the name belongs to another component or they contradict another card.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import anyio
import msgspec

from dynbus import ConfigError, DynbusError, EndpointName, PermissionDenied, Unavailable
from dynbus.spi import (
    Bus,
    ComponentName,
    Discovery,
    LeasedRecord,
    StoredMessage,
    monotonic,
)

from .artefacts import Artefacts
from .card import ModelCard, differences
from .names import Names, Owners, Reason
from .records import (
    ADDED,
    CARDS_STREAM,
    MARKER_TTL,
    MAX_CARD_BYTES,
    StoredCard,
    card_subject,
    card_subject_abroad,
    read_cards,
)

logger = logging.getLogger(__name__)

CHECK_INTERVAL: Final = 60.0
"""Seconds between two looks at whether the artefacts are still there, and what else is."""

ASK_INTERVAL: Final = 0.5
"""Seconds between two questions whether the owners of other cards are still there."""

NAME_TRIES: Final = 8
"""The number of times that the owner of a name is read, which others may take and give back."""


class Target(NamedTuple):
    """The endpoint and the owner that a model is registered for.

    Attributes:
        owner: see `StoredCard`.
        ended: of these one is set when the model is no longer served; none for one that is served
            for as long as the bus lives.
        idempotent: whether its handler is declared so.
    """

    bus: Bus
    discovery: Discovery
    endpoint: EndpointName
    owner: str
    ended: tuple[asyncio.Event, ...] = ()
    idempotent: bool = False


_registered: Final[WeakKeyDictionary[Bus, dict[str, ModelCard]]] = WeakKeyDictionary()
"""The cards that each process holds, by their subjects."""


async def publish_card(target: Target, card: ModelCard, files: Sequence[bytes]) -> None:
    """Store a card and its artefacts, and keep them until its owner ends.

    Raises:
        ConfigError: it is too large, the name belongs to another component, or another card of it
            says otherwise, and in what.
        DynbusError: it cannot be stored.
    """
    subject = card_subject(target.endpoint, card.name, target.owner)
    data = msgspec.json.encode(card)
    if len(data) > MAX_CARD_BYTES:
        raise ConfigError(
            f"the card of {card.name} has {len(data)} bytes: at most {MAX_CARD_BYTES}"
        )
    held = _registered.setdefault(target.bus, {})
    if subject in held:
        conflicts = differences(card, held[subject])
        if conflicts or card.types != held[subject].types:
            raise _conflict(card, "this process", conflicts or ["it is asked for something else"])
        return
    held[subject] = card
    try:
        names = Names(target.bus.data.jetstream)
        await _own_name(target, names, card)
        await _refuse_conflicts(target, card)
        artefacts = Artefacts(target.bus.data.jetstream, target.endpoint.component_name)
        if files:
            await artefacts.keep(files)
        registration = _Registration(target, card, subject, data, files, artefacts)
        try:
            await registration.begin()
            await _refuse_later(target, card, registration.sequence)
        except BaseException:
            with anyio.move_on_after(2.0, shield=True):
                await registration.withdraw()
            raise
    except BaseException:
        del held[subject]
        raise
    target.bus.background.start(registration.keep, name=f"the card of {card.name}")


async def _own_name(target: Target, names: Names, card: ModelCard) -> None:
    """Register the card's name for its component, or pass where the name belongs to it already.

    A component that registered the name and has gone gives way, where the server lets others write
    its record: where there are credentials, an operator says so.
    """
    component = card.endpoint_name.component_name
    for _ in range(NAME_TRIES):
        owners = (await names.read(card.name)).owners(card.name)
        if owners is None:
            await names.register(card.name, component)
        elif component in owners.components:
            return
        else:
            await _refuse_unless_gone(target, names, card, owners)
    raise Unavailable(f"to whom the model {card.name!r} belongs changes all the time")


async def _refuse_unless_gone(
    target: Target, names: Names, card: ModelCard, owners: Owners
) -> None:
    """Take the name from a component that has gone.

    Raises:
        ConfigError: it is there, or an operator gave it the name, or it is not ours to take.
    """
    if owners.reason is not Reason.FIRST:
        raise _taken(card, owners, "")
    (other,) = owners.components
    ends = monotonic() + _patience(target)
    while await _is_served_by(target, card.name, other):
        if monotonic() > ends or await _answers(target, other):
            raise _taken(card, owners, "")
        await anyio.sleep(ASK_INTERVAL)
    try:
        await names.release(owners)
    except PermissionDenied:
        raise _taken(card, owners, ", and no instance of it is there now") from None
    logger.info("the model %s belonged to %s, of which nothing is there", card.name, other)


async def _is_served_by(target: Target, name: str, component: ComponentName) -> bool:
    """True if an instance of a component is there that may serve a model."""
    discovery = target.discovery
    await discovery.wait_synchronized(target.bus.config.connect_timeout)
    if any(True for _ in discovery.view.instances(*component, monotonic())):
        return True
    cards = await read_cards(target.bus.data.jetstream, name)
    return any(one.card.endpoint_name.component_name == component for one in cards)


async def _answers(target: Target, component: ComponentName) -> bool:
    """True if an instance of a component answers, rather than only its record."""
    instances = target.discovery.view.instances(*component, monotonic())
    for instance in list(instances):
        # Nobody knows while the connection breaks; it is asked again then.
        if await target.bus.questions.is_there(instance.record.name) is True:
            return True
    return False


def _patience(target: Target) -> float:
    """Seconds after which what is left of one that was killed is gone."""
    return target.bus.config.lease_ttl + 2 * ASK_INTERVAL


def _taken(card: ModelCard, owners: Owners, but: str) -> ConfigError:
    component = card.endpoint_name.component_name
    return ConfigError(
        f"{card.endpoint} cannot register the model {card.name!r}: the name belongs to {owners}"
        f"{but}. Give another model_name, or have an operator say "
        f"`dynbus models bind {card.name} {component}`"
    )


async def _refuse_conflicts(target: Target, card: ModelCard) -> None:
    """Pass unless another card of this name says otherwise whose owner is there.

    An owner that was killed has a card for as long as its lease, which is waited for.
    """
    ends = monotonic() + _patience(target)
    while True:
        other = await _conflicting(target, card)
        if other is None:
            return
        if monotonic() > ends or await _owner_is_there(target, other):
            raise _conflict(card, _told_owner(other), differences(card, other.card))
        await anyio.sleep(ASK_INTERVAL)


async def _refuse_later(target: Target, card: ModelCard, sequence: int) -> None:
    """Of two that register at once and disagree, the one that came first stays."""
    for one in await _cards_that_count(target, card):
        conflicts = differences(card, one.card)
        if conflicts and one.sequence < sequence and one.owner != target.owner:
            raise _conflict(card, _told_owner(one), conflicts)


async def _conflicting(target: Target, card: ModelCard) -> StoredCard | None:
    for one in await _cards_that_count(target, card):
        is_mine = one.owner == target.owner and one.card.endpoint == card.endpoint
        if not is_mine and differences(card, one.card):
            return one
    return None


async def _cards_that_count(target: Target, card: ModelCard) -> list[StoredCard]:
    """The cards of a name that are of a component that it belongs to."""
    jetstream = target.bus.data.jetstream
    names = await Names(jetstream).read(card.name)
    owners = names.owners(card.name)
    stored = await read_cards(jetstream, card.name)
    return [
        *(one._replace(sequence=0) for one in names.added(card.name)),
        *(
            one
            for one in stored
            if owners is None or one.card.endpoint_name.component_name in owners.components
        ),
    ]


async def _owner_is_there(target: Target, other: StoredCard) -> bool:
    if other.owner == ADDED:
        return True
    discovery = target.discovery
    await discovery.wait_synchronized(target.bus.config.connect_timeout)
    endpoint = other.card.endpoint_name
    for instance in discovery.view.instances(endpoint.namespace, endpoint.component, monotonic()):
        if other.owner in (instance.id, instance.record.incarnation):
            # Nobody knows while the connection breaks; it is asked again then.
            return await target.bus.questions.is_there(instance.record.name) is True
    return False


def _told_owner(other: StoredCard) -> str:
    if other.owner == ADDED:
        return "`dynbus models add` (`dynbus models rm` removes it)"
    return f"{other.card.endpoint} ({other.owner})"


def _conflict(card: ModelCard, owner: str, misfits: Sequence[str]) -> ConfigError:
    listed = "; ".join(misfits)
    return ConfigError(
        f"the model {card.name!r} is registered by {owner} with another card: {listed}. "
        "Make them agree, or give another model_name"
    )


class _Registration:
    """A card that is kept alive until its owner ends."""

    def __init__(
        self,
        target: Target,
        card: ModelCard,
        subject: str,
        data: bytes,
        files: Sequence[bytes],
        artefacts: Artefacts,
    ) -> None:
        # On the control lane, which nothing of the main loop delays.
        self._lane = lane = target.bus.lane
        self._target = target
        self._name = card.name
        self._names = Names(lane.connection.jetstream)
        self._data = data
        self._files = files
        self._artefacts = artefacts
        self._now = asyncio.Event()
        self._subject_abroad = partial(
            card_subject_abroad, endpoint=target.endpoint, name=card.name, owner=target.owner
        )
        self._record = LeasedRecord(
            lane.connection.jetstream,
            CARDS_STREAM.name,
            subject,
            target.bus.config.lease_ttl,
            marker_ttl=MARKER_TTL,
            is_mine=_is_mine,
            make=self._make_bucket,
            remake=self._remake_bucket,
        )

    @property
    def sequence(self) -> int:
        """The sequence of the card in the bucket."""
        return self._record.lease.revision

    async def begin(self) -> None:
        """Write the card for the first time.

        Raises:
            DynbusError: it cannot be written.
        """
        await self._lane.run(self._write())

    async def _write(self) -> None:
        await self._record.write(self._data)
        self._announce_abroad(self._data)

    def _announce_abroad(self, data: bytes) -> None:
        ttl = self._record.lease.ttl
        self._target.bus.announce_abroad(self._subject_abroad, data, ttl=ttl)

    async def withdraw(self) -> None:
        """Take the card back."""
        with suppress(Unavailable):
            # The lane is closed: the card expires by itself.
            await self._lane.run(self._withdraw())

    async def _withdraw(self) -> None:
        self._announce_abroad(b"")
        await self._record.withdraw(is_connected=self._lane.connection.is_connected)

    async def keep(self) -> None:
        """Renew the card until the model is no longer served, then take it back."""
        end_listening = self._target.bus.data.on_connected(self._on_connected)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._renew)
                tasks.start_soon(self._look_after)
                for ended in self._target.ended:
                    tasks.start_soon(_leave_with, ended, tasks.cancel_scope)
        finally:
            end_listening()
            _registered.get(self._target.bus, {}).pop(self._record.subject, None)
            with anyio.move_on_after(2.0, shield=True):
                await self.withdraw()

    async def _renew(self) -> None:
        while True:
            with anyio.move_on_after(self._record.pause()):
                await self._now.wait()
                self._record.start_anew()
            self._now.clear()
            try:
                await self._lane.run(self._write())
            except DynbusError as error:
                # The lane may be connected again a moment after the data connection.
                await self._lane.run(self._record.after_failure(error))

    async def _look_after(self) -> None:
        while True:
            await anyio.sleep(CHECK_INTERVAL)
            try:
                await self._lane.run(self._keep_name())
                await self._artefacts.keep(self._files)
            except DynbusError as error:
                logger.warning("the artefacts of models were not looked after: %s", error)

    def _on_connected(self) -> None:
        self._now.set()

    async def _make_bucket(self) -> None:
        await self._lane.connection.jetstream.ensure_stream(CARDS_STREAM)
        # A server that has lost one bucket has lost the other.
        await self._keep_name()

    async def _keep_name(self) -> None:
        await self._names.register(self._name, self._target.endpoint.component_name)

    async def _remake_bucket(self) -> None:
        # The disk that broke it may be full still.
        await self._lane.connection.jetstream.ensure_stream(CARDS_STREAM._replace(in_memory=True))


async def _leave_with(event: asyncio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _is_mine(stored: StoredMessage) -> bool:
    """True if it is this owner's, as everything under an owner is."""
    return True


# By hand -----------------------------------------------------------------------------------------


async def add_model(side_bus: Bus, discovery: Discovery, card: ModelCard) -> None:
    """Keep the card of a model whose worker does not register it, until `remove_model`.

    Raises:
        ConfigError: the name belongs to another component, or another card of it says otherwise,
            and in what.
    """
    target = Target(side_bus, discovery, card.endpoint_name, ADDED)
    names = Names(side_bus.data.jetstream)
    owners = (await names.read(card.name)).owners(card.name)
    is_ours = owners is None or card.endpoint_name.component_name in owners.components
    if owners is not None and not is_ours and owners.reason is not Reason.ADDED:
        await _refuse_unless_gone(target, names, card, owners)
    await _refuse_conflicts(target, card)
    await names.add(StoredCard(card, ADDED, 0))


async def remove_model(bus: Bus, name: str) -> int:
    """Remove the cards of a name that were added by `add_model`, or else what is remembered of a
    name whose components are gone; returns how many records.

    Raises:
        ConfigError: there is none, and who serves the model, or who bound it, if somebody did.
    """
    jetstream = bus.data.jetstream
    names = Names(jetstream)
    if added := (await names.read(name)).added(name):
        for one in added:
            await names.remove(one)
        return len(added)
    if others := sorted({one.card.endpoint for one in await read_cards(jetstream, name)}):
        raise ConfigError(
            f"the model {name!r} was registered by {', '.join(others)}: it goes when they stop"
        )
    return await _forget(names, name)


async def _forget(names: Names, name: str) -> int:
    """Take back the records of all components that registered a name."""
    forgotten = 0
    while (owners := (await names.read(name)).owners(name)) is not None:
        if owners.reason is Reason.BOUND:
            raise ConfigError(
                f"the model {name!r} is bound to {', '.join(map(str, owners.components))}: "
                f"`dynbus models unbind {name}` first"
            )
        await names.release(owners)
        forgotten += 1
    if not forgotten:
        raise ConfigError(f"there is no model {name!r}: `dynbus models` lists those that there are")
    return forgotten
