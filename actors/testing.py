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
import math
from datetime import UTC, datetime
from typing import Any, Final, TypeVar, Unpack

import anyio

from dynbus.bus.bus import Bus
from dynbus.bus.clock import JumpingLoop, unix_time
from dynbus.bus.config import load_config
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.protocol.seconds import seconds_of
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.bus.work_queue import CLOCK_AGE

from .calling.options import ClientOptions
from .calling.routing import Routing
from .runtime import Actor, ActorInstance, Runtime
from .serving.schedule_runner import ScheduleRunner

A = TypeVar("A", bound=Actor)

BEFORE_DUE: Final = 1.0
"""Seconds before a firing at which time goes on as usual, so that it is noticed that it leapt."""
SETTLED_AFTER: Final = 1.0
"""Seconds after which it is looked again whether anybody is busy."""


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
        self._settings = settings
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

    async def runtime(self, **settings: Any) -> Runtime:
        """One more process on the bus; closed with the kit.

        Args:
            settings: of the bus, which go before those of the kit, such as its `zone`.

        Raises:
            ConfigError: there is no such setting, or a value is not usable.
        """
        config = load_config({**self._settings, **settings}, environment={})
        data, control = await self.bus.connect(), await self.bus.connect()
        runtime = await Runtime.over(await Bus.over(config, data, control, self._telemetry))
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

    def now(self) -> datetime:
        """The time of day on the kit's clock, in UTC; `time.time()` tells the real one."""
        return datetime.fromtimestamp(unix_time(), UTC)

    async def pass_time(self, time: float | str) -> None:
        """Let time go by, and the hours in which nothing is due in next to none.

        While no job is in a queue and no `sleep` or timeout outside of the library runs, the time
        of day is set forward to shortly before the next firing of a schedule. What is kept for a
        stated time, as leases and results of jobs are, does not age by that. A firing that is due
        at the very end runs as time goes on: pass a second more to have it too.

        Args:
            time: seconds, or text such as `"90m"` or `"7d"`.

        Raises:
            ConfigError: `time` is neither.
            RuntimeError: the clock is the real one: this is for the inside of `dynbus.testing.run`.
        """
        loop = asyncio.get_running_loop()
        if not isinstance(loop, JumpingLoop):
            raise RuntimeError("pass_time needs a virtual clock: run the test with testing.run")
        end = unix_time() + seconds_of(time, "pass_time(time)")
        # Who comes at the end sees records that were renewed a moment ago by the time of day too.
        last_leap = end - 2 * self._config.lease_ttl
        is_settled = False
        while (left := end - unix_time()) > 0:
            is_idle = is_settled and not self._has_jobs() and not loop.has_foreign_timers()
            leap = min(self._next_firing() - BEFORE_DUE, last_leap) - unix_time()
            if is_idle and leap >= CLOCK_AGE:
                loop.set_forward += leap
                for schedule in self._schedules():
                    schedule.look_again()
                pause = BEFORE_DUE + SETTLED_AFTER
            else:
                pause = min(SETTLED_AFTER, left)
            loop.expect(pause)
            await anyio.sleep(pause)
            await loop.everything_waits()
            is_settled = True

    def _schedules(self) -> list[ScheduleRunner]:
        return [one for instance in self.started.values() for one in instance.schedules]

    def _next_firing(self) -> float:
        """The time when the next of all schedules is due, in Unix seconds; infinity without any."""
        now = unix_time()
        return min((one.after(now) for one in self._schedules()), default=math.inf)

    def _has_jobs(self) -> bool:
        return any(
            stream.config.work_queue and stream.info(unix_time()).messages
            for stream in self.bus.jetstream.streams.values()
        )

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
