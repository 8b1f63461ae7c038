"""A client's heartbeat in several messages: each is judged by the numbers that it speaks of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast

import pytest
from tests.bus.near_side import Served, endpoint, serving, until

from dynbus.bus.drops import DropReason
from dynbus.bus.memory.bus import MemoryConnection
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.liveness import HEARTBEAT_INTERVAL
from dynbus.bus.protocol.wire import Failed, Heartbeat, Open
from dynbus.bus.serving.ledger import ARRIVAL_GRACE
from dynbus.testing import run

CALLS = 10


def waiting() -> Endpoint:
    async def wait(_: bytes) -> bytes:
        await asyncio.sleep(1000.0)
        return b""

    return endpoint(wait, concurrency=None, timeout=None)


async def begin(given: Served, count: int = CALLS) -> None:
    """Open calls that are no longer young."""
    for number in range(count):
        given.client.send(number)
    await until(lambda: given.instance.execution.load == count)
    for _ in range(round(2 * ARRIVAL_GRACE / HEARTBEAT_INTERVAL)):
        await given.client.say(Open(1, [(number, 0) for number in range(count)], []))
        await asyncio.sleep(HEARTBEAT_INTERVAL)


async def ended_after(given: Served, beats: int, *parts: Open) -> set[int]:
    """The calls that have ended after so many heartbeats of these parts."""
    for _ in range(beats):
        for part in parts:
            await given.client.say(part)
        await asyncio.sleep(HEARTBEAT_INTERVAL)
    return {failed.number for failed in given.client.all(Failed)}


def listed(numbers: Iterable[int], first: int, last: int | None) -> Open:
    return Open(1, [(number, 0) for number in numbers], [], first, last)


def test_calls_that_are_listed_in_several_messages_go_on() -> None:
    async def story() -> set[int]:
        async with serving(waiting()) as given:
            await begin(given)
            return await ended_after(
                given,
                10,
                listed(range(4), 0, 3),
                listed(range(4, 7), 4, 6),
                listed(range(7, 10), 7, None),
            )

    assert run(story()) == set()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_part_that_is_always_lost_ends_no_call(lost: int) -> None:
    async def story() -> set[int]:
        async with serving(waiting()) as given:
            await begin(given)
            parts = [
                listed(range(4), 0, 3),
                listed(range(4, 7), 4, 6),
                listed(range(7, 10), 7, None),
            ]
            del parts[lost]
            return await ended_after(given, 10, *parts)

    assert run(story()) == set()


def test_a_call_that_the_message_of_its_number_does_not_list_is_ended() -> None:
    async def story() -> set[int]:
        async with serving(waiting()) as given:
            await begin(given)
            return await ended_after(
                given, 5, listed((0, 1, 3), 0, 3), listed(range(4, 10), 4, None)
            )

    assert run(story()) == {2}


def test_a_part_that_speaks_of_no_call_here_is_answered_for_its_numbers_only() -> None:
    async def story() -> None:
        async with serving(waiting()) as given:
            await given.client.say(listed((5, 6), 5, 9))
            await asyncio.sleep(HEARTBEAT_INTERVAL)

            (beat,) = given.client.control
            assert isinstance(beat, Heartbeat)
            assert beat == Heartbeat(beat.beat, 0.0, False, [], 5, 9)

    run(story())


def test_heartbeats_that_arrive_after_later_ones_end_no_call() -> None:
    async def story() -> tuple[set[int], dict[DropReason, int]]:
        async with serving(waiting()) as given:
            await begin(given)
            # A link that was cut carries at last what was said before any of these calls began.
            late = [Open(beat, [], []) for beat in range(-10, 0)]
            return await ended_after(given, 1, *late), given.bus.drops

    assert run(story()) == (set(), {DropReason.STALE: 10})


def test_more_calls_than_a_message_holds_are_told_in_several() -> None:
    async def story() -> None:
        async with serving(waiting()) as given:
            await begin(given, 500)
            given.server.max_payload = 4096
            before = len(given.client.control)

            connection = cast("MemoryConnection", given.bus.lane.connection)
            assert connection.max_payload == 4096
            await asyncio.sleep(1.5 * HEARTBEAT_INTERVAL)

            beats = [f for f in given.client.control[before:] if isinstance(f, Heartbeat)]
            whole = beats[next(i for i, beat in enumerate(beats) if beat.first == 0) :]
            told = [number for beat in whole for number, _ in beat.calls][:500]
            assert told == list(range(500))
            assert len(beats[0].calls) < 500

    run(story())
