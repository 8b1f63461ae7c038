"""The routing of a call: the protocol of routers, and the policies that come with dynbus, such
as the least loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

from dynbus.bus.context import Context
from dynbus.bus.errors import ConfigError, DynbusError
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.random_ids import jitter
from dynbus.bus.records.instance_view import Instance

ROUTE_TIMEOUT: Final = 60.0
"""Seconds that a router may take for a call unless it says otherwise, even when the call has no
deadline."""

NO_METADATA: Final[Mapping[str, str]] = MappingProxyType({})


class Load(NamedTuple):
    """The known load of an instance.

    Attributes:
        in_flight: calls of this process that are open there.
        reported: calls that it last said to run or wait, of all its clients.
    """

    in_flight: int
    reported: int

    @property
    def total(self) -> int:
        """The better estimate of the two: reports are late, own calls are exact."""
        return max(self.in_flight, self.reported)


def _not_measured(instance_id: str) -> float | None:
    """The way to an instance, for those who make requests of routers themselves."""
    return None


class RouteRequest(NamedTuple):
    """The part of a call that a router may look at.

    Attributes:
        request: the request as the caller gave it, or what it gave as `routed_as`.
        parent: the context of the handler that makes the call, if one does.
        load: tells the load of an instance by id.
        request_id: shared by all attempts, and by all sub-calls of one request.
        attempt: 1 for the first request that is sent, one more for each further one.
        priority: as the caller gave it; larger is more urgent.
        metadata: what the handler will get; not to be changed.
        round_trip: tells the seconds of the way to an instance and back, by id; None for one that
            was not called lately, and where this process has no zone.
    """

    endpoint: EndpointName
    request: Any
    parent: Context | None
    load: Callable[[str], Load]
    request_id: str = ""
    attempt: int = 1
    priority: int = 0
    metadata: Mapping[str, str] = NO_METADATA
    round_trip: Callable[[str], float | None] = _not_measured


class RouteObserver(Protocol):
    """Is told how an attempt goes that a router has chosen an instance for.

    One that has a method `arrived(self, items: Sequence[bytes]) -> bool` also sees what reaches the
    caller: the next items of a stream, or the unary result, as JSON; after `first_item`. It says
    whether it wants to see more. Streams are read faster once it does not.

    The methods are called on the loop of the call, so they return at once. What one raises is
    logged and does not harm the call.
    """

    def started(self) -> None:
        """The request was sent."""
        ...

    def first_item(self) -> None:
        """The first items of a stream, or the unary result, reached the caller."""
        ...

    def ended(self, error: DynbusError | None) -> None:
        """The attempt is over: called exactly once, as the last, whatever happened.

        Args:
            error: None after the result or the end of the stream. `Cancelled` when the caller
                left. Of an attempt that is repeated, what it failed with: that attempt ends
                before the next one is routed.
        """
        ...


class Route(NamedTuple):
    """A router's choice together with who is told how it goes.

    Attributes:
        instance_id: of one of the offered instances.
        metadata: added to the metadata of the call for this attempt alone; of a key that both
            have, this value counts.
    """

    instance_id: str
    observer: RouteObserver | None = None
    metadata: Mapping[str, str] = NO_METADATA


@runtime_checkable
class Router(Protocol):
    """Picks an instance for each call. Stateful routers are shared by the calls of a client."""

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str | Route:
        """The id of one of `instances`, which is never empty; in a `Route` with an observer.

        Asked once per attempt. A `DynbusError` raised here is the call's; any other exception,
        and an id that was not offered, is a `ConfigError`. It may wait until the call's
        deadline, and for `ROUTE_TIMEOUT` at most, or for as long as an attribute
        `route_timeout` of the router says in seconds, None for no limit of its own. What it adds
        as notes to the `CancelledError` that ends its waiting is told in the call's error.
        """
        ...


RoutingName = Literal["round_robin", "random", "least_loaded", "power_of_two", "local_first"]
Routing = RoutingName | Router


class Policy:
    """A router that neither waits nor fails, and looks at nothing but the instances' loads."""

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str:
        return self.pick(instances, request.load, request.endpoint.endpoint).id

    def pick(
        self, instances: Sequence[Instance], load: Callable[[str], Load], endpoint: str
    ) -> Instance:
        """One of `instances`, which is never empty.

        Args:
            load: tells the load of an instance by id.
            endpoint: the name of what is called there.
        """
        raise NotImplementedError


class RoundRobin(Policy):
    """One after the other, from a random first."""

    def __init__(self) -> None:
        self._next = jitter.randrange(1 << 16)

    def pick(
        self, instances: Sequence[Instance], load: Callable[[str], Load], endpoint: str
    ) -> Instance:
        self._next += 1
        return instances[self._next % len(instances)]


class Random(Policy):
    """Any, each with the same chance."""

    def pick(
        self, instances: Sequence[Instance], load: Callable[[str], Load], endpoint: str
    ) -> Instance:
        return jitter.choice(instances)


class LeastLoaded(Policy):
    """The one with the fewest calls; ties are broken at random."""

    def pick(
        self, instances: Sequence[Instance], load: Callable[[str], Load], endpoint: str
    ) -> Instance:
        loads = [load(instance.id).total for instance in instances]
        least = min(loads)
        return jitter.choice(
            [i for i, calls in zip(instances, loads, strict=True) if calls == least]
        )


class PowerOfTwo(Policy):
    """The less loaded of two random ones: nearly as even as the least loaded, without herding."""

    def pick(
        self, instances: Sequence[Instance], load: Callable[[str], Load], endpoint: str
    ) -> Instance:
        if len(instances) == 1:
            return instances[0]
        first, second = jitter.sample(instances, 2)
        if load(first.id).total <= load(second.id).total:
            return first
        return second


class LocalFirst(Policy):
    """One of the own zone, unless all there have as many calls as they run at a time and others
    have not; any where none is of the own zone.

    An instance that refuses a call is not offered to it again, so that goes elsewhere too.

    Args:
        within: picks among those of the zone, or of the others; power of two unless given.
    """

    def __init__(self, within: Policy | None = None) -> None:
        self._within = within or PowerOfTwo()

    def pick(
        self, instances: Sequence[Instance], load: Callable[[str], Load], endpoint: str
    ) -> Instance:
        near = [one for one in instances if one.near]
        if not near:
            return self._within.pick(instances, load, endpoint)
        offered = _not_full(near, load, endpoint)
        if not offered:
            far = [one for one in instances if not one.near]
            offered = _not_full(far, load, endpoint) or near
        return self._within.pick(offered, load, endpoint)


def _not_full(
    instances: Sequence[Instance], load: Callable[[str], Load], endpoint: str
) -> list[Instance]:
    """Those that would run one more call at once, as far as is known."""
    return [
        one
        for one in instances
        if (most := one.record.limits.get(endpoint)) is None or load(one.id).total < most
    ]


POLICIES: dict[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "local_first": LocalFirst,
}

OWN_POLICIES: Final = frozenset((RoundRobin, Random, LeastLoaded, PowerOfTwo, LocalFirst))
"""Routers that pick what they are offered, and do nothing else; a class derived from one may."""


def make_router(routing: Routing | None, *, within: RoutingName | None = None) -> Router:
    """The router for a name, or the given one; round robin for None.

    Args:
        within: of `local_first`, how it picks among the instances of the zone that it chose.

    Raises:
        ConfigError: an unknown name, or an object that is no router.
    """
    if within is not None:
        inner = make_router(within)
        if routing != "local_first" or not isinstance(inner, Policy):
            raise ConfigError(
                f"routing {routing!r} within={within!r}: give `within` the name of a policy, and "
                "to local_first alone"
            )
        return LocalFirst(inner)
    if routing is None:
        return RoundRobin()
    if isinstance(routing, str):
        policy = POLICIES.get(routing)
        if policy is None:
            raise ConfigError(f"routing {routing!r} is unknown: use one of {', '.join(POLICIES)}")
        return policy()
    given: Any = routing
    if isinstance(given, type):
        raise ConfigError(
            f"routing {given.__name__} is a class: give an object, {given.__name__}()"
        )
    if isinstance(given, Router):
        return given
    raise ConfigError(f"routing {routing!r} has no method `async def route(request, instances)`")
