"""A router that serves the model behind it, and the models of its adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from tests.conditions import eventually
from tests.llm.http.served import card

from dynbus import Actor, handler
from dynbus.llm import ModelRouter
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.models.publishing import publish_card
from dynbus.llm.models.register import register_adapter, target_of
from dynbus.testing import TestKit, run

ENDPOINT = "test.Engine.generate"
TINY = card("tiny", ENDPOINT)


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


class Router(ModelRouter, namespace="test"):
    """Stands before them."""


def test_adapters_behind_a_router_are_offered_while_they_are_loaded() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            instances = [await kit.start(Engine) for _ in range(3)]
            engines: list[Any] = [one.actor for one in instances]
            unloaded = asyncio.Event()
            await publish_card(target_of(engines[0].generate), TINY, ())
            router = await kit.start(
                Router, target=ENDPOINT, model="tiny", serve_as="chat", exact=False
            )

            async with Catalog(kit.caller) as catalog:

                def offered() -> dict[str, tuple[str, str]]:
                    cards = [one.card for one in catalog.models]
                    routed = [one for one in cards if one.endpoint == "test.Router.generate"]
                    return {one.name: (one.base_model, one.lora_name) for one in routed}

                await eventually(lambda: offered() == {"chat": ("", "")})
                engines[1].loaded = ["law"]
                await instances[1].renew_metadata()
                await register_adapter(engines[1].generate, TINY, "legal", "law", unloaded)
                await eventually(lambda: "chat:law" in offered())
                assert offered()["chat:law"] == ("chat", "law")

                await eventually(lambda: router.actor.instance_metadata()["kv_loras"] == "law")
                client = kit.caller.client(Router)
                for _ in range(6):
                    async for _item in client.generate({"token_ids": [1, 2], "lora_name": "law"}):
                        pass
                assert [one.asked for one in engines] == [[], ["law"] * 6, []]

                unloaded.set()
                await eventually(lambda: offered() == {"chat": ("", "")})

    run(story())
