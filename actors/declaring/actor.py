"""`Actor`: what a user subclasses, and `depends()`: how one actor calls another."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from dynbus.actors.calling.options import ClientOptions, client_options
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import ComponentName, InstanceName, check_token

from .handlers import SPEC, HandlerSpec
from .restart_policy import OnCrash, check_on_crash

if TYPE_CHECKING:
    from dynbus.actors.calling.routing import Routing
    from dynbus.actors.runtime import Runtime

A = TypeVar("A", bound="Actor")

PUBLIC_ATTRIBUTES: Final = (
    "instance_id",
    "instance_metadata",
    "on_start",
    "on_stop",
    "report_broken",
    "runtime",
)
"""The names that `Actor` and its clients have for themselves."""


class Actor:
    """A class whose `@handler` methods are served on the bus.

    Class arguments:
        namespace: the deployment or model that it belongs to; inherited when left out.
        component: its name on the bus, unless it runs as a node of another name; the class name
            unless given.
        abstract: True for a base class that is never started itself.
        on_crash: what `dynbus run` does when an instance ends by itself: `"restart"`, after a
            pause and for ever, or `"escalate"`, which ends the run; inherited when left out.

    Constructor arguments of a subclass are configuration: they can be set from YAML, the
    command line and the environment.
    """

    __dynbus_namespace__: ClassVar[str] = ""
    __dynbus_component__: ClassVar[str] = ""
    __dynbus_abstract__: ClassVar[bool] = True
    __dynbus_on_crash__: ClassVar[OnCrash] = "restart"
    __dynbus_handlers__: ClassVar[dict[str, HandlerSpec]] = {}
    __dynbus_dependencies__: ClassVar[dict[str, Dependency[Any]]] = {}

    _dynbus_runtime: Runtime | None = None
    _dynbus_name: InstanceName | None = None

    def __init_subclass__(
        cls,
        *,
        namespace: str | None = None,
        component: str | None = None,
        abstract: bool = False,
        on_crash: OnCrash | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        if namespace is not None:
            cls.__dynbus_namespace__ = check_token("namespace", namespace)
        cls.__dynbus_component__ = check_token("component", component or cls.__name__)
        cls.__dynbus_abstract__ = abstract
        if on_crash is not None:
            cls.__dynbus_on_crash__ = check_on_crash(on_crash, f"{cls.__name__}: on_crash")
        cls.__dynbus_handlers__ = _collect_handlers(cls)
        cls.__dynbus_dependencies__ = {
            name: value
            for base in reversed(cls.__mro__)
            for name, value in vars(base).items()
            if isinstance(value, Dependency)
        }
        _check_hidden(cls)

    @property
    def runtime(self) -> Runtime:
        """The runtime that this instance runs in.

        Raises:
            RuntimeError: before `on_start`.
        """
        if self._dynbus_runtime is None:
            raise RuntimeError(
                f"{type(self).__name__} is not started: the bus can be used from on_start on"
            )
        return self._dynbus_runtime

    @property
    def instance_id(self) -> str:
        """The id of this instance; empty before it is started."""
        return self._dynbus_name.instance_id if self._dynbus_name is not None else ""

    @property
    def __dynbus_name__(self) -> InstanceName:
        """Where the instance is on the bus.

        Raises:
            RuntimeError: before `on_start`.
        """
        if self._dynbus_name is None:
            raise RuntimeError(f"{type(self).__name__} is not started")
        return self._dynbus_name

    def __dynbus_bind__(self, runtime: Runtime, name: InstanceName) -> None:
        """Give the instance its place; `ActorInstance` does this before `on_start`."""
        self._dynbus_runtime = runtime
        self._dynbus_name = name

    def __dynbus_endpoint__(self, endpoint: Endpoint) -> Endpoint:
        """What serves a handler: the endpoint made of it, or another in its place."""
        return endpoint

    async def on_start(self) -> None:
        """Runs before the instance is announced; an exception here stops it."""

    def instance_metadata(self) -> Mapping[str, str]:
        """What the instance says of itself to whoever finds it, routers above all.

        Asked once, after `on_start` and before the instance is announced. At most 32 keys and
        4096 bytes; an exception here stops the instance.
        """
        return {}

    async def on_stop(self) -> None:
        """Runs after the drain, when no call is left."""

    def report_broken(self, reason: str) -> None:
        """Say that this instance cannot serve any longer, for example since its engine has died.

        It is withdrawn at once: calls go to other instances, those that are open here end with
        `Draining`, which is retryable, that of the handler which says so too, and `on_stop` runs.
        `dynbus run` starts the actor again as after a crash. In a program of your own the
        instance stays stopped, and its `broken` has the reason.

        To be called from any thread; more calls change nothing.

        Raises:
            RuntimeError: before `on_start`.
        """
        runtime = self.runtime
        instance = runtime.instances.get(self.instance_id)
        if instance is None:
            return
        if threading.get_ident() == runtime.bus.thread:
            instance.withdraw_broken(reason)
        else:
            runtime.bus.to_main(instance.withdraw_broken, reason)


class Dependency(Generic[A]):
    """The descriptor behind `depends()`.

    Attributes:
        actor: the class that is called.
        node: the node that runs it; the class's component unless given.
    """

    def __init__(
        self, actor: type[A], node: str, routing: Routing | None, options: ClientOptions
    ) -> None:
        given: Any = actor  # not everyone runs a type checker
        if not (isinstance(given, type) and issubclass(given, Actor)):
            raise ConfigError(f"depends({actor!r}): give an Actor class")
        self.actor = actor
        self.node = check_token("node", node) if node else actor.__dynbus_component__
        self.routing: Routing | None = routing
        client_options(options, f"depends({actor.__name__})")
        self._options = options
        self._name = ""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Dependency[A]: ...
    @overload
    def __get__(self, instance: Actor, owner: type[Any]) -> A: ...
    def __get__(self, instance: Actor | None, owner: type[Any]) -> Dependency[A] | A:
        if instance is None:
            return self
        client = instance.runtime.client(
            self.actor, node=self.node, routing=self.routing, **self._options
        )
        # From now on the instance's own attribute is found first.
        instance.__dict__[self._name] = client
        return client


def depends(
    actor: type[A],
    *,
    node: str = "",
    routing: Routing | None = None,
    **options: Unpack[ClientOptions],
) -> A:
    """Declare that a class calls `actor`: typed as the actor, a client at run time.

    `dynbus run` starts the dependencies of what it starts. Deadline, cancellation, metadata
    and trace of the running call follow every call made through it.

    Args:
        node: which of the nodes that run the class is called; the one named as its component
            unless given.
        routing: the name of a policy, or a `Router`; round robin unless given.
        options: `timeout`, `wait`, `priority`, `retries` and `metadata` of every call made
            through it, see `call_options`.

    Raises:
        ConfigError: `actor` is not an Actor class, or `node` or an option is not usable.
    """
    return cast(A, Dependency(actor, node, routing, options))


def address_of(actor: type[Actor], *, node: str = "", namespace: str = "") -> ComponentName:
    """Where a class is on the bus.

    Args:
        node: the name of the node that runs it; the class's component unless given.
        namespace: where it runs; the class's own unless given.

    Raises:
        ConfigError: it has no namespace and none is given, or a name is not legal.
    """
    if not (namespace or actor.__dynbus_namespace__):
        raise ConfigError(f"{actor.__name__} has no namespace and so no address on the bus")
    return ComponentName(
        check_token("namespace", namespace) if namespace else actor.__dynbus_namespace__,
        check_token("node", node) if node else actor.__dynbus_component__,
    )


def check_startable(cls: type[Actor], *, namespace: str = "") -> None:
    """Check that a class can be started.

    Args:
        namespace: where it is to run; the class's own unless given.

    Raises:
        ConfigError: it is abstract, has no namespace or no handler, or an annotation of one
            cannot be used.
    """
    if cls.__dynbus_abstract__:
        raise ConfigError(f"{cls.__name__} is abstract: start a subclass of it")
    if not (namespace or cls.__dynbus_namespace__):
        raise ConfigError(
            f'{cls.__name__} has no namespace: write class {cls.__name__}(Actor, namespace="...")'
        )
    if not cls.__dynbus_handlers__:
        raise ConfigError(f"{cls.__name__} has no handler: mark a method with @handler")
    for spec in cls.__dynbus_handlers__.values():
        spec.check()


def _collect_handlers(cls: type[Actor]) -> dict[str, HandlerSpec]:
    """Handlers by attribute, base classes first; an override without @handler is none."""
    found: dict[str, HandlerSpec] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            spec = getattr(value, SPEC, None)
            if isinstance(spec, HandlerSpec):
                found[attribute] = spec
            elif attribute in found:
                del found[attribute]
    by_name: dict[str, str] = {}
    for attribute, spec in found.items():
        if spec.name in by_name:
            raise ConfigError(
                f"{cls.__name__}: {by_name[spec.name]} and {attribute} are both endpoint "
                f"{spec.name!r}: give one of them another name"
            )
        by_name[spec.name] = attribute
    return found


def _check_hidden(cls: type[Actor]) -> None:
    for name in (*cls.__dynbus_handlers__, *cls.__dynbus_dependencies__):
        if name in PUBLIC_ATTRIBUTES or name.startswith("_"):
            kind = "handler" if name in cls.__dynbus_handlers__ else "dependency"
            raise ConfigError(
                f"{cls.__name__}.{name}: a {kind} may not be called {name!r}; "
                f"names with _ and {', '.join(PUBLIC_ATTRIBUTES)} are taken"
            )
