"""A command asks many at once and takes what they answer until it is quiet."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest

from dynbus.bus.commands.server import Server
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import BusConfig
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import ReplySubjects
from dynbus.bus.transport import ConnectionState, Message


def text(message: Message) -> str | None:
    return message.data.decode() or None


@pytest.mark.anyio
async def test_all_answers_are_taken_until_it_is_quiet(nats_server: RunningServer) -> None:
    async with terminal.server(BusConfig(servers=(nats_server.url,)), "test-ask") as server:
        connection = server.connection

        def answer(message: Message) -> None:
            for word in (b"one", b"", b"two"):
                connection.publish(message.reply, word + message.data)

        connection.subscribe("ask.many.*", answer)
        began = time.monotonic()

        found = await server.ask(
            ("ask.many.a", "ask.many.nobody.hears"), b"!", text, seconds=600.0, quiet=0.2
        )

    assert sorted(found) == ["!", "one!", "two!"]
    assert time.monotonic() - began < 60.0
    assert connection.state is ConnectionState.CLOSED


@pytest.mark.anyio
async def test_those_that_never_fall_silent_are_left_after_a_while(
    nats_server: RunningServer,
) -> None:
    async with terminal.server(BusConfig(servers=(nats_server.url,)), "test-ask") as server:
        connection = server.connection

        def echo(message: Message) -> None:
            connection.publish(message.reply, b"more")
            connection.publish("ask.talker", b"", reply=message.reply)

        connection.subscribe("ask.talker", echo)

        found = await server.ask(("ask.talker",), b"", text, seconds=0.3, quiet=0.2)

    assert set(found) == {"more"}


@pytest.mark.anyio
async def test_time_in_which_nobody_runs_is_no_silence() -> None:
    bus = MemoryBus()
    connection, other = await bus.connect(), await bus.connect()
    server = Server(BusConfig(), cast(NatsConnection, connection), ReplySubjects("-", "c" * 32))

    def answer(message: Message, turns: int = 10) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(answer, message, turns - 1)
        else:
            other.publish(message.reply, b"here")

    def stand_still(message: Message) -> None:
        time.sleep(0.3)
        answer(message)

    other.subscribe("ask.still", stand_still)
    await other.barrier()

    found = await server.ask(("ask.still",), b"", text, seconds=0.1, quiet=0.2)

    assert found == ["here"]
