"""A front end, engines and a nats-server, a process each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.request_plane.nats_server import run_nats_server

from .engines import EngineSettings
from .load import Spec
from .processes import Child, child, module


class Stack(NamedTuple):
    """What runs.

    Attributes:
        bus: the URL of the nats-server.
        http: the URL of the front end.
        engines: the process id of the first engines.
    """

    bus: str
    http: str
    broker: int
    engines: int
    front: int

    async def measure(self, kind: str, spec: Spec) -> Any:
        """Have this front end, or this bus, asked."""
        pids = {"front end": self.front, "engines": self.engines, "broker": self.broker}
        if kind == "bus":
            del pids["front end"]
        url = self.bus if kind == "bus" else self.http
        return await measure(
            kind, msgspec.structs.replace(spec, url=url, pids=pids, front=self.front)
        )


async def measure(kind: str, spec: Spec) -> Any:
    """What a process of `load` finds, with the time that it used itself."""
    async with child(module("load", kind, msgspec.json.encode(spec).decode())) as load:
        return await load.answer(600.0 + spec.seconds)


@asynccontextmanager
async def stack(
    settings: EngineSettings,
    routing: str = "kv",
    *,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> AsyncGenerator[Stack]:
    """Engines, and a front end with further options that serves them.

    Args:
        variables: of the environment of both, beside ours.
    """
    async with AsyncExitStack() as exits:
        folder = exits.enter_context(tempfile.TemporaryDirectory())
        server = await exits.enter_async_context(run_nats_server(Path(folder)))
        command = module("engines", server.url, msgspec.json.encode(settings).decode())
        environment = os.environ | (variables or {})
        started = [
            await exits.enter_async_context(child(command, environment))
            for _ in range(settings.processes)
        ]
        for engines in started:
            await engines.answer()
        front, url = await front_end(exits, server.url, routing, options, environment)
        yield Stack(server.url, url, server.pid, started[0].pid, front.pid)


async def front_end(
    exits: AsyncExitStack,
    bus: str,
    routing: str,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Child, str]:
    """`dynbus http` until `exits` are closed, and where it answers."""
    command = ["http", "--nats", bus, "--port", "0", "--routing", routing]
    command += ["--log-level", "warning", *options]
    front = await exits.enter_async_context(child(module("front", *command), environment))
    return front, (await front.line()).decode().split()[-1]
