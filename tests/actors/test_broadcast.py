"""A broadcast calls all instances, each as any call is made, and refuses what has no one result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.conditions import eventually

from dynbus import (
    Actor,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Middleware,
    MiddlewareCall,
    UnknownOutcome,
    context,
    depends,
    handler,
    with_options,
)
from dynbus.testing import Telemetry, TestKit, run


class Engine(Actor, namespace="broadcasts"):
    def __init__(self) -> None:
        self.running = 0

    @handler
    async def load(self, name: str) -> str:
        return f"{name} for {context().metadata.get('tenant')}"

    @handler
    async def wait(self) -> None:
        self.running += 1
        await asyncio.Event().wait()

    @handler(batch=2)
    async def together(self, numbers: list[int]) -> list[int]:
        return [number + 1 for number in numbers]

    @handler
    async def tokens(self) -> AsyncGenerator[str, None]:
        yield "a"

    @handler(durable=True)
    async def job(self) -> int:
        return 1


class Older(Actor, namespace="broadcasts", component="Engine"):
    @handler
    async def tokens(self) -> AsyncGenerator[str, None]:
        yield "a"


class Front(Actor, namespace="broadcasts"):
    engine = depends(Engine)

    @handler
    async def load(self, name: str) -> list[str]:
        answers = await self.engine.broadcast(Engine.load, name)
        return sorted(str(answer) for answer in answers.values())


class Other(Actor, namespace="broadcasts"):
    @handler
    async def load(self, name: str) -> str:
        return name


async def fleet(kit: TestKit) -> Engine:
    """Two engines, `a` and `b`; a client of them."""
    for name in ("a", "b"):
        await kit.start(Engine, instance_id=name)
    return kit.client(Engine)


def test_an_instance_that_dies_meanwhile_gives_that_as_its_error() -> None:
    async def story() -> Any:
        async with TestKit() as kit:
            client = await fleet(kit)
            actors: list[Any] = [one.actor for one in kit.started.values()]
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(with_options(client, timeout=60.0).broadcast.wait())
                await eventually(lambda: [one.running for one in actors] == [1, 1])
                await kit.kill(kit.started["a"])
            return running.result()

    answers = run(story())

    assert {name: type(answer) for name, answer in answers.items()} == {
        "a": UnknownOutcome,
        "b": DeadlineExceeded,
    }


def test_an_instance_that_did_not_answer_a_moment_ago_is_called_all_the_same() -> None:
    async def story() -> list[str]:
        async with TestKit() as kit:
            client = await fleet(kit)
            kit.caller.discovery.suspect(kit.started["a"].name)
            assert kit.caller.instance_ids(Engine) == ["b"]
            return [*await client.broadcast.load("m")]

    assert run(story()) == ["a", "b"]


def test_a_handler_may_be_given_in_place_of_its_name() -> None:
    async def story() -> Any:
        async with TestKit() as kit:
            client = await fleet(kit)
            by_name = await client.broadcast.load("m")
            assert await client.broadcast(Engine.load, name="m") == by_name
            assert await client.broadcast(Engine.together, 1) == {"a": 2, "b": 2}
            return by_name

    assert run(story()) == dict.fromkeys(("a", "b"), "m for None")


def test_the_calls_have_the_metadata_of_the_call_in_which_they_are_made() -> None:
    async def story() -> list[str]:
        async with TestKit() as kit:
            await fleet(kit)
            await kit.start(Front)
            return await kit.client(Front, metadata={"tenant": "t"}).load("m")

    assert run(story()) == ["m for t", "m for t"]


def test_an_instance_of_a_version_without_the_handler_gives_that_as_its_error() -> None:
    async def story() -> Any:
        async with TestKit() as kit:
            client = await fleet(kit)
            await kit.start(Older, instance_id="c")
            return await client.broadcast.load("m")

    answers = run(story())

    assert isinstance(answers["c"], InvalidRequest)
    assert "has no endpoint 'load'" in str(answers["c"])
    assert answers["a"] == answers["b"] == "m for None"


def test_an_operator_cancels_all_calls_of_a_broadcast_by_their_one_id() -> None:
    async def story() -> Any:
        async with TestKit() as kit:
            client = with_options(await fleet(kit), request_id="r1")
            actors: list[Any] = [one.actor for one in kit.started.values()]
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(client.broadcast.wait())
                await eventually(lambda: [one.running for one in actors] == [1, 1])
                operator = await kit.bus.connect()
                operator.publish("broadcasts._cancel", b'{"request_ids": ["r1"]}')
            return running.result()

    assert {name: type(answer) for name, answer in run(story()).items()} == {
        "a": Cancelled,
        "b": Cancelled,
    }


class Guard(Middleware):
    """Refuses one call in its place, or breaks."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.breaks = breaks
        self.calls = 0

    async def before(self, call: MiddlewareCall) -> None:
        self.calls += 1
        if self.breaks:
            raise LookupError("the guard is broken")
        call.metadata["tenant"] = "t"
        if self.calls == 1:
            raise InvalidRequest("one is too many")


def test_each_call_passes_the_middleware_of_the_client() -> None:
    guard = Guard()

    async def story() -> Any:
        async with TestKit() as kit:
            await fleet(kit)
            return await kit.client(Engine, middleware=(guard,)).broadcast.load("m")

    answers = run(story())

    assert guard.calls == 2
    assert sorted(map(str, answers.values())) == ["m for t", "one is too many"]


def test_middleware_that_breaks_ends_the_broadcast_with_its_error() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await fleet(kit)
            client = kit.client(Engine, middleware=(Guard(breaks=True),))
            with pytest.raises(LookupError, match="the guard is broken"):
                await client.broadcast.load("m")

    run(story())


def test_a_broadcast_is_one_span_around_those_of_its_calls() -> None:
    exporter = InMemorySpanExporter()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(tracers, MeterProvider([], shutdown_on_exit=False))

    async def story() -> None:
        async with TestKit(telemetry=telemetry) as kit:
            client = await fleet(kit)
            await kit.start(Older, instance_id="c")
            exporter.clear()
            await client.broadcast.load("m")

    run(story())
    spans = exporter.get_finished_spans()
    [around] = [span for span in spans if span.name == "broadcast broadcasts.Engine.load"]
    sent = [span for span in spans if span.name == "send broadcasts.Engine.load"]

    assert all(span.parent == around.context for span in sent)
    assert len({span.context and span.context.trace_id for span in spans}) == 1
    attributes = dict(around.attributes or {})
    assert len(sent) == attributes["dynbus.broadcast.instances"] == 3
    assert attributes["dynbus.broadcast.errors"] == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokens", "Engine.tokens streams, and a broadcast has one result of each instance"),
        ("job", "Engine.job is durable, and its jobs are done once for all instances"),
        (
            "on_start",
            "Engine.on_start is not a handler; a broadcast has only: load, wait, together",
        ),
    ],
)
def test_what_has_not_one_result_of_each_instance_is_refused(name: str, message: str) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            broadcast = kit.client(Engine).broadcast
            with pytest.raises(AttributeError, match=message):
                getattr(broadcast, name)
            with pytest.raises(ConfigError):
                await broadcast(getattr(Engine, name))

    run(story())


def test_a_misspelt_handler_is_told_with_the_nearest() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            client: Any = kit.client(Engine)
            for place in (client, client.broadcast):
                with pytest.raises(
                    AttributeError, match=r"not a handler \(did you mean load\?\); "
                ):
                    _ = place.laod

    run(story())


def test_a_handler_of_another_class_is_refused_though_its_name_is_the_same() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            broadcast: Any = kit.client(Engine).broadcast
            with pytest.raises(ConfigError, match=r"Other.load.* is no handler of Engine: give "):
                await broadcast(Other.load, "m")

    run(story())


def test_a_request_that_does_not_fit_is_refused_before_any_instance_is_called() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            client: Any = await fleet(kit)
            with pytest.raises(InvalidRequest):
                await client.broadcast.load(1)
            with pytest.raises(TypeError, match="takes one request, 'name'"):
                await client.broadcast.load()

    run(story())


def test_an_instance_cannot_be_chosen_for_a_broadcast() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            client = with_options(await fleet(kit), instance="a")
            with pytest.raises(ConfigError, match="'a' chooses one instance, and a broadcast"):
                await client.broadcast.load("m")

    run(story())


def test_an_actor_itself_says_that_broadcasts_are_of_its_clients() -> None:
    with pytest.raises(AttributeError, match=r"runtime.client\(Engine\).broadcast calls all"):
        _ = Engine().broadcast
