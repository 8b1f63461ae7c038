"""What the readers of a pull consumer are promised, in memory and over nats-server."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from dynbus.bus.errors import Unavailable
from dynbus.bus.transport import (
    AckKind,
    Connection,
    Delivery,
    NoStream,
    PullConsumerConfig,
    PullReader,
)

from .conftest import Bus, Received, eventually, settled

pytestmark = pytest.mark.anyio

CONSUMER = "takers"
SHORT = 3.0
"""For what is kept by a sign of life each quarter of it: so a machine may stand still for two."""


class Reading(NamedTuple):
    """A reader, what it has got, and whether its consumer was missing."""

    reader: PullReader
    deliveries: Received
    missing: list[None]

    async def next(self) -> Delivery:
        """Ask for one more delivery, and wait for it."""
        count = len(self.deliveries) + 1
        self.reader.ask(1)
        delivery: Delivery = (await self.deliveries.wait(count))[count - 1]
        return delivery


def read(connection: Connection, stream: str) -> Reading:
    deliveries = Received()
    missing: list[None] = []
    reader = connection.jetstream.pull(
        stream, CONSUMER, deliveries, on_missing=lambda: missing.append(None)
    )
    return Reading(reader, deliveries, missing)


@pytest.fixture
async def connection(bus: Bus) -> Connection:
    return await bus.connect()


@pytest.fixture
async def stream(bus: Bus, connection: Connection) -> str:
    name = await bus.stream(work_queue=True)
    await make_consumer(connection, name)
    return name


async def make_consumer(connection: Connection, stream: str, ack_wait: float = 30.0) -> None:
    await connection.jetstream.ensure_pull_consumer(stream, PullConsumerConfig(CONSUMER, ack_wait))


async def publish(connection: Connection, stream: str, *texts: bytes) -> None:
    for text in texts:
        await connection.jetstream.publish(f"{stream}.a", text)


async def test_what_is_asked_for_comes_and_no_more(connection: Connection, stream: str) -> None:
    await publish(connection, stream, b"1", b"2", b"3")
    reading = read(connection, stream)

    reading.reader.ask(2)
    await reading.deliveries.wait(2)
    await settled(connection)

    assert [one.message.data for one in reading.deliveries] == [b"1", b"2"]
    assert [one.tries for one in reading.deliveries] == [1, 1]
    assert [one.message.sequence for one in reading.deliveries] == [1, 2]
    assert reading.reader.wanted == 0
    info = await connection.jetstream.consumer_info(stream, CONSUMER)
    assert info[:3] == (1, 2, 30.0)
    await reading.reader.stop()


async def test_what_is_asked_for_comes_when_it_is_there(
    connection: Connection, stream: str
) -> None:
    reading = read(connection, stream)
    reading.reader.ask(1)
    await settled(connection)
    assert reading.reader.wanted == 1

    await publish(connection, stream, b"late")

    assert (await reading.deliveries.wait(1))[0].message.data == b"late"
    await reading.reader.stop()


async def test_what_is_acknowledged_leaves_the_stream(connection: Connection, stream: str) -> None:
    js = connection.jetstream
    await publish(connection, stream, b"done", b"refused")
    reading = read(connection, stream)
    one, two = await reading.next(), await reading.next()

    await js.acknowledge(one.token, AckKind.ACK)
    await js.acknowledge(two.token, AckKind.TERM)

    assert (await js.stream_info(stream)).messages == 0
    assert (await js.consumer_info(stream, CONSUMER))[:3] == (0, 0, 30.0)
    await reading.reader.stop()


async def test_what_is_settled_stays_so_whatever_is_said_of_it_later(
    connection: Connection, stream: str
) -> None:
    js = connection.jetstream
    await publish(connection, stream, b"1")
    reading = read(connection, stream)
    one = await reading.next()
    await js.acknowledge(one.token, AckKind.ACK)

    for kind in AckKind:
        await js.acknowledge(one.token, kind)

    assert (await js.consumer_info(stream, CONSUMER))[:3] == (0, 0, 30.0)
    await reading.reader.stop()


async def test_what_is_given_back_comes_again_and_counts(
    connection: Connection, stream: str
) -> None:
    js = connection.jetstream
    await publish(connection, stream, b"1")
    reading = read(connection, stream)
    await js.acknowledge((await reading.next()).token, AckKind.NAK)
    again = await reading.next()
    started = asyncio.get_running_loop().time()
    await js.acknowledge(again.token, AckKind.NAK, delay=0.3)
    info = await js.consumer_info(stream, CONSUMER)

    third = await reading.next()

    assert asyncio.get_running_loop().time() - started > 0.25
    assert (again.tries, third.tries) == (2, 3)
    assert info.ack_pending == 1
    await reading.reader.stop()


async def test_what_is_not_acknowledged_comes_again_unless_it_is_in_progress(
    bus: Bus, connection: Connection
) -> None:
    js = connection.jetstream
    stream = await bus.stream(work_queue=True)
    await make_consumer(connection, stream, SHORT)
    await publish(connection, stream, b"kept", b"forgotten")
    reading = read(connection, stream)
    kept, _ = await reading.next(), await reading.next()
    reading.reader.ask(1)

    for _ in range(5):
        await asyncio.sleep(SHORT / 4)
        await js.acknowledge(kept.token, AckKind.IN_PROGRESS)
    await reading.deliveries.wait(3)

    assert [one.message.data for one in reading.deliveries] == [b"kept", b"forgotten", b"forgotten"]
    # An acknowledgement of the first delivery counts for the second one too.
    await js.acknowledge(reading.deliveries[1].token, AckKind.ACK)
    await js.acknowledge(kept.token, AckKind.ACK)
    assert (await js.stream_info(stream)).messages == 0
    await reading.reader.stop()


async def test_each_message_goes_to_one_reader_and_idle_ones_take_turns(
    bus: Bus, connection: Connection, stream: str
) -> None:
    readings = [read(await bus.connect(), stream) for _ in range(3)]
    for reading in readings:
        reading.reader.ask(4)
    await settled(connection)

    await publish(connection, stream, *(b"%d" % number for number in range(12)))
    for reading in readings:
        await reading.deliveries.wait(4)

    got = sorted(int(one.message.data) for reading in readings for one in reading.deliveries)
    assert got == list(range(12))
    for reading in readings:
        await reading.reader.stop()


async def test_a_reader_that_stops_gets_what_is_on_its_way_and_leaves_the_rest(
    bus: Bus, connection: Connection, stream: str
) -> None:
    reading = read(connection, stream)
    reading.reader.ask(1)
    await reading.reader.stop()

    await publish(connection, stream, b"1")
    other = read(await bus.connect(), stream)

    assert (await other.next()).message.data == b"1"
    assert reading.deliveries == []
    await other.reader.stop()


async def test_a_reader_that_withdraws_gets_nothing_before_it_asks_again(
    bus: Bus, connection: Connection, stream: str
) -> None:
    reading = read(connection, stream)
    reading.reader.ask(3)
    await publish(connection, stream, b"1")
    held: Delivery = (await reading.deliveries.wait(1))[0]
    other = read(await bus.connect(), stream)

    await reading.reader.withdraw()
    assert reading.reader.wanted == 0
    await connection.jetstream.acknowledge(held.token, AckKind.NAK)

    assert (await other.next()).tries == 2
    await publish(connection, stream, b"2")
    assert (await reading.next()).message.data == b"2"
    assert reading.reader.wanted == 0
    assert len(reading.deliveries) == 2
    await reading.reader.stop()
    await other.reader.stop()


async def test_reading_goes_on_after_a_reconnect(
    bus: Bus, connection: Connection, stream: str
) -> None:
    reading = read(connection, stream)
    reading.reader.ask(2)
    await publish(connection, stream, b"before")
    await reading.deliveries.wait(1)

    await bus.break_connection(connection)
    await publish(connection, stream, b"after")

    await reading.deliveries.wait(2)
    await connection.jetstream.acknowledge(reading.deliveries[0].token, AckKind.ACK)
    assert [one.message.data for one in reading.deliveries] == [b"before", b"after"]
    await reading.reader.stop()


async def test_reading_goes_on_after_a_kill_of_the_server(own_bus: Bus) -> None:
    connection = await own_bus.connect()
    js = connection.jetstream
    stream = await own_bus.stream(work_queue=True, in_memory=False)
    await make_consumer(connection, stream)
    await publish(connection, stream, b"held", b"waiting")
    reading = read(connection, stream)
    held = await reading.next()

    await own_bus.restart_server()
    waiting = await reading.next()
    if waiting.message.data == b"held":
        # A server that is killed may not have kept to itself that it had delivered it.
        waiting = await reading.next()

    assert waiting.message.data == b"waiting"
    await js.acknowledge(held.token, AckKind.ACK, timeout=60.0)
    await js.acknowledge(waiting.token, AckKind.ACK, timeout=60.0)
    assert (await js.stream_info(stream)).messages == 0
    await reading.reader.stop()


async def test_a_message_is_deleted_whatever_its_consumer_knows_of_it(
    connection: Connection, stream: str
) -> None:
    js = connection.jetstream
    await publish(connection, stream, b"1", b"2")
    reading = read(connection, stream)
    await reading.next()

    deleted = [await js.delete_message(stream, number) for number in (1, 2, 2, 7)]

    assert deleted == [True, True, False, False]
    assert (await js.stream_info(stream)).messages == 0
    await publish(connection, stream, b"3")
    assert (await reading.next()).message.data == b"3"
    with pytest.raises(NoStream):
        await js.delete_message("missing", 1)
    await reading.reader.stop()


async def test_a_missing_consumer_is_told_and_reading_goes_on_when_it_is_made(
    bus: Bus, connection: Connection
) -> None:
    js = connection.jetstream
    stream = await bus.stream(work_queue=True)
    reading = read(connection, stream)
    reading.reader.ask(1)
    await eventually(lambda: reading.missing)
    with pytest.raises(NoStream):
        await js.consumer_info(stream, CONSUMER)

    await make_consumer(connection, stream)
    await publish(connection, stream, b"1")
    delivery = (await reading.deliveries.wait(1))[0]
    reading.reader.ask(1)
    await bus.make_again(stream)

    with pytest.raises(Unavailable):
        await js.acknowledge(delivery.token, AckKind.ACK, timeout=5.0)
    with pytest.raises(NoStream):
        await js.ensure_pull_consumer("missing", PullConsumerConfig(CONSUMER))
    await make_consumer(connection, stream)
    await publish(connection, stream, b"2")
    again: Delivery = (await reading.deliveries.wait(2))[1]
    assert (again.message.data, again.tries) == (b"2", 1)
    await reading.reader.stop()


async def test_a_consumer_that_exists_is_left_as_it_is(connection: Connection, stream: str) -> None:
    await make_consumer(connection, stream, ack_wait=5.0)

    assert (await connection.jetstream.consumer_info(stream, CONSUMER)).ack_wait == 30.0


async def test_a_consumer_begins_where_it_says_and_has_what_its_subjects_name(
    bus: Bus, connection: Connection
) -> None:
    js = connection.jetstream
    stream = await bus.stream()
    for text in (b"1", b"2"):
        await js.publish(f"{stream}.a", text)
        await asyncio.sleep(0.01)  # their times are told apart
    second = (await js.read(stream))[1].time
    begun = {
        "all": PullConsumerConfig("all", subjects=(f"{stream}.a", f"{stream}.c.>")),
        "time": PullConsumerConfig("time", start_time=second),
        "new": PullConsumerConfig("new", new_only=True, description="whose it is"),
    }
    for config in begun.values():
        await js.ensure_pull_consumer(stream, config)
    await js.publish(f"{stream}.b", b"3")
    await js.publish(f"{stream}.c.d", b"4")

    has: dict[str, list[bytes]] = {}
    for name in begun:
        deliveries = Received()
        reader = js.pull(stream, name, deliveries, on_missing=lambda: None)
        pending = (await js.consumer_info(stream, name)).pending
        reader.ask(pending)
        has[name] = [one.message.data for one in await deliveries.wait(pending)]
        for one in deliveries:
            await js.acknowledge(one.token, AckKind.ACK)
        await reader.stop()

    assert has == {"all": [b"1", b"2", b"4"], "time": [b"2", b"3", b"4"], "new": [b"3", b"4"]}
    # It is kept for whoever else reads it.
    assert (await js.stream_info(stream)).messages == 4
    info = await js.consumer_info(stream, "new")
    assert (info.delivered, info.description) == (4, "whose it is")


async def test_a_deleted_consumer_is_gone_and_deleting_it_again_is_no_error(
    connection: Connection, stream: str
) -> None:
    for _ in range(2):
        await connection.jetstream.delete_consumer(stream, CONSUMER)

    with pytest.raises(NoStream):
        await connection.jetstream.consumer_info(stream, CONSUMER)
