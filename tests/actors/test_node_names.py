"""One class under several names: which node of it is started, called and found."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from tests.story import on_a_kit

from dynbus import Actor, ConfigError, NoInstances, depends, handler
from dynbus.testing import TestKit


class Engine(Actor, namespace="nodes"):
    def __init__(self, answer: str = "plain") -> None:
        self.answer = answer

    @handler
    async def ask(self) -> str:
        return self.answer

    @handler
    async def repeat(self, count: int) -> AsyncGenerator[str, None]:
        for _ in range(count):
            yield self.answer


class Front(Actor, namespace="nodes"):
    engine = depends(Engine)
    prefill = depends(Engine, node="prefill", wait=1.0)
    decode = depends(Engine, node="decode")

    @handler
    async def ask(self) -> list[str]:
        return [
            await self.engine.ask(),
            await self.prefill.ask(),
            *[item async for item in self.decode.repeat(1)],
        ]


class Homeless(Actor):
    @handler
    async def ask(self) -> str:
        return "found"


class Placed(Actor, namespace="nodes"):
    def __init__(self, node: str, namespace: str) -> None:
        self.given = f"{node} {namespace}"

    @handler
    async def ask(self) -> str:
        return self.given


def test_each_node_of_one_class_is_called_by_its_own_name() -> None:
    async def story(kit: TestKit) -> list[str]:
        await kit.start(Engine)
        await kit.start(Engine, node="prefill", answer="prefill")
        await kit.start(Engine, node="decode", answer="decode")
        await kit.start(Front)
        return await kit.client(Front).ask()

    assert on_a_kit(story) == ["plain", "prefill", "decode"]


def test_a_client_of_one_node_does_not_reach_another() -> None:
    async def story(kit: TestKit) -> None:
        await kit.start(Engine, node="prefill")

        assert await kit.client(Engine, node="prefill").ask() == "plain"
        with pytest.raises(NoInstances, match=r"nodes\.Engine"):
            await kit.client(Engine).ask()

    on_a_kit(story)


def test_a_node_is_the_component_on_the_bus() -> None:
    async def story(kit: TestKit) -> None:
        instance = await kit.start(Engine, node="prefill", namespace="second", instance_id="a")
        untyped = await kit.caller.endpoint("second.prefill.ask").client()

        assert str(instance.name) == "second.prefill@a"
        assert await untyped.generate() == "plain"
        assert kit.caller.instance_ids("second.prefill") == ["a"]
        assert kit.caller.instance_ids(Engine) == []

    on_a_kit(story)


def test_a_namespace_of_the_start_and_the_client_goes_before_that_of_the_class() -> None:
    async def story(kit: TestKit) -> str:
        await kit.start(Homeless, namespace="elsewhere")
        return await kit.client(Homeless, namespace="elsewhere").ask()

    assert on_a_kit(story) == "found"


def test_a_constructor_that_takes_a_node_and_a_namespace_itself_is_given_them() -> None:
    async def story(kit: TestKit) -> str:
        await kit.start(Placed, node="here", namespace="there")
        return await kit.client(Placed).ask()

    assert on_a_kit(story) == "here there"


@pytest.mark.parametrize("name", ["pre fill", "a.b", "_own", "x" * 64])
def test_a_name_that_is_no_token_is_refused(name: str) -> None:
    async def story(kit: TestKit) -> None:
        with pytest.raises(ConfigError, match="node .* is not a valid name"):
            kit.client(Engine, node=name)
        with pytest.raises(ConfigError, match="namespace .* is not a valid name"):
            kit.client(Engine, namespace=name)
        with pytest.raises(ConfigError, match="node .* is not a valid name"):
            await kit.start(Engine, node=name)
        with pytest.raises(ConfigError, match="namespace .* is not a valid name"):
            await kit.start(Engine, namespace=name)

    on_a_kit(story)
    with pytest.raises(ConfigError, match="node .* is not a valid name"):
        depends(Engine, node=name)


def test_a_dependency_knows_its_node() -> None:
    assert Front.engine.node == "Engine"  # type: ignore[attr-defined]
    assert Front.prefill.node == "prefill"  # type: ignore[attr-defined]
