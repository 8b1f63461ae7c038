"""What leaves over one connection: joined per turn of the loop, early when there is much."""

from __future__ import annotations

import asyncio
from typing import Final

from .session import NatsSession

EARLY_WRITE_BYTES: Final = 8192


class NatsOutput:
    """Collects what is written in one turn of the loop and hands it to the session at once.

    Attributes:
        session: the latest session; what is written before the first one waits.
    """

    __slots__ = ("_chunks", "_flush_scheduled", "_loop", "_size", "session")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._chunks: list[bytes] = []
        self._size = 0
        self._flush_scheduled = False
        self.session: NatsSession | None = None

    def __repr__(self) -> str:
        return f"<NatsOutput [{self.backlog} bytes]>"

    @property
    def backlog(self) -> int:
        """Bytes that the operating system has not taken yet."""
        session = self.session
        return self._size + (session.write_buffer_size if session is not None else 0)

    def write(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if self._size >= EARLY_WRITE_BYTES:
            self._write_out()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand over what waits, now."""
        self._flush_scheduled = False
        self._write_out()

    def clear(self) -> None:
        """Forget what waits: its session is over."""
        self._chunks.clear()
        self._size = 0

    def _write_out(self) -> None:
        if self._chunks and self.session is not None:
            data = b"".join(self._chunks)
            self.clear()
            self.session.write_now(data)
