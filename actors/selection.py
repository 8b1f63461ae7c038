"""Which instance a call goes to: found in the view, picked by the router, and checked.

`Invocation` carries the call out; what is chosen here was sent nothing yet.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.discovery import Instance, InstanceView
from dynbus.bus.errors import ConfigError, DeadlineExceeded, DynbusError, InvalidRequest
from dynbus.bus.names import EndpointName

from .routing import OWN_POLICIES, ROUTE_TIMEOUT, Load, Router, RouteRequest

if TYPE_CHECKING:
    from .runtime import Runtime


class Selection:
    """The instances of one call's endpoint, without those that turned the call away.

    Args:
        request: as the caller gave it, for the router.
        streaming: how the client's class declares the endpoint; None when only the instance's
            record can tell (untyped calls).

    Attributes:
        streaming: whether the call is a stream; for an untyped one known once an instance is.
    """

    __slots__ = (
        "_declared",
        "_endpoint",
        "_parent",
        "_request",
        "_request_id",
        "_router",
        "_runtime",
        "_tried",
        "streaming",
    )

    def __init__(
        self,
        runtime: Runtime,
        endpoint: EndpointName,
        router: Router,
        request: Any,
        request_id: str,
        parent: Context | None,
        streaming: bool | None,
    ) -> None:
        self.streaming = streaming
        self._runtime = runtime
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

    def has_untried(self) -> bool:
        """Whether there is an instance that was not tried."""
        return any(one.id not in self._tried for one in self._known())

    async def choose(self, wait: float, left: float | None) -> str:
        """The id of the instance that the router picks.

        Args:
            wait: seconds to wait for an instance when there is none.
            left: seconds until the deadline; None without one.

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
        if self._tried:
            untried = [one for one in instances if one.id not in self._tried]
            instances = untried or instances
        request = RouteRequest(self._endpoint, self._request, self._parent, self._load)
        router = self._router
        if type(router) in OWN_POLICIES:
            chosen = await router.route(request, instances)
        else:
            chosen = self._check_offered(await self._route(request, instances, left), instances)
        if self.streaming is None:
            self.streaming = self.kind_at(chosen) == "stream"
        return chosen

    async def learn_kind_at(self, instance_id: str, wait: float) -> bool:
        """Learn from the record of an instance whether the call streams; False without one.

        Raises:
            NoInstances: no instance at all is there, also after the wait.
        """
        await self._runtime.discovery.wait(self._endpoint, 1, wait)
        kind = self.kind_at(instance_id)
        if kind is None:
            return False
        self.streaming = kind == "stream"
        return True

    def kind_at(self, instance_id: str) -> str | None:
        """`unary` or `stream`, as the instance's record says; None when it does not."""
        one = self._find(instance_id)
        return one.record.endpoints.get(self._endpoint.endpoint) if one is not None else None

    def check_kind(self, instance_id: str) -> None:
        """Refuse a call whose result would be lost, or never come.

        Raises:
            InvalidRequest: the instance's record says that it serves the other kind, or lists
                other endpoints; the next instance may fit.
        """
        kind = self.kind_at(instance_id)
        if kind is None:
            self._check_endpoint(instance_id)
            return
        wanted = "stream" if self.streaming else "unary"
        if kind == wanted:
            return
        endpoint = self._endpoint
        if self._declared:
            message = (
                f"{endpoint} is declared {wanted} by the client's actor class, "
                f"but instance {instance_id} serves it as {kind}"
            )
        elif self.streaming:
            message = f"{endpoint} answers once: await the call"
        else:
            message = f"{endpoint} answers with a stream: iterate over the call"
        raise InvalidRequest(message, request_id=self._request_id, started=False)

    def _check_endpoint(self, instance_id: str) -> None:
        endpoint = self._endpoint
        one = self._find(instance_id)
        if one is not None and one.record.endpoints:
            raise InvalidRequest(
                f"{endpoint.namespace}.{endpoint.component} has no endpoint "
                f"{endpoint.endpoint!r}; it has {', '.join(sorted(one.record.endpoints))}",
                request_id=self._request_id,
                started=False,
            )

    # Routers of users ------------------------------------------------------------------------

    async def _route(
        self, request: RouteRequest, instances: Sequence[Instance], left: float | None
    ) -> Any:
        """What a router of a user returns, or the reason why it returns nothing."""
        limit = ROUTE_TIMEOUT if left is None else min(left, ROUTE_TIMEOUT)
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
                raise DeadlineExceeded(
                    f"router {self._router_name} picked no instance for {self._endpoint} "
                    f"within {limit:.3g} s",
                    request_id=self._request_id,
                    started=False,
                ) from None
            failed = self._failed(f"raised {type(error).__name__}: {error}")
            raise failed from error

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
        hint = ""
        if isinstance(chosen, Instance):
            hint = ": return its `id`"
        raise self._failed(f"picked {_short(chosen)}{hint}; it was offered {shown}")

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
        return self._runtime.discovery.view

    def _known(self) -> list[Instance]:
        endpoint = self._endpoint
        return self._view.instances(endpoint.namespace, endpoint.component, monotonic())

    def _find(self, instance_id: str) -> Instance | None:
        endpoint = self._endpoint
        return self._view.find(endpoint.namespace, endpoint.component, instance_id)

    def _load(self, instance_id: str) -> Load:
        caller = self._runtime.caller
        return Load(caller.in_flight(instance_id), caller.load(instance_id))

    async def _wait(self, wait: float, left: float | None) -> list[Instance]:
        try:
            async with asyncio.timeout(left):
                return await self._runtime.discovery.wait(
                    self._endpoint, 1, wait if left is None else min(wait, left)
                )
        except TimeoutError:
            # The first reading of the records does not end, and no wait was asked for.
            raise DeadlineExceeded(
                f"the deadline passed before {self._endpoint} was found",
                request_id=self._request_id,
                started=False,
            ) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
