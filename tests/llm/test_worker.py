"""A model worker serves its model under its name, computed or played by a mock."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.llm.weights import tiny_models

from dynbus.bus.telemetry.process_status import StartStep
from dynbus.llm import served_model
from dynbus.llm.engine import Engine
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.mock.text_model import END_ID, write_mock_model
from dynbus.llm.models.card import ModelType
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.models.origins import ModelUnavailable
from dynbus.llm.worker import ModelWorker
from dynbus.testing import TestKit, run


class Worker(ModelWorker, namespace="llm"):
    pass


async def text_of(kit: TestKit, prompt: str, max_tokens: int = 400) -> tuple[str, list[Generated]]:
    """What the only model that is there makes of a prompt."""
    async with Catalog(kit.caller) as catalog:
        card = await catalog.wait_for("mock", ModelType.Chat, timeout=60)
        text = await catalog.text_model(card)
        request = GenerateRequest(await text.encode(prompt), max_tokens)
        items = [item async for item in kit.client(Worker).generate(request)]
        return text.tokenizer.decode([one for item in items for one in item.token_ids]), items


def test_a_mock_talks_in_words_and_ends_by_itself() -> None:
    async def story() -> tuple[str, list[Generated]]:
        async with TestKit() as kit:
            await kit.start(Worker, engine="mock")
            return await text_of(kit, "Say something.", 5000)

    text, items = run(story())

    assert items[-1].finish_reason == "stop"
    assert items[-1].token_ids == [END_ID]
    assert text.isascii()
    assert len(text.split()) > 3


def test_a_model_of_files_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = write_mock_model(tmp_path)
    monkeypatch.setattr(tiny_models, "VOCABULARY", tokens)
    # Its configuration replaces the mock's; the tokenizer stays.
    tiny_models.TinyModel("tiny-llama", "llama").write_folder(tmp_path)

    async def story() -> list[Generated]:
        async with TestKit() as kit:
            await kit.start(
                Worker, model=str(tmp_path), model_name="mock", backend="numpy", blocks=16
            )
            return (await text_of(kit, "Hello", 12))[1]

    items = run(story())

    made = [one for item in items for one in item.token_ids]
    assert 0 < len(made) <= 12
    assert max(made) < tokens
    assert items[-1].finish_reason in ("stop", "length")


def test_a_model_that_cannot_be_had_is_replaced_by_a_mock_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(*_: object, **__: object) -> None:
        raise ModelUnavailable("tiny is gone")

    monkeypatch.setattr(served_model, "resolve", gone)

    async def story(**options: str) -> str:
        async with TestKit() as kit:
            await kit.start(Worker, model="tiny", **options)
            return (await text_of(kit, "Say something."))[0]

    with pytest.raises(ModelUnavailable, match="tiny is gone"):
        run(story())
    assert run(story(fallback="mock"))
    assert "a mock takes the model's place, since tiny is gone" in caplog.messages


def test_the_start_shows_how_far_it_is_until_it_is_over() -> None:
    shown: list[StartStep] = []

    class Watched(Worker, namespace="llm"):
        def make_engine(self) -> Engine:
            shown.extend(self.runtime.bus.status.steps())
            return super().make_engine()

    async def story() -> list[StartStep]:
        async with TestKit() as kit:
            instance = await kit.start(Watched, engine="mock")
            return instance.actor.runtime.bus.status.steps()

    assert run(story()) == []
    assert shown == [StartStep("loading the model")]
