"""`KvRouter`: sends each call where most of its prompt lies already, weighed against the load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final, get_args

from dynbus.actors.calling.routing import Route, RouteRequest
from dynbus.bus.cleanup import finish
from dynbus.bus.clock import monotonic
from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError, Draining
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.tokens import random_id
from dynbus.bus.records.discovery import Instance
from dynbus.bus.transport import Connection
from dynbus.kvrouter.stream.awareness import CacheAwareness, no_instances
from dynbus.kvrouter.stream.membership import Instances

from .affinity import SESSION_KEY
from .attempt import AttemptObserver
from .constraints import (
    DP_RANK_KEY,
    OVERLAP_KEY,
    LoraMode,
    read_constraints,
    read_track_output,
)
from .cost import CostFunction
from .decision import Decision
from .dispatch import Dispatch, Offered
from .load_messages import MESSAGE_BYTES
from .load_sharing import LoadSharing
from .policies import resolve_policy
from .profiles import Profiles
from .request_fields import RequestFields
from .scheduler import KvScheduler
from .scheduling import (
    Follower,
    SchedulerConfig,
    SchedulerStatistics,
    SchedulingRequest,
    base_awareness,
)
from .shared_load import SharedLoad

DEFAULT_POLICY: Final = "kv"
REUSED_FIELD: Final = "cached_tokens"


class KvRouter:
    """A `Router` by KV-cache overlap and load, for the calls of one component.

    Use it with `async with` when it has a `connection`; without one it needs no closing. It is
    opened once: calls that wait when it closes, and all later ones, end with `Draining`.

    Args:
        follower: the index that follows the engines' events, entered by whoever gives it. None
            guesses from own decisions what engines hold.
        connection: of the running loop, over which routers of the component share their load;
            None for a router that is alone.
        policy: a cost function, or its name: `kv`, `dynamo`, or `module:function`.
        shadows: policies by name that score every request and decide nothing.
        fields: where requests have their token ids and the like.
        block_size: what all instances must have; None for what they say.
        tokenizer_id: what makes the token ids; empty for no check.
        lora: whether an instance must have loaded a request's adapter, or had better.
        reused_field: where an item of a stream, or a result, says how many tokens of the prompt
            the engine found in its cache: names with dots, for example
            `usage.prompt_tokens_details.cached_tokens`. Empty for nowhere.
        target: `namespace.component` that it is for; that of the first call unless given.
        instances: the ids of those of the target; while there are none, `awareness` is off.
        offered: those of them that may be chosen just now, for calls that wait while one comes.
            None has them wait for the next call, which is offered them.

    Attributes:
        route_timeout: None, since a call may wait in the queue until its deadline.

    Raises:
        ConfigError: a policy cannot be loaded, or a value is not usable.
    """

    route_timeout: float | None = None

    def __init__(
        self,
        *,
        follower: Follower | None = None,
        connection: Connection | None = None,
        policy: str | CostFunction = DEFAULT_POLICY,
        shadows: Mapping[str, str | CostFunction] | None = None,
        config: SchedulerConfig | None = None,
        fields: RequestFields | None = None,
        block_size: int | None = None,
        tokenizer_id: str = "",
        lora: LoraMode = "prefer",
        reused_field: str = REUSED_FIELD,
        target: str = "",
        instances: Instances | None = None,
        offered: Offered | None = None,
    ) -> None:
        _check(block_size, tokenizer_id, lora, reused_field)
        _check_kind("shadows", shadows, Mapping)
        _check_kind("config", config, SchedulerConfig)
        _check_kind("fields", fields, RequestFields)
        self._target = target
        self._instances = instances
        self._offered = offered
        self._follower = follower
        self._connection = connection
        self._policy, self._policy_name = resolve_policy(policy)
        self._shadows = {
            name: resolve_policy(shadow)[0] for name, shadow in (shadows or {}).items()
        }
        self._config = config or SchedulerConfig()
        self._fields = fields or RequestFields()
        self._lora: LoraMode = lora
        self._reused_field = reused_field
        self._profiles = Profiles(
            block_size=block_size, tokenizer_id=tokenizer_id, needs_events=follower is not None
        )
        self._component: tuple[str, str] | None = None
        self._dispatch: Dispatch | None = None
        self._starting = asyncio.Lock()
        self._exits: AsyncExitStack | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        where = ".".join(self._component) if self._component else "not used yet"
        waiting = 0 if self._dispatch is None else self._dispatch.waiting
        return f"<KvRouter {where} [{self._policy_name} | {waiting} waiting]>"

    async def __aenter__(self) -> KvRouter:
        """Open it, once.

        Raises:
            ConfigError: it was closed.
        """
        if self._is_closed:
            raise ConfigError(f"{self!r} was closed, and cannot be opened again: make another one")
        self._exits = AsyncExitStack()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closed = True
        await finish(self._close())

    async def _close(self) -> None:
        # What a first call has begun to open is closed as well.
        async with self._starting:
            if self._dispatch is not None:
                self._dispatch.close()
            exits, self._exits = self._exits, None
            if exits is not None:
                await exits.aclose()

    # Routing ------------------------------------------------------------------------------

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        """The instance for a call; see `Router.route`.

        Raises:
            ConfigError: the instances do not fit together, or the policy failed.
            Draining: the router was closed, also while the call waited.
            InvalidRequest: the request has no token ids, or its metadata cannot be read.
            NoInstances: its constraints leave none.
            Overloaded: too many requests wait already.
        """
        now = monotonic()
        profiles, excluded = self._profiles.of(instances)
        dispatch = self._dispatch
        if dispatch is None or self._component != request.endpoint[:2]:
            dispatch = await self._start(request.endpoint)
        self._check_open()
        if request.attempt == 1:
            dispatch.see(profiles, now)
        tracks_output = read_track_output(request.metadata, self._config.track_output)
        block_size = self._profiles.block_size
        shape, lora_name = self._fields.read(request, block_size)
        decision = await dispatch.decide(
            SchedulingRequest(
                request.request_id,
                shape,
                profiles,
                now,
                request.attempt,
                request.metadata.get(SESSION_KEY, ""),
                read_constraints(request.metadata, lora_name=lora_name, lora=self._lora),
                excluded,
            ),
            request,
        )
        rank = decision.chosen
        return Route(
            rank.instance,
            AttemptObserver(
                dispatch,
                decision.number,
                self._reused_field,
                block_size if tracks_output else 0,
                decision.waited_s,
            ),
            {
                DP_RANK_KEY: str(rank.dp_rank),
                OVERLAP_KEY: str(decision.expected_reuse // block_size),
            },
        )

    def check(self, instances: Sequence[Instance]) -> int:
        """The block size of these instances, once they are found to fit together.

        Raises:
            ConfigError: they do not, and why.
        """
        self._profiles.of(instances)
        return self._profiles.block_size

    # Questions and changes ----------------------------------------------------------------

    def decisions(self, request_id: str) -> list[Decision]:
        """The decisions for a request, one per attempt, while they are kept."""
        return [] if self._scheduler is None else self._scheduler.decisions.find(request_id)

    def latest_decisions(self, count: int = 20) -> list[Decision]:
        """The latest decisions, newest first."""
        return [] if self._scheduler is None else self._scheduler.decisions.latest(count)

    def statistics(self) -> SchedulerStatistics | None:
        """Figures of its decisions; None before the first call."""
        return None if self._scheduler is None else self._scheduler.statistics()

    def awareness(self) -> CacheAwareness:
        """How far it can rely on what it knows of the caches at this moment."""
        if self._instances is not None and (known := self._instances()) is not None and not known:
            return no_instances(self._target)
        if self._scheduler is None:
            return base_awareness(self._follower, self._config)
        return self._scheduler.awareness()

    @property
    def policy(self) -> str:
        """The name of the cost function that decides now."""
        return self._policy_name

    @property
    def decisions_limit(self) -> int:
        """How many decisions are kept."""
        return self._config.decisions

    @property
    def follower(self) -> Follower | None:
        """The index that follows the engines' events."""
        return self._follower

    def report_reused(self, request_id: str, tokens: int) -> Decision | None:
        """The engine found so many tokens of a request's prompt in its cache.

        Returns:
            The decision, which says what was expected; None when it is not kept any longer.

        Raises:
            ConfigError: it is no number of tokens.
        """
        given: Any = tokens
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise ConfigError(f"report_reused(tokens={given!r}): give a whole number from 0 on")
        scheduler = self._scheduler
        if scheduler is None:
            return None
        return scheduler.report_reused(request_id, tokens, monotonic())

    def use_policy(self, policy: str | CostFunction) -> None:
        """Decide by another policy from the next call on; a module's file is read again.

        Raises:
            ConfigError: it cannot be loaded. The one before goes on.
        """
        self._policy, self._policy_name = resolve_policy(policy, reload=True)
        if self._scheduler is not None:
            self._scheduler.use_policy(self._policy, self._policy_name)

    @property
    def _scheduler(self) -> KvScheduler | None:
        return None if self._dispatch is None else self._dispatch.scheduler

    # Inside -------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise Draining(f"{self!r} was closed: call by another router", started=False)

    async def _start(self, endpoint: EndpointName) -> Dispatch:
        component = (endpoint.namespace, endpoint.component)
        async with self._starting:
            self._check_open()
            asked = ".".join(component)
            target = ".".join(self._component) if self._component else self._target or asked
            if target != asked:
                raise ConfigError(
                    f"this KvRouter is for {target} and was asked for {asked}: make one for each "
                    "component"
                )
            if self._dispatch is not None:
                return self._dispatch
            block_size, connection = self._profiles.block_size, self._connection
            load = None if connection is None else _shared_load(block_size, connection)
            scheduler = KvScheduler(
                block_size,
                config=self._config,
                load=load,
                follower=self._follower,
                shadows=self._shadows,
            )
            dispatch = Dispatch(scheduler, self._profiles, self._offered)
            if connection is not None and load is not None:
                await self._share(connection, component, load, dispatch)
            scheduler.use_policy(self._policy, self._policy_name)
            self._component, self._dispatch = component, dispatch
            return dispatch

    async def _share(
        self,
        connection: Connection,
        component: tuple[str, str],
        load: SharedLoad,
        dispatch: Dispatch,
    ) -> None:
        if self._exits is None:
            raise ConfigError(
                "a KvRouter with a connection shares its load while it is open: write "
                "`async with KvRouter(...) as router`"
            )
        load.on_added = dispatch.note_elsewhere
        sharing = LoadSharing(connection, *component, load, dispatch.release)
        dispatch.sharing = await self._exits.enter_async_context(sharing)


def _shared_load(block_size: int, connection: Connection) -> SharedLoad:
    most = min(MESSAGE_BYTES, connection.max_payload // 2)
    return SharedLoad(block_size, random_id(), message_bytes=most)


def _check(block_size: Any, tokenizer_id: Any, lora: Any, reused_field: Any) -> None:
    """Look at what a type checker would have looked at, for those who run none.

    Raises:
        ConfigError: a value is not usable.
    """
    is_number = isinstance(block_size, int) and not isinstance(block_size, bool)
    if block_size is not None and (not is_number or block_size < 1):
        raise ConfigError(
            f"block_size={block_size!r}: give the tokens of a block, 1 or more, or None for what "
            "the instances say"
        )
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


def _check_kind(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r}: give a {kind.__name__}")
