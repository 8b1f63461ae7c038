"""A message as blocks and events: the events of a stream come to the message that is whole."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import StreamLost
from dynbus.llm.answers import Output, Usage, joined
from dynbus.llm.messages.answer import MessageFormat
from dynbus.llm.parsing.delta import Delta, ToolCallDelta

USAGE = Usage(7, 5, 4)


def events_of(data: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for event in data.decode().split("\n\n")[:-1]:
        name, _, told = event.partition("\ndata: ")
        events.append(json.loads(told))
        assert name == f"event: {events[-1]['type']}"
    return events


def streamed(deltas: list[Delta], finish_reason: str) -> list[dict[str, Any]]:
    format = MessageFormat("tiny", "1")
    output = format.output(0)
    told = b""
    for delta in deltas:
        is_plain = delta == Delta(delta.content) and delta.content
        told += output.text(delta.content) if is_plain else output.piece(Output(0, delta))
    told += output.piece(Output(0, Delta(), finish_reason=finish_reason))
    return events_of(format.start(USAGE) + told + format.end(USAGE))


def call(index: int, *pieces: str) -> list[Delta]:
    first = Delta(tool_calls=(ToolCallDelta(index, f"toolu_{index}", "f"),))
    return [first, *(Delta(tool_calls=(ToolCallDelta(index, arguments=one),)) for one in pieces)]


def test_a_stream_is_told_in_anthropics_order() -> None:
    deltas = [Delta(reasoning="Hm."), Delta("Let "), Delta("me."), *call(0, '{"a"', ": 1}")]

    events = streamed(deltas, "tool_calls")

    assert [(event["type"], event.get("index")) for event in events] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("message_delta", None),
        ("message_stop", None),
    ]
    blocks = [event for event in events if event["type"] == "content_block_delta"]
    assert [event["delta"]["type"] for event in blocks] == [
        *("thinking_delta", "signature_delta"),
        *("text_delta", "text_delta"),
        *("input_json_delta", "input_json_delta"),
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 5,
    }


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events."""
    message: dict[str, Any] = events[0]["message"]
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


@given(
    st.lists(st.text(max_size=3), max_size=4),
    st.lists(st.text(max_size=3), max_size=4),
    st.integers(0, 2),
    st.sampled_from(("stop", "length")),
)
def test_the_events_come_to_the_whole_message(
    reasoning: list[str], content: list[str], calls: int, finish_reason: str
) -> None:
    deltas = [Delta(reasoning=text) for text in reasoning]
    deltas += [Delta(content=text) for text in content]
    deltas += [one for index in range(calls) for one in call(index, '{"a":', '"b"}')]

    events = streamed(deltas, finish_reason)

    output = Output(0, joined(deltas), finish_reason=finish_reason)
    whole = json.loads(MessageFormat("tiny", "1").whole([output], USAGE))
    assert accumulated(events) == whole


def test_the_stop_string_is_told() -> None:
    output = Output(0, Delta("Par"), finish_reason="stop", stop_string="is")

    whole = json.loads(MessageFormat("tiny", "1").whole([output], USAGE))

    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "is")


def test_arguments_that_are_no_object_are_told_as_they_are() -> None:
    for text, told in (
        ('{"a": ', {"arguments": '{"a": '}),
        ("[1]", {"arguments": [1]}),
        ("", {}),
    ):
        said = joined(call(0, text))

        whole = json.loads(MessageFormat("tiny", "1").whole([Output(0, said)], None))

        assert whole["content"][0]["input"] == told


def test_a_stream_that_fails_ends_with_anthropics_error() -> None:
    format = MessageFormat("tiny", "1")

    [event] = events_of(format.error(StreamLost("the engine died"), "r1"))

    assert event == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the engine died"},
        "request_id": "r1",
    }
