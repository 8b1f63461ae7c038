"""The test kit: actors on an in-memory bus, on a clock that jumps.

    from dynbus.testing import TestKit, run

    def test_shouter_shouts():
        async def story():
            async with TestKit() as kit:
                await kit.start(Shouter)
                return [word.text async for word in kit.client(Shouter).generate(Prompt(text="a"))]

        assert run(story()) == ["A"]

No server, no sleeping: a test of a 30-second timeout takes some 50 ms, most of them for the
heartbeats in between, and a run repeats exactly. What servers and networks do wrong, `kit.bus`
does on request.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar, Unpack

import anyio

from dynbus.bus.bus import Bus
from dynbus.bus.config import load_config
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.telemetry.telemetry import Telemetry

from .calling.options import ClientOptions
from .calling.routing import Routing
from .runtime import Actor, ActorInstance, Runtime

A = TypeVar("A", bound=Actor)


class TestKit:
    """A bus in memory with the actors of one test. Use it with `async with`.

    Every instance gets a runtime of its own, as it would have a process of its own; clients
    share one more.

    Args:
        seed: of every random choice of the bus.
        telemetry: observes every runtime's calls, to test spans and metrics.
        settings: fields of `BusConfig` for every runtime.

    Attributes:
        bus: the in-memory bus, with its faults.
        started: the instances that were started, by id.
    """

    __test__ = False

    def __init__(
        self, *, seed: int = 0, telemetry: Telemetry | None = None, **settings: Any
    ) -> None:
        self.bus = MemoryBus(seed=seed)
        self._telemetry = telemetry
        self._config = load_config(settings, environment={})
        self._caller: Runtime | None = None
        self._runtimes: list[Runtime] = []
        self._closing: asyncio.Task[None] | None = None
        self.started: dict[str, ActorInstance] = {}

    async def __aenter__(self) -> TestKit:
        self._caller = await self.runtime()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.bus.running:
            self.bus.start()
        # The caller goes first: nobody waits then, and the drains are short.
        # A task of its own: to cancel the block again does not undo it.
        self._closing = asyncio.get_running_loop().create_task(self._close())
        with anyio.CancelScope(shield=True):
            await asyncio.shield(self._closing)

    @property
    def caller(self) -> Runtime:
        """The runtime of `client`.

        Raises:
            RuntimeError: outside of the `async with`.
        """
        if self._caller is None:
            raise RuntimeError("use the kit with `async with TestKit() as kit`")
        return self._caller

    async def runtime(self) -> Runtime:
        """One more process on the bus; closed with the kit."""
        data, control = await self.bus.connect(), await self.bus.connect()
        runtime = await Runtime.over(await Bus.over(self._config, data, control, self._telemetry))
        self._runtimes.append(runtime)
        return runtime

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
        """Start an actor, see `Runtime.start`; wait until the kit's clients know it, unless it is
        not announced.

        Raises:
            ConfigError: the class or an argument is not usable.
            Exception: what `on_start` raised.
        """
        runtime = await self.runtime()
        instance = await runtime.start(
            actor, instance_id=instance_id, node=node, namespace=namespace, **arguments
        )
        if instance.announced:
            await self.caller.discovery.wait_for_instance(instance.name)
        self.started[instance.id] = instance
        return instance

    def client(
        self,
        actor: type[A],
        *,
        node: str = "",
        namespace: str = "",
        routing: Routing | None = None,
        **options: Unpack[ClientOptions],
    ) -> A:
        """A client of an actor, outside of any instance; see `Runtime.client`."""
        return self.caller.client(actor, node=node, namespace=namespace, routing=routing, **options)

    async def kill(self, instance: ActorInstance) -> None:
        """Do what kill -9 does to an instance's process: its connections are gone, at once."""
        runtime = instance.actor.runtime
        for connection in (runtime.bus.data, runtime.bus.lane.connection):
            connection.disconnect()  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    async def _close(self) -> None:
        for runtime in self._runtimes:
            for connection in (runtime.bus.data, runtime.bus.lane.connection):
                connection.reconnect()  # type: ignore[attr-defined]
        for runtime in self._runtimes:
            await runtime.close()
