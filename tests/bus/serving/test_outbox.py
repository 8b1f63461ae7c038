"""What is ready for one client in one turn of the loop leaves as one message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from tests.bus.far_side import settle
from tests.bus.near_side import INSTANCE, PlayedClient, bus_in_memory, secret_of, sizes

from dynbus.bus.bus import Bus
from dynbus.bus.errors import HandlerError, PayloadTooLarge
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.protocol.stream_writer import StreamWriter
from dynbus.bus.protocol.wire import MAX_FRAME_BYTES, End, Failed, Item, Items, Part
from dynbus.bus.serving.outbox import EARLY_ENDS, ClientOutbox, Outbox
from dynbus.testing import run


class Sending:
    """An outbox and two clients that get what it sends.

    Attributes:
        load: what it says of the instance.
    """

    def __init__(self, bus: Bus, server: MemoryBus, clients: tuple[PlayedClient, ...]) -> None:
        self.bus = bus
        self.server = server
        self.load = 0
        self.outbox = Outbox(bus, INSTANCE, lambda: self.load, self._does_not_fit)
        self.first, self.second = clients
        self.clients = [
            ClientOutbox(
                self.outbox, client.base, client.base, bus.replies.bounce(client.base[-2:])
            )
            for client in clients
        ]

    def writer(self, number: int, client: int = 0) -> StreamWriter:
        return StreamWriter(
            number,
            secret_of(number),
            1,
            granted=1 << 30,
            max_unit_bytes=self.outbox.max_unit_bytes(),
            max_item_bytes=1 << 30,
            on_dirty=self.clients[client].note_dirty,
        )

    async def settle(self) -> None:
        await asyncio.sleep(0)
        await settle(cast("Any", self.bus.data))

    def _does_not_fit(
        self, client: ClientOutbox, writer: StreamWriter, error: PayloadTooLarge
    ) -> None:
        writer.give_up(error, self.outbox.max_unit_bytes())
        client.touch(writer)


@asynccontextmanager
async def sending() -> AsyncGenerator[Sending, None]:
    async with bus_in_memory() as (server, bus):
        clients = tuple([PlayedClient(await server.connect(), name) for name in ("c1", "c2")])
        for client in clients:
            await client.start()
        yield Sending(bus, server, clients)
        for client in clients:
            await client.connection.close()


def test_what_many_streams_have_in_one_turn_is_one_message() -> None:
    async def story() -> None:
        async with sending() as given:
            writers = [given.writer(number) for number in range(3)]
            given.load = 3

            for writer in writers:
                writer.push(b"a")
                writer.push(b"b")
            assert repr(given.outbox) == f"<Outbox {INSTANCE} [1 clients]>"
            await given.settle()

            (batch,) = given.first.batches
            assert batch.frames == [
                Items(number, secret_of(number), 1, 0, [b"a", b"b"]) for number in range(3)
            ]
            assert (batch.sender, batch.incarnation) == (INSTANCE, given.bus.incarnation)
            assert batch.load == 3

    run(story())


def test_the_next_turn_is_another_message() -> None:
    async def story() -> None:
        async with sending() as given:
            writer = given.writer(0)

            for item in (b"a", b"b"):
                writer.push(item)
                await given.settle()

            assert sizes(given.first.batches) == [1, 1]
            assert given.first.all(Item) == [
                Item(0, secret_of(0), 1, 0, b"a"),
                Item(0, secret_of(0), 1, 1, b"b"),
            ]

    run(story())


def test_each_client_gets_its_own() -> None:
    async def story() -> None:
        async with sending() as given:
            given.writer(0, client=0).push(b"a")
            given.writer(0, client=1).push(b"b")

            await given.settle()

            assert [item.data for item in given.first.all(Item)] == [b"a"]
            assert [item.data for item in given.second.all(Item)] == [b"b"]

    run(story())


def test_items_and_the_end_of_a_stream_leave_together() -> None:
    async def story() -> None:
        async with sending() as given:
            ended, failed = given.writer(0), given.writer(1)

            ended.push(b"a")
            ended.end()
            failed.push(b"b")
            failed.fail(HandlerError("no"))
            given.clients[0].touch(ended)
            given.clients[0].touch(failed)
            await given.settle()

            (batch,) = given.first.batches
            assert [type(frame) for frame in batch.frames] == [Items, End, Items, Failed]

    run(story())


@pytest.mark.parametrize(
    "size", [1, MAX_FRAME_BYTES // 3, MAX_FRAME_BYTES - 100, MAX_FRAME_BYTES, 900_000]
)
@pytest.mark.parametrize("streams", [1, 3])
def test_no_message_is_larger_than_the_server_takes_and_nothing_is_left_out(
    size: int, streams: int
) -> None:
    async def story() -> None:
        async with sending() as given:
            sent: list[int] = []
            publish = given.bus.data.publish

            def measured(subject: str, data: bytes, **options: Any) -> None:
                sent.append(len(data))
                publish(subject, data, **options)

            cast("Any", given.bus.data).publish = measured
            for number in range(streams):
                writer = given.writer(number)
                for _ in range(4):
                    writer.push(b"x" * size)
                writer.end()
                given.clients[0].touch(writer)
            await given.settle()

            assert max(sent) <= min(given.bus.data.max_payload, MAX_FRAME_BYTES + 1024)
            whole = sum(len(item.data) for item in given.first.all(Item))
            whole += sum(len(one) for items in given.first.all(Items) for one in items.items)
            whole += sum(len(part.data) for part in given.first.all(Part))
            assert whole == streams * 4 * size
            assert len(given.first.all(End)) == streams

    run(story())


def test_a_client_that_cannot_be_sent_to_keeps_none_of_the_others_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> list[bytes]:
        async with sending() as given:
            publish = given.bus.data.publish

            def refusing(subject: str, data: bytes, **options: Any) -> None:
                if subject == given.clients[0].frames_subject:
                    raise OSError("no buffer space")
                publish(subject, data, **options)

            cast("Any", given.bus.data).publish = refusing
            given.writer(0, client=0).push(b"a")
            given.writer(0, client=1).push(b"b")

            await given.settle()

            return [item.data for item in given.second.all(Item)]

    with caplog.at_level(logging.ERROR):
        items = run(story())

    assert items == [b"b"]
    assert "results for _R.-.c1 could not be sent" in caplog.text


def test_what_does_not_fit_a_smaller_server_ends_its_call_and_no_other() -> None:
    async def story() -> None:
        async with sending() as given:
            large, small = given.writer(0), given.writer(1)
            large.push(b"a")
            large.push(bytes(100_000))
            small.push(b"b")

            given.server.max_payload = 65536
            await given.settle()

            whole = [frame.items for frame in given.first.all(Items)]
            assert whole == [[b"a"]]
            assert [item.data for item in given.first.all(Item)] == [b"b"]
            (failed,) = given.first.all(Failed)
            assert (failed.number, failed.code, failed.sequence) == (0, "PayloadTooLarge", 1)
            assert "max_payload = 65536" in failed.message
            assert len(given.first.batches) <= 3

    run(story())


@pytest.mark.parametrize("max_payload", [1024, 4096])
def test_a_result_and_an_error_that_a_smaller_server_does_not_take_are_told_as_an_error(
    max_payload: int,
) -> None:
    async def story() -> None:
        async with sending() as given:
            result, error = given.writer(0), given.writer(1)
            result.end(bytes(100_000))
            failure = HandlerError("m" * 4000)
            failure.remote_traceback = "t" * 30_000
            error.fail(failure)
            given.clients[0].touch(result)
            given.clients[0].touch(error)

            given.server.max_payload = max_payload
            await given.settle()

            failed = given.first.all(Failed)
            assert [(one.number, one.code) for one in failed] == [
                (0, "PayloadTooLarge"),
                (1, "PayloadTooLarge"),
            ]

    run(story())


def test_a_flush_does_not_wait_for_the_end_of_the_turn() -> None:
    async def story() -> None:
        async with sending() as given:
            given.writer(0).push(b"a")

            given.outbox.flush()

            assert given.clients[0].dirty == []
            await given.settle()
            assert sizes(given.first.batches) == [1]

    run(story())


def test_one_flush_is_asked_for_however_much_there_is_to_send() -> None:
    async def story() -> None:
        async with sending() as given:
            first, second = given.writer(0), given.writer(1)

            for writer in (first, second, first):
                writer.push(b"x")
                given.clients[0].touch(writer)

            assert given.clients[0].dirty == [first, second]
            await given.settle()
            assert sizes(given.first.batches) == [2]

    run(story())


def test_many_ends_in_one_turn_do_not_wait_for_the_last_of_them() -> None:
    async def story() -> None:
        async with sending() as given:
            for number in range(2 * EARLY_ENDS - 1):
                writer = given.writer(number)
                writer.end()
                given.clients[0].touch_ended(writer)

            assert len(given.clients[0].dirty) == EARLY_ENDS - 1
            await given.settle()
            assert sizes(given.first.batches) == [EARLY_ENDS, EARLY_ENDS - 1]

    run(story())
