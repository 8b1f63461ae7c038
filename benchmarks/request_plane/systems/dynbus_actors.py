"""dynbus as a user writes it: an actor, typed models validated on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from benchmarks.request_plane.echo import STREAMS, StepClock, make_request
from benchmarks.request_plane.nats_server import run_nats_server
from benchmarks.request_plane.system import Caller, Served
from dynbus import Actor, Arrival, EndpointClient, Relay, Reply, Runtime, handler, push_each

READY_SECONDS = 15.0


class Request(BaseModel):
    """What is asked for."""

    token_ids: list[int]
    text: str
    max_tokens: int


class Item(BaseModel):
    """One item."""

    token_ids: list[int]
    text: str
    index: int


class StepItem(Item):
    """One item of an engine step; `step` is when it was due."""

    step: float


class Echo(Actor, namespace="bench"):
    """The handlers of `echo.Echo`, with models."""

    def __init__(self) -> None:
        self._clock = StepClock()
        self._running: dict[Reply[StepItem], int] = {}
        self._engine: asyncio.Task[None] | None = None

    @handler
    async def unary(self, request: Request) -> Item:
        return Item(token_ids=[request.token_ids[0]], text="tok", index=0)

    @handler
    async def stream(self, request: Request) -> AsyncGenerator[Item, None]:
        for token_id in range(request.max_tokens):
            yield Item(token_ids=[token_id], text="tok", index=0)

    @handler
    async def stream_yielding(self, request: Request) -> AsyncGenerator[Item, None]:
        for token_id in range(request.max_tokens):
            await asyncio.sleep(0)
            yield Item(token_ids=[token_id], text="tok", index=0)

    @handler
    async def engine_steps(self, request: Request, reply: Reply[StepItem]) -> None:
        self._running[reply] = request.max_tokens
        if self._engine is None:
            self._engine = asyncio.create_task(self._run_engine())
        await reply.ended()

    async def _run_engine(self) -> None:
        """One item for each request that runs, at every step."""
        running = self._running
        while running:
            step = await self._clock.next_step()
            push_each(
                (reply, StepItem(token_ids=[left], text="tok", index=0, step=step))
                for reply, left in running.items()
            )
            for reply, left in list(running.items()):
                running[reply] = left - 1
                if left == 1 or reply.has_ended:
                    del running[reply]
                    reply.end()
        self._engine = None

    @handler
    async def stream_steps(self, request: Request) -> AsyncGenerator[StepItem, None]:
        for token_id in range(request.max_tokens):
            step = await self._clock.next_step()
            yield StepItem(token_ids=[token_id], text="tok", index=0, step=step)


@asynccontextmanager
async def serve(folder: Path) -> AsyncGenerator[Served, None]:
    async with run_nats_server(folder) as server, Runtime.connect(server.url) as runtime:
        await runtime.start(Echo)
        yield Served(server.url, server.pid)


@asynccontextmanager
async def connect(address: str) -> AsyncGenerator[Caller, None]:
    async with Runtime.connect(address) as runtime:
        component = runtime.namespace("bench").component("Echo")
        for endpoint in ("unary", *STREAMS):
            untyped = await component.endpoint(endpoint).client()
            await untyped.wait_for_instances(timeout=READY_SECONDS)
        untyped = await component.endpoint("engine_steps").client()
        yield DynbusCaller(runtime.client(Echo), untyped)


class DynbusCaller:
    """Calls through the typed client."""

    def __init__(self, echo: Echo, untyped: EndpointClient) -> None:
        self._echo = echo
        self._untyped = untyped
        self._streams: dict[str, Callable[[Request], AsyncGenerator[Item, None]]] = {
            "stream": echo.stream,
            "stream_yielding": echo.stream_yielding,
            "stream_steps": echo.stream_steps,
        }

    async def unary(self) -> None:
        await self._echo.unary(Request(**make_request(1)))

    async def stream(self, endpoint: str, max_tokens: int, on_item: Callable[[Any], None]) -> None:
        request = Request(**make_request(max_tokens))
        async with aclosing(self._streams[endpoint](request)) as items:
            async for item in items:
                on_item(item)

    async def engine_streams(
        self, count: int, max_tokens: int, on_item: Callable[[Any], None]
    ) -> None:
        def deliver(arrivals: list[Arrival[None, StepItem]]) -> None:
            for _, items, _, _ in arrivals:
                for item in items:
                    on_item(item)

        request = Request(**make_request(max_tokens))
        with Relay(deliver) as relay:
            streams = [
                await relay.open(self._echo.engine_steps(request), None) for _ in range(count)
            ]
            for stream in streams:
                await stream.ended()

    async def bytes_streams(
        self, count: int, max_tokens: int, on_item: Callable[[bytes], Any]
    ) -> None:
        def deliver(arrivals: list[Arrival[None, bytes]]) -> None:
            for _, items, _, _ in arrivals:
                for item in items:
                    on_item(item)

        request = Request(**make_request(max_tokens))
        with Relay(deliver) as relay:
            streams = [
                await relay.open(self._untyped.generate(request).raw(), None) for _ in range(count)
            ]
            for stream in streams:
                await stream.ended()

    def step_of(self, item: Any) -> float:
        return float(item.step)
