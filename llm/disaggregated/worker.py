"""`DisaggregatedWorker`: an engine that computes prompts for others, or has its own computed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

import msgspec

from dynbus import (
    ComponentName,
    ConfigError,
    DynbusError,
    EndpointName,
    Instance,
    InstanceName,
    InvalidRequest,
    NoInstances,
    Option,
    Reply,
    Route,
    RouteObserver,
    RouteRequest,
    WorkQueue,
    context,
    handler,
    takes,
    with_options,
)
from dynbus.kvrouter import KvRouter, open_router
from dynbus.llm.engine.interface import EngineLimits
from dynbus.llm.engine.runner import EventSink
from dynbus.llm.engine.worker import LONGEST_PREFILL
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.models.publishing import Target
from dynbus.llm.worker import ModelEngineOptions, ModelWorker
from dynbus.spi import ServedInstance, make_endpoint, random_id
from dynbus.transfer import KvMemory, Settled, Settlement, Settling, open_agent

from .choosing import FIELDS, PrefillChoice
from .messages import (
    Offer,
    OfferAnswer,
    Prefilled,
    PrefillJob,
    PrefillRequest,
    Role,
    RoleChange,
    RoleState,
)
from .observing import HandOverFigures, HandOverWatch, TransferSpans
from .queued import JobTaker
from .receiving import Limits, Mover, Receiver, Receiving
from .roles import Duty, RoleEvents, RoleInstance, Roles
from .sending import Granter, Sender
from .settings import (
    DisaggregationOption,
    DisaggregationSettings,
    LiveSettings,
    announced_settings,
    follow_settings,
)

ENDED_IDS: Final = 16
"""Of instances of former roles that are taken for this worker still."""

_SERVED: Final[Mapping[Duty, tuple[str, ...]]] = {
    "prefill": ("prefill", "load_metrics"),
    "decode": ("generate", "embed", "load_metrics"),
    "control": ("settle", "offer", "role", "change_role"),
}


class BlockAgent(Mover, Granter, Protocol):
    """What moves blocks, and leases them to others; `TransferAgent` is one."""


@dataclass(frozen=True, kw_only=True)
class DisaggregatedOptions(ModelEngineOptions):
    """A model, its engine, and what an instance of it does for others."""

    role: Annotated[
        Literal["auto", "prefill", "decode", "both"],
        Option(
            "what it serves at first: prompts for others, outputs, or both; `auto` goes by the "
            "name of its node. `change_role` changes it while it runs",
            guide="disaggregated.md#change-it-while-it-runs",
        ),
    ] = "auto"
    disaggregation: DisaggregationOption = None


class DisaggregatedWorker(ModelWorker, abstract=True, enabled=False):
    """Serves a model together with others: some compute prompts, the others what follows.

    The same class runs under two names, which say what each instance serves:

        prefill: {class: Engine}
        decode: {class: Engine}

    Front ends find those that decode. Such an instance decides for each request whether it computes
    the prompt itself, and has a prefill instance do so otherwise: it shows the first token as soon
    as that is drawn, reads the blocks of the prompt while they are computed, and goes on. Whatever
    fails on the way, it computes what has not come itself.

    Attributes:
        prefill_node, decode_node: the names under which instances are found by what they serve.
        control_node: under which all are found, for `role` and `change_role`.
        hand_over_limits: how long hand-overs may take.

    Raises:
        ConfigError: NIXL is missing, the engine's blocks cannot be moved, or a value is not usable.
    """

    prefill_node: ClassVar[str] = "prefill"
    decode_node: ClassVar[str] = "decode"
    control_node: ClassVar[str] = "hand_over"
    hand_over_limits: ClassVar[Limits] = Limits()

    _exits_of_roles: AsyncExitStack | None = None
    _agent: BlockAgent | None = None
    _roles: Roles | None = None
    _sender: Sender | None = None
    _receiver: Receiver | None = None
    _choice: PrefillChoice | None = None
    _settings: LiveSettings
    _queue: WorkQueue
    _control: InstanceName
    _limits_of_engine: EngineLimits
    _first_role: Role
    figures: HandOverFigures
    _events: RoleEvents
    _ids: set[str]
    _ended_ids: deque[str]
    _numbers: Iterator[int]
    _has_own_id: bool

    @takes(DisaggregatedOptions)
    def __init__(self, options: DisaggregatedOptions) -> None:
        self.hold(options)
        self._asked_role: Role | Literal["auto"] = options.role
        self._own_settings = DisaggregationSettings().changed(options.disaggregation or {})

    def transfer_agent(self, memory: KvMemory) -> AbstractAsyncContextManager[BlockAgent]:
        """What moves its blocks, for subclasses that move them otherwise.

        Raises:
            ConfigError: NIXL is missing.
        """
        name = self.__dynbus_name__
        return open_agent(self.runtime.bus, f"{name.namespace}.{name.instance_id}", memory)

    # Its life -------------------------------------------------------------------------------

    async def on_start(self) -> None:
        self._first_role = self._configured_role()
        self.figures = HandOverFigures()
        self._events = RoleEvents()
        self._ids: set[str] = set()
        self._ended_ids: deque[str] = deque()
        self._numbers = count()
        self._has_own_id = False
        await super().on_start()

    def _configured_role(self) -> Role:
        """What it serves at first.

        Raises:
            ConfigError: nothing says it.
        """
        if self._asked_role != "auto":
            return self._asked_role
        by_node: dict[str, Role] = {self.prefill_node: "prefill", self.decode_node: "decode"}
        role = by_node.get(self.__dynbus_name__.component)
        if role is None:
            raise ConfigError(
                f"{type(self).__name__} has no role: name its node {self.prefill_node} or "
                f"{self.decode_node}, or set role to prefill, decode or both"
            )
        return role

    def event_sink(self) -> AbstractAsyncContextManager[EventSink | None]:
        @asynccontextmanager
        async def events() -> AsyncGenerator[EventSink]:
            yield self._events

        return events()

    async def on_engine(self, limits: EngineLimits) -> None:
        runner, bus, name = self._running(), self.runtime.bus, self.__dynbus_name__
        try:
            memory = runner.memory
        except InvalidRequest as error:
            raise ConfigError(
                f"{type(self).__name__} cannot hand prompts over: {error}. Serve this engine with "
                "a ModelWorker, or take engine=small"
            ) from None
        self.check_checksums(memory)
        async with AsyncExitStack() as exits:
            agent = await exits.enter_async_context(self.transfer_agent(memory))
            self._agent = agent
            self._settling = Settling(memory, agent.leases)
            await self.read_fingerprint()
            self._settings = await exits.enter_async_context(
                follow_settings(bus, self._component(self.decode_node), self._own_settings)
            )
            watch = HandOverWatch(bus, name, self.figures, self._roles_text, self._shown)
            await exits.enter_async_context(watch)
            self._limits_of_engine = limits
            self._queue = WorkQueue(
                bus, EndpointName(*self._component(self.prefill_node), "prefill")
            )
            roles = self._roles = Roles(self.runtime, self._make_role)
            exits.push_async_callback(roles.close)
            await roles.change(self._first_role, 0.0)
            self._exits_of_roles = exits.pop_all()

    async def __dynbus_drain__(self, grace: float) -> None:
        if self._roles is not None:
            await self._roles.drain(grace)

    async def on_stop(self) -> None:
        try:
            if self._exits_of_roles is not None:
                await self._exits_of_roles.aclose()
        finally:
            await super().on_stop()

    def report_broken(self, reason: str) -> None:
        if self._roles is not None:
            self._roles.report_broken(reason)
        super().report_broken(reason)

    def _component(self, node: str) -> ComponentName:
        return ComponentName(self.__dynbus_name__.namespace, node)

    def _roles_text(self) -> str:
        return " and ".join(self._roles.state.serves) if self._roles is not None else ""

    def _shown(self) -> InstanceName:
        """Where operators find it now."""
        return (self._roles.shown if self._roles is not None else None) or self.__dynbus_name__

    # Roles ----------------------------------------------------------------------------------

    def _make_role(self, duty: Duty) -> RoleInstance:
        own = self.__dynbus_name__
        nodes = {"prefill": self.prefill_node, "decode": self.decode_node}
        node = nodes.get(duty, self.control_node)
        # Of two that drain and begin at a time, each is another to everybody.
        instance_id, number = own.instance_id, next(self._numbers)
        if node != own.component or self._has_own_id:
            instance_id = f"{own.instance_id}-{number}"
        else:
            self._has_own_id = True
        self._ids.add(instance_id)
        handlers = type(self).__dynbus_handlers__
        endpoints = [make_endpoint(getattr(self, name), handlers[name]) for name in _SERVED[duty]]
        lives = {
            "prefill": self._prefilling,
            "decode": self._decoding,
            "control": self._controlling,
        }
        has_events = duty != "control" and self._limits_of_engine.has_events
        return RoleInstance(
            self.runtime,
            self._component(node).instance(instance_id),
            duty,
            map(self.__dynbus_endpoint__, endpoints),
            partial(self._metadata_of, duty),
            self._events if has_events else None,
            lives[duty],
            self._role_ended,
        )

    def _role_ended(self, instance: ServedInstance) -> None:
        """Forget its id, but for a while: others, and what is under way, may name it yet."""
        self._ended_ids.append(instance.id)
        if len(self._ended_ids) > ENDED_IDS:
            self._ids.discard(self._ended_ids.popleft())

    def _metadata_of(self, duty: Duty) -> Mapping[str, str]:
        own = self._own_settings.metadata() if duty == "decode" else {}
        return {**self.instance_metadata(), **own}

    @asynccontextmanager
    async def _controlling(self, role: RoleInstance) -> AsyncGenerator[None]:
        """Have leases settled by this instance."""
        assert self._agent is not None
        assert self._settling is not None
        self._control = role.instance.name
        self._sender = Sender(
            self._running(),
            self._agent,
            self._settling,
            self.figures,
            instance=role.instance.id,
            lease=self.hand_over_limits.lease,
        )
        yield

    @asynccontextmanager
    async def _prefilling(self, role: RoleInstance) -> AsyncGenerator[None]:
        """Take jobs, where prompts go by the work queue."""
        taker = JobTaker(
            self._queue,
            _DecodeClient(self._control_client()),
            role.instance.id,
            self._has_jobs,
            self._fingerprint,
        )
        work = taker.start(self.runtime.background)
        role.retire = taker.retire
        try:
            yield
        finally:
            await work.end()

    def _has_jobs(self) -> bool:
        """Whether prompts go by the work queue: a record says so, or a decode instance does."""
        if self._settings.current.through == "queue":
            return True
        for one in self.runtime.known_instances(self._component(self.decode_node)):
            with suppress(ConfigError):
                own = announced_settings(one.metadata)
                if own is not None and own.through == "queue":
                    return True
        return False

    @asynccontextmanager
    async def _decoding(self, role: RoleInstance) -> AsyncGenerator[None]:
        """Have prompts computed by others, and the model found by front ends."""
        runtime, name = self.runtime, role.instance.name
        assert self._agent is not None
        prefill = self._component(self.prefill_node)
        async with open_router(
            runtime,
            str(prefill),
            exact=self._limits_of_engine.has_events,
            fields=FIELDS,
            reused_field="first.cached_tokens",
        ) as router:
            choice = PrefillChoice(
                router,
                lambda: runtime.known_instances(prefill),
                self._running(),
                self._settings,
                own=self._ids,
                model=self._fingerprint,
            )
            routing = _PrefillRouting(router, choice)
            client = runtime.client(
                type(self),
                node=prefill.component,
                namespace=prefill.namespace,
                routing=routing,
                wait=0.0,
            )
            receiver = Receiver(
                self._running(),
                self._agent,
                _PrefillClient(client, routing, self._control_client(), self._fingerprint),
                runtime.background,
                self.hand_over_limits,
                self.figures,
                TransferSpans(runtime.bus.telemetry, name),
                instance=self._control.instance_id,
                put=self._put,
                compares=self.checksums,
            )
            ended = asyncio.Event()
            try:
                self._receiver, self._choice = receiver, choice
                await self.register_model(
                    self._limits_of_engine,
                    self._target(name, "generate", ended),
                    self._target(name, "embed", ended),
                )
                yield
            finally:
                ended.set()
                if self._receiver is receiver:
                    self._receiver = self._choice = None

    async def _put(self, job: PrefillJob, deadline: float) -> None:
        data = msgspec.json.encode(msgspec.structs.replace(job, model=self._fingerprint))
        await self._queue.put(data, job_id=job.hand_over, deadline=deadline)

    def _control_client(self) -> DisaggregatedWorker:
        """All instances, whatever they serve."""
        name = self._control
        return self.runtime.client(
            type(self), node=name.component, namespace=name.namespace, wait=0.0
        )

    def _target(self, name: InstanceName, endpoint: str, ended: asyncio.Event) -> Target:
        return Target(
            self.runtime.bus,
            self.runtime.discovery,
            EndpointName(name.namespace, name.component, endpoint),
            name.instance_id,
            (ended,),
        )

    @handler(idempotent=True)
    async def role(self) -> RoleState:
        """What the instance serves."""
        assert self._roles is not None
        return self._roles.state

    @handler(idempotent=True)
    async def change_role(self, change: RoleChange) -> RoleState:
        """Serve another role from now on: what is new is found when this returns. The calls of what
        is given up have `grace` seconds to finish; then other instances take them over.

        Raises:
            InvalidRequest: `grace` is no number of seconds.
        """
        assert self._roles is not None
        grace = self.runtime.bus.config.drain_grace if change.grace is None else change.grace
        if not 0 <= grace < float("inf"):
            raise InvalidRequest(f"grace = {grace:g}: give seconds, 0 or more")
        return await self._roles.change(change.role, grace)

    # Decode ---------------------------------------------------------------------------------

    async def serve_request(
        self, name: str, request: GenerateRequest, reply: Reply[Generated]
    ) -> None:
        receiver, choice = self._receiver, self._choice
        reason = _stays(request)
        if reason or receiver is None or choice is None:
            self.figures.computed_here(reason or "no_prefill")
            if receiver is not None:
                receiver.spans.decided(f"local: {reason.replace('_', ' ')}")
            await super().serve_request(name, request, reply)
            return
        queued = self._settings.current.through == "queue"
        jobs = await self._waiting_jobs() if queued else 0

        def is_remote(cached: int) -> bool:
            decision = choice.decide(request, cached, jobs=jobs)
            receiver.spans.decided(decision.describe())
            if not decision.remote:
                self.figures.computed_here(str(decision.reason))
            return decision.remote

        expected = choice.cached_tokens(context().metadata)
        if not is_remote(expected):
            await super().serve_request(name, request, reply)
            return

        def is_worth(cached: int) -> bool:
            return cached <= expected or is_remote(cached)

        running = context()
        receiving = Receiving(
            receiver,
            name,
            random_id(),
            request,
            reply,
            queued=queued,
            is_worth=is_worth,
            time_left=running.time_left(),
        )
        unlink = running.link(lambda _: receiver.runner.cancel(name))
        try:
            if not running.is_stopped():
                await receiving.run()
        finally:
            unlink()

    async def _waiting_jobs(self) -> int:
        """Prompts in the queue that nobody has taken; 0 where the server does not say."""
        with suppress(DynbusError):
            return (await self._queue.depth()).waiting
        return 0

    @handler(concurrency=None)
    async def offer(self, offer: Offer) -> OfferAnswer:
        """A prefill instance has taken a job of this one: it ends when the prompt is handed over,
        or when nobody waits for it."""
        if self._receiver is None:
            return OfferAnswer(done=False, reason="this instance decodes no longer")
        return await self._receiver.offer(offer, is_own=offer.instance in self._ids)

    # Prefill --------------------------------------------------------------------------------

    @handler(concurrency=None, idle_timeout=LONGEST_PREFILL)
    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[Prefilled]:
        """How far a prompt is computed, with leases on its blocks, and its first token at last.

        It ends when all leases are settled; whoever leaves it before has all freed at once.

        Raises:
            InvalidRequest: the caller computes another model.
        """
        assert self._sender is not None
        self.check_same_model(request.model)
        async for item in self._sender.prefill(self._new_name(), request, context()):
            yield item


class _PrefillClient:
    """The prefill instances; see `Peers`.

    Args:
        routing: by which `prefill` calls.
        model: the fingerprint of the decode instance's.
    """

    def __init__(
        self,
        prefill: DisaggregatedWorker,
        routing: _PrefillRouting,
        control: DisaggregatedWorker,
        model: str,
    ) -> None:
        self._prefill = prefill
        self._routing = routing
        self._control = control
        self._model = model

    async def prefill(
        self, request: PrefillRequest, instance: str
    ) -> AsyncGenerator[Prefilled, None]:
        request = msgspec.structs.replace(request, model=self._model)
        with self._routing.taken(request.hand_over, instance):
            items: Any = self._prefill.prefill(request)
            async with aclosing(items):
                async for item in items:
                    yield item

    async def settle(self, settlement: Settlement, instance: str) -> Settled:
        return await with_options(self._control, instance=instance).settle(settlement)


class _DecodeClient:
    """The decode instances; see `Offers`."""

    def __init__(self, control: DisaggregatedWorker) -> None:
        self._control = control

    async def offer(self, offer: Offer, instance: str) -> OfferAnswer:
        return await with_options(self._control, instance=instance, timeout=None).offer(offer)


class _PrefillRouting:
    """A router of prompts that are computed while their first items come.

    Args:
        choice: knows who can compute prompts for this instance.
    """

    route_timeout: float | None = None

    def __init__(self, router: KvRouter, choice: PrefillChoice) -> None:
        self._router = router
        self._choice = choice
        self._takers: dict[str, str] = {}

    @contextmanager
    def taken(self, hand_over: str, instance: str) -> Generator[None]:
        """Have the instance compute a prompt that has taken its job; any where it is empty. The
        router learns of it, and can say why."""
        if instance:
            self._takers[hand_over] = instance
        try:
            yield
        finally:
            self._takers.pop(hand_over, None)

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        """See `Router.route`.

        Raises:
            NoInstances: there is none that can compute prompts for this one.
        """
        usable = self._choice.usable(instances)
        wanted: PrefillRequest = request.request
        if taker := self._takers.get(wanted.hand_over):
            usable = [one for one in usable if one.id == taker]
        if not usable:
            raise NoInstances(f"no other instance serves {request.endpoint}", started=False)
        route = await self._router.route(request, usable)
        return route if route.observer is None else route._replace(observer=_Whole(route.observer))


class _Whole:
    """Says nothing of first items: the prompt is computed when the call is over."""

    def __init__(self, observer: RouteObserver) -> None:
        self._observer = observer

    def started(self) -> None:
        self._observer.started()

    def first_item(self) -> None:
        """Its prompt is not computed yet."""

    def ended(self, error: DynbusError | None) -> None:
        self._observer.ended(error)


def _stays(request: GenerateRequest) -> str:
    """Why a prompt cannot be computed elsewhere; empty where it can."""
    if request.n != 1:
        return "several_continuations"
    if request.structured is not None:
        return "structured"
    if request.lora_name:
        return "adapter"
    return ""
