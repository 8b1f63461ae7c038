"""What many streams do that move: from instances that are replaced, and from a part of a fleet."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from pydantic import BaseModel
from tests.story import on_a_kit

from dynbus import Actor, RouteRequest, StreamLost, call_options, handler
from dynbus.actors.calling.routing import Routing
from dynbus.bus.records.instance_view import Instance
from dynbus.testing import TestKit

FLEET = 12
STREAMS = 256
ITEMS = 40
STEP = 0.25
PREFILL = 0.02


class Count(BaseModel):
    start: int = 0
    end: int = ITEMS


class Worker(Actor, namespace="moved"):
    """Counts like an engine: whatever begins takes time from all that run beside it."""

    def __init__(self) -> None:
        self._engine = asyncio.Lock()

    @handler(resume="go_on", timeout=None)
    async def count(self, request: Count) -> AsyncGenerator[tuple[int, str], None]:
        async with self._engine:
            await asyncio.sleep(PREFILL)
        for number in range(request.start, request.end):
            async with self._engine:
                pass
            yield number, self.instance_id
            await asyncio.sleep(STEP)

    @handler(timeout=None)
    async def count_here(self, request: Count) -> AsyncGenerator[tuple[int, str], None]:
        for number in range(request.start, request.end):
            yield number, self.instance_id
            await asyncio.sleep(STEP)

    @staticmethod
    def go_on(request: Count, items: list[Any]) -> Count:
        return Count(start=request.start + len(items), end=request.end)


class OldestFirst:
    """Picks the instances that are replaced first for as long as there is one."""

    def __init__(self) -> None:
        self.attempts: Counter[int] = Counter()

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str:
        self.attempts[request.attempt] += 1
        return max(instance.id for instance in instances)


async def fleet(kit: TestKit, size: int, routing: Routing = "round_robin") -> Worker:
    for number in range(size):
        await kit.start(Worker, instance_id=f"w{number}")
    return kit.client(Worker, routing=routing)


def test_every_instance_is_replaced_and_no_reader_notices_however_long_its_stream() -> None:
    size = 6
    router = OldestFirst()

    async def story(kit: TestKit) -> tuple[list[list[int]], float]:
        client = await fleet(kit, size, router)
        loop = asyncio.get_running_loop()
        found: list[list[int]] = [[] for _ in range(24)]

        async def read(number: int) -> None:
            async for item, _ in client.count(Count(end=2400)):
                found[number].append(item)
                if len(found[number]) == 200:
                    return

        readers = [asyncio.create_task(read(number)) for number in range(len(found))]
        await asyncio.sleep(2.0)
        begun = loop.time()
        for number in reversed(range(size)):
            await kit.start(Worker, instance_id=f"new{number}")
            await kit.started[f"w{number}"].stop(600.0)
        took = loop.time() - begun
        await asyncio.gather(*readers)
        return found, took

    found, took = on_a_kit(story)

    assert found == [list(range(200))] * 24
    assert took < size * 1.5
    # More often than a stream may move whose instances are lost.
    assert max(router.attempts) == size + 1


def test_streams_that_cannot_go_on_or_name_their_instance_have_the_grace() -> None:
    async def story(kit: TestKit) -> list[list[int]]:
        client = await fleet(kit, 2)

        async def read(stream: Any) -> list[int]:
            return [item async for item, _ in stream]

        with call_options(instance="w0"):
            named = asyncio.create_task(read(client.count(Count(end=12))))
            here = asyncio.create_task(read(client.count_here(Count(end=12))))
            await asyncio.sleep(1.0)
        await kit.started["w0"].stop(30.0)
        return [await named, await here]

    assert on_a_kit(story) == [list(range(12))] * 2


def test_a_stream_whose_instances_break_moves_no_more_often_than_its_limit() -> None:
    async def story(kit: TestKit) -> int:
        client = await fleet(kit, 6)
        broken: set[str] = set()

        async def read() -> None:
            async for _, place in client.count(Count()):
                broken.add(place)
                kit.started[place].report_broken("it is out of memory")

        with pytest.raises(StreamLost, match="migration_limit"):
            await read()
        return len(broken)

    assert on_a_kit(story) == 4


def test_a_third_of_a_fleet_dies_at_once_and_the_others_go_on() -> None:
    async def story(kit: TestKit) -> tuple[list[list[int]], float, Counter[int], float]:
        client = await fleet(kit, FLEET)
        loop = asyncio.get_running_loop()
        found: list[list[int]] = [[] for _ in range(STREAMS)]
        longest = 0.0
        # Items of survivors by second since the kill.
        goodput: Counter[int] = Counter()
        dead = [f"w{number}" for number in range(FLEET // 3)]
        killed_at = loop.time() + 3.0

        async def read(number: int) -> None:
            nonlocal longest
            before = loop.time()
            async for item, place in client.count(Count()):
                now = loop.time()
                if now > killed_at:
                    longest = max(longest, now - before)
                before = now
                found[number].append(item)
                if place not in dead:
                    goodput[int((now - killed_at) // 1)] += 1

        readers = [asyncio.create_task(read(number)) for number in range(STREAMS)]
        await asyncio.sleep(3.0)
        await asyncio.gather(*[kit.kill(kit.started[place]) for place in dead])
        await asyncio.gather(*readers)
        before_kill = goodput[-2]
        least = min(goodput[second] for second in range(5)) / before_kill
        return found, longest, goodput, least

    found, longest, goodput, least = on_a_kit(story)

    assert found == [list(range(ITEMS))] * STREAMS
    assert longest <= 5.0
    assert least >= 0.9, goodput
