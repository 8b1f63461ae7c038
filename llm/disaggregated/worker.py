"""`DisaggregatedWorker`: an engine that computes prompts for others, or has its own computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

from dynbus import (
    ConfigError,
    EndpointName,
    InvalidRequest,
    Option,
    Reply,
    WorkQueue,
    context,
    handler,
    takes,
    with_options,
)
from dynbus.kvrouter import open_router
from dynbus.llm.engine.interface import EngineLimits
from dynbus.llm.engine.runner import EventSink
from dynbus.llm.engine.worker import LONGEST_PREFILL
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.hand_over.messages import Offer, OfferAnswer, Prefilled, PrefillRequest
from dynbus.llm.hand_over.observing import (
    HandOverEvents,
    HandOverFigures,
    HandOverWatch,
    TransferSpans,
)
from dynbus.llm.hand_over.part_reader import LeasedPartReader
from dynbus.llm.hand_over.sink import Limits, Sink
from dynbus.llm.hand_over.source import Leases, Source
from dynbus.llm.models.publishing import Target
from dynbus.llm.tiers.tiers import check_comparable
from dynbus.llm.worker import ModelEngineOptions, ModelWorker
from dynbus.spi import ComponentName, Grant, InstanceName, ServedInstance
from dynbus.transfer import Mover, Settled, Settlement, Settling

from .choosing import FIELDS, PrefillChoice
from .prefilling import PrefillInstances, PrefillRouting
from .queued import JobTaker
from .remote_prefill import RemotePrefill
from .roles import (
    Duty,
    Role,
    RoleChange,
    RoleEvents,
    RoleIds,
    RoleInstance,
    Roles,
    RoleState,
)
from .settings import (
    DisaggregationOption,
    DisaggregationSettings,
    LiveSettings,
    announced_settings,
    follow_settings,
    handing_over,
)

_SERVED: Final[Mapping[Duty, tuple[str, ...]]] = {
    "prefill": ("prefill", "load_metrics"),
    "decode": ("generate", "embed", "load_metrics"),
    "control": ("settle", "offer", "role", "change_role"),
}


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
        ConfigError: the engine's blocks cannot be moved, a value is not usable, or NIXL is missing
            and no other mover is given.
    """

    prefill_node: ClassVar[str] = "prefill"
    decode_node: ClassVar[str] = "decode"
    control_node: ClassVar[str] = "hand_over"
    hand_over_limits: ClassVar[Limits] = Limits()

    _mover: Mover
    _settling: Settling
    _settings: LiveSettings
    _queue: WorkQueue
    _control: InstanceName
    _limits_of_engine: EngineLimits
    _first_role: Role
    _ids: RoleIds

    @classmethod
    def __dynbus_also__(cls, address: ComponentName) -> list[ComponentName | EndpointName]:
        space = address.namespace
        nodes = (cls.prefill_node, cls.decode_node, cls.control_node)
        queue = EndpointName(space, cls.prefill_node, "prefill")
        return [*(ComponentName(space, node) for node in nodes), queue]

    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        served = ComponentName(address.namespace, cls.decode_node)
        inherited = super().__dynbus_grants__(served, namespaces)
        return [*inherited, *handing_over(served)]

    __dynbus_calls_all__ = True

    @takes(DisaggregatedOptions)
    def __init__(self, options: DisaggregatedOptions) -> None:
        self.assemble(options)
        self._checksums = options.checksums
        self._asked_role: Role | Literal["auto"] = options.role
        self._own_settings = DisaggregationSettings().changed(options.disaggregation or {})
        self.figures = HandOverFigures()
        self._events = RoleEvents()
        self._roles: Roles | None = None
        self._source: Source | None = None
        self._decodes: Sink | None = None

    # Its life -------------------------------------------------------------------------------

    async def on_start(self) -> None:
        self._first_role = self._configured_role()
        self._ids = RoleIds(self.__dynbus_name__)
        await super().on_start()

    def _configured_role(self) -> Role:
        """The role that it serves at first.

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
        await self.hold(self.verification.opened(self))
        runner, bus, name = self._running(), self.runtime.bus, self.__dynbus_name__
        try:
            memory = runner.memory
        except InvalidRequest as error:
            raise ConfigError(
                f"{type(self).__name__} cannot hand prompts over: {error}. Serve this engine with "
                "a ModelWorker, or take engine=small"
            ) from None
        if self._checksums:
            check_comparable(memory)
        mover_name = f"{name.namespace}.{name.instance_id}"
        mover = self._mover = await self.hold(self.open_mover(mover_name, memory))
        self._settling = Settling(memory, mover.leases)
        await self.served.read_fingerprint()
        self._settings = await self.hold(
            follow_settings(bus, self._component(self.decode_node), self._own_settings)
        )
        await self.hold(HandOverWatch(bus, name, self.figures, self._roles_text, self.found_as))
        self._limits_of_engine = limits
        self._queue = WorkQueue(bus, EndpointName(*self._component(self.prefill_node), "prefill"))
        self._roles = await self.hold(Roles(self.runtime, self._make_role))
        await self._roles.change(self._first_role, 0.0)

    async def __dynbus_drain__(self, grace: float) -> None:
        if self._roles is not None:
            await self._roles.drain(grace)

    def report_broken(self, reason: str, *, hung: bool = False) -> None:
        if self._roles is not None:
            self._roles.report_broken(reason)
        super().report_broken(reason, hung=hung)

    def _component(self, node: str) -> ComponentName:
        return ComponentName(self.__dynbus_name__.namespace, node)

    def _roles_text(self) -> str:
        return " and ".join(self._roles.state.serves) if self._roles is not None else ""

    def found_as(self) -> InstanceName:
        return (self._roles.shown if self._roles is not None else None) or self.__dynbus_name__

    # Roles ----------------------------------------------------------------------------------

    def _make_role(self, duty: Duty) -> RoleInstance:
        nodes = {"prefill": self.prefill_node, "decode": self.decode_node}
        node = nodes.get(duty, self.control_node)
        handlers = type(self).__dynbus_handlers__
        endpoints = [
            ServedInstance.endpoint(getattr(self, name), handlers[name]) for name in _SERVED[duty]
        ]
        lives = {
            "prefill": self._prefilling,
            "decode": self._decoding,
            "control": self._controlling,
        }
        has_events = duty != "control" and self._limits_of_engine.has_events
        return RoleInstance(
            self.runtime,
            self._component(node).instance(self._ids.new(node)),
            duty,
            map(self.__dynbus_endpoint__, endpoints),
            partial(self._metadata_of, duty),
            self._events if has_events else None,
            lives[duty],
            lambda instance: self._ids.ended(instance.id),
        )

    def _metadata_of(self, duty: Duty) -> Mapping[str, str]:
        own = self._own_settings.metadata() if duty == "decode" else {}
        return {**self.instance_metadata(), **own}

    @asynccontextmanager
    async def _controlling(self, role: RoleInstance) -> AsyncGenerator[None]:
        """Have leases settled by this instance."""
        self._control = role.instance.name
        self._source = Source(
            self._running(),
            Leases.of(self._mover, self._settling),
            self.figures,
            events=HandOverEvents(self.runtime.bus, role.instance.name),
            instance=role.instance.id,
            lease=self.hand_over_limits.lease,
            model=self.served.fingerprint,
        )
        yield

    @asynccontextmanager
    async def _prefilling(self, role: RoleInstance) -> AsyncGenerator[None]:
        """Take jobs, where prompts go by the work queue."""
        control = self._control_client()
        taker = JobTaker(
            self._queue,
            lambda one, instance: with_options(control, instance=instance, timeout=None).offer(one),
            role.instance.id,
            self._has_jobs,
            self.served.fingerprint,
        )
        work = taker.start(self.runtime.background)
        role.retire = taker.retire
        try:
            yield
        finally:
            await work.end()

    def _has_jobs(self) -> bool:
        """True if prompts go by the work queue: a record says so, or a decode instance does."""
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
        runtime, runner, name = self.runtime, self._running(), role.instance.name
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
                runner,
                self._settings,
                own=self._ids,
                model=self.served.fingerprint,
            )
            routing = PrefillRouting(router, choice)
            client = runtime.client(
                type(self),
                node=prefill.component,
                namespace=prefill.namespace,
                routing=routing,
                wait=0.0,
            )
            limits, control = self.hand_over_limits, self._control_client()
            reader = LeasedPartReader(
                self._mover,
                runner.memory,
                lambda one, instance: with_options(control, instance=instance).settle(one),
                compares=self._checksums,
                patience=limits.settle,
            )
            origin = PrefillInstances(
                client, routing, reader, limits, self.figures, self.served.fingerprint
            )
            spans = TransferSpans(runtime.bus.telemetry, name)
            remote = RemotePrefill(
                choice,
                origin,
                spans,
                queue=self._queue,
                instance=self._control.instance_id,
                model=self.served.fingerprint,
            )
            sink = Sink(
                runner,
                runtime.background,
                spans,
                remote,
                events=HandOverEvents(runtime.bus, name),
                avoids=self.verification.avoids,
            )
            ended = asyncio.Event()
            try:
                self.sink = self._decodes = sink
                await self.register_model(
                    self._limits_of_engine,
                    self._target(name, "generate", ended),
                    self._target(name, "embed", ended),
                )
                yield
            finally:
                ended.set()
                if self._decodes is sink:
                    self.sink = self._decodes = None

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

    @handler(concurrency=None)
    async def settle(self, settlement: Settlement) -> Settled:
        """End a lease on this instance's blocks; the result says if it has held until now."""
        return await self._settling.settle(settlement)

    @handler(idempotent=True)
    async def role(self) -> RoleState:
        """The role that the instance serves."""
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
        if self.sink is None:
            # The decode role is given up.
            self.figures.computed_here("no_prefill")
        await super().serve_request(name, request, reply)

    @handler(concurrency=None)
    async def offer(self, offer: Offer) -> OfferAnswer:
        """A prefill instance has taken a job of this one: it ends when the prompt is handed over,
        or when nobody waits for it."""
        if self._decodes is None:
            return OfferAnswer(done=False, reason="this instance decodes no longer")
        return await self._decodes.offer(offer, is_own=offer.instance in self._ids)

    # Prefill --------------------------------------------------------------------------------

    @handler(concurrency=None, idle_timeout=LONGEST_PREFILL)
    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[Prefilled]:
        """Compute a prompt: the tokens that are done, with leases on their blocks, and its first
        token at last.

        It ends when all leases are settled; a caller that leaves it before has all freed at once.

        Raises:
            InvalidRequest: the caller computes another model.
        """
        assert self._source is not None
        items: Any = self._source.prefill(self._new_name(), request, context())
        async with aclosing(items):
            async for item in items:
                yield item
