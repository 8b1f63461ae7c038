"""nats-py alone: what a careful user writes without dynbus.

Callback subscriptions, one message per item on an inbox of the call, an empty last message.
The request carries the headers that dynbus sends; JSON is read by the decoder that pydantic
uses, into dictionaries, without validation.
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nats.aio.msg import Msg
from pydantic_core import from_json, to_json

from benchmarks.request_plane.echo import STREAMS, Echo, Json, make_request
from benchmarks.request_plane.nats_server import run_nats_server
from benchmarks.request_plane.system import Caller, Served

CALL_SECONDS = 60.0

# nats-py has types in part only.
_nats: Any = importlib.import_module("nats")

# nats-py drops messages of a slow reader beyond these; a baseline that loses items is none.
_NO_LIMIT = 0


@asynccontextmanager
async def serve(folder: Path) -> AsyncGenerator[Served, None]:
    async with run_nats_server(folder) as server:
        client = await _nats.connect(server.url)
        try:
            await _subscribe(client)
            yield Served(server.url, server.pid)
        finally:
            await client.close()


async def _subscribe(client: Any) -> None:
    echo = Echo()
    streams: set[asyncio.Task[None]] = set()

    async def answer(message: Msg) -> None:
        result = await echo.unary(from_json(message.data))
        await client.publish(message.reply, to_json(result))

    def starts(endpoint: Callable[[Json], AsyncGenerator[Json, None]]) -> Callable[[Msg], Any]:
        async def start(message: Msg) -> None:
            # nats-py awaits one callback after the other: streams need a task each.
            items = endpoint(from_json(message.data))
            task = asyncio.create_task(_send(client, message.reply, items))
            streams.add(task)
            task.add_done_callback(streams.discard)

        return start

    await client.subscribe("bench.Echo.unary", queue="Echo", cb=answer)
    for endpoint in STREAMS:
        subject = f"bench.Echo.{endpoint}"
        await client.subscribe(subject, queue="Echo", cb=starts(getattr(echo, endpoint)))
    await client.flush()


async def _send(client: Any, reply: str, items: AsyncGenerator[Json, None]) -> None:
    async for item in items:
        await client.publish(reply, to_json(item))
    await client.publish(reply, b"")


@asynccontextmanager
async def connect(address: str) -> AsyncGenerator[Caller, None]:
    client = await _nats.connect(address)
    try:
        yield BareCaller(client)
    finally:
        await client.close()


def _headers() -> dict[str, str]:
    request_id = secrets.token_hex(16)
    return {
        "Dynbus-Request-Id": request_id,
        "Dynbus-Deadline": "60000",
        "Dynbus-Frames": f"1 {request_id} 524288 {request_id[:16]}",
        "traceparent": f"00-{request_id}-{request_id[:16]}-00",
    }


class BareCaller:
    """Calls by hand."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def unary(self) -> None:
        reply = await self._client.request(
            "bench.Echo.unary", to_json(make_request(1)), timeout=CALL_SECONDS, headers=_headers()
        )
        from_json(reply.data)

    async def stream(self, endpoint: str, max_tokens: int, on_item: Callable[[Any], None]) -> None:
        await self._read(endpoint, max_tokens, on_item, from_json)

    async def bytes_streams(
        self, count: int, max_tokens: int, on_item: Callable[[bytes], Any]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._read("stream_steps", max_tokens, on_item, bytes))

    async def _read(
        self,
        endpoint: str,
        max_tokens: int,
        on_item: Callable[[Any], None],
        decode: Callable[[bytes], Any],
    ) -> None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def receive(message: Msg) -> None:
            if message.data:
                on_item(decode(message.data))
            else:
                ended.set_result(None)

        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(
            inbox, cb=receive, pending_msgs_limit=_NO_LIMIT, pending_bytes_limit=_NO_LIMIT
        )
        await self._client.publish(
            f"bench.Echo.{endpoint}", to_json(make_request(max_tokens)), inbox, _headers()
        )
        await ended  # the workload bounds it
        await subscription.unsubscribe()

    def step_of(self, item: Any) -> float:
        return float(item["step"])
