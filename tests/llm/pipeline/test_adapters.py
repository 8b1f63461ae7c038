"""A model with an adapter is served beside its base, by the instances that have loaded it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

import msgspec
import pytest
from tests.conditions import eventually
from tests.llm.http.served import FixedCatalog, card
from tests.llm.pipeline.test_serving import ask

from dynbus import Actor, handler
from dynbus.bus.errors import ConfigError, DynbusError
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.models.card import ModelType
from dynbus.llm.openai.embeddings import EmbeddingsFormat, read_embeddings
from dynbus.llm.openai.errors import ModelNotFound
from dynbus.llm.pipeline import RoutingChoice
from dynbus.llm.pipeline.models import Models
from dynbus.testing import TestKit, run


class Engine(Actor, namespace="test"):
    """Keeps the adapters that it is asked for, and says which it has."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.asked: list[str | None] = []

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": "16", "kv_events": "false", "kv_loras": ",".join(self.loaded)}

    @handler
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Generated, None]:
        """One token."""
        self.asked.append(request.lora_name)
        yield Generated([5], finish_reason="length")

    @handler
    async def embed(self, request: EmbedRequest) -> Embedded:
        """One number."""
        self.asked.append(request.lora_name)
        return Embedded([1.0])


def base_and_adapter() -> FixedCatalog:
    endpoint = "test.Engine.generate"
    adapter = card("legal", endpoint, base_model="tiny", lora_name="law")
    return FixedCatalog({"tiny": card("tiny", endpoint), "legal": adapter})


@pytest.mark.parametrize("routing", ["auto", "round_robin"])
def test_requests_go_to_instances_that_have_loaded_the_adapter(routing: RoutingChoice) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            instances = [await kit.start(Engine) for _ in range(3)]
            engines: list[Any] = [one.actor for one in instances]
            catalog = base_and_adapter()
            engines[1].loaded = ["law", "other"]
            await instances[1].renew_metadata()
            async with Models(kit.caller, catalog, routing=routing) as models:
                await eventually(lambda: models.names == ["legal", "tiny"])
                for _ in range(6):
                    assert (await ask(models, "legal")).error is None
                for _ in range(6):
                    assert (await ask(models, "tiny")).error is None
                assert engines[1].asked.count("law") == 6
                assert sum(one.asked.count(None) for one in engines) == 6

                # It moves.
                engines[2].loaded = ["law"]
                await instances[2].renew_metadata()
                engines[1].loaded = []
                await instances[1].renew_metadata()

                async def is_answered_by_the_other() -> bool:
                    await ask(models, "legal")
                    return "law" in engines[2].asked

                await eventually(is_answered_by_the_other)
                one, two = models.served
                # What caches hold is followed once for both.
                assert one.router is two.router

    run(story())


def test_embeddings_are_those_of_the_adapter_that_is_asked_for() -> None:
    embedding: Any = {"types": ["embedding"]}
    cards = {
        "tiny": card("tiny", "test.Engine.embed", **embedding),
        "legal": card(
            "legal", "test.Engine.embed", base_model="tiny", lora_name="law", **embedding
        ),
    }

    async def story() -> None:
        async with TestKit() as kit:
            instances = [await kit.start(Engine) for _ in range(2)]
            having: Any = instances[1].actor
            having.loaded = ["law"]
            await instances[1].renew_metadata()
            async with Models(kit.caller, FixedCatalog(cards)) as models:
                await eventually(lambda: models.names == ["legal", "tiny"])
                for _ in range(4):
                    for name in models.names:
                        await embed(models, name)
        asked = [one for instance in instances for one in cast("Any", instance.actor).asked]
        assert having.asked.count("law") == asked.count("law") == 4
        assert asked.count(None) == 4

    run(story())


async def embed(models: Models, name: str) -> None:
    body = json.dumps({"model": name, "input": "a cat"}).encode()
    opened = await models.get(name, ModelType.Embedding)
    request = read_embeddings(body)
    made = await opened.prepare_embeddings(
        request, msgspec.Raw(body), EmbeddingsFormat(request, "1"), None
    )
    await opened.embed(made)


def test_an_adapter_that_was_unloaded_is_no_model_any_more() -> None:
    async def story() -> DynbusError:
        async with TestKit() as kit:
            instance = await kit.start(Engine)
            engine: Any = instance.actor
            engine.loaded = ["law"]
            await instance.renew_metadata()
            catalog = base_and_adapter()
            async with Models(kit.caller, catalog) as models:
                await eventually(lambda: models.names == ["legal", "tiny"])
                catalog.change({"tiny": catalog.cards["tiny"]})
                await eventually(lambda: models.names == ["tiny"])
                with pytest.raises(DynbusError) as raised:
                    await models.get("legal", ModelType.Chat)
                return raised.value

    assert isinstance(run(story()), ModelNotFound)


def test_an_instance_announces_only_what_fits() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            instance = await kit.start(Engine)
            engine: Any = instance.actor
            engine.loaded = [f"adapter-{number}" for number in range(1000)]
            with pytest.raises(ConfigError, match="at most 32 and 4096 are announced"):
                await instance.renew_metadata()

    run(story())
