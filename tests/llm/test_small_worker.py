from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.llm.small import references
from tests.llm.text.tiny_tokenizer import CHATML, tiny_json
from tests.llm.weights.tiny_models import CONTEXT, TINY_MODELS

from dynbus.bus.errors import ConfigError
from dynbus.llm.generation import DefaultSampling, GenerateRequest, Sampling
from dynbus.llm.models.card import ModelCard, ModelType
from dynbus.llm.models.records import read_cards
from dynbus.llm.worker import SmallWorker
from dynbus.testing import TestKit, run


def served_folder(folder: Path) -> Path:
    """A tiny model with a tokenizer, which a front end can use all of."""
    TINY_MODELS["llama"].write_folder(folder)
    (folder / "tokenizer.json").write_bytes(tiny_json())
    described = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def test_a_worker_serves_its_model_and_registers_it(tmp_path: Path) -> None:
    folder = served_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')

    async def story() -> tuple[list[int], list[ModelCard]]:
        async with TestKit() as kit:
            await kit.start(
                SmallWorker,
                model=str(folder),
                backend="numpy",
                block_size=8,
                default_sampling="openai",
            )
            [instance] = kit.started.values()
            request = GenerateRequest(
                references.prompt(),
                references.GENERATED,
                sampling=Sampling(temperature=0),
                ignore_eos=True,
            )
            items = kit.client(SmallWorker).generate(request)
            tokens = [token async for item in items for token in item.token_ids]
            cards = await read_cards(instance.actor.runtime.bus.data.jetstream, "tiny")
            return tokens, [stored.card for stored in cards]

    tokens, cards = run(story())
    by_endpoint = {one.endpoint: one for one in cards}
    card = by_endpoint.pop("llm.SmallWorker.generate")
    embedding = by_endpoint.pop("llm.SmallWorker.embed")
    assert not by_endpoint

    assert tokens == references.stored()["llama"]["tokens"]
    assert card.type == ModelType.Chat | ModelType.Completions
    assert card.default_sampling == DefaultSampling()
    assert (card.context_length, card.kv_cache_block_size) == (CONTEXT, 8)
    assert embedding.type == ModelType.Embedding


def test_a_model_that_cannot_be_served_stops_the_worker_with_the_reason(tmp_path: Path) -> None:
    folder = served_folder(tmp_path / "tiny")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(SmallWorker, model=str(folder), backend="numpy")

    with pytest.raises(ConfigError, match=r"the model '.*tiny' cannot be served: .*it is cut"):
        run(story())


def test_options_that_cannot_be_are_refused_at_once() -> None:
    with pytest.raises(
        ConfigError, match="block_size=0: give a whole number of tokens, at least 1"
    ):
        SmallWorker(block_size=0)
