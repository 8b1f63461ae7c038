"""grpc.aio with handlers registered by hand and JSON in place of protobuf."""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from benchmarks.request_plane.echo import STREAMS, Echo, Json, make_request
from benchmarks.request_plane.system import Caller, Served

STOP_SECONDS = 1.0

# grpcio carries no types.
_grpc: Any = importlib.import_module("grpc")
_aio: Any = importlib.import_module("grpc.aio")


@asynccontextmanager
async def serve(folder: Path) -> AsyncGenerator[Served, None]:
    echo = Echo()

    async def unary(request: Json, context: object) -> Json:
        return await echo.unary(request)

    def streaming(endpoint: Callable[[Json], AsyncIterator[Json]]) -> Any:
        async def stream(request: Json, context: object) -> AsyncIterator[Json]:
            async for item in endpoint(request):
                yield item

        return _grpc.unary_stream_rpc_method_handler(stream, from_json, to_json)

    handlers = {"unary": _grpc.unary_unary_rpc_method_handler(unary, from_json, to_json)}
    handlers |= {name: streaming(getattr(echo, name)) for name in STREAMS}
    server = _aio.server()
    server.add_generic_rpc_handlers((_grpc.method_handlers_generic_handler("Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Served(f"127.0.0.1:{port}")
    finally:
        await server.stop(STOP_SECONDS)


@asynccontextmanager
async def connect(address: str) -> AsyncGenerator[Caller, None]:
    async with _aio.insecure_channel(address) as channel:
        yield GrpcCaller(channel)


class GrpcCaller:
    """Calls through multi-callables."""

    def __init__(self, channel: Any) -> None:
        self._unary = channel.unary_unary("/Echo/unary", to_json, from_json)
        self._streams = {
            name: channel.unary_stream(f"/Echo/{name}", to_json, from_json) for name in STREAMS
        }

    async def unary(self) -> None:
        await self._unary(make_request(1))

    async def stream(self, endpoint: str, max_tokens: int, on_item: Callable[[Any], None]) -> None:
        async for item in self._streams[endpoint](make_request(max_tokens)):
            on_item(item)

    def step_of(self, item: Any) -> float:
        return float(item["step"])
