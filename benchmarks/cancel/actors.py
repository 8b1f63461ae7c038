"""What is cancelled, and what keeps its instance busy."""

from __future__ import annotations

import asyncio
from time import monotonic

from dynbus import Actor, context, handler


class Held(Actor, namespace="bench"):
    """Calls that only a cancel ends, beside others that are answered at once."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended: dict[str, float] = {}

    @handler(concurrency=None, timeout=None)
    async def hold(self) -> str:
        """Wait to be cancelled."""
        self.begun += 1
        try:
            await asyncio.sleep(3600)
        finally:
            self.ended[context().id] = monotonic()
        return "nobody cancelled it"

    @handler(concurrency=None)
    async def echo(self, text: str) -> str:
        """The text."""
        return text

    @handler
    async def count(self) -> int:
        """How many calls were held so far."""
        return self.begun

    @handler
    async def journal(self) -> dict[str, float]:
        """When each ended, on the clock that all processes of a machine share."""
        return self.ended
