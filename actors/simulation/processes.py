"""The processes of a simulation: each has a runtime, and may be killed, frozen or cut off."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import anyio

from dynbus.actors.runtime import Actor, ActorInstance, Runtime
from dynbus.actors.testing import TestKit
from dynbus.bus.errors import NoInstances, Unavailable
from dynbus.bus.memory.bus import MemoryConnection

from .loop import SimulatedLoop, process

T = TypeVar("T")

BURIAL_SECONDS: Final = 60.0
"""Seconds for which the tasks of a dead process may clean up."""
BURIAL_PAUSE: Final = 0.1
"""Seconds between two looks at what is left of them."""
KNOWN_SECONDS: Final = 15.0
"""Seconds in which the kit's clients are to know a new instance, unless a fault is in the way."""


class Process:
    """One process of a simulation.

    Attributes:
        runtime: in which its actors run.
        instances: the actors that it serves; of one that was killed none.
        served: those that it has ever served.
        is_dead: whether it was killed: nothing of it runs any more.
        is_frozen: whether it stands still.
        is_leaving: whether it ends, or has ended, by itself.
    """

    def __init__(self, number: int, loop: SimulatedLoop) -> None:
        self.number = number
        self.is_dead = False
        self.is_frozen = False
        self.is_leaving = False
        self.instances: list[ActorInstance] = []
        self.served: list[ActorInstance] = []
        self._loop = loop
        self._runtime: Runtime | None = None
        self._context = contextvars.copy_context()
        self._context.run(process.set, self)

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else "frozen" if self.is_frozen else "runs"
        state = "leaves" if self.is_leaving else state
        return f"<Process {self.number} [{state} | instances: {len(self.instances)}]>"

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None, "it is opened before anybody has it"
        return self._runtime

    @property
    def data(self) -> MemoryConnection:
        """The connection of its calls and results."""
        return _of_memory(self.runtime.bus.data)

    @property
    def control(self) -> MemoryConnection:
        """The connection of its control lane."""
        return _of_memory(self.runtime.bus.lane.connection)

    @property
    def connections(self) -> tuple[MemoryConnection, MemoryConnection]:
        """Both."""
        return self.data, self.control

    @property
    def groups(self) -> Sequence[Sequence[MemoryConnection]]:
        """Those that are at one server: both."""
        return (self.connections,)

    async def open(self, make: Callable[[], Awaitable[Runtime]]) -> None:
        """Make its runtime, as a part of it."""
        self._runtime = await self.run(make)

    async def run(self, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """The result of `function`, which runs as a part of this process.

        Raises:
            Exception: what it raised.
        """

        async def carry_out() -> T:
            return await function(*args, **options)

        task: asyncio.Task[T] = self._loop.create_task(carry_out(), context=self._context.copy())
        return await task

    def kill(self) -> None:
        """Do what kill -9 does: its connections are gone, and nothing of it runs any more."""
        self.is_dead = True
        self._loop.hold(self)
        for connection in self.connections:
            connection.disconnect()

    async def leave(self) -> None:
        """End as a process does that is told to: its instances drain first."""
        self.is_leaving = True
        await self.run(self.runtime.close)

    def freeze(self) -> None:
        """Do what SIGSTOP does; the system goes on holding its connections."""
        self.is_frozen = True
        self._loop.hold(self)

    def thaw(self) -> None:
        """Do what SIGCONT does."""
        self.is_frozen = False
        if not self.is_dead:
            self._loop.release(self)

    async def bury(self) -> None:
        """End the tasks of a process that was killed, which nobody hears of any more."""
        for connection in self.connections:
            await connection.close()
        self._loop.release(self)
        end = self._loop.time() + BURIAL_SECONDS
        while (tasks := self._loop.tasks_of(self)) and self._loop.time() < end:
            for task in tasks:
                # One that has not begun would never await what it was made for.
                if not _is_new(task.get_coro()):
                    task.cancel()
            await asyncio.wait(tasks, timeout=BURIAL_PAUSE)


def _is_new(coroutine: object) -> bool:
    # The loop closes generators in tasks of their own, which are made of no coroutine.
    if not inspect.iscoroutine(coroutine):
        return False
    return inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED


def _of_memory(connection: object) -> MemoryConnection:
    assert isinstance(connection, MemoryConnection), "a kit's connections are in memory"
    return connection


class SimulatedKit(TestKit):
    """A kit whose runtimes are processes of a simulation.

    Attributes:
        processes: those that were opened; the first is that of `client`.
        way: of each connection, see `MemoryConnection`.
        orphans: the tasks that are left of processes that were closed.
    """

    def __init__(
        self, way: Callable[[], float] | None, *, seed: int, settings: Mapping[str, Any]
    ) -> None:
        super().__init__(seed=seed, **settings)
        self.bus.is_cluster = True
        self.processes: list[Process] = []
        self.orphans: list[str] = []
        self.way = way
        self._numbers = itertools.count()

    async def runtime(self, **settings: Any) -> Runtime:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop), "it is used by `simulate`"
        opened = Process(next(self._numbers), loop)
        await opened.open(lambda: TestKit.runtime(self, **settings))
        for connection in opened.connections:
            connection.way = self.way
        self.processes.append(opened)
        return opened.runtime

    async def start(
        self,
        actor: type[Actor],
        /,
        *,
        instance_id: str = "",
        node: str = "",
        namespace: str = "",
        **arguments: Any,
    ) -> ActorInstance:
        own = await self.runtime()
        home = self.process_of(own)
        names = {"instance_id": instance_id, "node": node, "namespace": namespace}
        try:
            instance = await home.run(own.start, actor, **names, **arguments)
        except BaseException:
            # As a process of its own ends that cannot start.
            home.kill()
            raise
        home.instances.append(instance)
        home.served.append(instance)
        self.started[instance.id] = instance
        if instance.announced:
            with anyio.move_on_after(KNOWN_SECONDS), suppress(NoInstances, Unavailable):
                await self.caller.discovery.wait_for_instance(instance.name)
        return instance

    async def kill(self, instance: ActorInstance) -> None:
        self.process_of(instance.actor.runtime).kill()
        await asyncio.sleep(0)

    def process_of(self, runtime: Runtime) -> Process:
        """The process of a runtime of this kit."""
        return next(one for one in self.processes if one.runtime is runtime)

    def alive(self) -> Iterator[Process]:
        """The processes that were not killed, and do not leave."""
        return (one for one in self.processes if not (one.is_dead or one.is_leaving))

    async def bury(self) -> None:
        """End what is left of the processes that were killed, once the kit is closed."""
        for one in self.processes:
            if one.is_dead:
                await one.bury()

    async def _close(self) -> None:
        """Close what lives."""
        for one in self.processes:
            one.thaw()
        self._runtimes = [one for one in self._runtimes if not self.process_of(one).is_dead]
        await super()._close()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        closed = [one for one in self.processes if not one.is_dead]
        self.orphans = [repr(task) for one in closed for task in loop.tasks_of(one)]
