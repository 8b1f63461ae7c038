"""Answers of servers that do not keep to HTTP, or only just."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.certificates import Authority

from dynbus import ConfigError
from dynbus.llm.proxy.http_client import BrokenOff, HttpClient, NotReached, ServerAddress, Trust

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\n"
CONNECTIONS: list[int] = []
"""Those that were made; cleared by who counts them."""


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncGenerator[HttpClient]:
    """A client of a server that gives one of these for each read, and closes after the last."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        CONNECTIONS.append(1)
        while left and await reader.read(65536):
            writer.write(left.pop(0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HttpClient(ServerAddress.parse(f"http://127.0.0.1:{port}"))
    try:
        yield client
    finally:
        client.close()
        server.close()


async def body_of(client: HttpClient) -> bytes:
    async with client.request("GET", "/", {}) as answer:
        return await answer.body(1000)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff no HTTP",
        OK + b"X: " + b"a" * 100_000,
        OK + b"Content-Length: 100\r\n\r\nshort",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switch\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
    ],
    ids=["nothing", "noise", "headers", "short", "chunk", "upgrade"],
)
async def test_what_is_no_whole_answer_is_broken_off(answer: bytes) -> None:
    async with answering(answer) as client:
        with pytest.raises(BrokenOff):
            await body_of(client)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK + b"\r\nto the end", b"to the end"),
        (b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nhi", b"hi"),
        (b"HTTP/1.1 204 None\r\n\r\n", b""),
    ],
    ids=["unbounded", "interim", "none"],
)
async def test_answers_without_a_length_end_as_they_say(answer: bytes, body: bytes) -> None:
    async with answering(answer) as client:
        assert await body_of(client) == body


async def test_a_connection_is_kept_unless_more_came_than_the_answer() -> None:
    first = OK + b"Content-Length: 2\r\n\r\n"
    CONNECTIONS.clear()
    async with answering(first + b"a1", first + b"a2" + first + b"b2", first + b"a3") as client:
        assert [await body_of(client) for _ in range(3)] == [b"a1", b"a2", b"a3"]
    assert len(CONNECTIONS) == 2


async def test_a_connection_that_the_server_closed_meanwhile_is_made_anew() -> None:
    async with answering(OK + b"Content-Length: 2\r\n\r\nhi") as client:
        assert await body_of(client) == b"hi"
        # The server closes when it has no answers left, and takes connections on.
        with pytest.raises(BrokenOff):
            await body_of(client)


async def test_an_answer_that_is_too_long_is_refused() -> None:
    async with answering(OK + b"\r\n" + b"x" * 1001) as client:
        with pytest.raises(ValueError, match="more than 1000 bytes"):
            await body_of(client)


async def test_a_header_cannot_become_two() -> None:
    async with answering() as client:
        with pytest.raises(ValueError, match="line break"):
            async with client.request("GET", "/", {"X": "a\r\nEvil: b"}):
                pass


async def test_nobody_there_is_not_reached() -> None:
    async with answering() as client:
        address = client.address
    with pytest.raises(NotReached):
        await body_of(HttpClient(address))


def test_an_address_is_where_the_routes_are() -> None:
    plain = ServerAddress.parse("http://host:81/")
    assert (str(plain), plain.root) == ("http://host:81/v1", "")
    below = ServerAddress.parse("https://host/openai/v1/")
    assert (str(below), below.root, below.port) == ("https://host/openai/v1", "/openai", 443)
    other = ServerAddress.parse("http://[::1]:8000/api/v3")
    assert (str(other), other.root) == ("http://[::1]:8000/api/v3", "/api/v3")


async def test_a_server_is_trusted_by_its_authority_and_knows_the_worker(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server", "127.0.0.1")
    own = authority.sign("worker", "worker", client=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    tls.load_cert_chain(pair.cert, pair.key)
    tls.verify_mode = ssl.CERT_REQUIRED

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(65536):
            writer.write(OK + b"Content-Length: 2\r\n\r\nhi")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    address = ServerAddress.parse(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    known = HttpClient(address, Trust(authority.ca, own.cert, own.key))
    stranger = HttpClient(address, Trust(authority.ca))
    suspicious = HttpClient(address)
    try:
        assert await body_of(known) == b"hi"
        with pytest.raises(BrokenOff):
            await body_of(stranger)
        with pytest.raises(NotReached, match=r"its certificate is not taken \(.*cert.*: tls_ca"):
            await body_of(suspicious)
    finally:
        for client in (known, stranger, suspicious):
            client.close()
        server.close()


def test_certificates_that_cannot_be_used_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^tls_ca = '/gone', .* No such file"):
        HttpClient(ServerAddress.parse("https://h"), Trust("/gone"))
