"""A call's results end once, and leave in the form that its caller reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

import pytest
from tests.bus.far_side import settle
from tests.bus.near_side import (
    ADDRESS,
    INSTANCE,
    PlayedClient,
    bus_in_memory,
    secret_of,
    until,
)

from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import Cancelled, DynbusError, HandlerError, Overloaded, Unavailable
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.stream_writer import StreamWriter
from dynbus.bus.protocol.wire import End, Failed, Items, encode_batch
from dynbus.bus.serving.reply import PLAIN_WINDOW, CallReply, FramedReply, PlainReply, error_block
from dynbus.bus.transport import Message
from dynbus.testing import run

REPLY = "_INBOX.plain"
HOP = f"{ADDRESS}@{INSTANCE}"


class Outgoing:
    """Sends what one writer has, at once."""

    def __init__(self, bus: Bus, base: str) -> None:
        self.bus = bus
        self.base = base

    def touch_ended(self, writer: StreamWriter) -> None:
        batch = encode_batch(INSTANCE, "incarnation", 0, [*writer.take_frames(1 << 20)])
        self.bus.data.publish(f"{self.base}.f", batch)


class Bench(NamedTuple):
    """A dynbus client and a plain one that read."""

    bus: Bus
    client: PlayedClient
    plain: MemoryConnection
    answers: list[Message]
    server: MemoryBus

    def framed(self, number: int = 1, *, granted: int = 1000) -> FramedReply:
        writer = StreamWriter(
            number,
            secret_of(number),
            1,
            granted=granted,
            max_unit_bytes=1000,
            max_item_bytes=1000,
            on_blocked=lambda _: reply.pause(),
        )
        outgoing = Outgoing(self.bus, self.client.base)
        reply = FramedReply(
            self.bus, ADDRESS, HOP, "r1", monotonic(), writer, cast("Any", outgoing)
        )
        return reply

    def plain_reply(self) -> PlainReply:
        return PlainReply(self.bus, ADDRESS, HOP, "r1", monotonic(), REPLY)

    async def settle(self) -> None:
        await asyncio.sleep(0)
        await settle(cast("Any", self.bus.data))


@asynccontextmanager
async def bench() -> AsyncGenerator[Bench, None]:
    async with bus_in_memory() as (server, bus):
        client, plain = PlayedClient(await server.connect()), await server.connect()
        await client.start()
        answers: list[Message] = []
        plain.subscribe(REPLY, answers.append)
        await plain.barrier()
        yield Bench(bus, client, plain, answers, server)
        await client.connection.close()
        await plain.close()


# Both -------------------------------------------------------------------------------------


@pytest.mark.parametrize("framed", [False, True])
def test_after_its_end_nothing_of_a_call_leaves(framed: bool) -> None:
    async def story() -> None:
        async with bench() as given:
            reply: CallReply = given.framed() if framed else given.plain_reply()

            reply.end(b"result")
            reply.end(b"another")
            reply.fail(HandlerError("no"))
            await given.settle()

            assert (reply.ended, reply.error) == (True, None)
            if framed:
                assert [frame.data for frame in given.client.all(End)] == [b"result"]
                assert given.client.all(Failed) == []
            else:
                assert [message.data for message in given.answers] == [b"result"]

    run(story())


@pytest.mark.parametrize("framed", [False, True])
def test_an_error_says_where_and_in_which_request_it_arose(framed: bool) -> None:
    async def story() -> None:
        async with bench() as given:
            reply: CallReply = given.framed() if framed else given.plain_reply()

            reply.fail(HandlerError("no"))

            assert reply.error is not None
            assert (reply.error.hop, reply.error.request_id) == (f"{ADDRESS}@{INSTANCE}", "r1")

    run(story())


def test_an_error_of_a_sub_call_keeps_its_place() -> None:
    async def story() -> None:
        async with bench() as given:
            reply = given.framed()

            reply.fail(HandlerError("no", hop="a.B.c@x", request_id="r0"))
            await given.settle()

            (failed,) = given.client.all(Failed)
            assert (failed.hop, failed.request_id) == ("a.B.c@x", "r0")

    run(story())


def test_progress_is_told_once() -> None:
    async def story() -> None:
        async with bench() as given:
            reply = given.framed()
            assert not reply.has_progressed(1.0)

            reply.push(b"x")

            assert reply.has_progressed(1.0)
            assert not reply.has_progressed(1.0)

    run(story())


# Framed -----------------------------------------------------------------------------------


def test_a_writer_without_credit_waits_until_it_is_woken_with_some() -> None:
    async def story() -> None:
        async with bench() as given:
            reply = given.framed(granted=1)
            assert not reply.push(b"x")
            waiting = asyncio.ensure_future(reply.writable())
            await until(lambda: reply.paused)

            reply.writer.credit(1, 0)
            assert reply.writer.blocked
            reply.writer.credit(2, 1)
            assert not reply.writer.blocked
            reply.go_on()
            await waiting

            assert not reply.paused

    run(story())


def test_a_writer_that_waits_for_credit_is_woken_by_the_end_of_its_call() -> None:
    async def story() -> None:
        async with bench() as given:
            reply = given.framed(granted=1)
            reply.push(b"x")
            waiting = asyncio.ensure_future(reply.writable())
            await until(lambda: reply.paused)

            reply.fail(HandlerError("no"))
            await waiting

            assert reply.ended

    run(story())


# Plain ------------------------------------------------------------------------------------


def test_a_plain_reader_gets_a_message_per_item_and_an_empty_one_at_the_end() -> None:
    async def story() -> None:
        async with bench() as given:
            reply = given.plain_reply()

            assert reply.push(b"1")
            assert reply.push(b"2")
            reply.end()
            await given.settle()

            assert [message.data for message in given.answers] == [b"1", b"2", b""]
            assert not given.answers[2].headers
            assert reply.sent_items == 2

    run(story())


def test_a_plain_stream_goes_on_when_the_server_has_taken_what_was_sent() -> None:
    async def story() -> None:
        async with bench() as given:
            reply = given.plain_reply()

            assert reply.push(bytes(PLAIN_WINDOW - 1))
            assert not reply.push(b"1")
            await reply.writable()

            assert sum(len(message.data) for message in given.answers) == PLAIN_WINDOW
            assert reply.push(b"2")

    run(story())


def test_a_plain_stream_does_not_outrun_a_server_that_takes_nothing() -> None:
    async def story() -> None:
        async with bench() as given:
            reply = given.plain_reply()
            reply.push(bytes(PLAIN_WINDOW))

            with given.server.partition(cast("Any", given.bus.data)), pytest.raises(Unavailable):
                await reply.writable()

    run(story())


def test_the_items_of_a_plain_stream_bounce_to_a_subject_that_others_cannot_guess() -> None:
    async def story() -> None:
        async with bench() as given:
            first, second = given.plain_reply(), given.plain_reply()

            first.push(b"1")
            second.push(b"2")
            await given.settle()

            bounces = [message.reply for message in given.answers]
            assert len(set(bounces)) == 2
            assert all(bounce.startswith(f"{given.bus.replies.base}.b.p") for bounce in bounces)
            assert all(len(bounce.rpartition(".")[2]) >= 33 for bounce in bounces)

    run(story())


def test_a_plain_stream_whose_reader_is_gone_is_ended() -> None:
    async def story() -> None:
        async with bench() as given:
            reply = given.plain_reply()
            reply.when_gone(lambda: reply.fail(Cancelled("gone")))
            await given.plain.close()

            reply.push(b"1")
            await given.settle()

            assert reply.ended
            assert reply.error is not None
            assert reply.error.code == "Cancelled"
            assert not reply.push(b"2")
            assert given.bus.bounce_handlers == {}

    run(story())


def test_a_plain_reader_reads_an_error_in_the_headers_of_an_empty_message() -> None:
    async def story() -> None:
        async with bench() as given:
            given.plain_reply().fail(Overloaded("later"))

            await given.settle()

            (answer,) = given.answers
            fields = headers.decode(answer.headers)
            assert answer.data == b""
            assert fields == {
                headers.SERVICE_ERROR: f"Overloaded: later (at {ADDRESS}@{INSTANCE})",
                headers.SERVICE_ERROR_CODE: "429",
                headers.ERROR: "Overloaded",
            }

    run(story())


def test_a_framed_reader_gets_items_and_a_plain_one_does_not_get_frames() -> None:
    async def story() -> None:
        async with bench() as given:
            framed = given.framed()
            framed.push(b"f")
            framed.end()
            given.plain_reply().push(b"p")

            await given.settle()

            assert [items.items for items in given.client.all(Items)] == [[b"f"]]
            assert [message.data for message in given.answers] == [b"p"]

    run(story())


# Errors in headers ------------------------------------------------------------------------


@pytest.mark.parametrize("message", ["a\r\nb: c", "ärger", "\x00\x1b[31m", "x" * 5000])
def test_an_error_in_a_header_is_short_and_printable(message: str) -> None:
    fields = headers.decode(error_block(HandlerError(message)))

    text = fields[headers.SERVICE_ERROR]
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= 1024
    assert set(fields) == {headers.SERVICE_ERROR, headers.SERVICE_ERROR_CODE, headers.ERROR}


def test_an_error_of_a_code_without_a_number_is_500() -> None:
    class Odd(DynbusError):
        code = "Odd"

    fields = headers.decode(error_block(Odd("why")))

    assert fields == {
        headers.SERVICE_ERROR: "Odd: why",
        headers.SERVICE_ERROR_CODE: "500",
        headers.ERROR: "Odd",
    }


@pytest.mark.parametrize(
    ("framing", "repeated"),
    [("1 00ff 1000 abc", True), (None, False), ("", False), ("a\nb", False), ("x" * 256, False)],
)
def test_the_framing_of_a_request_is_repeated_where_a_header_can_hold_it(
    framing: str | None, repeated: bool
) -> None:
    fields = headers.decode(error_block(HandlerError("no"), framing))

    assert fields.get(headers.FRAMES) == (framing if repeated else None)
