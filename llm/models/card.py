"""The card of a model: what is served under its name, by which endpoint, and how."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum, Flag, auto
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from dynbus import ConfigError, EndpointName
from dynbus.llm.generation import DefaultSampling
from dynbus.llm.parsing.output_parser import REASONING_PARSERS, TOOL_CALL_PARSERS
from dynbus.spi import ResumeRule

VERSION: Final = 1
MAX_NAME: Final = 256
MAX_USER_DATA: Final = 32 * 1024
"""Bytes as JSON."""

DEFAULT_BLOCK_SIZE: Final = 16

# Lists of all models have these numbers, which some clients read into 64 bits: a card with others
# is none.
_Tokens = Annotated[int, Meta(ge=0, lt=2**53)]
_Time = Annotated[float, Meta(ge=0, lt=2**53)]

MODALITIES: Final = ("image", "audio")
"""The kinds of content beside text that a model may take."""

TOKENIZER: Final = "tokenizer.json"
TEMPLATE: Final = "chat_template.jinja"
CONFIGURATION: Final = "config.json"


class ModelInput(Enum):
    """The input of a model's endpoint.

    Attributes:
        Tokens: `GenerateRequest`, with `token_ids`; text becomes tokens before it.
        Text: the body of a request as a client of OpenAI's API sends it.
    """

    Tokens = "tokens"
    Text = "text"


class ModelType(Flag):
    """The uses of a model; several may be combined with `|`.

    Attributes:
        Chat: chat completions.
        Completions: completions of a text. `Completion` is another name of it.
        Embedding: embeddings, of tokens by `EmbedRequest`.
        Score: scores of pairs of texts, of the tokens of each by `EmbedRequest`. Models for
            `Embedding` have scores too, by the angles between their embeddings.
        Backend: tokens go in and come out. Chat, where the model has a template, and completions
            are made of it.
    """

    Chat = auto()
    Completions = auto()
    Embedding = auto()
    Backend = auto()
    Score = auto()
    Completion = Completions

    @property
    def names(self) -> list[str]:
        """The single types, in lower case."""
        return [one.name.lower() for one in self if one.name]

    @classmethod
    def named(cls, names: list[str]) -> ModelType:
        """The types of these names; one that is not known is left out."""
        return _named(tuple(names))


@lru_cache(maxsize=64)
def _named(names: tuple[str, ...]) -> ModelType:
    combined = ModelType(0)
    for one in ModelType:
        if one.name and one.name.lower() in names:
            combined |= one
    return combined


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The card of a model on the bus, as JSON.

    Attributes:
        name: by which requests ask for it.
        endpoint: `namespace.component.endpoint`.
        types: of `ModelType`, in lower case.
        context_length: tokens that a prompt and its output may have; None where nobody said.
        kv_cache_block_size: tokens of a block of the engine's KV cache.
        migration_limit: how often a request moves to another instance when its own is lost, drains
            or asks for that; a stream of tokens goes on there.
        idempotent: whether its handler, which takes text, may be asked again where it may have
            begun.
        user_data: whatever the worker says beside.
        default_sampling: for what requests do not say.
        pooling: how embeddings are made of the states of tokens: `mean` or `last`; empty where
            nobody said.
        eos_token_ids: which end an output.
        special_tokens: what the template calls `bos_token`, `eos_token` and so on.
        modalities: what its endpoint takes beside text, of `MODALITIES`; none where it takes text
            only, None where nobody said.
        base_model, lora_name: of a base model with a LoRA adapter: the model's name, and by which
            name its engine knows the adapter.
        tool_call_parser, reasoning_parser: what reads tool calls and reasoning in the text of its
            outputs, such as `hermes` and `qwen3`; empty where nothing does, or nobody said.
        artefacts: files by name, each with the SHA-256 under which the object store has it.
        created: Unix seconds at which it was registered.
    """

    version: int = VERSION
    name: str
    endpoint: str
    input: ModelInput
    types: list[str]
    context_length: _Tokens | None = None
    kv_cache_block_size: int = DEFAULT_BLOCK_SIZE
    migration_limit: int = ResumeRule.MIGRATION_LIMIT
    idempotent: bool = False
    user_data: dict[str, Any] | None = None
    default_sampling: DefaultSampling = DefaultSampling()
    pooling: str = ""
    eos_token_ids: list[int] = []
    special_tokens: dict[str, str] = {}
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    modalities: list[str] | None = None
    base_model: str = ""
    lora_name: str = ""
    artefacts: dict[str, str] = {}
    created: _Time = 0.0

    @property
    def type(self) -> ModelType:
        """The uses of the model."""
        # Each request asks.
        return _named(tuple(self.types))

    @property
    def endpoint_name(self) -> EndpointName:
        """The endpoint at which it is served."""
        return EndpointName.parse(self.endpoint)

    @property
    def tokenizer_id(self) -> str:
        """The same for models with the same tokenizer; empty for one without."""
        return self.artefacts.get(TOKENIZER, "")


def differences(mine: ModelCard, other: ModelCard) -> list[str]:
    """In what two cards of one name contradict each other, for people; none where they agree, or
    are asked for different things."""
    if not mine.type & other.type:
        return []
    ours, theirs = _fields(mine), _fields(other)
    for name in ("tool_call_parser", "reasoning_parser"):
        if not (ours.get(name) and theirs.get(name)):
            # Workers of an earlier version do not say it.
            ours.pop(name, None)
            theirs.pop(name, None)
    if mine.modalities is None or other.modalities is None:
        ours.pop("modalities", None)
        theirs.pop("modalities", None)
    return [
        f"{key} is {_brief(ours.get(key))} here and {_brief(theirs.get(key))} there"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    ]


def _fields(card: ModelCard) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(card)
    fields.pop("created", None)
    # Of two versions of a handler one may say it, while the one replaces the other.
    fields.pop("idempotent", None)
    # Defaults are left out of what is sent.
    fields["kv_cache_block_size"] = card.kv_cache_block_size
    fields["migration_limit"] = card.migration_limit
    for name, digest in fields.pop("artefacts", {}).items():
        fields[name] = digest[:12]
    return fields


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_name(name: object) -> str:
    """Return `name` when a model may be called so.

    Raises:
        ConfigError: it is empty, too long, or not printable.
    """
    if (
        isinstance(name, str)
        and 0 < len(name) <= MAX_NAME
        and name.isprintable()
        and name == name.strip()
    ):
        return name
    raise ConfigError(
        f"model_name {name!r} is not usable: give 1 to {MAX_NAME} printable characters without "
        "spaces at its ends"
    )


def check_lora_name(name: object) -> str:
    """Return `name` when an adapter may be called so.

    Instances announce the names of theirs with commas between them.

    Raises:
        ConfigError: no model may be called so, or it has a comma.
    """
    checked = check_name(name)
    if "," in checked:
        raise ConfigError(f"the adapter's name {name!r} has a comma: give it another one")
    return checked


def check_modalities(given: Collection[str] | None) -> list[str] | None:
    """The kinds of content beside text that a model takes, in their order.

    Raises:
        ConfigError: one is not known.
    """
    if given is None:
        return None
    for one in given:
        if one not in MODALITIES:
            raise ConfigError(f"modalities has {one!r}: it may have {', '.join(MODALITIES)}")
    return [one for one in MODALITIES if one in given]


def check_user_data(user_data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The custom data of a card, as JSON has it.

    Raises:
        ConfigError: it is no JSON object, or too large.
    """
    if user_data is None:
        return None
    try:
        data = msgspec.json.encode(dict(user_data))
        decoded: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"user_data is no JSON object: {error}") from None
    if len(data) > MAX_USER_DATA:
        raise ConfigError(f"user_data has {len(data)} bytes as JSON: at most {MAX_USER_DATA}")
    return decoded


def check_sampling(given: object, what: str) -> DefaultSampling:
    """The default sampling that an object with fields of `DefaultSampling` is.

    Args:
        what: how messages call it.

    Raises:
        ConfigError: it has another field, or a value is not usable.
    """
    try:
        known = DefaultSampling.__struct_fields__
        if isinstance(given, Mapping):
            for name in cast("Mapping[object, object]", given):
                if name not in known:
                    raise ConfigError(f"{what} has {name!r}: it may have {', '.join(known)}")
        return msgspec.convert(given, DefaultSampling)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what} {given!r} is not usable: {error}") from None


def check_tool_call_parser(given: object) -> str | None:
    """The parser of tool calls that a worker asks for; empty for "none", None for "auto".

    Raises:
        ConfigError: there is none of this name.
    """
    return _check_parser("tool_call_parser", given, TOOL_CALL_PARSERS)


def check_reasoning_parser(given: object) -> str | None:
    """The parser of reasoning that a worker asks for; empty for "none", None for "auto".

    Raises:
        ConfigError: there is none of this name.
    """
    return _check_parser("reasoning_parser", given, REASONING_PARSERS)


def _check_parser(what: str, given: object, known: Collection[str]) -> str | None:
    if given == "auto":
        return None
    if given == "none":
        return ""
    if isinstance(given, str) and given in known:
        return given
    raise ConfigError(f"{what} {given!r} is not known: give auto, none, or {', '.join(known)}")


def model_token(name: str) -> str:
    """A model's name as a part of a subject, which takes fewer characters."""
    return blake2b(name.encode(), digest_size=8).hexdigest()
