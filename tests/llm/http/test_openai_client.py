"""The `openai` package as a client of the front end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.conditions import eventually

from .served import Served, served

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def asked(**settings: Any) -> AsyncGenerator[tuple[Served, AsyncOpenAI]]:
    """A front end, and a client of it that repeats nothing."""
    async with (
        served(**settings) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield front, client


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


async def create(client: AsyncOpenAI, **fields: Any) -> Any:
    """A completion of a chat; a stream of its chunks, if that is asked for."""
    asked: Any = client.chat.completions.create
    return await asked(**fields)


async def test_a_chat_is_answered_in_one() -> None:
    async with asked() as (front, client):
        answer = await create(client, **chat("say Paris is it."))
        [request] = front.engine.requests

    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Paris is it.", "stop")
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.token_ids)
    assert answer.usage.completion_tokens > 2
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert not request.stream


async def test_a_streamed_chat_is_the_same_text_in_pieces() -> None:
    async with asked() as (front, client):
        stream = await create(
            client,
            **chat("say naïve café 🙂 東京", stream=True, stream_options={"include_usage": True}),
        )
        chunks = [chunk async for chunk in stream]

    text = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(map(str, text)) == "naïve café 🙂 東京"
    assert len(text) == 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].usage is None
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens >= len(text)
    assert front.engine.requests[0].stream


async def test_usage_comes_with_every_chunk_when_it_is_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with asked() as (_, client):
        stream = await create(
            client, **chat("say one two three", stream=True, stream_options=options)
        )
        counts = [chunk.usage and chunk.usage.completion_tokens async for chunk in stream]

    assert counts[0] == 1
    assert counts == sorted(counts)


async def test_the_synchronous_client_is_served_as_well() -> None:
    def ask(url: str) -> tuple[str | None, str]:
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            create: Any = client.chat.completions.create
            whole, pieces = create(**chat("say one")), create(**chat("say two", stream=True))
            return whole.choices[0].message.content, "".join(
                piece.choices[0].delta.content or "" for piece in pieces
            )

    async with served() as front:
        told = await anyio.to_thread.run_sync(ask, front.url)

    assert told == ("one", "two")


async def test_n_answers_come_beside_each_other() -> None:
    async with asked() as (_, client):
        whole = await create(client, **chat("say hi", n=3))
        stream = await create(client, **chat("say hi", n=3, stream=True))
        texts = ["", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""

    assert [(one.index, one.message.content) for one in whole.choices] == [
        (0, "hi"),
        (1, "hi"),
        (2, "hi"),
    ]
    assert texts == ["hi"] * 3


async def test_a_stop_string_ends_the_text_and_the_engine() -> None:
    async with asked() as (front, client):
        whole = await create(client, **chat("say one stop two", stop=["stop"]))
        stream = await create(client, **chat("endless a", stream=True, stop="aaaaa"))
        chunks = [chunk async for chunk in stream]
        await eventually(lambda: not front.engine.running)

    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("one ", "stop")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_max_tokens_ends_the_text() -> None:
    async with asked() as (front, client):
        answer = await create(client, **chat("say one two", max_tokens=1))
        other = await create(client, **chat("say one", max_completion_tokens=1))

    assert answer.choices[0].finish_reason == other.choices[0].finish_reason == "length"
    assert [one.max_tokens for one in front.engine.requests] == [1, 1]


async def test_sampling_reaches_the_engine() -> None:
    async with asked() as (front, client):
        await create(
            client,
            **chat(
                "say x",
                temperature=0.5,
                top_p=0.9,
                seed=7,
                logit_bias={"5": -100},
                presence_penalty=0.1,
                frequency_penalty=0.2,
                extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1},
            ),
        )

    sampling = front.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)
    assert sampling.logit_bias == {5: -100}
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (4, 0.1, 1.1)


async def test_log_probabilities_come_with_their_tokens() -> None:
    async with asked() as (_, client):
        answer = await create(client, **chat("say hi", logprobs=True, top_logprobs=2))
        completion = await client.completions.create(model="bare", prompt="say hi", logprobs=1)

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(one.token for one in logprobs.content) == "hi"
    assert logprobs.content[0].logprob == -0.5
    assert len(logprobs.content[0].top_logprobs) == 2
    told = completion.choices[0].logprobs
    assert told is not None
    assert "".join(told.tokens or []) == "hi"
    assert told.text_offset is not None
    assert told.text_offset[0] == 0


async def test_completions_take_text_batches_and_token_ids() -> None:
    async with asked() as (front, client):
        one = await client.completions.create(model="tiny", prompt="say a")
        several = await client.completions.create(model="tiny", prompt=["say a", "say b"], n=2)
        ids = await client.completions.create(
            model="tiny", prompt=[front.engine.requests[0].token_ids], echo=True
        )
        stream = await client.completions.create(model="tiny", prompt="say a b", stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]

    assert [choice.text for choice in one.choices] == ["a"]
    assert [(choice.index, choice.text) for choice in several.choices] == [
        (0, "a"),
        (1, "a"),
        (2, "b"),
        (3, "b"),
    ]
    assert [choice.text for choice in ids.choices] == ["say aa"]
    assert "".join(pieces) == "a b"
    assert front.engine.requests[0].max_tokens == 16


async def test_a_worker_by_hand_is_served() -> None:
    async with asked() as (_, client):
        answer = await create(client, **chat("hello", model="plain"))

    assert answer.choices[0].message.content == "ok then"


async def test_an_engine_for_text_gets_the_request_and_its_chunks_are_passed_on() -> None:
    async with asked() as (front, client):
        whole = await create(client, **chat("hello", model="text", extra_body={"own_field": 1}))
        stream = await create(client, **chat("hello", model="text", stream=True))
        pieces = [chunk.choices[0].delta.content async for chunk in stream]

    assert whole.choices[0].message.content == "two words"
    assert whole.choices[0].finish_reason == "stop"
    assert pieces == ["two", " words"]
    assert front.text.requests[0]["own_field"] == 1
    assert front.text.requests[0]["messages"] == [{"role": "user", "content": "hello"}]


async def test_nothing_is_refused_that_an_engine_for_text_may_know() -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "tools": [{"type": "custom", "custom": {"name": "shell"}}],
        "tool_choice": {"type": "custom", "custom": {"name": "shell"}},
        "response_format": {"type": "json_object"},
        "modalities": ["text", "audio"],
        "extra_body": {"chat_template": "{{ messages }}"},
    }
    async with asked() as (front, client):
        await create(client, model="text", **fields)
        [request] = front.text.requests

    assert request == {
        "model": "text",
        "chat_template": "{{ messages }}",
        **{name: value for name, value in fields.items() if name != "extra_body"},
    }


async def test_models_are_listed_and_come_and_go() -> None:
    async with asked() as (front, client):
        before = [model.id async for model in client.models.list()]
        front.catalog.change({"tiny": front.catalog.cards["tiny"]})
        await eventually(lambda: front.front_end.shared.models.names == ["tiny"])
        after = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("tiny")
        with pytest.raises(openai.NotFoundError, match="the models are: tiny") as unknown:
            await create(client, **chat("hello", model="nobody"))
        with pytest.raises(openai.NotFoundError, match="the models are: tiny"):
            await client.models.retrieve("nobody")
        with pytest.raises(openai.InternalServerError, match="has had no instance for") as gone:
            await create(client, **chat("hello", model="text"))

    assert before == ["bare", "plain", "text", "tiny"]
    assert after == ["tiny"]
    assert one.id == "tiny"
    assert unknown.value.code == "model_not_found"
    assert gone.value.status_code == 503


async def test_a_request_waits_for_a_model_whose_instances_come_back() -> None:
    async with asked() as (front, client):
        cards = dict(front.catalog.cards)
        front.catalog.change({"text": cards["text"]})
        await eventually(lambda: front.front_end.shared.models.names == ["text"])
        asking = asyncio.create_task(create(client, **chat("say yes")))
        await eventually(lambda: front.front_end.shared.metrics.in_flight == 1)

        front.catalog.change(cards)

        answer = await asking

    assert answer.choices[0].message.content == "yes"


MISFITS: list[tuple[dict[str, Any], Any, str | None, str]] = [
    ({"messages": []}, openai.BadRequestError, "messages", "at least one"),
    ({"temperature": "hot"}, openai.BadRequestError, "temperature", "float"),
    ({"temperature": 9}, openai.BadRequestError, "temperature", "<= 2"),
    ({"n": 0}, openai.BadRequestError, "n", ">= 1"),
    ({"stop": [""]}, openai.BadRequestError, "stop", "none of them empty"),
    ({"stop": ["a"] * 5}, openai.BadRequestError, "stop", "at most 4 strings"),
    (
        {"messages": [{"role": "root", "content": "a"}]},
        openai.BadRequestError,
        "messages[0].role",
        "give one of system",
    ),
    (
        {"messages": [{"role": "user", "content": None}]},
        openai.BadRequestError,
        "messages[0].content",
        "give a string",
    ),
    (
        {"messages": [{"role": "tool", "tool_call_id": "a", "content": "b"}]},
        openai.BadRequestError,
        "messages[0].tool_call_id",
        "an answer of a tool follows its call",
    ),
    (
        {"response_format": {"type": "json_object", "schema": "none"}},
        openai.BadRequestError,
        "response_format.schema",
        "give a JSON schema, or leave it out",
    ),
    (
        {"response_format": {"type": "text", "schema": {}}},
        openai.BadRequestError,
        "response_format.schema",
        "with the type 'json_schema'",
    ),
    ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias", "no token id"),
    ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs", "set logprobs"),
    (
        {"messages": [{"role": "user", "content": 3}]},
        openai.BadRequestError,
        "messages[0].content",
        "give a string",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        openai.BadRequestError,
        "response_format.json_schema",
        "give an object with a name and a schema",
    ),
    (
        {"extra_body": {"guided_regex": "("}},
        openai.BadRequestError,
        "guided_regex",
        "guided_regex: regex cannot be enforced",
    ),
    (
        {"extra_body": {"chat_template": "{{ x }}"}},
        openai.BadRequestError,
        "chat_template",
        "own template",
    ),
    (
        {"messages": [{"role": "user", "content": "word " * 3000}]},
        openai.BadRequestError,
        "messages",
        "the context of tiny has 2000 tokens",
    ),
    ({"max_tokens": 1999}, openai.BadRequestError, "messages", "max_tokens=1999"),
    ({"model": "bare"}, openai.BadRequestError, "model", "use /v1/completions"),
    ({"model": "nobody"}, openai.NotFoundError, None, "there is no model 'nobody'"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_not_usable_says_what_is_wrong(stream: bool) -> None:
    async with asked() as (front, client):
        for fields, kind, param, part in MISFITS:
            with pytest.raises(kind, match=re.escape(part)) as raised:
                await create(client, **{**chat("say x", stream=stream), **fields})
            assert raised.value.param == param
        assert front.engine.requests == []


async def test_options_of_a_stream_are_for_streams() -> None:
    options: Any = {"include_usage": True}
    async with asked() as (_, client):
        with pytest.raises(openai.BadRequestError, match="set stream to true") as raised:
            await create(client, **chat("say x", stream_options=options))

    assert raised.value.param == "stream_options"


async def test_a_schema_beside_json_object_is_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_object", "schema": schema}
    async with asked() as (front, client):
        await create(client, **chat("say x", response_format=form))
        [asked_for] = front.engine.requests

    assert asked_for.structured.json_schema == schema


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_engines_have_their_status(stream: bool) -> None:
    async with asked() as (_, client):
        with pytest.raises(openai.BadRequestError, match="this prompt is refused"):
            await create(client, **chat("refuse x", stream=stream))
        with pytest.raises(openai.RateLimitError, match="the engine is full") as limited:
            await create(client, **chat("overloaded x", stream=stream))
        with pytest.raises(openai.InternalServerError) as failed:
            await create(client, **chat("fail x", stream=stream))

    assert limited.value.response.headers["retry-after"] == "3"
    assert failed.value.status_code == 500
    assert failed.value.response.headers["x-should-retry"] == "false"
    assert "secret" not in str(failed.value)


async def test_a_stream_that_fails_later_ends_with_an_error_that_the_client_raises() -> None:
    async with asked() as (_, client):
        stream = await create(client, **chat("break x", stream=True))
        arrived = [await anext(stream) for _ in range(3)]
        with pytest.raises(openai.APIError) as raised:
            await anext(stream)

    assert len(arrived) == 3
    assert "secret" not in str(raised.value)


async def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    async with asked(request_timeout=0.3) as (_, client):
        with pytest.raises(openai.InternalServerError) as raised:
            await create(client, **chat("silent x"))

    assert raised.value.status_code == 504


async def test_the_id_of_a_request_reaches_the_engine_and_comes_back() -> None:
    async with asked() as (front, client):
        raw: Any = client.chat.completions.with_raw_response
        answer = await raw.create(**chat("say x"), extra_headers={"X-Request-Id": "mine-1"})
        other = await raw.create(**chat("say x"), extra_headers={"X-Request-Id": "not usable"})

    assert answer.headers["x-request-id"] == "mine-1"
    assert front.engine.ids[0] == "mine-1"
    assert other.headers["x-request-id"] not in ("", "not usable")


async def test_many_streams_at_once_keep_their_texts_apart() -> None:
    async def one(client: AsyncOpenAI, number: int, found: dict[int, str]) -> None:
        text = f"stream {number} of many"
        stream = await create(client, **chat(f"say {text}", stream=True))
        found[number] = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    found: dict[int, str] = {}
    async with asked() as (_, client), anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(one, client, number, found)

    assert found == {number: f"stream {number} of many" for number in range(50)}
