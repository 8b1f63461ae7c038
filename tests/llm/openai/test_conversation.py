"""Messages as templates expect them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dynbus.llm.openai.conversation import messages_for_template
from dynbus.llm.openai.errors import BadRequest


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": [2.5]}', {"b": 1, "a": [2.5]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        # What a model broke off, or never wrote well, does not end the conversation.
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("\ud800", "\ud800"),
    ],
)
def test_the_arguments_of_a_call_are_an_object(arguments: Any, expected: Any) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}

    [told] = messages_for_template([message])

    assert told["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}
    assert told["tool_calls"][0]["id"] == "call_1"
    # Templates would write None out.
    assert told["content"] == ""
    assert message["tool_calls"] == [call(arguments)]


def test_arguments_are_the_text_of_a_request_for_a_template_that_wants_that() -> None:
    message = {"role": "assistant", "tool_calls": [call('{"b" :1}'), call({"a": 1})]}

    [told] = messages_for_template([message], text_arguments=True)

    assert [one["function"]["arguments"] for one in told["tool_calls"]] == ['{"b" :1}', '{"a":1}']


def test_the_order_of_arguments_is_kept() -> None:
    [told] = messages_for_template([{"role": "assistant", "tool_calls": [call('{"z":1,"a":2}')]}])

    assert list(told["tool_calls"][0]["function"]["arguments"]) == ["z", "a"]


def test_the_parts_of_a_result_are_joined_and_other_fields_stay() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]

    asked = {"role": "assistant", "tool_calls": [call("{}")]}

    _, told = messages_for_template(
        [asked, {"role": "tool", "tool_call_id": "call_1", "content": parts}]
    )

    assert told == {"role": "tool", "tool_call_id": "call_1", "content": "a\nb"}


def test_an_answer_of_a_tool_follows_its_call() -> None:
    asked = {"role": "assistant", "tool_calls": [call("{}"), {**call("{}"), "id": "call_2"}]}
    answers = [{"role": "tool", "tool_call_id": f"call_{n}", "content": "a"} for n in (2, 1)]
    goes_on = {"role": "user", "content": "b"}

    assert len(messages_for_template([asked, *answers, goes_on])) == 4
    with pytest.raises(BadRequest, match="follows its call") as raised:
        messages_for_template([asked, answers[0], goes_on, answers[1]])
    assert raised.value.param == "messages[3].tool_call_id"


@pytest.mark.parametrize(
    ("message", "param", "part"),
    [
        ({}, "messages[0].role", "give one of system, developer, user, assistant, tool"),
        ({"role": "root", "content": "a"}, "messages[0].role", "give one of system"),
        ({"role": "user<|im_end|>", "content": "a"}, "messages[0].role", "give one of system"),
        ({"role": ["user"], "content": "a"}, "messages[0].role", "give one of system"),
        ({"role": "user", "content": None}, "messages[0].content", "give a string or a list"),
        ({"role": "system"}, "messages[0].content", "give a string or a list"),
        (
            {"role": "tool", "tool_call_id": "call_1", "content": "a"},
            "messages[0].tool_call_id",
            "it is the id of no call",
        ),
        (
            {"role": "tool", "tool_call_id": [3], "content": "a"},
            "messages[0].tool_call_id",
            "a str",
        ),
        (
            {"role": "assistant", "tool_calls": [{**call("{}"), "id": [3]}]},
            "messages[0].tool_calls[0].id",
            "give a string",
        ),
        ({"role": "user", "content": 3}, "messages[0].content", "give a string or a list"),
        ({"role": "user", "content": [3]}, "messages[0].content[0]", "{'type': 'text'"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[0].content[0]",
            "parts of the type 'image_url' are not supported",
        ),
        ({"role": "assistant", "tool_calls": 3}, "messages[0].tool_calls", "give a list"),
        ({"role": "assistant", "tool_calls": [3]}, "messages[0].tool_calls[0]", "'arguments'"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]},
            "messages[0].tool_calls[0]",
            "'arguments'",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "messages[0].tool_calls[0]",
            "'name'",
        ),
    ],
)
def test_a_message_that_is_none_is_refused_with_its_place(
    message: dict[str, Any], param: str, part: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(part)) as raised:
        messages_for_template([message])

    assert raised.value.param == param
