"""Where the stories play: whoever serves, whoever calls, and what is between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from tests.conditions import eventually

from dynbus import Runtime
from dynbus.actors.chaos.proxy import Proxy
from dynbus.bus.serving.execution import Execution
from dynbus.bus.serving.server import InstanceServer

from .observation import begun_at, leftovers, no_handler_runs
from .processes import Process
from .workload import ACTORS, Relay, Source, Top


class Stage:
    """Two runtimes of this process: one serves all actors of `workload`, the other calls them."""

    def __init__(self, serving: Runtime, calling: Runtime) -> None:
        self.serving = serving
        self.calling = calling
        self.source = calling.client(Source)
        self.relay = calling.client(Relay)
        self.top = calling.client(Top)

    @property
    def server(self) -> InstanceServer:
        """What serves `Source`."""
        servers = [instance.server for instance in self.serving.instances.values()]
        return next(server for server in servers if server.name.component == "Source")

    async def has_begun(self, tag: str) -> None:
        """Wait until the call of this tag runs at `Source`."""
        await eventually(begun_at(self.source, tag))

    async def has_load(self, calls: int) -> None:
        """Wait until so many calls run or wait at `Source`."""
        await eventually(
            lambda: self.server.execution.load == calls, what=f"{self.server!r}: {calls} calls"
        )

    async def has_load_of(self, calls: int) -> None:
        """Wait until at least so many calls run or wait at `Source`."""
        await eventually(
            lambda: self.server.execution.load >= calls, what=f"{self.server!r}: {calls} calls"
        )

    async def is_quiet(self, within: float = 2.0) -> float:
        """Wait until no handler runs and nothing is left of any call.

        Returns the seconds until the last handler had been left.
        """
        took = await eventually(no_handler_runs(self.source), within, what="no handler runs")
        await eventually(
            lambda: not leftovers(self.serving) and not leftovers(self.calling),
            within,
            what=f"{leftovers(self.serving)}, {leftovers(self.calling)}",
        )
        assert handler_tasks() == []
        return took


def handler_tasks() -> list[str]:
    """The handlers that run as tasks of this loop."""
    coroutines = [str(task.get_coro()) for task in asyncio.all_tasks()]
    return [coroutine for coroutine in coroutines if f"{Execution.__name__}._" in coroutine]


@asynccontextmanager
async def set_stage(url: str, **settings: Any) -> AsyncGenerator[Stage]:
    """Two runtimes at a server, once each knows what the other serves.

    Args:
        settings: fields of `BusConfig` for both.
    """
    async with (
        Runtime.connect(url, drain_grace=0.1, **settings) as serving,
        Runtime.connect(url, **settings) as calling,
    ):
        for actor in ACTORS.values():
            await serving.start(actor)
        for component in ACTORS:
            endpoint = calling.namespace("scenario").component(component).endpoint("count")
            await (await endpoint.client()).wait_for_instances(timeout=60.0)
        yield Stage(serving, calling)


class Link:
    """A runtime that calls `Source` in a worker process, and a proxy on the way of one of them."""

    def __init__(self, proxy: Proxy, worker: Process, runtime: Runtime) -> None:
        self.proxy = proxy
        self.worker = worker
        self.runtime = runtime
        self.source = runtime.client(Source)
