"""The models that are served now, as a front end sees them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import anyio

from dynbus import DynbusError, NoInstances, PermissionDenied, Runtime, Unavailable
from dynbus.llm.following import follow
from dynbus.llm.text.guarded_tokenizer import CACHE_BYTES, GuardedTokenizer
from dynbus.llm.text.template import ChatTemplate
from dynbus.llm.text.text_model import TextModel
from dynbus.spi import (
    ComponentName,
    ExpiredRecords,
    Openable,
    OrderedConsumer,
    StoredMessage,
    StreamConfig,
    monotonic,
)

from .artefacts import Artefacts
from .card import TEMPLATE, TOKENIZER, ModelCard, ModelType, differences
from .names import NAMES_STREAM, NameView, Owners
from .records import (
    ABROAD,
    ABROAD_CARDS_STREAM,
    ADDED,
    CARDS_STREAM,
    MAX_BUCKET_BYTES,
    StoredCard,
    card_of,
)

logger = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 0.25
"""Seconds between two looks at which instances are there."""

MOST_WARNINGS: Final = 100
"""Endpoints of whose cards of one name a problem is logged: a component may have any number."""
MOST_BYTES: Final = 2 * MAX_BUCKET_BYTES
"""Bytes of cards that are known at a time, of the own region and of the others."""

MAX_TEXT_MODELS: Final = 8
"""Tokenizers that are kept beside those of models that are served."""


_Key = tuple[str, str, str, tuple[int, ...], tuple[tuple[str, str], ...]]
"""Name, tokenizer, template, ends and special tokens of a model: what its text is made of."""


class ServedModel(NamedTuple):
    """A model that is served.

    Attributes:
        instances: how many serve it; 0 only for one that was added by hand.
    """

    card: ModelCard
    instances: int


class CardView:
    """The cards that are known, without I/O. A card counts while its owner is there, and the name
    belongs to the component of its endpoint. Times are of one monotonic clock.

    Args:
        owners: the instances of an endpoint's component: ids and incarnations of each.
        names: to whom names belong, and the cards that operators added.
    """

    def __init__(
        self, owners: Callable[[ModelCard], list[tuple[str, str]]], names: NameView
    ) -> None:
        self._owners = owners
        self._names = names
        self._by_subject: dict[str, StoredCard] = {}
        self._ends: dict[str, float] = {}
        self._by_name: dict[str, set[str]] = {}
        self._bytes = 0
        # The endpoints of whose cards a problem is in the log, by name.
        self._warned: dict[str, set[str]] = {}

    def put(self, subject: str, stored: StoredCard, now: float) -> None:
        """A card was written or renewed.

        The oldest make room for it where there are more than the bucket can hold, which says of
        none that it had to go.
        """
        before = self._by_subject.pop(subject, None)
        self._by_subject[subject] = stored
        self._bytes += stored.size - (before.size if before is not None else 0)
        self._by_name.setdefault(stored.card.name, set()).add(subject)
        self._ends[subject] = math.inf if stored.ttl is None else now + stored.ttl
        while self._bytes > MOST_BYTES:
            self.withdraw(next(iter(self._by_subject)))

    def withdraw(self, subject: str) -> None:
        """A card was taken back."""
        self._ends.pop(subject, None)
        stored = self._by_subject.pop(subject, None)
        if stored is not None:
            self._bytes -= stored.size
            name = stored.card.name
            subjects = self._by_name[name]
            subjects.discard(subject)
            if not subjects:
                del self._by_name[name]
                self._warned.pop(name, None)

    def begin_reading(self, now: float, *, abroad: bool = False) -> None:
        """All cards of the own region, or of the others, are about to be read; those that are not
        come again have ended."""
        for subject in self._ends:
            if subject.startswith(f"{ABROAD}.") is abroad:
                self._ends[subject] = now

    def models(self) -> list[ServedModel]:
        """The models that are served now, by name; a name has several where they are asked for
        different things."""
        names = sorted({*self._by_name, *self._names.names_added})
        return [served for name in names for served in self.named(name)]

    def named(self, name: str) -> list[ServedModel]:
        """The models of a name that are served now."""
        served: list[ServedModel] = []
        for stored in self._of_its_owners(name):
            card, instances = stored.card, self._count(stored)
            if instances is None:
                continue
            same = next((one for one in served if one.card.type & card.type), None)
            if same is None:
                served.append(ServedModel(card, instances))
            elif problem := differences(card, same.card):
                self._tell(
                    name,
                    card.endpoint,
                    "its cards disagree, the one that was registered first counts: "
                    + "; ".join(problem),
                )
            else:
                served[served.index(same)] = ServedModel(same.card, same.instances + instances)
        return served

    def _of_its_owners(self, name: str) -> list[StoredCard]:
        """The cards of a name that are of a component that it belongs to, oldest first."""
        cards = [self._by_subject[subject] for subject in self._by_name.get(name, ())]
        cards = [stored for stored in cards if self._count(stored) is not None]
        # Of one component, whose instances trust each other.
        cards.sort(key=lambda one: (one.card.created, one.card.endpoint, one.owner))
        owners = self._names.owners(name)
        of = {stored.card.endpoint_name.component_name for stored in cards}
        # Workers of an earlier version register no names: they count where there is no choice.
        components = (
            of if owners is None and len(of) == 1 else set(owners.components if owners else ())
        )
        counting: list[StoredCard] = self._names.added(name)
        for stored in cards:
            if stored.card.endpoint_name.component_name in components:
                counting.append(stored)
            else:
                self._tell_other(stored.card, owners)
        return counting

    def _count(self, stored: StoredCard) -> int | None:
        """The number of instances of an owner that serve it; None where the card does not count."""
        there = self._owners(stored.card)
        if stored.owner == ADDED:
            return len(there)
        return sum(stored.owner in one for one in there) or None

    def _tell_other(self, card: ModelCard, owners: Owners | None) -> None:
        why = f"belongs to {owners}" if owners else "was registered by several components at once"
        component = card.endpoint_name.component_name
        self._tell(
            card.name,
            card.endpoint,
            f"the card of {card.endpoint} is passed over, since the name {why}; "
            f"`dynbus models bind {card.name} {component}` gives it to {component}",
        )

    def _tell(self, name: str, endpoint: str, problem: str) -> None:
        endpoints = self._warned.setdefault(name, set())
        if endpoint not in endpoints and len(endpoints) < MOST_WARNINGS:
            endpoints.add(endpoint)
            logger.warning("the model %s: %s", name, problem)

    def forget_ended(self, now: float) -> None:
        """Drop the cards that were not renewed, or not read again, and whose owners are gone. One
        whose owner is there may be kept from being renewed by the server alone."""
        for subject in [subject for subject, end in self._ends.items() if end <= now]:
            if self._count(self._by_subject[subject]) is None:
                self.withdraw(subject)


class Catalog(Openable):
    """The models of a bus, from `__aenter__` to `close`. Use it with `async with`.

    It opens within the bus's `connect_timeout` whether or not JetStream answers: what is not read
    by then is read as soon as it can be.

    Args:
        runtime: which must stay open meanwhile.
        cache_bytes: that each process in which texts of a model are tokenised remembers of them.
    """

    def __init__(self, runtime: Runtime, *, cache_bytes: int = CACHE_BYTES) -> None:
        super().__init__(runtime.background)
        self._runtime = runtime
        self._cache_bytes = cache_bytes
        self._names = NameView()
        self._view = CardView(self._owners, self._names)
        self._caught_up, self._names_caught_up = asyncio.Event(), asyncio.Event()
        self._expired = ExpiredRecords(runtime.bus.data.jetstream, CARDS_STREAM.name)
        self._failure = "JetStream has not answered yet"
        self._has_failed = False
        self._changed = asyncio.Event()
        self._models: list[ServedModel] | None = None
        self._name_changes = 0
        self._loading: dict[_Key, asyncio.Lock] = {}
        self._text_models: OrderedDict[_Key, TextModel] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Catalog of {len(self.models)} models>"

    @property
    def problem(self) -> str:
        """The reason for which it is not known which models there are; empty once it is."""
        if self._is_read and self._runtime.discovery.synchronized.is_set():
            return ""
        return f"the models on the bus cannot be read: {self._failure}"

    @property
    def _is_read(self) -> bool:
        return self._caught_up.is_set() and self._names_caught_up.is_set()

    @property
    def models(self) -> list[ServedModel]:
        """The models that are served now, by name; nothing before it is known to whom names
        belong."""
        if not self._is_read:
            return []
        if self._models is None:
            self._models = self._view.models()
        return self._models

    @property
    def registered(self) -> Mapping[str, tuple[ComponentName, ...]]:
        """The names of all models that were registered and not forgotten, and to whom each belongs,
        whether it is served now or not; nothing before that is known."""
        if not self._names_caught_up.is_set():
            return {}
        owned = ((name, self._names.owners(name)) for name in self._names.names)
        return {name: owners.components for name, owners in owned if owners is not None}

    def find(self, name: str, type: ModelType) -> ModelCard | None:
        """The model of a name that is asked for this; None where none is served now."""
        # Each request asks: instances are counted now and then.
        cards = (served.card for served in self.models if served.card.name == name)
        return next((card for card in cards if card.type & type), None)

    async def wait_for(
        self, name: str, type: ModelType, *, timeout: float | None = None
    ) -> ModelCard:
        """The model of a name, once it is served.

        Raises:
            NoInstances: it is not within `timeout` seconds.
        """
        with anyio.move_on_after(timeout):
            while (card := self.find(name, type)) is None:
                await self._change()
            return card
        why = f": {self.problem}" if self.problem else ""
        raise NoInstances(f"no instance serves the model {name!r} within {timeout:g} s{why}")

    async def changes(self) -> AsyncIterator[list[ServedModel]]:
        """Give the models that are served now, and again when they or the registered names
        change."""
        before: tuple[list[ServedModel], int] | None = None
        while True:
            known = self.models, self._name_changes
            if known != before:
                before = known
                yield known[0]
            await self._change()

    async def text_model(self, card: ModelCard) -> TextModel:
        """The tokenizer and the chat template of a model, from the object store; those that are
        here already are not read again.

        Raises:
            Unavailable: they cannot be read, or are not there (yet).
            BrokenModel: the tokenizer is none.
        """
        if not card.tokenizer_id:
            raise ValueError(f"the model {card.name} has no tokenizer")
        # All that it is made of.
        artefacts = (card.tokenizer_id, card.artefacts.get(TEMPLATE, ""))
        tokens = (tuple(card.eos_token_ids), tuple(sorted(card.special_tokens.items())))
        key = (card.base_model or card.name, *artefacts, *tokens)
        async with self._loading.setdefault(key, asyncio.Lock()):
            text_model = self._text_models.get(key)
            if text_model is None:
                text_model = self._text_models[key] = await self._load(card)
                self._forget_text_models()
            self._text_models.move_to_end(key)
            return text_model

    async def _load(self, card: ModelCard) -> TextModel:
        component = card.endpoint_name.component_name
        artefacts = Artefacts(self._runtime.bus.data.jetstream, component)
        serving = self._runtime.within_reach(component)
        regions = sorted({instance.region for instance in serving} - {""})
        try:
            tokenizer = await artefacts.get(card.artefacts[TOKENIZER], regions)
            digest = card.artefacts.get(TEMPLATE)
            source = (await artefacts.get(digest, regions)).decode() if digest else None
        except DynbusError as error:
            raise Unavailable(
                f"the tokenizer of the model {card.name} cannot be read now: {error}", started=False
            ) from error
        return await asyncio.to_thread(self._make, card, tokenizer, source)

    def _make(self, card: ModelCard, tokenizer: bytes, source: str | None) -> TextModel:
        name, special = card.base_model or card.name, card.special_tokens
        made = GuardedTokenizer(
            tokenizer,
            eos_token_ids=card.eos_token_ids,
            special_tokens=special,
            origin=f"the tokenizer of {name}",
            cache_bytes=self._cache_bytes,
        )
        template = ChatTemplate(source, model=name, special_tokens=special) if source else None
        return TextModel(name, made, template)

    def _forget_text_models(self) -> None:
        """Drop what was used longest ago of the models that are served no more."""
        served = {one.card.base_model or one.card.name for one in self.models}
        idle = [key for key in self._text_models if key[0] not in served]
        for key in idle[: max(0, len(idle) - MAX_TEXT_MODELS)]:
            del self._text_models[key], self._loading[key]

    # Keeping it current ----------------------------------------------------------------------

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        runtime = self._runtime
        runtime.discovery.begin()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read_own, CARDS_STREAM, self._consume_cards)
            tasks.start_soon(self._read_own, NAMES_STREAM, self._consume_names)
            if runtime.spills:
                tasks.start_soon(self._read_abroad)
            tasks.start_soon(self._expired.remove)
            tasks.start_soon(self._look)
            with anyio.move_on_after(runtime.bus.config.connect_timeout):
                await self._caught_up.wait()
                await self._names_caught_up.wait()
                await runtime.discovery.wait_synchronized(None)
            if self.problem:
                logger.warning("%s; models appear once that works", self.problem)
            yield
            tasks.cancel_scope.cancel()

    async def _read_own(
        self, bucket: StreamConfig, consume: Callable[[], Awaitable[OrderedConsumer]]
    ) -> None:
        try:
            await self._read(bucket, consume)
        except DynbusError:
            # The first reason ends the catalog. A second one would make a group of them, which
            # commands show as a traceback.
            if self._has_failed:
                return
            self._has_failed = True
            raise

    async def _read(
        self, bucket: StreamConfig, consume: Callable[[], Awaitable[OrderedConsumer]]
    ) -> None:
        jetstream = self._runtime.bus.data.jetstream
        await follow(jetstream, bucket, consume, self._failed, Unavailable)

    def _failed(self, error: DynbusError) -> None:
        self._failure = str(error)

    async def _read_abroad(self) -> None:
        """Follow the models of other regions, once the servers are of a region."""
        bus = self._runtime.bus
        while True:
            if bus.data.region:
                try:
                    await self._read(ABROAD_CARDS_STREAM, self._consume_cards_abroad)
                except PermissionDenied as error:
                    logger.warning("models of other regions are not known here: %s", error)
                    return
            await anyio.sleep(bus.config.lease_ttl)

    async def _consume_cards(self) -> OrderedConsumer:
        return await self._expired.consume(
            self._receive,
            on_restart=lambda: self._view.begin_reading(monotonic()),
            on_caught_up=self._caught_up.set,
        )

    async def _consume_cards_abroad(self) -> OrderedConsumer:
        data = self._runtime.bus.data

        def receive(message: StoredMessage) -> None:
            if message.subject.split(".")[1] != data.region:
                self._receive(message)

        return await data.jetstream.consume(
            ABROAD_CARDS_STREAM.name,
            receive,
            last_per_subject=True,
            on_restart=lambda: self._view.begin_reading(monotonic(), abroad=True),
        )

    async def _consume_names(self) -> OrderedConsumer:
        def caught_up() -> None:
            self._names.end_reading()
            self._name_changes += 1
            self._names_caught_up.set()

        return await self._runtime.bus.data.jetstream.consume(
            NAMES_STREAM.name,
            self._receive_name,
            last_per_subject=True,
            on_restart=self._names.begin_reading,
            on_caught_up=caught_up,
        )

    def _receive(self, message: StoredMessage) -> None:
        if message.is_marker:
            self._view.withdraw(message.subject)
        elif (stored := card_of(message)) is not None:
            self._view.put(message.subject, stored, monotonic())
        self._models = None
        self._changed.set()

    def _receive_name(self, message: StoredMessage) -> None:
        self._names.put(message)
        self._name_changes += 1
        self._models = None
        self._changed.set()

    async def _look(self) -> None:
        """See instances come and go, of which nobody tells."""
        before: list[ServedModel] = []
        while True:
            await anyio.sleep(LOOK_INTERVAL)
            self._view.forget_ended(monotonic())
            self._models = None
            if (models := self.models) != before:
                before = models
                self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        with anyio.move_on_after(LOOK_INTERVAL):
            await self._changed.wait()

    def _owners(self, card: ModelCard) -> list[tuple[str, str]]:
        name = card.endpoint_name
        return [
            (instance.id, instance.record.incarnation)
            for instance in self._runtime.within_reach(name.component_name)
            if name.endpoint in instance.record.endpoints
        ]
