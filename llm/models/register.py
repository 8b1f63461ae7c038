"""`register_llm`: its arguments and the model's files become a card, which is published."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

import msgspec

from dynbus import Actor, ConfigError, EndpointName
from dynbus.llm.embedding import Pooling
from dynbus.llm.engine.worker import EngineWorker
from dynbus.llm.generation import DefaultSampling
from dynbus.spi import EndpointAddress, ResumeRule, unix_time

from .artefacts import MAX_ARTEFACT_BYTES, digest_of
from .card import (
    CONFIGURATION,
    DEFAULT_BLOCK_SIZE,
    TEMPLATE,
    TOKENIZER,
    ModelCard,
    ModelInput,
    ModelType,
    check_lora_name,
    check_modalities,
    check_name,
    check_reasoning_parser,
    check_sampling,
    check_tool_call_parser,
    check_user_data,
)
from .description import Description, configuration_json, describe
from .mirror import Mirror
from .origins import HubSource, LocalSource, OnProgress, PackageSource, parse_source
from .publishing import Target, publish_card
from .source import LocalModel, resolve


class _Options(TypedDict, total=False):
    context_length: int | None
    kv_cache_block_size: int | None
    migration_limit: int
    user_data: Mapping[str, Any] | None
    default_sampling: Mapping[str, float] | Literal["openai"] | None
    tokenizer: str | os.PathLike[str] | None
    modalities: Collection[str] | None
    tool_call_parser: str
    reasoning_parser: str
    progress: OnProgress | None


@overload
async def register_llm(
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: EndpointAddress | Actor | Target | Callable[..., Any],
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
    migration_limit: int = ResumeRule.MIGRATION_LIMIT,
    user_data: Mapping[str, Any] | None = None,
    default_sampling: Mapping[str, float] | Literal["openai"] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    modalities: Collection[str] | None = (),
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    progress: OnProgress | None = None,
) -> ModelCard:
    """Say on the bus that an endpoint serves a model, until its instance or process ends.

    The files of the model are had here first (see `resolve`), also from the bus's mirror. Front
    ends need none of them: what they use of it, its tokenizer, its chat template and its
    configuration, is kept in JetStream.
    With `ModelInput.Text` nothing is read of the model, and `model_path` only names it.

    The earlier form `register_llm(model_type, endpoint, model_path, model_name)` is taken too.
    There `ModelType.Backend` stands for tokens, and the other types for text.

    Args:
        model_input: what the endpoint takes.
        model_type: what the model is asked for; several with `|`. `Backend` stands for all that
            can be made of tokens.
        endpoint: `runtime.endpoint("namespace.component.endpoint")`; in an actor its handler,
            `self.generate`, or the actor itself where it is an `EngineWorker` or has only one.
        model_path: where the model's files are, or come from.
        model_name: by which requests ask for it; unless given, the name of the repository, the
            folder or the file.
        context_length: in tokens; unless given, what the model was trained for.
        kv_cache_block_size: tokens of a block of the engine's KV cache; 16 unless given.
        migration_limit: how often a request moves to another instance when its own is lost, drains
            or raises `Migrate`. A stream of tokens goes on behind what has come; a request for text
            begins again, where nothing has come of it, and a whole answer where its handler is
            `idempotent`, whatever has come. 0 for never.
        user_data: whatever else the worker says of itself, as JSON.
        default_sampling: how tokens are drawn where a request does not say it, by the names of
            `DefaultSampling`; what is not named is as the model's files recommend. "openai" takes
            nothing of these: temperature 1, and no cut.
        tokenizer: with `ModelInput.Text`, where the model's files are, or come from: front ends
            route its requests by their tokens, and send the text all the same.
        modalities: with `ModelInput.Text`, what the endpoint takes beside text: `image`, `audio`.
            Front ends refuse what it does not take; None has them pass all on.
        tool_call_parser, reasoning_parser: how tool calls and reasoning are written in its outputs,
            by the names that vLLM gives; "auto" goes by the chat template, "none" looks for none.
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
    target = target_of(endpoint)
    _check_number("kv_cache_block_size", kv_cache_block_size, 1)
    _check_number("context_length", context_length, 1)
    _check_number("migration_limit", migration_limit, 0)
    if model_path is None:
        raise ConfigError("register_llm needs a model_path")
    sampling = _check_default_sampling(default_sampling, model_input)
    parsers = {
        "tool_call_parser": check_tool_call_parser(tool_call_parser),
        "reasoning_parser": check_reasoning_parser(reasoning_parser),
    }
    card = ModelCard(
        name="",
        endpoint=str(target.endpoint),
        input=model_input,
        types=model_type.names,
        context_length=context_length,
        kv_cache_block_size=kv_cache_block_size or DEFAULT_BLOCK_SIZE,
        migration_limit=migration_limit,
        idempotent=target.idempotent and model_input is ModelInput.Text,
        user_data=check_user_data(user_data),
        created=unix_time(),
    )
    taken = check_modalities(modalities)
    files: list[bytes] = []
    mirror = Mirror(target.bus.data.jetstream)
    if model_input is ModelInput.Text:
        for argument, given in parsers.items():
            if given is not None:
                raise ConfigError(
                    f"{argument} is for ModelInput.Tokens: a worker of text reads its own outputs"
                )
        card = msgspec.structs.replace(card, modalities=taken)
        name = model_name if model_name is not None else _name_of(model_path)
        if tokenizer is not None:
            model = await resolve(tokenizer, weights=False, progress=progress, mirror=mirror)
            description = await asyncio.to_thread(describe, model)
            card, files = _with_artefacts(card, description, model)
    else:
        if tokenizer is not None:
            raise ConfigError("tokenizer is for ModelInput.Text: model_path has that of tokens")
        if taken:
            raise ConfigError(
                "modalities is for ModelInput.Text: an engine of tokens takes nothing beside them"
            )
        model = await resolve(model_path, weights=False, progress=progress, mirror=mirror)
        name = model_name if model_name is not None else model.name
        description = await asyncio.to_thread(describe, model)
        chosen = _with(description.sampling, sampling)
        description = replace(description, sampling=chosen)
        card, files = _described(card, description, model, parsers)
    card = msgspec.structs.replace(card, name=check_name(name))
    await publish_card(target, card, files)
    return card


async def register_adapter(
    endpoint: Actor | Callable[..., Any],
    base: ModelCard,
    name: str,
    lora_name: str,
    unloaded: asyncio.Event,
) -> ModelCard:
    """Say on the bus that an endpoint serves a model with a LoRA adapter under a name of its own,
    until its instance ends or `unloaded` is set.

    Front ends send its requests with `lora_name`, to instances alone that announce the adapter in
    their metadata (`kv_loras`).

    Args:
        endpoint: see `register_llm`.
        base: the card of the model, as `register_llm` returned it.
        name: by which requests ask for it.
        lora_name: by which the engine knows the adapter.

    Returns:
        The card, as it is stored.

    Raises:
        ConfigError: a name is not usable; or another card of it says otherwise, and in what.
        Unavailable: JetStream does not answer.
    """
    target = target_of(endpoint)
    card = msgspec.structs.replace(
        base,
        name=check_name(name),
        base_model=base.name,
        lora_name=check_lora_name(lora_name),
        created=unix_time(),
    )
    # Its files are kept for the model.
    await publish_card(target._replace(ended=(*target.ended, unloaded)), card, ())
    return card


async def register_embeddings(
    card: ModelCard, endpoint: Actor | Target | Callable[..., Any], pooling: Pooling
) -> ModelCard:
    """Say on the bus that an endpoint makes embeddings of a model that is registered for its
    tokens.

    Args:
        card: of the model, from `register_llm`.

    Returns:
        The card for embeddings, as it is stored.

    Raises:
        ConfigError: another card of this name says otherwise, and in what.
        Unavailable: JetStream does not answer.
    """
    target = target_of(endpoint)
    made = msgspec.structs.replace(
        card,
        endpoint=str(target.endpoint),
        types=ModelType.Embedding.names,
        default_sampling=DefaultSampling(),
        pooling=pooling,
    )
    # Its artefacts are those of the model, which keeps them.
    await publish_card(target, made, ())
    return made


# What is checked --------------------------------------------------------------------------------


def _check_types(model_input: object, model_type: object) -> None:
    if not isinstance(model_input, ModelInput):
        raise ConfigError(
            f"model_input {model_input!r} is not usable: give ModelInput.Tokens or ModelInput.Text"
        )
    if not isinstance(model_type, ModelType) or not model_type:
        raise ConfigError(
            f"model_type {model_type!r} is not usable: give ModelType.Chat, Completions, "
            "Embedding, Score or Backend, or several of them with |"
        )
    if model_input is ModelInput.Text and model_type & ModelType.Backend:
        raise ConfigError(
            "ModelType.Backend takes tokens: register it with ModelInput.Tokens, or say with "
            "ModelType.Chat and ModelType.Completions what its text is"
        )


def _check_number(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
        raise ConfigError(
            f"{name} {value!r} is not usable: give a whole number from {least} on, below 2^53"
        )


def _check_default_sampling(given: object, model_input: ModelInput) -> DefaultSampling | None:
    """The default sampling asked for: None to take nothing of the model's, no field to take all of
    it.
    """
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


def target_of(endpoint: object) -> Target:
    """The target that is meant by an endpoint of a runtime, an actor or its handler.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(endpoint, Target):
        return endpoint
    if isinstance(endpoint, EndpointAddress):
        side = endpoint.side
        return Target(side.bus, side.discovery, endpoint.name, side.bus.incarnation)
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
    if not attribute and isinstance(actor, EngineWorker):
        # Its other handlers are about the engine itself.
        attribute = EngineWorker.generate.__name__
    if attribute not in handlers:
        raise ConfigError(
            f"{type(actor).__name__} has the handlers {', '.join(handlers)}: say which one serves "
            "the model, such as self." + next(iter(handlers))
        )
    runtime, instance = actor.runtime, actor.__dynbus_instance__
    namespace, component, instance_id = instance.name
    spec = handlers[attribute]
    name = EndpointName(namespace, component, spec.name)
    ended = (instance.stopped,)
    return Target(runtime.bus, runtime.discovery, name, instance_id, ended, spec.idempotent)


def _name_of(model_path: str | os.PathLike[str]) -> str:
    """The name of a model whose files nobody reads."""
    text = os.fspath(model_path)
    try:
        source = parse_source(text)
    except ConfigError:
        return text
    match source:
        case HubSource():
            return source.repository.rpartition("/")[2]
        case PackageSource():
            return source.model_name or source.name
        case LocalSource(path):
            return path.stem if path.suffix == ".gguf" else path.resolve().name


def _described(
    card: ModelCard,
    description: Description,
    model: LocalModel,
    parsers: Mapping[str, str | None],
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
    described = msgspec.structs.replace(
        card,
        types=kind.names,
        context_length=card.context_length or trained,
        default_sampling=description.sampling,
        **{
            name: getattr(description, name) if given is None else given
            for name, given in parsers.items()
        },
    )
    return _with_artefacts(described, description, model)


def _with_artefacts(
    card: ModelCard, description: Description, model: LocalModel
) -> tuple[ModelCard, list[bytes]]:
    """The card with what front ends need for the model's text, and the artefacts.

    Raises:
        ConfigError: one is too large to be kept.
    """
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
        eos_token_ids=list(description.tokenizer.eos_token_ids),
        special_tokens=dict(description.tokenizer.special_tokens),
        artefacts={name: digest_of(data) for name, data in artefacts.items()},
    )
    return described, list(artefacts.values())
