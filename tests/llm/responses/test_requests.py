"""Requests for responses as chats."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.openai.requests import chat_of
from dynbus.llm.responses.requests import chat_body, items_given, read_responses

PICTURE = "data:image/png;base64,AA=="


def body_of(**fields: Any) -> dict[str, Any]:
    request = {"model": "tiny", "input": "hi", **fields}
    read = read_responses(json.dumps(request).encode())
    return chat_body(read, items_given(read, {}))


def test_a_text_is_what_the_user_says() -> None:
    assert body_of() == {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def test_instructions_and_what_developers_say_first_are_one_system_message() -> None:
    body = body_of(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "system", "content": [{"type": "input_text", "text": "Be true."}]},
            {"role": "user", "content": "hi"},
        ],
    )

    assert body["messages"] == [
        {"role": "system", "content": "Be brief.\n\nBe kind.\n\nBe true."},
        {"role": "user", "content": "hi"},
    ]


def test_a_turn_of_the_assistant_is_one_message_with_its_thoughts_and_calls() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    body = body_of(
        input=[
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"text": "Hm."}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Let me see."}],
            },
            call,
            {**call, "call_id": "c2", "name": "g"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "two"}],
            },
            call,
        ]
    )

    def told(call_id: str, name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": '{"a": 1}'}
        return {"id": call_id, "type": "function", "function": function}

    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Let me see.",
            "tool_calls": [told("c1", "f"), told("c2", "g")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [told("c1", "f")]},
    ]


def test_a_picture_is_a_part_of_its_message() -> None:
    content = [
        {"type": "input_text", "text": "what?"},
        {"type": "input_image", "image_url": PICTURE},
    ]

    [message] = body_of(input=[{"role": "user", "content": content}])["messages"]

    assert message["content"] == [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": PICTURE}},
    ]


def test_tools_and_formats_are_those_of_a_chat() -> None:
    parameters: Any = {"type": "object", "properties": {}}
    body = body_of(
        tools=[{"type": "function", "name": "f", "parameters": parameters, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": parameters, "strict": True}},
        reasoning={"effort": "low"},
        max_output_tokens=5,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        top_k=3,
        stream=True,
    )

    del body["messages"]
    assert body == {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "parameters": parameters, "strict": True},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": parameters, "strict": True},
        },
        "reasoning_effort": "low",
        "top_k": 3,
    }


def test_a_choice_among_some_tools_is_the_chats() -> None:
    tools = [{"type": "function", "name": name} for name in ("f", "g")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools[:1]}

    body = body_of(tools=tools, tool_choice=choice)

    use = chat_of(body).tool_use()
    assert [tool["function"]["name"] for tool in use.tools] == ["f"]
    assert use.is_forced


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "responses are not kept"),
        ({"conversation": "conv_1"}, "conversation", "send the items of this one"),
        ({"background": True}, "background", "nothing is done without its client"),
        ({"prompt": {"id": "p"}}, "prompt", "send its text as instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "give functions"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp' is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send the item itself"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "'computer_call' are not supported"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "give one of user"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "a string or a list"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0]",
            "'input_file' are not supported",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": 3, "arguments": ""}]},
            "input[0].name",
            "give a string",
        ),
        ({"text": {"format": "json"}}, "text.format", "an object with a type"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
    ],
)
def test_what_is_not_done_is_refused_with_its_place(
    fields: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(BadRequest) as raised:
        body_of(**fields)

    assert raised.value.param == param
    assert why in raised.value.message


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("type", "role", "content", "text", "name", "call_id", "output", "x")),
            inner
            | st.sampled_from(("message", "user", "reasoning", "function_call", "input_text")),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {"input": anything, "tools": anything, "text": anything, "tool_choice": anything}
    )
)
def test_whatever_is_asked_is_taken_or_refused(fields: dict[str, Any]) -> None:
    body: dict[str, Any] = {}
    with contextlib.suppress(BadRequest):
        body = body_of(**fields)

    assert not body or body["messages"]
