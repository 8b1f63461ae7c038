"""What a request leaves: nothing that only a garbage collection finds."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator
from typing import Any, Final

import httpx2
import pytest
from tests.conditions import PATIENCE, eventually

from .served import served
from .test_connection_limits import connections_of

pytestmark = pytest.mark.anyio

SAID: Final = [{"role": "user", "content": "the quick brown fox"}]
REQUESTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", {"model": "tiny", "messages": SAID}),
    "stream": ("/v1/chat/completions", {"model": "tiny", "messages": SAID, "stream": True}),
    "text engine": ("/v1/chat/completions", {"model": "text", "messages": SAID, "stream": True}),
    "responses": ("/v1/responses", {"model": "tiny", "input": "the quick", "stream": True}),
    "refused": ("/v1/chat/completions", {"model": "tiny", "messages": SAID, "top_p": 7}),
    "unknown": ("/v1/chat/completions", {"model": "none", "messages": SAID}),
}
OF_REQUESTS: Final = ("dynbus.llm", "dynbus.actors.calling", "dynbus.bus.calling", "uvicorn")


@pytest.fixture
def uncollected() -> Generator[list[object]]:
    """What collections find from here on, which run when the test has them run."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_requests_leave_nothing_that_only_a_collection_finds(
    uncollected: list[object],
) -> None:
    left: dict[str, Counter[str]] = {}
    async with served() as front:

        async def ask(path: str, body: dict[str, Any]) -> None:
            async with httpx2.AsyncClient(timeout=PATIENCE) as client:
                await client.post(front.url + path, json=body)
            await eventually(lambda: not connections_of(front))

        for name, (path, body) in REQUESTS.items():
            # The first one makes what stays.
            await ask(path, body)
            gc.collect()
            uncollected.clear()
            await ask(path, body)
            gc.collect()
            kinds = [f"{type(one).__module__}.{type(one).__qualname__}" for one in uncollected]
            left[name] = Counter(kind for kind in kinds if kind.startswith(OF_REQUESTS))

    assert left == {name: Counter() for name in REQUESTS}
