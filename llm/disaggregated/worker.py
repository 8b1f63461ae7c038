"""`DisaggregatedWorker`: an engine that computes prompts for others, or has its own computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, ClassVar, Final, Protocol, get_args

import msgspec

from dynbus import (
    NoInstances,
    Reply,
    Route,
    RouteObserver,
    RouteRequest,
    handler,
)
from dynbus.actors.calling.clients import with_options
from dynbus.actors.serving.endpoints import make_endpoint
from dynbus.bus.context import context
from dynbus.bus.errors import ConfigError, DynbusError, InvalidRequest
from dynbus.bus.protocol.names import ComponentName, EndpointName, InstanceName
from dynbus.bus.protocol.tokens import random_id
from dynbus.bus.records.instance_view import Instance
from dynbus.bus.work_queue import WorkQueue
from dynbus.kvrouter import KvRouter, open_router
from dynbus.llm.engine.interface import EngineLimits
from dynbus.llm.engine.runner import EventSink
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.models.publishing import Target
from dynbus.llm.worker import ModelWorker
from dynbus.transfer.agent import open_agent
from dynbus.transfer.checksums import Settled
from dynbus.transfer.layout import KvMemory

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
    Settlement,
)
from .observing import HandOverFigures, HandOverWatch, TransferSpans
from .queued import JobTaker
from .receiving import Limits, Mover, Receiver, Receiving
from .roles import Duty, RoleEvents, RoleInstance, Roles
from .sending import Granter, Sender
from .settings import DisaggregationSettings, LiveSettings, follow_settings

_SERVED: Final[Mapping[Duty, tuple[str, ...]]] = {
    "prefill": ("prefill", "load_metrics"),
    "decode": ("generate", "embed", "load_metrics"),
    "control": ("settle", "offer", "role", "change_role"),
}


class BlockAgent(Mover, Granter, Protocol):
    """What moves blocks, and leases them to others; `TransferAgent` is one."""


class DisaggregatedWorker(ModelWorker, abstract=True, enabled=False, extra_config=True):
    """Serves a model together with others: some compute prompts, the others what follows.

    The same class runs under two names, which say what each instance serves:

        prefill: {class: Engine}
        decode: {class: Engine}

    Front ends find those that decode. Such an instance decides for each request whether it computes
    the prompt itself, and has a prefill instance do so otherwise: it shows the first token as soon
    as that is drawn, reads the blocks of the prompt while they are computed, and goes on. Whatever
    fails on the way, it computes what has not come itself.

    Extra keys of its configuration:

    - `role`: `prefill`, `decode` or `both`, where the name of its node does not say it;
      `change_role` changes it while it runs;
    - `disaggregation`: settings of `DisaggregationSettings` that hold unless the component's record
      says otherwise.

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
    _own_settings: DisaggregationSettings
    figures: HandOverFigures
    _events: RoleEvents
    _ids: set[str]

    def transfer_agent(self, memory: KvMemory) -> AbstractAsyncContextManager[BlockAgent]:
        """What moves its blocks, for subclasses that move them otherwise.

        Raises:
            ConfigError: NIXL is missing.
        """
        name = self.__dynbus_name__
        return open_agent(self.runtime.bus, f"{name.namespace}.{name.instance_id}", memory)

    # Its life -------------------------------------------------------------------------------

    async def on_start(self) -> None:
        if self.fetches_prefixes:
            raise ConfigError(
                f"fetch_prefixes: {type(self).__name__} has its prompts from prefill instances: "
                "leave it out, or take a ModelWorker"
            )
        self._first_role = self._configured_role()
        self._own_settings = self._configured_settings()
        self.figures = HandOverFigures()
        self._events = RoleEvents()
        self._ids: set[str] = set()
        await super().on_start()

    def _configured_role(self) -> Role:
        """What it serves at first.

        Raises:
            ConfigError: nothing says it.
        """
        given: Any = self.config.get("role", "")
        if not given:
            component = self.__dynbus_name__.component
            by_node: dict[str, Role] = {self.prefill_node: "prefill", self.decode_node: "decode"}
            given = by_node.get(component, "")
        if given not in get_args(Role):
            raise ConfigError(
                f"{type(self).__name__} has no role: name its node {self.prefill_node} or "
                f"{self.decode_node}, or set role to prefill, decode or both"
                + (f", not {given!r}" if given else "")
            )
        role: Role = given
        return role

    def _configured_settings(self) -> DisaggregationSettings:
        given: Any = self.config.get("disaggregation", {})
        if isinstance(given, str):
            try:
                given = msgspec.json.decode(given)
            except msgspec.DecodeError as error:
                raise ConfigError(f"disaggregation = {given!r} is no JSON: {error}") from None
        if not isinstance(given, Mapping):
            raise ConfigError(f"disaggregation = {given!r}: give settings by their names")
        changes: dict[str, Any] = {**given}
        return DisaggregationSettings().changed(changes)

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
        instance_id = own.instance_id
        if node != own.component or instance_id in self._ids:
            instance_id = f"{own.instance_id}-{len(self._ids)}"
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
            self.instance_metadata,
            self._events if has_events else None,
            lives[duty],
        )

    @asynccontextmanager
    async def _controlling(self, role: RoleInstance) -> AsyncGenerator[None]:
        """Have leases settled by this instance."""
        assert self._agent is not None
        self._control = role.instance.name
        self._sender = Sender(
            self._running(),
            self._agent,
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
            lambda: self._settings.current.through == "queue",
        )
        work = taker.start(self.runtime.background)
        role.retire = taker.retire
        try:
            yield
        finally:
            await work.end()

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
            client = runtime.client(
                type(self),
                node=prefill.component,
                namespace=prefill.namespace,
                routing=_PrefillRouting(router, self._ids),
                wait=0.0,
            )
            receiver = Receiver(
                self._running(),
                self._agent,
                _PrefillClient(client, self._control_client(), self._fingerprint),
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
                self._receiver = receiver
                self._choice = PrefillChoice(
                    router, self._prefill_instances, self._running(), self._settings
                )
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
        data = msgspec.json.encode(job)
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

    @handler
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

    def _prefill_instances(self) -> list[str]:
        """Those that are not this one, which moves no blocks to itself."""
        known = self.runtime.known_ids(self._component(self.prefill_node))
        return [one for one in known if one not in self._ids]

    @handler(concurrency=None)
    async def offer(self, offer: Offer) -> OfferAnswer:
        """A prefill instance has taken a job of this one: it ends when the prompt is handed over,
        or when nobody waits for it."""
        if self._receiver is None:
            return OfferAnswer(done=False, reason="this instance decodes no longer")
        return await self._receiver.offer(offer, is_own=offer.instance in self._ids)

    # Prefill --------------------------------------------------------------------------------

    @handler(concurrency=None)
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

    @handler(concurrency=None)
    async def settle(self, settlement: Settlement) -> Settled:
        """Whether a lease has held until now, which ends it."""
        assert self._sender is not None
        return await self._sender.settle(settlement)


class _PrefillClient:
    """The prefill instances; see `Peers`.

    Args:
        model: the fingerprint of the decode instance's.
    """

    def __init__(
        self, prefill: DisaggregatedWorker, control: DisaggregatedWorker, model: str
    ) -> None:
        self._prefill = prefill
        self._control = control
        self._model = model

    def prefill(self, request: PrefillRequest, instance: str) -> AsyncGenerator[Prefilled, None]:
        request = msgspec.structs.replace(request, model=self._model)
        client = with_options(self._prefill, instance=instance) if instance else self._prefill
        return client.prefill(request)

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
        own: ids of instances that are this one, which moves no blocks to itself.
    """

    route_timeout: float | None = None

    def __init__(self, router: KvRouter, own: Set[str]) -> None:
        self._router = router
        self._own = own

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        """See `Router.route`.

        Raises:
            NoInstances: there is no other.
        """
        others = [one for one in instances if one.id not in self._own]
        if not others:
            raise NoInstances(f"no other instance serves {request.endpoint}", started=False)
        route = await self._router.route(request, others)
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
