"""The `RouterActor` actor forwards by the same code, and tells what it decided."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from msgspec import Raw
from pydantic import BaseModel

from dynbus import (
    Actor,
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    InvalidRequest,
    call_options,
    handler,
)
from dynbus.actors.declaring.arguments import Text, build_arguments
from dynbus.bus.clock import monotonic
from dynbus.bus.transport import Message
from dynbus.kvrouter import DecisionQuery, PolicyChoice, RequestFields, RouterActor
from dynbus.kvrouter.routing import PolicyReport
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


class Front(RouterActor, namespace="llm"):
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
    async def story() -> PolicyReport:
        async with TestKit() as kit:
            await kit.start(Engine, name="a")
            await kit.start(Front, target="llm.Engine.generate", exact=False, policies=["dynamo"])
            front = kit.client(Front)
            assert (await front.policy()).policy == "kv"
            with pytest.raises(DynbusError, match=r"'os:system' is not one .*: dynamo, kv"):
                await front.use_policy(PolicyChoice(policy="os:system"))
            await front.use_policy(PolicyChoice(policy="dynamo"))
            return await front.policy()

    assert run(story()) == PolicyReport(policy="dynamo", policies=["dynamo", "kv"])


def test_a_router_does_not_start_for_engines_that_do_not_fit_together() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Engine, name="a")
            await kit.start(Engine, name="b", block_size=32)
            with pytest.raises(ConfigError, match="block sizes differ"):
                await kit.start(Front, target="llm.Engine.generate", exact=False)

    run(story())


class Steps(Actor, namespace="llm", component="Engine"):
    """Gives all its streams an item at once, as large as each of them asks for."""

    def __init__(self) -> None:
        self.step = asyncio.Event()
        self.begun = 0

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": "16"}

    @handler
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self.begun += 1
        await self.step.wait()
        yield {"text": "x" * request["size"]}
        yield {"text": "end"}


def test_an_item_that_one_reader_cannot_take_ends_no_other_stream() -> None:
    async def story() -> tuple[list[str], bytes]:
        async with TestKit() as kit:
            engine = (await kit.start(Steps)).actor
            assert isinstance(engine, Steps)
            await kit.start(Front, target="llm.Engine.generate", exact=False)
            plain = await kit.bus.connect()
            answers: asyncio.Queue[Message] = asyncio.Queue()
            plain.subscribe("_INBOX.plain", answers.put_nowait)
            large = json.dumps({**REQUEST, "size": plain.max_payload}).encode()
            small = kit.client(Front).generate({**REQUEST, "size": 1})
            plain.publish("llm.Front.generate", large, reply="_INBOX.plain")
            reading = asyncio.ensure_future(anext(small))
            async with asyncio.timeout(60.0):
                while engine.begun < 2:  # noqa: ASYNC110 - it is of another process
                    await asyncio.sleep(0.01)
            engine.step.set()
            texts = [(await reading)["text"], *[item["text"] async for item in small]]
            return texts, (await answers.get()).headers

    texts, headers = run(story())

    assert texts == ["x", "end"]
    assert b"PayloadTooLarge" in headers


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


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora": "requier"}, "'prefer' or 'require'"),
        ({"block_size": 0}, "block_size=0: give a whole number of tokens, at least 1, or None"),
        ({"queue_limit": 0}, "queue_limit=0: give"),
        ({"fields": {"token_id": "ids"}}, "token_id"),
        ({"policy": "fastest"}, "policy 'fastest' is unknown"),
        ({"target": "llm.Engine"}, "llm.Engine"),
        ({"migration_limit": -1}, "migration_limit=-1: give a whole number"),
    ],
)
def test_a_setting_that_makes_no_sense_keeps_a_router_from_starting(
    settings: dict[str, Any], told: str
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            given: dict[str, Any] = {"target": "llm.Engine.generate", "exact": False}
            with pytest.raises(ConfigError, match=told):
                await kit.start(Front, **given | settings)

    run(story())


def test_the_settings_of_a_router_can_be_given_as_text() -> None:
    options = {
        "target": "llm.Engine.generate",
        "shadows": "dynamo, kv",
        "policies": '["dynamo"]',
        "fields": '{"token_ids": "prompt.ids"}',
        "block_size": "16",
        "queue_limit": "7",
        "migration_limit": "5",
        "approximate_ttl": "2.5",
    }

    arguments = build_arguments(Front, {name: Text(value) for name, value in options.items()})

    assert arguments["shadows"] == ["dynamo", "kv"]
    assert arguments["policies"] == ["dynamo"]
    assert arguments["fields"] == RequestFields(token_ids="prompt.ids")
    assert (arguments["block_size"], arguments["queue_limit"]) == (16, 7)
    assert arguments["migration_limit"] == 5
    assert Front(**arguments)


def test_the_fields_of_a_request_are_found_where_the_settings_say() -> None:
    class Nested(Actor, namespace="llm"):
        def instance_metadata(self) -> Mapping[str, str]:
            return {"kv_block_size": "16"}

        @handler
        async def generate(self, prompt: dict[str, Any]) -> AsyncGenerator[str, None]:
            yield "an item"

    async def story() -> int:
        async with TestKit() as kit:
            await kit.start(Nested)
            await kit.start(
                Front, target="llm.Nested.generate", exact=False, fields={"token_ids": "prompt.ids"}
            )
            front = kit.client(Front)
            with call_options(request_id="asked"):
                async for _ in front.generate({"prompt": {"ids": list(range(40))}}):
                    pass
            (decision,) = await front.decisions(DecisionQuery(request_id="asked"))
            return int(decision["prompt_tokens"])

    assert run(story()) == 40


class Busy(Engine, namespace="llm", component="Busy"):
    """Yields its first item when the test says so, and a prompt fills it."""

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": "16", "kv_max_batched_tokens": "16"}

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(name)
        self.seconds = seconds

    @handler(idle_timeout=None)
    async def generate(self, prompt: Prompt) -> AsyncGenerator[dict[str, Any], None]:
        await asyncio.sleep(self.seconds)
        yield {"name": self.name}


async def busy_front(kit: TestKit, seconds: float) -> Front:
    """A Front whose only engine computes one prompt at a time, each for so long."""
    await kit.start(Busy, name="a", seconds=seconds)
    await kit.start(Front, target="llm.Busy.generate", exact=False, queue_threshold=1.0)
    return kit.client(Front)


async def names(front: Front) -> list[str]:
    return [item["name"] async for item in front.generate(REQUEST)]


def test_a_call_may_wait_in_the_queue_for_as_long_as_its_caller_does() -> None:
    async def story() -> tuple[list[list[str]], float]:
        async with TestKit() as kit:
            front = await busy_front(kit, 100.0)
            begun = monotonic()
            found = await asyncio.gather(*(names(front) for _ in range(3)))
            return found, monotonic() - begun

    found, took = run(story())

    assert found == [["a"]] * 3
    assert took > 199.0


def test_a_call_whose_deadline_passes_in_the_queue_says_that_it_waited_there() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            front = await busy_front(kit, 100.0)
            first = asyncio.create_task(names(front))
            await asyncio.sleep(1.0)
            with call_options(timeout=40.0), pytest.raises(DeadlineExceeded) as caught:
                await names(front)
            await first
            return str(caught.value)

    assert "waited 40 s in the router's queue until its deadline: all instances" in run(story())


def test_an_error_after_a_time_in_the_queue_tells_of_it() -> None:
    class Failing(Busy, namespace="llm", component="Failing"):
        @handler
        async def generate(self, prompt: Prompt) -> AsyncGenerator[dict[str, Any], None]:
            await asyncio.sleep(self.seconds)
            raise ValueError("no memory")
            yield {}

    async def story() -> list[str]:
        async with TestKit() as kit:
            await kit.start(Failing, name="a", seconds=5.0)
            await kit.start(Front, target="llm.Failing.generate", exact=False, queue_threshold=1.0)
            front = kit.client(Front)
            calls = [asyncio.create_task(names(front)) for _ in range(2)]
            return [str(error) for error in await asyncio.gather(*calls, return_exceptions=True)]

    told = sorted(run(story()), key=len)

    assert all("no memory" in text for text in told)
    assert "queue" not in told[0]
    assert "before, it waited 5 s in the router's queue" in told[1]


def test_a_router_of_an_endpoint_that_answers_once_gives_that_answer() -> None:
    class Single(Actor, namespace="llm"):
        def instance_metadata(self) -> Mapping[str, str]:
            return {"kv_block_size": "16"}

        @handler
        async def generate(self, prompt: Prompt) -> dict[str, str]:
            return {"name": "a"}

    async def story() -> list[Any]:
        async with TestKit() as kit:
            await kit.start(Single)
            await kit.start(Front, target="llm.Single.generate", exact=False)
            return [item async for item in kit.client(Front).generate(REQUEST)]

    assert run(story()) == [{"name": "a"}]


class Odd(Actor, namespace="llm", component="Odd"):
    """Tells its request as it came, and writes JSON as nobody else would."""

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": "16"}

    @handler
    async def generate(self, prompt: Raw) -> AsyncGenerator[Raw, None]:
        yield prompt
        yield Raw(b'{ "a":1.50 }')


async def odd_front(kit: TestKit, front: type[RouterActor] = Front) -> Any:
    await kit.start(Odd)
    await kit.start(front, target="llm.Odd.generate", exact=False)
    return await kit.caller.endpoint(f"llm.{front.__name__}.generate").client()


def test_a_request_and_its_items_pass_as_the_bytes_that_came() -> None:
    body = b'{"token_ids" : [1,2], "extra":1e2}'

    async def story() -> list[bytes]:
        async with TestKit() as kit:
            client = await odd_front(kit)
            return [item async for item in client.generate(body).raw()]

    assert run(story()) == [body, b'{ "a":1.50 }']


@pytest.mark.parametrize(
    ("body", "told"),
    [(b"", "dict"), (b"{", "is not JSON"), (b"[1]", "no 'token_ids'"), (b"null", "no 'token_ids'")],
)
def test_a_request_that_cannot_be_read_is_refused(body: bytes, told: str) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            client = await odd_front(kit)
            with pytest.raises(InvalidRequest, match=told):
                await anext(aiter(client.generate(body)))

    run(story())


class Counting(RouterActor, namespace="llm"):
    """Adds something of its own to what the engine gives."""

    @handler
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Any, None]:
        number = 0
        async for item in super().generate(request):
            number += 1
            yield item
        yield {"items": number}


def test_a_subclass_may_look_into_what_passes() -> None:
    async def story() -> list[Any]:
        async with TestKit() as kit:
            client = await odd_front(kit, Counting)
            return [dict(item) async for item in client.generate({"token_ids": [1]})]

    assert run(story()) == [{"token_ids": (1,)}, {"a": 1.5}, {"items": 2}]


class Flood(Actor, namespace="llm", component="Flood"):
    """Gives more than its reader has room for."""

    def __init__(self) -> None:
        self.given = 0

    def instance_metadata(self) -> Mapping[str, str]:
        return {"kv_block_size": "16"}

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[dict[str, Any], None]:
        for number in range(100):
            self.given = number
            yield {"number": number, "text": "x" * 60_000}


async def flooded(kit: TestKit) -> tuple[Flood, Any]:
    """An engine that was stopped by a caller who took one item and no more, and the stream."""
    engine = (await kit.start(Flood)).actor
    assert isinstance(engine, Flood)
    await kit.start(Front, target="llm.Flood.generate", exact=False)
    stream = kit.client(Front).generate(REQUEST)
    assert (await anext(stream))["number"] == 0
    before = -1
    while before != engine.given:
        before = engine.given
        await asyncio.sleep(1.0)
    return engine, stream


def test_an_engine_waits_for_a_caller_that_reads_slowly_and_nothing_is_lost() -> None:
    async def story() -> tuple[int, list[int]]:
        async with TestKit() as kit:
            engine, stream = await flooded(kit)
            return engine.given, [item["number"] async for item in stream]

    given, numbers = run(story())

    assert given < 60
    assert numbers == list(range(1, 100))


def test_a_caller_that_leaves_while_items_wait_for_it_ends_the_engines_work() -> None:
    async def story() -> int:
        async with TestKit() as kit:
            engine, stream = await flooded(kit)
            await stream.aclose()
            await asyncio.sleep(1.0)
            return engine.given

    assert run(story()) < 60
