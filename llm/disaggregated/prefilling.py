"""Prefill instances, as a decode instance asks them: by a router, or by an offer for a job."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, contextmanager
from typing import Protocol

import msgspec

from dynbus import DynbusError, Instance, NoInstances, Route, RouteObserver, RouteRequest
from dynbus.kvrouter import KvRouter
from dynbus.llm.hand_over.messages import Prefilled, PrefillRequest
from dynbus.llm.hand_over.observing import HandOverFigures
from dynbus.llm.hand_over.part_reader import PartReader
from dynbus.llm.hand_over.sink import Limits, Origin

from .choosing import PrefillChoice


class Prefilling(Protocol):
    """A client of prefill instances."""

    def prefill(self, request: PrefillRequest, /) -> AsyncGenerator[Prefilled, None]: ...


class PrefillInstances(Origin):
    """The prefill instances of a component.

    Args:
        client: of theirs, routed by `routing`.
        model: the fingerprint of the decode instance's.
    """

    def __init__(
        self,
        client: Prefilling,
        routing: PrefillRouting,
        reader: PartReader,
        limits: Limits,
        figures: HandOverFigures,
        model: str,
    ) -> None:
        self.reader = reader
        self.limits = limits
        self.figures = figures
        self._client = client
        self._routing = routing
        self._model = model

    async def ask(self, request: PrefillRequest, instance: str) -> AsyncGenerator[Prefilled, None]:
        """See `Origin.ask`."""
        request = msgspec.structs.replace(request, model=self._model)
        with self._routing.computed_by(request.hand_over, instance):
            async with aclosing(self._client.prefill(request)) as items:
                async for item in items:
                    yield item


class PrefillRouting:
    """A router of prompts that are computed while their first items come.

    Args:
        choice: knows who can compute prompts for this instance.
    """

    route_timeout: float | None = None

    def __init__(self, router: KvRouter, choice: PrefillChoice) -> None:
        self._router = router
        self._choice = choice
        self._takers: dict[str, str] = {}

    @contextmanager
    def computed_by(self, hand_over: str, instance: str) -> Generator[None]:
        """Have the instance compute a prompt that has taken its job; any where it is empty. The
        router learns of it, and can say why."""
        if instance:
            self._takers[hand_over] = instance
        try:
            yield
        finally:
            self._takers.pop(hand_over, None)

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        """See `Router.route`.

        Raises:
            NoInstances: there is none that can compute prompts for this one.
        """
        usable = self._choice.usable(instances)
        wanted: PrefillRequest = request.request
        if taker := self._takers.get(wanted.hand_over):
            usable = [one for one in usable if one.id == taker]
        if not usable:
            raise NoInstances(f"no other instance serves {request.endpoint}", started=False)
        route = await self._router.route(request, usable)
        return route if route.observer is None else route._replace(observer=_Whole(route.observer))


class _Whole:
    """Says nothing of first items: the prompt is computed when the call is over."""

    def __init__(self, observer: RouteObserver) -> None:
        self._observer = observer

    def started(self) -> None:
        self._observer.started()

    def first_item(self) -> None:
        """Its prompt is not computed yet."""

    def ended(self, error: DynbusError | None) -> None:
        self._observer.ended(error)
