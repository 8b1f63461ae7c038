"""The test kit: actors run without a server, in virtual time, and faults come on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import anyio.to_thread
import pytest
from pydantic import BaseModel

from dynbus import (
    Actor,
    DeadlineExceeded,
    NoInstances,
    StreamLost,
    UnknownOutcome,
    call_options,
    depends,
    handler,
)
from dynbus.bus.clock import monotonic
from dynbus.testing import TestKit, run


class Text(BaseModel):
    text: str


class Splitter(Actor, namespace="kit"):
    def __init__(self, separator: str = " ") -> None:
        self.separator = separator

    @handler
    async def split(self, text: Text) -> AsyncGenerator[Text, None]:
        for word in text.text.split(self.separator):
            yield Text(text=word)

    @handler
    async def drip(self, text: Text) -> AsyncGenerator[Text, None]:
        for word in text.text.split(self.separator):
            await asyncio.sleep(1.0)
            yield Text(text=word)

    @handler(timeout=3600)
    async def wait(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @handler
    async def work(self, seconds: float) -> float:
        await anyio.to_thread.run_sync(time.sleep, seconds)
        return monotonic()


class Shouter(Actor, namespace="kit"):
    splitter = depends(Splitter)

    @handler
    async def shout(self, text: Text) -> AsyncGenerator[Text, None]:
        async for word in self.splitter.split(text):
            yield Text(text=word.text.upper())


def test_an_actor_and_its_dependency_run_without_a_server() -> None:
    async def story() -> list[str]:
        async with TestKit() as kit:
            await kit.start(Splitter, separator=",")
            await kit.start(Shouter)
            return [word.text async for word in kit.client(Shouter).shout(Text(text="a,b"))]

    assert run(story()) == ["A", "B"]


def test_ten_minutes_pass_in_a_moment() -> None:
    async def story() -> float:
        async with TestKit() as kit:
            await kit.start(Splitter)
            return await kit.client(Splitter).wait(600.0)

    # The time of this process: how long it takes says how busy the machine is.
    begun = time.process_time()
    assert run(story()) == 600.0
    assert time.process_time() - begun < 20.0


def test_real_work_in_a_thread_takes_no_virtual_time() -> None:
    async def story() -> float:
        async with TestKit() as kit:
            await kit.start(Splitter)
            begun = monotonic()
            with call_options(timeout=0.6):
                return await kit.client(Splitter).work(1.0) - begun

    assert run(story()) < 0.1


def test_a_deadline_passes_on_the_virtual_clock() -> None:
    async def story() -> float:
        async with TestKit() as kit:
            await kit.start(Splitter)
            begun = asyncio.get_running_loop().time()
            with call_options(timeout=2.0), pytest.raises(DeadlineExceeded):
                await kit.client(Splitter).wait(60.0)
            return asyncio.get_running_loop().time() - begun

    assert run(story()) == pytest.approx(2.0, abs=0.2)


def test_a_call_without_an_instance_fails_at_once() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            with pytest.raises(NoInstances):
                await kit.client(Splitter).wait(1.0)

    run(story())


def test_a_killed_instance_ends_its_calls() -> None:
    async def story() -> tuple[type[Exception], float]:
        async with TestKit() as kit:
            instance = await kit.start(Splitter)
            call = asyncio.create_task(kit.client(Splitter).wait(60.0))
            await asyncio.sleep(1.0)
            begun = asyncio.get_running_loop().time()
            await kit.kill(instance)
            with pytest.raises(UnknownOutcome) as caught:
                await call
            return caught.type, asyncio.get_running_loop().time() - begun

    kind, seconds = run(story())
    assert kind is UnknownOutcome
    assert seconds < 2.0


def test_a_stream_of_a_killed_instance_is_lost_and_not_cut_short() -> None:
    async def story() -> list[str]:
        words: list[str] = []
        async with TestKit() as kit:
            instance = await kit.start(Splitter)

            async def read() -> None:
                async for word in kit.client(Splitter).drip(Text(text="a b c d")):
                    words.append(word.text)
                    if word.text == "b":
                        await kit.kill(instance)

            with pytest.raises(StreamLost):
                await read()
        return words

    assert run(story()) == ["a", "b"]


def test_a_stream_survives_an_outage_of_the_bus() -> None:
    async def story() -> list[str]:
        words: list[str] = []
        async with TestKit() as kit:
            await kit.start(Splitter)
            async for word in kit.client(Splitter).drip(Text(text="a b c d e f")):
                words.append(word.text)
                if word.text == "b":
                    kit.bus.stop()
                    asyncio.get_running_loop().call_later(2.5, kit.bus.start)
        return words

    assert run(story()) == ["a", "b", "c", "d", "e", "f"]


def test_lost_frames_are_sent_again() -> None:
    async def story() -> list[str]:
        async with TestKit() as kit:
            await kit.start(Splitter)
            with kit.bus.drop("_R.*.*.f", count=3):
                return [w.text async for w in kit.client(Splitter).drip(Text(text="a b c d"))]

    assert run(story()) == ["a", "b", "c", "d"]


def test_a_run_repeats_exactly() -> None:
    async def story() -> float:
        async with TestKit(seed=7) as kit:
            await kit.start(Splitter)
            await kit.client(Splitter).wait(3.0)
            return asyncio.get_running_loop().time()

    assert run(story()) == run(story())


def test_using_the_kit_outside_of_its_with_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="async with TestKit"):
        TestKit().client(Splitter)


def test_a_kit_is_closed_however_often_its_block_is_cancelled() -> None:
    async def story() -> list[str]:
        kits: list[TestKit] = []

        async def block() -> None:
            async with TestKit() as kit:
                kits.append(kit)
                await kit.start(Closing)
                await asyncio.Event().wait()

        task = asyncio.ensure_future(block())
        for _ in range(4):
            await asyncio.sleep(0.1)
            task.cancel()
        await asyncio.wait({task})
        (started,) = kits[0].started.values()
        async with asyncio.timeout(5.0):
            await started.stopped.wait()
        return [started.state.value]

    assert run(story()) == ["stopped"]


class Closing(Actor, namespace="kit"):
    async def on_stop(self) -> None:
        await asyncio.sleep(5.0)

    @handler
    async def call(self) -> None:
        return
