"""A model of tokens that is asked on a real server: templates, routing by its cache, streams."""

from __future__ import annotations

import pytest

from dynbus import Runtime
from dynbus.llm import Model, ModelWorker
from dynbus.testing import RunningServer

pytestmark = pytest.mark.anyio

QUESTION = "Tell me of the sea, in as few words as you can, and then of the sky above it. " * 4


class Engine(ModelWorker, namespace="asked"):
    """A mock with the text of a model."""


async def test_a_conversation_goes_to_the_engine_that_has_it_in_its_cache(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url) as one,
        Runtime.connect(own_server.url) as other,
        Runtime.connect(own_server.url) as caller,
    ):
        await one.start(Engine, engine="mock")
        await other.start(Engine, engine="mock")
        model = Model("mock", wait=30.0).client(caller)
        first = await model.chat(QUESTION, max_tokens=8)
        cached: list[int] = []
        for _ in range(4):
            async with model.stream(QUESTION, max_tokens=8) as stream:
                chunks = [chunk async for chunk in stream]
            usage = chunks[-1].usage
            assert usage is not None
            cached.append((usage.prompt_tokens_details or {})["cached_tokens"])
        text = await model.complete("Once", max_tokens=4)

    assert first.usage is not None
    assert first.usage.completion_tokens <= 8
    # All but what is no whole block, at whichever of both.
    assert min(cached) >= first.usage.prompt_tokens - 32 > 0
    assert text.text
