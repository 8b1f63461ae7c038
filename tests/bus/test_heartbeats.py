"""Who is silent is found to be gone in time; who is only cut off from us is not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from tests.conditions import wait_until

from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import DynbusError, PayloadTooLarge, StreamLost
from dynbus.bus.heartbeats import TICK, Heartbeats
from dynbus.bus.lane import ThreadLane
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection
from dynbus.bus.protocol.liveness import (
    GONE_AFTER,
    HEARTBEAT_INTERVAL,
    RECONNECT_GRACE,
    SILENCE_LIMIT,
)
from dynbus.bus.protocol.names import ReplySubjects
from dynbus.bus.protocol.wire import Open, Ping, Pong
from dynbus.testing import run

from .far_side import ENDPOINT, FarSide, Played, played, settle

LATE = HEARTBEAT_INTERVAL + 2 * TICK
ROUNDED = 1e-9
"""Seconds by which a finding may be late: it is made at a heartbeat."""


async def lost_after(side: Played) -> float:
    """Seconds after which an open stream is found to be lost."""
    call = side.begin(streaming=True, deadline=None)
    await side.far.request()
    begun = monotonic()
    with pytest.raises(StreamLost):
        async with asyncio.timeout(60.0):
            await call.items()
    return monotonic() - begun


def test_an_instance_that_never_answers_is_gone_after_the_limit() -> None:
    async def story() -> float:
        async with played() as side:
            return await lost_after(side)

    assert SILENCE_LIMIT - ROUNDED <= run(story()) <= SILENCE_LIMIT + LATE


def test_an_instance_that_beats_is_never_gone() -> None:
    async def story() -> bool:
        async with played() as side:
            call = side.begin(streaming=True, deadline=None)
            await side.far.request()

            for _ in range(100):
                await asyncio.sleep(HEARTBEAT_INTERVAL)
                await side.far.beat()

            return call.is_open

    assert run(story())


@pytest.mark.parametrize("peers", [1, 2, 5])
@pytest.mark.parametrize("is_third_heard", [False, True])
def test_the_server_is_left_when_two_instances_fall_silent_and_nobody_is_heard(
    peers: int, is_third_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []

    def leave(connection: MemoryConnection, why: str) -> None:
        left.append(monotonic())

    monkeypatch.setattr(MemoryConnection, "leave_server", leave)

    async def story() -> float:
        async with played() as side:
            silent = [FarSide(await side.server.connect(), f"silent{n}") for n in range(peers)]
            for far in silent:
                await far.start()
            side.begin(streaming=True, deadline=None)
            calls = [
                side.begin(streaming=True, deadline=None, instance_id=far.instance_id)
                for far in silent
            ]
            begun = monotonic()
            while any(call.is_open for call in calls):
                if is_third_heard:
                    await side.far.beat(number=side.bus.heartbeats.number)
                await asyncio.sleep(HEARTBEAT_INTERVAL)
            for far in silent:
                await far.connection.close()
            return begun

    begun = run(story())

    # Where the third is not heard, it is a silent one too.
    assert len(left) == (0 if is_third_heard else 1)
    assert all(at - begun <= SILENCE_LIMIT + LATE for at in left)


def test_heartbeats_that_arrive_after_later_ones_are_no_sign_of_life() -> None:
    async def story() -> float:
        async with played() as side:
            call = side.begin(streaming=True, deadline=None)
            await side.far.request()
            await side.far.beat(number=100)
            begun = monotonic()

            for number in range(100):
                await asyncio.sleep(HEARTBEAT_INTERVAL)
                await side.far.beat(number=number)
                if not call.is_open:
                    break

            return monotonic() - begun

    assert SILENCE_LIMIT - ROUNDED <= run(story()) <= SILENCE_LIMIT + LATE


def test_an_instance_is_not_taken_for_blocked_by_what_it_said_before_its_latest_heartbeat() -> None:
    async def story() -> bool:
        async with played(stall_limit=10.0) as side:
            call = side.begin(streaming=True, deadline=None)
            await side.far.request()

            await side.far.beat(number=2)
            await side.far.beat(number=1, blocked=60.0)

            return call.is_open

    assert run(story())


def test_the_numbers_of_heartbeats_grow_over_calls_connections_and_processes() -> None:
    async def numbers(server: MemoryBus) -> list[int]:
        async with played(server) as side:
            for _ in range(2):
                call = side.begin(streaming=True, deadline=None)
                for _ in range(3):
                    await side.far.beat(number=side.bus.heartbeats.number)
                    await asyncio.sleep(HEARTBEAT_INTERVAL)
                call.abandon()
                side.bus.lane.connection.disconnect()  # type: ignore[attr-defined]
                side.bus.lane.connection.reconnect()  # type: ignore[attr-defined]
                await asyncio.sleep(HEARTBEAT_INTERVAL)
            return [frame.beat for frame in side.far.all(Open)]

    async def story() -> list[int]:
        server = MemoryBus()
        return [*await numbers(server), *await numbers(server)]

    told = run(story())

    assert len(told) >= 12
    assert told == sorted(set(told))


def test_an_instance_that_nobody_can_reach_is_gone_sooner_than_a_silent_one() -> None:
    async def story() -> tuple[float, float]:
        async with played() as side:
            silent = await lost_after(side)
            call = side.begin(streaming=True, deadline=None)
            await side.far.leave()
            begun = monotonic()

            call.remote.send((call.resume_frame(monotonic()),))  # it bounces
            with pytest.raises(StreamLost):
                await call.items()

            return monotonic() - begun, silent

    unreachable, silent = run(story())
    assert GONE_AFTER - ROUNDED <= unreachable <= GONE_AFTER + LATE
    assert unreachable < silent


def test_heartbeats_are_sent_while_calls_are_open_and_then_no_more() -> None:
    async def story() -> None:
        async with played() as side:
            await asyncio.sleep(5.0)
            before = side.far.all(Open)
            call = side.begin(streaming=True, deadline=None)
            for _ in range(10):
                await asyncio.sleep(HEARTBEAT_INTERVAL)
                await side.far.beat()
            during = len(side.far.all(Open))

            call.abandon()
            await asyncio.sleep(2 * HEARTBEAT_INTERVAL)
            at_the_end = len(side.far.all(Open))
            await asyncio.sleep(5.0)

            assert before == []
            assert 8 <= during <= 11
            assert len(side.far.all(Open)) == at_the_end

    run(story())


def test_a_bus_without_remotes_ticks_no_oftener_than_it_would_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks: list[float] = []
    judge = Heartbeats._judge

    def count(heartbeats: Heartbeats, now: float) -> None:
        ticks.append(now)
        judge(heartbeats, now)

    monkeypatch.setattr(Heartbeats, "_judge", count)

    async def story() -> tuple[int, int]:
        async with played() as side:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            ticks.clear()
            await asyncio.sleep(100 * HEARTBEAT_INTERVAL)
            at_rest = len(ticks)
            side.begin(streaming=True, deadline=None)
            await side.far.request()
            ticks.clear()
            await asyncio.sleep(HEARTBEAT_INTERVAL + TICK)
            return at_rest, len(ticks)

    at_rest, with_a_call = run(story())
    assert at_rest <= 101
    assert with_a_call > 2


def test_while_we_are_cut_off_ourselves_nobody_is_gone() -> None:
    async def story() -> bool:
        async with played() as side:
            call = side.begin(streaming=True, deadline=None)
            await side.far.heard(Open)
            control = side.server.connections[1]

            control.disconnect()
            await asyncio.sleep(10 * SILENCE_LIMIT)
            control.reconnect()
            await asyncio.sleep(RECONNECT_GRACE - HEARTBEAT_INTERVAL)
            await side.far.beat()
            await asyncio.sleep(HEARTBEAT_INTERVAL)

            return call.is_open

    assert run(story())


def test_a_silence_of_our_own_link_is_not_taken_for_the_instances() -> None:
    async def story() -> bool:
        async with played() as side:
            call = side.begin(streaming=True, deadline=None)
            await side.far.heard(Open)
            control = side.server.connections[1]

            with side.server.partition(control, notice_after=60.0):
                await asyncio.sleep(4 * SILENCE_LIMIT)
            await side.far.beat()

            return call.is_open

    assert run(story())


def test_a_ping_of_an_instance_with_open_calls_is_answered() -> None:
    async def story() -> list[int]:
        async with played() as side:
            side.begin(streaming=True)
            await side.far.request()

            await side.far.send_control(Ping(17))

            return [pong.token for pong in await side.far.heard(Pong)]

    assert run(story()) == [17]


def test_a_control_message_that_is_no_batch_is_counted_and_stops_nobody() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin(streaming=True)
            await side.far.heard(Open)

            side.far.connection.publish(side.bus.replies.control_frames, b"\xc1")
            await settle(side.far.connection)
            await asyncio.sleep(SILENCE_LIMIT - 2 * TICK)
            await side.far.beat()
            await asyncio.sleep(SILENCE_LIMIT - 2 * TICK)

            assert side.bus.drops == {DropReason.MALFORMED: 1}
            assert side.caller.is_heard(ENDPOINT.component_name.instance("one"))
            assert call.is_open

    run(story())


def test_an_answer_at_a_bounce_subject_of_the_lane_is_no_bounce_and_is_counted() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin(streaming=True)
            await side.far.heard(Open)

            token = side.caller.registry.bounce_token("one")
            side.far.connection.publish(side.bus.replies.control_bounce(token), b"I am here")
            await settle(side.far.connection)

            assert side.bus.drops == {DropReason.UNEXPECTED: 1}
            assert call.is_open

    run(story())


def test_one_side_whose_calls_cannot_be_told_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> int:
        async with played() as side, played(side.server) as other:
            broken, whole = side.begin(streaming=True), other.begin(streaming=True)
            side.bus.heartbeats.add(other.caller.registry)

            def fail(number: int) -> None:
                raise KeyError("broken")

            monkeypatch.setattr(broken.remote, "beat", fail)
            count = len(other.far.all(Open))
            await asyncio.sleep(2 * HEARTBEAT_INTERVAL)
            assert whole.is_open
            return len(other.far.all(Open)) - count

    with caplog.at_level(logging.ERROR):
        beats = run(story())

    assert beats > 0
    assert "a heartbeat of" in caplog.text


def test_a_remote_that_cannot_be_told_keeps_no_other_one_from_its_heartbeat(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> tuple[int, bool]:
        async with played() as side:
            broken = side.begin(instance_id="broken", streaming=True, deadline=None)
            whole = side.begin(streaming=True, deadline=None)

            def fail(number: int) -> None:
                raise PayloadTooLarge("too many calls")

            with monkeypatch.context() as patched:
                patched.setattr(broken.remote, "beat", fail)
                for _ in range(10):
                    await asyncio.sleep(HEARTBEAT_INTERVAL)
                    await side.far.beat()

            assert isinstance(broken.error, DynbusError)
            return len(side.far.all(Open)), whole.is_open

    with caplog.at_level(logging.ERROR):
        beats, still_open = run(story())

    assert beats >= 8
    assert still_open
    assert "a heartbeat of" in caplog.text


@asynccontextmanager
async def bus_with_a_lane_of_its_own() -> AsyncGenerator[Bus]:
    control = MemoryBus()
    lane = ThreadLane("test-control")

    async def connect() -> MemoryConnection:
        return await control.connect()

    await lane.start(connect)
    bus = Bus(BusConfig(), await MemoryBus().connect(), lane, ReplySubjects("-", "c" * 32))
    await bus.start()
    try:
        yield bus
    finally:
        await bus.close()


@pytest.mark.anyio
async def test_a_blocked_main_loop_is_measured_and_reported_with_the_lines_that_block_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bus_with_a_lane_of_its_own() as bus:

        def reports() -> list[str]:
            return [text for text in caplog.messages if "the main loop has been blocked" in text]

        def block_the_loop() -> None:
            # Blocks this loop until the lane has noticed; the lane goes on by itself. What it is
            # late itself, on a busy machine, is measured and not reported.
            wait_until(lambda: bus.heartbeats.blocked >= 0.5 and reports())

        with caplog.at_level(logging.WARNING):
            block_the_loop()

    (report,) = reports()
    assert "block_the_loop" in report
    assert "_run_once" not in report


@pytest.mark.anyio
async def test_a_main_loop_that_is_not_heard_while_it_waits_is_measured_and_not_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unheard(function: object) -> None:
        """As on a machine that is so busy that this loop is not woken."""

    async with bus_with_a_lane_of_its_own() as bus:

        def told() -> list[str]:
            monkeypatch.setattr(bus.heartbeats, "_to_main", unheard)
            wait_until(lambda: bus.heartbeats.blocked >= 0.5)
            return list(caplog.messages)

        with caplog.at_level(logging.WARNING):
            # All of it on a thread: a loop that does anything itself may be seen at it, and is
            # reported then.
            messages = await asyncio.to_thread(told)

    assert not any("blocked" in text for text in messages)


def test_after_an_outage_of_ours_a_call_that_was_new_before_it_has_time_as_well() -> None:
    async def story() -> float:
        async with played() as side:
            call = side.begin(streaming=True, deadline=None)
            control = side.server.connections[1]
            control.disconnect()
            await asyncio.sleep(0.05)
            await side.far.leave()
            control.reconnect()
            back = monotonic()
            with pytest.raises(StreamLost):
                await call.items()
            return monotonic() - back

    assert RECONNECT_GRACE - ROUNDED <= run(story()) <= RECONNECT_GRACE + LATE
