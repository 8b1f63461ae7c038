"""A call ends once, and its results leave in the form that its caller reads."""

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
    endpoint,
    secret_of,
    until,
)

from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.errors import DynbusError, HandlerError, Overloaded, Unavailable
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.memory.connection import MemoryConnection
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.stream_writer import StreamWriter
from dynbus.bus.protocol.wire import End, Failed, Item
from dynbus.bus.serving.calls import (
    PLAIN_WINDOW,
    FramedCall,
    PlainCall,
    ServerCall,
    error_block,
)
from dynbus.bus.serving.control import ServerControl
from dynbus.bus.serving.execution import Execution
from dynbus.bus.serving.outbox import Outbox
from dynbus.bus.serving.served_endpoint import ServedEndpoint
from dynbus.bus.transport import Message
from dynbus.testing import run

REPLY = "_INBOX.plain"


async def echo(data: bytes) -> bytes:
    return data


class Bench(NamedTuple):
    """An execution, and a dynbus client and a plain one that read."""

    bus: Bus
    execution: Execution
    served: ServedEndpoint
    control: ServerControl
    outbox: Outbox
    client: PlayedClient
    plain: MemoryConnection
    answers: list[Message]
    server: MemoryBus

    def framed_call(self, number: int = 1, *, granted: int = 1000) -> FramedCall:
        client = self.control.client(self.client.base, "incarnation")
        assert client is not None
        writer = StreamWriter(
            number,
            secret_of(number),
            1,
            granted=granted,
            max_unit_bytes=1000,
            max_item_bytes=1000,
            on_dirty=client.note_dirty,
        )
        now = monotonic()
        call = FramedCall(self.execution, self.served, Context("r1"), now, client, writer)
        client.calls[number] = call
        return call

    def plain_call(self) -> PlainCall:
        now, calls = monotonic(), self.control.plain
        return PlainCall(
            self.execution,
            self.served,
            Context("r1"),
            now,
            REPLY,
            calls,
            self.control.plain_account,
        )

    async def settle(self) -> None:
        await asyncio.sleep(0)
        await settle(cast("Any", self.bus.data))


@asynccontextmanager
async def bench() -> AsyncGenerator[Bench, None]:
    async with bus_in_memory() as (server, bus):
        execution = Execution(bus, INSTANCE)
        outbox = Outbox(bus, INSTANCE, execution)
        control = ServerControl(bus, "near", "Side", INSTANCE, execution, outbox)
        served = ServedEndpoint(ADDRESS, endpoint(echo), INSTANCE)
        client, plain = PlayedClient(await server.connect()), await server.connect()
        await client.start()
        answers: list[Message] = []
        plain.subscribe(REPLY, answers.append)
        await plain.barrier()
        yield Bench(bus, execution, served, control, outbox, client, plain, answers, server)
        await client.connection.close()
        await plain.close()


# Both -------------------------------------------------------------------------------------


@pytest.mark.parametrize("framed", [False, True])
def test_after_its_end_nothing_of_a_call_leaves(framed: bool) -> None:
    async def story() -> None:
        async with bench() as given:
            call: ServerCall = given.framed_call() if framed else given.plain_call()

            call.end(b"result")
            call.end(b"another")
            call.fail(HandlerError("no"))
            await given.settle()

            assert (call.ended, call.error) == (True, None)
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
            call: ServerCall = given.framed_call() if framed else given.plain_call()

            call.fail(HandlerError("no"))

            assert call.error is not None
            assert (call.error.hop, call.error.request_id) == (f"{ADDRESS}@{INSTANCE}", "r1")

    run(story())


def test_an_error_of_a_sub_call_keeps_its_place() -> None:
    async def story() -> None:
        async with bench() as given:
            call = given.framed_call()

            call.fail(HandlerError("no", hop="a.B.c@x", request_id="r0"))
            await given.settle()

            (failed,) = given.client.all(Failed)
            assert (failed.hop, failed.request_id) == ("a.B.c@x", "r0")

    run(story())


def test_progress_is_told_once() -> None:
    async def story() -> None:
        async with bench() as given:
            call = given.framed_call()
            assert not call.has_progressed()

            call.push(b"x")

            assert call.has_progressed()
            assert not call.has_progressed()

    run(story())


# Framed -----------------------------------------------------------------------------------


def test_a_writer_without_credit_waits_until_it_is_woken_with_some() -> None:
    async def story() -> None:
        async with bench() as given:
            call = given.framed_call(granted=1)
            assert not call.push(b"x")
            waiting = asyncio.ensure_future(call.writable())
            await until(lambda: call.blocked_since is not None)

            call.writer.credit(1, 0)
            assert call.blocked
            call.writer.credit(2, 1)
            assert not call.blocked
            call.wake()
            await waiting

            assert call.blocked_since is None

    run(story())


def test_a_writer_that_waits_for_credit_is_woken_by_the_end_of_its_call() -> None:
    async def story() -> None:
        async with bench() as given:
            call = given.framed_call(granted=1)
            call.push(b"x")
            waiting = asyncio.ensure_future(call.writable())
            await until(lambda: call.blocked_since is not None)

            call.fail(HandlerError("no"))
            await waiting

            assert call.ended

    run(story())


def test_what_its_reader_has_not_acknowledged_is_kept_after_a_call() -> None:
    async def story() -> None:
        async with bench() as given:
            kept, released = given.framed_call(1), given.framed_call(2)
            released.released = True
            for call in (kept, released):
                call.end(b"result")

                call.retire()

            client = kept.client
            assert client.calls == {}
            assert client.kept == {1: kept.writer}

    run(story())


# Plain ------------------------------------------------------------------------------------


def test_a_plain_reader_gets_a_message_per_item_and_an_empty_one_at_the_end() -> None:
    async def story() -> None:
        async with bench() as given:
            call = given.plain_call()

            assert call.push(b"1")
            assert call.push(b"2")
            call.end()
            await given.settle()

            assert [message.data for message in given.answers] == [b"1", b"2", b""]
            assert not given.answers[2].headers
            assert call.sent_items == 2

    run(story())


def test_a_plain_stream_goes_on_when_the_server_has_taken_what_was_sent() -> None:
    async def story() -> None:
        async with bench() as given:
            call = given.plain_call()

            assert call.push(bytes(PLAIN_WINDOW - 1))
            assert not call.push(b"1")
            await call.writable()

            assert sum(len(message.data) for message in given.answers) == PLAIN_WINDOW
            assert call.push(b"2")

    run(story())


def test_a_plain_stream_does_not_outrun_a_server_that_takes_nothing() -> None:
    async def story() -> None:
        async with bench() as given:
            call = given.plain_call()
            call.push(bytes(PLAIN_WINDOW))

            with given.server.partition(cast("Any", given.bus.data)), pytest.raises(Unavailable):
                await call.writable()

    run(story())


def test_the_items_of_a_plain_stream_bounce_to_a_subject_that_others_cannot_guess() -> None:
    async def story() -> None:
        async with bench() as given:
            first, second = given.plain_call(), given.plain_call()

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
            call = given.plain_call()
            await given.plain.close()

            call.push(b"1")
            await given.settle()

            assert call.ended
            assert call.error is not None
            assert call.error.code == "Cancelled"
            assert not call.push(b"2")
            assert given.bus.bounce_handlers == {}

    run(story())


def test_a_plain_call_is_one_of_the_instance_s_until_it_is_retired() -> None:
    async def story() -> None:
        async with bench() as given:
            call = given.plain_call()
            assert given.control.plain == {call}

            call.end(b"")
            call.retire()

            assert given.control.plain == set()
            assert given.bus.bounce_handlers == {}

    run(story())


def test_a_plain_reader_reads_an_error_in_the_headers_of_an_empty_message() -> None:
    async def story() -> None:
        async with bench() as given:
            given.plain_call().fail(Overloaded("later"))

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
            given.framed_call().push(b"f")
            given.plain_call().push(b"p")

            await given.settle()

            assert [item.data for item in given.client.all(Item)] == [b"f"]
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
