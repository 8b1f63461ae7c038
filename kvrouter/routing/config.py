"""`RouterConfig`: how a router decides, in one place for all that route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict

from dynbus import ConfigError, Option, Options
from dynbus.spi import ResumeRule

from .cost import CostFunction
from .policies import Policy
from .requests import LoraMode, RequestFields


@dataclass(frozen=True, kw_only=True)
class RouterConfig(Options):
    """The settings of a router; `open_router`, `KvRouter` and `RouterActor` take each by its name.

    Raises:
        ConfigError: a value is not usable.
    """

    policy: Annotated[
        str | CostFunction,
        Option(
            "the cost function, or its name: `kv`, `dynamo`, or `module:function`; with arguments "
            "in parentheses where it has some, such as `kv(slowdown=0.4)`",
            as_text=str,
        ),
    ] = "kv"
    shadows: Annotated[
        Mapping[str, str | CostFunction] | Sequence[str] | None,
        Option(
            "policies by name, or names alone, that score every request and decide nothing",
            wanted="policies by name, or a list of names",
            as_text=Sequence[str],
        ),
    ] = None
    exact: Annotated[
        bool,
        Option(
            "whether to follow the engines' events; without them the router guesses from its own "
            "decisions. A `KvRouter` follows what it is given"
        ),
    ] = True
    share: Annotated[
        bool,
        Option(
            "whether to share the load with the component's other routers. A `KvRouter` shares "
            "over the connection that it is given"
        ),
    ] = True
    fields: Annotated[
        RequestFields | None,
        Option(
            "where requests have their token ids and the like; none for `RequestFields()`. As text "
            'a JSON object, such as `{"token_ids": "prompt.ids"}`',
            wanted="a RequestFields",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        Option(
            "tokens of a block that all instances must have; none for what they say",
            least=1,
            unit="tokens",
        ),
    ] = None
    tokenizer_id: Annotated[str, Option("what makes the token ids; empty for no check")] = ""
    lora: Annotated[
        LoraMode,
        Option(
            "whether an instance must have loaded a request's adapter (`require`), or had better "
            "(`prefer`)"
        ),
    ] = "prefer"
    reused_field: Annotated[
        str,
        Option(
            "where an item of a stream, or a result, says how many tokens of the prompt the engine "
            "found in its cache: names with dots, such as "
            "`usage.prompt_tokens_details.cached_tokens`. Empty for nowhere"
        ),
    ] = "cached_tokens"
    temperature: Annotated[
        float,
        Option(
            "0 takes the lowest cost; above it, costs are probabilities: the softmax of the costs "
            "over their range times the temperature",
            least=0,
        ),
    ] = 0.0
    queue_threshold: Annotated[
        float | None,
        Option(
            "requests wait while every candidate has more prompt tokens to compute than this times "
            "its `kv_max_batched_tokens`; none for no queue",
            least=0,
        ),
    ] = None
    queue_limit: Annotated[int, Option("how many requests may wait", least=1)] = 1024
    session_ttl: Annotated[
        float,
        Option(
            "seconds after its last request until a session is forgotten; 0 for no sessions",
            least=0,
            unit="seconds",
        ),
    ] = 600.0
    session_overload: Annotated[
        float,
        Option(
            "how many times the load of the least loaded candidate, with the request added, a "
            "session's rank may have before the session gives way",
            least=1,
        ),
    ] = 2.0
    prediction_ttl: Annotated[
        float,
        Option(
            "seconds to believe, beside exact events, what own decisions will have stored; 0 for "
            "not at all",
            least=0,
            unit="seconds",
        ),
    ] = 5.0
    approximate_ttl: Annotated[
        float | None,
        Option(
            "seconds that a block counts as held after its last use by engines without events, 0 "
            "for not at all; none keeps as much as an instance says that it has room for, and "
            "65,536 blocks of each rank where it does not say",
            least=0,
            unit="seconds",
        ),
    ] = 120.0
    decisions: Annotated[
        int, Option("how many decisions are kept; of over 2,048 candidates fewer", least=1)
    ] = 512
    track_output: Annotated[
        bool,
        Option(
            "whether a request's output counts as blocks of its rank while it grows; each item is "
            "taken for a token. A request may say otherwise"
        ),
    ] = False

    def check(self) -> None:
        super().check()
        path = self.reused_field
        if path and not all(path.split(".")):
            raise ConfigError(
                f"reused_field={path!r}: give names with dots between them, for example "
                "'usage.cached_tokens', or '' for nowhere"
            )

    def load(self) -> None:
        """Import the policies, as the router does that is opened with them.

        Raises:
            ConfigError: one cannot be loaded, or is no cost function.
        """
        super().load()
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


@dataclass(frozen=True)
class RouterActorOptions(RouterConfig):
    """The settings of a router, with what it forwards to."""

    target: Annotated[str, Option("the endpoint to forward to, as `namespace.component.endpoint`")]
    policies: Annotated[
        Sequence[str],
        Option(
            "those that `use_policy` may change to, beside the one at the start. Callers name one "
            "of them: nothing else is ever imported for them"
        ),
    ] = ()
    groups: Annotated[
        int,
        Option(
            "parts into which the target's instances fall; each router follows the events of one "
            "of them alone, and routes to it",
            least=1,
            most=1024,
            guide="router-actor.md#large-fleets-in-groups",
        ),
    ] = 1
    migration_limit: Annotated[
        int,
        Option(
            "how often a stream of tokens goes on with another instance when its own is lost, "
            "drains or raises `Migrate`, where its caller could go on with it as well; 0 for never",
            least=0,
        ),
    ] = ResumeRule.MIGRATION_LIMIT

    def load(self) -> None:
        """See `RouterConfig.load`; those that it may change to are imported as well."""
        super().load()
        for name in self.policies:
            Policy.of(name)
