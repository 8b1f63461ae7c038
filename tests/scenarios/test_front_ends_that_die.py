"""Front ends die or freeze in the middle of streams, which their clients go on with at another."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import pytest
from tests.conditions import PATIENCE, eventually

from dynbus.bus.nats.server_process import RunningServer, free_port

from .project import ENGINE, Folder
from .test_serving_faults import get, unchunked

pytestmark = pytest.mark.anyio

TOKENS: Final = 60


CHAT: Final = {
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}


def asking(
    name: str,
    path: str = "/v1/chat/completions",
    model: str = "mock",
    fields: Mapping[str, Any] = CHAT,
) -> bytes:
    """A request for a stream that is always the same."""
    body = json.dumps({"model": model, "stream": True, **fields}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Dynbus-Resumable: 1\r\nX-Request-Id: {name}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def going_on(name: str, after: int) -> bytes:
    return (
        f"GET /v1/streams/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Last-Event-ID: {name}.{after}\r\n\r\n"
    ).encode()


async def read(port: int, data: bytes, until: Callable[[bytes], bool] = lambda _: False) -> bytes:
    """What is answered, to its end or so far; to where it was cut off."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        async with asyncio.timeout(PATIENCE):
            writer.write(data)
            while not until(received) and (piece := await reader.read(65536)):
                received += piece
    except ConnectionResetError:
        # The server was killed, before it had read or sent all.
        pass
    finally:
        writer.transport.abort()
    return received


def has_events(count: int, received: bytes) -> bool:
    return received.count(b"\nid: ") > count


def events_of(received: bytes) -> list[str]:
    """The whole events of an answer, which may have been cut off."""
    _, _, body = received.partition(b"\r\n\r\n")
    if not body.endswith(b"0\r\n\r\n"):
        # Each event was a chunk of its own, or several were one.
        body = body[: body.rindex(b"\n\n\r\n") + 4] + b"0\r\n\r\n"
    text = unchunked(body).decode()
    lines = [line for line in text.split("\n") if not line.startswith(":")]
    return [event for event in "\n".join(lines).split("\n\n") if event]


def contents(events: list[str]) -> list[Any]:
    """What events say, without what differs from request to request."""
    told: list[Any] = []
    for event in events:
        data = event.rpartition("data: ")[2]
        if data == "[DONE]":
            told.append(data)
            continue
        chunk: dict[str, Any] = json.loads(data)
        usage: dict[str, int] = chunk.get("usage") or {}
        told.append((chunk["choices"], usage.get("completion_tokens")))
    return told


async def serves(port: int) -> bool:
    return b'"mock"' in await asyncio.to_thread(get, port, "/v1/models")


async def test_ps_lists_a_front_end_and_where_it_answers(
    folder: Folder, own_server: RunningServer
) -> None:
    folder.url = own_server.url
    port = free_port()
    folder.start_front_end(port)

    listed: list[dict[str, Any]] = []

    async def is_listed() -> bool:
        told = await asyncio.to_thread(folder.dynbus, "ps", "--namespace", "dynbus", "--json")
        listed[:] = json.loads(told.stdout)
        # It answers before it is announced.
        return bool(listed) and listed[0]["state"] != "unlisted"

    await eventually(is_listed, what="it is listed")

    [row] = listed
    assert (row["component"], row["state"]) == ("http", "serving")
    assert row["metadata"]["url"] == f"http://127.0.0.1:{port}"


@pytest.mark.timeout(300)
async def test_a_front_end_that_dies_or_freezes_costs_its_clients_a_reconnect_and_no_token(
    folder: Folder, own_server: RunningServer
) -> None:
    folder.url = own_server.url
    (folder.path / "stack.py").write_text(ENGINE)
    first, second = free_port(), free_port()
    # A stream takes seconds, so that it is not over before its front end is.
    slowly = ("--Engine.engine=mock", "--Engine.speedup_ratio=0.2")
    folder.start("stack.py", *slowly, "--log-level=warning")
    fronts = [folder.start_front_end(port) for port in (first, second)]
    for port in (first, second):
        await eventually(partial(serves, port), what=f"models at port {port}")
    whole = contents(events_of(await read(second, asking("whole"))))
    assert whole[-1] == "[DONE]"

    for name, fate in (("frozen", signal.SIGSTOP), ("killed", signal.SIGKILL)):
        before = events_of(await read(first, asking(name), partial(has_events, 10)))
        fronts[0].send_signal(fate)
        after = events_of(await read(second, going_on(name, len(before))))

        numbers = [event.partition("\n")[0] for event in before + after]
        assert numbers == [f"id: {name}.{number}" for number in range(1, len(whole) + 1)]
        assert contents(before + after) == whole
        again = events_of(await read(second, going_on(name, 1)))
        assert again == [*before, *after][1:]

        # What wakes tells nothing of its own: the log is as it was.
        fronts[0].send_signal(signal.SIGCONT)
        if fate == signal.SIGSTOP:
            await eventually(partial(serves, first), what="it is awake")
            assert events_of(await read(first, going_on(name, 0))) == [*before, *after]
    figures = get(second, "/metrics")
    assert b'event="taken_over"} 2' in figures
    # What its router knows is among them, without any set-up.
    assert b"\ndynbus_kv_cache_aware{" in figures
