"""Conversations that go on soon: the engine that has one is told."""

from __future__ import annotations

from operator import attrgetter
from typing import Final

import anyio
import msgspec

from dynbus import Draining, DynbusError, EndpointClient, EndpointName, Runtime, Unavailable
from dynbus.kvrouter import KvRouter
from dynbus.llm.generation import Announced, Announcement
from dynbus.spi import ComponentName

ANNOUNCE: Final = "announce"
"""The endpoint of engines that are told of it."""

MOST_ASKED: Final = 256
"""Engines that are all asked for a conversation of which it is not known where it is."""


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

        All engines are asked where this router has sent none of it, or that engine is gone: another
        front end may have sent it, and another process have its files. Nothing is ready, and nobody
        asked, where there are more than `MOST_ASKED`.

        Args:
            session: its name for routers.

        Returns:
            The answer of the engine that has most of it.

        Raises:
            DynbusError: no engine answered, or works.
        """
        known = self._runtime.within_reach(self._component)
        asked = [one.id for one in known if ANNOUNCE in one.record.endpoints]
        instance = self._router.instance_of(session)
        if instance in asked:
            asked = [instance]
        elif len(asked) > MOST_ASKED:
            return Announced()
        answers: list[Announced] = []
        errors: list[DynbusError] = []

        async def ask(instance: str) -> None:
            try:
                data: bytes = await self._client.direct(announcement, instance).raw()
                answers.append(msgspec.json.decode(data, type=Announced))
            except (Draining, Unavailable):
                # It has gone just now, and its blocks with it.
                answers.append(Announced())
            except DynbusError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for one in asked:
                tasks.start_soon(ask, one)
        if errors and not answers:
            raise errors[0]
        return max(answers, key=attrgetter("tokens"), default=Announced())
