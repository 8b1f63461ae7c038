"""In-memory JetStream under faults; what it has in common with nats-server is in `contracts`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dynbus.bus.clock import EPOCH, JumpingLoop, monotonic
from dynbus.bus.errors import ConfigError, DynbusError, PayloadTooLarge, Unavailable
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection
from dynbus.bus.memory.stream import MemoryStream
from dynbus.bus.transport import (
    Message,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    WrongLastSequence,
)

pytestmark = pytest.mark.anyio

LEASES = StreamConfig("S", ("s.>",), StreamLimits(max_messages_per_subject=1), marker_ttl=60)
LOG = StreamConfig("S", ("s.>",))


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("asyncio", {"loop_factory": JumpingLoop})


async def with_stream(
    config: StreamConfig = LOG,
) -> tuple[MemoryBus, MemoryConnection]:
    bus = MemoryBus()
    connection = await bus.connect()
    await connection.jetstream.ensure_stream(config)
    return bus, connection


async def test_a_lease_expires_to_the_second() -> None:
    _, connection = await with_stream(LEASES)
    js = connection.jetstream
    stored: list[tuple[float, bool]] = []
    started = monotonic()
    await js.consume("S", lambda m: stored.append((m.time - EPOCH - started, m.is_marker)))

    await js.publish("s.lease", b"", ttl=10)
    await asyncio.sleep(100)

    assert [is_marker for _, is_marker in stored] == [False, True]
    assert [at for at, _ in stored] == pytest.approx([0.0, 10.0])
    assert await js.last("S", "s.lease") is None


async def test_an_answer_that_is_lost_leaves_the_message_stored_once() -> None:
    bus, connection = await with_stream()
    js = connection.jetstream

    with bus.drop(f"{connection.inbox}.>", 1), pytest.raises(Unavailable, match="within 1"):
        await js.publish("s.a", b"x", message_id="m", timeout=1)

    assert await js.publish("s.a", b"x", message_id="m") == 1


async def test_a_request_that_is_lost_stores_nothing() -> None:
    bus, connection = await with_stream()
    js = connection.jetstream

    with bus.drop("s.a", 1), pytest.raises(Unavailable):
        await js.publish("s.a", b"x", timeout=1)

    assert await js.last("S", "s.a") is None


async def test_a_request_whose_connection_breaks_fails_at_once() -> None:
    bus, connection = await with_stream()
    bus.delay("s.>", 3)
    started = monotonic()

    waiting = asyncio.create_task(connection.jetstream.publish("s.a", b"x", timeout=60))
    await asyncio.sleep(1)
    connection.disconnect()

    with pytest.raises(Unavailable, match="broke"):
        await waiting
    assert monotonic() - started == pytest.approx(1.0)


async def test_a_request_waits_for_the_connection_within_its_time() -> None:
    _, connection = await with_stream()
    loop = asyncio.get_running_loop()

    connection.disconnect()
    with pytest.raises(Unavailable):
        await connection.jetstream.publish("s.a", b"x", timeout=1)
    loop.call_later(2, connection.reconnect)

    assert await connection.jetstream.publish("s.a", b"y") == 1


async def test_streams_survive_a_restart_of_the_server_unless_they_are_in_memory() -> None:
    bus, connection = await with_stream()
    js = connection.jetstream
    await js.ensure_stream(StreamConfig("M", ("m.>",), in_memory=True))
    await js.publish("s.a", b"kept")
    await js.publish("m.a", b"lost")

    bus.stop()
    bus.start()

    found = await js.last("S", "s.a")
    assert found is not None
    assert found.data == b"kept"
    with pytest.raises(NoStream):
        await js.last("M", "m.a")


async def test_a_lease_expires_while_the_server_is_down() -> None:
    bus, connection = await with_stream(LEASES)
    js = connection.jetstream
    seen: list[bool] = []
    await js.publish("s.lease", b"", ttl=5)

    bus.stop()
    await asyncio.sleep(10)
    bus.start()
    await js.consume("S", lambda m: seen.append(m.is_marker), last_per_subject=True)
    await connection.barrier()

    assert seen == [True]


async def test_a_stalled_jetstream_answers_nothing_while_core_messages_flow() -> None:
    bus, connection = await with_stream()
    js = connection.jetstream
    heard: list[bytes] = []
    stored: list[int] = []
    connection.subscribe("core", lambda message: heard.append(message.data))
    await js.consume("S", lambda message: stored.append(message.sequence))

    bus.jetstream.stall()
    connection.publish("core", b"flows")
    for attempt in (js.publish("s.a", b"", timeout=1), js.last("S", "s.a", timeout=1)):
        with pytest.raises(Unavailable):
            await attempt
    bus.jetstream.stall(False)
    await js.publish("s.a", b"")
    await connection.barrier()

    assert heard == [b"flows"]
    assert stored == [1]


async def test_a_consumer_that_was_cut_off_misses_and_repeats_nothing() -> None:
    bus, reader = await with_stream()
    writer = await bus.connect()
    seen: list[int] = []
    await reader.jetstream.consume("S", lambda message: seen.append(message.sequence))

    for number in range(100):
        await writer.jetstream.publish("s.a", b"")
        if number % 10 == 3:
            reader.disconnect()
        if number % 10 == 7:
            reader.reconnect()
        if number % 25 == 0:
            bus.jetstream.stall()
            bus.jetstream.stall(False)
    await reader.barrier()

    assert seen == list(range(1, 101))


async def test_a_consumer_whose_connection_breaks_as_it_starts_does_not_start() -> None:
    bus, reader = await with_stream()
    writer = await bus.connect()
    seen: list[int] = []

    def note(message: StoredMessage) -> None:
        seen.append(message.sequence)
        if message.sequence == 2:
            reader.disconnect()

    for _ in range(4):
        await writer.jetstream.publish("s.a", b"")
    waiting = asyncio.create_task(reader.jetstream.consume("S", note))
    await asyncio.sleep(1)
    reader.reconnect()
    with pytest.raises(Unavailable, match="broke"):
        await waiting

    bus.jetstream.stall()
    bus.jetstream.stall(False)
    await reader.barrier()
    assert seen == [1, 2]


async def test_a_stopped_consumer_is_not_started_again() -> None:
    bus, connection = await with_stream()
    seen: list[int] = []
    consumer = await connection.jetstream.consume("S", lambda m: seen.append(m.sequence))

    await consumer.stop()
    await consumer.stop()
    connection.disconnect()
    connection.reconnect()
    bus.jetstream.stall()
    bus.jetstream.stall(False)
    await connection.jetstream.publish("s.a", b"")
    await connection.barrier()

    assert seen == []


async def test_a_core_request_to_a_stream_is_acknowledged_at_its_reply() -> None:
    _, connection = await with_stream()
    answers: list[Message] = []
    connection.subscribe("reply", answers.append)

    connection.publish("s.a", b"", reply="reply")
    expects = b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: 7\r\n\r\n"
    connection.publish("s.a", b"", reply="reply", headers=expects)
    await connection.barrier()
    await connection.barrier()

    first, second = (msgspec.json.decode(answer.data, type=dict[str, Any]) for answer in answers)
    assert first == {"stream": "S", "seq": 1}
    assert second["error"]["err_code"] == 10071


async def test_a_message_over_the_payload_limit_is_refused_before_sending() -> None:
    bus = MemoryBus(max_payload=100)
    connection = await bus.connect()
    await connection.jetstream.ensure_stream(LOG)

    with pytest.raises(PayloadTooLarge):
        await connection.jetstream.publish("s.a", bytes(100), message_id="m")


async def test_overlapping_streams_are_refused() -> None:
    _, connection = await with_stream()

    with pytest.raises(DynbusError, match="overlap"):
        await connection.jetstream.ensure_stream(StreamConfig("T", ("s.a",)))


def store(
    stream: MemoryStream, now: float, subject: str = "s.a", data: bytes = b"", **headers: str
) -> int:
    fields = {f"Nats-{key.replace('_', '-')}": value for key, value in headers.items()}
    return stream.store(now, EPOCH + now, subject, fields, data)


def test_a_stream_tells_when_it_has_something_to_expire() -> None:
    stream = MemoryStream(LEASES)

    store(stream, 0.0, "s.a", TTL="5s")
    first = stream.next_expiry()
    stream.expire(5.0, EPOCH + 5.0)
    second = stream.next_expiry()
    stream.expire(65.0, EPOCH + 65.0)

    assert (first, second, stream.next_expiry()) == (5.0, 65.0, None)
    assert repr(stream) == "<MemoryStream S [messages: 0, bytes: 0, last: 2]>"


def test_a_message_that_was_replaced_leaves_no_marker() -> None:
    stream = MemoryStream(LEASES)

    store(stream, 0.0, "s.a", b"old", TTL="5s")
    store(stream, 1.0, "s.a", b"new")
    stream.expire(1000.0, EPOCH + 1000.0)

    last = stream.last("s.a")
    assert last is not None
    assert (last.data, last.is_marker) == (b"new", False)


def test_a_refused_publish_does_not_use_up_its_message_id() -> None:
    stream = MemoryStream(LOG)
    store(stream, 0.0)

    with pytest.raises(WrongLastSequence):
        store(stream, 0.0, Msg_Id="m", Expected_Last_Subject_Sequence="0")

    assert store(stream, 0.0, Msg_Id="m") == 2


def test_a_window_is_no_longer_than_the_maximum_age() -> None:
    stream = MemoryStream(LOG._replace(limits=StreamLimits(max_age=10, duplicate_window=120)))
    store(stream, 0.0, Msg_Id="m")

    assert store(stream, 9.9, Msg_Id="m") == 1
    assert store(stream, 10.0, Msg_Id="m") == 2


@pytest.mark.parametrize("ttl", ["0", "0s", "1.5s", "500ms", "-1", "soon", ""])
def test_a_ttl_that_is_not_whole_seconds_is_refused(ttl: str) -> None:
    with pytest.raises(ConfigError, match="invalid per-message TTL"):
        store(MemoryStream(LEASES), 0.0, TTL=ttl)


def test_a_ttl_where_the_stream_has_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="per-message TTL is disabled"):
        store(MemoryStream(LOG), 0.0, TTL="5s")


def test_a_message_larger_than_the_byte_limit_does_not_stay() -> None:
    stream = MemoryStream(LOG._replace(limits=StreamLimits(max_bytes=100)))

    assert store(stream, 0.0, data=bytes(200)) == 1
    assert stream.last("s.a") is None


def test_a_wildcard_finds_the_newest_of_its_subjects() -> None:
    stream = MemoryStream(LOG)
    for subject in ("s.a", "s.b", "s.a", "s.c.d"):
        store(stream, 0.0, subject)

    assert stream.last_of_each("s.*") == [2, 3]
    assert stream.last_of_each("s.>") == [2, 3, 4]
    newest = stream.last("s.*")
    assert newest is not None
    assert newest.sequence == 3
