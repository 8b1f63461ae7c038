"""A server of OpenAI's API on a real socket, which does as the text of its requests says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httptools

from dynbus.llm.proxy.server import PROBE_ID


class Asked:
    """A request that came.

    Attributes:
        is_left: set when its client has gone before the answer was whole.
    """

    def __init__(
        self, reader: asyncio.StreamReader, path: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        self.reader = reader
        self.path = path
        self.headers = headers
        self.body: Any = json.loads(body) if body else None
        self.is_left = asyncio.Event()


class ScriptedServer:
    """Answers chats and completions by the first word of their text; see `_answer`.

    Attributes:
        models: what it serves, as `GET /v1/models` lists it.
        health: the status of `GET /health`.
        metrics: the text of `GET /metrics`; None for no such route.
        tokenizes: whether it has `POST /tokenize`, whose tokens are the bytes of a text.
        takes: the types of parts that it takes beside text, each of which is three tokens 7.
        is_full: whether it refuses all parts beside text for now.
        key: what it wants as a key; empty for none.
        hangs: whether it answers no request for completions any longer, and all others.
        asked: the requests for completions that came, but for probes.
        probes: how many of these came, but for those with images or sounds.
        connections: how many were made.
    """

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [
            {"id": "served", "object": "model", "max_model_len": 2000}
        ]
        self.health = 200
        self.metrics: str | None = None
        self.tokenizes = False
        self.takes: set[str] = set()
        self.is_full = False
        self.key = ""
        self.hangs = False
        self.asked: list[Asked] = []
        self.probes = 0
        self.connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, at the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Go away in the middle of everything."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._server is not None
        if not self._server.is_serving():
            # It was accepted just before the server went away.
            writer.transport.abort()
            return
        self._writers.add(writer)
        self.connections += 1
        try:
            while (asked := await _read(reader)) is not None and await self._answer(asked, writer):
                pass
        except (OSError, asyncio.CancelledError):
            # The latter at the end of the loop.
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        """Answer a request; whether another may follow on its connection."""
        path = asked.path
        if self.key and asked.headers.get("authorization") != f"Bearer {self.key}":
            return await _whole(writer, 401, {"error": {"message": "the key is wrong"}})
        if path == "/health":
            return await _whole(writer, self.health, None)
        if path == "/v1/models":
            return await _whole(writer, 200, {"object": "list", "data": self.models})
        if path == "/metrics" and self.metrics is not None:
            return await _whole(writer, 200, self.metrics)
        if path == "/tokenize" and self.tokenizes:
            tokens: list[int] = []
            for message in asked.body.get("messages") or [{"content": asked.body["prompt"]}]:
                for part in _parts(message["content"]):
                    if part["type"] not in {"text", *self.takes}:
                        return await _whole(writer, 400, {"error": {"message": "no such part"}})
                    is_text = part["type"] == "text"
                    tokens += list(json.dumps(part["text"]).encode()) if is_text else [7, 7, 7]
            return await _whole(writer, 200, {"tokens": tokens})
            told = json.dumps(asked.body.get("messages") or asked.body["prompt"])
            return await _whole(writer, 200, {"tokens": list(told.encode())})
        if path in ("/v1/embeddings", "/v1/score", "/v1/rerank"):
            self.asked.append(asked)
            return await _whole(writer, 200, {"path": path, "usage": {"prompt_tokens": 5}})
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return await _whole(writer, 404, {"detail": "Not Found"})
        body = asked.body
        is_chat = "messages" in body
        parts = _parts(body["messages"][-1]["content"] if is_chat else body["prompt"])
        if asked.headers.get("x-request-id") != PROBE_ID:
            self.asked.append(asked)
        elif all(part["type"] == "text" for part in parts):
            self.probes += 1
        if self.hangs:
            await _until_left(asked)
            return False
        if self.is_full and any(part["type"] != "text" for part in parts):
            return await _whole(writer, 429, {"error": {"message": "full"}})
        if any(part["type"] not in {"text", *self.takes} for part in parts):
            return await _whole(writer, 400, {"error": {"message": "no such part"}})
        text = "".join(part.get("text", "") for part in parts)
        word, _, rest = text.partition(" ")
        if word == "status":
            number, _, told = rest.partition(" ")
            return await _whole(writer, int(number), json.loads(told), {"Retry-After": "7"})
        if word == "drop":
            writer.transport.abort()
            return False
        if not body.get("stream"):
            if word == "silent":
                await _until_left(asked)
                return False
            return await _whole(writer, 200, _whole_answer(is_chat, rest))
        return await self._stream(asked, writer, is_chat, word, rest)

    async def _stream(
        self, asked: Asked, writer: asyncio.StreamWriter, is_chat: bool, word: str, rest: str
    ) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        words = rest.split(" ")
        if word == "cut":
            # A read ends where it likes.
            data = (
                b"".join(_event(_chunk(is_chat, one, None)) for one in words)
                + _event(_chunk(is_chat, "", "stop"))
                + b": a comment\n\ndata: [DONE]\r\n\r\n"
            )
            for at in range(0, len(data), 7):
                _write_piece(writer, data[at : at + 7])
                await writer.drain()
                await asyncio.sleep(0)
        elif word in ("endless", "die", "silent"):
            if word != "silent":
                _write_piece(writer, _event(_chunk(is_chat, "once", None)))
                await writer.drain()
            if word == "die":
                writer.transport.abort()
            else:
                await _until_left(asked)
            return False
        else:
            for one in words:
                _write_piece(writer, _event(_chunk(is_chat, one, None)))
            if word == "fails":
                _write_piece(writer, _event({"error": {"message": "it went wrong", "code": 400}}))
            elif word != "unfinished":
                _write_piece(writer, _event(_chunk(is_chat, "", "stop")))
            if word not in ("undone", "unfinished"):
                _write_piece(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


async def _until_left(asked: Asked) -> None:
    try:
        await asked.reader.read(1)
    finally:
        asked.is_left.set()


class _Reading:
    """What a parser finds of a request."""

    def __init__(self) -> None:
        self.path = ""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        self.path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    reading = _Reading()
    parser: Any = httptools.HttpRequestParser(reading)
    while not reading.is_complete:
        data = await reader.read(65536)
        if not data:
            return None
        parser.feed_data(data)
    return Asked(reader, reading.path, reading.headers, reading.body)


async def _whole(
    writer: asyncio.StreamWriter, status: int, body: Any, headers: Mapping[str, str] | None = None
) -> bool:
    is_text = isinstance(body, str)
    data = body.encode() if is_text else b"" if body is None else json.dumps(body).encode()
    lines = [
        f"HTTP/1.1 {status} OK",
        f"Content-Type: {'text/plain' if is_text else 'application/json'}",
        f"Content-Length: {len(data)}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    await writer.drain()
    return True


def _chunk(is_chat: bool, text: str, reason: str | None) -> dict[str, Any]:
    said: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
    return {
        "id": "cmpl-1",
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": 1,
        "model": "served",
        "choices": [{"index": 0, **said, "finish_reason": reason}],
    }


def _whole_answer(is_chat: bool, text: str) -> dict[str, Any]:
    said: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    )
    return {
        "id": "cmpl-1",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 1,
        "model": "served",
        "choices": [{"index": 0, **said, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _write_piece(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@asynccontextmanager
async def scripted_server() -> AsyncGenerator[ScriptedServer]:
    """One that listens, until it is left."""
    server = ScriptedServer()
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
