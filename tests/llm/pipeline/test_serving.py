"""What goes wrong with one model, or one answer, is not the others' affair."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import pytest
from tests.conditions import eventually
from tests.llm.http.served import FixedCatalog, ScriptedEngine, card

from dynbus import Actor, handler
from dynbus.bus.errors import DynbusError, InvalidResponse, Unavailable
from dynbus.llm.models.card import ModelCard, ModelInput, ModelType
from dynbus.llm.openai.answers import BARE
from dynbus.llm.openai.api import format_of
from dynbus.llm.openai.requests import read_chat
from dynbus.llm.pipeline.models import Models
from dynbus.llm.pipeline.open_model import Inquiry
from dynbus.llm.pipeline.serving import RequestTiming
from dynbus.llm.text.text_model import TextModel
from dynbus.testing import TestKit, run


class OddEngine(Actor, namespace="test"):
    """An engine whose chunks are no chunks."""

    @handler
    async def chat(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """One of them."""
        yield {"choices": [{"index": 0, "delta": "no object"}]}


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.data = b""
        self.has_ended = False
        self.error: DynbusError | None = None

    def write(self, chunks: Sequence[bytes]) -> bool:
        self.data += b"".join(chunks)
        return True

    def end(self, error: DynbusError | None) -> None:
        self.has_ended = True
        self.error = error


async def ask(models: Models, name: str) -> Kept:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "say yes"}]})
    opened = await models.get(name, ModelType.Chat)
    kept = Kept()
    request = read_chat(body.encode())
    inquiry = Inquiry(request, msgspec.Raw(body.encode()), format_of(request, "1", frame=BARE))
    await opened.begin(await opened.prepare(inquiry, kept, RequestTiming(0.0)))
    await eventually(lambda: kept.has_ended)
    return kept


def test_an_answer_that_cannot_be_read_ends_with_that_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        odd = card("odd", "test.OddEngine.chat", input=ModelInput.Text, types=["chat"])
        tiny = card("tiny", "test.ScriptedEngine.generate")
        async with TestKit() as kit:
            await kit.start(OddEngine)
            await kit.start(ScriptedEngine)
            catalog = FixedCatalog({"odd": odd, "tiny": tiny})
            async with Models(kit.caller, catalog) as models:
                await eventually(lambda: len(models.names) == 2)
                kept = await ask(models, "odd")
                assert isinstance(kept.error, InvalidResponse)
                assert (await ask(models, "tiny")).error is None

    run(story())

    assert "cannot be read" in caplog.text


class _LateCatalog(FixedCatalog):
    """A catalog whose tokenizers cannot be read at first."""

    failures = 2

    async def text_model(self, card: ModelCard) -> TextModel:
        if self.failures:
            self.failures -= 1
            raise Unavailable("JetStream is away")
        return await super().text_model(card)


def test_a_model_that_could_not_be_opened_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(ScriptedEngine)
            catalog = _LateCatalog({"tiny": card("tiny", "test.ScriptedEngine.generate")})
            async with Models(kit.caller, catalog) as models:
                await eventually(lambda: "JetStream is away" in caplog.text)
                with pytest.raises(Unavailable, match="cannot be served: JetStream is away"):
                    await models.get("tiny", ModelType.Chat)
                await eventually(lambda: models.names == ["tiny"], within=30.0)
                assert (await ask(models, "tiny")).error is None

    run(story())
