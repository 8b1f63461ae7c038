"""The cost of a call and of an item of a stream over both ends, in calls of functions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from statistics import median
from typing import Any, NamedTuple

import pytest
import uvloop
from benchmarks.request_plane.echo import make_item, make_request
from benchmarks.request_plane.systems.dynbus_actors import Item, Request
from tests.conditions import eventually

from dynbus import Actor, Arrival, Relay, Reply, Runtime, handler, push_each
from dynbus.bus.nats.server_process import RunningServer

from .counting import CallCount, counting, hold

CALLS = 500
ITEMS = 2048
STREAMS = 64
STEPS = 60


ASKED = Request(**make_request(ITEMS))
TOKEN = Item(**make_item(1))


class Budgeted(Actor, namespace="budget"):
    """The benchmark's echo without what it computes: the handlers cost nothing, and its steps are
    the test's."""

    def __init__(self) -> None:
        self.replies: list[Reply[Item]] = []

    @handler(concurrency=None)
    async def answer(self, request: Request) -> Item:
        return TOKEN

    @handler(concurrency=None)
    async def stream(self, request: Request) -> AsyncGenerator[Item, None]:
        for _ in range(request.max_tokens):
            yield TOKEN

    @handler(concurrency=None)
    async def steps(self, request: Request, reply: Reply[Item]) -> None:
        self.replies.append(reply)
        await reply.ended()

    def step(self) -> None:
        """One item for each stream that is open."""
        push_each([(reply, TOKEN) for reply in self.replies])

    def end(self) -> None:
        """The end of each."""
        for reply in self.replies:
            reply.end()
        self.replies.clear()


class Ends(NamedTuple):
    """Both ends of calls, in one process."""

    actor: Budgeted
    client: Budgeted
    runtime: Runtime


def over_nats(server: RunningServer, story: Callable[[Ends], Awaitable[None]]) -> None:
    """Tell a story of an actor and a client over nats-server, on the loop of uvloop, which counts
    as no call."""

    async def told() -> None:
        async with Runtime.connect(server.url) as far, Runtime.connect(server.url) as near:
            instance = await far.start(Budgeted)
            client = near.client(Budgeted)
            await near.discovery.wait_for_instance(instance.name)
            assert isinstance(instance.actor, Budgeted)
            async with asyncio.timeout(120):
                await story(Ends(instance.actor, client, near))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(told())


def test_a_unary_call(nats_server: RunningServer) -> None:
    async def story(ends: Ends) -> None:
        for _ in range(CALLS):
            await ends.client.answer(ASKED)
        with counting() as count:
            for _ in range(CALLS):
                count.mark()
                await ends.client.answer(ASKED)
        hold("a unary call", count.between_marks(), count.shown(CALLS))

    over_nats(nats_server, story)


def test_an_item_of_an_async_generator(nats_server: RunningServer) -> None:
    async def story(ends: Ends) -> None:
        found: list[CallCount] = []
        for _ in range(7):
            with counting() as count:
                async for _ in ends.client.stream(ASKED):
                    pass
            found.append(count)
        calls = median(count.calls for count in found)
        hold("an item of an async generator", calls / ITEMS, found[-1].shown(ITEMS))

    over_nats(nats_server, story)


@pytest.mark.parametrize("raw", [False, True])
def test_an_item_of_an_engine_s_step(nats_server: RunningServer, raw: bool) -> None:
    path = "an item of an engine's step" + (", read as bytes" if raw else "")

    async def story(ends: Ends) -> None:
        arrived = asyncio.Event()
        items = 0

        def deliver(arrivals: list[Arrival[None, Any]]) -> None:
            nonlocal items
            items += sum(len(arrival.items) for arrival in arrivals)
            if items % STREAMS == 0:
                arrived.set()

        untyped = await ends.runtime.endpoint("budget.Budgeted.steps").client()

        def call() -> Any:
            return untyped.generate(ASKED).raw() if raw else ends.client.steps(ASKED)

        with Relay(deliver) as relay:
            streams = [await relay.open(call(), None) for _ in range(STREAMS)]
            await eventually(lambda: len(ends.actor.replies) == STREAMS)
            count = await steps_counted(ends.actor, arrived)
            ends.actor.end()
            for stream in streams:
                await stream.ended()
        assert items == STREAMS * STEPS
        hold(path, count.between_marks() / STREAMS, count.shown(STREAMS * STEPS))

    over_nats(nats_server, story)


async def steps_counted(actor: Budgeted, arrived: asyncio.Event) -> CallCount:
    """The calls of some steps, each read to its last item before the next."""
    with counting() as count:
        for _ in range(STEPS):
            count.mark()
            arrived.clear()
            actor.step()
            await arrived.wait()
    return count
