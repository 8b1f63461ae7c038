"""What an instance serves: each of its roles is found under a component of its own, and comes and
goes while the engine runs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Final, Literal, TypeAlias

import anyio

from dynbus.actors import Runtime
from dynbus.actors.serving.instance import ServedInstance
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import InstanceName
from dynbus.kvrouter.events import KvEvent
from dynbus.kvrouter.stream import CacheMirror, KvEventPublisher

from .messages import Role, RoleState

logger = logging.getLogger(__name__)

Duty: TypeAlias = Literal["prefill", "decode", "control"]
"""What is served apart from the rest; `control` is for instances among themselves, always."""

DUTIES: Final[Mapping[Role, tuple[Duty, ...]]] = {
    "prefill": ("control", "prefill"),
    "decode": ("control", "decode"),
    "both": ("control", "prefill", "decode"),
}

DRAIN_GRACE: Final = 3600.0
"""Seconds that calls have to finish when an instance changes its role: its engine stays."""

STOP_GRACE: Final = 25.0
"""Seconds that they have at most when it stops: less than an actor's `on_stop` may take."""


class RoleEvents:
    """An engine's KV events, for the routers of each component that it is found under.

    Who comes later is told what the cache holds by then.
    """

    def __init__(self) -> None:
        self._mirror = CacheMirror()
        self._publishers: list[KvEventPublisher] = []

    def publish(self, events: Sequence[KvEvent]) -> None:
        """See `EventSink.publish`."""
        self._mirror.apply(events)
        for publisher in self._publishers:
            publisher.publish(events)

    def join(self, publisher: KvEventPublisher) -> None:
        """Publish there, too, from now on."""
        publisher.publish(list(self._mirror.state()))
        self._publishers.append(publisher)

    def leave(self, publisher: KvEventPublisher) -> None:
        """Publish there no longer."""
        self._publishers.remove(publisher)


class RoleInstance:
    """One role of an instance, as others find it.

    Args:
        duty: the role.
        endpoints: what it serves.
        metadata: what is announced of it.
        events: what its routers are to know of the cache; None for an engine without events.
        life: entered before it is announced, and left after its drain.

    Attributes:
        retire: called before its drain, while it is found still; None for nothing to do then.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: InstanceName,
        duty: Duty,
        endpoints: Iterable[Endpoint],
        metadata: Callable[[], Mapping[str, str]],
        events: RoleEvents | None,
        life: Callable[[RoleInstance], AbstractAsyncContextManager[None]],
    ) -> None:
        self.duty: Duty = duty
        self.retire: Callable[[], Awaitable[None]] | None = None
        self._runtime = runtime
        self._metadata = metadata
        self._events = events
        self._life = life
        self._exits = AsyncExitStack()
        self.instance = ServedInstance(
            runtime.bus, runtime.background, name, endpoints, self, ended=self._forgotten
        )

    def __repr__(self) -> str:
        return f"<RoleInstance {self.duty} {self.instance!r}>"

    def _forgotten(self, instance: ServedInstance) -> None:
        """The runtime does not know of it."""

    async def on_start(self) -> None:
        async with AsyncExitStack() as exits:
            if self._events is not None:
                bus = self._runtime.bus
                publisher = KvEventPublisher(
                    bus.data,
                    *self.instance.name,
                    process_status=bus.status,
                    background=bus.background,
                )
                await exits.enter_async_context(publisher)
                self._events.join(publisher)
                exits.callback(self._events.leave, publisher)
            await exits.enter_async_context(self._life(self))
            self._exits = exits.pop_all()

    def instance_metadata(self) -> Mapping[str, str]:
        return self._metadata()

    async def stop(self, grace: float) -> None:
        """Withdraw it, and let its calls finish within `grace` seconds."""
        if self.retire is not None:
            with anyio.move_on_after(grace):
                await self.retire()
        await self.instance.stop(grace)

    async def on_stop(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._exits.aclose()


class Roles:
    """The roles of an instance.

    Args:
        make: a new instance for a role, which was not started.
    """

    def __init__(self, runtime: Runtime, make: Callable[[Duty], RoleInstance]) -> None:
        self._runtime = runtime
        self._make = make
        self._serves: dict[Duty, RoleInstance] = {}
        self._leaving: set[RoleInstance] = set()
        self._changing = anyio.Lock()
        self._role: Role = "decode"
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Roles {self._role} [{len(self._leaving)} draining]>"

    @property
    def state(self) -> RoleState:
        """What is served."""
        return RoleState(self._role, [one for one in ("prefill", "decode") if one in self._serves])

    async def change(self, role: Role) -> RoleState:
        """Serve this role from now on.

        What is new is found by others when this returns. What is given up is found no more, and
        its calls finish.

        Raises:
            DynbusError: what is new cannot be served; nothing is changed then.
        """
        async with self._changing:
            wanted = DUTIES[role]
            started: dict[Duty, RoleInstance] = {}
            try:
                for duty in wanted:
                    if duty not in self._serves and not self._is_closed:
                        made = self._make(duty)
                        await made.instance.start()
                        started[duty] = made
            except BaseException:
                for one in started.values():
                    self._withdraw(one)
                raise
            self._serves |= started
            self._role = role
            kept: tuple[Duty, ...] = () if self._is_closed else wanted
            for duty, one in list(self._serves.items()):
                if duty not in kept:
                    del self._serves[duty]
                    self._withdraw(one)
            return self.state

    def _withdraw(self, one: RoleInstance) -> None:
        """Stop a role, when its calls have ended."""
        self._leaving.add(one)
        name = f"the drain of {one.instance.name}"
        self._runtime.background.start(self._drain, one, name=name)

    async def _drain(self, one: RoleInstance) -> None:
        try:
            await one.stop(DRAIN_GRACE)
        except Exception:
            logger.exception("%r did not stop cleanly", one)
        finally:
            self._leaving.discard(one)

    def report_broken(self, reason: str) -> None:
        """The engine serves nothing any longer; to be called from any thread."""
        for one in [*self._serves.values(), *self._leaving]:
            one.instance.report_broken(reason)

    async def close(self) -> None:
        """Withdraw all, and wait for their calls as long as there is time."""
        self._is_closed = True
        # Leases are settled until nobody reads any more.
        control = self._serves.pop("control", None)
        everything = [*self._serves.values(), *self._leaving]
        self._serves.clear()
        try:
            async with anyio.create_task_group() as tasks:
                for one in everything:
                    tasks.start_soon(self._close_one, one)
        finally:
            everything += [control] if control is not None else []
            with anyio.CancelScope(shield=True):
                for one in everything:
                    one.instance.stop_now()
                    await one.instance.stop(0.0)
                    await one.instance.stopped.wait()

    async def _close_one(self, one: RoleInstance) -> None:
        grace = min(self._runtime.bus.config.drain_grace, STOP_GRACE)
        try:
            with anyio.move_on_after(grace):
                await one.stop(grace)
                # One that drains already is waited for.
                await one.instance.stopped.wait()
        except Exception:
            logger.exception("%r did not stop cleanly", one)
