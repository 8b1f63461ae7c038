"""A stream gives its items in order and once, and leaving it ends the far side."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator

import pytest
from tests.story import on_a_kit

from dynbus import Actor, HandlerError, InvalidResponse, NoInstances, call_options, handler
from dynbus.actors.calling.stream import Stream
from dynbus.testing import TestKit


class Counter(Actor, namespace="streams"):
    def __init__(self) -> None:
        self.begun = 0
        self.ended = asyncio.Event()

    @handler
    async def count(self, limit: int) -> AsyncGenerator[int, None]:
        self.begun += 1
        try:
            for number in range(limit):
                yield number
        finally:
            self.ended.set()

    @handler
    async def drip(self, limit: int) -> AsyncGenerator[int, None]:
        self.begun += 1
        try:
            for number in range(limit):
                yield number
                await asyncio.sleep(1.0)
        finally:
            self.ended.set()

    @handler
    async def fail_after(self, limit: int) -> AsyncGenerator[int, None]:
        for number in range(limit):
            yield number
        raise KeyError("broken")

    @handler
    async def spoilt(self, good: int) -> AsyncGenerator[int | str, None]:
        for number in range(good):
            yield number
        yield "bad"
        yield good


class Reader(Actor, namespace="streams", component="Counter"):
    """The same component as its callers believe it to be."""

    @handler
    async def count(self, limit: int) -> AsyncGenerator[list[str], None]:
        yield []

    @handler(name="spoilt")
    async def numbers(self, good: int) -> AsyncGenerator[int, None]:
        yield good


async def counter(kit: TestKit) -> Counter:
    instance = await kit.start(Counter, instance_id="one")
    assert isinstance(instance.actor, Counter)
    return instance.actor


def stream_of(source: AsyncGenerator[int, None]) -> Stream[int]:
    assert isinstance(source, Stream)
    return source


@pytest.mark.parametrize("limit", [0, 1, 2, 1000])
def test_all_items_come_in_order_and_once(limit: int) -> None:
    async def story(kit: TestKit) -> list[int]:
        await counter(kit)
        return [number async for number in kit.client(Counter).count(limit)]

    assert on_a_kit(story) == list(range(limit))


def test_nothing_is_sent_before_the_first_item_is_awaited() -> None:
    async def story(kit: TestKit) -> None:
        actor = await counter(kit)
        stream = stream_of(kit.client(Counter).drip(3))
        await asyncio.sleep(10.0)
        before = actor.begun, stream.instance_id

        first = await anext(stream)

        assert before == (0, "")
        assert (first, actor.begun, stream.instance_id) == (0, 1, "one")
        await stream.aclose()

    on_a_kit(story)


def test_a_stream_has_the_request_id_that_was_asked_for() -> None:
    async def story(kit: TestKit) -> str:
        with call_options(request_id="mine"):
            stream = stream_of(kit.client(Counter).count(1))
        return f"{stream.id} {stream!r}"

    assert on_a_kit(story) == "mine <Stream streams.Counter.count mine [open]>"


def test_closing_a_stream_ends_the_far_side_and_gives_no_more() -> None:
    async def story(kit: TestKit) -> None:
        actor = await counter(kit)
        stream = stream_of(kit.client(Counter).drip(1000))
        await anext(stream)

        await stream.aclose()

        async with asyncio.timeout(5.0):
            await actor.ended.wait()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        assert "[closed]" in repr(stream)

    on_a_kit(story)


def test_a_stream_that_nobody_holds_any_more_ends_the_far_side() -> None:
    async def story(kit: TestKit) -> None:
        actor = await counter(kit)
        stream = stream_of(kit.client(Counter).drip(1000))
        await anext(stream)

        del stream
        gc.collect()

        async with asyncio.timeout(5.0):
            await actor.ended.wait()

    on_a_kit(story)


def test_cancelling_the_reader_ends_the_far_side() -> None:
    async def story(kit: TestKit) -> None:
        actor = await counter(kit)
        stream = stream_of(kit.client(Counter).drip(1000))
        await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)

        reading.cancel()
        await asyncio.wait({reading})

        assert reading.cancelled()
        async with asyncio.timeout(5.0):
            await actor.ended.wait()

    on_a_kit(story)


def test_what_is_thrown_into_a_stream_comes_out_and_ends_it() -> None:
    async def story(kit: TestKit) -> None:
        actor = await counter(kit)
        stream = stream_of(kit.client(Counter).drip(1000))
        await stream.asend(None)

        with pytest.raises(KeyError, match="enough"):
            await stream.athrow(KeyError("enough"))

        async with asyncio.timeout(5.0):
            await actor.ended.wait()

    on_a_kit(story)


def test_an_error_of_the_handler_comes_after_the_items_before_it() -> None:
    async def story(kit: TestKit) -> list[int]:
        await counter(kit)
        stream = kit.client(Counter).fail_after(5)

        items = [await anext(stream) for _ in range(5)]

        with pytest.raises(HandlerError, match="broken"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return items

    assert on_a_kit(story) == list(range(5))


def test_an_item_that_does_not_fit_ends_the_stream_with_its_endpoint_named() -> None:
    async def story(kit: TestKit) -> None:
        actor = await counter(kit)
        stream = kit.client(Reader).count(3)

        with pytest.raises(InvalidResponse, match=r"streams\.Counter\.count"):
            await anext(stream)

        async with asyncio.timeout(5.0):
            await actor.ended.wait()

    on_a_kit(story, schema_check="off")


@pytest.mark.parametrize("good", [0, 1, 2, 300])
def test_items_before_one_that_does_not_fit_are_delivered_before_the_error(good: int) -> None:
    async def story(kit: TestKit) -> list[int]:
        await counter(kit)
        stream = kit.client(Reader).numbers(good)

        items = [await anext(stream) for _ in range(good)]

        with pytest.raises(InvalidResponse, match=r"an item of streams\.Counter\.spoilt: "):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return items

    assert on_a_kit(story) == list(range(good))


def test_without_an_instance_the_first_item_says_so() -> None:
    async def story(kit: TestKit) -> None:
        with pytest.raises(NoInstances):
            await anext(kit.client(Counter).count(1))

    on_a_kit(story)
