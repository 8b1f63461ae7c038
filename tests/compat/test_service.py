"""A class with `@service` is an actor class, whose methods other services call."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.compat.services import Caller, Early, Later, Plainly, Prompt, Tools, Words
from tests.story import on_a_kit

from dynbus import Actor, ConfigError, InvalidRequest, NoInstances, call_options, handler
from dynbus.actors.runtime import ActorInstance
from dynbus.bus.nats.server_process import RunningServer
from dynbus.compat.runtime import DistributedRuntime
from dynbus.compat.sdk import (
    async_on_shutdown,
    async_on_start,
    depends,
    dynamo_context,
    dynamo_endpoint,
    get_runtime,
    service,
)
from dynbus.testing import TestKit


async def start(kit: TestKit, chosen: Any, **arguments: Any) -> ActorInstance:
    return await kit.start(cast("type[Actor]", chosen), **arguments)


def test_services_call_each_other_with_and_without_annotations() -> None:
    async def story(kit: TestKit) -> None:
        await start(kit, Words, prefix="-")
        await start(kit, Caller)

        found = await kit.client(cast(Any, Caller)).call(Prompt(text="a b"))

        assert found == {
            "count": 2,
            "given": {"text": "a b"},
            "words": ["-a", "-b"],
            "loud": ["A B"],
            "relayed": ["-a", "-b"],
            "nothing": [],
        }

    on_a_kit(story)


def test_a_request_may_be_the_json_text_of_the_model_that_it_is() -> None:
    async def story(kit: TestKit) -> None:
        await start(kit, Words)
        client = kit.client(cast(Any, Words))
        prompt = Prompt(text="a b")

        found = [item async for item in client.split(prompt.model_dump_json())]

        assert found == [Prompt(text="a"), Prompt(text="b")]
        with pytest.raises(InvalidRequest, match="not JSON"):
            [item async for item in client.split("{not JSON")]
        with pytest.raises(InvalidRequest, match="text"):
            [item async for item in client.split('{"texts": "a"}')]
        # Without an annotation a text is a text.
        assert (await client.count({"text": "a"}))["count"] == 1

    on_a_kit(story)


def test_hooks_run_in_their_order_and_a_method_that_is_none_does_not() -> None:
    async def story(kit: TestKit) -> None:
        instance = await start(kit, Caller)
        await instance.stop()

        log = cast(Any, instance.actor).log
        assert log == ["made in demo", "first", "second", "third", "fourth"]

    on_a_kit(story)


def test_the_code_of_a_service_knows_where_it_runs() -> None:
    async def story(kit: TestKit) -> None:
        await start(kit, Words)
        for instance_id in ("one", "two"):
            await start(kit, Caller, instance_id=instance_id)
        client = await kit.caller.endpoint("demo.Caller.where").client()

        for instance_id in ("one", "two"):
            found = await client.direct({}, instance_id)

            assert found.same
            assert found.name == ("demo", "Caller", instance_id)
            assert found.thread == instance_id
            assert sorted(found.known) == ["one", "two"]
            assert found.asked.count == 2
            assert found.address == ("demo", "Words")
        assert dict(dynamo_context) == {}
        with pytest.raises(KeyError, match="only known inside a service"):
            _ = dynamo_context["runtime"]

    on_a_kit(story)


def test_a_service_is_an_actor_class_of_the_same_module_and_name() -> None:
    made = cast("type[Actor]", Words)

    assert issubclass(made, Actor)
    assert issubclass(made, Tools)
    assert (made.__module__, made.__qualname__) == ("tests.compat.services", "Words")
    assert made.__doc__ == "Words of a text."
    assert made.__dynbus_service__.workers == 2
    assert made.__dynbus_service__.namespace == "demo"


@service(dynamo={"enabled": False})
class Beside:
    words = depends(Words)

    def __init__(self) -> None:
        self.log = ["made"]

    @async_on_start
    async def start(self) -> None:
        self.log.append("started")

    @dynamo_endpoint()
    async def call(self, request: Any) -> str:
        return "called"


def test_a_service_that_is_not_enabled_is_made_and_started_and_not_found() -> None:
    async def story(kit: TestKit) -> None:
        instance = await start(kit, Beside)

        assert cast(Any, instance.actor).log == ["made", "started"]
        with call_options(wait=0.0), pytest.raises(NoInstances):
            await kit.client(cast(Any, Beside)).call({})
        with pytest.raises(ConfigError, match="Beside is not enabled, and so has no address"):
            cast(Any, Beside).dynamo_address()

    on_a_kit(story)


@service
class Silent:
    def __init__(self) -> None:
        self.made = True


def test_a_service_without_an_endpoint_is_kept_and_has_the_namespace_default() -> None:
    async def story(kit: TestKit) -> None:
        instance = await start(kit, Silent)

        assert kit.caller.instance_ids("default", "Silent") == [instance.id]
        await instance.stop()

    on_a_kit(story)


def test_all_hooks_of_a_shutdown_run_and_what_they_raise_is_told() -> None:
    ran: list[int] = []

    @service(dynamo={"namespace": "demo"})
    class Failing:
        @async_on_shutdown
        async def first(self) -> None:
            ran.append(1)
            raise ValueError("one")

        @async_on_shutdown
        async def second(self) -> None:
            ran.append(2)
            raise ValueError("two")

    async def story(kit: TestKit) -> None:
        instance = await start(kit, Failing)
        with pytest.raises(ExceptionGroup) as caught:
            await instance.stop()

        assert list(map(str, caught.value.exceptions)) == ["one", "two"]

    on_a_kit(story)
    assert ran == [1, 2]


class Other(Actor, namespace="demo"):
    @handler
    async def ask(self, prompt: Prompt) -> Prompt:
        return prompt


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (
            lambda: service(dynamo={"namespaces": "a"})(Tools),
            "Tools: dynamo has no 'namespaces' (did you mean namespace?): there are "
            "enabled, namespace, name",
        ),
        (
            lambda: service(dynamo=cast(Any, "prod"))(Tools),
            "Tools: dynamo = 'prod': give a dict",
        ),
        (
            lambda: service(dynamo={"namespace": "a.b"})(Tools),
            "Tools: namespace 'a.b' is not a",
        ),
        (
            lambda: service(dynamo={"enabled": "no"})(Tools),
            "Tools: enabled = 'no': write true or",
        ),
        (
            lambda: service(workers=-1)(Tools),
            "Tools: workers = -1 must be a number of instances",
        ),
        (lambda: service(cast(Any, Other)), "Other is an actor already"),
        (lambda: service(Words), "Words is an actor already"),
        (lambda: service(cast(Any, 3)), "service() decorates a class, and 3 is none"),
        (lambda: depends(cast(Any, 3)), "depends(3): give"),
        (lambda: dynamo_endpoint(cast(Any, 3)), "3 is no method: write @dynamo_endpoint()"),
        (lambda: async_on_start(cast(Any, 3)), "3 is no method: write the hook's decorator"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_to_do(declare: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        declare()

    assert str(caught.value).startswith(message)


def test_a_method_that_is_not_async_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not async"):

        @service
        class Blocking:  # pyright: ignore[reportUnusedClass]
            @dynamo_endpoint()
            def call(self, request: Prompt) -> str:
                return request.text


def test_a_dependency_may_be_decorated_later() -> None:
    async def story(kit: TestKit) -> None:
        for one in (Later, Early, Plainly):
            await start(kit, one)

        assert await kit.client(cast(Any, Plainly)).ask(Prompt(text="a")) == "a!"
        found = [item async for item in kit.client(cast(Any, Early)).ask(Prompt(text="b"))]
        assert found == ["b!"]

    on_a_kit(story)


def test_a_program_without_a_service_gets_a_runtime_that_ends_with_its_loop(
    nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_URL", nats_server.url)
    known: list[DistributedRuntime] = []

    async def program() -> bool:
        known.append(await get_runtime())
        return await get_runtime() is known[0]

    assert asyncio.run(program())
    assert "closed" in repr(known[0].runtime)
