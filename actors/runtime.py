"""`Runtime`: one process on the bus, with the instances it runs and the clients it gives."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Generator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast, overload

from dynbus.bus.bus import Bus
from dynbus.bus.calling.caller import Caller
from dynbus.bus.cleanup import finish
from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig, load_config
from dynbus.bus.errors import ConfigError, Unavailable
from dynbus.bus.protocol.names import ComponentName, EndpointName, check_token
from dynbus.bus.records.discovery import Discovery
from dynbus.bus.transport import ConnectionState

from .calling.clients import EndpointClient, client_class
from .calling.options import ClientOptions, client_options
from .calling.routing import Routing, make_router
from .declaring.actor import Actor, address_of
from .declaring.arguments import parameters_of
from .declaring.brief_repr import brief_repr
from .serving.instance import ActorInstance, inside_on_stop, stop_all

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=Actor)


class Runtime:
    """One process on the bus. Use it as `async with Runtime.connect() as runtime`.

    A runtime that was awaited instead is closed by `close`, or by an `async with` of its own.

    When work of its own fails that goes on beside the calls (a lease that is renewed, events that
    are read), it is closed at once: every later call and the end of the `async with` raise
    `Unavailable`, which names the cause.

    Attributes:
        bus: the connections and their identity.
        broken: why instances that are to be replaced have ended, by their ids.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.caller = Caller(bus)
        self.discovery = Discovery(bus, self.caller.is_heard)
        self.instances: dict[str, ActorInstance] = {}
        self.broken: dict[str, str] = {}
        self._connected = asyncio.Event()
        self._connected.set()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        running = sum(i.server.load for i in self.instances.values())
        state = "closed" if self._closed else self.bus.data.state.value
        return f"<Runtime [{state} | {len(self.instances)} instances | calls: {running} served]>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await finish(self.close())
        if error is None:
            self.bus.check()

    @classmethod
    def connect(
        cls, url: str | None = None, *, name: str = "dynbus", **settings: Any
    ) -> Connecting:
        """Connect to the bus, with `async with` or `await`.

        Args:
            url: one or more NATS URLs with commas between; otherwise `NATS_URL`, otherwise
                `nats://127.0.0.1:4222`.
            name: how the connection shows in the server's lists.
            settings: fields of `BusConfig`.

        Raises:
            ConfigError: a setting is not usable.
            PermissionDenied: the server refuses the credentials.
            Unavailable: no server can be reached.
        """
        explicit = dict(settings)
        if url is not None:
            explicit["servers"] = url
        return Connecting(cls, explicit, name)

    @classmethod
    async def over(cls, bus: Bus) -> Runtime:
        """A runtime on connections that exist; closing it closes them."""
        runtime = cls(bus)
        bus.data.on_state(runtime._on_state)
        bus.on_failure(runtime._on_failure)
        await runtime.caller.start()
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
            node: which of the nodes that run the class is called; the one named as its component
                unless given.
            namespace: where it runs; the class's own unless given.
            routing: the name of a policy, or a `Router`; round robin unless given.
            options: `timeout`, `wait`, `priority`, `retries` and `metadata` of every call of
                the client, see `call_options`.

        Raises:
            ConfigError: it is no actor class, or one without a namespace, or a name, `routing`
                or an option is not usable.
        """
        address = _address(actor, node, namespace)
        own = client_options(options, f"client({actor.__name__})")
        self.discovery.begin()
        return cast(A, client_class(actor)(self, actor, address, make_router(routing), own))

    def namespace(self, name: str) -> Namespace:
        """Where untyped clients begin: `runtime.namespace(n).component(c).endpoint(e)`."""
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
            namespace, component = _address(namespace)
        elif not component:
            namespace, component = ComponentName.parse(namespace)
        self.discovery.begin()
        found = self.discovery.view.instances(namespace, component, monotonic())
        return [instance.id for instance in found]

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

    async def serve(self, instance: ActorInstance) -> ActorInstance:
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

    def _check_open(self) -> None:
        self.bus.check()
        if self._closing is not None:
            raise Unavailable("the runtime is closed", started=False)

    def forget(self, instance: ActorInstance) -> None:
        """An instance has stopped."""
        self.instances.pop(instance.id, None)

    async def stop(self, grace: float | None = None) -> None:
        """Stop every instance gracefully, all at once; starts in progress are cancelled."""
        await stop_all(self.instances.values(), grace)

    # Connection ----------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    async def wait_connected(self, timeout: float | None) -> None:
        """Wait until the bus can be reached.

        Raises:
            Unavailable: it cannot within `timeout` seconds, or the runtime is closed.
        """
        self.bus.check()
        if self._closed:
            raise Unavailable("the runtime is closed", started=False)
        limit = self.bus.config.connect_timeout
        try:
            async with asyncio.timeout(limit if timeout is None else min(timeout, limit)):
                await self._connected.wait()
        except TimeoutError:
            raise Unavailable("the bus cannot be reached", started=False) from None

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
            then.push_async_callback(self.discovery.close)
            then.push_async_callback(self.caller.close)
            await self.stop()
            self._closed = True

    def _on_failure(self) -> None:
        # Nobody can count on calls that go on without the work beside them.
        for instance in list(self.instances.values()):
            instance.stop_now()
        closing = self._begin_closing()
        # Told already: whoever does not wait for the end has nothing to retrieve.
        closing.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._connected.set()
        else:
            self._connected.clear()


class Connecting:
    """What `Runtime.connect` returns: to be awaited, or entered with `async with`."""

    def __init__(self, kind: type[Runtime], settings: dict[str, Any], name: str) -> None:
        self._kind = kind
        self._settings = settings
        self._name = name
        self._runtime: Runtime | None = None

    def __await__(self) -> Generator[Any, None, Runtime]:
        return self._open().__await__()

    async def __aenter__(self) -> Runtime:
        self._runtime = await self._open()
        return await self._runtime.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._runtime is not None:
            await self._runtime.__aexit__(kind, error, traceback)

    async def _open(self) -> Runtime:
        config: BusConfig = load_config(self._settings, unknown_variables="warn")
        bus = await Bus.connect(config, name=self._name)
        try:
            return await self._kind.over(bus)
        except BaseException:
            await finish(bus.close())
            raise


class Namespace:
    """A namespace of the bus."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self.name = name

    def component(self, name: str) -> Component:
        return Component(self._runtime, self.name, check_token("component", name))


class Component:
    """One kind of actor in a namespace."""

    def __init__(self, runtime: Runtime, namespace: str, name: str) -> None:
        self._runtime = runtime
        self.namespace = namespace
        self.name = name

    def endpoint(self, name: str) -> EndpointAddress:
        return EndpointAddress(self._runtime, EndpointName.of(self.namespace, self.name, name))


class EndpointAddress:
    """One endpoint of a component."""

    def __init__(self, runtime: Runtime, name: EndpointName) -> None:
        self._runtime = runtime
        self.name = name

    async def client(
        self, *, routing: Routing | None = None, **options: Unpack[ClientOptions]
    ) -> EndpointClient:
        """An untyped client, once the instances that exist now are known.

        Args:
            routing: the name of a policy, or a `Router`; round robin unless given.
            options: `timeout`, `wait`, `priority`, `retries` and `metadata` of every call of
                the client, see `call_options`.

        Raises:
            ConfigError: `routing` or an option is not usable.
            Unavailable: the instances cannot be read.
        """
        own = client_options(options, f"client of {self.name}")
        self._runtime.discovery.begin()
        await self._runtime.discovery.wait_synchronized(self._runtime.bus.config.connect_timeout)
        return EndpointClient(self._runtime, self.name, make_router(routing), own)


def _address(actor: Any, node: str = "", namespace: str = "") -> ComponentName:
    """Where an actor class is on the bus.

    Raises:
        ConfigError: it is none, or has no namespace and none is given, or a name is not legal.
    """
    if not (isinstance(actor, type) and issubclass(actor, Actor)):
        raise ConfigError(
            f"{brief_repr(actor)} is not an Actor class: give one; "
            "for a name use runtime.endpoint('n.c.e').client()"
        )
    return address_of(actor, node=node, namespace=namespace)
