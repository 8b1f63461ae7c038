"""A consumer over nats-server starts over when it must, and leaves nothing behind.

What every ordered consumer promises is in `contracts`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conditions import eventually

from dynbus.bus.drops import DropReason
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.consumer import ack_position
from dynbus.bus.transport import Message, NoStream, StoredMessage, StreamConfig

pytestmark = pytest.mark.anyio


@pytest.fixture
async def stream(connection: NatsConnection) -> AsyncIterator[str]:
    name = f"S{secrets.token_hex(6)}"
    await connection.jetstream.ensure_stream(StreamConfig(name, (f"{name}.>",), in_memory=True))
    yield name
    await connection.jetstream.delete_stream(name)


async def consumers(connection: NatsConnection, stream: str) -> list[dict[str, Any]]:
    answer = await connection.jetstream.api(f"CONSUMER.LIST.{stream}", {}, timeout=5.0)
    found: list[dict[str, Any]] = answer["consumers"] or []
    return found


@pytest.mark.parametrize(
    ("reply", "position"),
    [
        ("$JS.ACK.S.c.1.5.4.1700.3", (1, 5, 4, 1700, 3)),
        ("$JS.ACK._.account.S.c.1.5.4.1700.3", (1, 5, 4, 1700, 3)),
        ("$JS.ACK._.account.S.c.1.5.4.1700.3.token", (1, 5, 4, 1700, 3)),
        ("$JS.ACK.S.c.1.5.4.1700", None),
        ("$JS.ACK.S.c.1.5.x.1700.3", None),
        ("$JS.ACK.S.c.1.5.².1700.3", None),
        ("$JS.ACK.S.c.1.-5.4.1700.3", None),
        ("_INBOX.S.c.1.5.4.1700.3", None),
        ("", None),
    ],
)
def test_the_position_is_read_from_the_reply_subject(
    reply: str, position: tuple[int, int, int, int, int] | None
) -> None:
    assert ack_position(reply) == position


@given(st.text().map(lambda text: f"$JS.ACK.{text}"))
def test_no_reply_subject_raises(reply: str) -> None:
    found = ack_position(reply)

    assert found is None or len(found) == 5


async def test_a_consumer_that_stops_is_gone_from_the_server(
    connection: NatsConnection, stream: str
) -> None:
    consumer = await connection.jetstream.consume(stream, lambda message: None)
    during = len(await consumers(connection, stream))

    await consumer.stop()
    await consumer.stop()

    assert (during, await consumers(connection, stream)) == (1, [])
    assert repr(consumer) == f"<NatsOrderedConsumer {stream} [next: 1]>"


async def test_a_consumer_that_cannot_start_leaves_no_subscription(
    connection: NatsConnection, stream: str
) -> None:
    # With the stream the connection has its subscription to the answers of the server.
    tasks = asyncio.all_tasks()
    before = repr(connection)

    with pytest.raises(NoStream):
        await connection.jetstream.consume("missing", lambda message: None)
    with pytest.raises(NoStream):
        await connection.jetstream.consume("missing", lambda message: None, last_per_subject=True)
    await connection.barrier()

    assert repr(connection) == before
    assert asyncio.all_tasks() == tasks


async def test_a_message_that_is_no_delivery_is_passed_over_and_counted(
    connection: NatsConnection, stream: str
) -> None:
    received: list[StoredMessage] = []
    dropped: list[DropReason] = []
    connection.on_drop(dropped.append)
    consumer = await connection.jetstream.consume(stream, received.append)
    (info,) = await consumers(connection, stream)

    connection.publish(info["config"]["deliver_subject"], b"forged", reply="not.an.ack")
    await connection.barrier()
    await connection.jetstream.publish(f"{stream}.a", b"real")
    await eventually(lambda: received)

    assert [message.data for message in received] == [b"real"]
    assert dropped == [DropReason.MALFORMED]
    await consumer.stop()


async def test_a_consumer_that_somebody_deleted_starts_over_and_misses_nothing(
    connection: NatsConnection, stream: str
) -> None:
    received: list[int] = []
    consumer = await connection.jetstream.consume(
        stream, lambda message: received.append(message.sequence)
    )
    await connection.jetstream.publish(f"{stream}.a", b"")
    await eventually(lambda: received == [1])
    (info,) = await consumers(connection, stream)

    await connection.jetstream.api(f"CONSUMER.DELETE.{stream}.{info['name']}", {}, timeout=5.0)
    for _ in range(3):
        await connection.jetstream.publish(f"{stream}.a", b"")
    await eventually(lambda: len(received) == 4)

    assert received == [1, 2, 3, 4]
    await consumer.stop()


@pytest.mark.parametrize("bad", [b"{", b"{}", b'{"created": 1, "state": {}}'])
async def test_an_answer_that_cannot_be_read_does_not_end_a_consumer(
    connection: NatsConnection, stream: str, monkeypatch: pytest.MonkeyPatch, bad: bytes
) -> None:
    received: list[int] = []
    consumer = await connection.jetstream.consume(
        stream, lambda message: received.append(message.sequence)
    )
    (info,) = await consumers(connection, stream)
    await connection.jetstream.api(f"CONSUMER.DELETE.{stream}.{info['name']}", {}, timeout=5.0)
    misread: list[str] = []
    ask = connection.request

    async def request(subject: str, *arguments: Any, **options: Any) -> Message:
        if "STREAM.INFO" in subject and len(misread) < 2:
            misread.append(subject)
            return Message(subject, "", b"", bad)
        return await ask(subject, *arguments, **options)

    monkeypatch.setattr(connection, "request", request)
    await eventually(lambda: len(misread) == 2)
    await connection.jetstream.publish(f"{stream}.a", b"")
    await eventually(lambda: received == [1])

    await consumer.stop()


async def test_a_reader_of_last_messages_asks_for_no_stream_info(
    connection: NatsConnection, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each of a thousand processes starts one at every reconnect, and needs no such permission.
    async def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(connection.jetstream, "stream_info", refuse)

    consumer = await connection.jetstream.consume(
        stream, lambda message: None, last_per_subject=True, on_restart=lambda: None
    )

    await consumer.stop()
