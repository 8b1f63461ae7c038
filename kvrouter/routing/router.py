"""`KvRouter`: sends each call where most of its prompt lies already, weighed against the load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, Unpack

import anyio
import msgspec

from dynbus import (
    Actor,
    ConfigError,
    DeadlineExceeded,
    Draining,
    DynbusError,
    EndpointName,
    Instance,
    Route,
    RouteRequest,
    Runtime,
)
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.stream.awareness import CacheAwareness, no_instances
from dynbus.kvrouter.stream.membership import Group, Instances, live_instances
from dynbus.kvrouter.stream.summary import CachesAbroad, caches_abroad
from dynbus.kvrouter.stream.warm_start import warm_follower
from dynbus.spi import Background, Connection, brief_repr, check_token, monotonic, random_id

from .active_load import RankLoad
from .caches import Follower
from .config import RouterConfig, RouterSettings, configured
from .cost import CostFunction
from .decision import Decision
from .observing import RouterWatch
from .profiles import InstanceProfile, Profiles
from .queue import SchedulingRequest, Ticket
from .requests import (
    DP_RANK_KEY,
    OVERLAP_KEY,
    PEER_BLOCKS_KEY,
    PEER_KEY,
    SESSION_KEY,
    RequestFields,
    field_of,
    read_constraints,
    read_track_output,
)
from .scheduler import KvScheduler, SchedulerStatistics
from .shared_load import MESSAGE_BYTES, Heard, LoadSharing, SharedLoad
from .tape import Recorder, TapedLoad, TapedScheduler

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=SharedLoad)

Offered: TypeAlias = Callable[[], Sequence[Instance]]
"""The instances that may be chosen just now."""

ANSWER_MARGIN: Final = 0.05
"""Seconds before the deadline of a handler at which its calls leave the queue: what they say of it
would come too late to its caller."""

LONG_PROMPT: Final = 16_384
"""Tokens from which on a prompt is hashed in stretches."""

LOOK_INTERVAL: Final = 0.2
"""Seconds between two looks at the instances while calls wait."""


@asynccontextmanager
async def open_router(
    runtime: Runtime,
    target: type[Actor] | str,
    config: RouterConfig | None = None,
    *,
    group: Group | None = None,
    **settings: Unpack[RouterSettings],
) -> AsyncGenerator[KvRouter]:
    """A router for the calls of one component, for as long as the `async with` lasts.

    Args:
        target: the actor, or `namespace.component`.
        config: how it decides.
        group: the instances that it routes to, and whose events it follows; None for all.
        settings: fields of `RouterConfig`, which go before those of `config`.

    Raises:
        ConfigError: the target is none, a policy cannot be loaded, a value is not usable, or the
            stream of events has other settings.
        Unavailable: JetStream does not answer.
    """
    config = configured(config, settings)
    namespace, component = _address(runtime, target)
    runtime.discovery.begin()
    async with AsyncExitStack() as exits:
        follower = None
        if config.exact:
            follower = await exits.enter_async_context(
                warm_follower(runtime, namespace, component, group=group)
            )
        abroad = None
        if config.exact and runtime.bus.config.spill == "region":
            listening = caches_abroad(runtime.bus.data, namespace, component)
            abroad = await exits.enter_async_context(listening)
        recorder = runtime.bus.recorder(namespace)
        if recorder is not None:
            exits.callback(recorder.close)
        router = KvRouter(
            config,
            follower=follower,
            abroad=abroad,
            connection=runtime.bus.data if config.share else None,
            target=f"{namespace}.{component}",
            instances=partial(live_instances, runtime, namespace, component, group),
            group=group,
            offered=lambda: runtime.discovery.view.instances(namespace, component, monotonic()),
            recorder=recorder,
        )
        await exits.enter_async_context(router)
        await exits.enter_async_context(RouterWatch(runtime.bus, namespace, component, router))
        yield router


def _address(runtime: Runtime, target: Any) -> tuple[str, str]:
    """Namespace and component of what a router is opened for.

    Raises:
        ConfigError: it is no actor and no address.
    """
    if isinstance(target, type) and issubclass(target, Actor):
        return runtime.address_of(target)
    if isinstance(target, str) and target.count(".") == 1 and not target.startswith("."):
        namespace, _, component = target.partition(".")
        return check_token("namespace", namespace), check_token("component", component)
    raise ConfigError(
        f"open_router(runtime, {brief_repr(target)}): give the class of the engine's actor, which "
        "has a namespace, or its address as 'namespace.component', for example 'llm.Engine'"
    )


class KvRouter:
    """A `Router` by KV-cache overlap and load, for the calls of one component.

    Use it with `async with` when it has a `connection`; without one it needs no closing. It is
    opened once: calls that wait when it closes, and all later ones, end with `Draining`.

    Args:
        config: how it decides.
        follower: the index that follows the engines' events, entered by its giver. None
            guesses from own decisions what engines hold.
        abroad: what instances of other regions say of their caches; None guesses it as well.
        connection: of the running loop, over which routers of the component share their load;
            None for a router that is alone.
        target: `namespace.component` that it is for; that of the first call unless given.
        instances: the ids of those of the target; while there are none, `awareness` is off.
        offered: those of them that may be chosen just now, for calls that wait while one comes.
            None has them wait for the next call, which is offered them.
        group: the instances that it routes to; None for all that it is offered.
        recorder: of its tape; None for no tape.
        settings: fields of `RouterConfig`, which go before those of `config`.

    Attributes:
        route_timeout: None, since a call may wait in the queue until its deadline.

    Raises:
        ConfigError: a policy cannot be loaded, or a value is not usable.
    """

    route_timeout: float | None = None

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        follower: Follower | None = None,
        abroad: CachesAbroad | None = None,
        connection: Connection | None = None,
        target: str = "",
        instances: Instances | None = None,
        offered: Offered | None = None,
        group: Group | None = None,
        recorder: Recorder | None = None,
        **settings: Unpack[RouterSettings],
    ) -> None:
        self._config = config = configured(config, settings)
        self._fields = config.fields or RequestFields()
        self.follower = follower
        self._connection = connection
        self._target = target
        self._instances = instances
        self._offered = offered
        self._group = group
        self._profiles = Profiles(
            block_size=config.block_size,
            tokenizer_id=config.tokenizer_id,
            needs_events=follower is not None,
        )
        self._load: SharedLoad | None
        self._scheduler: KvScheduler
        if recorder is None:
            load = self._load = _shared(SharedLoad, connection)
            self._scheduler = KvScheduler(config, load=load, follower=follower, abroad=abroad)
        else:
            taped = self._load = _shared(TapedLoad, connection)
            self._scheduler = TapedScheduler(
                config, recorder, target=target, load=taped, follower=follower, abroad=abroad
            )
        self._waiting: dict[Ticket, asyncio.Future[Decision]] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._component: tuple[str, str] | None = None
        self._starting = asyncio.Lock()
        self._sharing: LoadSharing | None = None
        self._background: Background | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        where = ".".join(self._component) if self._component else "not used yet"
        return f"<KvRouter {where} [{self.policy} | {len(self._waiting)} waiting]>"

    async def __aenter__(self) -> KvRouter:
        """Open it, once.

        Raises:
            ConfigError: it was closed.
        """
        if self._is_closed:
            raise ConfigError(f"{self!r} was closed, and cannot be opened again: make another one")
        self._background = Background(f"background of {self!r}", self._background_failed)
        await self._background.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closed = True
        self._fail_waiting()
        if self._background is not None:
            with anyio.CancelScope(shield=True):
                await self._background.close()

    def _background_failed(self, error: BaseException) -> None:
        logger.error("%r: it no longer shares its load", self)

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
        profiles, excluded = self._profiles.of(self._in_group(instances), now)
        if self._component != request.endpoint[:2]:
            await self._start(request.endpoint)
        self._check_open()
        if request.attempt == 1:
            self._see(profiles, now)
        config = self._config
        tracks_output = read_track_output(request.metadata, config.track_output)
        block_size = self._profiles.block_size
        shape, lora_name = self._fields.read(request, block_size)
        if shape.prompt_tokens > LONG_PROMPT:
            # Each takes a millisecond or more: whatever else the loop serves comes between.
            await asyncio.sleep(0)
            shape.hash_prefixes()
            await asyncio.sleep(0)
            self._check_open()
        wanted = SchedulingRequest(
            request.request_id,
            shape,
            profiles,
            now,
            request.attempt,
            request.metadata.get(SESSION_KEY, ""),
            read_constraints(request.metadata, lora_name=lora_name, lora=config.lora),
            excluded,
            measured_hops(instances, request.round_trip),
        )
        decision = await self._decide(wanted, request)
        rank, peer = decision.chosen, decision.peer
        routed = {
            DP_RANK_KEY: str(rank.dp_rank),
            OVERLAP_KEY: str(decision.expected_reuse // block_size),
        }
        if peer is not None or PEER_KEY in request.metadata:
            # A call that was routed before may have brought those of another router.
            routed[PEER_KEY] = "" if peer is None else peer.instance
            routed[PEER_BLOCKS_KEY] = str(decision.peer_overlap)
        return Route(
            rank.instance,
            AttemptObserver(
                self._scheduler,
                self._changed,
                decision.number,
                config.reused_field,
                block_size if tracks_output else 0,
                decision.waited_s,
            ),
            routed,
        )

    def instance_of(self, session: str) -> str | None:
        """The instance to which this router has sent a session last; None where it has forgotten
        it, or never has."""
        return self._scheduler.instance_of(session, monotonic())

    def check(self, instances: Sequence[Instance]) -> int:
        """The block size of these instances, once they are found to fit together.

        Raises:
            ConfigError: they do not, and why.
        """
        self._profiles.of(instances, monotonic())
        return self._profiles.block_size

    def _in_group(self, instances: Sequence[Instance]) -> Sequence[Instance]:
        """Those of its group; all, of whose caches it knows nothing, while there are none."""
        group = self._group
        if group is None:
            return instances
        return [one for one in instances if group.has(one.id)] or instances

    async def _decide(self, wanted: SchedulingRequest, request: RouteRequest) -> Decision:
        """The decision for a call, at once or when there is room for it."""
        outcome = self._scheduler.submit(wanted, wanted.arrived)
        decision = await self._wait(outcome, request) if isinstance(outcome, Ticket) else outcome
        if decision.attempt > 1:
            tried = self._scheduler.decisions.tried_before(decision)
            decision.excluded = {**tried, **decision.excluded}
        self._tell()
        return decision

    def _see(self, profiles: Sequence[InstanceProfile], now: float) -> None:
        """Forget what is gone of the instances; have those that wait know of new ones."""
        for instance in self._profiles.gone(now):
            self._scheduler.remove_instance(instance)
        for instance in self._profiles.restarted():
            self._scheduler.forget_cache(instance)
        if self._waiting:
            self._scheduler.refresh(profiles)
            self._release()

    # Waiting ------------------------------------------------------------------------------

    async def _wait(self, ticket: Ticket, request: RouteRequest) -> Decision:
        """The decision for a call that waits, when it is made.

        Raises:
            DeadlineExceeded: the deadline of the handler that makes the call is over before.
            Draining: the router was closed before.
            DynbusError: what speaks against a decision.
        """
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = future
        begun = monotonic()
        try:
            # What it waits for may have happened when nobody waited.
            self._release()
            self._look_later()
            async with asyncio.timeout(_time_in_queue(request, begun)):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                # Decided in the same turn in which the time was over.
                return future.result()
            raise DeadlineExceeded(
                f"the call to {request.endpoint} {_queued(monotonic() - begun)} until its "
                f"deadline: all instances are busy (calls that wait: {len(self._waiting)})",
                request_id=request.request_id,
                started=False,
            ) from None
        except asyncio.CancelledError as error:
            error.add_note(
                f"it {_queued(monotonic() - begun)} (calls that wait: {len(self._waiting)})"
            )
            if future.done() and not future.cancelled() and future.exception() is None:
                # Decided in the same turn in which the caller left.
                self._scheduler.ended(future.result().number, monotonic(), "Cancelled")
                self._release()
            raise
        finally:
            self._scheduler.withdraw(ticket)
            del self._waiting[ticket]

    def _release(self) -> None:
        """Let those go on who have waited long enough."""
        if not self._waiting:
            return
        now = monotonic()
        for ticket, outcome in self._scheduler.release(now):
            future = self._waiting.get(ticket)
            if future is None or future.done():
                if isinstance(outcome, Decision):
                    self._scheduler.ended(outcome.number, now, "Cancelled")
            elif isinstance(outcome, Decision):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

    def _fail_waiting(self) -> None:
        """Fail all that wait with `Draining`: nobody would tell them that they may go on."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        now = monotonic()
        for ticket, future in self._waiting.items():
            self._scheduler.withdraw(ticket)
            if not future.done():
                future.set_exception(
                    Draining(
                        f"the call {_queued(now - ticket.request.arrived)}, which was closed: "
                        "retry it through another router",
                        request_id=ticket.request.request_id,
                        started=False,
                    )
                )

    def _look_later(self) -> None:
        if self._next_look is None:
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(LOOK_INTERVAL, self._look_again)

    def _look_again(self) -> None:
        """Wake calls that wait and may go on because of changes that no call has reported."""
        self._next_look = None
        if not self._waiting:
            return
        self._look_later()
        now = monotonic()
        try:
            instances = () if self._offered is None else self._in_group(self._offered())
            profiles = self._profiles.of(instances, now)[0] if instances else ()
        except ConfigError:
            # Each that does not fit was logged; those that calls wait for may be free.
            profiles = ()
        self._see(profiles, now)

    # The load of this router and of others ------------------------------------------------

    async def _start(self, endpoint: EndpointName) -> None:
        """Begin with the first call, which says for which component."""
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
            if self._component is None:
                await self._share(component)
                self._component = component

    async def _share(self, component: tuple[str, str]) -> None:
        if self._connection is None or self._load is None:
            return
        if self._background is None:
            raise ConfigError(
                "a KvRouter with a connection shares its load while it is open: write "
                "`async with KvRouter(...) as router`"
            )
        sharing = LoadSharing(
            self._connection, self._background, *component, self._load, self._heard, self._group
        )
        try:
            await sharing.open()
        except RuntimeError:
            # The router was closed meanwhile, and takes no work in its background.
            self._check_open()
            raise
        self._sharing = sharing

    def _heard(self, heard: Heard) -> None:
        """Another router has sent prompts somewhere, or something of it is over."""
        now = monotonic()
        for rank, sequence_hashes in heard.sent:
            self._scheduler.note_elsewhere(rank, sequence_hashes, now)
        if heard.released:
            self._release()

    def _changed(self) -> None:
        """The load of an instance has changed by a call of this router."""
        self._release()
        self._tell()

    def _tell(self) -> None:
        if self._sharing is not None:
            self._sharing.notify()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Draining(f"{self!r} was closed: call through another router", started=False)

    # Questions and changes ----------------------------------------------------------------

    def decisions(self, request_id: str) -> list[Decision]:
        """The decisions for a request, one per attempt, while they are kept."""
        return self._scheduler.decisions.find(request_id)

    def latest_decisions(self, count: int = 20) -> list[Decision]:
        """The latest decisions, newest first."""
        return self._scheduler.decisions.latest(count)

    def statistics(self) -> SchedulerStatistics:
        """Figures of its decisions."""
        return self._scheduler.statistics()

    def awareness(self) -> CacheAwareness:
        """The degree to which it can rely on what it knows of the caches at this moment."""
        if self._instances is not None and (known := self._instances()) is not None and not known:
            return no_instances(self._target)
        return self._scheduler.awareness()

    def load(self, rank: Rank) -> RankLoad:
        """The load of a rank: requests of this router, and of those that share their load."""
        return self._scheduler.load.of(rank)

    @property
    def policy(self) -> str:
        """The name of the cost function that decides now."""
        return self._scheduler.policy

    @property
    def decisions_limit(self) -> int:
        """The number of decisions that are kept."""
        return self._config.decisions

    def report_reused(self, request_id: str, tokens: int) -> Decision | None:
        """The engine found so many tokens of a request's prompt in its cache.

        Returns:
            The decision, which says what was expected; None when it is not kept any longer.

        Raises:
            ConfigError: it is no number of tokens.
        """
        given: Any = tokens
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise ConfigError(f"report_reused(tokens={given!r}): give a whole number of at least 0")
        return self._scheduler.report_reused(request_id, tokens, monotonic())

    def use_policy(self, policy: str | CostFunction) -> None:
        """Decide by another policy from the next call on; a module's file is read again.

        Raises:
            ConfigError: it cannot be loaded. The one before goes on.
        """
        self._scheduler.use_policy(policy)


def _shared(kind: type[L], connection: Connection | None) -> L | None:
    """The load that a router shares by a connection; None where it shares none."""
    if connection is None:
        return None
    message_bytes = min(MESSAGE_BYTES, connection.max_payload // 2)
    return kind(random_id(), message_bytes=message_bytes)


def measured_hops(
    instances: Sequence[Instance], round_trip: Callable[[str], float | None]
) -> dict[str, float]:
    """Milliseconds of the way to each instance of another zone or region and back, by id.

    One that was not measured counts as the nearest of its place that was, and without any as near:
    it is measured once it is called.

    Args:
        round_trip: as of a `RouteRequest`.
    """
    far = [
        (one.id, (one.region, one.record.zone))
        for one in instances
        if not one.near and (one.region or one.record.zone)
    ]
    if not far:
        return {}
    known = {one: seconds for one, _ in far if (seconds := round_trip(one)) is not None}
    nearest: dict[tuple[str, str], float] = {}
    for one, place in far:
        if one in known:
            nearest[place] = min(known[one], nearest.get(place, known[one]))
    return {one: 1000 * known.get(one, nearest[place]) for one, place in far if place in nearest}


def _time_in_queue(request: RouteRequest, now: float) -> float | None:
    """Seconds after which a handler's call leaves the queue, so that its caller hears why."""
    parent = request.parent
    if parent is None or parent.deadline is None:
        return None
    return max(0.0, parent.deadline - now - ANSWER_MARGIN)


def _queued(seconds: float) -> str:
    """The part of an error's text about the time that a call waited."""
    return f"waited {seconds:.3g} s in the router's queue"


class AttemptObserver:
    """Tells a scheduler how the attempt of one decision goes.

    Its output is counted, and what the engine says to have reused is found in it.

    Args:
        changed: called when the load of the instance has changed.
        reused_field: where an item, or the result, says how many tokens of the prompt the engine
            found in its cache: names with dots; empty for nowhere.
        block_size: tokens after which the output has grown by a block; 0 to count none.
        waited: seconds in the queue, which the error of the attempt tells.
    """

    def __init__(
        self,
        scheduler: KvScheduler,
        changed: Callable[[], None],
        number: int,
        reused_field: str,
        block_size: int,
        waited: float = 0.0,
    ) -> None:
        self._scheduler = scheduler
        self._changed = changed
        self._number = number
        self._reused_field = reused_field
        # An item is decoded only when it may have the field: they are many, and most have none.
        self._key = f'"{reused_field.rpartition(".")[2]}"'.encode() if reused_field else b""
        self._block_size = block_size
        self._output = 0
        self._waited = waited

    def started(self) -> None:
        """The load was charged when it was decided."""

    def first_item(self) -> None:
        self._scheduler.first_item(self._number, monotonic())
        self._changed()

    def arrived(self, items: Sequence[bytes]) -> bool:
        if self._key:
            for item in items:
                if (
                    self._key in item
                    and (tokens := _reused_in(item, self._reused_field)) is not None
                ):
                    self._key = b""
                    self._scheduler.note_reused(self._number, tokens, monotonic())
                    break
        if self._block_size:
            before = self._output // self._block_size
            self._output += _tokens_in(items)
            if self._output // self._block_size != before:
                self._scheduler.grown(self._number, self._output)
        return bool(self._key or self._block_size)

    def ended(self, error: DynbusError | None) -> None:
        code = "" if error is None else error.code
        self._scheduler.ended(self._number, monotonic(), code)
        self._changed()
        if error is not None and self._waited:
            # The time that is missing was not spent where the error arose.
            error.message = f"{error.message or error.code}; before, it {_queued(self._waited)}"


class _Output(msgspec.Struct):
    """The part of an item that is read to count its tokens."""

    token_ids: list[int] | None = None


_read_output: Final = msgspec.json.Decoder(_Output).decode


def _tokens_in(items: Sequence[bytes]) -> int:
    """The number of tokens of items; one that does not list them counts as one."""
    tokens = 0
    for item in items:
        try:
            listed = _read_output(item).token_ids
        except (ValueError, RecursionError):
            # The reader finds out what is wrong with it.
            listed = None
        tokens += 1 if listed is None else len(listed)
    return tokens


def _reused_in(item: bytes, path: str) -> int | None:
    """The number at a dotted path of an item, which is JSON; None where there is none."""
    try:
        value: Any = field_of(msgspec.json.decode(item), path)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # The reader finds that out as well, and says so.
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
