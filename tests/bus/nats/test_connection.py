"""A connection to nats-server is open until it is closed, whatever the server and links do."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.bus.servers import server_stopped
from tests.conditions import eventually

from dynbus.actors.chaos.proxy import Proxy
from dynbus.bus.errors import DynbusError, PermissionDenied, Unavailable
from dynbus.bus.nats import connection as module
from dynbus.bus.nats.connection import NatsConnection, connect
from dynbus.bus.nats.server_process import RunningServer, free_port, run_server
from dynbus.bus.transport import ConnectionState, Message

pytestmark = pytest.mark.anyio

GREETING = b'INFO {"server_id":"S","version":"2.15.1","max_payload":1048576,"headers":true}\r\n'


@pytest.fixture
async def proxy(nats_server: RunningServer) -> AsyncIterator[Proxy]:
    async with Proxy(nats_server.port) as proxy:
        yield proxy


@pytest.fixture
def subject() -> str:
    return f"client.{secrets.token_hex(8)}"


@asynccontextmanager
async def connected(*urls: str) -> AsyncGenerator[NatsConnection, None]:
    connection = await connect(urls)
    try:
        yield connection
    finally:
        await connection.close()


async def hears(connection: NatsConnection, subject: str) -> bool:
    """Whether the connection gets a message of its own."""
    heard: list[Message] = []
    subscription = connection.subscribe(subject, heard.append)
    await connection.barrier()
    connection.publish(subject, b"")
    await connection.barrier()
    subscription.unsubscribe()
    return len(heard) == 1


async def test_whoever_is_cancelled_while_they_connect_is_cancelled(
    nats_server: RunningServer,
) -> None:
    """Whatever arrives in the turn of the loop in which they are."""
    cancelled = turns = 0
    while cancelled < 400:
        connecting = asyncio.create_task(connect((nats_server.url,)))
        for _ in range(turns):
            await asyncio.sleep(0)
        if connecting.done():
            await connecting.result().close()
            turns = 0
            continue
        connecting.cancel()
        await asyncio.wait({connecting})

        assert connecting.cancelled()
        cancelled += 1
        turns += 1


# For ever ----------------------------------------------------------------------------------


async def test_a_connection_that_is_cut_again_and_again_comes_back_with_its_subscriptions(
    proxy: Proxy, nats_server: RunningServer, subject: str
) -> None:
    async with connected(proxy.url) as connection, connected(nats_server.url) as other:
        heard: list[Message] = []
        connection.subscribe(subject, heard.append)

        for count in range(1, 6):
            proxy.cut()
            await eventually(lambda: connection.sessions == count + 1)  # noqa: B023
            await connection.barrier()
            other.publish(subject, b"%d" % count)
            await eventually(lambda: len(heard) == count)  # noqa: B023

        assert [message.data for message in heard] == [b"1", b"2", b"3", b"4", b"5"]


async def test_a_server_that_refuses_for_a_while_is_tried_until_it_takes_us(
    proxy: Proxy, subject: str
) -> None:
    async with connected(proxy.url) as connection:
        proxy.refuse()
        proxy.cut()
        tried = proxy.accepted
        await eventually(lambda: proxy.accepted >= tried + 5)
        state = connection.state

        proxy.refuse(False)
        await eventually(lambda: connection.state is ConnectionState.CONNECTED)

        assert state is ConnectionState.DISCONNECTED
        assert await hears(connection, subject)


async def test_a_restarted_server_is_found_again(own_server: RunningServer, subject: str) -> None:
    async with connected(own_server.url) as connection:
        own_server.kill()
        await eventually(lambda: connection.state is ConnectionState.DISCONNECTED)

        await own_server.restart()
        await eventually(lambda: connection.state is ConnectionState.CONNECTED)

        assert await hears(connection, subject)


@pytest.mark.parametrize("lasts", [False, True])
async def test_the_loss_of_the_server_and_its_return_are_told_once_each_and_that_an_outage_lasts(
    proxy: Proxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    if lasts:
        monkeypatch.setattr(module, "FIRST_REPORT", 0.001)
        monkeypatch.setattr(module, "MAX_PAUSE", 0.001)
    caplog.set_level(logging.INFO, "dynbus.bus.nats.connection")
    async with connected(proxy.url) as connection:
        proxy.refuse()
        proxy.cut()
        tried = proxy.accepted
        await eventually(lambda: proxy.accepted >= tried + 5)
        proxy.refuse(False)
        await eventually(lambda: connection.state is ConnectionState.CONNECTED)
        await eventually(lambda: "connected again, to" in caplog.text)

    server = f"127.0.0.1:{proxy.port}"
    (lost, *waiting, again) = [record.message for record in caplog.records]
    # A program that shows warnings alone is not left with a loss that never ends.
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert lost.startswith(f"dynbus: the connection to {server} is lost: ")
    assert bool(waiting) == lasts
    assert all(text.startswith("dynbus: not connected again for ") for text in waiting)
    assert again.startswith(f"dynbus: connected again, to {server}, after ")


async def test_a_connection_that_is_closed_while_disconnected_stays_closed(proxy: Proxy) -> None:
    async with connected(proxy.url) as connection:
        proxy.refuse()
        proxy.cut()
        await eventually(lambda: connection.state is ConnectionState.DISCONNECTED)
        waiting = asyncio.create_task(connection.barrier(timeout=30.0))
        await asyncio.sleep(0)

        await connection.close()

        with pytest.raises(Unavailable, match="closed"):
            await waiting
        assert connection.state is ConnectionState.CLOSED


# Servers that misbehave --------------------------------------------------------------------


@asynccontextmanager
async def server_that_says(words: bytes) -> AsyncGenerator[str, None]:
    """A server that says `words` once, after its first answer to a ping."""
    left = [words]
    sessions: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sessions[asyncio.current_task()] = writer
        writer.write(GREETING)
        with suppress(ConnectionError):
            while line := await reader.readline():
                if line == b"PING\r\n":
                    writer.write(b"PONG\r\n" + (left.pop() if left else b""))
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in sessions.values():
            writer.transport.abort()
        await asyncio.wait([task for task in sessions if task is not None], timeout=60)


@pytest.mark.parametrize(
    "poison",
    [
        b"MSG what is this\r\n",
        b"HMSG a 1 10 5\r\nhello\r\n",
        b"HELLO\r\n",
        b"\x00\xff\r\n",
        b"x" * (80 * 1024),
    ],
)
async def test_bytes_that_are_no_protocol_end_the_session_and_the_next_one_serves(
    poison: bytes,
) -> None:
    async with server_that_says(poison) as url, connected(url) as connection:
        await eventually(lambda: connection.sessions == 2)

        await connection.barrier()

        assert connection.state is ConnectionState.CONNECTED


@pytest.mark.parametrize(
    "oddity",
    [
        b"INFO not json\r\n",
        b"+OK\r\n",
        b"-ERR \xff\xfe\r\n",
        b"PONG\r\n",
        b"MSG a 4711 2\r\nhi\r\n",
        b"HMSG a.\xff 4711 5 7\r\nxxxxxhi\r\n",
    ],
)
async def test_what_a_server_may_say_oddly_ends_no_session(oddity: bytes) -> None:
    async with server_that_says(oddity) as url, connected(url) as connection:
        await connection.barrier()
        await connection.barrier()

        assert connection.sessions == 1


async def test_a_listener_to_the_state_that_raises_stops_nobody(proxy: Proxy) -> None:
    async with connected(proxy.url) as connection:
        states: list[ConnectionState] = []

        def broken(state: ConnectionState) -> None:
            raise KeyError(state)

        connection.on_state(broken)
        connection.on_state(states.append)

        proxy.cut()
        await eventually(lambda: ConnectionState.CONNECTED in states)

        assert states == [ConnectionState.DISCONNECTED, ConnectionState.CONNECTED]


# Permissions -------------------------------------------------------------------------------

RIGHTS = """
authorization { users = [ { user: "guest", password: "secret", permissions: {
  publish: { deny: ["forbidden.>"] }, subscribe: { deny: ["forbidden.>"] } } } ] }
"""


async def test_a_refused_subject_is_told_and_the_others_go_on(tmp_path: Path, subject: str) -> None:
    server = await run_server(store_dir=tmp_path, config=RIGHTS)
    url = f"nats://guest:secret@127.0.0.1:{server.port}"

    async with server_stopped(server), connected(url) as connection:
        told: list[tuple[DynbusError, str]] = []
        connection.on_error(lambda error, refused: told.append((error, refused)))
        connection.publish("forbidden.publish", b"")
        await connection.barrier()
        refused_subscription = connection.subscribe("forbidden.subscribe", lambda _: None)

        with pytest.raises(PermissionDenied, match=r"forbidden\.subscribe"):
            await connection.barrier()

        assert [refused for _, refused in told] == ["forbidden.publish", "forbidden.subscribe"]
        refused_subscription.unsubscribe()
        again = connection.subscribe("forbidden.subscribe", lambda _: None)
        with pytest.raises(PermissionDenied, match=r"forbidden\.subscribe"):
            await connection.barrier()
        again.unsubscribe()
        assert all(isinstance(error, PermissionDenied) for error, _ in told)
        assert await hears(connection, subject)
        assert connection.sessions == 1


# A cluster ---------------------------------------------------------------------------------


def cluster(own: int, other: int) -> str:
    return f"""
jetstream: false
lame_duck_duration: "30s"
lame_duck_grace_period: "1s"
cluster {{ name: "c", listen: "127.0.0.1:{own}", routes: ["nats://127.0.0.1:{other}"] }}
"""


async def test_a_server_that_is_going_away_is_left_for_another_before_it_goes(
    tmp_path: Path, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    ports = free_port(), free_port()
    first = await run_server(store_dir=tmp_path / "1", config=cluster(*ports))
    async with server_stopped(first):
        second = await run_server(store_dir=tmp_path / "2", config=cluster(*ports[::-1]))
        async with server_stopped(second), connected(first.url) as connection:
            await eventually(lambda: len(connection.server_info.get("connect_urls", ())) == 2)
            assert first.pid is not None

            os.kill(first.pid, signal.SIGUSR2)  # lame duck
            await eventually(lambda: connection.sessions == 2)
            assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

            assert connection.server_name == f"127.0.0.1:{second.port}"
            assert await hears(connection, subject)


async def test_the_loss_of_another_server_of_the_cluster_is_told(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    first = await run_server(store_dir=tmp_path / "1", config=cluster(*ports))
    async with server_stopped(first):
        second = await run_server(store_dir=tmp_path / "2", config=cluster(*ports[::-1]))
        async with server_stopped(second), connected(first.url) as connection:
            lost: list[bool] = []
            connection.on_peer_lost(lambda: lost.append(connection.has_peers))
            await eventually(lambda: len(connection.server_info.get("connect_urls", ())) == 2)
            before = list(lost)

            await asyncio.to_thread(second.kill)
            await eventually(lambda: lost)

            assert before == []
            assert lost == [True]
            assert connection.sessions == 1
