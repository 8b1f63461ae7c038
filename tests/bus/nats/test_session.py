"""A session goes to a server that takes it, and says which ones did not and why."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from tests.bus.servers import listener, server_stopped
from tests.conditions import Stopwatch

from dynbus.bus.errors import PermissionDenied, Unavailable
from dynbus.bus.nats.server_process import RunningServer, free_port, run_server
from dynbus.bus.nats.session import TooSlow, open_session


@pytest.mark.anyio
async def test_the_first_server_that_takes_it_has_the_session(nats_server: RunningServer) -> None:
    servers = [f"nats://127.0.0.1:{free_port()}", nats_server.url]

    session = await open_session(servers, name="session", timeout=2.0, options={})
    name, info = session.server_name, session.info
    session.abort()

    assert name == nats_server.url.removeprefix("nats://")
    assert info["max_payload"] == 1024 * 1024


@pytest.mark.anyio
async def test_after_the_handshake_the_bytes_are_raw(nats_server: RunningServer) -> None:
    session = await open_session([nats_server.url], name="raw", timeout=2.0, options={})

    session.write_now(b"SUB raw.session 1\r\nPUB raw.session 2\r\nhi\r\nPING\r\n")
    read = bytearray()

    def take(chunk: bytes) -> None:
        read.extend(chunk)
        if read.endswith(b"PONG\r\n"):
            session.abort()

    async with asyncio.timeout(60):
        await session.receive(take)

    # The server may say INFO once more before.
    assert read.endswith(b"MSG raw.session 1 2\r\nhi\r\nPONG\r\n")


@pytest.mark.anyio
async def test_what_cannot_be_taken_ends_the_session_and_is_raised(
    nats_server: RunningServer,
) -> None:
    session = await open_session([nats_server.url], name="raw", timeout=2.0, options={})
    session.write_now(b"PING\r\n")
    seen: list[bytes] = []

    def take(chunk: bytes) -> None:
        seen.append(chunk)
        raise ValueError("not this")

    async with asyncio.timeout(60):
        with pytest.raises(ValueError, match="not this"):
            await session.receive(take)
    session.abort()

    assert len(seen) == 1


@pytest.mark.anyio
async def test_what_came_together_with_the_handshake_is_taken_first() -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"S","version":"2.15.1","max_payload":1024}\r\n')
        await reader.readuntil(b"PING\r\n")
        writer.write(b"PONG\r\nPING\r\n")
        await writer.drain()
        await reader.readuntil(b"read\r\n")
        writer.write(b"+OK\r\n")
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    read = bytearray()
    async with asyncio.timeout(60):
        session = await open_session([url], name="early", timeout=60.0, options={})
        session.write_now(b"read\r\n")
        await session.receive(read.extend)
    session.abort()
    server.close()

    assert read == b"PING\r\n+OK\r\n"


@pytest.mark.anyio
async def test_servers_that_cannot_be_reached_are_all_named_without_passwords() -> None:
    ports = [free_port(), free_port()]
    servers = [f"nats://me:secret@127.0.0.1:{port}" for port in ports]

    with pytest.raises(Unavailable) as raised:
        await open_session(servers, name="nowhere", timeout=2.0, options={})

    assert all(f"127.0.0.1:{port}" in str(raised.value) for port in ports)
    assert "secret" not in str(raised.value)


@pytest.mark.anyio
async def test_a_server_that_says_nothing_holds_up_the_next_one_for_a_moment_only(
    nats_server: RunningServer,
) -> None:
    async with listener(None) as first, listener(None) as second:
        watch = Stopwatch()
        session = await open_session(
            [first, second, nats_server.url], name="race", timeout=60.0, options={}
        )
        took = watch.seconds()
        session.abort()

    assert session.url == nats_server.url
    assert took < 2.0


@pytest.mark.anyio
async def test_an_aborted_session_delivers_nothing_that_its_socket_still_holds() -> None:
    """Its end comes as a reset, which drops all that was not read yet."""
    ended: asyncio.Future[BaseException | bytes] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"S","version":"2.15.1","max_payload":1024}\r\n')
        await reader.readuntil(b"PING\r\n")
        writer.write(b"PONG\r\n")
        try:
            ended.set_result(await reader.read())
        except ConnectionResetError as error:
            ended.set_result(error)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    session = await open_session([url], name="reset", timeout=60.0, options={})

    session.abort()

    async with asyncio.timeout(60):
        end = await ended
    server.close()
    assert isinstance(end, ConnectionResetError)


@pytest.mark.anyio
async def test_a_server_that_says_nothing_costs_its_time_and_no_more() -> None:
    async with listener(None) as url:
        with pytest.raises(TooSlow, match=url.removeprefix("nats://")):
            async with asyncio.timeout(60):
                await open_session([url], name="mute", timeout=0.2, options={})


@pytest.mark.anyio
async def test_refused_credentials_end_the_search(
    nats_server: RunningServer, tmp_path: Path
) -> None:
    guarded = await run_server(store_dir=tmp_path, config='authorization { token: "right" }')

    async with server_stopped(guarded):
        with pytest.raises(PermissionDenied, match=f"127.0.0.1:{guarded.port} refuses"):
            await open_session(
                [guarded.url, nats_server.url],
                name="refused",
                timeout=60,
                options={"token": "wrong"},
            )


@pytest.mark.anyio
async def test_cancelling_an_opening_closes_its_socket() -> None:
    greeted, gone = asyncio.Event(), asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"S","version":"2.15.1","max_payload":1024}\r\n')
        await reader.readuntil(b"PING\r\n")
        greeted.set()
        with suppress(ConnectionResetError):
            await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    opening = asyncio.create_task(open_session([url], name="mute", timeout=600.0, options={}))
    async with asyncio.timeout(60):
        await greeted.wait()

        opening.cancel()
        await asyncio.wait({opening})

        await gone.wait()
    server.close()
    assert opening.cancelled()
