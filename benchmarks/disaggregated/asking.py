"""Requests, and when their tokens came."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from time import perf_counter
from typing import NamedTuple

import anyio

from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.worker import ModelWorker

TOKEN_IDS = range(20, 40_000)
STREAM_PROMPT = 32
STREAM_TOKENS = 1500
WARM_TOKENS = 5
"""Of each stream, before its times count."""


class Answer(NamedTuple):
    """When a request was sent, and when each of its tokens came; seconds."""

    sent: float
    tokens: list[float]

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.sent

    @property
    def second(self) -> float:
        """Seconds from the first token to the second."""
        return self.tokens[1] - self.tokens[0]


def prompt(random: Random, length: int) -> list[int]:
    """Token ids that no cache has."""
    return [random.choice(TOKEN_IDS) for _ in range(length)]


async def ask(engine: ModelWorker, tokens: list[int], count: int) -> Answer:
    """Send one request, and read its answer to the end."""
    request = GenerateRequest(tokens, count, sampling=Sampling(temperature=0), ignore_eos=True)
    answer = Answer(perf_counter(), [])
    async for item in engine.generate(request):
        answer.tokens.extend([perf_counter()] * len(item.token_ids))
    return answer


async def decode_meanwhile(
    engine: ModelWorker, streams: int, random: Random, meanwhile: Callable[[], Awaitable[None]]
) -> list[float]:
    """Seconds between tokens of streams that run while something else does."""
    found: list[float] = []
    warm = [anyio.Event() for _ in range(streams)]
    is_counted = False

    async def decode(is_warm: anyio.Event) -> None:
        while True:
            tokens = prompt(random, STREAM_PROMPT)
            request = GenerateRequest(
                tokens, STREAM_TOKENS, sampling=Sampling(temperature=0), ignore_eos=True
            )
            times: list[float] = []
            async for item in engine.generate(request):
                times += [perf_counter()] * len(item.token_ids)
                if is_counted and len(times) > len(item.token_ids):
                    found.append(times[-1] - times[-1 - len(item.token_ids)])
                if len(times) > WARM_TOKENS:
                    is_warm.set()

    async with anyio.create_task_group() as group:
        for event in warm:
            group.start_soon(decode, event)
        for event in warm:
            await event.wait()
        is_counted = True
        await meanwhile()
        group.cancel_scope.cancel()
    return found
