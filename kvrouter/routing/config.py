"""`RouterConfig`: how a router decides, in one place for all that route."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypedDict, get_args

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError

from .cost import CostFunction
from .policies import Policy
from .requests import LoraMode, RequestFields


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The settings of a router; `open_router`, `KvRouter` and `RouterActor` take each by its name.

    Attributes:
        policy: the cost function, or its name: `kv`, `dynamo`, or `module:function`.
        shadows: policies by name, or names alone, that score every request and decide nothing.
        exact: whether to follow the engines' events; False guesses from own decisions. Of
            `open_router` and `RouterActor`: a `KvRouter` follows what it is given.
        share: whether to share the load with the component's other routers. Of `open_router` and
            `RouterActor`: a `KvRouter` shares over the connection that it is given.
        fields: where requests have their token ids and the like; None for `RequestFields()`.
        block_size: tokens of a block that all instances must have; None for what they say.
        tokenizer_id: what makes the token ids; empty for no check.
        lora: whether an instance must have loaded a request's adapter (`require`), or had better
            (`prefer`).
        reused_field: where an item of a stream, or a result, says how many tokens of the prompt
            the engine found in its cache: names with dots, for example
            `usage.prompt_tokens_details.cached_tokens`. Empty for nowhere.
        temperature: 0 takes the lowest cost; above it, costs are probabilities: the softmax of
            the costs over their range times the temperature.
        queue_threshold: requests wait while every candidate has more prompt tokens to compute
            than this times its `kv_max_batched_tokens`; None for no queue.
        queue_limit: how many requests may wait.
        session_ttl: seconds after its last request until a session is forgotten.
        session_overload: how many times the load of the least loaded candidate, with the request
            added, a session's rank may have before the session gives way.
        prediction_ttl: seconds to believe, beside exact events, what own decisions will have
            stored; 0 for not at all.
        approximate_ttl: seconds that a block counts as held after its last use by engines without
            events, 0 for not at all; None keeps as much as an instance says that it has room
            for, and 65,536 blocks of each rank where it does not say.
        decisions: how many decisions are kept.
        track_output: whether a request's output counts as blocks of its rank while it grows;
            each item is taken for a token. A request may say otherwise.

    Raises:
        ConfigError: a value is not usable.
    """

    policy: str | CostFunction = "kv"
    shadows: Mapping[str, str | CostFunction] | Sequence[str] | None = None
    exact: bool = True
    share: bool = True
    fields: RequestFields | None = None
    block_size: int | None = None
    tokenizer_id: str = ""
    lora: LoraMode = "prefer"
    reused_field: str = "cached_tokens"
    temperature: float = 0.0
    queue_threshold: float | None = None
    queue_limit: int = 1024
    session_ttl: float = 600.0
    session_overload: float = 2.0
    prediction_ttl: float = 5.0
    approximate_ttl: float | None = 120.0
    decisions: int = 512
    track_output: bool = False

    def __post_init__(self) -> None:
        # Not everyone runs a type checker, so the types are looked at as well.
        for name, (least, whole, remedy) in _NUMBERS.items():
            value: Any = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            is_number = isinstance(value, int if whole else int | float)
            if not is_number or isinstance(value, bool) or not least <= value < math.inf:
                raise ConfigError(f"{name}={value!r}: give {remedy}")
        for name in ("exact", "share", "track_output"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}: give True or False")
        _check_texts(self.tokenizer_id, self.lora, self.reused_field)
        _check_objects(self.shadows, self.fields)

    def load_policies(self) -> None:
        """Import the policies, as the router does that is opened with them.

        Raises:
            ConfigError: one cannot be loaded, or is no cost function.
        """
        for policy in (self.policy, *self.named_shadows.values()):
            Policy.of(policy)

    @property
    def named_shadows(self) -> Mapping[str, str | CostFunction]:
        """The policies on trial by name."""
        shadows = self.shadows or {}
        return shadows if isinstance(shadows, Mapping) else {name: name for name in shadows}


class RouterSettings(TypedDict, total=False):
    """The fields of `RouterConfig` as keyword arguments."""

    policy: str | CostFunction
    shadows: Mapping[str, str | CostFunction] | Sequence[str] | None
    exact: bool
    share: bool
    fields: RequestFields | None
    block_size: int | None
    tokenizer_id: str
    lora: LoraMode
    reused_field: str
    temperature: float
    queue_threshold: float | None
    queue_limit: int
    session_ttl: float
    session_overload: float
    prediction_ttl: float
    approximate_ttl: float | None
    decisions: int
    track_output: bool


def configured(config: RouterConfig | None, settings: RouterSettings) -> RouterConfig:
    """`config`, or the defaults, with the settings that are given beside it.

    Raises:
        ConfigError: it is no `RouterConfig`, or a value is not usable.
        TypeError: there is no such setting.
    """
    given: Any = RouterConfig() if config is None else config
    if not isinstance(given, RouterConfig):
        raise ConfigError(f"config={config!r}: give a RouterConfig")
    return replace(given, **settings) if settings else given


_MAY_BE_NONE: Final = ("block_size", "queue_threshold", "approximate_ttl")
_NUMBERS: Final[Mapping[str, tuple[float, bool, str]]] = {
    "block_size": (1, True, "the tokens of a block, 1 or more, or None for what the instances say"),
    "temperature": (0, False, "0 for the lowest cost, or more, for example 0.2"),
    "queue_threshold": (0, False, "a number of at least 0, for example 1.0, or None for no queue"),
    "queue_limit": (
        1,
        True,
        "a whole number of at least 1; queue_threshold=None is for no queue",
    ),
    "session_ttl": (0, False, "seconds, at least 0"),
    "session_overload": (1, False, "a factor of at least 1"),
    "prediction_ttl": (0, False, "seconds, or 0 to expect nothing from own decisions"),
    "approximate_ttl": (0, False, "seconds, or None to keep as much as instances have room for"),
    "decisions": (1, True, "a whole number of at least 1"),
}
"""The least value of each number, whether it is a whole one, and what to give."""


def _check_texts(tokenizer_id: Any, lora: Any, reused_field: Any) -> None:
    modes = get_args(LoraMode)
    if lora not in modes:
        raise ConfigError(
            f"lora={lora!r}{suggestion(str(lora), modes)}: give one of {', '.join(modes)}"
        )
    if not isinstance(tokenizer_id, str):
        raise ConfigError(f"tokenizer_id={tokenizer_id!r}: give a string, empty for no check")
    if not isinstance(reused_field, str) or (reused_field and not all(reused_field.split("."))):
        raise ConfigError(
            f"reused_field={reused_field!r}: give names with dots between them, for example "
            "'usage.cached_tokens', or '' for nowhere"
        )


def _check_objects(shadows: Any, fields: Any) -> None:
    if isinstance(shadows, str) or not isinstance(shadows, Mapping | Sequence | None):
        raise ConfigError(f"shadows={shadows!r}: give policies by name, or a list of names")
    if not isinstance(fields, RequestFields | None):
        raise ConfigError(f"fields={fields!r}: give a RequestFields")
