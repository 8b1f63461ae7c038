"""The `Router` actor forwards by the same code, and tells what it decided."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from dynbus import Actor, ConfigError, DynbusError, call_options, handler
from dynbus.kvrouter.router_actor import DecisionQuery, PolicyChoice, Router
from dynbus.testing import TestKit, run


class Prompt(BaseModel):
    token_ids: list[int]


class Engine(Actor, namespace="llm"):
    """Tells its name and what it found in its cache."""

    def __init__(self, name: str, block_size: int = 16) -> None:
        self.name = name
        self.block_size = block_size
        self.closed = 0

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": str(self.block_size)}

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[dict[str, Any], None]:
        try:
            yield {"name": self.name, "cached_tokens": 48}
            for number in range(100):
                yield {"name": self.name, "token": number}
        finally:
            self.closed += 1


class Front(Router, namespace="llm"):
    pass


REQUEST = {"token_ids": list(range(64))}


def test_a_call_is_forwarded_and_its_decision_told_with_what_was_reused() -> None:
    async def story() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with TestKit() as kit:
            await kit.start(Engine, instance_id="a", name="a")
            await kit.start(Engine, instance_id="b", name="b")
            await kit.start(Front, target="llm.Engine.generate", exact=False)
            front = kit.client(Front)
            with call_options(request_id="asked"):
                items = [item async for item in front.generate(REQUEST)]
            return items, await front.decisions(DecisionQuery(request_id="asked"))

    items, (decision,) = run(story())

    assert len(items) == 101
    assert decision["chosen"]["instance"] == items[0]["name"]
    assert decision["outcome"]["reused_tokens"] == 48
    assert decision["outcome"]["error"] == ""


def test_equal_prompts_of_two_callers_go_to_one_engine() -> None:
    async def story() -> set[str]:
        async with TestKit() as kit:
            for name in "abcd":
                await kit.start(Engine, instance_id=name, name=name)
            await kit.start(Front, target="llm.Engine.generate", exact=False)
            other = (await kit.runtime()).client(Front)
            names: set[str] = set()
            with call_options(wait=5.0):
                for front in (kit.client(Front), other) * 3:
                    names |= {item["name"] async for item in front.generate(REQUEST)}
            return names

    assert len(run(story())) == 1


def test_only_configured_policies_can_be_chosen_over_the_bus() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            await kit.start(Engine, name="a")
            await kit.start(Front, target="llm.Engine.generate", exact=False)
            front = kit.client(Front)
            with pytest.raises(DynbusError, match=r"'os:system' is not one .*: dynamo"):
                await front.use_policy(PolicyChoice(policy="os:system"))
            return (await front.use_policy(PolicyChoice(policy="dynamo"))).policy

    assert run(story()) == "dynamo"


def test_a_router_does_not_start_for_engines_that_do_not_fit_together() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Engine, name="a")
            await kit.start(Engine, name="b", block_size=32)
            with pytest.raises(ConfigError, match="block sizes differ"):
                await kit.start(Front, target="llm.Engine.generate", exact=False)

    run(story())


def test_a_caller_that_leaves_ends_the_engines_work() -> None:
    async def story() -> int:
        async with TestKit() as kit:
            engine = (await kit.start(Engine, name="a")).actor
            await kit.start(Front, target="llm.Engine.generate", exact=False)
            stream = kit.client(Front).generate(REQUEST)
            async for _ in stream:
                break
            await stream.aclose()
            assert isinstance(engine, Engine)
            for _ in range(1000):
                if engine.closed:
                    break
                await kit.caller.bus.data.barrier()
            return engine.closed

    assert run(story()) == 1
