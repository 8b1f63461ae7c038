"""The page's state tells of models, instances and decisions what operators ask, and no prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from dynbus import Actor, call_options, handler
from dynbus.kvrouter import KvRouter, open_router
from dynbus.llm.models.card import ModelCard, ModelInput
from dynbus.llm.page.state import LATEST, MAX_CANDIDATES, PageState
from dynbus.testing import TestKit, run

BLOCK = 16


class Prompt(BaseModel):
    token_ids: list[int]


class Engine(Actor, namespace="llm"):
    """Holds what it was asked before; after an odd first token it works until it is cancelled."""

    def __init__(self) -> None:
        self.seen = 0

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": str(BLOCK), "kv_total_blocks": "100"}

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[dict[str, int], None]:
        yield {"cached_tokens": self.seen}
        self.seen = len(prompt.token_ids)
        if prompt.token_ids[0] % 2:
            await asyncio.Event().wait()


CARD = ModelCard(
    name="tiny",
    endpoint="llm.Engine.generate",
    input=ModelInput.Tokens,
    types=["chat", "completions"],
    context_length=512,
)


@dataclass
class Model:
    card: ModelCard
    router: KvRouter | None
    takes_chat: bool = True


@asynccontextmanager
async def opened(kit: TestKit, count: int, *, routes: bool = True) -> AsyncGenerator[Model]:
    """So many engines, and the model that they serve."""
    for number in range(count):
        await kit.start(Engine, instance_id=f"engine-{number}")
    if not routes:
        yield Model(CARD, None)
        return
    async with open_router(kit.caller, Engine, exact=False) as router:
        yield Model(CARD, router)


async def ask(kit: TestKit, model: Model, tokens: list[int], request_id: str = "mine") -> None:
    engine = kit.client(Engine, routing=model.router) if model.router else kit.client(Engine)
    with call_options(request_id=request_id, wait=5.0):
        async for _ in engine.generate(Prompt(token_ids=tokens)):
            pass


async def state_of(kit: TestKit, *models: Model) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(await PageState(kit.caller, lambda: models).read())
    return state


def test_nothing_is_a_state_too() -> None:
    async def story() -> dict[str, Any]:
        async with TestKit() as kit:
            return await state_of(kit)

    state = run(story())

    assert (state["models"], state["instances"], state["routing"]) == ([], [], [])
    assert state["hit_rate"] is None


def test_models_and_instances_are_told_with_their_load() -> None:
    async def story() -> dict[str, Any]:
        async with TestKit() as kit, opened(kit, 2) as model:
            engine = kit.client(Engine, routing=model.router)
            async with aclosing(engine.generate(Prompt(token_ids=list(range(1, 65))))) as items:
                await anext(items)
                return await state_of(kit, model)

    state = run(story())

    assert state["models"] == [
        {
            "name": "tiny",
            "endpoint": "llm.Engine.generate",
            "context_length": 512,
            "takes_chat": True,
            "policy": "kv",
        }
    ]
    instances = state["instances"]
    assert {one["id"] for one in instances} == {"engine-0", "engine-1"}
    assert sorted(one["running"] for one in instances) == [0, 1]
    [busy] = [one for one in instances if one["running"]]
    assert (busy["component"], busy["models"]) == ("llm.Engine", ["tiny"])
    assert busy["cache"] == {
        "block_size": BLOCK,
        "total_blocks": 100,
        # Nobody tells what it holds: its router guesses.
        "held_blocks": None,
        "active_blocks": 4,
        "prefill_tokens": 0,
    }


def test_a_tenant_is_shown_its_own_requests_and_an_operator_all() -> None:
    async def story() -> list[dict[str, Any]]:
        async with TestKit() as kit, opened(kit, 1) as model:
            for tenant, tokens in (("ada", 32), ("bob", 64), ("ada", 48)):
                with call_options(metadata={"tenant": tenant}):
                    await ask(kit, model, list(range(2, tokens + 2)), f"of-{tenant}")
            state = PageState(kit.caller, lambda: [model])
            return [json.loads(await state.read(tenant)) for tenant in ("ada", "eve", None)]

    ada, eve, operator = run(story())

    [routing] = ada["routing"]
    assert {one["request_id"] for one in routing["latest"]} == {"of-ada"}
    assert (routing["decisions"], routing["prompt_tokens"], routing["waiting"]) == (2, 80, None)
    [routing] = eve["routing"]
    assert (routing["latest"], routing["decisions"], eve["hit_rate"]) == ([], 0, None)
    [routing] = operator["routing"]
    assert [one["request_id"] for one in routing["latest"]] == ["of-ada", "of-bob", "of-ada"]
    assert (routing["decisions"], routing["waiting"]) == (3, 0)


def test_instances_of_a_model_without_a_router_are_told_too() -> None:
    async def story() -> dict[str, Any]:
        async with TestKit() as kit, opened(kit, 1, routes=False) as model:
            await ask(kit, model, [0, 1])
            return await state_of(kit, model)

    state = run(story())

    [instance] = state["instances"]
    assert (instance["running"], instance["waiting"]) == (0, 0)
    assert "cache" not in instance
    assert state["routing"] == []


def test_instances_that_compute_prompts_for_a_model_are_told_with_what_is_moved() -> None:
    class Prefill(Actor, namespace="llm"):
        @handler
        async def prefill(self, prompt: Prompt) -> Prompt:
            return prompt

    class Other(Actor, namespace="elsewhere"):
        @handler
        async def prefill(self, prompt: Prompt) -> Prompt:
            return prompt

    async def story() -> dict[str, Any]:
        async with TestKit() as kit, opened(kit, 1) as model:
            await kit.start(Prefill, instance_id="filling")
            await kit.start(Other, instance_id="other")
            read = {"transferred_bytes": 2e9, "transfer_seconds": 0.5, "blocks_quarantined": 3}
            bus = kit.started["engine-0"].actor.runtime.bus
            bus.status.put_figures("hand-overs", "llm.Engine@engine-0", read)
            return await state_of(kit, model)

    state = run(story())

    engine, filling = sorted(state["instances"], key=lambda one: str(one["component"]))
    assert (filling["component"], filling["role"], filling["models"]) == (
        "llm.Prefill",
        "prefill",
        [],
    )
    assert "transfers" not in filling
    assert "role" not in engine
    assert engine["transfers"]["transferred_bytes"] == 2e9
    assert engine["transfers"]["blocks_quarantined"] == 3
    assert engine["transfers"]["prompts_handed_over"] == 0


def test_a_decision_says_who_could_have_got_the_request_and_what_came_of_it() -> None:
    async def story() -> dict[str, Any]:
        async with TestKit() as kit, opened(kit, 2) as model:
            tokens = list(range(2, 66))
            await ask(kit, model, tokens, "first")
            await ask(kit, model, tokens, "second")
            return await state_of(kit, model)

    state = run(story())

    [routing] = state["routing"]
    second, first = routing["latest"]
    assert (first["request_id"], second["request_id"]) == ("first", "second")
    assert second["chosen"] == first["chosen"]
    assert (first["reused_tokens"], second["reused_tokens"]) == (0, 64)
    # Its last block is expected to be computed again.
    assert second["expected_reuse"] == 48
    assert second["reason"] == "lowest_cost"
    cheapest, other = second["candidates"]
    assert cheapest["instance"] == second["chosen"]["instance"]
    assert (cheapest["held_tokens"], other["held_tokens"]) == (64, 0)
    assert cheapest["cost"] < other["cost"]
    assert second["ended_s"] is not None
    assert state["hit_rate"] == 0.5


def test_the_state_has_no_token_of_a_prompt_and_stays_small() -> None:
    async def story() -> bytes:
        async with TestKit() as kit, opened(kit, MAX_CANDIDATES + 2) as model:
            for number in range(LATEST + 5):
                await ask(kit, model, [987_654_322] * 64, f"request-{number}")
            return await PageState(kit.caller, lambda: [model]).read()

    data = run(story())

    assert b"98765432" not in data
    [routing] = json.loads(data)["routing"]
    assert len(routing["latest"]) == LATEST
    assert len(routing["latest"][0]["candidates"]) == MAX_CANDIDATES
    assert routing["latest"][0]["more_candidates"] == 2
    assert len(data) < 64 * 1024


def test_however_many_look_the_instances_are_asked_once() -> None:
    async def story() -> tuple[list[dict[str, Any]], int]:
        async with TestKit() as kit, opened(kit, 2) as model:
            asked = 0
            state = PageState(kit.caller, lambda: [model])
            publish = kit.caller.bus.data.publish

            def count(subject: str, *args: Any, **kwargs: Any) -> None:
                nonlocal asked
                asked += subject.startswith("$SRV.STATS.")
                publish(subject, *args, **kwargs)

            kit.caller.bus.data.publish = count  # type: ignore[method-assign]
            read = await asyncio.gather(*(state.read() for _ in range(20)))
            return [json.loads(one) for one in read], asked

    states, asked = run(story())

    assert all(len(one["instances"]) == 2 for one in states)
    assert asked == 1


def test_an_instance_that_does_not_answer_is_shown_without_its_load() -> None:
    async def story() -> dict[str, Any]:
        async with TestKit() as kit, opened(kit, 2) as model:
            await ask(kit, model, [0] * 32)
            await kit.kill(kit.started["engine-1"])
            return await state_of(kit, model)

    state = run(story())

    running = {one["id"]: one["running"] for one in state["instances"]}
    assert running == {"engine-0": 0, "engine-1": None}
