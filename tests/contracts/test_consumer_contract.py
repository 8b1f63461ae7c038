"""What every `OrderedConsumer` promises, in memory and over nats-server."""

from __future__ import annotations

import pytest

from dynbus.bus.transport import StoredMessage, StreamConfig, StreamLimits

from .conftest import Bus, Received, eventually, settled

pytestmark = pytest.mark.anyio

ONE_EACH = StreamLimits(max_messages_per_subject=1)


async def test_an_ordered_consumer_brings_what_is_there_and_what_follows(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    for number in range(5):
        await js.publish(f"{stream}.{number}", b"%d" % number)
    received = Received()
    consumer = await js.consume(stream, received)

    await received.wait(5)
    for number in range(5, 10):
        await js.publish(f"{stream}.{number}", b"%d" % number)
    await received.wait(10)

    assert [message.sequence for message in received] == list(range(1, 11))
    assert [message.subject for message in received] == [f"{stream}.{n}" for n in range(10)]
    assert [message.pending for message in received[:5]] == [4, 3, 2, 1, 0]
    await consumer.stop()


async def test_an_ordered_consumer_keeps_to_its_subject_and_start(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    for number in range(10):
        await js.publish(f"{stream}.{'ab'[number % 2]}.x", b"%d" % number)
    received = Received()

    consumer = await js.consume(stream, received, subject=f"{stream}.b.*", start_sequence=5)
    await received.wait(3)
    await js.publish(f"{stream}.a.x", b"not this")
    await js.publish(f"{stream}.b.x", b"11")
    await received.wait(4)

    assert [message.data for message in received] == [b"5", b"7", b"9", b"11"]
    await consumer.stop()


async def test_a_stopped_consumer_is_called_no_more(bus: Bus) -> None:
    stream = await bus.stream()
    connection = await bus.connect()
    received = Received()
    consumer = await connection.jetstream.consume(stream, received)

    await connection.jetstream.publish(f"{stream}.a", b"1")
    await received.wait(1)
    await consumer.stop()
    await connection.jetstream.publish(f"{stream}.a", b"2")
    await settled(connection)

    assert len(received) == 1


async def test_a_consumer_callback_that_raises_stops_nobody(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    received = Received()

    def fail_on_odd(message: StoredMessage) -> None:
        received(message)
        if message.sequence % 2:
            raise ValueError("odd")

    consumer = await js.consume(stream, fail_on_odd)
    for _ in range(6):
        await js.publish(f"{stream}.a", b"")
    await received.wait(6)

    assert [message.sequence for message in received] == [1, 2, 3, 4, 5, 6]
    await consumer.stop()


async def test_an_ordered_consumer_goes_on_after_a_reconnect_and_repeats_nothing(
    bus: Bus,
) -> None:
    stream = await bus.stream()
    reader, writer = await bus.connect(), await bus.connect()
    received = Received()
    consumer = await reader.jetstream.consume(stream, received)

    for number in range(60):
        await writer.jetstream.publish(f"{stream}.a", b"%d" % number)
        if number % 20 == 10:
            await bus.break_connection(reader)
    await received.wait(60)
    await settled(reader)

    assert [message.sequence for message in received] == list(range(1, 61))
    await consumer.stop()


async def test_last_per_subject_brings_the_last_message_of_every_subject_first(
    bus: Bus,
) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    for number in range(6):
        await js.publish(f"{stream}.{number % 3}", b"%d" % number)
    received = Received()

    consumer = await js.consume(stream, received, last_per_subject=True)
    await received.wait(3)
    await js.publish(f"{stream}.1", b"6")
    await received.wait(4)

    assert [message.data for message in received] == [b"3", b"4", b"5", b"6"]
    assert [message.pending for message in received] == [2, 1, 0, 0]
    await consumer.stop()


@pytest.mark.parametrize("last_per_subject", [False, True])
async def test_a_consumer_is_told_at_each_start_when_it_has_what_was_there(
    bus: Bus, last_per_subject: bool
) -> None:
    stream = await bus.stream(ONE_EACH)
    js = (await bus.connect()).jetstream
    reader = await bus.connect()
    events: list[str] = []
    caught_up = Received()

    def note_caught_up() -> None:
        events.append("caught up")
        caught_up(None)

    await js.publish(f"{stream}.a", b"1")
    await js.publish(f"{stream}.b", b"2")
    consumer = await reader.jetstream.consume(
        stream,
        lambda message: events.append(message.data.decode()),
        last_per_subject=last_per_subject,
        on_caught_up=note_caught_up,
    )
    await caught_up.wait(1)
    await js.publish(f"{stream}.b", b"3")
    await eventually(lambda: "3" in events)
    await bus.break_connection(reader)
    await caught_up.wait(2)

    again = ["1", "3"] if last_per_subject else []
    assert events == ["1", "2", "caught up", "3", *again, "caught up"]
    await consumer.stop()


async def test_a_consumer_of_an_empty_stream_has_caught_up_at_once(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    received, caught_up = Received(), Received()

    consumer = await js.consume(stream, received, on_caught_up=lambda: caught_up(None))
    await caught_up.wait(1)

    assert (len(received), len(caught_up)) == (0, 1)
    await consumer.stop()


async def test_a_consumer_has_not_caught_up_before_it_has_what_is_known_to_be_there(
    bus: Bus,
) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    events: list[str] = []
    await js.publish(f"{stream}.a", b"1")

    consumer = await js.consume(
        stream,
        lambda message: events.append(message.data.decode()),
        subject=f"{stream}.a",
        at_least=3,
        on_caught_up=lambda: events.append("caught up"),
    )
    await eventually(lambda: "1" in events)
    await js.publish(f"{stream}.b", b"2")
    await js.publish(f"{stream}.a", b"3")
    await eventually(lambda: "caught up" in events)

    assert events == ["1", "3", "caught up"]
    await consumer.stop()


async def test_last_per_subject_starts_over_after_a_reconnect_and_announces_it(
    bus: Bus,
) -> None:
    stream = await bus.stream()
    reader, writer = await bus.connect(), await bus.connect()
    events: list[str] = []
    received = Received()

    def note(message: StoredMessage) -> None:
        events.append(f"{message.subject[-1]}={message.data.decode()}")
        received(message)

    consumer = await reader.jetstream.consume(
        stream, note, last_per_subject=True, on_restart=lambda: events.append("restart")
    )
    await writer.jetstream.publish(f"{stream}.a", b"1")
    await writer.jetstream.publish(f"{stream}.b", b"1")
    await writer.jetstream.publish(f"{stream}.a", b"2")
    await received.wait(3)

    await bus.break_connection(reader)
    await received.wait(5)

    assert events == ["a=1", "b=1", "a=2", "restart", "b=1", "a=2"]
    await consumer.stop()


async def test_a_consumer_finds_its_stream_again_after_it_was_deleted_and_made(
    bus: Bus,
) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    received = Received()
    consumer = await js.consume(stream, received, last_per_subject=True)
    await js.publish(f"{stream}.a", b"before")
    await received.wait(1)

    await js.delete_stream(stream)
    await js.ensure_stream(StreamConfig(stream, (f"{stream}.>",), in_memory=True))
    await js.publish(f"{stream}.a", b"after")
    await received.wait(2)

    assert received[1].data == b"after"
    await consumer.stop()


async def test_a_start_that_lies_ahead_is_waited_for(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    await js.publish(f"{stream}.a", b"1")
    received = Received()
    consumer = await js.consume(stream, received, start_sequence=4)

    for number in range(2, 6):
        await js.publish(f"{stream}.a", b"%d" % number)
    await received.wait(2)

    assert [message.data for message in received] == [b"4", b"5"]
    await consumer.stop()


async def test_a_stream_that_was_made_again_is_announced_and_read_from_its_first_message(
    bus: Bus,
) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    events: list[str] = []
    consumer = await js.consume(
        stream,
        lambda message: events.append(message.data.decode()),
        on_recreated=lambda: events.append("made again"),
    )
    for number in range(5):
        await js.publish(f"{stream}.a", b"old %d" % number)
    await eventually(lambda: len(events) == 5)

    await bus.make_again(stream)
    await js.publish(f"{stream}.a", b"new 0")
    await js.publish(f"{stream}.a", b"new 1")
    await eventually(lambda: "new 1" in events)

    assert events == [*(f"old {number}" for number in range(5)), "made again", "new 0", "new 1"]
    await consumer.stop()


async def test_a_stream_made_again_that_is_longer_than_the_first_is_told_from_it(
    bus: Bus,
) -> None:
    stream = await bus.stream()
    connection = await bus.connect()
    js = connection.jetstream
    events: list[str] = []
    consumer = await js.consume(
        stream,
        lambda message: events.append(f"{message.sequence} {message.data.decode()}"),
        on_recreated=lambda: events.append("made again"),
    )
    await js.publish(f"{stream}.a", b"old")
    await eventually(lambda: len(events) == 1)

    await bus.make_again(stream)
    for _ in range(3):
        await js.publish(f"{stream}.a", b"new")
    await bus.break_connection(connection)
    await eventually(lambda: len(events) == 5)

    assert events == ["1 old", "made again", "1 new", "2 new", "3 new"]
    await consumer.stop()


async def test_a_stream_made_again_while_the_reader_was_away_is_announced(bus: Bus) -> None:
    stream = await bus.stream()
    writer, reader = await bus.connect(), await bus.connect()
    events: list[str] = []
    consumer = await reader.jetstream.consume(
        stream,
        lambda message: events.append(message.data.decode()),
        on_recreated=lambda: events.append("made again"),
    )
    await writer.jetstream.publish(f"{stream}.a", b"old")
    await eventually(lambda: events == ["old"])

    await bus.make_again(stream)
    await bus.break_connection(reader)
    await writer.jetstream.publish(f"{stream}.a", b"new")
    await eventually(lambda: "new" in events)

    assert events == ["old", "made again", "new"]
    await consumer.stop()


async def test_a_reconnect_alone_announces_no_new_stream(bus: Bus) -> None:
    stream = await bus.stream()
    writer, reader = await bus.connect(), await bus.connect()
    events: list[str] = []
    consumer = await reader.jetstream.consume(
        stream,
        lambda message: events.append(message.data.decode()),
        on_recreated=lambda: events.append("made again"),
    )
    await writer.jetstream.publish(f"{stream}.a", b"1")
    await eventually(lambda: events == ["1"])

    await bus.break_connection(reader)
    await writer.jetstream.publish(f"{stream}.a", b"2")
    await eventually(lambda: "2" in events)

    assert events == ["1", "2"]
    await consumer.stop()


async def test_a_position_in_a_stream_that_is_gone_is_no_position_in_the_next(bus: Bus) -> None:
    stream = await bus.stream()
    js = (await bus.connect()).jetstream
    for _ in range(3):
        await js.publish(f"{stream}.a", b"old")
    saved = await js.stream_info(stream)
    events: list[str] = []

    async def read_on() -> None:
        caught_up = Received()
        consumer = await js.consume(
            stream,
            lambda message: events.append(message.data.decode()),
            start_sequence=saved.last_sequence + 1,
            created=saved.created,
            on_recreated=lambda: events.append("made again"),
            on_caught_up=lambda: caught_up(None),
        )
        await caught_up.wait(1)
        events.append("caught up")
        await consumer.stop()

    await read_on()
    await bus.make_again(stream)
    await js.publish(f"{stream}.a", b"new")
    await read_on()

    assert events == ["caught up", "made again", "new", "caught up"]


async def test_the_last_messages_of_a_stream_made_again_are_announced_as_such(bus: Bus) -> None:
    stream = await bus.stream()
    connection = await bus.connect()
    js = connection.jetstream
    events: list[str] = []
    consumer = await js.consume(
        stream,
        lambda message: events.append(message.data.decode()),
        last_per_subject=True,
        on_restart=lambda: events.append("restart"),
        on_recreated=lambda: events.append("made again"),
    )
    await js.publish(f"{stream}.a", b"old")
    await eventually(lambda: events == ["old"])

    await bus.make_again(stream)
    await js.publish(f"{stream}.b", b"new")
    await bus.break_connection(connection)
    await eventually(lambda: "new" in events)

    assert events == ["old", "made again", "restart", "new"]
    await consumer.stop()


async def test_a_reader_whose_pending_messages_are_purged_has_caught_up(bus: Bus) -> None:
    stream = await bus.stream()
    connection = await bus.connect()
    js = connection.jetstream
    for number in range(2000):
        connection.publish(f"{stream}.a", bytes(1000) + b"%d" % number)
    await js.publish(f"{stream}.b", b"")
    caught_up = Received()

    consumer = await js.consume(stream, Received(), on_caught_up=lambda: caught_up(None))
    await js.purge(stream)
    await caught_up.wait(1)

    assert len(caught_up) == 1
    await consumer.stop()


async def test_a_consumer_whose_other_callbacks_raise_goes_on(bus: Bus) -> None:
    stream = await bus.stream()
    connection = await bus.connect()
    js = connection.jetstream
    received = Received()
    raised: list[str] = []

    def fail(what: str) -> None:
        raised.append(what)
        raise ValueError(what)

    consumer = await js.consume(
        stream,
        received,
        last_per_subject=True,
        on_restart=lambda: fail("restart"),
        on_recreated=lambda: fail("made again"),
        on_caught_up=lambda: fail("caught up"),
    )
    await js.publish(f"{stream}.a", b"1")
    await received.wait(1)
    await bus.make_again(stream)
    await js.publish(f"{stream}.a", b"2")
    await bus.break_connection(connection)
    await received.wait(2)
    await settled(connection)

    assert (received[0].data, received[-1].data) == (b"1", b"2")
    assert set(raised) == {"caught up", "made again", "restart"}
    await consumer.stop()


async def test_a_consumer_goes_on_after_a_restart_of_the_server(own_bus: Bus) -> None:
    stream = await own_bus.stream(in_memory=False)
    js = (await own_bus.connect()).jetstream
    events: list[str] = []
    consumer = await js.consume(
        stream,
        lambda message: events.append(message.data.decode()),
        on_recreated=lambda: events.append("made again"),
    )
    await js.publish(f"{stream}.a", b"1")
    await js.publish(f"{stream}.a", b"2")
    await eventually(lambda: events == ["1", "2"])

    await own_bus.restart_server()
    await js.publish(f"{stream}.a", b"3", timeout=20.0)
    await eventually(lambda: "3" in events)

    assert events == ["1", "2", "3"]
    await consumer.stop()


async def test_a_stream_that_its_server_forgot_is_announced_when_it_is_made_again(
    own_bus: Bus,
) -> None:
    stream = await own_bus.stream(in_memory=True)
    js = (await own_bus.connect()).jetstream
    events: list[str] = []
    consumer = await js.consume(
        stream,
        lambda message: events.append(message.data.decode()),
        on_recreated=lambda: events.append("made again"),
    )
    await js.publish(f"{stream}.a", b"old")
    await eventually(lambda: events == ["old"])

    await own_bus.restart_server()
    await own_bus.make_again(stream)
    await js.publish(f"{stream}.a", b"new")
    await eventually(lambda: "new" in events)

    assert events == ["old", "made again", "new"]
    await consumer.stop()
