"""The `anthropic` package as a client of `/v1/messages`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from pydantic import BaseModel
from tests.llm.text.tiny_tokenizer import tiny_tokenizer

from .author import call, written
from .served import Served, served

pytestmark = pytest.mark.anyio

WEATHER: Any = {
    "name": "get_weather",
    "description": "Tell the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


PREFILL: Any = {"role": "assistant", "content": "I think: i <|im_en "}


@asynccontextmanager
async def asked(
    api_key: str = "none", **settings: Any
) -> AsyncGenerator[tuple[Served, AsyncAnthropic]]:
    """A front end, and a client of it that repeats nothing."""
    async with (
        served(**settings) as front,
        AsyncAnthropic(base_url=front.url, api_key=api_key, max_retries=0) as client,
    ):
        yield front, client


def said(text: str, **fields: Any) -> Any:
    return {
        "model": "tiny",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }


async def create(client: AsyncAnthropic, **fields: Any) -> Any:
    """A message."""
    asked: Any = client.messages.create
    return await asked(**fields)


async def test_a_message_is_answered_whole_and_as_a_stream() -> None:
    async with asked() as (front, client):
        whole = await create(client, **said("say Paris is it.", system="Be brief."))
        async with client.messages.stream(**said("say naïve café 🙂")) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            streamed = await stream.get_final_message()
        cut = await create(client, **said("say Paris is it.", max_tokens=2))
        request = said("say Paris is it.", stop_sequences=["it", "Tokyo"])
        stopped = await create(client, **request)
        async with client.messages.stream(**request) as stream:
            stopped_stream = await stream.get_final_message()
    both: list[Any] = [stopped, stopped_stream]

    [block] = whole.content
    assert block.type == "text"
    assert (block.text, whole.stop_reason) == ("Paris is it.", "end_turn")
    assert whole.id == f"msg_{whole._request_id}"
    request = front.engine.requests[0]
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == len(
        request.token_ids
    )
    assert whole.usage.cache_read_input_tokens == 3
    assert text == "naïve café 🙂"
    assert streamed.content[0].type == "text"
    assert streamed.content[0].text == text
    assert streamed.usage.output_tokens > 2
    for message in both:
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "it")
        assert message.content[0].text == "Paris is "
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


async def test_a_limit_that_the_context_has_no_room_for_becomes_what_it_has() -> None:
    async with asked() as (front, client):
        message = await create(client, **said("say Paris is it.", max_tokens=20_000))
        async with client.messages.stream(**said("say Paris.", max_tokens=32_000)) as stream:
            streamed = await stream.get_final_message()
        with pytest.raises(anthropic.BadRequestError, match="2000 tokens, and messages has"):
            await create(client, **said("say " + "Paris " * 3000, max_tokens=20_000))

    assert (message.stop_reason, streamed.stop_reason) == ("end_turn", "end_turn")
    assert [one.max_tokens + len(one.token_ids) for one in front.engine.requests] == [2000, 2000]


async def test_an_answer_goes_on_with_the_last_message_of_the_assistant() -> None:
    asked_for = said("say Paris is it.")
    going_on: dict[str, Any] = {**asked_for, "messages": [*asked_for["messages"], PREFILL]}
    async with asked() as (front, client):
        plain = await create(client, **asked_for)
        message = await create(client, **going_on)
        async with client.messages.stream(**going_on) as stream:
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="tiny", messages=going_on["messages"])
        passed = await create(client, **{**going_on, "model": "text"})
        nothing = [*asked_for["messages"], {"role": "assistant", "content": ""}]
        with pytest.raises(anthropic.BadRequestError, match="messages: .*have a text"):
            await create(client, **{**asked_for, "messages": nothing})

    prompts = [
        tiny_tokenizer().decode(one.token_ids, special=True) for one in front.engine.requests
    ]
    assert prompts[0].endswith("<|im_start|>assistant\n")
    assert prompts[1] == prompts[2] == prompts[0] + PREFILL["content"]
    # The engine says the same whatever has begun; what had begun is not said again.
    both: list[Any] = [message, streamed]
    assert [one.content[0].text for one in both] == [plain.content[0].text] * 2
    assert counted.input_tokens == len(front.engine.requests[1].token_ids)
    assert passed.content[0].text == "two words"
    [request] = front.text.requests
    assert request["messages"][-1] == PREFILL
    assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)


async def test_tools_are_used_and_their_results_sent_back() -> None:
    call = {"index": 0, "id": "toolu_1", "type": "function"}
    async with asked() as (front, client):
        front.text.deltas = [
            {"reasoning_content": "Weather, hm."},
            {"content": "Let me see."},
            {"tool_calls": [{**call, "function": {"name": "get_weather", "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
        ]
        front.text.finish_reason = "tool_calls"
        request = said("Is it raining in Paris?", model="text", tools=[WEATHER])
        async with client.messages.stream(**request) as stream:
            pieces = [one.partial_json async for one in stream if one.type == "input_json"]
            streamed = await stream.get_final_message()
        whole = await create(client, **request)
        request["messages"] += [
            {"role": "assistant", "content": whole.content},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "It is."}],
            },
        ]
        front.text.deltas, front.text.finish_reason = [{"content": "Yes."}], "stop"
        answer = await create(client, **request)

    assert pieces == ['{"city": ', '"Paris"}']
    messages: list[Any] = [streamed, whole]
    for message in messages:
        assert message.stop_reason == "tool_use"
        thinking, text, used = message.content
        assert thinking.type == "thinking"
        assert thinking.thinking == "Weather, hm."
        assert text.type == "text"
        assert used.type == "tool_use"
        assert (used.id, used.name, used.input) == ("toolu_1", "get_weather", {"city": "Paris"})
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "Yes."
    sent = front.text.requests[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"city":"Paris"}'


async def test_what_a_model_writes_is_read_into_blocks() -> None:
    thought = f"Hm.</think>\nI look.\n{call('get_weather', city='Paris')}"
    forced_call = '[{"name": "get_weather", "parameters": {"city": "Paris"}}]'
    async with (
        written(thought, thought, forced_call) as (author, other),
        AsyncAnthropic(
            base_url=str(other.base_url).removesuffix("/v1/"), api_key="none", max_retries=0
        ) as client,
    ):
        request = said(
            "Is it raining?",
            model="thinker",
            tools=[WEATHER],
            thinking={"type": "enabled", "budget_tokens": 1024},
            max_tokens=1000,
        )
        whole = await create(client, **request)
        async with client.messages.stream(**request) as stream:
            streamed = await stream.get_final_message()
        forced = await create(
            client, **said("?", tools=[WEATHER], tool_choice={"type": "any"}, model="hermes")
        )
        [first, *_, last] = author.requests

    both: list[Any] = [whole, streamed]
    for message in both:
        thinking, text, used = message.content
        assert thinking.thinking.strip() == "Hm."
        assert text.text.strip() == "I look."
        assert (used.name, used.input) == ("get_weather", {"city": "Paris"})
        assert message.stop_reason == "tool_use"
    # The template was told that it thinks.
    assert tiny_tokenizer().decode(first.token_ids, special=True).endswith("<think>\n")
    assert last.structured is not None
    assert forced.stop_reason == "tool_use"


class CalendarEvent(BaseModel):
    name: str
    participants: list[str]


@beta_async_tool
async def get_weather(location: str) -> str:
    """Tell the weather of a place."""
    return f"14 degrees in {location}"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_own_runner_of_tools_ends_with_an_answer(stream: bool) -> None:
    async with (
        written(call("get_weather", location="Paris"), "It is 14 degrees.") as (author, other),
        AsyncAnthropic(
            base_url=str(other.base_url).removesuffix("/v1/"), api_key="none", max_retries=0
        ) as client,
    ):
        run: Any = client.beta.messages.tool_runner
        runner = run(**said("?", model="hermes", tools=[get_weather]), stream=stream)
        last = await runner.until_done()

    assert last.content[0].text == "It is 14 degrees."
    assert "14 degrees in Paris" in author.prompt()


async def test_the_form_of_an_answer_is_a_pydantic_model() -> None:
    event = CalendarEvent(name="Science fair", participants=["Alice", "Bob"])
    async with (
        written(event.model_dump_json()) as (author, other),
        AsyncAnthropic(
            base_url=str(other.base_url).removesuffix("/v1/"), api_key="none", max_retries=0
        ) as client,
    ):
        parse: Any = client.messages.parse
        message = await parse(**said("?", model="hermes"), output_format=CalendarEvent)

    assert message.parsed_output == event
    assert author.requests[0].structured is not None


async def test_errors_have_anthropics_shape() -> None:
    async with asked() as (_, client):
        with pytest.raises(anthropic.NotFoundError, match="not_found_error.*no model 'other'"):
            await create(client, **said("hi", model="other"))
        with pytest.raises(anthropic.BadRequestError, match="max_tokens: Expected"):
            await create(client, **said("hi", max_tokens=0))
        with pytest.raises(anthropic.RateLimitError, match="rate_limit_error") as raised:
            await create(client, **said("overloaded"))
        with pytest.raises(anthropic.InternalServerError, match="api_error") as hidden:
            await create(client, **said("fail"))
        async with client.messages.stream(**said("break x")) as stream:
            with pytest.raises(anthropic.APIStatusError, match="api_error"):
                await stream.get_final_message()

    assert raised.value.response.headers["retry-after"] == "3"
    assert "secret" not in str(hidden.value)


async def test_refusals_name_what_the_request_has() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    shown = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    form: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object", "not": {}}}
    async with asked() as (_, client):
        with pytest.raises(
            anthropic.BadRequestError,
            match=r"messages\[0\]\.content\[0\]: this part is an image",
        ):
            await create(client, **said("", system="Look.", messages=shown))
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format: "):
            await create(client, **said("hi", output_config={"format": form}))


async def test_refusals_name_the_place_in_the_request() -> None:
    empty: Any = [*said("hi")["messages"], {"role": "user", "content": []}]
    async with asked() as (_, client):
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\]\.content: it is empty"):
            await create(client, **said("", messages=empty))
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\]\.content: it is empty"):
            await client.messages.count_tokens(model="tiny", messages=empty)


async def test_tokens_are_counted_as_the_model_gets_them() -> None:
    request = said("say hi", system="Be brief.")
    async with asked() as (front, client):
        counted = await client.messages.count_tokens(
            **{name: request[name] for name in ("model", "messages", "system")}
        )
        await create(client, **request)
        with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
            await client.messages.count_tokens(model="text", messages=request["messages"])

    assert counted.input_tokens == len(front.engine.requests[0].token_ids)


async def test_models_are_listed_as_anthropic_does() -> None:
    async with asked() as (_, client):
        models = [model async for model in await client.models.list()]
        tiny = await client.models.retrieve("tiny")
        listed: Any = client.get("/v1/messages", cast_to=object)
        with pytest.raises(anthropic.APIStatusError, match="takes POST, not GET") as refused:
            await listed

    assert tiny in models
    assert (tiny.id, tiny.max_input_tokens) == ("tiny", 2000)
    assert refused.value.status_code == 405
    assert refused.value.type == "invalid_request_error"
    body: Any = refused.value.body
    assert body["request_id"] == refused.value.response.headers["request-id"]


async def test_its_key_is_that_of_a_tenant(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("ada sk-ada-123\n")
    async with asked("sk-ada-123", api_keys=keys) as (front, client):
        answer = await create(client, **said("say hi"))
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await create(client.with_options(api_key="sk-bob-123"), **said("say hi"))

    assert answer.stop_reason == "end_turn"
    assert front.engine.metadata[0]["tenant"] == "ada"
