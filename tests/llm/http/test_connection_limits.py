"""What one client may take of a front end before, beside and after its requests."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.conditions import eventually

from dynbus.kvrouter.routing.fairness import Shares
from dynbus.llm.http import connection
from dynbus.llm.http.connection import Strangers, network_of
from dynbus.llm.shares import SharedRoom

from .served import Served, served
from .test_connections import chat, error_of, exchange, request

pytestmark = pytest.mark.anyio

CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n%b\r\n"
    b'26\r\n{"model": "tiny", "messages": []      \r\n'
)
"""The beginning of a request in chunks, with a place for headers."""

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connections_of(front: Served) -> set[Any]:
    """The connections of a front end."""
    server: Any = front.front_end._server  # pyright: ignore[reportPrivateUsage]
    found: set[Any] = server._server.server_state.connections
    return found


def head_of(key: str, length: int) -> bytes:
    """The beginning of a request of whoever has a key."""
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def sent_until_refused(front: Served, begin: bytes, piece: bytes, most: int) -> int:
    """How many bytes of `most` a client sends before it is refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    refusal = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    sent = 0
    async with asyncio.timeout(60):
        writer.write(begin)
        while sent < most and not refusal.done():
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
        assert (await refusal).startswith(b"HTTP/1.1 400 ")
    writer.transport.abort()
    return sent


async def answer_and_end(front: Served, data: bytes) -> bytes:
    """All that comes after some bytes until the server closes its side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    try:
        writer.write(data)
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.transport.abort()


async def test_a_body_with_trailers_is_refused() -> None:
    async with served() as front:
        at_once = await answer_and_end(front, CHUNKED % b"" + b"0\r\nX: y\r\n\r\n")
        answered = front.engine.requests
        after = await exchange(front, request(chat("say hi")))

    assert at_once.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in at_once
    assert b"trailers" in at_once
    assert len(answered) == 1
    assert after[0] == 200


async def test_a_key_in_a_trailer_is_none(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada secret-of-ada\n")
    body = request(chat("say hi")).partition(b"\r\n\r\n")[2]
    head = CHUNKED.partition(b"%b")[0] + b"\r\n"
    chunk = b"%x\r\n%b\r\n0\r\nAuthorization: Bearer secret-of-ada\r\n\r\n" % (len(body), body)
    async with served(api_keys=keys) as front:
        told = await answer_and_end(front, head + chunk)

        assert front.engine.requests == []
    assert told.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 "))


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"0\r\n", b"X: y\r\n" * 10_000),
        (b"0\r\nX: ", b"y" * 65_536),
        (b"5;", b"x" * 65_536),
        (b"", b"1;%b\r\n \r\n" % (b"x" * 60_000)),
    ],
    ids=["trailers", "trailer", "extension", "extensions"],
)
async def test_what_is_no_content_of_a_chunked_body_has_a_bound(begin: bytes, piece: bytes) -> None:
    async with served() as front:
        sent = await sent_until_refused(front, CHUNKED % b"" + begin, piece, 64 * 1024 * 1024)

        await eventually(lambda: front.front_end.shared.metrics.in_flight == 0)
        await eventually(lambda: not connections_of(front))
    # The kernel takes more of it than is read.
    assert sent < 16 * 1024 * 1024


async def test_a_body_in_the_smallest_chunks_is_taken() -> None:
    body = request(chat("say " + "hi " * 5000)).partition(b"\r\n\r\n")[2]
    head = CHUNKED.partition(b"%b")[0] + b"\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    async with served() as front:
        status, _, told = await exchange(front, head + chunks + b"0\r\n\r\n")

    assert (status, error_of(told)["code"]) == (400, "context_length_exceeded")


async def test_requests_that_are_sent_at_once_are_answered_in_their_order_a_few_at_a_time() -> None:
    count = 5000
    async with served() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        await eventually(lambda: connections_of(front))
        [made] = connections_of(front)
        most = 0

        def look() -> None:
            nonlocal most
            most = max(most, len(made.pipeline))

        loop = asyncio.get_running_loop()
        writer.write(
            b"".join(
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: %d\r\n\r\n" % number
                for number in range(count)
            )
        )
        found: list[int] = []
        async with asyncio.timeout(60):
            for _ in range(count):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(b'{"status":"ok"}'))
                found.append(int(head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0]))
                loop.call_soon(look)
        writer.close()

    assert found == list(range(count))
    assert most < 300


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/health", b"/nowhere"])
async def test_an_answer_before_the_end_of_its_request_ends_the_connection(
    path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER", 0.5)
    method = b"GET" if path == b"/health" else b"POST"
    head = b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{" % (method, path)
    async with served(body_timeout=0.3) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(head)
        begun = time.monotonic()
        async with asyncio.timeout(30):
            answer = await reader.read()
        # A byte now and then keeps nothing open.
        while connections_of(front):
            assert time.monotonic() - begun < 30
            with suppress(ConnectionError):
                writer.write(b" ")
                await writer.drain()
            await asyncio.sleep(0.05)
        writer.transport.abort()

    assert b"connection: close" in answer


async def test_a_client_that_sends_on_gets_the_answer_that_says_why_not() -> None:
    async with served(max_body_bytes=1000) as front:
        client = socket.socket()
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", front.port))
        # It reads nothing before it has sent everything, as many clients do.
        await loop.sock_sendall(client, request(b" " * 8 * 1024 * 1024))
        answer = await loop.sock_recv(client, 65_536)
        client.close()

    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_those_without_a_key_take_no_place_of_those_who_have_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada secret-of-ada\n")
    asked = request(chat("say hi"), Authorization="Bearer secret-of-ada")
    async with served(api_keys=keys, max_strangers=10) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(asked)
        await reader.readuntil(b"\r\n\r\n")
        strangers = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(50)]
        for _, stranger in strangers:
            stranger.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        await eventually(lambda: len(connections_of(front)) <= 11)
        other = await exchange(front, asked)
        writer.write(asked)
        async with asyncio.timeout(30):
            again = await reader.readuntil(b"\r\n\r\n{") + await reader.readuntil(b'"choices"')
        for _, each in (*strangers, (reader, writer)):
            each.transport.abort()

    assert other[0] == 200
    assert b"HTTP/1.1 200" in again


def test_the_oldest_stranger_of_an_address_makes_room_for_the_next() -> None:
    strangers = Strangers[str](2, 3)

    gone = [strangers.came(*one) for one in (("a", "1"), ("b", "1"), ("c", "1"), ("d", "2"))]
    of_all = strangers.came("e", "3")
    strangers.forget("d")
    strangers.forget("d")

    assert gone == [None, None, "a", None]
    assert of_all == "b"
    assert len(strangers) == 2
    assert strangers.came("f", "3") is None


def test_an_address_of_ipv6_is_one_of_a_network_that_one_client_has() -> None:
    told = [
        network_of(one)
        for one in ("10.1.2.3", "2001:db8::1", "2001:db8::2:1", "2001:db8:0:1::1", "fe80::1%eth0")
    ]

    assert told[0] == "10.1.2.3"
    assert told[1] == told[2] == "2001:db8::/64"
    assert told[3] == "2001:db8:0:1::/64"
    assert told[4] == "fe80::/64"
    assert network_of("::ffff:10.1.2.3") == "10.1.2.3"


async def test_a_front_end_has_as_many_descriptors_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        async with served():
            found = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert found == (hard, hard)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_only_reads_from_now_on_gets_its_answer(stream: bool) -> None:
    asked = request(chat("slowly one two three", stream=stream), Connection="close")
    async with served() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(asked)
        writer.write_eof()
        async with asyncio.timeout(30):
            answer = await reader.read()
        writer.close()

    assert b"HTTP/1.1 200 OK" in answer
    assert b"[DONE]" in answer if stream else b"one two three" in answer


async def test_half_a_request_of_a_client_that_sends_no_more_is_no_request() -> None:
    async with served() as front:
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request(chat("say hi"))[:-5])
        writer.write_eof()

        await eventually(lambda: not connections_of(front))
        await eventually(lambda: front.front_end.shared.metrics.in_flight == 0)
        writer.close()


async def test_a_page_that_is_not_read_holds_its_connection_for_a_time() -> None:
    async with served(write_timeout=0.3) as front:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", front.port))
        asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        await loop.sock_sendall(slow, asked * 100)
        await eventually(lambda: connections_of(front))

        await eventually(lambda: not connections_of(front))
        slow.close()


async def test_nonsense_behind_a_request_is_no_part_of_its_answer() -> None:
    async with served() as front:
        answer = await answer_and_end(
            front, request(chat("endless a", stream=True)) + b"NONSENSE\r\n\r\n"
        )

    assert answer == b"" or (answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 400" not in answer)


async def test_long_bodies_of_one_tenant_wait_while_others_are_answered(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada secret-of-ada\nbob secret-of-bob\n")
    async with served(api_keys=keys, max_body_bytes=1 << 20, body_timeout=600) as front:
        # A room for four of them.
        shared = front.front_end.shared
        shared.bodies = SharedRoom(Shares(4 << 20, 1))
        senders = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(20)]
        for _, writer in senders:
            writer.write(head_of("secret-of-ada", 1_000_000) + b" " * 999_999)
        await eventually(lambda: shared.metrics.in_flight == 20)
        await eventually(lambda: "1 owners wait" in repr(shared.bodies))
        held = repr(shared.bodies)
        long = chat("say " + "hi " * 9000)
        other = await exchange(front, request(long, Authorization="Bearer secret-of-bob"))
        for _, writer in senders:
            writer.transport.abort()
        await eventually(lambda: "[0 of" in repr(shared.bodies))

    assert "[2000000 of" in held
    assert other[0] in (200, 400)


async def test_a_long_body_that_finds_no_room_is_told_so() -> None:
    async with served(max_body_bytes=1 << 20, body_timeout=0.2) as front:
        shared = front.front_end.shared
        shared.bodies = SharedRoom(Shares(100_000, 1))
        await shared.bodies.reserve("", 100_000)
        status, headers, body = await exchange(front, request(b" " * 20_000))

    assert status == 429
    assert "retry-after: 1" in headers
    assert "long bodies" in error_of(body)["message"]


async def test_requests_of_one_tenant_leave_places_for_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada secret-of-ada\nbob secret-of-bob\n")
    head = head_of("secret-of-ada", 100)
    async with served(api_keys=keys, max_requests=16, body_timeout=600) as front:
        senders = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(15)]
        for _, writer in senders:
            writer.write(head)
        async with asyncio.timeout(30):
            # The fifteenth has no place.
            reading = [asyncio.create_task(one.readline()) for one, _ in senders]
            refused, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        other = await exchange(front, request(chat("say hi"), Authorization="Bearer secret-of-bob"))
        for _, writer in senders:
            writer.transport.abort()
        await asyncio.gather(*reading, return_exceptions=True)

    assert [one.result() for one in refused] == [b"HTTP/1.1 429 Too Many Requests\r\n"]
    assert other[0] == 200
