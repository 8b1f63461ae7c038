"""A request to the server's APIs ends with its reply, or says what kept it away."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from dynbus.bus.drops import DropReason
from dynbus.bus.errors import PermissionDenied, Unavailable
from dynbus.bus.nats.api_requests import NoResponders
from dynbus.bus.nats.connection import NatsConnection, connect
from dynbus.bus.nats.server_process import run_server
from dynbus.bus.transport import Message

pytestmark = pytest.mark.anyio


@pytest.fixture
def subject() -> str:
    return f"requests.{secrets.token_hex(8)}"


async def test_each_request_gets_its_own_reply(connection: NatsConnection, subject: str) -> None:
    def echo(message: Message) -> None:
        connection.publish(message.reply, message.data.upper())

    connection.subscribe(subject, echo)

    replies = await asyncio.gather(
        *(connection.request(subject, b"number %d" % n) for n in range(20))
    )

    assert [reply.data for reply in replies] == [b"NUMBER %d" % n for n in range(20)]


async def test_who_knows_the_inbox_cannot_answer_in_the_place_of_the_server(
    connection: NatsConnection, subject: str
) -> None:
    asked: list[str] = []

    def answer(message: Message) -> None:
        inbox, _, earlier = message.reply.rpartition(".")
        guesses = {str(number) for number in range(100)} | {earlier[:-1]}
        if earlier.isdecimal():
            guesses.add(str(int(earlier) + 1))
        for token in (*guesses, *asked):
            connection.publish(f"{inbox}.{token}", b"forged")
        asked.append(earlier)
        connection.publish(message.reply, b"true")

    connection.subscribe(subject, answer)

    replies = [(await connection.request(subject, b"")).data for _ in range(3)]

    assert replies == [b"true"] * 3
    assert len(set(asked)) == 3


async def test_nobody_there_is_told_at_once(connection: NatsConnection, subject: str) -> None:
    with pytest.raises(NoResponders, match="nobody serves the subject"):
        async with asyncio.timeout(60):
            await connection.request(subject, b"", timeout=600.0)


async def test_a_refusal_in_the_turn_in_which_its_request_is_cancelled_leaves_no_error_behind(
    connection: NatsConnection, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    connection.subscribe(subject, asked.set_result)
    receivers: list[Callable[[Message], object]] = []

    def subscribe(_: str, receive: Callable[[Message], object]) -> None:
        receivers.append(receive)

    monkeypatch.setattr(connection, "subscribe", subscribe)
    asking = asyncio.create_task(connection.request(subject, b"", timeout=600.0))
    async with asyncio.timeout(60):
        question = await asked

    asking.cancel()
    receivers[0](Message(question.reply, "", b"NATS/1.0 503\r\n\r\n", b""))
    await asyncio.wait({asking})

    assert asking.cancelled()


async def test_a_request_without_an_answer_ends_in_time(
    connection: NatsConnection, subject: str
) -> None:
    asked: list[Message] = []
    connection.subscribe(subject, asked.append)

    with pytest.raises(Unavailable, match=r"did not answer within 0\.1 s"):
        await connection.request(subject, b"", timeout=0.1)

    # It may come back later than the time to answer it is over.
    await connection.barrier()
    assert len(asked) == 1


async def test_a_request_that_may_be_repeated_is_sent_again_until_it_is_answered(
    connection: NatsConnection, subject: str
) -> None:
    asked: list[Message] = []

    def answer_the_second(message: Message) -> None:
        asked.append(message)
        if len(asked) == 2:
            connection.publish(message.reply, b"at last")

    connection.subscribe(subject, answer_the_second)

    async with asyncio.timeout(60):
        reply = await connection.request(subject, b"", timeout=600.0, repeat=True)

    assert reply.data == b"at last"
    assert len({message.reply for message in asked}) == 1


async def test_a_request_that_the_server_refuses_ends_at_once_with_its_reason(
    tmp_path: Path,
) -> None:
    server = await run_server(
        store_dir=tmp_path,
        config="""
        authorization { users = [ { user: "guest", password: "secret", permissions: {
          publish: { deny: ["$JS.API.STREAM.DELETE.>"] } } } ] }
        """,
    )
    connection = await connect([f"nats://guest:secret@127.0.0.1:{server.port}"])
    try:
        async with asyncio.timeout(60):
            with pytest.raises(PermissionDenied, match=r"STREAM\.DELETE\.S"):
                await connection.jetstream.delete_stream("S", timeout=600.0)
    finally:
        await connection.close()
        await server.stop()


async def test_an_answer_that_comes_too_late_or_twice_disturbs_no_other_and_is_counted(
    connection: NatsConnection, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    late: list[str] = []
    dropped: list[DropReason] = []
    connection.on_drop(dropped.append)

    def answer(message: Message) -> None:
        if message.data == b"late":
            late.append(message.reply)
            return
        for reply in (late[0], message.reply, message.reply):
            connection.publish(reply, message.data)

    connection.subscribe(subject, answer)
    with pytest.raises(Unavailable):
        await connection.request(subject, b"late", timeout=0.05)

    reply = await connection.request(subject, b"in time")
    await connection.barrier()

    assert reply.data == b"in time"
    assert dropped == [DropReason.STALE] * 2
    assert not any("raised" in text for text in caplog.messages)


async def test_a_connection_that_breaks_ends_what_was_asked_in_it(
    connection: NatsConnection, subject: str
) -> None:
    asked = asyncio.Event()
    connection.subscribe(subject, lambda _: asked.set())
    request = asyncio.create_task(connection.request(subject, b"", timeout=600.0))
    await asked.wait()

    connection.reconnect()

    with pytest.raises(Unavailable, match="the connection to the server broke"):
        async with asyncio.timeout(60):
            await request


async def test_a_closed_connection_refuses_at_once(
    connection: NatsConnection, subject: str
) -> None:
    await connection.close()

    with pytest.raises(Unavailable, match="the connection is closed"):
        await connection.request(subject, b"", timeout=600.0)
