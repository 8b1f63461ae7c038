"""The components that names of models belong to.

A name belongs to the components that an operator gave it to, else to those for which an operator
added it by hand, else to the component whose record of it is the oldest in the bucket. The record
of a component is under a subject of its own, and is written once and never renewed: its place in
the bucket is its age, which no component can better, nor change for another. What operators say is
under subjects that no component may write. What is stored stays until an operator purges it: the
server itself writes where nobody may, when somebody has its answers sent there.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from dynbus import ConfigError, DynbusError, EndpointName, PermissionDenied
from dynbus.spi import (
    ComponentName,
    JetStream,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    WrongLastSequence,
    read_latest,
)

from .card import VERSION, check_name, model_token
from .records import ADDED, MAX_CARD_BYTES, READ_TIMEOUT, StoredCard, decode_card

NAMES_BUCKET: Final = "dynbus_model_names"

NAMES_STREAM: Final = StreamConfig(
    name=f"KV_{NAMES_BUCKET}",
    subjects=(f"$KV.{NAMES_BUCKET}.>",),
    limits=StreamLimits(
        max_messages_per_subject=1,
        max_bytes=16 * 1024 * 1024,
        max_message_size=MAX_CARD_BYTES,
        # Nobody pushes the records of others out, nor has the server's answers take their place.
        discard_new=True,
        keep_first=True,
    ),
    description="dynbus: the components that names of models belong to",
)

_BOUND: Final = "_bound"
_BY_HAND: Final = "_added"
_TRIES: Final = 4


class NameRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record of a name on the bus, as JSON, by a component or an operator.

    Attributes:
        name: of the model.
        components: to which an operator gave it; none in the record of a component.
    """

    version: int = VERSION
    name: str
    components: list[str] = []


_decoder: Final = msgspec.json.Decoder(NameRecord)


class Reason(Enum):
    """The reasons for which a name belongs to a component, for people."""

    BOUND = "as `dynbus models bind` says"
    ADDED = "as `dynbus models add` says"
    FIRST = "which registered it first"


class Owners(NamedTuple):
    """To whom a name belongs.

    Attributes:
        subject, sequence: of the record of a component that registered it first.
    """

    components: tuple[ComponentName, ...]
    reason: Reason
    subject: str = ""
    sequence: int = 0

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.components))}, {self.reason.value}"


class _Said(NamedTuple):
    """One record of a name."""

    components: tuple[ComponentName, ...]
    reason: Reason
    sequence: int
    added: StoredCard | None = None


class NameView:
    """The records of names that are known, without I/O."""

    def __init__(self) -> None:
        self._by_subject: dict[str, tuple[str, _Said]] = {}
        self._by_name: dict[str, dict[str, _Said]] = {}
        self._not_read_again: set[str] = set()

    def __repr__(self) -> str:
        return f"<NameView of {len(self._by_name)} names>"

    def put(self, message: StoredMessage) -> None:
        """A record was written, or taken back."""
        subject = message.subject
        self._drop(subject)
        record = None if message.is_marker else _said_in(message)
        if record is not None:
            name, said = record
            self._by_subject[subject] = record
            self._by_name.setdefault(name, {})[subject] = said

    def begin_reading(self) -> None:
        """All records are about to be read; those that are not come again are gone."""
        self._not_read_again = set(self._by_subject)

    def end_reading(self) -> None:
        """All records were read."""
        for subject in list(self._not_read_again):
            self._drop(subject)
        self._not_read_again = set()

    def owners(self, name: str) -> Owners | None:
        """To whom a name belongs; None where nobody has said."""
        records = self._by_name.get(name, {})
        for reason in (Reason.BOUND, Reason.ADDED):
            of_operators = [said for said in records.values() if said.reason is reason]
            if of_operators:
                components = {one for said in of_operators for one in said.components}
                return Owners(tuple(sorted(components)), reason)
        if not records:
            return None
        subject, first = min(records.items(), key=lambda one: one[1].sequence)
        return Owners(first.components, Reason.FIRST, subject, first.sequence)

    @property
    def names(self) -> list[str]:
        """The names that anything is said of."""
        return sorted(self._by_name)

    def added(self, name: str) -> list[StoredCard]:
        """The cards of a name that operators added by hand."""
        records = self._by_name.get(name, {}).values()
        return [said.added for said in records if said.added is not None]

    @property
    def names_added(self) -> set[str]:
        """The names of cards that operators added by hand."""
        return {name for name, said in self._by_subject.values() if said.added is not None}

    def _drop(self, subject: str) -> None:
        self._not_read_again.discard(subject)
        name, _ = self._by_subject.pop(subject, ("", None))
        if name:
            records = self._by_name[name]
            del records[subject]
            if not records:
                del self._by_name[name]


def _said_in(message: StoredMessage) -> tuple[str, _Said] | None:
    """The name and what a message says of it; None for one that cannot be read, or that speaks of
    another name or component than its subject, which is what permissions are given for."""
    model, _, where = message.subject.removeprefix(f"$KV.{NAMES_BUCKET}.").partition(".")
    try:
        if where.startswith(f"{_BY_HAND}."):
            endpoint = EndpointName.parse(where.removeprefix(f"{_BY_HAND}."))
            card = decode_card(message.data, endpoint)
            if card is None or model_token(card.name) != model:
                return None
            stored = StoredCard(card, ADDED, message.sequence)
            components = (endpoint.component_name,)
            return card.name, _Said(components, Reason.ADDED, message.sequence, stored)
        record = _decoder.decode(message.data)
        name = check_name(record.name)
        if record.version != VERSION or model_token(name) != model:
            return None
        if where == _BOUND:
            given = tuple(map(ComponentName.parse, record.components))
            return name, _Said(given, Reason.BOUND, message.sequence)
        return name, _Said((ComponentName.parse(where),), Reason.FIRST, message.sequence)
    except (msgspec.DecodeError, UnicodeError, RecursionError, DynbusError):
        return None


class Names:
    """The bucket of names."""

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream

    def __repr__(self) -> str:
        return f"<Names in {NAMES_STREAM.name}>"

    async def read(self, name: str) -> NameView:
        """All that is said of a name.

        Raises:
            Unavailable: JetStream does not answer.
        """
        view = NameView()
        subject = f"{_subject(name)}.>"
        try:
            messages = await read_latest(
                self._jetstream, NAMES_STREAM.name, subject, timeout=READ_TIMEOUT
            )
        except NoStream:
            return view
        for message in messages.values():
            view.put(message)
        return view

    async def register(self, name: str, component: ComponentName) -> None:
        """Have a record that a component registered a name; one that is there keeps its place.

        Raises:
            DynbusError: it cannot be written.
        """
        subject = f"{_subject(name)}.{component}"
        data = msgspec.json.encode(NameRecord(name=name))
        for _ in range(_TRIES):
            try:
                await self._write(subject, data, expected=0)
                return
            except WrongLastSequence:
                stored = await self._jetstream.last(NAMES_STREAM.name, subject)
                if stored is None:
                    continue
                if not stored.is_marker and _said_in(stored) is not None:
                    return
                await self._clear_own(name, component, subject, stored)
        raise ConfigError(f"the record {subject} changes under every write: is it removed again?")

    async def release(self, owners: Owners) -> None:
        """Take back the record of the component that registered a name first, unless it was written
        again meanwhile.

        Raises:
            PermissionDenied: the server lets only the component itself write there.
            DynbusError: it cannot be written.
        """
        await self._purge(owners.subject, up_to=owners.sequence)
        try:
            await self._publish_marker(owners.subject, expected=0)
        except WrongLastSequence:
            return

    async def bind(self, name: str, components: tuple[ComponentName, ...]) -> None:
        """Give a name to components, also where another has registered it.

        Raises:
            DynbusError: it cannot be written.
        """
        record = NameRecord(name=check_name(name), components=[str(one) for one in components])
        await self._replace(f"{_subject(name)}.{_BOUND}", msgspec.json.encode(record))

    async def unbind(self, name: str) -> None:
        """Take back what `bind` gave: the name belongs to the component that registered it first.

        Raises:
            ConfigError: it is not bound.
            DynbusError: it cannot be written.
        """
        owners = (await self.read(name)).owners(name)
        if owners is None or owners.reason is not Reason.BOUND:
            raise ConfigError(f"the model {name!r} is not bound to a component")
        await self._take_back(f"{_subject(name)}.{_BOUND}")

    async def add(self, stored: StoredCard) -> None:
        """Keep a card that an operator added.

        Raises:
            DynbusError: it cannot be written.
        """
        await self._replace(_added_subject(stored), msgspec.json.encode(stored.card))

    async def remove(self, stored: StoredCard) -> None:
        """Remove a card that an operator added.

        Raises:
            DynbusError: it cannot be written.
        """
        await self._take_back(_added_subject(stored))

    async def ensure(self) -> None:
        """Make the bucket where there is none.

        Raises:
            DynbusError: it cannot be made.
        """
        await self._jetstream.ensure_stream(NAMES_STREAM)

    async def _clear_own(
        self, name: str, component: ComponentName, subject: str, stored: StoredMessage
    ) -> None:
        """Purge what is no record, where the component's is to be.

        Raises:
            ConfigError: the server lets only operators do so.
        """
        try:
            await self._purge(subject, up_to=stored.sequence)
        except PermissionDenied:
            raise ConfigError(
                f"{component} cannot register the model {name!r}: what is stored at {subject} is "
                f"no record of it. Have an operator say `dynbus models bind {name} {component}`"
            ) from None

    async def _write(self, subject: str, data: bytes, expected: int | None = None) -> None:
        for is_last in (False, True):
            try:
                await self._jetstream.publish(
                    subject, data, expected_last_subject_sequence=expected
                )
                return
            except NoStream:
                if is_last:
                    raise
                await self.ensure()

    async def _replace(self, subject: str, data: bytes) -> None:
        """Write what an operator says, in place of whatever is there."""
        await self._purge(subject)
        await self._write(subject, data)

    async def _take_back(self, subject: str) -> None:
        await self._purge(subject)
        await self._publish_marker(subject)

    async def _purge(self, subject: str, up_to: int = 0) -> None:
        with suppress(NoStream):
            await self._jetstream.purge(NAMES_STREAM.name, subject, up_to=up_to)

    async def _publish_marker(self, subject: str, expected: int | None = None) -> None:
        """Tell those who follow the bucket, who hear of no purge."""
        await self._jetstream.publish(
            subject,
            b"",
            deleted=True,
            expected_last_subject_sequence=expected,
        )


def _subject(name: str) -> str:
    return f"$KV.{NAMES_BUCKET}.{model_token(name)}"


def _added_subject(stored: StoredCard) -> str:
    return f"{_subject(stored.card.name)}.{_BY_HAND}.{stored.card.endpoint}"
