"""A heartbeat to an instance names every open call, and acknowledges as many as it can hold."""

from __future__ import annotations

import pytest
from tests.bus.far_side import ENDPOINT, Played, played

from dynbus.bus.calling.open_calls import Remote
from dynbus.bus.calling.remote_instance import RemoteInstance
from dynbus.bus.errors import UnknownOutcome
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.protocol.names import control_subject
from dynbus.bus.protocol.wire import Credit, Item, Open, encode_batch
from dynbus.testing import run


def opened(remote: Remote) -> Open:
    (beat,) = remote.beat(7)
    assert isinstance(beat, Open)
    return beat


def remote_of(side: Played) -> Remote:
    """An instance that was not called yet."""
    return RemoteInstance(side.bus, ENDPOINT.component_name.instance("one"), str)


def test_it_is_told_at_the_subject_of_its_control_lane() -> None:
    async def story() -> str:
        async with played() as side:
            return remote_of(side).control_subject

    assert run(story()) == control_subject(ENDPOINT.namespace, ENDPOINT.component, "one")


def test_a_heartbeat_says_how_far_each_open_call_has_come() -> None:
    async def story() -> None:
        async with played() as side:
            first, second = side.begin(streaming=True), side.begin()
            await side.far.send(Item(first.number, first.secret, 1, 0, b"a"))

            beat = opened(first.remote)

            assert beat.calls == [(first.number, 1), (second.number, 0)]
            assert beat.done == []

    run(story())


def test_a_call_that_has_ended_is_acknowledged_once() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()
            call.abandon()
            remote = call.remote
            had_work = remote.has_work()

            first, second = opened(remote), opened(remote)

            assert had_work
            assert first.done == [(call.number, call.secret)]
            assert second.done == []
            assert not remote.has_work()

    run(story())


def test_the_credit_of_calls_that_are_read_in_one_turn_leaves_in_one_message() -> None:
    async def story() -> tuple[int, list[int]]:
        async with played() as side:
            calls = [side.begin(streaming=True) for _ in range(3)]
            await side.far.request(3)
            before = side.far.control_messages

            for call in calls:
                call.consumed(call.reader.window)
            credits = await side.far.heard(Credit, 3)

            return side.far.control_messages - before, [credit.number for credit in credits]

    assert run(story()) == (1, [1, 2, 3])


@pytest.mark.parametrize("max_payload", [4096, 65536])
def test_what_one_heartbeat_cannot_hold_goes_into_the_next(max_payload: int) -> None:
    async def story() -> None:
        async with played(MemoryBus(max_payload=max_payload)) as side:
            remote = remote_of(side)
            ended = [(10**15 + number, bytes(16)) for number in range(500)]
            remote.done += ended

            told: list[tuple[int, bytes]] = []
            while remote.has_work():
                beat = opened(remote)
                size = len(encode_batch(side.bus.replies.base, side.bus.incarnation, 0, [beat]))
                assert size <= max_payload
                assert beat.done
                told += beat.done

            assert told == ended

    run(story())


def test_more_open_calls_than_a_message_holds_are_told_in_several() -> None:
    async def story() -> None:
        async with played(MemoryBus(max_payload=4096)) as side:
            calls = [side.begin(streaming=True) for _ in range(1000)]
            calls[0].remote.done += [(10**15 + number, bytes(16)) for number in range(500)]

            frames = calls[0].remote.beat(7)

            for frame in frames:
                base, incarnation = side.bus.replies.base, side.bus.incarnation
                assert len(encode_batch(base, incarnation, 0, [frame])) <= 4096
            beats = [frame for frame in frames if isinstance(frame, Open)]
            told = [number for beat in beats for number, _ in beat.calls]
            assert told == [call.number for call in calls]
            assert (beats[0].first, beats[-1].last) == (0, None)
            assert sum(len(beat.done) for beat in beats) >= 10

    run(story())


def test_an_instance_that_is_gone_takes_its_calls_with_it() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()
            remote = call.remote

            side.caller.gone(remote)

            assert side.begin().remote is not remote
            with pytest.raises(UnknownOutcome):
                await call.result()
            assert not remote.calls

    run(story())
