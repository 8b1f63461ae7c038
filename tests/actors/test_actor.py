"""An actor class is checked when it is defined, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from pydantic import BaseModel

from dynbus import Actor, ConfigError, depends, handler
from dynbus.actors.declaring.actor import Dependency, check_startable
from dynbus.actors.declaring.service_args import ServiceArgs


class Prompt(BaseModel):
    text: str


class Base(Actor, namespace="demo", abstract=True):
    @handler
    async def first(self, prompt: Prompt) -> Prompt:
        return prompt

    @handler
    async def second(self, prompt: Prompt) -> AsyncGenerator[Prompt, None]:
        yield prompt


class Splitter(Base):
    @handler(name="third-one")
    async def third(self, prompt: Prompt) -> Prompt:
        return prompt


class Caller(Actor, namespace="demo", component="calling"):
    splitter = depends(Splitter)

    @handler
    async def call(self, prompt: Prompt) -> Prompt:
        return await self.splitter.first(prompt)


def test_the_component_is_the_class_name_unless_it_is_given() -> None:
    assert Splitter.__dynbus_component__ == "Splitter"
    assert Caller.__dynbus_component__ == "calling"


def test_the_namespace_is_inherited() -> None:
    assert Splitter.__dynbus_service__.namespace == "demo"


def test_inherited_handlers_count() -> None:
    assert [spec.name for spec in Splitter.__dynbus_handlers__.values()] == [
        "first",
        "second",
        "third-one",
    ]


def test_an_override_without_the_decorator_is_no_handler() -> None:
    class Quiet(Splitter):
        async def first(self, prompt: Prompt) -> Prompt:
            return prompt

    assert list(Quiet.__dynbus_handlers__) == ["second", "third"]


def test_an_override_of_a_handler_for_some_users_says_whom_it_is_for() -> None:
    class Desk(Actor, namespace="demo"):
        @handler(allow=("billing",))
        async def refund(self) -> str:
            return "refunded"

    with pytest.raises(ConfigError, match=r"Open\.refund would be for everybody, and .*billing"):

        class Open(Desk):  # pyright: ignore[reportUnusedClass]
            @handler
            async def refund(self) -> str:
                return "refunded"

    class Wider(Desk):
        @handler(allow=("*",))
        async def refund(self) -> str:
            return "refunded"

    assert Wider.__dynbus_handlers__["refund"].allow == frozenset({"*"})


def test_a_subclass_of_an_abstract_actor_is_not_abstract() -> None:
    check_startable(Splitter)

    assert not Splitter.__dynbus_abstract__


def test_dependencies_are_inherited() -> None:
    class Other(Caller):
        pass

    assert {name: d.actor for name, d in Other.__dynbus_dependencies__.items()} == {
        "splitter": Splitter
    }


def test_a_dependency_on_the_class_is_its_declaration() -> None:
    declaration = cast(object, Caller.splitter)

    assert isinstance(declaration, Dependency)


def test_an_actor_that_is_not_started_has_no_runtime_no_id_and_no_dependencies() -> None:
    caller = Caller()

    with pytest.raises(RuntimeError) as caught:
        _ = caller.splitter

    assert caller.instance_id == ""
    assert str(caught.value) == "Caller is not started: the bus can be used from on_start on"


def test_an_abstract_actor_cannot_be_started() -> None:
    with pytest.raises(ConfigError) as caught:
        check_startable(Base)

    assert str(caught.value) == "Base is abstract: start a subclass of it"


def test_an_object_in_place_of_its_class_cannot_be_started() -> None:
    with pytest.raises(ConfigError, match="is no class: give Caller, and its arguments by name"):
        check_startable(cast(Any, Caller()))


def test_an_actor_without_a_namespace_cannot_be_started() -> None:
    class Homeless(Actor):
        @handler
        async def first(self, prompt: Prompt) -> Prompt:
            return prompt

    with pytest.raises(ConfigError) as caught:
        check_startable(Homeless)

    assert str(caught.value) == (
        'Homeless has no namespace: write class Homeless(Actor, namespace="...")'
    )


def test_an_actor_without_a_handler_cannot_be_started() -> None:
    class Idle(Actor, namespace="demo"):
        pass

    with pytest.raises(ConfigError) as caught:
        check_startable(Idle)

    assert str(caught.value) == "Idle has no handler: mark a method with @handler"


def test_a_namespace_is_one_token() -> None:
    with pytest.raises(ConfigError) as caught:

        class Dotted(Actor, namespace="a.b"):  # pyright: ignore[reportUnusedClass]
            pass

    assert str(caught.value) == (
        "Dotted: namespace 'a.b' is not a valid name: use 1 to 63 letters, digits, '_' or '-', "
        "beginning with a letter or a digit"
    )


def test_a_component_is_one_token() -> None:
    with pytest.raises(ConfigError, match="component '_ctl' is not a valid name"):

        class Reserved(Actor, namespace="demo", component="_ctl"):  # pyright: ignore[reportUnusedClass]
            pass


def test_two_handlers_cannot_be_one_endpoint() -> None:
    with pytest.raises(ConfigError) as caught:

        class Twice(Base):  # pyright: ignore[reportUnusedClass]
            @handler(name="first")
            async def other(self, prompt: Prompt) -> Prompt:
                return prompt

    assert str(caught.value) == (
        "Twice: first and other are both endpoint 'first': give one of them another name"
    )


@pytest.mark.parametrize("name", ["runtime", "instance_id", "on_start", "_private"])
def test_a_handler_may_not_hide_what_actors_have(name: str) -> None:
    method = Base.__dict__["first"]

    with pytest.raises(ConfigError) as caught:
        type("Hiding", (Actor,), {name: method})

    assert str(caught.value) == (
        f"Hiding.{name}: a handler may not be called {name!r}; names with _ and "
        "broadcast, instance_id, instance_metadata, link, middleware, on_start, on_stop, "
        "report_broken, runtime, worker_index are taken"
    )


def test_a_dependency_may_not_hide_what_actors_have() -> None:
    with pytest.raises(ConfigError) as caught:
        type("Hiding", (Actor,), {"on_stop": depends(Splitter)})

    assert str(caught.value) == (
        "Hiding.on_stop: a dependency may not be called 'on_stop'; names with _ and "
        "broadcast, instance_id, instance_metadata, link, middleware, on_start, on_stop, "
        "report_broken, runtime, worker_index are taken"
    )


@pytest.mark.parametrize("thing", [Prompt, 3, None])
def test_depends_takes_an_actor_class_only(thing: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        depends(thing)

    assert str(caught.value) == f"depends({thing!r}): give an Actor class"


# How it is served ---------------------------------------------------------------------------


def test_what_a_class_says_of_its_service_is_inherited_key_by_key() -> None:
    class Below(Actor, namespace="demo", workers=3, on_crash="stop"): ...

    class Above(Below, workers=2, enabled=False): ...

    assert Above.__dynbus_service__ == ServiceArgs(
        namespace="demo", workers=2, on_crash="stop", enabled=False
    )
    assert Below.__dynbus_service__.enabled


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": -1}, "Odd: workers = -1 must be a number of instances from 0 to 1024"),
        ({"workers": True}, "Odd: workers = True must be a number of instances from 0 to 1024"),
        ({"workers": "2"}, "Odd: workers = '2' must be a number of instances from 0 to 1024"),
        ({"enabled": 1}, "Odd: enabled = 1: write true or false"),
        ({"on_crash": "halt"}, "Odd: on_crash = 'halt': write restart, stop or escalate"),
    ],
)
def test_what_a_class_cannot_say_of_its_service_is_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        type("Odd", (Actor,), {}, namespace="demo", **given)

    assert str(caught.value) == message
