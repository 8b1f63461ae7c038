"""The servers that are compared: each serves the same stream of events at `/stream`.

An engine's step is a clock that has one event for every open stream, 20 times a second. `task`
wakes a task for each stream, which writes its event as the server's documentation shows; `step`
writes all events from the callback of the step.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvloop

INTERVAL = 0.05
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1763800000,"model":"smollm2-135m-instruct","choices":[{"index":0,'
    b'"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Engine:
    """Steps for all streams that are open."""

    def __init__(self) -> None:
        self.streams: set[Callable[[], object]] = set()
        self.started = False

    def start(self) -> None:
        if not self.started:
            self.started = True
            self._loop = asyncio.get_running_loop()
            self._next = self._loop.time()
            self._step()

    def _step(self) -> None:
        self._next += INTERVAL
        self._loop.call_at(self._next, self._step)
        for write in list(self.streams):
            write()


engine = Engine()
by_step = "step" in sys.argv


async def asgi(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        message = await receive()
        while message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
            message = await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    engine.start()
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    message = {"type": "http.response.body", "body": EVENT, "more_body": True}
    await send(message)
    if by_step:

        def write() -> None:
            # A server whose `send` ends without waiting needs no task.
            try:
                send(message).send(None)  # type: ignore[attr-defined]
            except StopIteration:
                return

        engine.streams.add(write)
        while (await receive())["type"] != "http.disconnect":
            pass
        engine.streams.discard(write)
        return
    news = asyncio.Event()
    engine.streams.add(news.set)

    async def feed() -> None:
        while True:
            await news.wait()
            news.clear()
            await send(message)

    feeding = asyncio.create_task(feed())
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    finally:
        feeding.cancel()
        engine.streams.discard(news.set)


def run_aiohttp(port: int) -> None:
    from aiohttp import web

    async def stream(request: web.Request) -> web.StreamResponse:
        engine.start()
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(EVENT)
        if by_step:
            transport = request.transport
            assert transport is not None
            chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)

            def write() -> None:
                transport.write(chunk)

            engine.streams.add(write)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                engine.streams.discard(write)
        news = asyncio.Event()
        engine.streams.add(news.set)
        try:
            while True:
                await news.wait()
                news.clear()
                await response.write(EVENT)
        finally:
            engine.streams.discard(news.set)

    app = web.Application()
    app.router.add_post("/stream", stream)
    web.run_app(
        app,
        host="127.0.0.1",
        port=port,
        access_log=None,
        handler_cancellation=True,
        loop=uvloop.new_event_loop(),
        backlog=4096,
    )


def run_uvicorn(port: int, http: Any) -> None:
    import uvicorn

    uvicorn.run(
        asgi,
        host="127.0.0.1",
        port=port,
        http=http,
        loop="uvloop",
        log_level="warning",
        access_log=False,
        backlog=4096,
    )


def run_granian(port: int) -> None:
    from granian import Granian
    from granian.constants import Interfaces, Loops

    Granian(
        "benchmarks.http_servers.servers:asgi",
        address="127.0.0.1",
        port=port,
        interface=Interfaces.ASGI,
        loop=Loops.uvloop,
        backlog=4096,
        log_enabled=False,
    ).serve()


def run_hypercorn(port: int) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.backlog = 4096
    uvloop.run(serve(asgi, config))  # type: ignore[arg-type, unused-ignore]


if __name__ == "__main__":
    name, port = sys.argv[1], int(sys.argv[2])
    if name == "aiohttp":
        run_aiohttp(port)
    elif name == "granian":
        run_granian(port)
    elif name == "hypercorn":
        run_hypercorn(port)
    else:
        run_uvicorn(port, name.partition("-")[2])
