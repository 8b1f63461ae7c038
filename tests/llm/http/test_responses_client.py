"""The `openai` package as a client of `/v1/responses`."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel
from tests.conditions import PATIENCE
from tests.llm.text.tiny_tokenizer import tiny_tokenizer

from dynbus import Unavailable
from dynbus.bus.records.objects import ObjectStore
from dynbus.kvrouter.routing.fairness import Shares
from dynbus.llm.generation import Session
from dynbus.llm.openai.api import Asked
from dynbus.llm.responses.api import ResponsesApi
from dynbus.llm.shares import SharedRoom

from .author import call, written
from .served import Served, card, served

pytestmark = pytest.mark.anyio

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tell the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@asynccontextmanager
async def asked(**settings: Any) -> AsyncGenerator[tuple[Served, AsyncOpenAI]]:
    """A front end, and a client of it that repeats nothing."""
    async with (
        served(**settings) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield front, client


async def test_a_text_is_answered_whole_and_as_a_stream() -> None:
    async with asked() as (front, client):
        whole = await client.responses.create(
            model="tiny", instructions="Be brief.", input="say Paris is it."
        )
        async with client.responses.stream(model="tiny", input="say naïve café 🙂") as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        cut = await client.responses.create(
            model="tiny", input="say Paris is it.", max_output_tokens=2
        )

    assert (whole.output_text, whole.status) == ("Paris is it.", "completed")
    assert whole.usage is not None
    assert whole.usage.input_tokens == len(front.engine.requests[0].token_ids)
    assert whole.usage.input_tokens_details.cached_tokens == 3
    assert streamed.output_text == "naïve café 🙂"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


async def test_tools_are_called_and_their_results_sent_back() -> None:
    call = {"index": 0, "id": "call_1", "type": "function"}
    async with asked() as (front, client):
        front.text.deltas = [
            {"reasoning_content": "Weather, hm."},
            {"tool_calls": [{**call, "function": {"name": "get_weather", "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
        ]
        front.text.finish_reason = "tool_calls"
        conversation: list[Any] = [{"role": "user", "content": "Is it raining in Paris?"}]
        async with client.responses.stream(
            model="text", input=conversation, tools=[WEATHER]
        ) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        whole = await client.responses.create(model="text", input=conversation, tools=[WEATHER])
        conversation += whole.output
        conversation.append(
            {"type": "function_call_output", "call_id": "call_1", "output": "It is."}
        )
        front.text.deltas, front.text.finish_reason = [{"content": "Yes."}], "stop"
        answer = await client.responses.create(model="text", input=conversation, tools=[WEATHER])

    pieces = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
    assert pieces == ['{"city": ', '"Paris"}']
    for response in (streamed, whole):
        reasoning, called = response.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert reasoning.content[0].text == "Weather, hm."
        assert called.type == "function_call"
        assert (called.name, called.call_id) == ("get_weather", "call_1")
        assert called.arguments == '{"city": "Paris"}'
    assert answer.output_text == "Yes."
    sent = front.text.requests[-1]
    assert sent["messages"][1:] == [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Weather, hm.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "It is."},
    ]
    assert sent["tools"][0]["function"]["name"] == "get_weather"


async def test_what_a_model_writes_is_read_into_items() -> None:
    thought = f"<think>Weather, hm.</think>\n{call('get_weather', city='Paris')}"
    async with written(thought, thought, "It is <think>raining.") as (author, client):
        asked: Any = {"model": "thinker", "input": "Is it raining?", "tools": [WEATHER]}
        create: Any = client.responses.create
        whole = await create(**asked)
        async with client.responses.stream(**asked) as stream:
            types = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        called_as = whole.output[-1].call_id
        output = {"type": "function_call_output", "call_id": called_as, "output": "It is."}
        conversation: Any = [{"role": "user", "content": "?"}, *whole.output, output]
        await client.responses.create(model="hermes", input=conversation)
        prompt = author.prompt()

    both: list[Any] = [whole, streamed]
    for response in both:
        reasoning, called = response.output
        assert reasoning.type == "reasoning"
        assert reasoning.content[0].text.strip() == "Weather, hm."
        assert called.type == "function_call"
        assert (called.name, json.loads(called.arguments)) == ("get_weather", {"city": "Paris"})
        assert response.status == "completed"
    assert "response.reasoning_text.delta" in types
    assert types.count("response.function_call_arguments.delta") > 1
    assert call("get_weather", city="Paris") + "<|im_end|>" in prompt
    assert "<|im_start|>tool\nIt is.<|im_end|>" in prompt


class CalendarEvent(BaseModel):
    name: str
    participants: list[str]


async def test_the_form_of_a_text_is_a_pydantic_model() -> None:
    text = CalendarEvent(name="Science fair", participants=["Alice", "Bob"]).model_dump_json()
    async with written(text) as (author, client):
        response = await client.responses.parse(
            model="hermes",
            input=[
                {"role": "system", "content": "Extract the event information."},
                {"role": "user", "content": "Alice and Bob are going to a science fair."},
            ],
            text_format=CalendarEvent,
        )
        async with client.responses.stream(
            model="hermes", input="Alice and Bob.", text_format=CalendarEvent
        ) as stream:
            streamed = await stream.get_final_response()

    event = response.output_parsed
    assert event is not None
    assert event.participants == ["Alice", "Bob"]
    assert streamed.output_parsed == event
    structured = author.requests[0].structured
    assert structured is not None
    assert isinstance(structured.json_schema, dict)
    assert structured.json_schema["required"] == ["name", "participants"]


async def test_what_is_not_kept_is_refused_with_the_reason() -> None:
    async with asked() as (_, client):
        with pytest.raises(openai.BadRequestError, match="conversations are not stored") as raised:
            await client.responses.create(model="tiny", input="hi", conversation="conv_1")
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
            await client.responses.create(model="other", input="hi")

    assert raised.value.param == "conversation"


async def test_refusals_name_what_the_request_has() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    shown: Any = [{"role": "user", "content": [image]}]
    form: Any = {"type": "json_schema", "name": "x", "schema": {"type": "object", "not": {}}}
    async with asked() as (_, client):
        with pytest.raises(openai.BadRequestError, match=r"content\[0\]: this part is") as part:
            await client.responses.create(model="tiny", instructions="Look.", input=shown)
        with pytest.raises(openai.BadRequestError, match="and input has .* shorten input") as long:
            await client.responses.create(model="tiny", input="messages " * 3000)
        with pytest.raises(openai.BadRequestError, match=r"text\.format: ") as unfit:
            await client.responses.create(model="tiny", input="hi", text={"format": form})
        missing: Any = client.post("/responses", body={"model": "tiny"}, cast_to=object)
        with pytest.raises(openai.BadRequestError) as nothing:
            await missing

    assert part.value.param == "input[0].content[0]"
    assert [each.value.param for each in (long, nothing)] == ["input"] * 2
    assert unfit.value.param == "text.format"


async def test_an_engine_that_fails_within_a_stream_fails_the_response() -> None:
    async with asked() as (_, client):
        stream = await client.responses.create(model="tiny", input="break x", stream=True)
        events = [event async for event in stream]

    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert "secret" not in events[-1].response.error.message


# Responses that go on from others ----------------------------------------------------------------


def chatml(*said: tuple[str, str]) -> str:
    """A prompt of a conversation."""
    told = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    return f"{told}<|im_start|>assistant\n"


def is_kept(answer: Response) -> bool:
    """Whether a response says that it can be gone on from."""
    store = answer.to_dict()["store"]
    assert isinstance(store, bool)
    return store


def asked_tokens(front: Served) -> str:
    return tiny_tokenizer().decode(front.engine.requests[-1].token_ids, special=True)


async def test_a_response_goes_on_from_another_one() -> None:
    async with asked() as (front, client):
        first = await client.responses.create(
            model="tiny", instructions="Be brief.", input="say Paris is it."
        )
        async with client.responses.stream(
            model="tiny", input="say Yes.", previous_response_id=first.id
        ) as stream:
            second = await stream.get_final_response()
        streamed = asked_tokens(front)
        forked = await client.responses.create(
            model="tiny", input="say No.", previous_response_id=first.id
        )
        fork = asked_tokens(front)
        third = await client.responses.create(
            model="tiny", input="say Ok.", previous_response_id=second.id
        )
        read = await client.responses.retrieve(third.id)
        items = await client.responses.input_items.list(third.id)

    assert fork == streamed.replace("say Yes.", "say No.")
    # Instructions are those of each request.
    assert streamed == chatml(
        ("user", "say Paris is it."), ("assistant", "Paris is it."), ("user", "say Yes.")
    )
    assert asked_tokens(front) == chatml(
        ("user", "say Paris is it."),
        ("assistant", "Paris is it."),
        ("user", "say Yes."),
        # The engine does what it was asked first.
        ("assistant", "Paris is it."),
        ("user", "say Ok."),
    )
    assert second.previous_response_id == forked.previous_response_id == first.id
    assert is_kept(first)
    assert read == third
    assert [item.to_dict()["content"] for item in items.data] == [
        [{"type": "input_text", "text": "say Ok."}]
    ]


async def test_a_response_that_is_not_to_be_kept_is_gone() -> None:
    async with asked() as (_, client):
        forgotten = await client.responses.create(model="tiny", input="say hi", store=False)
        kept = await client.responses.create(model="tiny", input="say hi")
        await client.responses.delete(kept.id)
        for name in (forgotten.id, kept.id, "resp_none", "../x"):
            with pytest.raises(openai.NotFoundError) as missing:
                await client.responses.retrieve(name)
            assert missing.value.code in ("response_not_found", "not_found")
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(
                    model="tiny", input="say hi", previous_response_id=name
                )
            assert refused.value.code == "previous_response_not_found"
            assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(kept.id)
    assert not is_kept(forgotten)


async def test_a_request_names_items_of_a_kept_response() -> None:
    async with asked() as (front, client):
        first = await client.responses.create(model="tiny", input="say Paris is it.")
        named: Any = {"type": "item_reference", "id": first.output[0].id}
        unknown: Any = {"type": "item_reference", "id": "msg_none_0"}
        asking: Any = {"role": "user", "content": "say Yes."}
        second = await client.responses.create(model="tiny", input=[named, asking])
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input=[unknown, asking])

    assert second.output_text == "Yes."
    assert asked_tokens(front) == chatml(("assistant", "Paris is it."), ("user", "say Yes."))
    assert refused.value.param == "input[0]"


async def test_two_requests_of_one_id_have_responses_of_their_own() -> None:
    headers = {"X-Request-Id": "mine"}
    async with asked() as (_, client):
        first = await client.responses.create(model="tiny", input="say one", extra_headers=headers)
        second = await client.responses.create(
            model="tiny", input="say two", previous_response_id=first.id, extra_headers=headers
        )
        read = await client.responses.retrieve(first.id)

    assert first.id != second.id
    assert read.output_text == "one"


async def test_a_kept_response_as_a_stream_is_refused_not_empty() -> None:
    async with asked() as (_, client):
        kept = await client.responses.create(model="tiny", input="say hi")
        whole = await client.responses.retrieve(kept.id, stream=False)
        with pytest.raises(openai.BadRequestError, match="told as a whole") as refused:
            await client.responses.retrieve(kept.id, stream=True)

    assert whole.output_text == "hi"
    assert refused.value.param == "stream"


async def test_a_tenant_does_not_see_the_responses_of_another(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first secret-of-the-first\nsecond secret-of-the-second\n")
    async with asked(api_keys=keys) as (_, client):
        first = client.with_options(api_key="secret-of-the-first")
        second = client.with_options(api_key="secret-of-the-second")
        answer = await first.responses.create(model="tiny", input="say hi")
        with pytest.raises(openai.NotFoundError):
            await second.responses.retrieve(answer.id)
        with pytest.raises(openai.NotFoundError):
            await second.responses.delete(answer.id)
        with pytest.raises(openai.BadRequestError):
            await second.responses.create(
                model="tiny", input="say hi", previous_response_id=answer.id
            )
        assert (await first.responses.retrieve(answer.id)).output_text == "hi"


async def test_what_is_before_is_read_beside_the_streams_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    read = ResponsesApi.read

    def noted(api: ResponsesApi, data: bytes) -> Asked:
        threads.append(threading.current_thread())
        return read(api, data)

    monkeypatch.setattr(ResponsesApi, "read", noted)
    async with asked() as (_, client):
        first = await client.responses.create(model="tiny", input="say hi")
        await client.responses.create(model="tiny", input="say hi", previous_response_id=first.id)

    own = threading.current_thread()
    assert [one is own for one in threads] == [True, False]


async def test_a_stream_that_cannot_be_resumed_is_kept_and_ends() -> None:
    async with asked() as (_, client):
        with anyio.fail_after(PATIENCE):
            stream = await client.responses.create(
                model="text",
                input="hi",
                stream=True,
                extra_headers={"Dynbus-Resumable": "1"},
            )
            events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        kept = await client.responses.retrieve(events[-1].response.id)

    assert kept.output_text == "two words"


async def test_a_front_end_that_keeps_none_says_so() -> None:
    async with asked(forget_responses=True) as (_, client):
        answer = await client.responses.create(model="tiny", input="say hi")
        with pytest.raises(openai.BadRequestError, match="not kept here"):
            await client.responses.create(
                model="tiny", input="say hi", previous_response_id=answer.id
            )
        with pytest.raises(openai.NotFoundError, match="--forget-responses"):
            await client.responses.retrieve(answer.id)
    assert not is_kept(answer)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_response_that_could_not_be_kept_says_so(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise Unavailable("the bus is away")

    monkeypatch.setattr(ObjectStore, "put", fails)
    answer: Response
    async with asked() as (_, client):
        if streams:
            async with client.responses.stream(model="tiny", input="say hi you") as stream:
                events = [event async for event in stream]
                answer = await stream.get_final_response()
            numbers = [event.sequence_number for event in events]
            assert numbers == list(range(len(events)))
        else:
            answer = await client.responses.create(model="tiny", input="say hi you")

    assert answer.output_text == "hi you"
    assert not is_kept(answer)


async def test_a_conversation_that_goes_on_is_named_to_routers_and_engines(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada secret-of-ada\n")
    async with asked(api_keys=keys, session_seconds=300.0) as (front, client):
        client = client.with_options(api_key="secret-of-ada")

        async def sent(**options: Any) -> tuple[Session | None, str | None]:
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "say hi"}], **options
            )
            return front.engine.requests[-1].session, front.engine.metadata[-1].get("session")

        assert await sent() == (None, None)
        for header, seconds in (
            ("a-1", 300.0),
            ("a-1;seconds=20", 20.0),
            ("a-1; seconds=9999", 300.0),
        ):
            named = await sent(extra_headers={"Dynbus-Session": header})
            assert named == (Session("a-1", seconds), "ada/a-1")
        assert await sent(extra_headers={"Dynbus-Session": "a-1;seconds=0"}) == (None, None)
        for wrong in ("", "a b", "a;seconds=-1", "a;seconds=soon", "a" * 129):
            with pytest.raises(openai.BadRequestError) as refused:
                await sent(extra_headers={"Dynbus-Session": wrong})
            assert refused.value.param == "Dynbus-Session"

        first = await client.responses.create(model="tiny", input="say hi")
        assert front.engine.requests[-1].session is None
        second = await client.responses.create(
            model="tiny", input="say hi", previous_response_id=first.id
        )
        assert front.engine.requests[-1].session == Session(first.id, 300.0, second.id, first.id)
        # Each of two that go on from the same one is a branch.
        for _ in range(2):
            third = await client.responses.create(
                model="tiny", input="say hi", previous_response_id=second.id
            )
            branch = Session(first.id, 300.0, third.id, second.id)
            assert front.engine.requests[-1].session == branch
            assert front.engine.metadata[-1]["session"] == f"ada/{first.id}"


async def test_the_tokens_of_an_input_are_those_that_its_response_has() -> None:
    weather: Any = {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }
    asked_for: Any = {"model": "tiny", "input": "say hi", "instructions": "Be brief."}
    async with asked() as (_, client):
        create: Any = client.responses.create
        response = await create(**asked_for, tools=[weather])
        counted = await client.responses.input_tokens.count(**asked_for, tools=[weather])
        after: Any = {"model": "tiny", "input": "say hi", "previous_response_id": response.id}
        next_one = await create(**after)
        counted_on = await client.responses.input_tokens.count(**after)

    assert response.usage is not None
    assert next_one.usage is not None
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == response.usage.input_tokens
    assert counted_on.input_tokens == next_one.usage.input_tokens


async def test_what_is_read_of_kept_responses_counts_as_the_body_of_its_tenant_does(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada key-of-ada\n")
    cards = {"tiny": card("tiny", "test.ScriptedEngine.generate", context_length=200_000)}
    rooms: list[str] = []
    async with (
        served(cards, api_keys=keys, max_body_bytes=1 << 20) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="key-of-ada", max_retries=0) as ada,
    ):
        shared = front.front_end.shared
        shared.bodies = SharedRoom(Shares(100_000, 1))
        create = partial(ada.responses.create, model="tiny", max_output_tokens=4)
        first = await create(input="say hi " + "or so " * 5000)
        brief = await create(input="say hi")
        going_on = partial(create, input="say hi", previous_response_id=first.id)
        await shared.bodies.reserve("ada", 40_000)
        with pytest.raises(openai.APIStatusError) as refused:
            await going_on()
        rooms.append(repr(shared.bodies))
        short = await create(input="say hi", previous_response_id=brief.id)
        shared.bodies.give_back("ada", 40_000)
        await going_on()
        rooms.append(repr(shared.bodies))

    assert "leave no room for the responses that this one goes on from" in refused.value.message
    assert refused.value.response.headers["retry-after"] == "1"
    assert short.output_text
    assert ["[40000 of" in rooms[0], "[0 of" in rooms[1]] == [True, True]
