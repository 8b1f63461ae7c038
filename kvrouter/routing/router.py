"""`KvRouter`: sends each call where most of its prompt lies already, weighed against the load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final, get_args

from dynbus.actors.routing import Route, RouteRequest
from dynbus.bus.cleanup import finish
from dynbus.bus.clock import monotonic
from dynbus.bus.config import suggestion
from dynbus.bus.discovery import Instance
from dynbus.bus.errors import ConfigError, InvalidRequest
from dynbus.bus.names import EndpointName
from dynbus.bus.tokens import random_id
from dynbus.bus.transport import Connection
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.stream.awareness import CacheAwareness, no_instances

from .affinity import SESSION_KEY
from .attempt import AttemptObserver
from .constraints import DP_RANK_KEY, OUTPUT_KEY, OVERLAP_KEY, LoraMode, read_constraints
from .cost import CostFunction
from .decision import Decision
from .load_sharing import LoadSharing
from .policies import load_policy, policy_name
from .profile import InstanceProfile
from .profiles import Profiles
from .request_fields import RequestFields
from .scheduler import KvScheduler
from .scheduling import (
    Follower,
    SchedulerConfig,
    SchedulerStatistics,
    SchedulingRequest,
    Ticket,
    base_awareness,
)
from .shared_load import MESSAGE_BYTES, SharedLoad
from .waiting_calls import WaitingCalls

logger = logging.getLogger(__name__)

DEFAULT_POLICY: Final = "kv"
REUSED_FIELD: Final = "cached_tokens"
Instances = Callable[[], Collection[str] | None]
"""The ids of the instances that there are; None while that is not known."""


class KvRouter:
    """A `Router` by KV-cache overlap and load, for the calls of one component.

    Use it with `async with` when it has a `connection`; without one it needs no closing.

    Attributes:
        route_timeout: it bounds no call, since one may wait in the queue until its deadline.

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
        instances: those of the target, without which `awareness` is off.
        offered: those of them that may be chosen just now, for calls that wait while one comes.
            None has them wait for the next call, which is offered them.

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
        offered: Callable[[], Sequence[Instance]] | None = None,
    ) -> None:
        _check(block_size, tokenizer_id, lora, reused_field)
        self._target = target
        self._instances = instances
        self._offered = offered
        self._follower = follower
        self._connection = connection
        self._policy, self._policy_name = _resolve(policy)
        self._shadows = {name: _resolve(shadow)[0] for name, shadow in (shadows or {}).items()}
        self._config = config or SchedulerConfig()
        self._fields = fields or RequestFields()
        self._lora: LoraMode = lora
        self._reused_field = reused_field
        self._profiles = Profiles(
            block_size=block_size, tokenizer_id=tokenizer_id, needs_events=follower is not None
        )
        self._component: tuple[str, str] | None = None
        self._scheduler: KvScheduler | None = None
        self._sharing: LoadSharing | None = None
        self._starting = asyncio.Lock()
        self._exits: AsyncExitStack | None = None
        self._waiting: WaitingCalls | None = None

    def __repr__(self) -> str:
        where = ".".join(self._component) if self._component else "not used yet"
        return f"<KvRouter {where} [{self._policy_name} | {len(self._waiting or ())} waiting]>"

    async def __aenter__(self) -> KvRouter:
        self._exits = AsyncExitStack()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        exits, self._exits = self._exits, None
        if exits is not None:
            await finish(exits.aclose())

    # Routing ------------------------------------------------------------------------------

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        """The instance for a call; see `Router.route`.

        Raises:
            ConfigError: the instances do not fit together, or the policy failed.
            InvalidRequest: the request has no token ids, or its metadata cannot be read.
            NoInstances: its constraints leave none.
            Overloaded: too many requests wait already.
        """
        now = monotonic()
        profiles, excluded = self._profiles.of(instances)
        scheduler = self._scheduler
        if scheduler is None or self._component != request.endpoint[:2]:
            scheduler = await self._start(request.endpoint)
        if request.attempt == 1:
            self._look_at_instances(scheduler, profiles, now)
        tracks_output = self._tracks_output(request)
        shape, lora_name = self._fields.read(request, scheduler.block_size)
        answer = scheduler.submit(
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
            now,
        )
        decision = answer
        if isinstance(decision, Ticket):
            decision = await self._calls.wait(decision, request)
        self._tell()
        block_size = scheduler.block_size
        rank = decision.chosen
        return Route(
            rank.instance,
            AttemptObserver(
                self,
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
        """
        scheduler = self._scheduler
        if scheduler is None:
            return None
        return scheduler.report_reused(request_id, tokens, monotonic())

    def use_policy(self, policy: str | CostFunction) -> None:
        """Decide by another policy from the next call on; a module's file is read again.

        Raises:
            ConfigError: it cannot be loaded. The one before goes on.
        """
        self._policy, self._policy_name = _resolve(policy, reload=True)
        if self._scheduler is not None:
            self._scheduler.use_policy(self._policy, self._policy_name)

    # Inside -------------------------------------------------------------------------------

    async def _start(self, endpoint: EndpointName) -> KvScheduler:
        component = (endpoint.namespace, endpoint.component)
        async with self._starting:
            asked = ".".join(component)
            target = ".".join(self._component) if self._component else self._target or asked
            if target != asked:
                raise ConfigError(
                    f"this KvRouter is for {target} and was asked for {asked}: make one for each "
                    "component"
                )
            if self._scheduler is not None:
                return self._scheduler
            block_size = self._profiles.block_size
            load = None
            if self._connection is not None:
                load = await self._share(self._connection, component, block_size)
            self._component = component
            scheduler = self._scheduler = KvScheduler(
                block_size,
                policy=self._policy,
                config=self._config,
                load=load,
                follower=self._follower,
                shadows=self._shadows,
            )
            scheduler.use_policy(self._policy, self._policy_name)
            self._waiting = WaitingCalls(scheduler, self._look_again)
            return scheduler

    async def _share(
        self, connection: Connection, component: tuple[str, str], block_size: int
    ) -> SharedLoad:
        if self._exits is None:
            raise ConfigError(
                "a KvRouter with a connection shares its load while it is open: write "
                "`async with KvRouter(...) as router`"
            )
        load = SharedLoad(
            block_size,
            random_id(),
            message_bytes=min(MESSAGE_BYTES, connection.max_payload // 2),
        )
        load.on_added = self._note_elsewhere
        sharing = LoadSharing(connection, *component, load, self._release)
        self._sharing = await self._exits.enter_async_context(sharing)
        return load

    def _release(self) -> None:
        """Let calls go on that have waited long enough."""
        if self._waiting is not None:
            self._waiting.release()

    def _look_again(self) -> None:
        """Whether calls that wait may go on because of what no call has told."""
        try:
            instances = () if self._offered is None else self._offered()
            profiles = self._profiles.of(instances)[0] if instances else ()
        except ConfigError:
            # Each that does not fit was logged; those that calls wait for may be free.
            profiles = ()
        self._look_at_instances(self._decided, profiles, monotonic())

    def _note_elsewhere(self, rank: Rank, sequence_hashes: Sequence[int]) -> None:
        if self._scheduler is not None:
            self._scheduler.note_elsewhere(rank, sequence_hashes, monotonic())

    def _tell(self) -> None:
        if self._sharing is not None:
            self._sharing.notify()

    def _look_at_instances(
        self, scheduler: KvScheduler, profiles: Sequence[InstanceProfile], now: float
    ) -> None:
        """Forget what is gone of the instances; have those that wait know of new ones."""
        for instance in self._profiles.gone(now):
            scheduler.remove_instance(instance)
        for instance in self._profiles.restarted():
            scheduler.forget_cache(instance)
        if self._waiting:
            scheduler.refresh(profiles)
            self._release()

    def _tracks_output(self, request: RouteRequest) -> bool:
        text = request.metadata.get(OUTPUT_KEY)
        if text is None:
            return self._config.track_output
        if text not in ("true", "false"):
            raise InvalidRequest(
                f"metadata {OUTPUT_KEY} = {text!r} of a call to {request.endpoint}: give true or "
                "false",
                request_id=request.request_id,
                started=False,
            )
        return text == "true"

    # What the observer of an attempt tells, which has a decision's number ---------------------

    def first_item(self, number: int) -> None:
        """The request has its first output."""
        self._decided.first_item(number, monotonic())
        self._release()
        self._tell()

    def grown(self, number: int, output_tokens: int) -> None:
        """The request has so much output by now."""
        self._decided.grown(number, output_tokens)

    def reused(self, number: int, tokens: int) -> None:
        """The engine has found so many tokens of the prompt in its cache."""
        self._decided.note_reused(number, tokens, monotonic())

    def ended(self, number: int, error: str) -> None:
        """The request is over."""
        self._decided.ended(number, monotonic(), error)
        self._release()
        self._tell()

    @property
    def _decided(self) -> KvScheduler:
        """The scheduler, of which there is one once it has decided something."""
        if self._scheduler is None:
            raise RuntimeError("nothing was decided yet")
        return self._scheduler

    @property
    def _calls(self) -> WaitingCalls:
        """The calls that wait, which come with the scheduler."""
        if self._waiting is None:
            raise RuntimeError("nothing was decided yet")
        return self._waiting


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


def _resolve(policy: str | CostFunction, *, reload: bool = False) -> tuple[CostFunction, str]:
    if isinstance(policy, str):
        return load_policy(policy, reload=reload), policy
    given: Any = policy
    if isinstance(given, type) or not callable(given):
        raise ConfigError(
            f"policy {given!r} is no cost function: give an object that can be called with a "
            "request and its candidates, or its name"
        )
    return policy, policy_name(policy)
