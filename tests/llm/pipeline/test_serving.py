"""What goes wrong with one model, or one answer, is not the others' affair."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import anyio
import msgspec
import pytest
from tests.conditions import eventually
from tests.llm.http.served import FixedCatalog, ScriptedEngine, card

from dynbus import Actor, handler
from dynbus.bus.errors import (
    DynbusError,
    InvalidResponse,
    NoInstances,
    Overloaded,
    Unavailable,
)
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm.models.card import ModelCard, ModelInput, ModelType
from dynbus.llm.openai.answers import BARE
from dynbus.llm.openai.api import format_of
from dynbus.llm.openai.errors import ModelNotFound, answer_of
from dynbus.llm.openai.requests import read_chat
from dynbus.llm.pipeline.models import Hold, Models
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


def test_requests_for_a_model_without_an_engine_wait_for_one_in_bounded_number() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            catalog = FixedCatalog({})
            owner = (ComponentName("test", "ScriptedEngine"),)
            catalog.registered = {"tiny": owner, "an-adapter-of-tiny": owner}
            async with Models(kit.caller, catalog, hold=Hold(30.0, 2)) as models:
                assert models.names == ["an-adapter-of-tiny", "tiny"]
                answered: list[Kept] = []

                async def ask_tiny() -> None:
                    answered.append(await ask(models, "tiny"))

                async with anyio.create_task_group() as tasks:
                    leaving = anyio.CancelScope()

                    async def leave() -> None:
                        with leaving:
                            await models.get("tiny", ModelType.Chat)

                    tasks.start_soon(leave)
                    tasks.start_soon(ask_tiny)
                    await anyio.wait_all_tasks_blocked()
                    with pytest.raises(Overloaded, match="no engine, and 2 requests wait") as full:
                        await models.get("tiny", ModelType.Chat)
                    assert full.value.retry_after > 0
                    leaving.cancel()
                    await anyio.wait_all_tasks_blocked()
                    tasks.start_soon(ask_tiny)
                    await anyio.wait_all_tasks_blocked()
                    await kit.start(ScriptedEngine)
                    catalog.change({"tiny": card("tiny", "test.ScriptedEngine.generate")})

                assert [kept.error for kept in answered] == [None, None]
                assert models.without_engine == {}
                with pytest.raises(ModelNotFound):
                    await models.get("nobody", ModelType.Chat)

    run(story())


def test_a_request_that_was_held_in_vain_says_so_and_none_is_held_unless_it_is_asked_for() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            catalog = FixedCatalog({})
            catalog.registered = {"tiny": (ComponentName("test", "ScriptedEngine"),)}
            async with Models(kit.caller, catalog, hold=Hold(5.0)) as models:
                with pytest.raises(NoInstances, match="none came within 5 s") as late:
                    await models.get("tiny", ModelType.Chat)
                assert answer_of(late.value).status == 503
                assert "Retry-After" in answer_of(late.value).headers
            async with Models(kit.caller, catalog) as models:
                await eventually(lambda: models.problem == "")
                with pytest.raises(ModelNotFound):
                    await models.get("tiny", ModelType.Chat)

    run(story())
