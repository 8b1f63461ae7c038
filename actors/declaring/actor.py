"""What a class says of itself that is served on the bus: its address, handlers and dependencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Generic, TypeVar

from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import ComponentName, check_token

from .handlers import SPEC, HandlerSpec
from .restart_policy import OnCrash
from .service_args import ServiceArgs

A = TypeVar("A", bound="DeclaredActor")

PUBLIC_ATTRIBUTES: Final = (
    "instance_id",
    "instance_metadata",
    "on_start",
    "on_stop",
    "report_broken",
    "runtime",
)
"""The names that `Actor` and its clients have for themselves."""


class DeclaredActor:
    """The part of `Actor` that is known without a bus; see there for the class arguments."""

    __dynbus_service__: ClassVar[ServiceArgs] = ServiceArgs()
    __dynbus_component__: ClassVar[str] = ""
    __dynbus_abstract__: ClassVar[bool] = True
    __dynbus_needs_handler__: ClassVar[bool] = True
    __dynbus_handlers__: ClassVar[dict[str, HandlerSpec]] = {}
    __dynbus_dependencies__: ClassVar[dict[str, Dependency[Any]]] = {}

    def __init_subclass__(
        cls,
        *,
        namespace: str | None = None,
        component: str | None = None,
        abstract: bool = False,
        workers: int | None = None,
        on_crash: OnCrash | None = None,
        resources: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        enabled: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        given = {
            "namespace": namespace,
            "workers": workers,
            "on_crash": on_crash,
            "resources": resources,
            "environment": environment,
            "enabled": enabled,
        }
        cls.__dynbus_service__ = cls.__dynbus_service__.overridden(
            {key: value for key, value in given.items() if value is not None},
            lambda key: f"{cls.__name__}: {key}",
        )
        cls.__dynbus_component__ = check_token("component", component or cls.__name__)
        cls.__dynbus_abstract__ = abstract
        cls.__dynbus_handlers__ = _collect_handlers(cls)
        cls.__dynbus_dependencies__ = {
            name: value
            for base in reversed(cls.__mro__)
            for name, value in vars(base).items()
            if isinstance(value, Dependency)
        }
        _check_hidden(cls)


class Dependency(Generic[A]):
    """That a class calls another one, as `depends` says in its body.

    Attributes:
        actor: the class that is called.
        node: the node that runs it; the class's component unless given.
    """

    def __init__(self, actor: type[A], node: str) -> None:
        given: Any = actor  # not everyone runs a type checker
        if not (isinstance(given, type) and issubclass(given, DeclaredActor)):
            raise ConfigError(f"depends({actor!r}): give an Actor class")
        self.actor = actor
        self.node = check_token("node", node) if node else actor.__dynbus_component__


def address_of(actor: type[DeclaredActor], *, node: str = "", namespace: str = "") -> ComponentName:
    """Where a class is on the bus.

    Args:
        node: the name of the node that runs it; the class's component unless given.
        namespace: where it runs; the class's own unless given.

    Raises:
        ConfigError: it has no namespace and none is given, or a name is not legal.
    """
    if not (namespace or actor.__dynbus_service__.namespace):
        raise ConfigError(f"{actor.__name__} has no namespace and so no address on the bus")
    return ComponentName(
        check_token("namespace", namespace) if namespace else actor.__dynbus_service__.namespace,
        check_token("node", node) if node else actor.__dynbus_component__,
    )


def check_startable(cls: type[DeclaredActor], *, namespace: str = "") -> None:
    """Check that a class can be started.

    Args:
        namespace: where it is to run; the class's own unless given.

    Raises:
        ConfigError: it is abstract, has no namespace, or no handler although it needs one, or an
            annotation of one cannot be used.
    """
    if cls.__dynbus_abstract__:
        raise ConfigError(f"{cls.__name__} is abstract: start a subclass of it")
    if not (namespace or cls.__dynbus_service__.namespace):
        raise ConfigError(
            f'{cls.__name__} has no namespace: write class {cls.__name__}(Actor, namespace="...")'
        )
    needs_handler = cls.__dynbus_needs_handler__ and cls.__dynbus_service__.enabled
    if needs_handler and not cls.__dynbus_handlers__:
        raise ConfigError(f"{cls.__name__} has no handler: mark a method with @handler")
    for spec in cls.__dynbus_handlers__.values():
        spec.check()


def _collect_handlers(cls: type[DeclaredActor]) -> dict[str, HandlerSpec]:
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


def _check_hidden(cls: type[DeclaredActor]) -> None:
    for name in (*cls.__dynbus_handlers__, *cls.__dynbus_dependencies__):
        if name in PUBLIC_ATTRIBUTES or name.startswith("_"):
            kind = "handler" if name in cls.__dynbus_handlers__ else "dependency"
            raise ConfigError(
                f"{cls.__name__}.{name}: a {kind} may not be called {name!r}; "
                f"names with _ and {', '.join(PUBLIC_ATTRIBUTES)} are taken"
            )
