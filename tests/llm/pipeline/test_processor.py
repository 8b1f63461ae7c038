"""A processor of the user's between a front end and an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from tests.conditions import eventually
from tests.llm.http.served import ScriptedEngine
from tests.llm.media.samples import image, png
from tests.llm.text.tiny_tokenizer import CHATML, tiny_json

from dynbus.llm.http.frontend import Frontend
from dynbus.llm.models.card import ModelInput, ModelType
from dynbus.llm.models.register import register_llm
from dynbus.llm.pipeline.processor import Processor
from dynbus.testing import TestKit

pytestmark = pytest.mark.anyio


class Registered(ScriptedEngine, namespace="test"):
    """The scripted engine, which registers its model."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    async def on_start(self) -> None:
        await register_llm(
            ModelInput.Tokens, ModelType.Backend, self.generate, self._folder, "behind"
        )


class Louder(Processor, namespace="test"):
    """Says something else, and louder."""

    async def process(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        if "messages" in request:
            request["messages"][-1]["content"] += " twice"
        async for chunk in self.ask(request):
            for choice in chunk.get("choices", []):
                for part in (choice, choice.get("delta", {}), choice.get("message", {})):
                    for name in ("content", "text"):
                        if part.get(name):
                            part[name] = part[name].upper()
            yield chunk


class Front(Frontend, namespace="test"):
    """The front end as an actor."""


@asynccontextmanager
async def graph(folder: Path) -> AsyncGenerator[tuple[TestKit, AsyncOpenAI]]:
    """Front end, processor and engine, each an actor."""
    model = folder / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(tiny_json())
    (model / "config.json").write_text(
        '{"model_type": "llama", "max_position_embeddings": 2000, "eos_token_id": 2}'
    )
    (model / "chat_template.jinja").write_text(CHATML)
    async with TestKit() as kit:
        await kit.start(Registered, folder=str(model))
        await kit.start(Louder, model="behind", serve_as="loud")
        front = (await kit.start(Front, port=0)).actor
        assert isinstance(front, Front)
        async with AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none") as client:

            async def both() -> bool:
                return {one.id async for one in client.models.list()} == {"loud", "behind"}

            await eventually(both)
            yield kit, client


def engine_of(kit: TestKit) -> Registered:
    return next(one.actor for one in kit.started.values() if isinstance(one.actor, Registered))


async def test_a_processor_changes_requests_and_answers(tmp_path: Path) -> None:
    messages: Any = [{"role": "user", "content": "say hello"}]
    async with graph(tmp_path) as (kit, client):
        whole = await client.chat.completions.create(model="loud", messages=messages)
        stream = await client.chat.completions.create(
            model="loud", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = await client.completions.create(model="loud", prompt="say hello")
        bare = await client.chat.completions.create(model="behind", messages=messages)
        with pytest.raises(BadRequestError, match="this prompt is refused"):
            await client.completions.create(model="loud", prompt="refuse it")
        pictures: Any = [{"role": "user", "content": [image(png())]}]
        with pytest.raises(BadRequestError, match="the model behind takes text only"):
            await client.chat.completions.create(model="loud", messages=pictures)
        endless: Any = [{"role": "user", "content": "endless a"}]
        left = await client.chat.completions.create(model="loud", messages=endless, stream=True)
        await anext(left)
        await left.close()
        async with asyncio.timeout(60):
            await eventually(lambda: engine_of(kit).running == 0)

    assert whole.choices[0].message.content == "HELLO TWICE"
    assert whole.model == "loud"
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == "HELLO TWICE"
    assert len(said) > 2
    assert chunks[-1].usage is not None
    assert text.choices[0].text == "HELLO"
    assert bare.choices[0].message.content == "hello"


async def test_a_processor_counts_by_the_tokenizer_of_the_model_behind(tmp_path: Path) -> None:
    async with graph(tmp_path) as (kit, _):
        louder = next(one.actor for one in kit.started.values() if isinstance(one.actor, Louder))
        text = await louder.text_model()
        token_ids = await text.encode("say hello")
        decoded = await text.decode(token_ids)

    assert decoded == "say hello"
