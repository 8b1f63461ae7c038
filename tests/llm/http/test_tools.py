"""Tools, structured answers and reasoning, asked for as the `openai` package's examples do.

The engine's tokens are written down; all between them and the client is real.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from tests.conditions import eventually
from tests.llm.text.tiny_tokenizer import tiny_tokenizer

from dynbus.llm.generation import (
    StructuredOutput,
    Thinking,
)

from .author import TEMPLATE, call, written

pytestmark = pytest.mark.anyio

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get current temperature for a given location.",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string"}},
            "required": ["location"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
ASKED: Any = [{"role": "user", "content": "What is the weather like in Paris today?"}]


async def create(client: AsyncOpenAI, **fields: Any) -> Any:
    """A completion of a chat; a stream of its chunks, if that is asked for."""
    asked: Any = client.chat.completions.create
    return await asked(**{"model": "hermes", "messages": ASKED, "tools": [WEATHER, TIME], **fields})


async def test_the_loop_of_calls_and_results_ends_with_an_answer() -> None:
    messages = [*ASKED]
    async with written(call("get_weather", location="Paris"), "It is 14 degrees.") as (
        author,
        client,
    ):
        called = (await create(client, messages=messages)).choices[0]
        assert called.finish_reason == "tool_calls"
        messages.append(called.message)
        for one in called.message.tool_calls:
            assert json.loads(one.function.arguments) == {"location": "Paris"}
            messages.append({"role": "tool", "tool_call_id": one.id, "content": "14"})
        told = author.prompt()
        answer = (await create(client, messages=messages)).choices[0]
        prompt = author.prompt()

    assert '"name": "get_weather"' in told
    # The call stands in the conversation as the model wrote it.
    assert call("get_weather", location="Paris") + "<|im_end|>" in prompt
    assert "<|im_start|>tool\n14<|im_end|>" in prompt
    assert (answer.message.content, answer.message.tool_calls) == ("It is 14 degrees.", None)
    assert answer.finish_reason == "stop"


async def test_arguments_are_streamed_as_they_come() -> None:
    async with written(f"I look.\n{call('get_weather', location='Paris')}\n{call('get_time')}") as (
        _,
        client,
    ):
        stream = await create(client, stream=True, stream_options={"include_usage": True})
        final: dict[int, Any] = {}
        pieces, content = 0, ""
        reasons: list[str | None] = []
        async for chunk in stream:
            if not chunk.choices:
                continue
            content += chunk.choices[0].delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
            # As OpenAI's guide on function calling collects them.
            pieces_of_calls: Any = chunk.choices[0].delta.tool_calls or []
            for one in pieces_of_calls:
                if one.index not in final:
                    final[one.index] = one
                    assert one.id
                    assert one.type == "function"
                else:
                    final[one.index].function.arguments += one.function.arguments
                    pieces += 1

    assert content == "I look."
    assert [one.function.name for one in final.values()] == ["get_weather", "get_time"]
    assert json.loads(final[0].function.arguments) == {"location": "Paris"}
    assert json.loads(final[1].function.arguments) == {}
    assert pieces > 5
    assert [one for one in reasons if one] == ["tool_calls"]
    assert len({one.id for one in final.values()}) == 2


async def test_the_clients_own_stream_helper_follows_the_arguments() -> None:
    class GetWeather(BaseModel):
        city: str
        country: str

    async with written(call("get_weather", city="Paris", country="France")) as (_, client):
        seen: list[str] = []
        done: object = None
        async with client.chat.completions.stream(
            model="hermes",
            messages=ASKED,
            tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
            parallel_tool_calls=True,
        ) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    seen.append(event.arguments_delta)
                elif event.type == "tool_calls.function.arguments.done":
                    done = event.parsed_arguments
            final = await stream.get_final_completion()

    assert json.loads("".join(seen)) == {"city": "Paris", "country": "France"}
    assert done == GetWeather(city="Paris", country="France")
    assert final.choices[0].finish_reason == "tool_calls"


class Table(StrEnum):
    ORDERS = "orders"
    CUSTOMERS = "customers"


class DynamicValue(BaseModel):
    column_name: str


class Condition(BaseModel):
    column: str
    value: str | int | DynamicValue


class Query(BaseModel):
    table_name: Table
    conditions: list[Condition]


async def test_a_tool_of_a_pydantic_model_is_parsed_into_it() -> None:
    query = Query(
        table_name=Table.ORDERS,
        conditions=[Condition(column="at", value=DynamicValue(column_name="due"))],
    )
    async with written(call("Query", **json.loads(query.model_dump_json()))) as (author, client):
        completion = await client.chat.completions.parse(
            model="hermes",
            messages=[{"role": "user", "content": "look up all my late orders"}],
            tools=[openai.pydantic_function_tool(Query)],
        )
        told = author.prompt()

    [called] = completion.choices[0].message.tool_calls or []
    assert called.function.parsed_arguments == query
    assert '"$defs"' in told


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_required_is_enforced_whatever_the_model_was_trained_for(
    stream: bool,
) -> None:
    text = '[{"name": "get_weather", "parameters": {"location": "Paris"}}]'
    async with written(text) as (author, client):
        for model in ("untrained", "hermes"):
            calls, reason = await _calls(
                client, stream, model=model, tool_choice="required", parallel_tool_calls=False
            )
            assert calls == [("get_weather", {"location": "Paris"})]
            assert reason == "tool_calls"
        structured = author.requests[0].structured

    assert structured is not None
    schema = structured.json_schema
    assert isinstance(schema, dict)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_named_has_the_schema_of_its_function(stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    async with written('{"location": "Paris"}') as (author, client):
        calls, reason = await _calls(client, stream, tool_choice=choice)

    assert calls == [("get_weather", {"location": "Paris"})]
    assert reason == "stop"
    assert author.requests[0].structured == StructuredOutput(
        json_schema=WEATHER["function"]["parameters"]
    )


async def _calls(client: AsyncOpenAI, stream: bool, **fields: Any) -> tuple[list[Any], str | None]:
    """The calls of an answer, and why it ended."""
    asked = await create(client, stream=stream, **fields)
    if not stream:
        [choice] = asked.choices
        called: Any = choice.message.tool_calls or []
        calls: Any = [one.function for one in called]
        return [(one.name, json.loads(one.arguments)) for one in calls], choice.finish_reason
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reason = None
    async for chunk in asked:
        reason = chunk.choices[0].finish_reason or reason
        pieces: Any = chunk.choices[0].delta.tool_calls or []
        for one in pieces:
            names[one.index] = names.get(one.index, "") + (one.function.name or "")
            arguments[one.index] = arguments.get(one.index, "") + (one.function.arguments or "")
    return [(names[index], json.loads(arguments[index])) for index in names], reason


@pytest.mark.parametrize("stream", [False, True])
async def test_where_only_one_call_is_wanted_the_engine_stops_before_the_second(
    stream: bool,
) -> None:
    rest = " and so on" * 40
    async with written(f"{call('get_time')}\n{call('get_time')}{rest}") as (author, client):
        one, reason = await _calls(client, stream, parallel_tool_calls=False)
        both, _ = await _calls(client, stream)
        await eventually(lambda: not author.running)

    assert one == [("get_time", {})]
    assert reason == "tool_calls"
    assert both == [("get_time", {})] * 2


async def test_a_template_that_joins_the_arguments_of_calls_gets_them_as_text() -> None:
    joins = TEMPLATE.replace("call.function.arguments | tojson", "'' + call.function.arguments")
    messages = [*ASKED]
    async with written(call("get_weather", location="Paris"), template=joins) as (author, client):
        messages.append((await create(client)).choices[0].message)
        [called] = messages[-1].tool_calls
        messages.append({"role": "tool", "tool_call_id": called.id, "content": "14"})
        await create(client, messages=messages)
        prompt = author.prompt()

    assert call("get_weather", location="Paris") + "<|im_end|>" in prompt


async def test_without_tools_or_with_tools_that_may_not_be_called_a_call_is_text() -> None:
    text = call("get_time")
    async with written(text) as (author, client):
        for fields in ({"tools": openai.omit}, {"tool_choice": "none"}):
            [choice] = (await create(client, **fields)).choices
            assert (choice.message.content, choice.message.tool_calls) == (text, None)
            assert choice.finish_reason == "stop"
            assert "get_time" not in author.prompt()


async def test_each_of_n_answers_has_its_own_calls() -> None:
    async with written(call("get_time")) as (_, client):
        answer = await create(client, n=3)

    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 3
    ids = {choice.message.tool_calls[0].id for choice in answer.choices}
    assert len(ids) == 3


async def test_a_call_that_is_cut_off_says_so() -> None:
    async with written(call("get_weather", location="Paris")) as (_, client):
        [choice] = (await create(client, max_tokens=55)).choices

    assert choice.finish_reason == "length"
    [called] = choice.message.tool_calls
    assert called.function.name == "get_weather"
    assert '{"location": "Paris"}'.startswith(called.function.arguments)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_model_thinks_is_told_apart(stream: bool) -> None:
    text = f"It asks for the time.\n</think>\n\nNow:\n{call('get_time')}"
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    async with written(text) as (_, client):
        answer = await create(client, model="thinker", extra_body=extra, stream=stream)
        if stream:
            deltas = [chunk.choices[0].delta async for chunk in answer]
            reasoning = "".join(getattr(one, "reasoning_content", "") or "" for one in deltas)
            content = "".join(one.content or "" for one in deltas)
        else:
            message = answer.choices[0].message
            reasoning, content = message.reasoning_content, message.content
            assert message.tool_calls[0].function.name == "get_time"

    assert reasoning == "It asks for the time."
    assert content == "Now:"


async def test_a_model_may_think_before_a_call_that_is_enforced() -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    async with written('so\n</think>\n\n[{"name": "get_time", "parameters": {}}]') as (
        author,
        client,
    ):
        answer = await create(client, model="thinker", tool_choice="required", extra_body=extra)
        structured = author.requests[0].structured

    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("so", None)
    assert message.tool_calls[0].function.name == "get_time"
    assert structured is not None
    assert structured.thinking == Thinking("<think>", "</think>", begun=True)


class Step(BaseModel):
    explanation: Literal["halve", "double"]
    output: Annotated[int, Field(ge=0, le=99)]


class MathResponse(BaseModel):
    steps: Annotated[list[Step], Field(max_length=2)]
    final_answer: Literal["2", "4"]


async def test_an_answer_is_parsed_into_the_model_that_gives_its_form() -> None:
    async with written("") as (_, client):
        for seed in range(3):
            completion = await client.chat.completions.parse(
                model="babbler", messages=ASKED, response_format=MathResponse, seed=seed
            )
            assert isinstance(completion.choices[0].message.parsed, MathResponse)
        async with client.chat.completions.stream(
            model="babbler", messages=ASKED, response_format=MathResponse, seed=7
        ) as stream:
            done = [event.parsed async for event in stream if event.type == "content.done"]

    assert isinstance(done[0], MathResponse)


class Pick(BaseModel):
    """Pick one."""

    what: Literal["a", "b"] | None


async def test_calls_that_are_enforced_fit_whatever_a_model_would_say() -> None:
    tools: Any = [openai.pydantic_function_tool(Pick), openai.pydantic_function_tool(Step)]
    choices: Any = ["required", {"type": "function", "function": {"name": "Pick"}}] * 2
    async with written("") as (_, client):
        for seed, choice in enumerate(choices):
            completion = await client.chat.completions.parse(
                model="babbler",
                messages=[{"role": "user", "content": "?"}],
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=False,
                seed=seed,
            )
            [called] = completion.choices[0].message.tool_calls or []
            assert type(called.function.parsed_arguments).__name__ == called.function.name


async def test_a_model_that_may_call_answers_in_the_form_or_calls() -> None:
    tools: Any = [openai.pydantic_function_tool(Pick)]
    [begins_call] = tiny_tokenizer().encode("<")
    fields: Any = {"model": "babbler", "tools": tools, "response_format": MathResponse}
    fields |= {"messages": [{"role": "user", "content": "?"}], "parallel_tool_calls": False}
    async with written("") as (_, client):
        for seed in range(3):
            answered, called = [
                (
                    await client.chat.completions.parse(
                        logit_bias={str(begins_call): bias}, seed=seed, **fields
                    )
                )
                .choices[0]
                .message
                for bias in (-100, 30)
            ]
            assert isinstance(answered.parsed, MathResponse)
            assert not answered.tool_calls
            [one, *_] = called.tool_calls or []
            assert isinstance(one.function.parsed_arguments, Pick)
            assert not called.content


REFUSED: Sequence[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only 'function'"),
    ({"tool_choice": "always"}, "tool_choice", "'required'"),
    ({"tools": openai.omit, "tool_choice": "required"}, "tool_choice", "there are no tools"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice.function.name",
        "the tools are: get_time, get_weather",
    ),
]


async def test_what_of_tools_does_not_fit_is_refused_before_an_engine_works() -> None:
    async with written("no") as (author, client):
        for fields, param, part in REFUSED:
            with pytest.raises(openai.APIStatusError, match=part.replace("[", ".")) as raised:
                await create(client, **fields)
            assert raised.value.param == param
            assert raised.value.status_code in (400, 422)

    assert author.requests == []
