"""Models as dependencies: what a handler asks a model, and how its call reaches the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel
from tests.conditions import eventually

from dynbus import (
    Actor,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    InvalidRequest,
    InvalidResponse,
    Overloaded,
    StreamLost,
    call_options,
    context,
    depends,
    handler,
)
from dynbus.llm import FakeModel, Model, ModelWorker, tool_call
from dynbus.testing import Telemetry, TestKit

pytestmark = pytest.mark.anyio


class Verdict(BaseModel):
    fine: bool


class OrderId(BaseModel):
    """Which order."""

    number: int


class Orders(Actor, namespace="shop"):
    """Orders of a shop."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.ids: list[str] = []

    @handler
    async def find(self, order: OrderId) -> dict[str, Any]:
        """Find an order."""
        self.asked.append(order.number)
        self.ids.append(context().id)
        if order.number == 13:
            raise InvalidRequest("there is no order 13")
        return {"number": order.number, "state": "sent"}

    @handler
    async def say(self, text: str) -> str:
        """Say a word."""
        return text.upper()

    @handler
    async def many(self) -> AsyncGenerator[int, None]:
        """No tool."""
        yield 1

    @handler
    async def broken(self) -> str:
        """Fails."""
        raise ValueError("a secret of the shop")


class Desk(Actor, namespace="shop"):
    """Asks a model for its callers."""

    model = depends(Model("qwen"))
    orders = depends(Orders)

    @handler
    async def ask(self, question: str) -> str:
        return (await self.model.chat(question)).text

    @handler
    async def words(self, question: str) -> AsyncGenerator[str, None]:
        async for chunk in self.model.stream(question):
            if chunk.text:
                yield chunk.text

    @handler
    async def first_word(self, question: str) -> str:
        async for chunk in self.model.stream(question):
            return chunk.text
        return ""

    @handler
    async def agent(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        answer = await self.model.converse(messages, tools=[Orders.find, self.orders.say], turns=4)
        return answer.text


class Seen(FakeModel):
    """Remembers the contexts of its calls."""

    def __init__(self, model: str, answers: Any = (), pause: float = 0.0) -> None:
        super().__init__(model, answers, pause)
        self.contexts: list[Any] = []

    @handler(concurrency=None, idle_timeout=None)
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self.contexts.append(context())
        async for chunk in super().generate(request):
            yield chunk


async def test_a_handler_chats_streams_completes_and_embeds() -> None:
    async with TestKit() as kit:
        fake = await FakeModel.start(kit, "qwen", ["Hello you", "one two three", "and so on"])
        await kit.start(Desk)
        desk = kit.client(Desk)
        answer = await desk.ask("hi")
        words = [word async for word in desk.words("count")]
        model = Model("qwen").client(kit.caller)
        text = await model.complete("Once", max_tokens=5)
        embedded = await model.embed(["a", "b", "a"])

    assert answer == "Hello you"
    assert words == ["one ", "two ", "three"]
    assert text.text == "and so on"
    assert embedded.vectors[0] == embedded.vectors[2] != embedded.vectors[1]
    assert fake.requests[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert fake.requests[2]["max_tokens"] == 5


async def test_id_metadata_priority_and_tenant_of_the_call_reach_the_engine() -> None:
    async with TestKit() as kit:
        fake = await Seen.start(kit, "qwen", ["yes"])
        await kit.start(Desk)
        options = call_options(
            request_id="mine", priority=7, metadata={"tenant": "acme"}, timeout=30.0
        )
        with options:
            await kit.client(Desk).ask("hi")

    (seen,) = fake.contexts
    assert (seen.id, seen.priority, seen.tenant) == ("mine", 7, "acme")
    assert seen.deadline is not None
    assert fake.requests[0]["priority"] == 7


class Misnaming(FakeModel):
    """Gives a whole answer that calls itself a chunk."""

    @handler(concurrency=None, idle_timeout=None)
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        message = {"content": "Yes."}
        yield {"object": "chat.completion.chunk", "choices": [{"index": 0, "message": message}]}


async def test_an_answer_that_cannot_be_read_is_told_with_the_actor_that_gave_it() -> None:
    async with TestKit() as kit:
        await Misnaming.start(kit, "qwen")

        with pytest.raises(InvalidResponse, match="`delta`") as raised:
            await Model("qwen").client(kit.caller).chat("hi")

    assert ".generate@" in raised.value.hop


class Engine(ModelWorker, namespace="shop"):
    """A mock of an engine that takes tokens, with the text of a model."""


class Counter(Actor, namespace="shop"):
    """Tells how much of a prompt was in the engine's cache."""

    model = depends(Model("mock"))

    @handler
    async def cached(self, question: str) -> int:
        usage = (await self.model.chat(question, max_tokens=2)).usage
        assert usage is not None
        return int((usage.prompt_tokens_details or {})["cached_tokens"])


async def test_tenants_share_no_cached_blocks() -> None:
    async with TestKit() as kit:
        await kit.start(Engine, engine="mock")
        await kit.start(Counter)
        counter, question = kit.client(Counter), "Tell me of the sea. " * 40
        cached: list[bool] = []
        for tenant in ("acme", "acme", "other", ""):
            with call_options(metadata={"tenant": tenant} if tenant else {}):
                cached.append(await counter.cached(question) > 0)
        # Also where the asker itself says whose request it is.
        with call_options(metadata={"tenant": "acme"}):
            model = Model("mock").client(kit.caller)
            usage = (await model.chat(question, max_tokens=2)).usage

    assert cached == [False, True, False, False]
    assert usage is not None
    assert (usage.prompt_tokens_details or {})["cached_tokens"] > 0


async def test_streams_go_on_at_another_engine_when_theirs_is_killed() -> None:
    async with TestKit() as kit:
        engines = [await kit.start(Engine, engine="mock") for _ in range(2)]
        model = Model("mock").client(kit.caller)

        async def count(question: str) -> int:
            stream = model.stream(question, max_tokens=200, ignore_eos=True)
            async for _ in stream:
                begun.add(question)
            usage = (await stream.answer()).usage
            assert usage is not None
            return usage.completion_tokens

        begun: set[str] = set()
        questions = [f"{number} Tell me of the sea." for number in range(6)]
        asked = [asyncio.ensure_future(count(question)) for question in questions]
        await eventually(lambda: len(begun) == len(questions))
        loads = [one.server.execution.load for one in engines]
        await kit.kill(engines[0])
        counts = await asyncio.gather(*asked)

    assert loads[0] > 0
    assert counts == [200] * len(questions)


class Slow(FakeModel, abstract=True):
    """Counts the words that it has said."""

    said = 0

    async def words(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        async for chunk in FakeModel.generate(self, request):
            self.said += 1
            yield chunk


class Repeated(Slow):
    @handler(concurrency=None, idempotent=True)
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        async for chunk in self.words(request):
            yield chunk


class Once(Slow):
    @handler(concurrency=None)
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        async for chunk in self.words(request):
            yield chunk


@pytest.mark.parametrize("engine", [Repeated, Once])
async def test_a_whole_answer_begins_again_elsewhere_where_its_handler_is_idempotent(
    engine: type[Slow],
) -> None:
    async with TestKit() as kit:
        started = [
            await kit.start(engine, model="qwen", answers=[text], pause=0.1)
            for text in ("one two three four", "five six seven eight")
        ]
        fakes = [cast("Slow", one.actor) for one in started]
        asked = asyncio.ensure_future(Model("qwen").client(kit.caller).chat("hi"))
        await eventually(lambda: any(one.said > 1 for one in fakes))
        place = next(at for at, one in enumerate(fakes) if one.said)
        await kit.kill(started[place])

        if engine is Once:
            with pytest.raises(StreamLost, match="only a stream of tokens"):
                await asked
        else:
            other = ("five six seven eight", "one two three four")[place]
            assert (await asked).text == other
            assert [len(one.requests) for one in fakes] == [1, 1]


async def test_the_engine_works_in_the_trace_of_the_call() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with TestKit(telemetry=Telemetry(provider, MeterProvider())) as kit:
        await FakeModel.start(kit, "qwen", ["yes"])
        await kit.start(Desk)
        await kit.client(Desk).ask("hi")

    spans = exporter.get_finished_spans()
    assert {one.name for one in spans} == {
        "send shop.Desk.ask",
        "process shop.Desk.ask",
        "send fake.FakeModel0.generate",
        "process fake.FakeModel0.generate",
    }
    assert len({one.context.trace_id for one in spans if one.context is not None}) == 1


async def test_a_handler_that_is_cancelled_ends_the_generation() -> None:
    async with TestKit() as kit:
        fake = await FakeModel.start(kit, "qwen", ["word " * 1000], pause=0.05)
        await kit.start(Desk)
        stream = kit.client(Desk).words("count")
        assert await anext(aiter(stream)) == "word "
        assert fake.running == 1
        await stream.aclose()
        await eventually(lambda: fake.running == 0)


async def test_a_unary_handler_that_is_cancelled_ends_the_generation() -> None:
    async with TestKit() as kit:
        fake = await FakeModel.start(kit, "qwen", ["word " * 1000], pause=0.05)
        await kit.start(Desk)
        call = asyncio.ensure_future(kit.client(Desk).ask("count"))
        await eventually(lambda: fake.running == 1)
        call.cancel()
        await eventually(lambda: fake.running == 0)
        with pytest.raises((asyncio.CancelledError, Cancelled)):
            await call


async def test_a_stream_that_is_left_ends_the_generation() -> None:
    async with TestKit() as kit:
        fake = await FakeModel.start(kit, "qwen", ["word " * 1000], pause=0.05)
        await kit.start(Desk)
        assert await kit.client(Desk).first_word("count") == "word "
        await eventually(lambda: fake.running == 0)


async def test_the_deadline_of_the_call_and_that_of_the_model_hold() -> None:
    async with TestKit() as kit:
        fake = await FakeModel.start(kit, "qwen", ["word " * 1000] * 2, pause=0.1)
        await kit.start(Desk)
        with call_options(timeout=1.0), pytest.raises(DeadlineExceeded):
            await kit.client(Desk).ask("count")
        with pytest.raises(DeadlineExceeded):
            await Model("qwen", timeout=0.5).client(kit.caller).chat("count")
        await eventually(lambda: fake.running == 0)


async def test_an_unknown_model_is_refused_with_the_names_of_those_that_are_there() -> None:
    async with TestKit() as kit:
        await FakeModel.start(kit, "qwen")
        await FakeModel.start(kit, "llama")
        with pytest.raises(DynbusError, match="no model 'gwen'; the models are: llama, qwen"):
            await Model("gwen").client(kit.caller).chat("hi")


async def test_a_model_that_starts_later_is_waited_for() -> None:
    async with TestKit() as kit:
        client = Model("qwen", wait=60.0).client(kit.caller)
        asked = asyncio.ensure_future(client.chat("hi"))
        await asyncio.sleep(5)
        assert not asked.done()
        await FakeModel.start(kit, "qwen", ["late"])
        assert (await asked).text == "late"


async def test_a_process_says_once_that_it_waits_for_a_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with TestKit() as kit:
        client = Model("qwen", wait=60.0).client(kit.caller)
        with caplog.at_level("INFO", "dynbus.llm.pipeline.models"):
            asked = [asyncio.ensure_future(client.chat("hi")) for _ in range(2)]
            await eventually(lambda: caplog.messages)
            await FakeModel.start(kit, "qwen", ["late"] * 2)
            await asyncio.gather(*asked)

    assert [text for text in caplog.messages if "waiting" in text] == [
        "there is no model 'qwen'; the models are: none at present; waiting for it, for 60 s"
    ]


async def test_errors_of_the_engine_and_of_requests_are_raised() -> None:
    async with TestKit() as kit:
        await FakeModel.start(kit, "qwen", [Overloaded("full", retry_after=2.0), "no JSON"])
        model = Model("qwen").client(kit.caller)
        with pytest.raises(Overloaded):
            await model.chat("hi")
        with pytest.raises(InvalidRequest, match="temperature"):
            await model.chat("hi", temperature=9.0)
        with pytest.raises(TypeError, match="temperatur"):
            await model.chat("hi", temperatur=1.0)  # type: ignore[call-arg]
        answer = await model.chat("hi")
        with pytest.raises(InvalidResponse, match="Verdict"):
            answer.parse(Verdict)


async def test_an_answer_has_the_form_of_a_class() -> None:
    async with TestKit() as kit:
        fake = await FakeModel.start(kit, "qwen", ['{"fine": true}'])
        model = Model("qwen").client(kit.caller)
        answer = await model.chat("fine?", response_format=Verdict)

    assert answer.parse(Verdict) == Verdict(fine=True)
    form = fake.requests[0]["response_format"]["json_schema"]
    assert form["schema"]["properties"]["fine"]["type"] == "boolean"


async def test_tools_are_handlers_which_the_model_calls() -> None:
    answers = [
        [tool_call("find", number=7), tool_call("say", text="hi")],
        [tool_call("find", number="many"), tool_call("find", number=13), tool_call("gone")],
        "It was sent.",
    ]
    async with TestKit() as kit:
        fake = await FakeModel.start(kit, "qwen", answers)
        orders = (await kit.start(Orders)).actor
        await kit.start(Desk)
        with call_options(request_id="mine"):
            answer = await kit.client(Desk).agent("Where is order 7?")

    assert answer == "It was sent."
    assert isinstance(orders, Orders)
    assert (orders.asked, set(orders.ids)) == ([7, 13], {"mine"})
    tools = {one["function"]["name"]: one["function"] for one in fake.requests[0]["tools"]}
    assert tools["find"]["description"] == "Find an order."
    assert tools["find"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert tools["say"]["parameters"]["properties"]["text"]["type"] == "string"
    told = [one["content"] for one in fake.requests[2]["messages"] if one["role"] == "tool"]
    assert told[0] == '{"number":7,"state":"sent"}'
    assert told[1] == "HI"
    assert "number" in told[2]
    assert told[3] == "error: there is no order 13"
    assert "the tools are find, say" in told[4]


async def test_the_last_turn_has_no_tools() -> None:
    async with TestKit() as kit:
        fake = await FakeModel.start(kit, "qwen", [tool_call("say", text="a"), "done"])
        await kit.start(Orders)
        model = Model("qwen").client(kit.caller)
        messages = [{"role": "user", "content": "go"}]
        answer = await model.converse(messages, tools=[Orders.say], turns=2)

    assert answer.text == "done"
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "assistant"]
    assert fake.requests[1]["tool_choice"] == "none"


async def test_a_failure_of_a_tool_is_raised() -> None:
    async with TestKit() as kit:
        await FakeModel.start(kit, "qwen", [tool_call("broken")])
        await kit.start(Orders)
        model = Model("qwen").client(kit.caller)
        with pytest.raises(DynbusError, match="secret of the shop"):
            await model.converse([{"role": "user", "content": "go"}], tools=[Orders.broken])


async def test_what_cannot_be_a_tool_is_refused() -> None:
    async with TestKit() as kit:
        model = Model("qwen").client(kit.caller)
        with pytest.raises(ConfigError, match="stream and no tool"):
            await model.chat("hi", tools=[Orders.many])
        with pytest.raises(ConfigError, match="is no tool"):
            await model.chat("hi", tools=[len])
        with pytest.raises(ConfigError, match="two tools"):
            await model.chat("hi", tools=[Orders.say, Orders.say])


async def test_a_stream_gives_the_whole_answer_too() -> None:
    async with TestKit() as kit:
        await FakeModel.start(kit, "qwen", [tool_call("say", text="a"), "one two"])
        model = Model("qwen").client(kit.caller)
        called = await model.stream("hi", tools=[Orders.say]).answer()
        async with model.stream("hi") as stream:
            await anext(stream)
            whole = await stream.answer()

    assert called.tool_calls[0].function.arguments == '{"text":"a"}'
    assert whole.text == "one two"


@pytest.mark.parametrize(
    "arguments", [{"name": ""}, {"name": "a", "wait": -1}, {"name": "a", "routing": "nearest"}]
)
def test_a_model_that_cannot_be_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Model(**arguments)


def test_options_of_a_model_are_its_own() -> None:
    with pytest.raises(ConfigError, match="give its options to"):
        depends(Model("qwen"), wait=1.0)  # type: ignore[call-overload]
