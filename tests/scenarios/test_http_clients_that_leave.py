"""Clients of the front end that leave at any moment: nothing of their requests is left anywhere."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import anyio.lowlevel
import psutil
import pytest
from tests.conditions import eventually

from dynbus import Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.engine.runner import EngineRunner
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.text import rendering, tokenizing
from dynbus.llm.worker import MOCK_NAME, ModelWorker

from .observation import leftovers, resident

pytestmark = pytest.mark.anyio

BOUND = 60.0
END = b"data: [DONE]"
SUBSCRIPTIONS = re.compile(r"subscriptions: (\d+)")


class Engine(ModelWorker, namespace="leaving"):
    """A mock that keeps its runner where a test finds it."""

    runners: list[EngineRunner]

    async def on_start(self) -> None:
        await super().on_start()
        self.runners.append(self._running())


def post(**fields: Any) -> bytes:
    """A request for a chat."""
    asked = {"model": MOCK_NAME, "messages": [{"role": "user", "content": "Hello"}], **fields}
    body = json.dumps(asked).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Client:
    """One that leaves: where, is drawn from its number."""

    def __init__(self, port: int, number: int) -> None:
        self._port = port
        self._draw = random.Random(number)

    async def ask_and_leave(self) -> str:
        """Ask for something, and be gone before all of it is there; returns what was asked."""
        draw = self._draw
        kind = draw.choice(("head", "body", "waiting", "whole", "mid", "end", "done", "pipelined"))
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.timeout(BOUND):
                await self._ask(kind, reader, writer)
        finally:
            if draw.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()
        return kind

    async def _ask(
        self, kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        draw = self._draw
        content = f"Say something of the number {draw.randrange(50)}. " * draw.randrange(1, 20)
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": content}],
            "stream": kind != "whole",
            "n": draw.choice((1, 1, 2)),
            # Beyond what an answer could have in the time of a test.
            "max_tokens": 8 if kind in ("end", "done") else 4000,
            "ignore_eos": True,
        }
        request = post(**fields)
        if kind == "head":
            writer.write(request[: request.index(b"\r\n\r\n") - draw.randrange(10)])
        elif kind == "body":
            writer.write(request[: -draw.randrange(1, 80)])
        elif kind == "pipelined":
            writer.write(request * draw.randrange(2, 5))
        else:
            writer.write(request)
        if kind in ("mid", "pipelined"):
            for _ in range(draw.randrange(1, 12)):
                await reader.readuntil(b"\n\n")
        elif kind in ("end", "done"):
            # The end of the last output, or that of the stream: the client leaves as it comes.
            await reader.readuntil(b'"finish_reason":"length"' if kind == "end" else END)
        else:
            for _ in range(draw.randrange(20)):
                await asyncio.sleep(0)


class Stack:
    """A front end and two engines on one server, in two runtimes of this process."""

    def __init__(
        self,
        serving: Runtime,
        calling: Runtime,
        front_end: HttpFrontEnd,
        runners: list[EngineRunner],
    ) -> None:
        self._runtimes = (serving, calling)
        self.front_end = front_end
        self.runners = runners
        self.port = int(front_end.url.rpartition(":")[2])

    async def leave(self, count: int, seed: int) -> None:
        """So many clients ask and leave, at most 50 at a time; then nothing is left of them."""
        numbers = iter(range(count))

        async def some() -> None:
            for number in numbers:
                await Client(self.port, seed + number).ask_and_leave()

        await asyncio.gather(*(some() for _ in range(50)))
        await self.is_quiet()

    async def holds(self, before: dict[str, int]) -> None:
        """Wait until this process holds no more than it held before."""
        now: dict[str, int] = {}

        def no_more() -> bool:
            nonlocal now
            now = self.holdings()
            return all(now[what] <= count for what, count in before.items())

        try:
            await eventually(no_more, BOUND)
        except AssertionError:
            raise AssertionError(f"held before: {before}; now: {now}") from None

    async def is_quiet(self) -> None:
        """Wait until no request is anywhere."""
        metrics = self.front_end.shared.metrics
        await eventually(lambda: metrics.in_flight == 0, BOUND, what="the front end has requests")
        # A request is forgotten by its engine before the next step.
        await eventually(lambda: not self.engines_work(), BOUND, what=f"{self.runners}")
        await eventually(
            lambda: not any(leftovers(each) for each in self._runtimes),
            BOUND,
            what="calls are open",
        )

    def engines_work(self) -> bool:
        """Whether an engine has a request."""
        return any(runner.load.running or runner.load.waiting for runner in self.runners)

    def holdings(self) -> dict[str, int]:
        """What is held by this process, which is the same whenever nothing is asked."""
        gc.collect()
        connections = [
            connection
            for runtime in self._runtimes
            for connection in (runtime.bus.data, runtime.bus.lane.connection)
        ]
        # One more renders or tokenises where two chats come at once, by chance only now.
        programs = {rendering.__file__, tokenizing.__file__}
        children = psutil.Process().children()
        pipes = 2 * sum(not programs.isdisjoint(child.cmdline()) for child in children)
        return {
            "tasks": len(asyncio.all_tasks()),
            "descriptors": len(os.listdir("/proc/self/fd")) - pipes,
            **{
                f"subscriptions {number}": int(SUBSCRIPTIONS.findall(repr(each))[0])
                for number, each in enumerate(connections)
            },
        }


@asynccontextmanager
async def stack(url: str) -> AsyncGenerator[Stack]:
    """The front end, once it serves the model of both engines."""
    Engine.runners = []
    async with (
        Runtime.connect(url, drain_grace=0.1) as serving,
        Runtime.connect(url) as calling,
        Catalog(calling) as catalog,
        HttpFrontEnd(calling, catalog, HttpSettings(port=0, grace=1.0)) as front_end,
    ):
        for _ in range(2):
            await serving.start(Engine, engine="mock", max_num_seqs=64)
        await eventually(lambda: front_end.shared.models.names == [MOCK_NAME], BOUND)
        yield Stack(serving, calling, front_end, Engine.runners)


async def answer_of(port: int) -> dict[str, Any]:
    """What is answered to a short chat."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(post(max_tokens=5, ignore_eos=True))
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        answer: dict[str, Any] = json.loads(await reader.readexactly(length))
        return answer
    finally:
        writer.close()


async def test_200_clients_that_leave_at_any_moment_leave_nothing_behind(
    own_server: RunningServer,
) -> None:
    async with stack(own_server.url) as served:
        before = await answer_of(served.port)
        # The first ones load what the others use.
        await served.leave(20, seed=0)
        held = served.holdings()

        await served.leave(200, seed=1000)

        await served.holds(held)
        after = await answer_of(served.port)

    assert after["choices"] == before["choices"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_1_000_clients_that_leave_at_any_moment_leave_nothing_behind(
    own_server: RunningServer,
) -> None:
    async with stack(own_server.url) as served:
        before = await answer_of(served.port)
        await served.leave(1000, seed=0)
        held, sizes = served.holdings(), [resident(os.getpid())]
        for seed in (1000, 2000):
            begun = time.monotonic()
            await served.leave(1000, seed)
            print(f"1,000 clients that left: {time.monotonic() - begun:.1f} s")
            await served.holds(held)
            sizes.append(resident(os.getpid()))
        after = await answer_of(served.port)
        took = [await seconds_to_cancel(served) for _ in range(100)]

    print(f"MiB: {sizes}; {held}")
    print(
        f"from a client's end to its engine's: {1e3 * median(took):.1f} ms (median of 100), "
        f"{1e3 * max(took):.1f} ms (longest)"
    )
    assert after["choices"] == before["choices"]
    assert sizes[-1] <= sizes[0] + 8


async def seconds_to_cancel(served: Stack) -> float:
    """How long an engine goes on with a stream after its client has left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(post(max_tokens=4000, ignore_eos=True, stream=True))
    await reader.readuntil(b"\n\n")
    left = time.perf_counter()
    writer.transport.abort()
    while served.engines_work():
        await anyio.lowlevel.checkpoint()
    return time.perf_counter() - left
