"""The roles of an instance: each is found under a component of its own, and comes and goes while
the engine runs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Final, Literal, Self, TypeAlias

import anyio
import msgspec

from dynbus import Runtime
from dynbus.kvrouter import CacheMirror, KvEvent, KvEventPublisher
from dynbus.spi import Endpoint, InstanceName, ServedInstance, monotonic

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode", "both"]
"""The role of an instance: it serves the prompts of others, requests of front ends, or both."""

Duty: TypeAlias = Literal["prefill", "decode", "control"]
"""A group of endpoints that is served apart from the rest; `control` is for instances among
themselves, always.
"""

ENDED_IDS: Final = 16
"""Of roles that have ended, which are taken for their instance still."""

DUTIES: Final[Mapping[Role, tuple[Duty, ...]]] = {
    "prefill": ("control", "prefill"),
    "decode": ("control", "decode"),
    "both": ("control", "prefill", "decode"),
}


class RoleChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """The role that an instance is to serve from now on.

    Attributes:
        grace: seconds that calls have to finish of what is given up, before other instances take
            them over; `drain_grace` of the process unless given.
    """

    role: Role
    grace: float | None = None


class RoleState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The role that an instance serves.

    Attributes:
        role: that was asked for last.
        serves: what it is found for now.
        draining: what it is not found for any more, while calls of it still run.
    """

    role: Role
    serves: list[Literal["prefill", "decode"]] = []
    draining: list[Literal["prefill", "decode"]] = []


class RoleIds:
    """The ids by which the roles of an instance are found; those that have ended for a while yet:
    others, and what is under way, may name them still.

    Args:
        own: the name of the instance itself.
    """

    def __init__(self, own: InstanceName) -> None:
        self._own = own
        self._has_given_own = False
        self._known: set[str] = set()
        self._ended: deque[str] = deque()
        self._numbers: Iterator[int] = count()

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def new(self, node: str) -> str:
        """The id of a role that is to be found under a node; the instance's own for the first one
        there that has its name.

        Of two that drain and begin at a time, each is another to everybody.
        """
        instance_id, number = self._own.instance_id, next(self._numbers)
        if node != self._own.component or self._has_given_own:
            instance_id = f"{instance_id}-{number}"
        else:
            self._has_given_own = True
        self._known.add(instance_id)
        return instance_id

    def ended(self, instance_id: str) -> None:
        """A role has stopped."""
        self._ended.append(instance_id)
        if len(self._ended) > ENDED_IDS:
            self._known.discard(self._ended.popleft())


class RoleEvents:
    """An engine's KV events, for the routers of each component that it is found under.

    Who comes later is told what the cache holds by then.
    """

    def __init__(self) -> None:
        self._cache = CacheMirror()
        self._says: list[Callable[[Sequence[KvEvent]], object]] = []

    def publish(self, events: Sequence[KvEvent]) -> None:
        """See `EventSink.publish`."""
        applied = self._cache.apply(events)
        for say in self._says:
            say(applied)

    @contextmanager
    def joined(self, publisher: KvEventPublisher) -> Generator[None]:
        """Publish there, too, within the block."""
        say = partial(publisher.loop_sink(self._cache).publish, dp_rank=0)
        self._says.append(say)
        try:
            yield
        finally:
            self._says.remove(say)


class RoleInstance:
    """One role of an instance, as others find it.

    Args:
        duty: the role.
        endpoints: what it serves.
        metadata: what is announced of it.
        events: what its routers are to know of the cache; None for an engine without events.
        life: entered before it is announced, and left after its drain.
        ended: called when it has stopped.

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
        ended: Callable[[ServedInstance], None],
    ) -> None:
        self.duty: Duty = duty
        self.retire: Callable[[], Awaitable[None]] | None = None
        self._runtime = runtime
        self._metadata = metadata
        self._events = events
        self._life = life
        self._exits = AsyncExitStack()
        self.instance = ServedInstance(
            runtime.bus,
            runtime.background,
            name,
            endpoints,
            self,
            has_other=runtime.has_other,
            ended=ended,
        )

    def __repr__(self) -> str:
        return f"<RoleInstance {self.duty} {self.instance!r}>"

    async def on_start(self) -> None:
        async with AsyncExitStack() as exits:
            if self._events is not None:
                bus = self._runtime.bus
                publisher = KvEventPublisher(
                    bus.data,
                    *self.instance.name,
                    bus=bus,
                    background=bus.background,
                )
                await exits.enter_async_context(publisher)
                exits.enter_context(self._events.joined(publisher))
            await exits.enter_async_context(self._life(self))
            self._exits = exits.pop_all()

    def instance_metadata(self) -> Mapping[str, str]:
        return self._metadata()

    async def stop(self, grace: float) -> None:
        """Withdraw it, and let its calls finish within `grace` seconds."""
        until = monotonic() + grace
        if self.retire is not None:
            with anyio.move_on_after(grace):
                await self.retire()
        await self.instance.stop(max(0.0, until - monotonic()))

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
        """The role that is served."""
        leaving = {one.duty for one in self._leaving}
        return RoleState(
            self._role,
            [one for one in ("prefill", "decode") if one in self._serves],
            [one for one in ("prefill", "decode") if one in leaving],
        )

    @property
    def shown(self) -> InstanceName | None:
        """Under which name operators look for what the instance does; decode goes first."""
        for duty in ("decode", "prefill"):
            if duty in self._serves:
                return self._serves[duty].instance.name
        return None

    async def change(self, role: Role, grace: float) -> RoleState:
        """Serve this role from now on.

        What is new is found by others when this returns. What is given up is found no more, and
        its calls finish within `grace` seconds; those that do not end with `Draining`, as at the
        stop of any instance, and are retried or continued by other instances.

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
                    self._withdraw(one, 0.0)
                raise
            self._serves |= started
            self._role = role
            kept: tuple[Duty, ...] = ("control",) if self._is_closed else wanted
            for duty, one in list(self._serves.items()):
                if duty not in kept:
                    del self._serves[duty]
                    self._withdraw(one, grace)
            return self.state

    def _withdraw(self, one: RoleInstance, grace: float) -> None:
        """Stop a role, when its calls have ended."""
        self._leaving.add(one)
        name = f"the drain of {one.instance.name}"
        self._runtime.background.start(self._leave, one, grace, name=name)

    async def _leave(self, one: RoleInstance, grace: float) -> None:
        try:
            await one.stop(grace)
        except Exception:
            logger.exception("%r did not stop cleanly", one)
        finally:
            if one.instance.stopped.is_set():
                self._leaving.discard(one)

    def report_broken(self, reason: str) -> None:
        """The engine serves nothing any longer; to be called from any thread."""
        for one in [*self._serves.values(), *self._leaving]:
            one.instance.report_broken(reason)

    async def drain(self, grace: float) -> None:
        """Withdraw all, and let their calls finish within `grace` seconds."""
        self._is_closed = True
        # Leases are settled until nobody reads any more.
        leaving = [one for duty, one in self._serves.items() if duty != "control"]
        self._serves = {duty: one for duty, one in self._serves.items() if duty == "control"}
        self._leaving.update(leaving)
        async with anyio.create_task_group() as tasks:
            for one in list(self._leaving):
                tasks.start_soon(self._drain_one, one, grace)

    async def _drain_one(self, one: RoleInstance, grace: float) -> None:
        with anyio.move_on_after(grace):
            await self._leave(one, grace)
            # One that drains already is waited for.
            await one.instance.stopped.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Withdraw what is left at once."""
        self._is_closed = True
        # Leases are settled until nobody reads any more.
        control = self._serves.pop("control", None)
        everything = [*self._serves.values(), *self._leaving]
        self._serves.clear()
        everything += [control] if control is not None else []
        with anyio.CancelScope(shield=True):
            for one in everything:
                one.instance.stop_now()
            for one in everything:
                try:
                    await one.instance.stop(0.0)
                except Exception:
                    logger.exception("%r did not stop cleanly", one)
                await one.instance.stopped.wait()
