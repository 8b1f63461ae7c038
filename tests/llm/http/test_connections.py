"""Connections to the front end: clients that leave, stall, or send too much or nonsense."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import ssl
import time
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.certificates import Authority
from tests.conditions import eventually
from tests.llm.text.tiny_tokenizer import CHATML

from dynbus import Actor, ConfigError, Runtime, handler
from dynbus.bus.errors import PermissionDenied
from dynbus.llm.http.frontend import Frontend, Http
from dynbus.llm.tenants import keys as keys_module

from .served import Served, card, served

pytestmark = pytest.mark.anyio


def request(body: Any, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    """A POST as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


async def exchange(front: Served, data: bytes) -> tuple[int, str, bytes]:
    """The status, the headers and the body of the answer to what is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    try:
        writer.write(data)
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            fields = head.decode().lower()
            if "content-length: " in fields:
                length = int(fields.partition("content-length: ")[2].partition("\r\n")[0])
                body = await reader.readexactly(length)
            else:
                body = await reader.readuntil(b"0\r\n\r\n")
    finally:
        writer.close()
    return int(head.split(b" ")[1]), fields, body


def text_of(body: bytes) -> str:
    """The text of a streamed chat."""
    events = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["delta"]["content"] for event in events)


def error_of(body: bytes) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(body)["error"]
    return told


async def flooded(front: Served) -> socket.socket:
    """A client that is sent more than it can take, and does not read yet."""
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, ("127.0.0.1", front.port))
    await loop.sock_sendall(slow, request(chat("flood word", stream=True)))
    return slow


async def test_a_client_that_leaves_stops_its_engine_at_once() -> None:
    async with served() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request(chat("endless a", stream=True)))
        await reader.readuntil(b"data: ")
        front.engine.left.clear()

        writer.transport.abort()

        async with asyncio.timeout(30):
            await front.engine.left.wait()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_operator_cancels_a_request_by_the_id_of_its_answer(stream: bool) -> None:
    async with served() as front:
        operator = await front.kit.bus.connect()
        word = "endless a" if stream else "silent"
        asked = request(chat(word, stream=stream), X_Request_Id="told")
        asking = asyncio.create_task(exchange(front, asked))
        await eventually(lambda: front.engine.running == 1)
        front.engine.left.clear()

        operator.publish("test._cancel", b"told")

        status, fields, body = await asking
        async with asyncio.timeout(30):
            await front.engine.left.wait()
    assert "x-request-id: told" in fields
    assert status == (200 if stream else 499)
    last = body.split(b"data: ")[-1].partition(b"\n")[0] if stream else body
    assert error_of(last)["message"] == "an operator cancelled the requests of this id"


async def test_a_client_that_leaves_before_the_first_token_stops_its_engine() -> None:
    async with served() as front:
        for stream in (True, False):
            _, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(request(chat("silent a", stream=stream)))
            await eventually(lambda: front.engine.running == 1)
            writer.transport.abort()
            await eventually(lambda: front.engine.running == 0)
        await eventually(lambda: front.front_end.shared.metrics.in_flight == 0)
        page = front.front_end.shared.metrics.page(1, {})

    assert 'status="499"} 2' in page


async def test_a_client_that_leaves_with_requests_behind_another_stops_all() -> None:
    long = "word " * 30_000
    async with served() as front:
        server: Any = front.front_end._server  # pyright: ignore[reportPrivateUsage]
        connections = server._server.server_state.connections
        for behind in [chat("silent")], [chat("silent")] * 30, [chat(long), chat("silent")]:
            _, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(request(chat("silent")))
            await eventually(lambda: front.engine.running == 1)
            [connection] = connections
            writer.write(b"".join(map(request, behind)))
            # Beyond some requests and bytes the server reads no further.
            await eventually(lambda: connection.pipeline)  # noqa: B023
            if behind != [chat("silent")]:
                await eventually(lambda: connection.flow.read_paused)  # noqa: B023

            writer.transport.abort()

            # Its answer would come after 60 s.
            await eventually(lambda: front.engine.running == 0, 30)
            await eventually(lambda: front.front_end.shared.metrics.in_flight == 0)
            await eventually(lambda: not connections)
        assert len(front.engine.requests) == 3


async def test_a_client_that_does_not_read_holds_up_its_own_stream_alone() -> None:
    async with served() as front:
        slow = await flooded(front)
        await eventually(lambda: front.front_end.shared.metrics.blocked > 0)
        status, _, body = await exchange(front, request(chat("say hi", stream=True)))
        still_running = front.engine.running
        slow.close()
        await eventually(lambda: front.engine.running == 0)

    assert status == 200
    assert text_of(body) == "hi"
    assert still_running == 1


async def test_a_client_that_reads_late_gets_everything() -> None:
    async with served() as front:
        reader, writer = await asyncio.open_connection(sock=await flooded(front), limit=1024)
        await eventually(lambda: front.front_end.shared.metrics.blocked > 0)
        count = 0
        async with asyncio.timeout(60):
            while b"[DONE]" not in (line := await reader.readline()):
                count += line.startswith(b"data: ")
        writer.close()

    assert count == 5_001


async def test_a_client_that_never_reads_is_dropped_in_the_end() -> None:
    async with served(write_timeout=0.3) as front:
        slow = await flooded(front)
        await eventually(lambda: front.engine.running == 1)
        await eventually(lambda: front.front_end.shared.metrics.in_flight == 0)
        await eventually(lambda: front.engine.running == 0)
        slow.close()


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"", 400, "the body is not JSON"),
        (b"{", 400, "the body is not JSON"),
        (b"\xff\xfe", 400, "the body is not JSON"),
        (b"[]", 400, "Expected `object`"),
        (b"null", 400, "Expected `object`"),
        (b'{"model": 3, "messages": []}', 400, "model: Expected `str`"),
        (b'{"model": "tiny"}', 400, "`messages`"),
        (b'{"x": ' + b"[" * 10_000, 400, "the body is not JSON"),
        (b'{"x": ' + b"[" * 100_000, 413, "more than 50000 objects, lists and strings"),
        (b'{"model": "none", "messages": [' + b"[]," * 1_000_000, 413, "more than 50000"),
        (b'{"model": "tiny", "messages": [' + b"{}," * 5_000 + b"{}]}", 400, "at most 4096"),
        (b'{"model": "tiny", "x": [' + b"1," * 600_000 + b"1]}", 413, "500000 items in lists"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, ""),
    ],
)
async def test_nonsense_is_answered_and_the_server_goes_on(
    body: bytes, status: int, part: str
) -> None:
    async with served() as front:
        told = await exchange(front, request(body))
        after = await exchange(front, request(chat("say hi")))

    assert told[0] == status
    assert part in error_of(told[2])["message"]
    assert error_of(told[2])["type"] == "invalid_request_error"
    assert after[0] == 200


async def test_a_prompt_of_mebibytes_is_counted_and_refused() -> None:
    async with served() as front:
        told = await exchange(front, request(chat('word, ["' * 400_000)))
        too_large = await exchange(front, request(b" " * 5 * 1024 * 1024))

    assert told[0] == 400
    assert "the context of tiny has 2000 tokens, and messages has" in error_of(told[2])["message"]
    assert error_of(told[2])["code"] == "context_length_exceeded"
    assert too_large[0] == 413
    assert "at most 4194304 are taken (--max-body)" in error_of(too_large[2])["message"]


async def test_bodies_and_headers_have_limits() -> None:
    async with served(max_body_bytes=1000, max_header_bytes=1000) as front:
        large = await exchange(front, request(chat("x" * 1000)))
        chunked = (
            b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        no_length = await exchange(front, chunked + b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"GET /health HTTP/1.1\r\nX: " + b"x" * 2000)
        refused = await reader.read()
        writer.close()

    assert [large[0], no_length[0]] == [413, 413]
    assert refused.startswith(b"HTTP/1.1 431 ")


async def test_bodies_and_headers_have_a_time_each() -> None:
    async with served(body_timeout=0.2) as front:
        late = await exchange(front, request(chat("x"))[:-5])
    async with served(header_timeout=0.2) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"GET /health HT")
        dropped = b""
        # By a reset where its time was over before any of it was read.
        async with asyncio.timeout(60):
            with suppress(ConnectionResetError):
                dropped = await reader.read()
        writer.close()

    assert late[0] == 408
    assert dropped == b""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Host: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 415),
        (b"Host: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 415),
        (b"Host: localhost\r\nContent-Encoding: identity\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"Host: localhost\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"Content-Length: 2\r\n\r\n{}", 400),
    ],
)
async def test_a_request_that_could_be_read_in_two_ways_is_refused(
    headers: bytes, status: int
) -> None:
    async with served() as front:
        told = await exchange(front, b"POST /v1/completions HTTP/1.1\r\n" + headers)

    assert told[0] == status
    if status == 415:
        assert "send it as it is" in error_of(told[2])["message"]
    elif b"identity" not in headers:
        assert "headers Host: send one" in error_of(told[2])["message"]


async def test_only_so_many_requests_run_at_a_time() -> None:
    async with served(max_requests=1) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request(chat("endless a", stream=True)))
        await reader.readuntil(b"data: ")
        status, headers, body = await exchange(front, request(chat("say hi")))
        writer.transport.abort()

    assert status == 429
    assert "retry-after: 1" in headers
    assert error_of(body)["type"] == "rate_limit_error"


async def test_a_path_or_a_method_that_is_not_there_is_said_so() -> None:
    async with served() as front:
        nowhere = await exchange(front, request({}, "/v1/nothing"))
        wrong = await exchange(front, b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n")
        posted = await exchange(front, request({}, "/health"))

    assert [nowhere[0], wrong[0], posted[0]] == [404, 405, 405]
    assert "allow: post" in wrong[1]


async def test_connections_are_kept_for_the_next_request() -> None:
    async with served() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        for _ in range(3):
            writer.write(request(chat("say hi", stream=True)))
            async with asyncio.timeout(60):
                await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


@pytest.mark.parametrize("piece", [10, 10_000])
async def test_a_client_that_offers_another_protocol_is_answered_in_this_one(piece: int) -> None:
    """As Java's client does with each request to a plain port."""
    asked = request(
        chat("one two three"),
        Connection="Upgrade, HTTP2-Settings",
        Upgrade="h2c",
        HTTP2_Settings="AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    )
    async with served() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        for _ in range(2):
            for begin in range(0, len(asked), piece):
                writer.write(asked[begin : begin + piece])
                await writer.drain()
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                body = json.loads(await reader.readexactly(int(length)))
            assert head.startswith(b"HTTP/1.1 200 ")
            assert body["choices"][0]["message"]["content"]
        writer.close()


async def test_the_trace_of_a_client_is_passed_on_and_returned() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with served() as front:
        _, headers, _ = await exchange(front, request(chat("say hi"), traceparent=parent))

    assert f"traceparent: {parent}" in headers


async def test_pages_tell_of_health_figures_and_the_interface() -> None:
    async with served() as front:
        await exchange(front, request(chat("say hi there", stream=True)))
        await eventually(lambda: front.front_end.shared.metrics.in_flight == 0)
        pages = {
            path: await exchange(front, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            for path in (
                "/health",
                "/ready",
                "/metrics",
                "/openapi.json",
                "/docs",
                "/",
                "/page/state",
            )
        }
        front.catalog.problem = "the models on the bus cannot be read: nats://secret is silent"
        front.catalog.change({})
        await eventually(lambda: not front.front_end.shared.models.names)
        unready = await exchange(front, b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        unknown = await exchange(front, request(chat("say hi", model="other")))

    assert (unready[0], json.loads(unready[2])["reason"]) == (
        503,
        "the models on the bus cannot be read",
    )
    assert unknown[0] == 503
    assert {page[0] for page in pages.values()} == {200}
    figures = pages["/metrics"][2].decode()
    assert 'dynbus_http_time_to_first_token_seconds_count{model="tiny"} 1' in figures
    assert 'dynbus_http_tokens_total{model="tiny",kind="cached"} 3' in figures
    assert "/v1/chat/completions" in json.loads(pages["/openapi.json"][2])["paths"]
    assert b"temperature" in pages["/docs"][2]
    assert b"<!doctype html>" in pages["/"][2].lower()
    assert "tiny" in str(json.loads(pages["/page/state"][2])["models"])
    assert "content-security-policy: default-src 'none'" in pages["/docs"][1]


async def test_with_keys_only_those_are_answered_who_have_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada secret-of-ada\nbob secret-of-bob\n")
    async with served(api_keys=keys) as front:
        body = chat("say hi", cache_salt="somebody else's")
        answers = [
            await exchange(front, request(body, Authorization="Bearer secret-of-ada")),
            await exchange(front, request(body, api_key="secret-of-bob")),
            await exchange(front, request(body)),
            await exchange(front, request(body, Authorization="Bearer wrong-secret")),
        ]
        text = chat("hello", model="text", cache_salt="somebody else's")
        await exchange(front, request(text, Authorization="Bearer secret-of-ada"))
        pages = [
            await exchange(front, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            for path in ("/metrics", "/openapi.json", "/docs", "/v1/models", "/", "/page/state")
            + ("/health", "/ready")
        ]
        salts = [one.cache_salt for one in front.engine.requests]
        tenants = [one.get("tenant") for one in front.engine.metadata]
        unsalted = chat("hello", model="text")
        await exchange(front, request(unsalted, Authorization="Bearer secret-of-bob"))
        passed = [one["cache_salt"] for one in front.text.requests]

    assert [status for status, _, _ in answers] == [200, 200, 401, 401]
    assert error_of(answers[2][2])["code"] == "invalid_api_key"
    assert "www-authenticate: bearer" in answers[2][1]
    assert salts == tenants == ["ada", "bob"]
    assert passed == ["ada", "bob"]
    assert [status for status, _, _ in pages] == [401] * 6 + [200] * 2
    assert "www-authenticate: basic" in pages[0][1]


async def test_without_keys_a_client_cannot_set_the_salt() -> None:
    async with served() as front:
        await exchange(front, request(chat("say hi", cache_salt="mine")))
        await exchange(front, request(chat("hello", model="text", cache_salt="mine")))

    assert front.engine.requests[0].cache_salt is None
    assert "cache_salt" not in front.text.requests[0]


async def test_pages_of_other_hosts_ask_when_they_are_allowed() -> None:
    preflight = (
        b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://a.example\r\n"
        b"Access-Control-Request-Method: POST\r\n\r\n"
    )
    async with served(cors_origins=["https://a.example"]) as front:
        allowed = await exchange(front, preflight)
        asked = await exchange(front, request(chat("say hi"), Origin="https://a.example"))
        other = await exchange(front, preflight.replace(b"a.example", b"b.example"))

    assert (allowed[0], other[0]) == (200, 400)
    assert "access-control-allow-origin: https://a.example" in allowed[1]
    assert "access-control-allow-origin: https://a.example" in asked[1]
    assert "access-control-allow-origin: https://b.example" not in other[1]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"Host": "127.0.0.1:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "my.localhost."}, 200),
        ({"Host": "chat.example"}, 200),
        # A name that somebody else has, and leads here.
        ({"Host": "rebound.example:8000"}, 403),
        ({"Host": "127.0.0.1.example"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:9000"}, 403),
        ({"Host": "localhost:8000", "Origin": "https://evil.example"}, 403),
        ({"Host": "localhost:8000", "Origin": "null"}, 403),
        ({"Host": "localhost", "Origin": "https://a.example"}, 200),
        # A proxy has another name, which the browser knows.
        (
            {"Host": "localhost", "Origin": "http://b.example", "Sec-Fetch-Site": "same-origin"},
            200,
        ),
        ({"Host": "localhost", "Origin": "http://localhost", "Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
async def test_pages_of_other_sites_have_no_browser_ask(
    fields: dict[str, str], status: int
) -> None:
    body = json.dumps(chat("say hi")).encode()
    given = {"Content-Type": "text/plain", "Content-Length": str(len(body)), **fields}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    asked = f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + body
    allowed: Any = {"cors_origins": ["https://a.example"], "allowed_hosts": ["Chat.example"]}
    async with served(**allowed) as front:
        told = await exchange(front, asked)

    assert told[0] == status
    if status == 403:
        assert error_of(told[2])["code"] == "foreign_site"


async def test_a_front_end_with_keys_has_any_name(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada secret-of-ada\n")
    asked = b"GET /v1/models HTTP/1.1\r\nHost: chat.example\r\nApi-Key: secret-of-ada\r\n\r\n"
    async with served(api_keys=keys) as front:
        told = await exchange(front, asked)

    assert told[0] == 200


async def test_a_file_of_keys_with_a_mistake_is_told_by_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "LOOK_INTERVAL", 0)
    path = tmp_path / "keys"
    path.write_text("ada secret-of-ada\n")
    ready = b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with served(api_keys=path) as front:
        before = await exchange(front, ready)
        path.write_text("ada secret-of-ada bob\n")
        broken = await exchange(front, ready)
        asked = await exchange(front, request(chat("say hi"), Authorization="Bearer secret-of-ada"))
        path.unlink()
        missing = await exchange(front, ready)
        path.write_text("ada secret-of-ada\n")
        mended = await exchange(front, ready)

    assert [one[0] for one in (before, broken, asked, missing, mended)] == [200] * 5
    warnings = [json.loads(one[2]).get("warning") for one in (before, broken, missing, mended)]
    assert warnings[0] is warnings[3] is None
    assert warnings[1] == warnings[2] == "keys cannot be read: those from before stay in force"
    assert str(tmp_path) not in broken[2].decode()


class OtherEngine(Actor, namespace="test"):
    """An engine of another version."""

    @handler
    async def generate(self, request: OtherRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Nothing."""
        yield {}

    @handler
    async def embed(self, request: OtherRequest) -> dict[str, Any]:
        """Nothing."""
        return {}


class OtherRequest(BaseModel):
    prompts_of_the_future: list[str]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_an_engine_that_takes_no_such_request_is_no_fault_of_its_client(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ["chat", "completions", "embedding"]
    other = card("other", "test.OtherEngine.generate", types=kinds)
    if path == "/v1/embeddings":
        other = card("other", "test.OtherEngine.embed", types=["embedding"])
    async with served() as front:
        await front.kit.start(OtherEngine)
        front.catalog.change({"other": other})
        await eventually(lambda: front.front_end.shared.models.names == ["other"])
        asked = chat("say hi", model="other", input="hi")
        status, _, told = await exchange(front, request(asked, path))

    assert status == 500
    assert error_of(told)["type"] == "server_error"
    assert error_of(told)["code"] == "EngineMismatch"
    assert "prompts_of_the_future" not in str(told)
    assert "prompts_of_the_future" in caplog.text


async def test_requests_that_run_have_their_grace_and_then_an_error() -> None:
    async with served(grace=1.0) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request(chat("endless a", stream=True)))
        await reader.readuntil(b"data: ")
        begun = time.monotonic()
        front.front_end.drain()
        async with asyncio.timeout(60):
            rest = await reader.read()
        took = time.monotonic() - begun
        await eventually(lambda: front.engine.running == 0)
        writer.close()

    assert took > 0.5
    assert b"event: error\ndata: " in rest
    assert b"the front end stops" in rest


async def test_a_request_whose_body_is_not_there_at_the_end_of_the_grace_is_told_so() -> None:
    async with served(grace=1.0) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request(chat("say hi"))[:-5])
        await eventually(lambda: front.front_end.shared.metrics.in_flight == 1)

        front.front_end.drain()

        async with asyncio.timeout(30):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()

    assert head.startswith(b"HTTP/1.1 503")
    assert b"connection: close" in head
    assert error_of(body)["code"] == "Draining"


async def test_the_log_of_an_actor_says_where_it_answers_and_of_a_program_its_output_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Front(Frontend, namespace="llm"):
        """A front end in a graph."""

    caplog.set_level(logging.INFO, "dynbus.llm.http.frontend")
    async with served() as front:
        of_a_program = list(caplog.messages)
        instance = await front.kit.start(Front, port=0)
        actor = instance.actor
        assert isinstance(actor, Front)
        url = actor.url

    assert of_a_program == []
    assert caplog.messages == [f"the front end answers at {url}"]


async def test_the_front_end_of_the_command_is_listed_and_ends_with_its_requests() -> None:
    async with served() as front:
        instance = await front.kit.start(Http, port=0, grace=1.0)
        actor = instance.actor
        assert isinstance(actor, Http)
        client = await front.kit.caller.endpoint("dynbus.http.address").client()
        await client.wait_for_instances(timeout=30)
        told = await client.generate()
        await instance.stop()

        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", int(actor.url.rpartition(":")[2]))

    assert told == actor.url


async def test_the_front_end_of_the_command_tells_its_last_warnings_to_those_who_ask() -> None:
    async with served() as front:
        await front.kit.start(Http, port=0, grace=1.0)
        client = await front.kit.caller.endpoint("dynbus.http.address").client()
        await client.wait_for_instances(timeout=30)
        logging.getLogger("dynbus.llm.http").warning("an engine is odd")
        answers: list[bytes] = []
        operator = await front.kit.bus.connect()
        operator.subscribe("_INBOX.op", lambda message: answers.append(message.data))
        await operator.barrier()

        operator.publish("$SRV.STATS.dynbus_http", b'{"log": 1}', reply="_INBOX.op")

        await eventually(lambda: bool(answers))
    (record,) = json.loads(answers[0])["log"]["records"]
    assert (record["level"], record["text"]) == ("WARNING", "an engine is odd")


async def test_the_front_end_of_the_command_answers_where_it_may_not_be_listed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionDenied("not with these credentials", started=False)

    monkeypatch.setattr(Runtime, "serve_endpoints", refuse)
    caplog.set_level(logging.INFO, "dynbus.llm.http.frontend")
    async with served() as front:
        instance = await front.kit.start(Http, port=0, grace=1.0)
        actor = instance.actor
        assert isinstance(actor, Http)
        await eventually(lambda: bool(caplog.messages))
        _, writer = await asyncio.open_connection("127.0.0.1", int(actor.url.rpartition(":")[2]))
        writer.close()

    assert caplog.messages == [
        "`dynbus ps` does not list this front end: not with these credentials"
    ]


async def test_logs_say_how_a_request_went_and_never_what_it_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with served() as front:
        await exchange(front, request(chat("say confidential", user="a-person@home", stream=True)))
        await exchange(front, request(b'{"model": "tiny", "messages": "confidential"}'))
        await eventually(lambda: front.front_end.shared.metrics.in_flight == 0)

    lines = [one.getMessage() for one in caplog.records if "/v1/chat" in one.getMessage()]
    assert any("200" in line and "first_token_ms=" in line for line in lines)
    assert "confidential" not in caplog.text
    assert "a-person" not in caplog.text


async def test_logs_have_what_is_known_of_a_request_as_fields_its_tenant_too(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    keys = tmp_path / "keys"
    keys.write_text("acme key-of-acme\n")
    async with served(api_keys=keys) as front:
        asked_with = {"Authorization": "Bearer key-of-acme", "X-Request-Id": "one"}
        await exchange(front, request(chat("say hi"), **asked_with))
        await eventually(lambda: front.front_end.shared.metrics.in_flight == 0)

    (record,) = [one for one in caplog.records if "/v1/chat" in one.getMessage()]
    fields = vars(record)
    asked = [fields[name] for name in ("method", "path", "status", "request_id", "tenant", "model")]
    assert asked == ["POST", "/v1/chat/completions", 200, "one", "acme", "tiny"]
    assert fields["completion_tokens"] > 0
    assert fields["end_ms"] >= fields["sent_ms"] > 0
    for name in ("request_id", "tenant", "completion_tokens", "end_ms"):
        assert f"{name}={fields[name]}" in record.getMessage()


async def test_a_conversation_that_a_good_template_fails_with_is_refused() -> None:
    template = CHATML + "{{ 'x' * messages[0].get('n', 0) }}"
    async with served(template=template) as front:
        odd = {"role": "user", "content": "say hi", "n": "many"}
        refused = await exchange(front, request(chat("", messages=[odd])))
        answered = await exchange(front, request(chat("say hi")))

    assert refused[0] == 400
    assert "fails with them: TypeError" in error_of(refused[2])["message"]
    assert error_of(refused[2])["param"] == "messages"
    assert answered[0] == 200


async def test_a_request_that_is_refused_leaves_nothing_to_be_collected() -> None:
    many: dict[str, Any] = {str(number): {"": []} for number in range(12_000)}
    function = {"name": "f", "parameters": {"type": "object", "properties": many}}
    tools = [{"type": "function", "function": function}]
    asked = request(chat("hi", tools=tools, tool_choice="required"))
    async with served() as front:
        await exchange(front, asked)
        gc.collect()
        gc.disable()
        try:
            status, _, _ = await exchange(front, asked)
            await eventually(lambda: not front.front_end.shared.metrics.in_flight)
            await asyncio.sleep(0)
            left = gc.collect()
        finally:
            gc.enable()

    assert status == 400
    assert left < 1000


async def test_a_stream_that_runs_keeps_nothing_of_the_body_of_its_request() -> None:
    asked = request(chat("endless a", stream=True, unknown="y" * 2 * 1024 * 1024))
    async with served() as front:
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            clients = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(5)]
            for reader, writer in clients:
                writer.write(asked)
                await writer.drain()
                await reader.readuntil(b"data: ")

            def held() -> int:
                return tracemalloc.get_traced_memory()[0] - before

            await eventually(lambda: held() < 2 * 1024 * 1024)
        finally:
            tracemalloc.stop()
        for _, writer in clients:
            writer.transport.abort()


async def test_a_template_that_fails_fails_its_requests_alone() -> None:
    async with served(template="{{ 1 / 0 }}") as front:
        failed = await exchange(front, request(chat("say hi")))
        completion = {"model": "tiny", "prompt": "say hi"}
        other = await exchange(front, request(completion, "/v1/completions"))

    assert failed[0] == 500
    assert "chat template of the model tiny does not work" in error_of(failed[2])["message"]
    assert other[0] == 200


async def test_tls_is_spoken_with_a_certificate_to_clients_that_have_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("front", "127.0.0.1")
    own = authority.sign("client", "web", client=True)
    known, stranger = (ssl.create_default_context(cafile=authority.ca) for _ in range(2))
    known.load_cert_chain(own.cert, own.key)
    files: dict[str, Any] = {"tls_cert": Path(pair.cert), "tls_key": Path(pair.key)}

    async with served(**files, tls_client_ca=Path(authority.ca)) as front:
        assert front.url.startswith("https://")
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port, ssl=known)
        writer.write(request(chat("say hi", stream=True)))
        async with asyncio.timeout(60):
            body = await reader.readuntil(b"[DONE]")
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port, ssl=stranger)
        writer.write(request(chat("say hi")))
        refused = b""
        # The alert of the server, or no more than its end.
        with suppress(OSError):
            refused = await reader.read()
        writer.close()

    assert text_of(body) == "hi"
    assert refused == b""


async def test_a_port_that_is_taken_says_what_to_give() -> None:
    said = pytest.raises(ConfigError, match=r"--Front\.port=8001.*, or port 0")
    with socket.create_server(("127.0.0.1", 0)) as taken, said:
        async with served(port=taken.getsockname()[1]):
            pass
