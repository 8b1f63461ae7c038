"""Which instance a call goes to: found in the view, picked by the router, and checked.

`Invocation` carries the call out; what is chosen here was sent nothing yet.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.errors import (
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    describe_exception,
    only_cause,
)
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.records.discovery import Instance, InstanceView

from .client_side import ClientSide
from .endpoint_kind import first_kind, wrong_kind
from .options import check_metadata
from .route_observation import EVENTS, RouteObservation
from .routing import OWN_POLICIES, ROUTE_TIMEOUT, Load, Route, Router, RouteRequest


class Selection:
    """The instances of one call's endpoint, without those that turned the call away.

    Args:
        request: as the caller gave it, for the router.
        streaming: how the client's class declares the endpoint; None when only the instance's
            record can tell (untyped calls).

    Attributes:
        streaming: whether the call is a stream; for an untyped one known once an instance is.
        observation: of the last choice, when its router wants to be told how it goes. To be
            ended and taken away by whoever makes the call.
        metadata: the header value of the last choice, when its router gave metadata: that of
            the call and its own. None for that of the call.
    """

    __slots__ = (
        "_declared",
        "_endpoint",
        "_parent",
        "_request",
        "_request_id",
        "_router",
        "_side",
        "_tried",
        "metadata",
        "observation",
        "streaming",
    )

    def __init__(
        self,
        side: ClientSide,
        endpoint: EndpointName,
        router: Router,
        request: Any,
        request_id: str,
        parent: Context | None,
        streaming: bool | None,
    ) -> None:
        self.streaming = streaming
        self.observation: RouteObservation | None = None
        self.metadata: str | None = None
        self._side = side
        self._endpoint = endpoint
        self._router = router
        self._request = request
        self._request_id = request_id
        self._parent = parent
        self._declared = streaming is not None
        self._tried: set[str] = set()

    def __repr__(self) -> str:
        return f"<Selection {self._endpoint} [{len(self._tried)} tried]>"

    def mark_tried(self, instance_id: str) -> None:
        """Prefer every other instance from now on."""
        self._tried.add(instance_id)

    def forget_tried(self) -> None:
        """Let all instances be chosen again."""
        self._tried.clear()

    def has_untried(self, besides: str) -> bool:
        """Whether there is an instance that was not tried, `besides` taken for one that was."""
        tried = self._tried
        return any(one.id not in tried and one.id != besides for one in self._known())

    async def choose(
        self,
        wait: float,
        left: float | None,
        *,
        attempt: int,
        priority: int,
        metadata: Mapping[str, str],
    ) -> str:
        """The id of the instance that the router picks.

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
        self.metadata = None
        instances: Sequence[Instance] = self._known()
        if not instances:
            begun = monotonic()
            instances = await self._wait(wait, left)
            left = None if left is None else max(0.0, left - (monotonic() - begun))
        if self._tried:
            untried = [one for one in instances if one.id not in self._tried]
            instances = untried or instances
        request = RouteRequest(
            self._endpoint,
            self._request,
            self._parent,
            self._load,
            self._request_id,
            attempt,
            priority,
            metadata,
        )
        router = self._router
        answer: Any
        if type(router) in OWN_POLICIES:
            answer = await router.route(request, instances)
            return answer  # type: ignore[no-any-return]
        answer = await self._route(request, instances, left)
        if isinstance(answer, Route):
            self._observe(answer)
            if answer.metadata:
                self.metadata = self._joined(metadata, answer.metadata)
            answer = answer.instance_id
        return self._check_offered(answer, instances)

    async def learn_kind(self, instance_id: str, wait: float, left: float | None) -> None:
        """Find out whether an untyped call is a stream, from the records of instances.

        Args:
            instance_id: the instance whose record goes before those of others; or empty.
            wait: seconds to wait for an instance when there is none.
            left: seconds until the deadline; None without one.

        Raises:
            NoInstances: there is none, also after the wait.
            DeadlineExceeded: none was found in time.
        """
        named = self._find(instance_id)
        others = self._known() or (await self._wait(wait, left) if named is None else [])
        known = [named, *others] if named is not None else others
        self.streaming = first_kind(known, self._endpoint) == "stream"

    def check_kind(self, instance_id: str) -> None:
        """Refuse a call whose result would be lost, or never come.

        Raises:
            InvalidRequest: the instance's record says that it serves the other kind, or lists
                other endpoints; the next instance may fit.
        """
        instance = self._find(instance_id)
        if instance is None:
            return
        refusal = wrong_kind(
            instance,
            self._endpoint,
            streaming=bool(self.streaming),
            declared=self._declared,
            request_id=self._request_id,
        )
        if refusal is not None:
            raise refusal

    # Routers of users ------------------------------------------------------------------------

    async def _route(
        self, request: RouteRequest, instances: Sequence[Instance], left: float | None
    ) -> Any:
        """What a router of a user returns, or the reason why it returns nothing."""
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

    def _observe(self, route: Route) -> None:
        observer = route.observer
        if observer is None:
            return
        try:
            self.observation = RouteObservation(observer)
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
        """What a router picked, when it is one of the instances that it may pick."""
        # A router is the user's code, and what it says becomes part of a subject.
        if isinstance(chosen, str):
            if chosen not in self._tried and self._find(chosen) is not None:
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

    @property
    def _view(self) -> InstanceView:
        return self._side.discovery.view

    def _known(self) -> list[Instance]:
        endpoint = self._endpoint
        return self._view.instances(endpoint.namespace, endpoint.component, monotonic())

    def _find(self, instance_id: str) -> Instance | None:
        endpoint = self._endpoint
        return self._view.find(endpoint.namespace, endpoint.component, instance_id)

    def _load(self, instance_id: str) -> Load:
        caller = self._side.caller
        place = (self._endpoint.namespace, self._endpoint.component, instance_id)
        return Load(caller.in_flight(*place), caller.load(*place))

    async def _wait(self, wait: float, left: float | None) -> list[Instance]:
        try:
            async with asyncio.timeout(left):
                return await self._side.discovery.wait(
                    self._endpoint, 1, wait if left is None else min(wait, left)
                )
        except TimeoutError:
            # The first reading of the records does not end, and no wait was asked for.
            raise DeadlineExceeded(
                f"the deadline passed before {self._endpoint} was found",
                request_id=self._request_id,
                started=False,
            ) from None
