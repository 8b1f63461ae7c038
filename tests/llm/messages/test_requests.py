"""Requests for messages as chats."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.messages.requests import chat_body, read_conversation, read_messages
from dynbus.llm.openai.errors import BadRequest

USER = {"role": "user", "content": "hi"}


def body_of(**fields: Any) -> dict[str, Any]:
    request = {"model": "tiny", "max_tokens": 5, "messages": [USER], **fields}
    return chat_body(read_messages(json.dumps(request).encode()))


def test_a_message_is_a_chat() -> None:
    body = body_of(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        metadata={"user_id": "ada"},
    )

    assert body == {
        "model": "tiny",
        "max_tokens": 5,
        "messages": [{"role": "system", "content": "Be brief."}, USER],
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
    }


def test_turns_of_one_role_are_one_message() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    body = body_of(messages=[USER, {"role": "user", "content": blocks}])

    assert body["messages"] == [{"role": "user", "content": "hi\n\na\nb"}]


def test_calls_and_their_results_are_those_of_a_chat() -> None:
    body = body_of(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "and?"},
                    {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [{"type": "text", "text": "no such file"}],
                        "is_error": True,
                    },
                    {"type": "tool_result", "tool_use_id": "t3"},
                ],
            },
        ]
    )

    function: Any = {"name": "f", "arguments": '{"a":1}'}
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such file"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "and?"},
    ]


def test_pictures_and_documents_are_parts() -> None:
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
        {"type": "image", "source": {"type": "url", "url": "http://host/a.png"}},
        {
            "type": "document",
            "title": "A title",
            "source": {"type": "text", "media_type": "text/plain", "data": "A text."},
        },
        {
            "type": "search_result",
            "source": "http://host",
            "title": "Found",
            "content": [{"type": "text", "text": "It says."}],
        },
    ]

    [message] = body_of(messages=[{"role": "user", "content": blocks}])["messages"]

    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "image_url", "image_url": {"url": "http://host/a.png"}},
        {"type": "text", "text": "A title\nA text."},
        {"type": "text", "text": "Found\nhttp://host\nIt says."},
    ]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_tools_are_functions(choice: dict[str, Any], told: dict[str, Any]) -> None:
    schema: Any = {"type": "object", "properties": {}}

    body = body_of(
        tools=[{"name": "f", "description": "Does f.", "input_schema": schema}],
        tool_choice=choice,
    )

    function: Any = {"name": "f", "description": "Does f.", "parameters": schema}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert {name: body[name] for name in told} == told


def test_the_form_of_an_answer_and_thinking_are_the_chats() -> None:
    schema: Any = {"type": "object"}
    body = body_of(
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )

    assert body["reasoning_effort"] == "low"
    assert body["response_format"]["json_schema"]["schema"] == schema
    assert body["chat_template_kwargs"] == {"enable_thinking": True}


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    body = body_of(
        messages=[USER, {"role": "assistant", "content": [{"type": "text", "text": "{"}]}]
    )

    assert body["messages"] == [USER, {"role": "assistant", "content": "{"}]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in body_of(messages=[USER])


def test_a_count_needs_no_limit() -> None:
    request = read_conversation(json.dumps({"model": "tiny", "messages": [USER]}).encode())

    assert chat_body(request) == {"model": "tiny", "messages": [USER]}


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"messages": []}, "messages", "give at least one"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages", "have a text"),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "text", "text": "a"},
                            {"type": "tool_use", "id": "x", "name": "f", "input": {"a": "b"}},
                        ],
                    },
                ]
            },
            "messages",
            "no tool_use without",
        ),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "'user' or 'assist"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a string or a list of blocks"),
        (
            {"messages": [{"role": "user", "content": [3]}]},
            "messages[0].content[0]",
            "give a block",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "messages[0].content[0]",
            "'audio' are not supported here",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}
                ]
            },
            "messages[0].content[0].source",
            "'file' are not supported",
        ),
        ({"tools": [{"type": "web_search_20250305"}]}, "tools[0]", "is not supported"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "give a JSON schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "give 'auto', 'any'"),
        ({"thinking": {"type": "loud"}}, "thinking.type", "give 'enabled'"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format", "json_schema"),
        ({"container": "c"}, "container", "remove this field"),
        ({"mcp_servers": ["x"]}, "mcp_servers", "give tools"),
        ({"max_tokens": None}, "max_tokens", "Expected `int`"),
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
            st.sampled_from(("type", "role", "content", "text", "source", "name", "input", "id")),
            inner
            | st.sampled_from(("text", "user", "tool_use", "tool_result", "image", "assistant")),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {"messages": anything, "system": anything, "tools": anything, "tool_choice": anything}
    )
    | st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.fixed_dictionaries(
                    {"role": st.sampled_from(("user", "assistant")), "content": anything}
                ),
                min_size=1,
            )
        }
    )
)
def test_whatever_is_asked_is_taken_or_refused(fields: dict[str, Any]) -> None:
    body: dict[str, Any] = {}
    with contextlib.suppress(BadRequest):
        body = body_of(**fields)

    assert not body or body["messages"]
