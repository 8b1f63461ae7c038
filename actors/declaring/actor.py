"""The base class of actors: address, handlers and dependencies of a class that is served on the
bus.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar, cast

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError, describe_exception
from dynbus.bus.identity.grants import Grant
from dynbus.bus.protocol.names import ComponentName, EndpointName, check_token
from dynbus.bus.topics import TopicConfig
from dynbus.bus.work_queue import WorkQueueConfig

from .handlers import HandlerSpec
from .restart_policy import OnCrash
from .service_args import ServiceArgs

A = TypeVar("A", bound="DeclaredActor")
L = TypeVar("L", bound="DeclaredActor")

SUBSCRIPTION: Final = "__dynbus_subscription__"

PUBLIC_ATTRIBUTES: Final = (
    "broadcast",
    "instance_id",
    "instance_metadata",
    "link",
    "middleware",
    "on_start",
    "on_stop",
    "report_broken",
    "runtime",
    "worker_index",
)
"""The names that `Actor` and its clients have for themselves."""


class TopicOfEvents(Protocol):
    """A topic, as its subscriptions know it."""

    @property
    def name(self) -> str: ...
    def config(self, namespace: str = "") -> TopicConfig: ...
    def misfit(self, kept: str) -> str: ...
    def check_method(self, spec: HandlerSpec) -> None: ...


class Subscription(NamedTuple):
    """A method that hears a topic; see `subscribe`.

    Attributes:
        spec: how the method is called.
        group: empty where every instance hears each event.
        options: how the events of a group are handed out, and tried again.
        start: where a group begins.
    """

    spec: HandlerSpec
    topic: TopicOfEvents
    group: str
    options: WorkQueueConfig
    start: str | datetime


def subscription_of(function: Any) -> Subscription | None:
    """The subscription that a method is; None for any other."""
    return getattr(function, SUBSCRIPTION, None)


def mark(function: Callable[..., Any], subscription: Subscription) -> None:
    """Make a method a subscription."""
    setattr(function, SUBSCRIPTION, subscription)


class DeclaredActor:
    """The part of `Actor` that is known without a bus; see there for the class arguments."""

    __dynbus_service__: ClassVar[ServiceArgs] = ServiceArgs()
    __dynbus_extra_config__: ClassVar[tuple[str, ...]] = ()
    __dynbus_component__: ClassVar[str] = ""
    __dynbus_abstract__: ClassVar[bool] = True
    __dynbus_needs_handler__: ClassVar[bool] = True
    __dynbus_handlers__: ClassVar[dict[str, HandlerSpec]] = {}
    __dynbus_subscriptions__: ClassVar[dict[str, Subscription]] = {}
    __dynbus_publishes__: ClassVar[tuple[TopicOfEvents, ...]] = ()
    __dynbus_dependencies__: ClassVar[dict[str, Dependency[Any]]] = {}
    __dynbus_uses__: ClassVar[dict[str, Used]] = {}
    __dynbus_links__: ClassVar[frozenset[str]] = frozenset()
    __dynbus_calls_all__: ClassVar[bool] = False

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
        extra_config: bool | str | Sequence[str] | None = None,
        publishes: Sequence[TopicOfEvents] = (),
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
        if extra_config is not None:
            cls.__dynbus_extra_config__ = _prefixes(extra_config, f"{cls.__name__}: extra_config")
        cls.__dynbus_component__ = check_token("component", component or cls.__name__)
        cls.__dynbus_abstract__ = abstract
        cls.__dynbus_handlers__ = _collect_handlers(cls)
        cls.__dynbus_subscriptions__ = _collect_subscriptions(cls)
        inherited = (topic for base in cls.__mro__[1:] for topic in _published_by(base))
        cls.__dynbus_publishes__ = tuple(dict.fromkeys((*publishes, *inherited)))
        cls.__dynbus_dependencies__ = {
            name: value
            for base in reversed(cls.__mro__)
            for name, value in vars(base).items()
            if isinstance(value, Dependency)
        }
        cls.__dynbus_uses__ = {
            name: value
            for base in reversed(cls.__mro__)
            for name, value in vars(base).items()
            if isinstance(value, Used)
        }
        for spec in filter(None, map(HandlerSpec.of, vars(cls).values())):
            spec.belongs_to(cls)
        _check_hidden(cls)
        if not abstract:
            for spec in cls.__dynbus_handlers__.values():
                spec.resume_function(cls)

    @classmethod
    def __dynbus_also__(cls, address: ComponentName) -> Iterable[ComponentName | EndpointName]:
        """The components as which an instance is found beside its own, and the endpoints whose
        jobs it puts and takes beside those of durable handlers, for `dynbus auth`."""
        return ()

    @classmethod
    def __dynbus_grants__(
        cls, address: ComponentName, namespaces: Sequence[str]
    ) -> Iterable[Grant]:
        """The uses that an instance makes of the bus beside its handlers and dependencies, for
        `dynbus auth`. A subclass that has some adds those of its base.

        Args:
            namespaces: in which it may find what it calls.
        """
        return [row for used in cls.__dynbus_uses__.values() for row in used.grants(namespaces)]

    @classmethod
    def link(cls, other: type[L], /) -> type[L]:
        """Keep the dependency on `other`, and of the others only those that are linked too.

        A class without links has all its dependencies. `dynbus run` does not start those that the
        links leave out, and using one raises `ConfigError`. Links add up, and subclasses inherit
        them. Link where a module is imported: a run that has started does not change.

        Returns:
            `other`, so that `A.link(B).link(C)` is a chain.

        Raises:
            ConfigError: the class does not depend on `other`.
        """
        if not _is_actor(other):
            raise ConfigError(f"{cls.__name__}.link({other!r}): give an Actor class")
        linked = {name for name, each in cls.__dynbus_dependencies__.items() if each.is_on(other)}
        if not linked:
            name = other.__name__
            known = ", ".join(map(str, cls.__dynbus_dependencies__.values()))
            raise ConfigError(
                f"{cls.__name__}.link({name}): {cls.__name__} does not depend on {name}; it "
                f"depends on {known or f'nothing: write NAME = depends({name}) in its body'}"
            )
        own: frozenset[str] = vars(cls).get("__dynbus_links__", frozenset())
        cls.__dynbus_links__ = own | linked
        return other


class NotLinked(ConfigError, AttributeError):
    """Raised when an actor uses a dependency that the links of its class leave out.

    An `AttributeError` too, so that `getattr(self, "router", None)` tells whether it is there.
    """

    def __init__(self, actor: type[DeclaredActor], name: str) -> None:
        cls, given = actor.__name__, str(actor.__dynbus_dependencies__[name]).rpartition(":")[2]
        super().__init__(
            f"{cls}.{name} is not used in this run: other dependencies of {cls} are linked, and "
            f"it is not; add {cls}.link({given})"
        )


class Dependency(Generic[A]):
    """The declaration that a class calls another one, made by `depends` in its body.

    Args:
        actor: the class, or `"Name"` of one in the same module, or `"module:Name"`.

    Attributes:
        name: the attribute.
    """

    def __init__(self, actor: type[A] | str, node: str) -> None:
        given: Any = actor  # not everyone runs a type checker
        if isinstance(given, str):
            module, colon, name = given.rpartition(":")
            if not (_is_dotted(name) and (_is_dotted(module) or not colon)):
                raise ConfigError(f'depends({given!r}): write "Name" or "module:Name"')
        elif not (isinstance(given, type) and issubclass(given, DeclaredActor)):
            raise ConfigError(f"depends({actor!r}): give an Actor class")
        self._given = actor
        self._node = check_token("node", node) if node else ""
        self._owner: type[Any] | None = None
        self.name = ""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._owner, self.name = owner, name

    def __str__(self) -> str:
        given = self._given
        return given if isinstance(given, str) else given.__name__

    @property
    def node(self) -> str:
        """The node that is called; the class's component unless given.

        Raises:
            ConfigError: as of `actor`.
        """
        return self._node or self.actor.__dynbus_component__

    @property
    def actor(self) -> type[A]:
        """The class that is called; one that was given as text is looked up, and its module
        imported, when it is first asked for.

        Raises:
            ConfigError: there is none of the name, or its module cannot be imported.
        """
        if isinstance(self._given, str):
            self._given = self._looked_up(self._given)
        return self._given

    def is_on(self, other: Any) -> bool:
        """True if `other` is the class that is called; nothing is imported to find out."""
        if not isinstance(self._given, str):
            return self._given is other
        module, name = self._place(self._given)
        return module in sys.modules and _attribute(sys.modules[module], name) is other

    def _looked_up(self, text: str) -> type[A]:
        module, name = self._place(text)
        owner = self._owner.__name__ if self._owner is not None else ""
        source = f"{owner}.{self.name} = depends({text!r})"
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module}.".startswith(f"{error.name}."):
                raise ConfigError(f"{source}: there is no module {error.name!r}") from None
            raise ConfigError(f"{source}: {error}") from error
        except Exception as error:
            raise ConfigError(f"{source}: {describe_exception(error)}") from error
        actor = _attribute(loaded, name)
        if not _is_actor(actor):
            near = suggestion(name, [key for key, each in vars(loaded).items() if _is_actor(each)])
            reason = f"{name} is not an actor" if actor else f"there is no {name!r} in {module}"
            raise ConfigError(f"{source}: {reason}{near}")
        return cast("type[A]", actor)

    def _place(self, text: str) -> tuple[str, str]:
        """Module and name that a text means."""
        module, _, name = text.rpartition(":")
        return module or (self._owner.__module__ if self._owner is not None else ""), name


class Used:
    """The declaration that a class uses what is no actor, made by `depends` in its body.

    Args:
        used: whose text says what it is, such as `model NAME`.

    Attributes:
        name: the attribute.
    """

    def __init__(self, used: object) -> None:
        self._used = used
        self.name = ""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return str(self._used)

    def grants(self, namespaces: Sequence[str]) -> Iterable[Grant]:
        """The uses that who has this makes of the bus, as `__dynbus_grants__` of what is used says
        them."""
        used: Any = self._used
        return used.__dynbus_grants__(namespaces) if hasattr(used, "__dynbus_grants__") else ()


def kept_dependencies(cls: type[DeclaredActor]) -> dict[str, Dependency[Any]]:
    """The dependencies of a class by attribute: all, or where it has links, the linked ones."""
    links = {name for base in cls.__mro__ for name in vars(base).get("__dynbus_links__", ())}
    all_of = cls.__dynbus_dependencies__
    return {name: all_of[name] for name in all_of if name in links} if links else all_of


def keep_dependencies(cls: type[DeclaredActor], names: Sequence[str]) -> None:
    """Have a class keep the dependencies of these attributes alone, and look up their classes.

    Raises:
        ConfigError: one of them does not exist.
    """
    if len(names) < len(kept_dependencies(cls)):
        cls.__dynbus_links__ = frozenset(names)
    for dependency in kept_dependencies(cls).values():
        _ = dependency.actor


def _attribute(value: object, name: str) -> object:
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _is_dotted(text: str) -> bool:
    return all(map(str.isidentifier, text.split(".")))


def _is_actor(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, DeclaredActor)


def full_name(actor: type[Any]) -> str:
    """`module:Name` of a class."""
    return f"{actor.__module__}:{actor.__qualname__}"


def address_of(actor: type[DeclaredActor], *, node: str = "", namespace: str = "") -> ComponentName:
    """The address of a class on the bus.

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
        ConfigError: as of `check_servable`, or it has no namespace.
    """
    check_servable(cls)
    if not (namespace or cls.__dynbus_service__.namespace):
        raise ConfigError(
            f'{cls.__name__} has no namespace: write class {cls.__name__}(Actor, namespace="...")'
        )


def check_servable(cls: type[DeclaredActor]) -> None:
    """Check that a class can be started where it has a namespace.

    Raises:
        ConfigError: it is no class, or abstract, or has no handler although it needs one, or an
            annotation of one cannot be used.
    """
    if not isinstance(cast("object", cls), type):
        name = type(cls).__name__
        raise ConfigError(f"{cls!r} is no class: give {name}, and its arguments by name")
    if cls.__dynbus_abstract__:
        raise ConfigError(f"{cls.__name__} is abstract: start a subclass of it")
    needs_handler = cls.__dynbus_needs_handler__ and cls.__dynbus_service__.enabled
    if needs_handler and not (cls.__dynbus_handlers__ or cls.__dynbus_subscriptions__):
        raise ConfigError(f"{cls.__name__} has no handler: mark a method with @handler")
    for spec in cls.__dynbus_handlers__.values():
        spec.check()
    for subscription in cls.__dynbus_subscriptions__.values():
        subscription.spec.check()
        subscription.topic.check_method(subscription.spec)


def _prefixes(given: Any, source: str) -> tuple[str, ...]:
    """With what the keys begin that a class takes beside its constructor's arguments."""
    if isinstance(given, bool):
        return ("",) if given else ()
    prefixes: Any = (given,) if isinstance(given, str) else given
    if isinstance(prefixes, tuple | list):
        elements = cast("Sequence[object]", prefixes)
        texts = [each for each in elements if isinstance(each, str) and each]
        if len(texts) == len(elements):
            return tuple(texts)
    raise ConfigError(
        f"{source} = {given!r}: write True for all keys, or the prefixes of those that the class "
        'takes, for example ("lib_",)'
    )


def _collect_handlers(cls: type[DeclaredActor]) -> dict[str, HandlerSpec]:
    """Handlers by attribute, base classes first; an override without @handler is none.

    Raises:
        ConfigError: two have one name, or one that is for some users is overridden by one for all.
    """
    specs: dict[str, HandlerSpec] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            spec = HandlerSpec.of(value)
            if spec is not None:
                if attribute in specs:
                    _check_override(base, specs[attribute], spec)
                specs[attribute] = spec
            elif attribute in specs:
                del specs[attribute]
    by_name: dict[str, str] = {}
    for attribute, spec in specs.items():
        if spec.name in by_name:
            raise ConfigError(
                f"{cls.__name__}: {by_name[spec.name]} and {attribute} are both endpoint "
                f"{spec.name!r}: give one of them another name"
            )
        by_name[spec.name] = attribute
    return specs


def _check_override(cls: type[Any], overridden: HandlerSpec, spec: HandlerSpec) -> None:
    if overridden.allow is not None and spec.allow is None:
        raise ConfigError(
            f"{cls.__name__}: {spec.label} would be for everybody, and {overridden.label}, which "
            f"it overrides, is for {', '.join(sorted(overridden.allow))}: say allow= again"
        )


def _collect_subscriptions(cls: type[Any]) -> dict[str, Subscription]:
    """Subscriptions by attribute, base classes first; an override without `@subscribe` is none.

    Raises:
        ConfigError: two methods claim one group.
    """
    subscriptions: dict[str, Subscription] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            one = subscription_of(value)
            if one is not None:
                subscriptions[attribute] = one
            else:
                subscriptions.pop(attribute, None)
    claims: dict[tuple[int, str], str] = {}
    for attribute, one in subscriptions.items():
        if not one.group:
            continue
        other = claims.setdefault((id(one.topic), one.group), attribute)
        if other != attribute:
            raise ConfigError(
                f"{cls.__name__}: {other} and {attribute} claim the group {one.group!r} of "
                f"{one.topic.name}, and each would get a part of the events: give one of them a "
                "group of another name"
            )
    return subscriptions


def _published_by(base: type[Any]) -> tuple[TopicOfEvents, ...]:
    published: tuple[TopicOfEvents, ...] = vars(base).get("__dynbus_publishes__", ())
    return published


def _check_hidden(cls: type[DeclaredActor]) -> None:
    for name in (*cls.__dynbus_handlers__, *cls.__dynbus_dependencies__, *cls.__dynbus_uses__):
        if name in PUBLIC_ATTRIBUTES or name.startswith("_"):
            kind = "handler" if name in cls.__dynbus_handlers__ else "dependency"
            raise ConfigError(
                f"{cls.__name__}.{name}: a {kind} may not be called {name!r}; "
                f"names with _ and {', '.join(PUBLIC_ATTRIBUTES)} are taken"
            )
