"""`depends()`: how a class says that it calls another one."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar, Unpack, cast, overload

from dynbus.actors.declaring.actor import DeclaredActor, Dependency, address_of

from .client_side import ClientSide
from .clients import typed_client
from .options import CallOptions, ClientOptions, client_options
from .routing import Routing

A = TypeVar("A", bound=DeclaredActor)


class _Started(Protocol):
    """An object with dependencies, once it runs."""

    @property
    def runtime(self) -> ClientSide: ...


class ClientDependency(Dependency[A], Generic[A]):
    """The descriptor behind `depends()`."""

    def __init__(
        self, actor: type[A], node: str, routing: Routing | None, options: ClientOptions
    ) -> None:
        super().__init__(actor, node)
        self.routing: Routing | None = routing
        self._options: CallOptions = client_options(options, f"depends({actor.__name__})")
        self._name = ""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> ClientDependency[A]: ...
    @overload
    def __get__(self, instance: _Started, owner: type[Any]) -> A: ...
    def __get__(self, instance: _Started | None, owner: type[Any]) -> ClientDependency[A] | A:
        if instance is None:
            return self
        side = instance.runtime
        address = address_of(self.actor, node=self.node)
        client = typed_client(side, self.actor, address, self.routing, self._options)
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
    return cast(A, ClientDependency(actor, node, routing, options))
