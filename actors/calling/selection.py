"""The selection of a call's instance: found in the view, picked by the router, and checked.

`Invocation` carries the call out; what is chosen here was sent nothing yet.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio

from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.errors import (
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    InvalidRequest,
    NoInstances,
    describe_exception,
    only_cause,
)
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import EndpointName, InstanceName
from dynbus.bus.records.instance_view import Instance

from .attempt import EVENTS, Attempt, RouteObservation
from .client_side import ClientSide
from .options import check_metadata
from .routing import OWN_POLICIES, ROUTE_TIMEOUT, Load, Policy, Route, Router, RouteRequest

NOBODY: Final[frozenset[str]] = frozenset()


class Selection:
    """The instances of one call's endpoint, without those that turned the call away.

    Args:
        request: as the caller gave it, for the router.
        routed_as: what the router looks at in place of this and later requests; None for those.
        spills: whether the call may go to another region when nobody in its own can take it.
    """

    __slots__ = (
        "_endpoint",
        "_left",
        "_parent",
        "_request",
        "_request_id",
        "_routed_as",
        "_router",
        "_side",
        "_spills",
        "_tried",
    )

    def __init__(
        self,
        side: ClientSide,
        endpoint: EndpointName,
        router: Router,
        request: Any,
        routed_as: Any,
        request_id: str,
        parent: Context | None,
        spills: bool,
    ) -> None:
        if spills:
            side.abroad.begin()
        self._spills = spills
        self._side = side
        self._endpoint = endpoint
        self._router = router
        self._request = request
        self._routed_as = routed_as
        self._request_id = request_id
        self._parent = parent
        self._tried: frozenset[str] = NOBODY
        self._left: tuple[str, str] | None = None

    def __repr__(self) -> str:
        return f"<Selection {self._endpoint} [{len(self._tried)} tried]>"

    def mark_tried(self, instance_id: str) -> None:
        """Prefer every other instance from now on."""
        self._tried |= {instance_id}

    def leave(self, instance_id: str) -> None:
        """Choose any other instance next, even where there is none; this one again once it was
        started anew."""
        self.mark_tried(instance_id)
        instance = self.find(instance_id)
        self._left = (instance_id, instance.record.incarnation) if instance is not None else None

    def ask_for(self, request: Any) -> None:
        """Have routers look at another request from now on, unless it is routed as something."""
        self._request = request

    def count(self) -> int:
        """The number of instances that may be chosen, without those that turned the call away."""
        return len(self._untried(self._known()))

    def forget_tried(self) -> None:
        """Let all instances be chosen again."""
        self._tried = NOBODY

    def has_untried(self, besides: str) -> bool:
        """True if there is an instance that was not tried, `besides` taken for one that was."""
        tried = self._tried
        return any(one.id not in tried and one.id != besides for one in self._known())

    def pick(self) -> Instance | None:
        """The instance that a policy of our own picks at once; None where `choose` is needed."""
        router = self._router
        if type(router) not in OWN_POLICIES or not isinstance(router, Policy):
            return None
        instances = self._known()
        if not instances:
            return None
        offered = self._untried(instances) if self._tried else instances
        return router.pick(offered, self._load, self._endpoint.endpoint)

    async def choose(
        self,
        wait: float,
        left: float | None,
        *,
        attempt: int,
        priority: int,
        metadata: Mapping[str, str],
    ) -> Attempt:
        """An attempt at the instance that the router picks, not sent yet.

        Args:
            wait: seconds to wait for an instance when there is none.
            left: seconds until the deadline; None without one.
            attempt, priority, metadata: for the router, see `RouteRequest`.

        Raises:
            NoInstances: there is none, also after the wait.
            ConfigError: the router failed, or picked what it was not offered.
            DeadlineExceeded: none was picked in time.
            DynbusError: what the router raised of the kind.
        """
        instances: Sequence[Instance] = self._known()
        if not instances:
            begun = monotonic()
            instances = await self._wait(wait, left)
            left = None if left is None else max(0.0, left - (monotonic() - begun))
        instances = self._untried(instances)
        request = RouteRequest(
            self._endpoint,
            self._request if self._routed_as is None else self._routed_as,
            self._parent,
            self._load,
            self._request_id,
            attempt,
            priority,
            metadata,
            self._round_trip,
        )
        answer = await self._route(request, instances, left)
        if not isinstance(answer, Route):
            return Attempt(self._check_offered(answer, instances))
        observation = self._observe(answer)
        try:
            joined = self._joined(metadata, answer.metadata) if answer.metadata else None
            chosen = self._check_offered(answer.instance_id, instances)
        except BaseException as error:
            if observation is not None:
                observation.ended(error)
            raise
        return Attempt(chosen, observation, joined)

    async def everyone(self, wait: float, left: float | None) -> list[str]:
        """The ids of all instances that do not drain, also of those that no router is offered since
        they did not answer; none where there is none after the wait.

        Args:
            wait: seconds to wait for an instance when there is none.
            left: seconds until the deadline; None without one.

        Raises:
            Unavailable: the instances cannot be read.
            DeadlineExceeded: they were not read in time.
        """
        members = self._side.discovery.view.members
        for seconds in dict.fromkeys((0.0, wait)):
            # The first look waits for the reading of all records, even where some are known.
            with suppress(NoInstances):
                await self._wait(seconds, left)
            if instances := members(*self._endpoint.component_name, monotonic()):
                return [one.id for one in instances]
        return []

    async def is_stream(self, instance_id: str, wait: float, left: float | None) -> bool:
        """True if the endpoint streams, by the records of its instances.

        Args:
            instance_id: the instance whose record goes before those of others; or empty.
            wait: seconds to wait for an instance when there is none.
            left: seconds until the deadline; None without one.

        Raises:
            NoInstances: there is none, also after the wait.
            DeadlineExceeded: none was found in time.
        """
        named = self.find(instance_id)
        others = self._known() or (await self._wait(wait, left) if named is None else [])
        known = [named, *others] if named is not None else others
        return first_kind(known, self._endpoint) == "stream"

    def check_instance(self, instance: Instance | None, *, streaming: bool, declared: bool) -> str:
        """Refuse a call whose result would be lost, or never come.

        Returns the hash of what the instance's endpoint reads and writes; empty where that is not
        known.

        Args:
            streaming: how the call is made.
            declared: whether the client's actor class says so, and not the way it is awaited.

        Raises:
            InvalidRequest: the instance's record says that it serves the other kind, or lists
                other endpoints; the next instance may fit.
        """
        if instance is None:
            return ""
        record, name = instance.record, self._endpoint.endpoint
        if record.endpoints.get(name) == ("stream" if streaming else "unary"):
            # As nearly every call finds it.
            return record.schemas.get(name, "")
        refusal = wrong_kind(
            instance,
            self._endpoint,
            streaming=streaming,
            declared=declared,
            request_id=self._request_id,
        )
        if refusal is not None:
            raise refusal
        return ""

    # Routers of users ------------------------------------------------------------------------

    async def _route(
        self, request: RouteRequest, instances: Sequence[Instance], left: float | None
    ) -> Any:
        """The choice of a user's router, or the reason why it chooses nothing."""
        most: float | None = getattr(self._router, "route_timeout", ROUTE_TIMEOUT)
        limit = min((one for one in (left, most) if one is not None), default=None)
        time = asyncio.timeout(limit)
        try:
            async with time:
                answer: Any = self._router.route(request, instances)
                if not inspect.isawaitable(answer):
                    raise self._failed("is not asynchronous: write `async def route`")
                return await answer
        except DynbusError:
            raise
        except Exception as error:
            if time.expired() and isinstance(error, TimeoutError):
                # What it was about when it was cancelled.
                notes = getattr(error.__cause__, "__notes__", ())
                raise DeadlineExceeded(
                    f"router {self._router_name} picked no instance for {self._endpoint} "
                    f"within {limit or 0.0:.3g} s" + "".join(f": {note}" for note in notes),
                    request_id=self._request_id,
                    started=False,
                ) from None
            failed = self._failed(f"raised {describe_exception(only_cause(error))}")
            raise failed from error

    def _observe(self, route: Route) -> RouteObservation | None:
        observer = route.observer
        if observer is None:
            return None
        try:
            return RouteObservation(observer)
        except AttributeError as error:
            raise self._failed(
                f"gave an observer without the methods {', '.join(EVENTS)}: {error}"
            ) from None

    def _joined(self, metadata: Mapping[str, str], added: Any) -> str:
        """The metadata of a call and what a router adds, as one header value."""
        given = added  # which a check leaves untyped, unlike what is checked
        if not isinstance(given, Mapping):
            raise self._failed(f"gave metadata {brief_repr(added)}: give a dict of strings")
        joined: dict[Any, Any] = {**metadata, **added}
        try:
            check_metadata(joined)
            return headers.encode_metadata(joined)
        except ConfigError as error:
            raise self._failed(f"gave metadata that the call cannot carry: {error}") from None

    def _check_offered(self, chosen: Any, instances: Sequence[Instance]) -> str:
        """Return a router's choice if it is one of the instances that it may choose."""
        # A router is the user's code, and what it says becomes part of a subject.
        if isinstance(chosen, str):
            if chosen not in self._tried and self.find(chosen) is not None:
                return chosen
            if any(one.id == chosen for one in instances):
                return chosen
        offered = [one.id for one in instances]
        shown = ", ".join(offered[:5]) + (f" and {len(offered) - 5} more" if offered[5:] else "")
        hint = ": return its `id`" if isinstance(chosen, Instance) else ""
        raise self._failed(f"picked {brief_repr(chosen)}{hint}; it was offered {shown}")

    def _failed(self, what: str) -> ConfigError:
        return ConfigError(
            f"router {self._router_name} {what} (while choosing an instance for {self._endpoint})",
            request_id=self._request_id,
            started=False,
        )

    @property
    def _router_name(self) -> str:
        return type(self._router).__qualname__

    # The view --------------------------------------------------------------------------------

    def _known(self) -> list[Instance]:
        namespace, component, _ = self._endpoint
        known = self._side.discovery.view.instances(namespace, component, monotonic())
        if self._spills and all(one.id in self._tried for one in known):
            abroad = self._side.abroad.view.instances(namespace, component, monotonic())
            known = [*known, *abroad]
        return known if self._left is None else [one for one in known if self._is_offered(one)]

    def _is_offered(self, instance: Instance) -> bool:
        return (instance.id, instance.record.incarnation) != self._left

    def _untried(self, instances: Sequence[Instance]) -> Sequence[Instance]:
        """The instances that did not turn the call away; all where each of them did."""
        return [one for one in instances if one.id not in self._tried] or instances

    def find(self, instance_id: str) -> Instance | None:
        """The instance of an id, as far as it is known."""
        name = self._instance(instance_id)
        return self._side.discovery.view.find(name) or self._side.abroad.view.find(name)

    def _load(self, instance_id: str) -> Load:
        caller = self._side.caller
        instance = self._instance(instance_id)
        return Load(caller.in_flight(instance), caller.load(instance))

    def _round_trip(self, instance_id: str) -> float | None:
        return self._side.caller.round_trip(self._instance(instance_id))

    def _instance(self, instance_id: str) -> InstanceName:
        return InstanceName(self._endpoint.namespace, self._endpoint.component, instance_id)

    async def _wait_for_one(self, wait: float) -> list[Instance]:
        """The instances of the own region; those abroad where it has none and the call may leave
        it, and the first to come anywhere where there is nobody."""
        wait_at_home = partial(self._side.discovery.wait, self._endpoint, 1, suits=self._is_offered)
        if not self._spills:
            return await wait_at_home(wait)
        wait_abroad = partial(self._side.abroad.wait, self._endpoint, 1, suits=self._is_offered)
        for look in (wait_at_home, wait_abroad):
            try:
                return await look(0)
            except NoInstances as error:
                nobody: NoInstances = error
        if not wait:
            raise nobody
        return await _first_of(partial(wait_at_home, wait), partial(wait_abroad, wait))

    async def _wait(self, wait: float, left: float | None) -> list[Instance]:
        telemetry = self._side.bus.telemetry
        if telemetry is not None:
            # What scales instances from none sees these alone.
            telemetry.waiting(self._endpoint, 1)
        try:
            async with asyncio.timeout(left):
                return await self._wait_for_one(wait if left is None else min(wait, left))
        except TimeoutError:
            # The first reading of the records does not end, and no wait was asked for.
            raise DeadlineExceeded(
                f"the deadline passed before {self._endpoint} was found",
                request_id=self._request_id,
                started=False,
            ) from None
        finally:
            if telemetry is not None:
                telemetry.waiting(self._endpoint, -1)


async def _first_of(*looks: Callable[[], Awaitable[list[Instance]]]) -> list[Instance]:
    """The instances of the look that ends first with any; the others are ended then."""
    seen: list[list[Instance]] = []
    errors: list[DynbusError] = []

    async def look_for(look: Callable[[], Awaitable[list[Instance]]]) -> None:
        try:
            seen.append(await look())
            group.cancel_scope.cancel()
        except DynbusError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for look in looks:
            group.start_soon(look_for, look)
    if seen:
        return seen[0]
    raise errors[0]


def kind_of(instance: Instance | None, endpoint: EndpointName) -> str | None:
    """`unary` or `stream`, as an instance's record says; None when it does not."""
    return instance.record.endpoints.get(endpoint.endpoint) if instance is not None else None


def first_kind(instances: Iterable[Instance], endpoint: EndpointName) -> str | None:
    """The kind that the first instance with the endpoint serves; None when none has it."""
    kinds = (kind_of(instance, endpoint) for instance in instances)
    return next((kind for kind in kinds if kind is not None), None)


def wrong_kind(
    instance: Instance,
    endpoint: EndpointName,
    *,
    streaming: bool,
    declared: bool,
    request_id: str,
) -> InvalidRequest | None:
    """The reason for which an instance cannot take a call: its result would be lost, or never come;
    else None.

    Args:
        streaming: how the call is made.
        declared: whether the client's actor class says so, and not the way it is awaited.
    """
    kind = kind_of(instance, endpoint)
    wanted = "stream" if streaming else "unary"
    if kind == wanted:
        return None
    if kind is None:
        known = instance.record.endpoints
        if not known:
            return None
        message = (
            f"{endpoint.namespace}.{endpoint.component} has no endpoint "
            f"{endpoint.endpoint!r}; it has {', '.join(sorted(known))}"
        )
    elif declared:
        message = (
            f"{endpoint} is declared {wanted} by the client's actor class, "
            f"but instance {instance.id} serves it as {kind}"
        )
    elif streaming:
        message = f"{endpoint} answers once: await the call"
    else:
        message = f"{endpoint} answers with a stream: iterate over the call"
    return InvalidRequest(message, request_id=request_id, started=False)
