"""`@service`: makes an actor of a plain class; and what it is declared with."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, ParamSpec, Protocol, Self, TypeVar, cast, overload

from dynbus import Actor, ConfigError, Runtime
from dynbus.compat.service_context import ServiceContext, current_context, make_context
from dynbus.spi import ClientDependency, ComponentName, InstanceName, brief_repr, suggestion

from .endpoints import ON_SHUTDOWN, ON_START, hooks, run_hook

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

DYNAMO_IMAGE: Final = os.environ.get("DYNAMO_IMAGE", "")
"""The container image for deployments, from the variable of this name; a run has no use for it."""

DEFAULT_NAMESPACE: Final = "default"

_DYNAMO_KEYS: Final = ("enabled", "namespace", "name")


class ServiceClass(Protocol[P, T_co]):
    """A class with the decorator `@service`, as type checkers see it.

    It is an `Actor` class: `dynbus run` finds it by `module:Name`.
    """

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...

    def link(self, other: S, /) -> S:
        """Keep the dependency on `other`, and of the others only those that are linked too."""
        ...

    def dynamo_address(self) -> tuple[str, str]:
        """The namespace and the component under which the service is called."""
        ...


@overload
def service(inner: Callable[P, T], /) -> ServiceClass[P, T]: ...
@overload
def service(
    *,
    dynamo: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    workers: int | None = None,
    image: str | None = None,
) -> Callable[[Callable[P, T]], ServiceClass[P, T]]: ...
def service(
    inner: Any = None,
    /,
    *,
    dynamo: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    workers: int | None = None,
    image: str | None = None,
) -> Any:
    """Make an actor class of a plain one, of the same module and name.

    Its methods with `@dynamo_endpoint` are called under `namespace.Name.method`. Without an
    endpoint, it is started and kept all the same. Its configuration may have keys that are no
    arguments of its constructor: `ServiceConfig` and `config` have them.

    Args:
        dynamo: `namespace`, "default" unless given; `name`, the class's own unless given; and
            `enabled`, True unless given. A service that is not enabled is constructed and started,
            and not announced.
        resources: what each instance needs: `cpu`, `memory` and `gpu`, as numbers or text.
        workers: the number of instances.
        image: for deployments in containers, which `dynbus run` does not make: it is not used.

    Raises:
        ConfigError: it is no class, is an actor already, or a value is not usable.
    """

    def decorate(inner: Any) -> Any:
        arguments = _dynamo_arguments(inner, dynamo)
        return _actor_of(inner, arguments | {"resources": resources, "workers": workers})

    return decorate if inner is None else decorate(inner)


def _dynamo_arguments(inner: Any, dynamo: Mapping[str, Any] | None) -> dict[str, Any]:
    """The class arguments that the mapping `dynamo` has.

    Raises:
        ConfigError: it is none, or has another key.
    """
    if not isinstance(inner, type):
        raise ConfigError(f"service() decorates a class, and {brief_repr(inner)} is none")
    if issubclass(inner, Actor):
        raise ConfigError(f"{inner.__name__} is an actor already, to which service() adds nothing")
    place = f"{inner.__name__}: dynamo"
    given: Any = {} if dynamo is None else dynamo
    if not isinstance(given, Mapping):
        raise ConfigError(f'{place} = {brief_repr(given)}: give a dict with "namespace"')
    known = cast("Mapping[str, Any]", given)
    for key in known:
        if key not in _DYNAMO_KEYS:
            raise ConfigError(
                f"{place} has no {key!r}{suggestion(key, _DYNAMO_KEYS)}: there are "
                f"{', '.join(_DYNAMO_KEYS)}"
            )

    return {
        "namespace": known.get("namespace", DEFAULT_NAMESPACE),
        "component": known.get("name"),
        "enabled": known.get("enabled", True),
        "extra_config": True,
    }


def _actor_of(inner: type[Any], arguments: dict[str, Any]) -> type[Service]:
    def body(namespace: dict[str, Any]) -> None:
        namespace |= {
            "__module__": inner.__module__,
            "__qualname__": inner.__qualname__,
            "__doc__": inner.__doc__,
            # Whatever the class calls by these names is its own: what runs are its hooks.
            "on_start": Service.on_start,
            "on_stop": Service.on_stop,
        }

    made: type[Service] = types.new_class(inner.__name__, (inner, Service), arguments, body)
    return made


class _Own:
    """An attribute of actors in whose place a service may keep something of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        return self if instance is None else getattr(super(Service, instance), self._name)


class Service(Actor, abstract=True):
    """The class that `@service` makes, beside the class itself."""

    __dynbus_needs_handler__ = False

    runtime: Any = _Own("runtime")
    instance_id: Any = _Own("instance_id")

    _dynamo_service_context: ServiceContext | None = None

    @classmethod
    def dynamo_address(cls) -> tuple[str, str]:
        """The namespace and the component under which the service is called.

        Raises:
            ConfigError: the service is not enabled, or the run has several nodes of it.
        """
        if not cls.__dynbus_service__.enabled:
            raise ConfigError(f"{cls.__name__} is not enabled, and so has no address")
        context = current_context()
        # A run may have it in another namespace.
        if context is not None:
            return context.runtime.runtime.address_of(cls)
        return ComponentName.of(cls.__dynbus_service__.namespace, cls.__dynbus_component__)

    @classmethod
    def __dynbus_construct__(
        cls, runtime: Runtime, name: InstanceName, arguments: Mapping[str, Any]
    ) -> Self:
        endpoints = [spec.name for spec in cls.__dynbus_handlers__.values()]
        # Its constructor may ask for it.
        context = make_context(name, runtime, endpoints)
        made = super().__dynbus_construct__(runtime, name, arguments)
        made._dynamo_service_context = context
        context.service = made
        return made

    async def on_start(self) -> None:
        """Run the hooks of the start."""
        for hook in hooks(type(self), ON_START):
            await run_hook(hook, self)

    async def on_stop(self) -> None:
        """Run the hooks of the shutdown: all of them, also after one that raised."""
        failures: list[Exception] = []
        for hook in hooks(type(self), ON_SHUTDOWN):
            try:
                await run_hook(hook, self)
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup(f"the shutdown of {type(self).__name__}", failures)


class ServiceDependency(ClientDependency[Any]):
    """The result of `depends`: in the body of a class as with `dynbus.depends`, and elsewhere in
    the code of a service a client."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or vars(self).get("name"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        context = current_context()
        if context is None:
            raise RuntimeError("depends() gives a client in a class, or in the code of a service")
        return getattr(context.runtime.runtime.client(self.actor), name)


@overload
def depends(on: Callable[..., T]) -> T: ...
@overload
def depends(on: str) -> Any: ...
def depends(on: Any) -> Any:
    """Declare that a service calls another: typed as that, a client at run time.

    Args:
        on: the service; one that is decorated later, as the plain class or by its name.

    Raises:
        ConfigError: it is none of these.
    """
    given = on
    if isinstance(given, type) and not issubclass(given, Actor):
        # What has this name by then is a service.
        given = f"{given.__module__}:{given.__qualname__}"
    return ServiceDependency(given, "", None, {})


__all__: Sequence[str] = (
    "DYNAMO_IMAGE",
    "Service",
    "ServiceClass",
    "ServiceDependency",
    "depends",
    "service",
)
