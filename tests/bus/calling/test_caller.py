"""The caller sends what the wire wants, believes only what fits a call, and ends each one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.bus.far_side import ENDPOINT, Played, played, settle

from dynbus.bus.calling.call_progress import STALLED_AFTER
from dynbus.bus.calling.open_calls import SMALLEST_WINDOW
from dynbus.bus.calling.pending_call import PendingCall
from dynbus.bus.clock import monotonic
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    Overloaded,
    PayloadTooLarge,
    StreamLost,
    Unavailable,
    UnknownOutcome,
)
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.liveness import HEARTBEAT_INTERVAL
from dynbus.bus.protocol.names import EndpointName, InstanceName
from dynbus.bus.protocol.wire import (
    Cancel,
    Credit,
    End,
    Frame,
    Heartbeat,
    Item,
    Items,
    Open,
    Ping,
    Pong,
    Resume,
    Unknown,
    encode_batch,
)
from dynbus.testing import run

# What is sent ------------------------------------------------------------------------------

ONE = ENDPOINT.component_name.instance("one")
TWO = ENDPOINT.component_name.instance("two")


def test_a_request_carries_its_number_secret_window_and_time_left() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin(b"question", fields={"X-Color": "blue"})

            request = await side.far.request()

            assert request.data == b"question"
            assert (request.number, request.secret) == (call.number, call.secret)
            assert request.window == call.reader.window
            assert request.fields[headers.REQUEST_ID] == "request-1"
            assert request.fields[headers.DEADLINE] == "30000"
            assert request.fields["X-Color"] == "blue"
            assert headers.ATTEMPT not in request.fields

    run(story())


def test_without_a_deadline_none_is_sent_and_a_later_attempt_says_so() -> None:
    async def story() -> None:
        async with played() as side:
            side.begin(deadline=None, attempt=3)

            request = await side.far.request()

            assert headers.DEADLINE not in request.fields
            assert request.fields[headers.ATTEMPT] == "3"

    run(story())


def test_two_calls_have_different_numbers_and_secrets() -> None:
    async def story() -> None:
        async with played() as side:
            first, second = side.begin(), side.begin()

            assert first.number != second.number
            assert first.secret != second.secret

    run(story())


def test_a_request_larger_than_a_message_arrives_in_parts() -> None:
    async def story() -> None:
        async with played(MemoryBus(max_payload=4096)) as side:
            data = bytes(range(256)) * 64

            side.begin(data)

            first = await side.far.request()
            count = int(first.fields[headers.PART].partition("/")[2])
            await side.far.request(count)
            parts = side.far.requests
            assert b"".join(part.data for part in parts) == data
            assert [part.fields[headers.PART] for part in parts] == [
                f"{n + 1}/{count}" for n in range(count)
            ]
            assert {part.fields[headers.REQUEST_ID] for part in parts} == {"request-1"}

    run(story())


async def refused(side: Played, kind: type[DynbusError], data: bytes = b"", **changes: Any) -> None:
    """A call is refused so, before anything of it is sent or kept."""
    with pytest.raises(kind) as raised:
        side.begin(data, **changes)

    await settle(side.far.connection)
    assert not raised.value.started or kind is ConfigError
    assert side.far.requests == []
    assert side.caller.open_calls() == {}


def test_a_request_over_the_limit_is_refused_before_it_is_sent() -> None:
    async def story() -> None:
        async with played(max_request_bytes=100) as side:
            await refused(side, PayloadTooLarge, b"x" * 101)

    run(story())


def test_a_request_of_too_many_parts_is_refused_before_it_is_sent() -> None:
    async def story() -> None:
        async with played(MemoryBus(max_payload=4096)) as side:
            await refused(side, PayloadTooLarge, b"x" * (20 * 1024 * 1024))

    run(story())


def test_a_call_whose_deadline_has_passed_is_not_sent() -> None:
    async def story() -> None:
        async with played() as side:
            await refused(side, DeadlineExceeded, deadline=1.0)

    run(story())


def test_a_header_that_cannot_be_written_is_refused() -> None:
    async def story() -> None:
        async with played() as side:
            await refused(side, ConfigError, fields={"X-Name": "line\nbreak"})

    run(story())


def test_many_open_streams_share_the_connections_window() -> None:
    async def story() -> None:
        async with played(connection_window=1024 * 1024) as side:
            calls = [side.begin() for _ in range(60)]
            windows = [call.reader.window for call in calls]

            for call in calls:
                call.abandon()
            again = side.begin()

            assert windows[0] == 128 * 1024
            assert windows == sorted(windows, reverse=True)
            assert windows[-1] == SMALLEST_WINDOW
            assert again.reader.window == windows[0]

    run(story())


# What comes back ---------------------------------------------------------------------------


def test_the_result_of_a_unary_call_is_its_end() -> None:
    async def story() -> bytes:
        async with played() as side:
            call = side.begin()

            await side.far.send(End(call.number, call.secret, 1, 0, b"answer"))

            return await call.result()

    assert run(story()) == b"answer"


def test_frames_of_another_secret_or_attempt_are_dropped_and_counted() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin(attempt=2)
            number, secret = call.number, call.secret

            await side.far.send(
                End(number, bytes(16), 2, 0, b"forged"),
                End(number, secret, 1, 0, b"of an earlier attempt"),
                End(number + 1, secret, 2, 0, b"of no call"),
                End(number, secret, 2, 0, b"right"),
            )

            assert await call.result() == b"right"
            assert side.bus.drops == {DropReason.STALE: 3}

    run(story())


@pytest.mark.parametrize("frame", [Ping(1), Cancel(1, bytes(16), 1, 0.0), Open(1, [], [])])
def test_a_frame_that_is_no_result_is_dropped_and_counted(frame: Frame) -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()

            await side.far.send(frame)

            assert call.is_open
            assert side.bus.drops == {DropReason.UNEXPECTED: 1}

    run(story())


@pytest.mark.parametrize("data", [b"", b"\xc1", b"no batch", encode_batch("one", "x", 0, [])[:-1]])
def test_what_is_no_batch_is_dropped_and_counted(data: bytes) -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()

            side.far.connection.publish(side.bus.replies.frames, data)
            await settle(side.far.connection)

            assert call.is_open
            assert side.bus.drops == {DropReason.MALFORMED: 1}

    run(story())


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("999", DropReason.STALE),
        ("x", DropReason.UNEXPECTED),
        ("-1", DropReason.UNEXPECTED),
        ("١", DropReason.UNEXPECTED),
        ("9" * 30, DropReason.UNEXPECTED),
    ],
)
def test_an_answer_to_no_call_changes_nothing_and_is_counted(
    token: str, reason: DropReason
) -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()

            side.far.connection.publish(f"{side.bus.replies.base}.{token}", b"")
            await settle(side.far.connection)

            assert call.is_open
            assert side.bus.drops == {reason: 1}

    run(story())


def test_an_answer_that_comes_when_its_call_has_ended_is_counted() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()
            request = await side.far.request()
            await side.far.send(End(call.number, call.secret, 1, 0, b""))

            block = refusal(request.secret, "Overloaded", 429)
            subject = side.bus.replies.request(call.number)
            side.far.connection.publish(subject, b"", headers=block)
            await settle(side.far.connection)

            assert call.error is None
            assert side.bus.drops == {DropReason.STALE: 1}

    run(story())


def test_what_an_instance_says_of_no_call_of_ours_is_counted() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()
            await side.far.request()

            await side.far.send_control(Unknown(call.number, bytes(16), 1))
            await side.far.send_control(Credit(call.number, call.secret, 1, 0, 0))
            side.caller.registry.remotes.clear()
            await side.far.beat()

            assert call.is_open
            assert side.bus.drops == {DropReason.STALE: 2, DropReason.UNEXPECTED: 1}

    run(story())


def refusal(secret: bytes, error: str, code: int) -> bytes:
    return headers.encode(
        {
            headers.FRAMES: secret.hex(),
            headers.ERROR: error,
            headers.SERVICE_ERROR: "no room",
            headers.SERVICE_ERROR_CODE: str(code),
        }
    )


@pytest.mark.parametrize(
    ("error", "code", "kind", "started"),
    [
        ("Overloaded", 429, Overloaded, False),
        ("Unavailable", 503, Unavailable, False),
        ("PayloadTooLarge", 413, PayloadTooLarge, True),
        ("FromTheFuture", 500, DynbusError, True),
    ],
)
def test_a_refusal_without_frames_is_a_typed_error(
    error: str, code: int, kind: type[DynbusError], started: bool
) -> None:
    async def story() -> DynbusError | None:
        async with played() as side:
            call = side.begin()

            block = refusal(call.secret, error, code)
            subject = side.bus.replies.request(call.number)
            side.far.connection.publish(subject, b"", headers=block)
            await settle(side.far.connection)

            return call.error

    found = run(story())
    assert found is not None
    assert type(found) is kind
    assert found.message == "no room"
    assert found.started is started


def test_a_refusal_without_the_secret_is_dropped_and_counted() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()

            subject = side.bus.replies.request(call.number)
            block = refusal(bytes(16), "Overloaded", 429)
            side.far.connection.publish(subject, b"", headers=block)
            await settle(side.far.connection)

            assert call.is_open
            assert side.bus.drops == {DropReason.UNEXPECTED: 1}

    run(story())


# How calls end -----------------------------------------------------------------------------


def test_a_call_that_nobody_hears_ends_at_once_and_did_not_start() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin(instance_id="nobody")

            with pytest.raises(Unavailable) as raised:
                await call.result()

            assert raised.value.hop == ENDPOINT.hop("nobody")
            assert not raised.value.started
            assert call.unreachable

    run(story())


@pytest.mark.parametrize(("streaming", "kind"), [(False, UnknownOutcome), (True, StreamLost)])
def test_the_calls_of_an_instance_that_is_gone_end(
    streaming: bool, kind: type[DynbusError]
) -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin(streaming=streaming)

            side.caller.gone(call.remote)

            with pytest.raises(kind):
                await call.result()
            assert call.unreachable
            assert side.caller.open_calls() == {}

    run(story())


@pytest.mark.parametrize("gone_first", [False, True])
def test_the_calls_of_an_instance_that_is_gone_end_where_the_bus_has_failed(
    gone_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise ValueError("on purpose")

    async def never(*, timeout: float = 5.0) -> None:
        await asyncio.Event().wait()

    async def story() -> None:
        async with played() as side:
            call = side.begin()
            failed = asyncio.Event()
            side.bus.on_failure(failed.set)
            monkeypatch.setattr(side.bus.data, "barrier", never)
            if gone_first:
                side.caller.gone(call.remote)
                # It waits for the server's word.
                await settle(side.far.connection)
                assert call.is_open
            side.bus.background.start(fail, name="fails")
            await failed.wait()
            if not gone_first:
                side.caller.gone(call.remote)

            assert not call.is_open
            assert call.unreachable

    run(story())


@pytest.mark.parametrize("in_doubt", [False, True])
def test_a_call_of_an_instance_that_is_gone_hears_first_whether_anybody_took_it(
    in_doubt: bool,
) -> None:
    """Even one of which a slow loop has not read yet that it is to be doubted."""

    async def story() -> None:
        async with played() as side:
            call = side.begin(instance_id="nobody")
            while call.doubt == "" and in_doubt:  # noqa: ASYNC110 - for a few turns alone
                await asyncio.sleep(0)

            side.caller.gone(call.remote)

            assert call.is_open
            with pytest.raises(Unavailable) as raised:
                await call.result()
            assert not raised.value.started

    run(story())


@pytest.mark.parametrize(("streaming", "kind"), [(False, UnknownOutcome), (True, StreamLost)])
def test_a_call_in_doubt_that_hears_nothing_of_it_ends_all_the_same(
    streaming: bool, kind: type[DynbusError]
) -> None:
    """Another than the server said that nobody took it."""

    async def story() -> None:
        async with played() as side:
            call = side.begin(streaming=streaming)
            taken = await side.far.request()
            side.far.connection.publish(
                f"{taken.base}.{taken.number}", b"", headers=b"NATS/1.0 503\r\n\r\n"
            )
            await settle(side.far.connection)
            assert call.doubt

            side.caller.gone(call.remote)

            with pytest.raises(kind):
                await call.result()
            assert call.unreachable

    run(story())


@pytest.mark.parametrize(("calls", "level"), [(0, "DEBUG"), (2, "WARNING")])
def test_an_instance_that_is_gone_is_named_with_the_calls_that_were_open_at_it(
    calls: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with played() as side:
            begun = [side.begin() for _ in range(calls + 1)]
            begun[-1].abandon()

            side.caller.gone(begun[-1].remote)

    with caplog.at_level(logging.DEBUG, "dynbus.bus.calling.caller"):
        run(story())

    (record,) = caplog.records
    assert record.levelname == level
    assert record.message == f"played.FarSide@one is gone; calls that were open at it: {calls}"


def test_an_instance_whose_loop_is_blocked_too_long_is_gone() -> None:
    async def story() -> None:
        async with played(stall_limit=5.0) as side:
            call = side.begin(streaming=True)
            await side.far.request()

            await side.far.beat(blocked=5.0)
            tolerated = call.is_open
            await side.far.beat(blocked=5.1)

            assert tolerated
            with pytest.raises(StreamLost):
                await call.items()

    run(story())


async def stalls(
    side: Played, call: PendingCall, meanwhile: Callable[[int], Awaitable[None]]
) -> float | None:
    """Seconds until a stream is given up whose instance says at each heartbeat that it sent more
    than came; None for never.

    Args:
        meanwhile: called after each heartbeat with how many there were.
    """
    begun = monotonic()
    for beat in range(1, 20):
        await side.far.beat(5, number=beat)
        await meanwhile(beat)
        if not call.is_open:
            return monotonic() - begun
        await asyncio.sleep(HEARTBEAT_INTERVAL)
    return None


async def nothing(beat: int) -> None:
    """Nothing comes."""


CONTINUES = {headers.CONTINUES: "0"}


def test_a_stream_whose_items_never_come_although_its_instance_is_heard_is_lost() -> None:
    async def story() -> float | None:
        async with played() as side:
            call = side.begin(streaming=True, fields=CONTINUES)
            await side.far.send(Item(call.number, call.secret, 1, 0, b"first"))

            seconds = await stalls(side, call, nothing)

            assert isinstance(call.error, StreamLost)
            assert call.error.hop == call.hop
            assert call.unreachable
            assert len(side.far.all(Resume)) >= 2
            assert await side.far.heard(Cancel)
            return seconds

    seconds = run(story())

    assert seconds is not None
    assert STALLED_AFTER <= seconds <= STALLED_AFTER + 2 * HEARTBEAT_INTERVAL


@pytest.mark.parametrize("kind", ["unary", "stream without resume"])
def test_what_could_not_go_on_elsewhere_waits_for_what_was_sent(kind: str) -> None:
    async def story() -> float | None:
        async with played() as side:
            call = side.begin(streaming=kind != "unary")
            await side.far.request()

            return await stalls(side, call, nothing)

    assert run(story()) is None


@pytest.mark.parametrize("which", ["of the stream", "of another one"])
def test_a_stream_is_not_lost_as_long_as_items_come_from_its_instance(which: str) -> None:
    async def story() -> float | None:
        async with played() as side:
            call = side.begin(streaming=True, fields=CONTINUES)
            other = side.begin(streaming=True)
            await side.far.request(2)
            comes = call if which == "of the stream" else other

            async def item(beat: int) -> None:
                if beat % 4 == 0:
                    place = comes.reader.next_sequence
                    await side.far.send(Item(comes.number, comes.secret, 1, place, b"next"))

            return await stalls(side, call, item)

    assert run(story()) is None


def test_a_request_that_the_instance_does_not_know_was_lost_on_its_way() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin()
            await side.far.request()

            await side.far.send_control(Unknown(call.number, call.secret, 1))

            assert isinstance(call.error, Unavailable)
            assert not call.error.started

    run(story())


def test_a_stream_that_the_instance_knows_no_longer_is_lost() -> None:
    async def story() -> None:
        async with played() as side:
            call = side.begin(streaming=True)
            await side.far.send(Item(call.number, call.secret, 1, 0, b"first"))

            await side.far.send_control(Unknown(call.number, bytes(16), 1))
            forged = call.is_open
            await side.far.send_control(Unknown(call.number, call.secret, 1))

            assert forged
            assert isinstance(call.error, StreamLost)
            assert await call.items() == [b"first"]

    run(story())


def test_a_split_request_that_was_lost_ends_and_fits_a_smaller_server_when_sent_anew() -> None:
    async def story() -> None:
        async with played(MemoryBus(max_payload=65536)) as side:
            side.begin()
            await side.far.request()
            data = bytes(200_000)
            connection = side.server.connections[0]

            connection.disconnect()
            lost = side.begin(data)
            side.server.max_payload = 4096
            connection.reconnect()
            (resume,) = [
                one for one in await side.far.heard(Resume, 2) if one.number == lost.number
            ]
            await side.far.send_control(Unknown(resume.number, resume.secret, 1))
            with pytest.raises(Unavailable, match="lost on its way") as raised:
                await lost.result()
            side.begin(data)
            count = int((await side.far.request(2)).fields[headers.PART].partition("/")[2])
            await side.far.request(1 + count)

            assert not raised.value.started
            assert b"".join(part.data for part in side.far.requests[1:]) == data
            with pytest.raises(PayloadTooLarge, match="max_payload = 4096"):
                side.begin(bytes(30_000_000))

    run(story())


def test_after_a_reconnect_every_open_call_asks_for_what_is_missing() -> None:
    async def story() -> None:
        async with played() as side:
            first, second = side.begin(streaming=True), side.begin(streaming=True)
            await side.far.send(Items(first.number, first.secret, 1, 0, [b"a", b"b"]))
            data = side.server.connections[0]

            data.disconnect()
            data.reconnect()

            asked = {(f.number, f.resume_from) for f in await side.far.heard(Resume, 2)}
            assert asked == {(first.number, 2), (second.number, 0)}

    run(story())


def test_closing_ends_every_call_and_says_so_to_the_far_side() -> None:
    async def story() -> None:
        async with played() as side:
            done, left = side.begin(), side.begin()
            await side.far.request(2)
            await side.far.send(End(done.number, done.secret, 1, 0, b""))

            await side.caller.close()

            assert isinstance(left.error, Cancelled)
            assert [frame.number for frame in await side.far.heard(Cancel)] == [left.number]
            (beat,) = [frame for frame in await side.far.heard(Open) if frame.done]
            assert beat.done == [(done.number, done.secret)]

    run(story())


# The way to an instance ---------------------------------------------------------------------


def test_a_process_with_a_zone_measures_the_way_to_an_instance_while_calls_are_open() -> None:
    async def story() -> list[float | None]:
        async with played(zone="east") as side:
            side.begin(streaming=True)
            [ping] = await side.far.heard(Ping)
            measured = [side.caller.round_trip(ONE)]
            await asyncio.sleep(0.25)

            await side.far.send_control(Pong(ping.token + 1))
            measured.append(side.caller.round_trip(ONE))
            await side.far.send_control(Pong(ping.token))
            return [*measured, side.caller.round_trip(ONE)]

    before, of_another, measured = run(story())

    assert (before, of_another) == (None, None)
    assert measured == pytest.approx(0.25, abs=0.01)


def test_a_ping_that_another_than_the_instance_passes_on_is_not_answered() -> None:
    # It would prove to another instance that the calls of the first in our name are ours.
    async def story() -> list[Pong]:
        async with played() as side:
            side.begin(streaming=True)
            request = await side.far.request()
            relayed = encode_batch("two", request.incarnation, 0, [Ping(7)])
            side.far.connection.publish(f"{request.base}.ctl.f", relayed)
            await side.far.send_control(Ping(8))
            return await side.far.heard(Pong)

    assert run(story()) == [Pong(8)]


def test_a_ping_for_a_proof_is_answered_to_the_instance_of_that_whole_name_alone() -> None:
    # An instance of another component may have taken the id of one, to have its clients answer in
    # its place what that asks.
    async def story() -> list[Pong]:
        async with played() as side:
            side.begin(streaming=True)
            request = await side.far.request()
            subject = f"{request.base}.ctl.f"
            asks = {"played.Other@one": 7, "other.FarSide@one": 8, str(ONE): 9}
            for name, token in asks.items():
                data = encode_batch(name, request.incarnation, 0, [Ping(token)])
                side.far.connection.publish(subject, data)
            return await side.far.heard(Pong)

    assert run(story()) == [Pong(9)]


def test_a_process_without_a_zone_measures_no_way() -> None:
    async def story() -> None:
        async with played() as side:
            side.begin(streaming=True)
            await side.far.heard(Open, 3)

            assert side.far.all(Ping) == []
            assert side.caller.round_trip(ONE) is None

    run(story())


# What others ask it ------------------------------------------------------------------------


def test_it_tells_what_is_open_where_and_what_the_instance_reported() -> None:
    async def story() -> None:
        async with played() as side:
            caller = side.caller
            before = caller.in_flight(ONE), caller.load(ONE), caller.is_heard(ONE)

            call = side.begin()
            side.begin()
            item = Item(call.number, call.secret, 1, 0, b"1")
            await side.far.send(item, load=7)

            assert before == (0, 0, False)
            assert caller.in_flight(ONE) == 2
            assert caller.open_calls() == {"one": 2}
            assert caller.load(ONE) == 7
            assert repr(caller) == "<Caller [2 calls]>"
            call.abandon()
            assert caller.in_flight(ONE) == 1

    run(story())


def test_a_heartbeat_makes_only_the_calls_ask_that_its_numbers_speak_of() -> None:
    async def story() -> None:
        async with played() as side:
            first, second, third = (side.begin(streaming=True) for _ in range(3))
            await side.far.request(3)

            for _ in range(2):
                beat = Heartbeat(1, 0.0, False, [], second.number, second.number)
                await side.far.send_control(beat)
            asked = [resume.number for resume in side.far.all(Resume)]
            for _ in range(2):
                await side.far.send_control(Heartbeat(1, 0.0, False, [], third.number, None))

            assert asked == [second.number]
            assert [resume.number for resume in side.far.all(Resume)] == [
                second.number,
                third.number,
            ]
            assert first.is_open

    run(story())


def test_an_instance_is_heard_while_its_heartbeats_come() -> None:
    async def story() -> None:
        async with played() as side:
            side.begin()
            await side.far.heard(Open)

            await side.far.beat()

            assert side.caller.is_heard(ONE)
            assert not side.caller.is_heard(TWO)

    run(story())


def test_instances_of_two_components_may_have_one_id_and_know_nothing_of_each_other() -> None:
    async def story() -> tuple[bool, int, int]:
        async with played() as side:
            mine = side.begin()
            other = side.begin(endpoint=EndpointName("played", "Other", "call"))
            elsewhere = InstanceName("played", "Other", "one")
            await side.far.request()

            return (
                mine.remote.incarnation == other.remote.incarnation,
                side.caller.in_flight(ONE),
                side.caller.in_flight(elsewhere),
            )

    assert run(story()) == (False, 1, 1)


def test_a_call_that_begins_once_the_caller_is_closed_is_refused() -> None:
    async def story() -> str:
        async with played() as side:
            await side.caller.close()
            with pytest.raises(Unavailable) as caught:
                side.begin()
            return str(caught.value)

    assert "the runtime is closed" in run(story())
