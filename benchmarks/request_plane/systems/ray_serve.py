"""Ray Serve deployment handles: one replica, no HTTP proxy."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.request_plane.echo import Echo, make_request
from benchmarks.request_plane.system import Caller, Served

READY_SECONDS = 60.0

if importlib.util.find_spec("ray") is None:
    raise ImportError("No module named 'ray'")


@asynccontextmanager
async def serve(folder: Path) -> AsyncGenerator[Served, None]:
    token = folder / "token"
    await asyncio.to_thread(token.write_text, secrets.token_hex(32))
    ray, ray_serve = _import_with(token)
    await asyncio.to_thread(_start, ray, ray_serve)
    try:
        yield Served(f"{ray.get_runtime_context().gcs_address} {token}")
    finally:
        await asyncio.to_thread(ray.shutdown)


def _import_with(token: Path) -> tuple[Any, Any]:
    """`ray` and `ray.serve`, which read how to authenticate while they are imported.

    Ray listens on every interface and wants a token. Both ends get one of this run's own,
    instead of the one that Ray would leave in the home folder.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    return importlib.import_module("ray"), importlib.import_module("ray.serve")


def _start(ray: Any, ray_serve: Any) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray_serve.start(http_options={"location": "NoServer"})
    deployment = ray_serve.deployment(Echo, max_ongoing_requests=1024)
    ray_serve.run(deployment.bind(), name="bench", route_prefix=None)


@asynccontextmanager
async def connect(address: str) -> AsyncGenerator[Caller, None]:
    gcs_address, token = address.split(" ", 1)
    ray, ray_serve = _import_with(Path(token))
    await asyncio.to_thread(ray.init, address=gcs_address, log_to_driver=False)
    caller = RayCaller(ray_serve.get_app_handle("bench"))
    try:
        async with asyncio.timeout(READY_SECONDS):
            await caller.unary()
        yield caller
    finally:
        await asyncio.to_thread(ray.shutdown)


class RayCaller:
    """Calls through a deployment handle."""

    def __init__(self, handle: Any) -> None:
        self._unary = handle.unary
        self._streams = handle.options(stream=True)

    async def unary(self) -> None:
        await self._unary.remote(make_request(1))

    async def stream(self, endpoint: str, max_tokens: int, on_item: Callable[[Any], None]) -> None:
        async for item in getattr(self._streams, endpoint).remote(make_request(max_tokens)):
            on_item(item)

    def step_of(self, item: Any) -> float:
        return float(item["step"])
