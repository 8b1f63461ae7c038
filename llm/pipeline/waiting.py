"""Chunks of an answer that wait for their reader."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import anyio

from dynbus import DynbusError

from .serving import Completion

MOST_WAITING: Final = 64
"""Chunks that wait for their reader before the engine is held up."""


class WaitingChunks:
    """Chunks that have come, until somebody takes them: the sink of a completion."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._news = anyio.Event()
        self._has_ended = False
        self._error: DynbusError | None = None

    def write(self, chunks: Sequence[bytes]) -> bool:
        """Take chunks."""
        self._chunks += chunks
        self._news.set()
        return len(self._chunks) < MOST_WAITING

    def end(self, error: DynbusError | None) -> None:
        """There is no more."""
        self._has_ended = True
        self._error = error
        self._news.set()

    async def take(self, completion: Completion) -> bytes | None:
        """The next chunk; None after the last one.

        Args:
            completion: whose sink it is, which may send more.

        Raises:
            DynbusError: how they ended, when not well.
        """
        while not self._chunks:
            if self._has_ended:
                if self._error is not None:
                    raise self._error
                return None
            completion.resume()
            self._news = anyio.Event()
            await self._news.wait()
        return self._chunks.popleft()
