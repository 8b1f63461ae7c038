"""Answers of the server that it stored where a request named a stream's subject."""

from __future__ import annotations

import secrets

import pytest
from tests.conditions import eventually

from dynbus.bus.nats.answers import is_answer
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.protocol.headers import STREAM
from dynbus.bus.transport import (
    Delivery,
    PullConsumerConfig,
    StoredMessage,
    StreamConfig,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "data",
    [
        b'{"type":"io.nats.jetstream.api.v1.stream_info_response","total":0}',
        b'{"type":"io.nats.jetstream.api.v1.stream_info_response","error":{"code":404}}',
        b'{"stream":"KV_dynbus_instances", "seq":12}',
        b'{"stream":"DYNBUS_X","domain":"eu", "seq":12,"duplicate": true}',
        b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 0"},'
        b'"stream":"KV_x","seq":0}',
    ],
)
def test_answers_of_the_server_are_known_by_what_they_are(data: bytes) -> None:
    assert is_answer(b"", data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"type":"io.nats.micro.v1.ping_response"}',
        b'{"type":"order","text":"io.nats.jetstream.api.v1."}',
        b'{"stream":"orders","seq":12}',
        b'{"stream":"KV_x","seq":12,"lines":[{"seq":1}]}',
    ],
)
def test_what_others_write_is_no_answer(data: bytes) -> None:
    assert not is_answer(b"", data)


async def _forge(connection: NatsConnection, kind: str, stream: str, subject: str) -> None:
    """Have the server answer at a subject of a stream."""
    if kind == "information":
        connection.publish(f"$JS.API.STREAM.INFO.{stream}", b"", reply=subject)
    elif kind == "message":
        question = b'{"last_by_subj":"%s.true"}' % stream.encode()
        connection.publish(f"$JS.API.DIRECT.GET.{stream}", question, reply=subject)
    else:
        connection.publish(f"{stream}.other", b"text", reply=subject)


@pytest.mark.parametrize("kind", ["information", "message", "acknowledgement"])
async def test_they_are_empty_and_marked_for_whoever_reads_them(
    connection: NatsConnection, kind: str
) -> None:
    stream, jetstream = f"DYNBUS_{secrets.token_hex(6)}", connection.jetstream
    await jetstream.ensure_stream(StreamConfig(stream, (f"{stream}.>",)))
    await jetstream.publish(f"{stream}.true", b'"true"')
    forged = f"{stream}.forged"
    await _forge(connection, kind, stream, forged)

    async def stored() -> StoredMessage | None:
        return await jetstream.last(stream, forged)

    await eventually(stored, what="the server has stored its answer")
    consumed: list[StoredMessage] = []
    taken: list[Delivery] = []
    consumer = await jetstream.consume(stream, consumed.append, subject=forged)
    await jetstream.ensure_pull_consumer(stream, PullConsumerConfig("takers", subject=forged))
    reader = jetstream.pull(stream, "takers", taken.append, on_missing=lambda: None)
    reader.ask(1)
    await eventually(lambda: consumed and taken)
    last = await stored()
    page = await jetstream.read_page(stream, forged)
    true = await jetstream.read_page(stream, f"{stream}.true")
    await reader.stop()
    await consumer.stop()

    assert last is not None
    for message in (last, page[0], consumed[0], taken[0].message):
        assert message.data == b""
        assert STREAM in message.headers
    assert [(one.data, STREAM in one.headers) for one in true] == [(b'"true"', False)]
