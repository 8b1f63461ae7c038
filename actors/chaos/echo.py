"""The graph that `dynbus lab chaos` serves when it is given none: its items are known before."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import msgspec

from dynbus.actors.declaring.handlers import handler
from dynbus.actors.runtime import Actor

NAMESPACE: Final = "dynbus-chaos"
MOVES: Final = 100
"""The number of times that a stream may move: chaos hits the same one again and again."""


class EchoRequest(msgspec.Struct, frozen=True):
    """The request to an echo.

    Attributes:
        items: of the whole stream.
        pause: seconds before each item.
        start: the first item that is wanted.
    """

    prompt: str
    items: int
    pause: float
    start: int = 0


def token(prompt: str, index: int) -> str:
    """The item with that index, wherever it is computed."""
    return hashlib.blake2b(f"{prompt} {index}".encode(), digest_size=8).hexdigest()


class Echo(Actor, namespace=NAMESPACE, component="Echo"):
    """Answers what a model would: items that depend on the prompt and their index alone."""

    @handler(resume="replay", migration_limit=MOVES)
    async def replayed(self, request: EchoRequest) -> AsyncGenerator[str, None]:
        """A stream that begins again elsewhere, where the items that were accepted are passed."""
        for index in range(request.start, request.items):
            await asyncio.sleep(request.pause)
            yield token(request.prompt, index)

    @handler(resume="go_on", migration_limit=MOVES)
    async def resumed(self, request: EchoRequest) -> AsyncGenerator[str, None]:
        """A stream that goes on elsewhere with the item after those that were accepted."""
        for index in range(request.start, request.items):
            await asyncio.sleep(request.pause)
            yield token(request.prompt, index)

    @handler(idempotent=True)
    async def once(self, request: EchoRequest) -> str:
        """A call that may be repeated."""
        await asyncio.sleep(request.pause)
        return token(request.prompt, 0)

    @staticmethod
    def go_on(request: EchoRequest, items: Sequence[str]) -> EchoRequest | None:
        """The request for what is left; None when nothing is."""
        start = request.start + len(items)
        return msgspec.structs.replace(request, start=start) if start < request.items else None
