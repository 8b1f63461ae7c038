"""Conversations that go on soon: the engine that has one is told."""

from __future__ import annotations

from typing import Final

import msgspec

from dynbus import Draining, EndpointClient, EndpointName, Runtime, Unavailable
from dynbus.kvrouter import KvRouter
from dynbus.llm.generation import Announced, Announcement
from dynbus.spi import ComponentName

ANNOUNCE: Final = "announce"
"""The endpoint of engines that are told of it."""


class Announcer:
    """Tells the engines of a component which conversations go on soon."""

    def __init__(
        self, runtime: Runtime, component: ComponentName, client: EndpointClient, router: KvRouter
    ) -> None:
        self._runtime = runtime
        self._component = component
        self._client = client
        self._router = router

    def __repr__(self) -> str:
        return f"<Announcer {self._component}>"

    @classmethod
    async def of(cls, runtime: Runtime, component: ComponentName, router: KvRouter) -> Announcer:
        """The one for engines that a router chooses among."""
        name = EndpointName(component.namespace, component.component, ANNOUNCE)
        return cls(runtime, component, await runtime.endpoint(name).client(wait=0.0), router)

    async def announce(self, session: str, announcement: Announcement) -> Announced:
        """Have the engine to which a conversation went make its blocks ready.

        Nothing is ready, and nobody asked, where the router has sent none of it, or that engine is
        gone or cannot be told.

        Args:
            session: its name for routers.

        Raises:
            DynbusError: the engine did not answer, or does not work.
        """
        instance = self._router.instance_of(session)
        if instance is None or not self._can_be_told(instance):
            return Announced()
        try:
            data: bytes = await self._client.direct(announcement, instance).raw()
        except (Draining, Unavailable):
            # It has gone just now, and its blocks with it.
            return Announced()
        return msgspec.json.decode(data, type=Announced)

    def _can_be_told(self, instance: str) -> bool:
        known = self._runtime.within_reach(self._component)
        return any(one.id == instance and ANNOUNCE in one.record.endpoints for one in known)
