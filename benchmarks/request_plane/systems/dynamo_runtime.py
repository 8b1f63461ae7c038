"""NVIDIA Dynamo's Python bindings: TCP request plane, file discovery, no etcd."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.request_plane.echo import STREAMS, Echo, Json, make_request
from benchmarks.request_plane.system import Caller, Served

READY_SECONDS = 30.0
STOP_SECONDS = 5.0

# The bindings carry no types.
_runtime: Any = importlib.import_module("dynamo.runtime")


def _make_runtime(folder: str) -> Any:
    os.environ["DYN_FILE_KV"] = folder
    return _runtime.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")


async def _await(future: Any) -> None:
    await future


@asynccontextmanager
async def serve(folder: Path) -> AsyncGenerator[Served, None]:
    runtime = _make_runtime(str(folder))
    echo = Echo()

    async def unary(request: Json) -> AsyncIterator[Json]:
        yield await echo.unary(request)

    def start(name: str, endpoint_handler: Any) -> asyncio.Task[None]:
        endpoint = runtime.endpoint(f"bench.echo.{name}")
        return asyncio.create_task(_await(endpoint.serve_endpoint(endpoint_handler)))

    endpoints = [start("unary", unary)]
    endpoints += [start(name, getattr(echo, name)) for name in STREAMS]
    try:
        yield Served(str(folder))
    finally:
        runtime.shutdown()
        await asyncio.wait(endpoints, timeout=STOP_SECONDS)


@asynccontextmanager
async def connect(address: str) -> AsyncGenerator[Caller, None]:
    runtime = _make_runtime(address)
    clients: dict[str, Any] = {}
    for name in ("unary", *STREAMS):
        clients[name] = await runtime.endpoint(f"bench.echo.{name}").client()
        async with asyncio.timeout(READY_SECONDS):
            await clients[name].wait_for_instances()
    try:
        yield DynamoCaller(clients)
    finally:
        runtime.shutdown()


class DynamoCaller:
    """Calls through the bindings; a unary call is a stream of one item there."""

    def __init__(self, clients: dict[str, Any]) -> None:
        self._clients = clients

    async def unary(self) -> None:
        async for _ in await self._clients["unary"].generate(make_request(1), annotated=False):
            pass

    async def stream(self, endpoint: str, max_tokens: int, on_item: Callable[[Any], None]) -> None:
        client = self._clients[endpoint]
        async for item in await client.generate(make_request(max_tokens), annotated=False):
            on_item(item)

    def step_of(self, item: Any) -> float:
        return float(item["step"])
