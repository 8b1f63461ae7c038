"""The graph of a run: forward references, links, circles, and where its nodes are."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.story import on_a_kit

from dynbus import Actor, ConfigError, depends, handler
from dynbus.actors.declaring.actor import Dependency, keep_dependencies, kept_dependencies
from dynbus.actors.running.graph import (
    Node,
    addresses_of,
    dependency_depth,
    nodes_of,
    with_dependencies,
)
from dynbus.testing import TestKit


class Engine(Actor, namespace="graph"):
    @handler
    async def name(self) -> str:
        return str(self.__dynbus_name__).partition("@")[0]


class Cache(Engine): ...


class Processor(Actor, namespace="graph"):
    engine: Engine = depends("Engine")
    router: Router = depends("Router")
    cache = depends(Cache)
    absent = depends("not_installed_anywhere:Torch")

    @handler
    async def ask(self) -> list[str]:
        return [await self.router.name(), await self.engine.name()]

    @handler
    async def what_is_there(self) -> list[str]:
        return [name for name in ("engine", "router", "cache", "absent") if hasattr(self, name)]

    @handler
    async def misuse(self) -> str:
        return await self.cache.name()


class Router(Engine):
    prefill = depends(Engine, node="prefill")
    decode = depends(Engine, node="decode")


class Subclass(Processor): ...


class Left(Actor, namespace="graph"):
    right = depends("Right")

    @handler
    async def ask(self) -> None: ...


class Right(Actor, namespace="graph"):
    middle = depends(f"{__name__}:Middle")


class Middle(Actor, namespace="graph"):
    left = depends(Left)


class Misspelt(Actor, namespace="graph"):
    engine = depends("Engin")
    module = depends("tests.actors:on_a_kit")


@pytest.fixture(autouse=True)
def unlinked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that a test makes are forgotten."""
    nothing: frozenset[str] = frozenset()
    for actor in (Engine, Processor, Router, Subclass):
        monkeypatch.setattr(actor, "__dynbus_links__", nothing)


def names(actors: list[type[Actor]]) -> list[str]:
    return [actor.__name__ for actor in actors]


# Links --------------------------------------------------------------------------------------


def test_a_link_keeps_one_dependency_and_leaves_the_others_out() -> None:
    assert Processor.link(Router) is Router

    assert names(with_dependencies([Processor])) == ["Engine", "Router", "Processor"]
    assert list(kept_dependencies(Processor)) == ["router"]


def test_links_are_a_chain_and_keep_every_attribute_of_the_class() -> None:
    Processor.link(Router).link(Engine)

    assert list(kept_dependencies(Router)) == ["prefill", "decode"]


def test_a_subclass_inherits_links_and_has_further_ones_of_its_own() -> None:
    Processor.link(Router)
    Subclass.link(Cache)

    assert list(kept_dependencies(Subclass)) == ["router", "cache"]
    assert list(kept_dependencies(Processor)) == ["router"]


def test_a_link_that_is_made_later_holds_for_a_subclass_with_links_too() -> None:
    Subclass.link(Cache)
    Processor.link(Engine)

    assert list(kept_dependencies(Subclass)) == ["engine", "cache"]


@pytest.mark.parametrize(
    ("actor", "other", "message"),
    [
        (
            Processor,
            Left,
            "Processor.link(Left): Processor does not depend on Left; it depends on Engine, "
            "Router, Cache, not_installed_anywhere:Torch",
        ),
        (Engine, Cache, "Engine.link(Cache): Engine does not depend on Cache; it depends on "
         "nothing: write NAME = depends(Cache) in its body"),
        (Router, "Engine", "Router.link('Engine'): give an Actor class"),
        (Router, None, "Router.link(None): give an Actor class"),
    ],
)  # fmt: skip
def test_only_a_dependency_can_be_linked(actor: type[Actor], other: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        actor.link(other)

    assert str(refused.value) == message
    assert kept_dependencies(actor) == actor.__dynbus_dependencies__


def test_an_instance_calls_what_is_linked_and_is_told_about_the_rest() -> None:
    Processor.link(Router)
    Processor.link(Engine)

    async def story(kit: TestKit) -> tuple[list[str], list[str]]:
        for actor in (Engine, Router, Processor):
            await kit.start(actor)
        client = kit.client(Processor)
        with pytest.raises(ConfigError) as refused:
            await client.misuse()
        assert refused.value.message == (
            "Processor.cache is not used in this run: other dependencies of Processor are linked, "
            "and it is not; add Processor.link(Cache)"
        )
        return await client.ask(), await client.what_is_there()

    assert on_a_kit(story) == (["graph.Router", "graph.Engine"], ["engine", "router"])


def test_a_process_keeps_what_the_plan_keeps_without_the_module_that_links() -> None:
    keep_dependencies(Processor, ["router", "cache"])

    assert list(kept_dependencies(Processor)) == ["router", "cache"]


def test_a_dependency_that_a_class_is_given_later_calls_as_any_other() -> None:
    class Late(Actor, namespace="graph"):
        cache = depends(Cache)

        @handler
        async def ask(self) -> str:
            changed: Any = self
            answer: str = await changed.added.name()
            return answer

    changing: Any = Late
    changing.added = depends(Engine)
    Late.link(Cache)

    async def story(kit: TestKit) -> str:
        await kit.start(Engine)
        await kit.start(Late)
        return await kit.client(Late).ask()

    assert on_a_kit(story) == "graph.Engine"


# Names in place of classes ------------------------------------------------------------------


def test_a_class_that_is_defined_later_is_named() -> None:
    assert Processor.__dynbus_dependencies__["router"].actor is Router
    assert Right.__dynbus_dependencies__["middle"].actor is Middle
    assert Processor.__dynbus_dependencies__["router"].node == "Router"


@pytest.mark.parametrize("text", ["", "a b", "Engine:", ":Engine", "a:b:c", "x:Engine ", "a/b:E"])
def test_a_text_that_is_no_name_is_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError, match=r'^depends\(.*\): write "Name" or "module:Name"$'):
        depends(text)


def test_a_missing_actor_is_told_with_the_path_that_leads_there() -> None:
    class Top(Actor, namespace="graph"):
        below = depends(Misspelt)

    with pytest.raises(ConfigError) as refused:
        with_dependencies([Top])

    assert str(refused.value) == (
        "Top -> Misspelt -> Engin: Misspelt.engine = depends('Engin'): there is no 'Engin' in "
        f"{__name__} (did you mean Engine?)"
    )
    with pytest.raises(ConfigError, match="there is no 'on_a_kit' in tests.actors"):
        _ = Misspelt.__dynbus_dependencies__["module"].actor
    with pytest.raises(ConfigError, match="there is no module 'not_installed_anywhere'$"):
        with_dependencies([Processor])


def test_a_module_that_raises_is_the_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "raises_on_import.py").write_text("1 / 0")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    class Top(Actor, namespace="graph"):
        below = depends("raises_on_import:Below")

    with pytest.raises(ConfigError, match="ZeroDivisionError: division by zero") as refused:
        with_dependencies([Top])

    assert isinstance(refused.value.__cause__, ZeroDivisionError)


# Circles ------------------------------------------------------------------------------------


def test_a_circle_is_refused_with_its_whole_path() -> None:
    class Top(Actor, namespace="graph"):
        left = depends(Left)

    with pytest.raises(ConfigError, match="^Left -> Right -> Middle -> Left: actors must not "):
        with_dependencies([Top])


def made(edges: set[tuple[int, int]], links: set[tuple[int, int]]) -> list[type[Actor]]:
    """Classes that depend on each other by number, and are linked."""
    module = sys.modules["made_actors"] = ModuleType("made_actors")
    count = 6
    for number in range(count):
        body: dict[str, Any] = {"__module__": "made_actors"}
        body |= {f"to_{b}": Dependency[Any](f"C{b}", "") for a, b in sorted(edges) if a == number}
        vars(module)[f"C{number}"] = type(f"C{number}", (Actor,), body, namespace="made")
    classes = [vars(module)[f"C{number}"] for number in range(count)]
    for a, b in links & edges:
        classes[a].link(classes[b])
    return classes


PAIRS = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=10)


@given(edges=PAIRS, links=PAIRS)
def test_a_graph_is_put_in_order_unless_it_has_a_circle(
    edges: set[tuple[int, int]], links: set[tuple[int, int]]
) -> None:
    classes = made(edges, links)
    linked = {a for a, _ in links & edges}
    kept = {(a, b) for a, b in edges if a not in linked or (a, b) in links}

    try:
        found = with_dependencies(classes)
    except ConfigError as error:
        path = [int(name[1:]) for name in str(error).partition(":")[0].split(" -> ")]
        assert path[0] == path[-1]
        assert all(pair in kept for pair in zip(path, path[1:], strict=False))
        return
    assert sorted(names(found)) == [f"C{number}" for number in range(6)]
    nodes = [node.actor for node in nodes_of(classes)]
    for a, b in kept:
        assert found.index(classes[b]) < found.index(classes[a])
        assert nodes.index(classes[b]) < nodes.index(classes[a])
        assert dependency_depth(classes[a]) > dependency_depth(classes[b])


# Addresses ----------------------------------------------------------------------------------


def test_every_node_is_in_the_namespace_that_it_is_given() -> None:
    nodes = nodes_of([Router])

    found = addresses_of(dict(zip(nodes, ("one", "two", "three"), strict=True)), {})

    assert list(map(str, found.values())) == ["one.prefill", "two.decode", "three.Router"]


def test_a_node_without_a_namespace_and_two_at_one_address_are_told_with_their_paths() -> None:
    class Homeless(Engine):
        __dynbus_service__ = Actor.__dynbus_service__

    class Top(Actor, namespace="graph"):
        homeless = depends(Homeless)
        engine = depends(Engine, node="Homeless")

    nodes = nodes_of([Top])
    with pytest.raises(ConfigError, match="^Top -> Homeless: Homeless has no namespace: write "):
        addresses_of({node: node.actor.__dynbus_service__.namespace for node in nodes}, {})
    with pytest.raises(ConfigError) as refused:
        addresses_of(dict.fromkeys(nodes, "staging"), {})

    message = str(refused.value)
    assert "Engine have the same address 'staging.Homeless'" in message
    assert message.endswith("(they are needed by Top -> Homeless and Top -> Engine)")
    assert Node.own(Top).edges.keys() == {"homeless", "engine"}
