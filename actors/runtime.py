"""`Runtime`: one process on the bus; and `Actor`, whose instances it runs."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Self, TypeVar, Unpack, cast, overload

import anyio

from dynbus.bus.background import Background
from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig, load_config
from dynbus.bus.context import inside_instance
from dynbus.bus.errors import ConfigError, Unavailable
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import ComponentName, EndpointName, InstanceName, check_token

from .calling.broadcast import Broadcast
from .calling.client_side import ClientSide
from .calling.clients import EndpointAddress, Namespace, typed_client
from .calling.jobs import BusJob, JobId
from .calling.options import ClientOptions, client_options
from .calling.routing import Routing
from .declaring.actor import (
    DeclaredActor,
    Dependency,
    NotLinked,
    address_of,
    check_startable,
    full_name,
    kept_dependencies,
)
from .declaring.actor_config import (
    ActorConfig,
    ConfigAttribute,
    Constructed,
    constructed,
    constructing,
    publish_config,
)
from .declaring.arguments import build_arguments, parameters_of
from .declaring.brief_repr import brief_repr
from .declaring.durable import Durable, DurableWithoutRequest, JobHandle
from .declaring.handlers import HandlerSpec
from .declaring.json_object import decode_json
from .declaring.schedule import schedule_of
from .middleware.handlers import behind_middleware
from .middleware.passing import Kind, Middleware, checked_middleware
from .serving.endpoints import endpoints_of_functions, endpoints_of_object, make_endpoint
from .serving.instance import (
    InstanceState,
    ServedInstance,
    checked_metadata,
    inside_on_stop,
    new_instance_id,
    stop_all,
)
from .serving.job_runner import JobRunner
from .serving.schedule_runner import ScheduleRunner
from .serving.topic_runner import GroupMember, Listener, event_runner

logger = logging.getLogger(__name__)

FIRST_WAIT: Final = 0.1
MOST_WAIT: Final = 1.0
"""Seconds between two tries to reach a server that is waited for; each pause is twice the last."""

A = TypeVar("A", bound="Actor")
S = TypeVar("S", bound=ServedInstance)
T = TypeVar("T")


class Actor(DeclaredActor, abstract=True):
    """A class whose `@handler` methods are served on the bus.

    Class arguments:
        namespace: the deployment or model that it belongs to; inherited when left out.
        component: its name on the bus, unless it runs as a node of another name; the class name
            unless given.
        abstract: True for a base class that is never started itself.
        workers: the number of instances that `dynbus run` starts; inherited when left out.
        on_crash: what `dynbus run` does when an instance ends by itself: `"restart"`, after a
            pause and for ever, `"stop"`, which leaves it to the others, or `"escalate"`, which ends
            the run; inherited when left out.
        resources: what `dynbus run` gives the process of each instance: `cpu`, `memory`, `gpu` as
            numbers or text, for example `{"cpu": "500m", "memory": "20Gi", "gpu": 1}`. It goes over
            what is inherited, value by value.
        environment: environment variables of that process, set before the class is imported;
            `{index}` in a value is the index of the instance. It goes over what is inherited.
        enabled: False for a class whose instances are constructed and started, and not announced:
            nobody finds or calls them, and it needs no handler; inherited when left out.
        extra_config: True for a class that takes keys which are no arguments of its constructor, or
            their prefixes, such as `("lib_",)`: `config` has their values; inherited when left out.
        publishes: the topics that its methods publish, beside what is inherited: with a user of its
            own it may publish these alone (`dynbus auth`).

    Constructor arguments of a subclass are configuration: they can be set from YAML, the
    command line and the environment.

    Attributes:
        middleware: what is done around its handlers, the first outermost; of the class, or set in
            the constructor. A subclass that has some too writes `(*Base.middleware, Own())`.
        config: what the instance was configured with, extra keys too, from the first line of the
            constructor on: `get(key, default)`, `require(key)`, `as_args(prefix="lib_")`.
    """

    middleware: Sequence[Middleware] = ()
    config: Any = ConfigAttribute()

    _dynbus_instance: ActorInstance | None = None
    _dynbus_config: ActorConfig | None = None

    @property
    def runtime(self) -> Runtime:
        """The runtime that this instance runs in.

        Raises:
            RuntimeError: before `on_start`.
        """
        return self.__dynbus_instance__.runtime

    @property
    def instance_id(self) -> str:
        """The id of this instance; empty before it is started."""
        return self._dynbus_instance.id if self._dynbus_instance is not None else ""

    @property
    def broadcast(self) -> Broadcast[Self]:
        """Calls of all instances, at clients alone.

        `await client.broadcast.reload(request)`, or `client.broadcast(Desk.reload, request)` for
        type checkers, gives a dict of what each instance of the class answered, by its id: the
        result, or the `DynbusError` with which its call ended. See `Broadcast`.

        Raises:
            AttributeError: this is the actor itself.
        """
        name = type(self).__name__
        raise AttributeError(
            f"{name}.broadcast is of clients: runtime.client({name}).broadcast calls all instances"
        )

    @property
    def worker_index(self) -> int:
        """The number of this instance among those of its node in `dynbus run`, from 0; also in the
        constructor. The one that replaces an instance has the same. 0 in a program of your own."""
        if self._dynbus_instance is not None:
            return self._dynbus_instance.worker_index
        made = constructed(self)
        return made.worker_index if made is not None else 0

    @property
    def __dynbus_instance__(self) -> ActorInstance:
        if self._dynbus_instance is None:
            raise RuntimeError(
                f"{type(self).__name__} is not started: the bus can be used from on_start on"
            )
        return self._dynbus_instance

    @property
    def __dynbus_name__(self) -> InstanceName:
        """The name of this instance on the bus.

        Raises:
            RuntimeError: before `on_start`.
        """
        return self.__dynbus_instance__.name

    @classmethod
    def __dynbus_construct__(
        cls, runtime: Runtime, name: InstanceName, arguments: Mapping[str, Any]
    ) -> Self:
        """Make the object of the instance `name`, which will be served by `runtime`."""
        return cls(**arguments)

    def __dynbus_endpoint__(self, endpoint: Endpoint) -> Endpoint:
        """The server of a handler: the endpoint made of it, or another in its place."""
        return endpoint

    async def __dynbus_drain__(self, grace: float) -> None:
        """Let calls finish within `grace` seconds that come by other names than the instance's;
        only for an instance that is not announced itself."""

    async def on_start(self) -> None:
        """Runs before the instance is announced; an exception here stops it."""

    def instance_metadata(self) -> Mapping[str, str]:
        """The metadata of the instance for clients that find it, routers above all.

        Asked after `on_start` and before the instance is announced, and again by the instance's
        `renew_metadata`. At most 32 keys and 4096 bytes; an exception at the start stops the
        instance.
        """
        return {}

    async def on_stop(self) -> None:
        """Runs after the drain, when no call is left; in the task in which `on_start` ran."""

    def report_broken(self, reason: str, *, hung: bool = False) -> None:
        """Say that this instance cannot serve any longer, for example since its engine has died.

        It is withdrawn at once: calls go to other instances, those that are open here end with
        `Draining`, which is retryable, that of the handler which says so too, and `on_stop` runs.
        `dynbus run` starts the actor again as after a crash. In a program of your own the
        instance stays stopped, and its `broken` has the reason.

        To be called from any thread; more calls change nothing.

        Args:
            hung: what it serves with does not go on. It counts as a hang (`dynbus.hangs`), and a
                process of `dynbus run` ends soon, whatever still runs in it, also where its main
                loop is blocked.

        Raises:
            RuntimeError: before `on_start`.
        """
        self.__dynbus_instance__.report_broken(reason, hung=hung)


class ActorInstance(ServedInstance):
    """A started actor. Made by `Runtime.start`; `stop` ends it gracefully.

    Args:
        instance_id: a random one unless given.
        id_is_random: nobody else can have the given id, so nobody is asked for it.
        node: the name under which it is called; the class's component unless given.
        namespace: where it runs; the class's own unless given.
        enabled: whether it is announced; as its class says unless given.
        worker_index: which of the instances of its node it is, from 0.

    Attributes:
        actor: the user's object.
        runtime: in which it runs.
        schedules: what submits the firings of its scheduled handlers.
    """

    def __init__(
        self,
        runtime: Runtime,
        actor: type[Actor],
        arguments: dict[str, Any],
        instance_id: str,
        *,
        id_is_random: bool = False,
        node: str = "",
        namespace: str = "",
        enabled: bool | None = None,
        worker_index: int = 0,
    ) -> None:
        check_startable(actor, namespace=namespace)
        self.runtime = runtime
        self.worker_index = worker_index
        name = address_of(actor, node=node, namespace=namespace).instance(
            instance_id or new_instance_id()
        )
        built = build_arguments(actor, arguments)
        config = ActorConfig(
            node or actor.__name__, {key: built.get(key, arguments[key]) for key in arguments}
        )
        publish_config(config, actor.__name__, name.component)
        with inside_instance(name), constructing(Constructed(actor, config, worker_index)):
            self.actor = actor.__dynbus_construct__(runtime, name, built)
            self.actor._dynbus_config = config  # pyright: ignore[reportPrivateUsage]
            made = endpoints_of_object(self.actor, actor.__dynbus_handlers__)
            passing = self._passing = _Passing(self.actor, name)
            endpoints = [passing.behind(self.actor.__dynbus_endpoint__(one)) for one in made]
        runners = _job_runners(runtime.bus, name, actor, endpoints)
        self.schedules = _schedules(runtime.bus, name, actor)
        super().__init__(
            runtime.bus,
            runtime.background,
            name,
            [
                *(one for one in endpoints if one.name not in runners),
                *(each.endpoint for each in runners.values()),
            ],
            self.actor,
            id_was_given=bool(instance_id) and not id_is_random,
            announced=actor.__dynbus_service__.enabled if enabled is None else enabled,
            drain=self.actor.__dynbus_drain__,
            has_other=runtime.has_other,
            beside=[
                *runners.values(),
                *self.schedules,
                *_event_runners(runtime.bus, name, self.actor, passing),
            ],
            ended=runtime.forget,
        )
        self.actor._dynbus_instance = self  # pyright: ignore[reportPrivateUsage]
        for used in actor.__dynbus_uses__:
            # What it takes to use it is begun now, not by the first call.
            getattr(self.actor, used)

    def address_of(self, dependency: Dependency[Any], /) -> ComponentName:
        """The address of a dependency of this instance on the bus.

        Raises:
            NotLinked: the links of the class leave it out.
            ConfigError: its class does not exist, or its node.
        """
        actor, name = type(self.actor), dependency.name
        if name in actor.__dynbus_dependencies__.keys() - kept_dependencies(actor).keys():
            raise NotLinked(actor, name)
        called = dependency.actor
        # Where nothing says where a class is, it is beside this instance.
        own = "" if called.__dynbus_service__.namespace else self.name.namespace
        address = self.runtime.find_in_run(called, dependency.node)
        return address or address_of(called, node=dependency.node, namespace=own)

    async def add_endpoints(self, functions: Mapping[str, Any]) -> None:
        """Serve functions beside the actor's handlers, and behind its middleware, from its start on
        or while it runs.

        Args:
            functions: see `Runtime.serve_endpoints`.

        Raises:
            ConfigError: one of them, or its name, is not usable.
            RuntimeError: it neither starts nor runs.
            Unavailable: the bus does not answer.
        """
        made = endpoints_of_functions(functions)
        await self.serve_also([self._passing.behind(one) for one in made])


def _job_runners(
    bus: Bus, name: InstanceName, actor: type[Actor], endpoints: Sequence[Endpoint]
) -> dict[str, JobRunner]:
    """The runners of the jobs of an instance's durable handlers, by their names."""
    durable = {
        spec.name: spec.durable
        for spec in actor.__dynbus_handlers__.values()
        if spec.durable is not None
    }
    return {
        endpoint.name: JobRunner(bus, name, endpoint, durable[endpoint.name])
        for endpoint in endpoints
        if endpoint.name in durable
    }


def _schedules(bus: Bus, name: InstanceName, actor: type[Actor]) -> list[ScheduleRunner]:
    """The runners that submit the firings of an instance's scheduled handlers.

    Raises:
        ConfigError: one that has a schedule cannot run by itself.
    """
    return [
        ScheduleRunner(bus, EndpointName(name.namespace, name.component, spec.name), spec, schedule)
        for spec in actor.__dynbus_handlers__.values()
        if (schedule := schedule_of(spec)) is not None
    ]


def _event_runners(
    bus: Bus, name: InstanceName, actor: Actor, passing: _Passing
) -> list[GroupMember | Listener]:
    """The objects that run the methods of an instance that hear topics."""
    runners: list[GroupMember | Listener] = []
    for attribute, one in type(actor).__dynbus_subscriptions__.items():
        endpoint = make_endpoint(getattr(actor, attribute), one.spec)
        runners.append(event_runner(bus, name, passing.behind(endpoint, "event"), one))
    return runners


class _Passing:
    """The middleware of an actor, as what it runs passes it."""

    def __init__(self, actor: Actor, name: InstanceName) -> None:
        kind = type(actor)
        self._middleware = checked_middleware(actor.middleware, f"{kind.__name__}.middleware")
        self._component = ComponentName(name.namespace, name.component)
        self._specs = {spec.name: spec for spec in kind.__dynbus_handlers__.values()}

    def behind(self, endpoint: Endpoint, kind: Kind | None = None) -> Endpoint:
        """An endpoint behind the middleware.

        Args:
            kind: of what runs it; a handler says it itself.
        """
        if kind is None:
            spec = self._specs.get(endpoint.name)
            is_durable = spec is not None and spec.durable is not None
            kind = "job" if is_durable else _kind_of(endpoint)
        return behind_middleware(endpoint, self._middleware, self._component, kind)


def _kind_of(endpoint: Endpoint) -> Kind:
    return "stream" if endpoint.streaming else "unary"


class _Endpoints:
    """The object behind endpoints that are served without a class."""

    def __init__(self, metadata: Any) -> None:
        if not isinstance(metadata, Mapping):
            raise ConfigError(f"metadata = {brief_repr(metadata)}: give a dict of strings")
        self._metadata = checked_metadata(cast("Mapping[object, object]", metadata), "metadata")

    async def on_start(self) -> None:
        """There is nothing to start."""

    def instance_metadata(self) -> Mapping[str, str]:
        return self._metadata

    async def on_stop(self) -> None:
        """There is nothing to stop."""


class Runtime(ClientSide):
    """One process on the bus. Use it as `async with Runtime.connect() as runtime`.

    A runtime that was awaited instead is closed by `close`, or by an `async with` of its own.

    When work of its own fails that goes on beside the calls (a lease that is renewed, events that
    are read), it is closed at once: every later call and the end of the `async with` raise
    `Unavailable`, which names the cause.

    Attributes:
        bus: the connections and their identity.
        broken: why instances that are to be replaced have ended, by their ids.
        run_addresses: where the nodes are of the run that this process belongs to, by the
            `module:Name` of their class; empty outside of one.
    """

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.instances: dict[str, ServedInstance] = {}
        self.broken: dict[str, str] = {}
        self.run_addresses: Mapping[str, Sequence[ComponentName]] = {}
        self.background = Background("the runtime", bus.fail)
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        running = sum(i.server.execution.load for i in self.instances.values())
        state = "closed" if self._closed else self.bus.data.state.value
        return f"<Runtime [{state} | {len(self.instances)} instances | calls: {running} served]>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()
        if error is None:
            self.bus.check()

    @classmethod
    def connect(
        cls,
        url: str | None = None,
        *,
        name: str = "dynbus",
        wait: float = 0.0,
        **settings: Any,
    ) -> Connecting:
        """Connect to the bus, with `async with` or `await`.

        Args:
            url: one or more NATS URLs with commas between; otherwise `NATS_URL`, otherwise
                `nats://127.0.0.1:4222`.
            name: how the connection shows in the server's lists.
            wait: seconds for which a server that cannot be reached is tried again.
            settings: fields of `BusConfig`.

        Raises:
            ConfigError: a setting is not usable.
            PermissionDenied: the server refuses the credentials.
            Unavailable: no server can be reached.
        """
        if not 0 <= wait < math.inf:
            raise ConfigError(f"wait = {wait} is not usable: give 0 or more seconds")
        explicit = dict(settings)
        if url is not None:
            explicit["servers"] = url
        return Connecting(cls, explicit, name, wait)

    @classmethod
    async def over(cls, bus: Bus) -> Runtime:
        """A runtime on connections that exist; closing it closes them."""
        runtime = cls(bus)
        bus.on_failure(runtime._on_failure)
        await runtime.background.open()
        try:
            await runtime.begin_calling()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await runtime.background.close()
            raise
        return runtime

    # Clients -------------------------------------------------------------------------------

    def client(
        self,
        actor: type[A],
        *,
        node: str = "",
        namespace: str = "",
        routing: Routing | None = None,
        **options: Unpack[ClientOptions],
    ) -> A:
        """A client with the methods of `actor`'s handlers, typed as the actor.

        Args:
            node: which of the nodes that run the class is called, see `address_of`.
            namespace: where it runs, see `address_of`.
            routing: the name of a policy, or a `Router`; round robin unless given.
            options: `timeout`, `wait`, `priority`, `retries`, `metadata`, `middleware` and
                `spill` of every call of the client, see `call_options`.

        Raises:
            ConfigError: as of `address_of`, or `routing` or an option is not usable.
        """
        address = self.address_of(actor, node=node, namespace=namespace)
        own = client_options(options, f"client({actor.__name__})")
        return typed_client(self, actor, address, routing, own)

    def address_of(
        self, actor: type[Actor], *, node: str = "", namespace: str = ""
    ) -> ComponentName:
        """The address of an actor class on the bus, as this process calls it.

        Args:
            node: which of the nodes that run the class. Unless given, in an actor of `dynbus run`
                the only node of the class in the run, otherwise the one named as its component.
            namespace: where it runs. Unless given, in an actor of `dynbus run` where the nodes of
                the class are in the run, otherwise the class's own.

        Raises:
            ConfigError: it is no actor class, or one without a namespace, or a name is not legal,
                or the run has several nodes of the class, and none that is named as its component.
        """
        given: Any = actor
        if not (isinstance(given, type) and issubclass(given, Actor)):
            raise ConfigError(
                f"{brief_repr(actor)} is not an Actor class: give one; "
                "for a name use runtime.endpoint('n.c.e').client()"
            )
        address = None if namespace else self.find_in_run(actor, node)
        return address or address_of(actor, node=node, namespace=namespace)

    def find_in_run(self, actor: type[DeclaredActor], node: str) -> ComponentName | None:
        """The address of a node of a class in the run of this process; None where that has no such
        class, or its nodes are in several namespaces and none has the name.

        Raises:
            ConfigError: no `node` is given, and several are there that the class does not name.
        """
        there = self.run_addresses.get(full_name(actor), ())
        if not there or (len(there) == 1 and not node):
            return there[0] if there else None
        named = [each for each in there if each.component == (node or actor.__dynbus_component__)]
        if named:
            return named[0]
        if not node:
            raise ConfigError(
                f"this run has several nodes of {actor.__name__}: choose one by node="
                f"{' or '.join(repr(each.component) for each in there)}"
            )
        namespaces = {each.namespace for each in there}
        check_token("node", node)
        return ComponentName(namespaces.pop(), node) if len(namespaces) == 1 else None

    @overload
    def job(self, job_id: str, /) -> JobHandle[Any]: ...
    @overload
    def job(
        self, job_id: str, /, handler: Durable[Any, T] | DurableWithoutRequest[T]
    ) -> JobHandle[T]: ...

    def job(self, job_id: str, /, handler: Any = None) -> JobHandle[Any]:
        """A job that was submitted, in this process or another.

        Args:
            job_id: as its handle has it.
            handler: whose job it is, such as `Desk.summarise`, for a result of its type; without
                it the result is JSON as it is read.

        Raises:
            ConfigError: it is no job's id, or `handler` is no durable handler.
        """
        known = JobId(job_id)
        endpoint, _ = known.split_name()
        spec = None if handler is None else HandlerSpec.of(handler)
        if handler is not None and (spec is None or spec.durable is None):
            raise ConfigError(f"{brief_repr(handler)} is no durable handler: give Actor.method")
        decode = decode_json if spec is None else spec.result_codec.decode
        options = None if spec is None else spec.durable
        return BusJob(self.jobs_of(endpoint, options), known, decode)

    def namespace(self, name: str) -> Namespace:
        """The beginning of untyped clients: `runtime.namespace(n).component(c).endpoint(e)`."""
        return Namespace(self, check_token("namespace", name))

    def endpoint(self, name: str | EndpointName) -> EndpointAddress:
        """The endpoint of a dotted name.

        Raises:
            ConfigError: it is not namespace.component.endpoint.
        """
        return EndpointAddress(self, EndpointName.parse(str(name)))

    @overload
    def instance_ids(self, component: str | type[Actor], /) -> list[str]: ...
    @overload
    def instance_ids(self, namespace: str, component: str) -> list[str]: ...

    def instance_ids(self, namespace: str | type[Actor], component: str = "") -> list[str]:
        """The ids of a component's instances that are known now.

        Takes an actor class, `"demo.Shouter"`, or namespace and component apart.

        Raises:
            ConfigError: that is no component.
        """
        if not isinstance(namespace, str):
            return self.known_ids(self.address_of(namespace))
        if component:
            return self.known_ids(ComponentName(namespace, component))
        return self.known_ids(ComponentName.parse(namespace))

    # Instances -----------------------------------------------------------------------------

    async def start(
        self,
        actor: type[Actor],
        /,
        *,
        instance_id: str = "",
        node: str = "",
        namespace: str = "",
        **arguments: Any,
    ) -> ActorInstance:
        """Serve an actor in this process.

        A constructor that has a parameter `node` or `namespace` itself is given it; for such a
        class make an `ActorInstance` for `serve`.

        Args:
            instance_id: a name of your own instead of a random one.
            node: the name under which it is called; the class's component unless given.
            namespace: where it runs; the class's own unless given.
            arguments: the constructor's.

        Raises:
            ConfigError: the class, a name or an argument is not usable, or the id is taken.
            Unavailable: the runtime is closed, before or while the actor starts.
            Exception: what `on_start` raised.
        """
        self._check_open()
        if instance_id:
            check_token("instance_id", instance_id)
        if node and "node" in parameters_of(actor):
            arguments["node"], node = node, ""
        if namespace and "namespace" in parameters_of(actor):
            arguments["namespace"], namespace = namespace, ""
        instance = ActorInstance(
            self, actor, arguments, instance_id, node=node, namespace=namespace
        )
        return await self.serve(instance)

    async def serve(self, instance: S) -> S:
        """Start an instance that was made for this runtime.

        Raises:
            ConfigError, Unavailable, Exception: as of `start`.
        """
        self._check_open()
        if instance.id in self.instances:
            raise ConfigError(f"instance id {instance.id!r} is in use in this process")
        self.instances[instance.id] = instance
        try:
            await instance.start()
        except BaseException:
            self.instances.pop(instance.id, None)
            raise
        return instance

    @asynccontextmanager
    async def serve_endpoints(
        self,
        namespace: str,
        component: str,
        endpoints: Mapping[str, Any],
        *,
        metadata: Mapping[str, str] | None = None,
        middleware: Sequence[Middleware] = (),
        instance_id: str = "",
        grace: float | None = None,
    ) -> AsyncGenerator[ServedInstance]:
        """Serve functions as an instance of a component, without an actor class.

        It is announced when the block is entered. At its end it is drained: it is found no more,
        and its calls have `grace` seconds to finish.

        Args:
            endpoints: typed `async def` functions by the names of their endpoints, or methods
                that are bound to an object. They take a request and `context` and are annotated
                like handlers; `@handler(...)` gives them options.
            metadata: what the instance says of itself, see `Actor.instance_metadata`.
            middleware: what is done around their calls, the first outermost.
            instance_id: a name of your own instead of a random one.
            grace: seconds; None for the configured ones.

        Yields:
            The instance, whose `report_broken` withdraws it, and whose `stopped` tells that it has
            ended.

        Raises:
            ConfigError: a name, a function, a middleware or the metadata is not usable, or the id
                is taken.
            Unavailable: the runtime is closed.
        """
        self._check_open()
        if instance_id:
            check_token("instance_id", instance_id)
        address = ComponentName.of(namespace, component)
        around = checked_middleware(middleware, "serve_endpoints(middleware=...)")
        instance = ServedInstance(
            self.bus,
            self.background,
            address.instance(instance_id or new_instance_id()),
            [
                behind_middleware(one, around, address, _kind_of(one))
                for one in endpoints_of_functions(endpoints)
            ],
            _Endpoints({} if metadata is None else metadata),
            id_was_given=bool(instance_id),
            has_other=self.has_other,
            ended=self.forget,
        )
        await self.serve(instance)
        try:
            yield instance
        finally:
            with anyio.CancelScope(shield=True):
                await instance.stop(grace)

    def _check_open(self) -> None:
        self.bus.check()
        if self._closing is not None:
            raise Unavailable("the runtime is closed", started=False)

    def forget(self, instance: ServedInstance) -> None:
        """An instance has stopped."""
        self.instances.pop(instance.id, None)

    def has_other(self, endpoint: EndpointName, besides: str) -> bool:
        """True if an instance of an endpoint is known that takes calls.

        Args:
            besides: the id of one that does not count.
        """
        leaving = {
            one.id for one in self.instances.values() if one.state is not InstanceState.READY
        }
        return any(
            endpoint.endpoint in one.record.endpoints
            for one in self.known_instances(endpoint.component_name)
            if one.id != besides and one.id not in leaving
        )

    async def stop(self, grace: float | None = None) -> None:
        """Stop every instance gracefully, all at once; starts in progress are cancelled."""
        await stop_all(self.instances.values(), grace)

    # Connection ----------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop every instance, end every call, and leave the bus; more calls change nothing.

        From within an `on_stop` it only begins that and returns at once, since it ends after
        the `on_stop`. Cancelling the caller does not undo it.
        """
        closing = self._begin_closing()
        if not inside_on_stop.get():
            await asyncio.shield(closing)

    def _begin_closing(self) -> asyncio.Task[None]:
        if self._closing is None:
            # The work is not part of the `on_stop` that may have asked for it.
            outside = contextvars.copy_context()
            outside.run(inside_on_stop.set, False)
            loop = asyncio.get_running_loop()
            self._closing = loop.create_task(self._close(), context=outside)
        return self._closing

    async def _close(self) -> None:
        async with AsyncExitStack() as then:
            then.push_async_callback(self.bus.close)
            then.push_async_callback(self.background.close)
            then.push_async_callback(self.end_calling)
            await self.stop()

    def _on_failure(self) -> None:
        # Nobody can count on calls that go on without the work beside them.
        for instance in list(self.instances.values()):
            instance.stop_now()
        closing = self._begin_closing()
        # Told already: a caller that does not wait for the end has nothing to retrieve.
        closing.add_done_callback(lambda task: task.cancelled() or task.exception())


class Connecting:
    """The result of `Runtime.connect`: to be awaited, or entered with `async with`."""

    def __init__(
        self, kind: type[Runtime], settings: dict[str, Any], name: str, wait: float = 0.0
    ) -> None:
        self._kind = kind
        self._settings = settings
        self._name = name
        self._wait = wait
        self._runtime: Runtime | None = None

    def __await__(self) -> Generator[Any, None, Runtime]:
        return self._open().__await__()

    async def __aenter__(self) -> Runtime:
        self._runtime = await self._open()
        return await self._runtime.__aenter__()

    async def __aexit__(self, *raised: Any) -> None:
        if self._runtime is not None:
            await self._runtime.__aexit__(*raised)

    async def _open(self) -> Runtime:
        config: BusConfig = load_config(self._settings, unknown_variables="warn")
        bus = await self._connect(config)
        try:
            return await self._kind.over(bus)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await bus.close()
            raise

    async def _connect(self, config: BusConfig) -> Bus:
        until = monotonic() + self._wait
        pause = FIRST_WAIT
        while True:
            try:
                return await Bus.connect(config, name=self._name)
            except Unavailable:
                left = until - monotonic()
                if left <= 0:
                    raise
                await anyio.sleep(min(pause, left))
            pause = min(2 * pause, MOST_WAIT)
