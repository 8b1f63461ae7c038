"""A client of the front end that costs next to nothing: it finds events in bytes, and parses none.

It is one process with a connection for each stream. Where the cost of a client does not matter,
`guidellm` asks instead.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

from .model import NAME

_EVENT = b"data: {"
_END = b"data: [DONE]"
_ERROR = b"event: error"


def chat(prompt: str, max_tokens: int, system: str = "", *, key: str = "") -> bytes:
    """A request for a streamed answer, with its head."""
    messages = [{"role": "system", "content": system}] if system else []
    return conversation([*messages, {"role": "user", "content": prompt}], max_tokens, key)


def conversation(messages: Sequence[Mapping[str, str]], max_tokens: int, key: str = "") -> bytes:
    """The same for a conversation."""
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    body = json.dumps(
        {
            "model": NAME,
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/json\r\n"
        f"{authorization}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Failed(RuntimeError):
    """The front end answered with an error."""


class Connection(asyncio.Protocol):
    """One connection, on which a stream at a time is read.

    Attributes:
        events: when each event of the stream came, by `perf_counter`; the last is the usage.
        spaces: that came so far, in all answers of the connection.
        sent: when its request was sent.
    """

    def __init__(self) -> None:
        self.events: list[float] = []
        self.spaces = 0
        self.sent = 0.0
        self._rest = b""
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def begin(self, request: bytes) -> None:
        """Send a request."""
        self.events = []
        self._rest = b""
        self._done = asyncio.get_running_loop().create_future()
        self.sent = perf_counter()
        self.transport.write(request)

    async def ended(self) -> None:
        """Wait for the end of the stream.

        Raises:
            Failed: it is an error.
        """
        assert self._done is not None
        await self._done

    def leave(self) -> None:
        """Close the connection at once, also in the middle of a stream."""
        if self._done is not None:
            self._done.cancel()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.spaces += data.count(b" ")
        data = self._rest + data
        count = data.count(_EVENT)
        if count:
            now = perf_counter()
            self.events += [now] * count
        # A marker may be cut by the end of the piece; one that was counted is not kept whole.
        self._rest = data[max(data.rfind(_EVENT) + 1, len(data) - 1024) :]
        if self._done is not None and not self._done.done():
            if _END in data:
                self._done.set_result(None)
            elif _ERROR in data or data.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
                self._done.set_exception(Failed(data[-2000:].decode(errors="replace")))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(Failed(f"the connection was closed: {exc}"))

    @property
    def tokens(self) -> int:
        """The tokens that came so far, and what is constant within a stream.

        A token of the model has a space before it, and so has the content of an event; there are
        no others after the head. A server that is behind may send several tokens in one event.
        """
        return self.spaces - len(self.events)

    def usage(self, name: str) -> int:
        """A number of the usage at the end of the stream; 0 where there is none."""
        at = self._rest.rfind(b'"%b":' % name.encode())
        found = re.match(rb'"\w+":(\d+)', self._rest[at:]) if at >= 0 else None
        return int(found[1]) if found is not None else 0


async def connect(url: str, count: int) -> list[Connection]:
    """Connections to a front end."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    loop = asyncio.get_running_loop()
    opened: list[Connection] = []
    for first in range(0, count, 64):
        made = await asyncio.gather(
            *(loop.create_connection(Connection, host, port) for _ in range(min(64, count - first)))
        )
        opened += [connection for _, connection in made]
    return opened


def close(connections: Sequence[Connection]) -> None:
    """Close connections at once."""
    for connection in connections:
        connection.leave()


def summary(connection: Connection) -> dict[str, Any]:
    """Time to first token, and the gaps between tokens, of a stream that has ended; in seconds."""
    tokens = connection.events[:-1]
    return {
        "ttft": tokens[0] - connection.sent,
        "gaps": [after - before for before, after in zip(tokens, tokens[1:], strict=False)],
        "prompt": connection.usage("prompt_tokens"),
        "cached": connection.usage("cached_tokens"),
    }
