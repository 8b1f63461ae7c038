"""The actor of these stories: its streams and calls write down, on its host, what they began."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence

import msgspec

from dynbus import Actor, handler


class Count(msgspec.Struct, frozen=True):
    """The numbers to count, with so many seconds before each.

    Attributes:
        tag: of the call, as the journals of effects have it.
    """

    tag: str
    items: int
    pause: float
    start: int = 0


class Counter(Actor, namespace="hosts"):
    """Counts.

    Args:
        effects: the file that gets a line for everything that is begun and may not be repeated.
    """

    def __init__(self, effects: str) -> None:
        self._effects = os.open(effects, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def on_stop(self) -> None:
        os.close(self._effects)

    def _take_effect(self, tag: str) -> None:
        os.write(self._effects, f"{tag} {self.instance_id}\n".encode())

    @handler(resume="rest")
    async def resumed(self, request: Count) -> AsyncGenerator[int, None]:
        """A stream that goes on elsewhere."""
        async for number in _numbers(request):
            yield number

    @staticmethod
    def rest(request: Count, items: Sequence[int]) -> Count | None:
        start = request.start + len(items)
        return msgspec.structs.replace(request, start=start) if start < request.items else None

    @handler(resume="replay")
    async def replayed(self, request: Count) -> AsyncGenerator[int, None]:
        """A stream that begins anew elsewhere."""
        async for number in _numbers(request):
            yield number

    @handler
    async def plain(self, request: Count) -> AsyncGenerator[int, None]:
        """A stream that goes on nowhere else."""
        self._take_effect(request.tag)
        async for number in _numbers(request):
            yield number

    @handler(idempotent=True)
    async def repeatable(self, request: Count) -> int:
        """A call that may be carried out twice."""
        await asyncio.sleep(request.pause)
        return request.items

    @handler
    async def once(self, request: Count) -> int:
        """A call that may not."""
        self._take_effect(request.tag)
        await asyncio.sleep(request.pause)
        return request.items


async def _numbers(request: Count) -> AsyncGenerator[int, None]:
    for number in range(request.start, request.items):
        await asyncio.sleep(request.pause)
        yield number
