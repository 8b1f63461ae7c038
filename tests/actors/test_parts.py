"""Streams that go on in parts, each with a call of its own, and streams that others began."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from pydantic import BaseModel
from tests.conditions import eventually

from dynbus import Actor, ConfigError, DynbusError, StreamLost, handler
from dynbus.actors.calling.relay import Arrival, Relay
from dynbus.actors.declaring.resume import ResumeParts
from dynbus.testing import TestKit, run

LENGTH = 12


class Tracks(BaseModel):
    """Some tracks to count along, from a number on: one of each in each second."""

    tracks: list[int]
    start: int = 0


class Step(BaseModel):
    track: int
    number: int


WHOLE = Tracks(tracks=[0, 1, 2])


class Tracker(Actor, namespace="parts"):
    """Counts along several tracks at a time; one request goes on with one of them."""

    def __init__(self) -> None:
        self.open = 0

    async def _steps(self, request: Tracks) -> AsyncGenerator[Step, None]:
        self.open += 1
        try:
            for number in range(request.start, LENGTH):
                for track in request.tracks:
                    yield Step(track=track, number=number)
                await asyncio.sleep(1.0)
        finally:
            self.open -= 1

    @handler(resume="rest")
    async def count(self, request: Tracks) -> AsyncGenerator[Step, None]:
        async for step in self._steps(request):
            yield step

    @handler(resume="rest", migration_limit=1)
    async def count_once(self, request: Tracks) -> AsyncGenerator[Step, None]:
        async for step in self._steps(request):
            yield step

    @staticmethod
    def rest(request: Tracks, items: list[Step]) -> Tracks | ResumeParts | None:
        left: list[Tracks] = []
        for track in request.tracks:
            came = sum(item.track == track for item in items)
            if request.start + came < LENGTH:
                left.append(Tracks(tracks=[track], start=request.start + came))
        if len(left) > 1:
            return ResumeParts(left)
        return left[0] if left else None


def rest_of_json(request: Any, items: list[Any]) -> Any:
    made = Tracker.rest(Tracks(**request), [Step(**item) for item in items])
    if isinstance(made, ResumeParts):
        return ResumeParts([one.model_dump() for one in made.requests])
    return None if made is None else made.model_dump()


def on_a_kit(story: Callable[[TestKit], Awaitable[Any]], **config: Any) -> Any:
    async def told() -> Any:
        async with TestKit(**config) as kit:
            for name in "abcd":
                await kit.start(Tracker, instance_id=name)
            return await story(kit)

    return run(told())


def is_whole(steps: list[Step]) -> bool:
    """Whether each track was counted along, in order and once."""
    tracks = {track: [one.number for one in steps if one.track == track] for track in WHOLE.tracks}
    return all(numbers == list(range(LENGTH)) for numbers in tracks.values())


def open_at(kit: TestKit) -> int:
    """How many handlers run at instances that were not killed."""
    actors: list[Any] = [one.actor for one in kit.started.values()]
    return sum(actor.open for actor in actors if actor.runtime.is_connected)


Read = Callable[[Any, Callable[[Any, int], Awaitable[None]]], Awaitable[list[Step]]]


async def by_itself(stream: Any, see: Callable[[Any, int], Awaitable[None]]) -> list[Step]:
    found: list[Step] = []
    async for step in stream:
        found.append(step)
        await see(stream, len(found))
    return found


async def relayed(
    stream: AsyncIterable[Step], see: Callable[[Any, int], Awaitable[None]]
) -> list[Step]:
    found: list[Step] = []
    seeing: list[asyncio.Future[None]] = []

    def deliver(arrivals: list[Arrival[str, Step]]) -> None:
        for arrival in arrivals:
            for step in arrival.items:
                found.append(step)
                seeing.append(asyncio.ensure_future(see(arrival.stream, len(found))))

    with Relay(deliver) as relay:
        await (await relay.open(stream, "it")).ended()
    await asyncio.gather(*seeing)
    return found


@pytest.mark.parametrize("read", [by_itself, relayed])
def test_a_stream_goes_on_in_parts_and_each_of_them_elsewhere_again(read: Read) -> None:
    async def story(kit: TestKit) -> tuple[list[Step], list[int]]:
        serving: list[int] = []

        async def see(stream: Any, count: int) -> None:
            if count in (7, 20):
                serving.append(len(stream.instance_ids))
                await kit.kill(kit.started[stream.instance_ids[0]])

        return await read(kit.client(Tracker).count(WHOLE), see), serving

    steps, serving = on_a_kit(story)

    assert is_whole(steps)
    assert serving == [1, 3]


@pytest.mark.parametrize("read", [by_itself, relayed])
def test_the_first_part_that_cannot_go_on_ends_all_of_them(read: Read) -> None:
    async def story(kit: TestKit) -> tuple[int, DynbusError]:
        async def see(stream: Any, count: int) -> None:
            if count in (7, 20):
                await kit.kill(kit.started[stream.instance_ids[0]])

        with pytest.raises(DynbusError) as caught:
            await read(kit.client(Tracker).count_once(WHOLE), see)
        await asyncio.sleep(1.5)
        return open_at(kit), caught.value

    left, error = on_a_kit(story)

    assert isinstance(error, StreamLost)
    assert "it moved once" in error.message
    assert not left


@pytest.mark.parametrize("relay", [False, True])
def test_whoever_leaves_a_stream_in_parts_leaves_each_of_them(relay: bool) -> None:
    async def story(kit: TestKit) -> tuple[int, int]:
        stream: Any = kit.client(Tracker).count(WHOLE)
        count = 0

        def deliver(arrivals: list[Arrival[str, Step]]) -> None:
            nonlocal count
            count += sum(len(arrival.items) for arrival in arrivals)

        with Relay(deliver) as reader:
            if relay:
                opened = await reader.open(stream, "it")
                await eventually(lambda: count > 6)
                await kit.kill(kit.started[opened.instance_id])
                await eventually(lambda: count > 20)
                before = open_at(kit)
                opened.cancel()
            else:
                async with aclosing(stream):
                    async for _ in stream:
                        count += 1
                        if count == 7:
                            await kit.kill(kit.started[stream.instance_id])
                        if count == 20:
                            break
                    before = open_at(kit)
            await asyncio.sleep(1.5)
            return before, open_at(kit)

    before, after = on_a_kit(story)

    assert (before, after) == (3, 0)


def test_a_paused_relay_is_shown_all_of_a_stream_in_parts() -> None:
    async def story(kit: TestKit) -> tuple[list[Step], int]:
        found: list[Step] = []

        def deliver(arrivals: list[Arrival[str, Step]]) -> None:
            for arrival in arrivals:
                found.extend(arrival.items)

        with Relay(deliver) as relay:
            stream = await relay.open(kit.client(Tracker).count(WHOLE), "it")
            await eventually(lambda: len(found) > 6)
            await kit.kill(kit.started[stream.instance_id])
            await eventually(lambda: len(stream.instance_ids) == 3)
            stream.pause()
            await asyncio.sleep(30.0)
            while_paused = len(found)
            stream.resume()
            await stream.ended()
        return found, while_paused

    found, while_paused = on_a_kit(story, stream_window=64)

    assert is_whole(found)
    assert while_paused < len(found)


# Streams that others began ----------------------------------------------------------------------


def came(*counts: int) -> list[bytes]:
    """So many steps of each track, encoded."""
    return [
        json.dumps({"track": track, "number": number}).encode()
        for track, count in enumerate(counts)
        for number in range(count)
    ]


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize(
    "counts", [(LENGTH, LENGTH, LENGTH), (LENGTH, 5, LENGTH), (3, 4, 5), (0, LENGTH, 1)]
)
@pytest.mark.parametrize("limit", [0, 3])
def test_the_rest_of_a_stream_that_another_process_began_is_asked_for(
    limit: int, counts: tuple[int, ...], relay: bool
) -> None:
    async def story(kit: TestKit) -> list[Step]:
        endpoint = kit.caller.endpoint("parts.Tracker.count")
        client = await endpoint.client(resume=rest_of_json, migration_limit=limit)
        call = client.generate(WHOLE, after=came(*counts))
        read = relayed if relay else by_itself

        async def look_away(stream: Any, count: int) -> None: ...

        return [Step(**dict(item)) for item in await read(aiter(call), look_away)]

    found = on_a_kit(story)

    assert sum(counts) + len(found) == 3 * LENGTH
    assert is_whole([Step(**json.loads(item)) for item in came(*counts)] + found)


def test_a_stream_that_was_taken_over_moves_with_all_that_came() -> None:
    async def story(kit: TestKit) -> list[Any]:
        endpoint = kit.caller.endpoint("parts.Tracker.count")
        client = await endpoint.client(resume=rest_of_json)
        call = client.generate(WHOLE, after=came(LENGTH, 5, LENGTH))
        found: list[Any] = []
        async for item in call:
            found.append(item["number"])
            if len(found) == 3:
                await kit.kill(kit.started[call.instance_id])
        return found

    assert on_a_kit(story) == list(range(5, LENGTH))


def test_a_client_that_knows_no_resume_goes_on_after_nothing() -> None:
    async def story(kit: TestKit) -> None:
        client = await kit.caller.endpoint("parts.Tracker.count").client()
        with pytest.raises(ConfigError, match="nothing says how"):
            client.generate(WHOLE, after=came(1))

    on_a_kit(story)
