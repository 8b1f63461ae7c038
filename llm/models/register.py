"""Registering a model: its card says on the bus who serves it, for as long as somebody does."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, TypedDict, Unpack, overload
from weakref import WeakKeyDictionary

import anyio
import msgspec

from dynbus.actors.calling.clients import EndpointAddress
from dynbus.actors.runtime import Actor
from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.errors import ConfigError, DynbusError, Unavailable
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.records.discovery import Discovery
from dynbus.bus.records.leased_record import LeasedRecord
from dynbus.bus.records.presence import is_there
from dynbus.bus.transport import ConnectionState, StoredMessage
from dynbus.llm.generation import DefaultSampling

from .card import (
    CONFIGURATION,
    DEFAULT_BLOCK_SIZE,
    TEMPLATE,
    TOKENIZER,
    ModelCard,
    ModelInput,
    ModelType,
    check_name,
    check_sampling,
    check_user_data,
    differences,
)
from .description import Description, configuration_json, describe
from .origins import OnProgress, parse_source
from .records import (
    ADDED,
    CARDS_STREAM,
    MARKER_TTL,
    MAX_ARTEFACT_BYTES,
    MAX_CARD_BYTES,
    Artefacts,
    StoredCard,
    card_subject,
    digest_of,
    read_cards,
)
from .source import LocalModel, resolve

logger = logging.getLogger(__name__)

RETRY_DELAY: Final = 0.5
"""Seconds after which a card that could not be renewed is tried again."""

CHECKED: Final = 60.0
"""Seconds between two looks at whether the artefacts are still there, and what else is."""

ASKED: Final = 0.5
"""Seconds between two questions whether the owners of other cards are still there."""


class _Target(NamedTuple):
    """What a model is registered for.

    Attributes:
        owner: see `StoredCard`.
        ended: set when the owner has ended; None for one that lives as long as the bus.
    """

    bus: Bus
    discovery: Discovery
    endpoint: EndpointName
    owner: str
    ended: asyncio.Event | None = None


class _Options(TypedDict, total=False):
    context_length: int | None
    kv_cache_block_size: int | None
    migration_limit: int
    user_data: Mapping[str, Any] | None
    default_sampling: Mapping[str, float] | Literal["openai"] | None
    progress: OnProgress | None


@overload
async def register_llm(
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: EndpointAddress | Actor | Callable[..., Any],
    model_path: str | os.PathLike[str],
    model_name: str | None = None,
    **options: Unpack[_Options],
) -> ModelCard: ...
@overload
async def register_llm(
    model_input: ModelType,
    model_type: EndpointAddress | Actor | Callable[..., Any],
    endpoint: str | os.PathLike[str],
    model_path: str | None = None,
    *,
    model_name: str | None = None,
    **options: Unpack[_Options],
) -> ModelCard: ...


async def register_llm(
    model_input: Any,
    model_type: Any,
    endpoint: Any,
    model_path: Any = None,
    model_name: str | None = None,
    *,
    context_length: int | None = None,
    kv_cache_block_size: int | None = None,
    migration_limit: int = 0,
    user_data: Mapping[str, Any] | None = None,
    default_sampling: Mapping[str, float] | Literal["openai"] | None = None,
    progress: OnProgress | None = None,
) -> ModelCard:
    """Say on the bus that an endpoint serves a model, until its instance or process ends.

    The files of the model are had here first (see `resolve`); front ends need none of them: what
    they use of it, its tokenizer, its chat template and its configuration, is kept in JetStream.
    With `ModelInput.Text` nothing is read of the model, and `model_path` only names it.

    The earlier form `register_llm(model_type, endpoint, model_path, model_name)` is taken too.
    There `ModelType.Backend` stands for tokens, and the other types for text.

    Args:
        model_input: what the endpoint takes.
        model_type: what the model is asked for; several with `|`. `Backend` stands for all that
            can be made of tokens.
        endpoint: `runtime.endpoint("namespace.component.endpoint")`; in an actor its handler,
            `self.generate`, or the actor itself where it has only one.
        model_path: where the model's files are, or come from.
        model_name: by which requests ask for it; unless given, the name of the repository, the
            folder or the file.
        context_length: in tokens; unless given, what the model was trained for.
        kv_cache_block_size: tokens of a block of the engine's KV cache; 16 unless given.
        migration_limit: how often a request may be moved to another instance.
        user_data: whatever else the worker says of itself, as JSON.
        default_sampling: how tokens are drawn where a request does not say it, by the names of
            `DefaultSampling`; what is not named is as the model's files recommend. "openai" takes
            nothing of these: temperature 1, and no cut.
        progress: called while files are downloaded.

    Returns:
        The card, as it is stored.

    Raises:
        ConfigError: an argument is not usable; or another card of this name says otherwise, and in
            what.
        ModelUnavailable: the files cannot be had.
        BrokenModel, UnsupportedModel, BrokenTemplate: what is in them cannot be used.
        Unavailable: JetStream does not answer.
    """
    if isinstance(model_input, ModelType):
        model_name = model_name or model_path
        model_input, model_type, endpoint, model_path = (
            ModelInput.Tokens if model_input & ModelType.Backend else ModelInput.Text,
            model_input,
            model_type,
            endpoint,
        )
    _check_types(model_input, model_type)
    target = _target(endpoint)
    _check_number("kv_cache_block_size", kv_cache_block_size, 1)
    _check_number("context_length", context_length, 1)
    _check_number("migration_limit", migration_limit, 0)
    if model_path is None:
        raise ConfigError("register_llm needs a model_path")
    sampling = _check_default_sampling(default_sampling, model_input)
    card = ModelCard(
        name="",
        endpoint=str(target.endpoint),
        input=model_input,
        types=model_type.names,
        context_length=context_length,
        kv_cache_block_size=kv_cache_block_size or DEFAULT_BLOCK_SIZE,
        migration_limit=migration_limit,
        user_data=check_user_data(user_data),
        created=unix_time(),
    )
    files: list[bytes] = []
    if model_input is ModelInput.Text:
        name = model_name if model_name is not None else _name_of(model_path)
    else:
        model = await resolve(model_path, progress=progress)
        name = model_name if model_name is not None else model.name
        description = await asyncio.to_thread(describe, model)
        chosen = _with(description.sampling, sampling)
        description = replace(description, sampling=chosen)
        card, files = _described(card, description, model)
    card = msgspec.structs.replace(card, name=check_name(name))
    await _register(target, card, files)
    return card


async def add_model(side_bus: Bus, discovery: Discovery, card: ModelCard) -> None:
    """Keep the card of a model whose worker does not register it, until `remove_model`.

    Raises:
        ConfigError: another card of its name says otherwise, and in what.
    """
    target = _Target(side_bus, discovery, card.endpoint_name, ADDED)
    await _refuse_conflicts(target, card)
    jetstream = side_bus.data.jetstream
    await jetstream.ensure_stream(CARDS_STREAM)
    await jetstream.publish(
        card_subject(target.endpoint, card.name, ADDED), msgspec.json.encode(card)
    )


async def remove_model(bus: Bus, name: str) -> int:
    """Remove the cards of a name that were added by `add_model`; returns how many.

    Raises:
        ConfigError: there is none, and who registered the model if somebody did.
    """
    jetstream = bus.data.jetstream
    cards = await read_cards(jetstream, name)
    added = [one for one in cards if one.owner == ADDED]
    if not added:
        others = sorted({one.card.endpoint for one in cards})
        raise ConfigError(
            f"the model {name!r} was registered by {', '.join(others)}: it goes when they stop"
            if others
            else f"there is no model {name!r}: `dynbus models` lists those that there are"
        )
    for one in added:
        await jetstream.publish(
            card_subject(one.card.endpoint_name, name, ADDED),
            b"",
            ttl=MARKER_TTL,
            headers={"KV-Operation": "DEL"},
        )
    return len(added)


# What is checked --------------------------------------------------------------------------------


def _check_types(model_input: object, model_type: object) -> None:
    if not isinstance(model_input, ModelInput):
        raise ConfigError(
            f"model_input {model_input!r} is not usable: give ModelInput.Tokens or ModelInput.Text"
        )
    if not isinstance(model_type, ModelType) or not model_type:
        raise ConfigError(
            f"model_type {model_type!r} is not usable: give ModelType.Chat, Completions, Embedding "
            "or Backend, or several of them with |"
        )
    if model_input is ModelInput.Text and model_type & ModelType.Backend:
        raise ConfigError(
            "ModelType.Backend takes tokens: register it with ModelInput.Tokens, or say with "
            "ModelType.Chat and ModelType.Completions what its text is"
        )


def _check_number(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} {value!r} is not usable: give a whole number from {least} on")


def _check_default_sampling(given: object, model_input: ModelInput) -> DefaultSampling | None:
    """What was asked for: None to take nothing of the model's, no field to take all of it."""
    if given is None:
        return DefaultSampling()
    if model_input is ModelInput.Text:
        raise ConfigError("default_sampling is for ModelInput.Tokens: a worker of text has its own")
    return None if given == "openai" else check_sampling(given, "default_sampling")


def _with(models_own: DefaultSampling, chosen: DefaultSampling | None) -> DefaultSampling:
    """The model's own default sampling, but for what was chosen."""
    if chosen is None:
        return DefaultSampling()
    return msgspec.structs.replace(models_own, **msgspec.to_builtins(chosen))


def _target(endpoint: object) -> _Target:
    if isinstance(endpoint, EndpointAddress):
        side = endpoint.side
        return _Target(side.bus, side.discovery, endpoint.name, side.bus.incarnation)
    actor: object = endpoint
    attribute = ""
    if not isinstance(actor, Actor):
        actor = getattr(endpoint, "__self__", None)
        attribute = getattr(endpoint, "__name__", "")
    if not isinstance(actor, Actor):
        raise ConfigError(
            f"endpoint {endpoint!r} is not usable: give runtime.endpoint("
            '"namespace.component.endpoint"), or in an actor its handler, such as self.generate'
        )
    handlers = type(actor).__dynbus_handlers__
    if not attribute and len(handlers) == 1:
        (attribute,) = handlers
    if attribute not in handlers:
        raise ConfigError(
            f"{type(actor).__name__} has the handlers {', '.join(handlers)}: say which one serves "
            "the model, such as self." + next(iter(handlers))
        )
    runtime, instance = actor.runtime, actor.__dynbus_instance__
    namespace, component, instance_id = instance.name
    name = EndpointName(namespace, component, handlers[attribute].name)
    return _Target(runtime.bus, runtime.discovery, name, instance_id, instance.stopped)


def _name_of(model_path: str | os.PathLike[str]) -> str:
    """What a model is called whose files nobody reads."""
    text = os.fspath(model_path)
    try:
        source = parse_source(text)
    except ConfigError:
        return text
    repository = getattr(source, "repository", "")
    named: str = getattr(source, "model_name", "") or getattr(source, "name", "")
    path = getattr(source, "path", None)
    if path is not None:
        named = path.stem if path.suffix == ".gguf" else path.resolve().name
    return repository.rpartition("/")[2] or named


def _described(
    card: ModelCard, description: Description, model: LocalModel
) -> tuple[ModelCard, list[bytes]]:
    """The card with what the model's files say, and the artefacts.

    Raises:
        ConfigError: what was asked for does not fit the model.
    """
    trained = description.context_length
    if card.context_length is not None and trained is not None and card.context_length > trained:
        raise ConfigError(
            f"context_length {card.context_length} is more than the {trained} tokens that "
            f"{model.name} was made for: give {trained} at most, or leave it out"
        )
    kind = card.type
    if kind & ModelType.Chat and description.template is None:
        raise ConfigError(
            f"{model.origin} has no chat template: register ModelType.Completions, or put a "
            "chat_template.jinja into its folder"
        )
    if kind & ModelType.Backend:
        chat = ModelType.Chat if description.template is not None else ModelType(0)
        kind = (kind & ~ModelType.Backend) | ModelType.Completions | chat
    artefacts = {
        TOKENIZER: description.tokenizer.to_json(),
        CONFIGURATION: configuration_json(description),
    }
    if description.template is not None:
        artefacts[TEMPLATE] = description.template.encode()
    for name, data in artefacts.items():
        if len(data) > MAX_ARTEFACT_BYTES:
            raise ConfigError(
                f"the {name} of {model.origin} has {len(data)} bytes: at most "
                f"{MAX_ARTEFACT_BYTES} are kept for front ends"
            )
    described = msgspec.structs.replace(
        card,
        types=kind.names,
        context_length=card.context_length or trained,
        default_sampling=description.sampling,
        eos_token_ids=list(description.tokenizer.eos_token_ids),
        special_tokens=dict(description.tokenizer.special_tokens),
        artefacts={name: digest_of(data) for name, data in artefacts.items()},
    )
    return described, list(artefacts.values())


# On the bus -------------------------------------------------------------------------------------

_registered: Final[WeakKeyDictionary[Bus, dict[str, ModelCard]]] = WeakKeyDictionary()
"""The cards that each process holds, by their subjects."""


async def _register(target: _Target, card: ModelCard, files: Sequence[bytes]) -> None:
    subject = card_subject(target.endpoint, card.name, target.owner)
    data = msgspec.json.encode(card)
    if len(data) > MAX_CARD_BYTES:
        raise ConfigError(
            f"the card of {card.name} has {len(data)} bytes: at most {MAX_CARD_BYTES}"
        )
    held = _registered.setdefault(target.bus, {})
    if subject in held:
        found = differences(card, held[subject])
        if found or card.types != held[subject].types:
            raise _conflict(card, "this process", found or ["it is asked for something else"])
        return
    held[subject] = card
    try:
        await _refuse_conflicts(target, card)
        artefacts = Artefacts(target.bus.data.jetstream)
        if files:
            await artefacts.keep(files)
        registration = _Registration(target, subject, data, files, artefacts)
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


async def _refuse_conflicts(target: _Target, card: ModelCard) -> None:
    """Pass unless another card of this name says otherwise whose owner is there.

    An owner that was killed has a card for as long as its lease, which is waited for.
    """
    ends = monotonic() + target.bus.config.lease_ttl + 2 * ASKED
    while True:
        other = await _conflicting(target, card)
        if other is None:
            return
        if monotonic() > ends or await _owner_is_there(target, other):
            raise _conflict(card, _told_owner(other), differences(card, other.card))
        await anyio.sleep(ASKED)


async def _refuse_later(target: _Target, card: ModelCard, sequence: int) -> None:
    """Of two that register at once and disagree, the one that came first stays."""
    for one in await read_cards(target.bus.data.jetstream, card.name):
        found = differences(card, one.card)
        if found and one.sequence < sequence and one.owner != target.owner:
            raise _conflict(card, _told_owner(one), found)


async def _conflicting(target: _Target, card: ModelCard) -> StoredCard | None:
    for one in await read_cards(target.bus.data.jetstream, card.name):
        is_mine = one.owner == target.owner and one.card.endpoint == card.endpoint
        if not is_mine and differences(card, one.card):
            return one
    return None


async def _owner_is_there(target: _Target, other: StoredCard) -> bool:
    if other.owner == ADDED:
        return True
    discovery = target.discovery
    await discovery.wait_synchronized(target.bus.config.connect_timeout)
    endpoint = other.card.endpoint_name
    for instance in discovery.view.instances(endpoint.namespace, endpoint.component, monotonic()):
        if other.owner in (instance.id, instance.record.incarnation):
            # Nobody knows while the connection breaks; it is asked again then.
            return await is_there(target.bus, instance.record.name) is True
    return False


def _told_owner(other: StoredCard) -> str:
    if other.owner == ADDED:
        return "`dynbus models add` (`dynbus models rm` removes it)"
    return f"{other.card.endpoint} ({other.owner})"


def _conflict(card: ModelCard, owner: str, found: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"the model {card.name!r} is registered by {owner} with another card: {'; '.join(found)}. "
        "Make them agree, or give another model_name"
    )


class _Registration:
    """A card that is kept alive until its owner ends."""

    def __init__(
        self,
        target: _Target,
        subject: str,
        data: bytes,
        files: Sequence[bytes],
        artefacts: Artefacts,
    ) -> None:
        # On the control lane, which nothing of the main loop delays.
        self._lane = lane = target.bus.lane
        self._target = target
        self._data = data
        self._files = {digest_of(file): file for file in files}
        self._artefacts = artefacts
        self._now = asyncio.Event()
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
        """Where the card is in the bucket."""
        return self._record.lease.revision

    async def begin(self) -> None:
        """Write the card for the first time.

        Raises:
            DynbusError: it cannot be written.
        """
        await self._lane.run(self._record.write(self._data))

    async def withdraw(self) -> None:
        """Take the card back."""
        is_connected = self._lane.connection.state is ConnectionState.CONNECTED
        with suppress(Unavailable):
            # The lane is closed: the card expires by itself.
            await self._lane.run(self._record.withdraw(is_connected=is_connected))

    async def keep(self) -> None:
        """Renew the card until its owner ends, then take it back."""
        end_listening = self._target.bus.data.on_state(self._on_state)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._renew)
                tasks.start_soon(self._look_after)
                if self._target.ended is None:
                    await anyio.sleep_forever()
                else:
                    await self._target.ended.wait()
                tasks.cancel_scope.cancel()
        finally:
            end_listening()
            _registered.get(self._target.bus, {}).pop(self._record.subject, None)
            with anyio.move_on_after(2.0, shield=True):
                await self.withdraw()

    async def _renew(self) -> None:
        usual = wait = self._record.lease.ttl / 3
        while True:
            with anyio.move_on_after(wait):
                await self._now.wait()
            self._now.clear()
            try:
                await self._lane.run(self._record.write(self._data))
                wait = usual
            except DynbusError as error:
                # The lane may be connected again a moment after the data connection.
                wait = min(usual, RETRY_DELAY)
                await self._lane.run(self._record.after_failure(error))

    async def _look_after(self) -> None:
        while True:
            await anyio.sleep(CHECKED)
            try:
                await self._artefacts.make_sure(self._files)
                swept = await self._artefacts.sweep()
                if swept:
                    logger.info("%d artefacts of models that are gone were removed", swept)
            except DynbusError as error:
                logger.warning("the artefacts of models were not looked after: %s", error)

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._now.set()

    async def _make_bucket(self) -> None:
        await self._lane.connection.jetstream.ensure_stream(CARDS_STREAM)

    async def _remake_bucket(self) -> None:
        # The disk that broke it may be full still.
        await self._lane.connection.jetstream.ensure_stream(CARDS_STREAM._replace(in_memory=True))


def _is_mine(stored: StoredMessage) -> bool:
    """Whatever is stored under an owner is that owner's."""
    return True
