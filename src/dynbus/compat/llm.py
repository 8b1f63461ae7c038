"""`dynamo.llm`: a worker tells front ends which model its endpoint serves, and routers what its
cache holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack, cast, overload

from dynbus import ConfigError
from dynbus.llm import ModelCard, ModelInput, ModelType
from dynbus.llm import register_llm as register

from .kv_routing import (
    AggregatedMetrics,
    EndpointKvMetrics,
    KvEventPublisher,
    KvIndexer,
    KvMetricsAggregator,
    KvMetricsPublisher,
    OverlapScores,
)
from .runtime import Endpoint
from .tokens import TokenTranslation

__all__ = [
    "AggregatedMetrics",
    "EndpointKvMetrics",
    "KvEventPublisher",
    "KvIndexer",
    "KvMetricsAggregator",
    "KvMetricsPublisher",
    "ModelInput",
    "ModelType",
    "OverlapScores",
    "register_llm",
]


class _Options(TypedDict, total=False):
    context_length: int | None
    kv_cache_block_size: int | None
    migration_limit: int
    user_data: Mapping[str, Any] | None


@overload
async def register_llm(
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str | os.PathLike[str],
    model_name: str | None = None,
    **options: Unpack[_Options],
) -> ModelCard: ...
@overload
async def register_llm(
    model_input: ModelType,
    model_type: Endpoint,
    endpoint: str | os.PathLike[str],
    model_path: str | None = None,
    *,
    model_name: str | None = None,
    **options: Unpack[_Options],
) -> ModelCard: ...
@overload
async def register_llm(
    *,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str | os.PathLike[str],
    model_name: str | None = None,
    **options: Unpack[_Options],
) -> ModelCard: ...


async def register_llm(
    model_input: Any = None,
    model_type: Any = None,
    endpoint: Any = None,
    model_path: Any = None,
    model_name: str | None = None,
    **options: Unpack[_Options],
) -> ModelCard:
    """Say on the bus that an endpoint serves a model, until its process ends: both forms of Dynamo.

    With tokens, the handler is given `token_ids`, and `stop_conditions`, `sampling_options` and
    `eos_token_ids` as in Dynamo; its items have `token_ids`, and the last one may have a
    `finish_reason`. With text, it is given the body of the request as OpenAI's clients send it,
    and yields chunks of the answer, or the whole answer.

    Args:
        model_input: whether the handler takes tokens or text.
        model_type: chats, completions, or both with `|`. In the earlier form it comes first,
            without `model_input`, and `ModelType.Backend` stands for tokens, the other types for
            text.
        endpoint: which serves it.
        model_path: where its files are; see `dynbus.llm.register_llm`.
        model_name: by which requests ask for it; unless given, the name of the repository, the
            folder or the GGUF file.
        options: `context_length` in tokens, `kv_cache_block_size` in tokens, `migration_limit`
            (0 unless given) and `user_data`, as of `dynbus.llm.register_llm`.

    Raises:
        ConfigError: an argument is not usable.
        DynbusError: as of `dynbus.llm.register_llm`.
    """
    if model_input is None:
        # The earlier form, by name.
        model_input, model_type = model_type, None
    if isinstance(model_input, ModelType):
        # The earlier form has one argument less; what follows may be given by name.
        given = [one for one in (model_type, endpoint, model_path, model_name) if one is not None]
        form = [model_input, *given]
    else:
        form = [model_input, model_type, endpoint, model_path, model_name]
    place = 1 if isinstance(model_input, ModelType) else 2
    served = form[place] if len(form) > place else None
    if not isinstance(served, Endpoint):
        raise ConfigError(
            f"endpoint {served!r} is not usable: give "
            'runtime.namespace("n").component("c").endpoint("e")'
        )
    form[place] = served.address
    options.setdefault("migration_limit", 0)
    card = await cast("Any", register)(*form, **options)
    if card.input is ModelInput.Tokens:
        translation = TokenTranslation(card.eos_token_ids)
        served.runtime.translations[served.address.name] = translation
    return cast("ModelCard", card)
