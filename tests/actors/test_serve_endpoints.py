"""Functions and bound methods are served without an actor class, like any instance."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from pydantic import BaseModel
from tests.conditions import PATIENCE, eventually
from tests.story import on_a_kit

from dynbus import (
    Actor,
    ConfigError,
    Context,
    Draining,
    InvalidRequest,
    NoInstances,
    Runtime,
    every,
    handler,
)
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import InstanceName
from dynbus.testing import TestKit, run

nats: Any = importlib.import_module("nats")  # its annotations do not satisfy strict checks


class Prompt(BaseModel):
    text: str


async def shout(prompt: Prompt) -> str:
    return prompt.text.upper()


async def words(prompt: Prompt, context: Context | None = None) -> AsyncGenerator[str, None]:
    assert context is not None
    for word in prompt.text.split():
        yield f"{word} {context.metadata.get('tone', '')}".strip()


async def ping() -> str:
    return "pong"


@handler(concurrency=1, timeout=0.5)
async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


class Counter:
    def __init__(self) -> None:
        self.count = 0

    @handler(name="unused", timeout=2.0)
    async def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    async def read(self) -> int:
        return self.count


class Shouter(Actor, namespace="alone"):
    """What a typed client of the endpoints is made from."""

    @handler
    async def shout(self, prompt: Prompt) -> str:
        raise NotImplementedError

    @handler
    async def words(self, prompt: Prompt) -> AsyncGenerator[str, None]:
        yield ""


@pytest.mark.anyio
async def test_functions_are_called_by_typed_and_untyped_clients(
    nats_server: RunningServer,
) -> None:
    async with Runtime.connect(nats_server.url) as runtime, Runtime.connect(nats_server.url) as far:
        endpoints = {"shout": shout, "words": words, "ping": ping}
        async with runtime.serve_endpoints(
            "alone", "Shouter", endpoints, metadata={"model": "tiny"}
        ) as instance:
            client = far.client(Shouter, wait=PATIENCE, metadata={"tone": "loud"})
            assert await client.shout(Prompt(text="hello")) == "HELLO"
            assert [one async for one in client.words(Prompt(text="a b"))] == ["a loud", "b loud"]
            untyped = await far.endpoint("alone.Shouter.ping").client()
            assert await untyped.wait_for_instances(PATIENCE) == [instance.id]
            assert await untyped.generate() == "pong"
            found = far.discovery.view.find(InstanceName("alone", "Shouter", instance.id))
            assert found is not None
            assert found.metadata == {"model": "tiny"}
            plain_client = await nats.connect(nats_server.url)
            info = await plain_client.request(f"$SRV.INFO.alone_Shouter.{instance.id}", timeout=60)
            reply = await plain_client.request("alone.Shouter.ping", timeout=60)
            await plain_client.close()
            assert b'"ping"' in info.data
            assert reply.data == b'"pong"'
        # Whoever calls before it hears of the end is told that the instance is gone.
        await eventually(lambda: far.instance_ids("alone", "Shouter") == [])
        with pytest.raises(NoInstances):
            await far.client(Shouter).shout(Prompt(text="late"))


def test_methods_of_any_object_are_served_with_the_options_of_handler() -> None:
    async def story(kit: TestKit) -> None:
        runtime, counter = await kit.runtime(), Counter()
        endpoints = {"add": counter.add, "read": counter.read}
        async with runtime.serve_endpoints("alone", "counter", endpoints) as instance:
            add = await kit.caller.endpoint("alone.counter.add").client(wait=5.0)
            read = await kit.caller.endpoint("alone.counter.read").client()

            assert await add.generate(2) == 2
            assert await read.generate() == 2
            assert instance.server.served["add"].endpoint.timeout == 2.0
            with pytest.raises(InvalidRequest):
                await add.generate("many")

    on_a_kit(story)


def test_a_function_keeps_the_options_that_handler_gives_it() -> None:
    async def story(kit: TestKit) -> tuple[Any, Any]:
        runtime = await kit.runtime()
        async with runtime.serve_endpoints("alone", "slow", {"slow": slow}) as instance:
            endpoint = instance.server.served["slow"].endpoint
            return endpoint.concurrency, endpoint.timeout

    assert on_a_kit(story) == (1, 0.5)


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"model": 1}, "metadata has 'model'=1: keys and values must be strings"),
        ({"model": "x" * 4096}, "metadata has 1 keys and 4101 bytes; at most 32 and 4096 are"),
        (["model"], "metadata = ['model']: give a dict of strings"),
    ],
)
def test_metadata_that_cannot_be_announced_is_named_as_it_was_given(
    metadata: Any, text: str
) -> None:
    async def story(kit: TestKit) -> None:
        serving = kit.caller.serve_endpoints("alone", "p", {"ping": ping}, metadata=metadata)
        with pytest.raises(ConfigError, match=re.escape(text)):
            await serving.__aenter__()

    on_a_kit(story)


def test_calls_that_run_are_finished_at_the_end_of_the_block() -> None:

    async def story() -> str:
        started = asyncio.Event()

        async def work() -> str:
            started.set()
            await asyncio.sleep(1.0)
            return "finished"

        async with TestKit() as kit:
            runtime = await kit.runtime()
            async with runtime.serve_endpoints("alone", "work", {"work": work}):
                client = await kit.caller.endpoint("alone.work.work").client(wait=5.0)
                call = asyncio.ensure_future(_result(client.generate()))
                await started.wait()
            return await call

    assert run(story()) == "finished"


def test_one_that_is_reported_broken_leaves_the_bus_and_ends_its_calls() -> None:
    async def story() -> str:
        started = asyncio.Event()

        async def hang() -> str:
            started.set()
            await asyncio.sleep(3600)
            return ""

        async with TestKit() as kit:
            runtime = await kit.runtime()
            async with runtime.serve_endpoints("alone", "hang", {"hang": hang}) as instance:
                client = await kit.caller.endpoint("alone.hang.hang").client(wait=5.0)
                call = asyncio.ensure_future(_result(client.generate()))
                await started.wait()
                instance.report_broken("its engine died")
                with pytest.raises(Draining, match="its engine died"):
                    await call
                await instance.stopped.wait()
                return instance.broken

    assert run(story()) == "its engine died"


async def _result(call: Any) -> str:
    return str(await call)


def plain(prompt: Prompt) -> str:
    return prompt.text


async def untyped_request(prompt) -> str:  # type: ignore[no-untyped-def]  # pyright: ignore
    return str(prompt)  # pyright: ignore[reportUnknownArgumentType]


async def two_requests(one: int, other: int) -> int:
    return one + other


async def job() -> int:
    return 1


async def tick() -> int:
    return 1


# Type checkers refuse them for functions that are no methods.
durable: Any = handler(durable=True)
hourly: Any = every("1h")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "there is no endpoint to serve"),
    ({"a.b": ping}, "endpoint 'a.b' is not a valid name"),
    ({"plain": plain}, "plain is not async"),
    ({"number": 3}, "endpoint 'number': 3 is no function"),
    ({"untyped": untyped_request}, "untyped_request: annotate 'prompt'"),
    ({"two": two_requests}, "two_requests takes 2 requests"),
    ({"job": durable(job)}, "endpoint 'job' is durable, .* put it into a class"),
    ({"tick": hourly(tick)}, "endpoint 'tick' is durable, .* put it into a class"),
]


@pytest.mark.parametrize(("endpoints", "text"), REFUSED)
def test_what_cannot_be_served_is_refused_with_the_remedy(
    endpoints: dict[str, Any], text: str
) -> None:
    async def story(kit: TestKit) -> None:
        with pytest.raises(ConfigError, match=text):
            async with kit.caller.serve_endpoints("alone", "wrong", endpoints):
                pass
        assert kit.caller.instances == {}

    on_a_kit(story)


@pytest.mark.parametrize(
    ("namespace", "component", "instance_id"),
    [("a b", "one", ""), ("alone", "a.b", ""), ("alone", "one", "no id")],
)
def test_a_name_that_is_no_token_is_refused(
    namespace: str, component: str, instance_id: str
) -> None:
    async def story(kit: TestKit) -> None:
        with pytest.raises(ConfigError, match="is not a valid name"):
            async with kit.caller.serve_endpoints(
                namespace, component, {"ping": ping}, instance_id=instance_id
            ):
                pass

    on_a_kit(story)
