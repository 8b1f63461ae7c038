"""`depends()`: how a class says that it calls another one."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar, Unpack, cast, overload

from dynbus.actors.declaring.actor import DeclaredActor, Dependency, Used
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import ComponentName

from .client_side import ClientSide
from .clients import typed_client
from .options import CallOptions, ClientOptions, client_options
from .routing import Routing

A = TypeVar("A", bound=DeclaredActor)
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


class _Instance(Protocol):
    """The runner of an object with dependencies."""

    @property
    def runtime(self) -> ClientSide: ...

    def address_of(self, dependency: Dependency[Any], /) -> ComponentName: ...


class _Started(Protocol):
    """An object with dependencies, once it runs."""

    @property
    def __dynbus_instance__(self) -> _Instance: ...


class ClientDependency(Dependency[A], Generic[A]):
    """The descriptor behind `depends()`."""

    def __init__(
        self, actor: type[A] | str, node: str, routing: Routing | None, options: ClientOptions
    ) -> None:
        super().__init__(actor, node)
        self.routing: Routing | None = routing
        self._options: CallOptions = client_options(options, f"depends({self})")

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> ClientDependency[A]: ...
    @overload
    def __get__(self, instance: _Started, owner: type[Any]) -> A: ...
    def __get__(self, instance: _Started | None, owner: type[Any]) -> ClientDependency[A] | A:
        if instance is None:
            return self
        served = instance.__dynbus_instance__
        address = served.address_of(self)
        client = typed_client(served.runtime, self.actor, address, self.routing, self._options)
        # From now on the instance's own attribute is found first.
        instance.__dict__[self.name] = client
        return client


class ClientMaker(Protocol[C_co]):
    """A dependency that is no actor: it makes a client of itself, and its text says what it is."""

    def client(self, runtime: Any, /) -> C_co:
        """A client for who runs in a `Runtime`, made at once: what takes time is begun."""
        ...


class UsedClient(Used, Generic[C]):
    """The descriptor behind `depends()` of what is no actor."""

    def __init__(self, maker: ClientMaker[C]) -> None:
        super().__init__(maker)
        self._maker = maker

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> UsedClient[C]: ...
    @overload
    def __get__(self, instance: _Started, owner: type[Any]) -> C: ...
    def __get__(self, instance: _Started | None, owner: type[Any]) -> UsedClient[C] | C:
        if instance is None:
            return self
        client = self._maker.client(instance.__dynbus_instance__.runtime)
        instance.__dict__[self.name] = client
        return client


@overload
def depends(actor: ClientMaker[C], /) -> C: ...
@overload
def depends(
    actor: type[A],
    *,
    node: str = "",
    routing: Routing | None = None,
    **options: Unpack[ClientOptions],
) -> A: ...
@overload
def depends(
    actor: str,
    *,
    node: str = "",
    routing: Routing | None = None,
    **options: Unpack[ClientOptions],
) -> Any: ...
def depends(
    actor: type[A] | str | ClientMaker[Any],
    *,
    node: str = "",
    routing: Routing | None = None,
    **options: Unpack[ClientOptions],
) -> Any:
    """Declare that a class calls `actor`: typed as the actor, a client at run time.

    What is no actor and makes a client of itself, such as `dynbus.llm.Model`, is depended on too.
    It has options of its own; `dynbus run` does not start it, and `link` does not leave it out.

    `dynbus run` starts the dependencies of what it starts. Deadline, cancellation, metadata
    and trace of the running call follow every call made through it.

    Args:
        actor: the class; or, where it is defined later, `"Name"` of one in the same module or
            `"module:Name"`. Such a name is looked up when a run is planned, or at the first use.
        node: which of the nodes that run the class is called; the one named as its component
            unless given.
        routing: the name of a policy, or a `Router`; round robin unless given.
        options: `timeout`, `wait`, `priority`, `retries`, `metadata`, `middleware` and
            `spill` of every call made through it, see `call_options`.

    Raises:
        ConfigError: `actor` is not an Actor class or the name of one, or `node` or an option is
            not usable.
    """
    if not isinstance(actor, str | type) and callable(getattr(actor, "client", None)):
        if node or routing is not None or options:
            raise ConfigError(f"depends({actor!r}, ...): give its options to {actor!r} itself")
        return UsedClient(actor)
    actor = cast("type[A] | str", actor)
    return ClientDependency(actor, node, routing, options)
