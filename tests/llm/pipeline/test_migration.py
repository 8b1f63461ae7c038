"""Answers whose engines are lost: what clients read is what they would have read without it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
from tests.conditions import eventually
from tests.llm.http.served import FixedCatalog, card

from dynbus import Actor, handler, with_options
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import DynbusError, Migrate, StreamLost
from dynbus.kvrouter import RouterActor, open_router
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.messages.api import MessagesApi
from dynbus.llm.mock.engine import MockEngine
from dynbus.llm.mock.worker import MockWorker
from dynbus.llm.models.card import ModelInput, ModelType
from dynbus.llm.openai.api import Api, CompletionsApi
from dynbus.llm.openai.requests import read_chat, read_completion
from dynbus.llm.pipeline.models import Models
from dynbus.llm.pipeline.open_model import Inquiry
from dynbus.llm.pipeline.serving import RequestTiming
from dynbus.testing import TestKit, run


class Engine(MockWorker, namespace="moved"):
    """One of those that are killed."""

    made: MockEngine

    def make_engine(self) -> MockEngine:
        self.made = super().make_engine()
        return self.made


class ByHand(Actor, namespace="moved"):
    """A worker by hand, which counts from the number of tokens that it is given, to 40."""

    @handler(concurrency=None)
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        length = len(request["token_ids"])
        for token_id in range(length, 40):
            if token_id == length + 7:
                raise Migrate("it is time for another one")
            yield {"token_ids": [200 + token_id], "cached_tokens": 1}
        yield {"token_ids": [], "finish_reason": "stop"}


class Through(RouterActor, namespace="moved"):
    """A router with a process of its own."""

    def __init__(self) -> None:
        super().__init__("moved.Engine.generate")


class Text(Actor, namespace="moved"):
    """An engine that takes text."""

    @handler
    async def chat(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        yield {"choices": [{"index": 0, "delta": {"content": "two"}}]}
        raise StreamLost("the server is gone", started=True)


CARDS = {
    one.name: one
    for one in (
        card("mock", "moved.Engine.generate"),
        card("once", "moved.Engine.generate", migration_limit=1),
        card("fixed", "moved.Engine.generate", migration_limit=0),
        card("routed", "moved.Through.generate"),
        card("hand", "moved.ByHand.generate"),
        card("text", "moved.Text.chat", input=ModelInput.Text, types=["chat"]),
    )
}
CHAT, COMPLETIONS, MESSAGES = (
    CompletionsApi(read_chat),
    CompletionsApi(read_completion),
    MessagesApi(),
)
USAGE = {"stream_options": {"include_usage": True}}
SAID = [{"role": "user", "content": "Tell me something of kings and of queens."}]


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.has_ended = False
        self.error: DynbusError | None = None

    def write(self, chunks: Sequence[bytes]) -> bool:
        self.chunks += chunks
        return True

    def end(self, error: DynbusError | None) -> None:
        self.has_ended = True
        self.error = error


async def answer(
    kit: TestKit, models: Models, api: Api, body: dict[str, Any], cuts: Sequence[int]
) -> Kept:
    """The answer to a request whose engine is killed after so many tokens, each time."""
    asked = api.read(json.dumps(body).encode())
    opened = await models.get(body["model"], ModelType.Chat)
    kept = Kept()
    inquiry = Inquiry(asked.request, msgspec.Raw(asked.body), asked.format("1", now=lambda: 1.0))
    completion = await opened.prepare(inquiry, kept, RequestTiming(0.0))
    await opened.begin(completion)

    def has(tokens: int) -> bool:
        return kept.has_ended or (completion.usage or (0, 0))[1] >= tokens

    for cut in cuts:
        await eventually(partial(has, cut), what=f"{cut} tokens have come")
        for name in {one for one in completion.instances if one in kit.started}:
            await kit.kill(kit.started[name])
    await eventually(lambda: kept.has_ended)
    return kept


def asked_twice(api: Api, body: dict[str, Any], cuts: Sequence[int]) -> tuple[Kept, Kept]:
    """The answers to a request without and with kills."""

    async def story() -> tuple[Kept, Kept]:
        async with TestKit() as kit:
            for name in ("a", "b", "c", "d", "e"):
                await kit.start(Engine, instance_id=name, vocabulary=250, kv_events=False)
            await kit.start(ByHand)
            await kit.start(ByHand)
            await kit.start(Text)
            cards = {name: one for name, one in CARDS.items() if name != "routed"}
            async with Models(kit.caller, FixedCatalog(cards), routing="round_robin") as models:
                await eventually(lambda: len(models.names) == len(cards))
                before = await answer(kit, models, api, body, ())
                return before, await answer(kit, models, api, body, cuts)

    return run(story())


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (CHAT, {"messages": SAID, "stream": True}),
        (CHAT, {"messages": SAID, "stream": True, "seed": 5, **USAGE}),
        (CHAT, {"messages": SAID, "logprobs": True, "top_logprobs": 2, "temperature": 0}),
        (CHAT, {"messages": SAID, "stream": True, "stop": ["q", "zz"]}),
        (COMPLETIONS, {"prompt": "Once upon a time", "stream": True, "echo": True}),
        (MESSAGES, {"messages": SAID, "stream": True}),
        (MESSAGES, {"messages": SAID}),
    ],
)  # fmt: skip
def test_an_answer_is_the_same_whichever_engines_are_killed(api: Api, body: dict[str, Any]) -> None:
    asked = {"model": "mock", "max_tokens": 40, **body}

    before, moved = asked_twice(api, asked, (1, 9, 30))

    assert before.error is moved.error is None
    assert b"".join(moved.chunks) == b"".join(before.chunks)
    assert len(before.chunks) > 1 or not body.get("stream")


def test_prompts_and_continuations_of_one_request_go_on_each_for_itself() -> None:
    body = {"model": "mock", "prompt": ["One", "Two two"], "n": 3, "max_tokens": 20, "seed": 3}

    before, moved = asked_twice(COMPLETIONS, body, (12, 60))

    assert before.error is moved.error is None
    assert moved.chunks == before.chunks
    assert len(json.loads(moved.chunks[0])["choices"]) == 6


def test_an_answer_moves_as_often_as_its_model_says() -> None:
    body = {"model": "once", "messages": SAID, "max_tokens": 40, "stream": True}

    _, moved = asked_twice(CHAT, body, (3,))
    before, ended = asked_twice(CHAT, body, (3, 9))
    _, fixed = asked_twice(CHAT, {**body, "model": "fixed"}, (3,))

    assert moved.error is None
    assert isinstance(ended.error, StreamLost)
    assert isinstance(fixed.error, StreamLost)
    assert b"".join(before.chunks).startswith(b"".join(ended.chunks))


def test_an_answer_behind_a_router_of_its_own_goes_on_too() -> None:
    async def story() -> tuple[Kept, Kept]:
        async with TestKit() as kit:
            for name in ("a", "b", "c"):
                await kit.start(Engine, instance_id=name, vocabulary=250, block_size=4)
            await kit.start(Through)
            cards = {"routed": CARDS["routed"]}
            async with Models(kit.caller, FixedCatalog(cards), routing="round_robin") as models:
                await eventually(lambda: models.names == ["routed"])
                body = {"model": "routed", "messages": SAID, "max_tokens": 40, "stream": True}
                before = await answer(kit, models, CHAT, body, ())
                opened = await models.get("routed", ModelType.Chat)
                kept = Kept()
                asked = CHAT.read(json.dumps(body).encode())
                inquiry = Inquiry(
                    asked.request, msgspec.Raw(asked.body), asked.format("1", now=lambda: 1.0)
                )
                completion = await opened.prepare(inquiry, kept, RequestTiming(0.0))
                await opened.begin(completion)
                await eventually(lambda: len(kept.chunks) >= 9)
                busy = [
                    one
                    for one in kit.started.values()
                    if isinstance(one.actor, Engine) and one.actor.made.has_work
                ]
                assert len(busy) == 1
                await kit.kill(busy[0])
                await eventually(lambda: kept.has_ended)
                return before, kept

    before, moved = run(story())

    assert before.error is moved.error is None
    assert b"".join(moved.chunks) == b"".join(before.chunks)


def test_a_worker_by_hand_that_asks_for_it_is_left_as_often_as_its_model_says() -> None:
    body = {"model": "hand", "prompt": [3, 4, 5], "max_tokens": 100}

    before, _ = asked_twice(COMPLETIONS, body, ())

    assert isinstance(before.error, StreamLost)
    assert "it moved 3 times" in str(before.error)


def test_what_a_worker_by_hand_has_yielded_is_not_asked_for_again() -> None:
    body = {"model": "hand", "prompt": list(range(15)), "max_tokens": 100}

    before, _ = asked_twice(COMPLETIONS, body, ())

    assert before.error is None
    told = json.loads(before.chunks[0])
    assert told["usage"] == {
        "prompt_tokens": 15,
        "completion_tokens": 25,
        "total_tokens": 40,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_text_that_is_lost_is_refused_with_the_reason() -> None:
    body = {"model": "text", "messages": SAID, "stream": True}

    before, _ = asked_twice(CHAT, body, ())

    assert isinstance(before.error, StreamLost)
    assert "only a stream of tokens can be continued" in str(before.error)


def test_a_client_of_an_engine_reads_on_where_it_is_killed() -> None:
    async def story() -> tuple[list[int], list[int]]:
        async with TestKit() as kit:
            for name in ("a", "b", "c"):
                await kit.start(Engine, instance_id=name, vocabulary=250)
            client = kit.client(Engine)
            request = GenerateRequest(list(range(100)), 30)
            before = [token async for item in client.generate(request) for token in item.token_ids]
            items: list[Generated] = []
            stream: Any = client.generate(request)
            async for item in stream:
                items.append(item)
                if len(items) in (4, 20):
                    await kit.kill(kit.started[stream.instance_id])
            return before, [token for item in items for token in item.token_ids]

    before, moved = run(story())

    assert moved == before


def test_what_goes_on_is_routed_by_the_tokens_that_came_as_well() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            for name in ("a", "b", "c", "d"):
                await kit.start(Engine, instance_id=name, block_size=16)
            async with open_router(kit.caller, "moved.Engine") as router:
                client = kit.client(Engine, routing=router)
                request = GenerateRequest(list(range(2000)), 300)
                # What two of them hold, prompt and output.
                for name in ("b", "c"):
                    async for _ in with_options(client, instance=name).generate(request):
                        pass
                cached: list[int] = []
                instances: list[str] = []
                count = 0
                stream: Any = client.generate(request)
                async for item in stream:
                    count += len(item.token_ids)
                    if item.cached_tokens is not None:
                        cached.append(item.cached_tokens)
                        instances.append(stream.instance_id)
                    if count == 200:
                        await kit.kill(kit.started[stream.instance_id])
                assert count == 300
                assert set(instances) == {"b", "c"}
                before, after = cached
                assert before >= 1984
                assert after >= 2176

    run(story())


def test_an_answer_goes_on_with_the_instance_that_comes_after_the_last_one() -> None:
    body = {"model": "mock", "messages": SAID, "max_tokens": 40, "stream": True}
    cards = {"mock": CARDS["mock"]}

    async def story() -> tuple[Kept, Kept]:
        async with TestKit() as kit:
            await kit.start(Engine, vocabulary=250, block_size=4)
            catalog = FixedCatalog(cards)
            async with Models(kit.caller, catalog, routing="kv") as models:
                await eventually(lambda: models.names == ["mock"])
                both = [await answer(kit, models, CHAT, body, ())]
                async with anyio.create_task_group() as tasks:

                    async def comes_back() -> None:
                        view = kit.caller.discovery.view
                        await eventually(
                            lambda: not view.instances("moved", "Engine", monotonic()),
                            what="the only instance is gone",
                        )
                        catalog.change({})
                        await eventually(lambda: not models.names)
                        await kit.start(Engine, vocabulary=250, block_size=4)
                        catalog.change(cards)

                    tasks.start_soon(comes_back)
                    both.append(await answer(kit, models, CHAT, body, (9,)))
                return both[0], both[1]

    before, moved = run(story())

    assert before.error is moved.error is None
    assert b"".join(moved.chunks) == b"".join(before.chunks)
