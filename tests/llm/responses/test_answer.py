"""A response as items and events: the events of a stream come to the response that is whole."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import StreamLost
from dynbus.llm.answers import Output, TokenText, Usage, joined
from dynbus.llm.parsing.delta import Delta, ToolCallDelta
from dynbus.llm.responses.answer import ResponseFormat, repeated_fields
from dynbus.llm.responses.requests import read_responses

USAGE = Usage(7, 5, 4)


def response_format(**fields: Any) -> ResponseFormat:
    request = {"model": "tiny", "input": "hi", **fields}
    repeated = repeated_fields(read_responses(json.dumps(request).encode()))
    return ResponseFormat(json.dumps(repeated).encode(), "1")


def events_of(data: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for event in data.decode().split("\n\n")[:-1]:
        name, _, told = event.partition("\ndata: ")
        events.append(json.loads(told))
        assert name == f"event: {events[-1]['type']}"
    return events


def streamed(format: ResponseFormat, deltas: list[Delta], finish_reason: str) -> bytes:
    output = format.output(0)
    told = b""
    for delta in deltas:
        is_plain = delta == Delta(delta.content) and delta.content
        told += output.text(delta.content) if is_plain else output.piece(Output(0, delta))
    told += output.piece(Output(0, Delta(), finish_reason=finish_reason))
    return format.start(USAGE) + told + format.end(USAGE)


def call(index: int, name: str, *pieces: str) -> list[Delta]:
    first = Delta(tool_calls=(ToolCallDelta(index, f"call_{index}", name),))
    return [first, *(Delta(tool_calls=(ToolCallDelta(index, arguments=one),)) for one in pieces)]


DELTAS = [
    Delta(reasoning="A ca"),
    Delta(reasoning="pital."),
    Delta(content="Let me "),
    Delta(content="see."),
    *call(0, "weather", '{"city": ', '"Paris"}'),
    *call(1, "time"),
]


def test_a_stream_is_told_in_openais_order() -> None:
    events = events_of(streamed(response_format(), DELTAS, "tool_calls"))

    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }


@given(
    st.lists(st.text(max_size=3), max_size=4),
    st.lists(st.text(max_size=3), max_size=4),
    st.integers(0, 2),
    st.sampled_from(("stop", "length")),
)
def test_the_events_come_to_the_whole_response(
    reasoning: list[str], content: list[str], calls: int, finish_reason: str
) -> None:
    deltas = [Delta(reasoning=text) for text in reasoning]
    deltas += [Delta(content=text) for text in content]
    deltas += [one for index in range(calls) for one in call(index, "f", "{", "}")]
    format = response_format()

    events = events_of(streamed(format, deltas, finish_reason))

    output = Output(0, joined(deltas), finish_reason=finish_reason)
    whole = json.loads(format.whole([output], USAGE))
    told = events[-1]["response"]
    assert {**told, "completed_at": 0} == {**whole, "completed_at": 0}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    for event in events:
        if event["type"] == "response.output_text.done":
            pieces = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
            assert event["text"] == "".join(pieces)


def test_an_output_that_was_cut_is_incomplete() -> None:
    whole = json.loads(
        response_format().whole([Output(0, Delta("Par"), finish_reason="length")], USAGE)
    )

    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    [item] = whole["output"]
    assert item["status"] == "incomplete"


def test_a_stream_that_fails_ends_with_the_error_and_what_there_is() -> None:
    format = response_format()
    told = format.start(None) + format.output(0).text("Par")

    *_, error, failed = events_of(told + format.error(StreamLost("the engine died"), "r1"))

    assert (error["type"], error["message"]) == ("error", "the engine died")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine died"}
    [item] = failed["response"]["output"]
    assert item["content"][0]["text"] == "Par"
    assert failed["sequence_number"] == error["sequence_number"] + 1


def test_log_probabilities_are_with_their_text() -> None:
    format = response_format(include=["message.output_text.logprobs"], top_logprobs=1)
    output = format.output(0)
    tokens = [TokenText(b"Par", -0.5, [(b"Par", -0.5)]), TokenText(b"is", -0.25)]

    told = format.start(None)
    # The text of the first one is held back.
    told += output.piece(Output(0, Delta(), tokens[:1]))
    told += output.piece(Output(0, Delta("Paris"), tokens[1:], "stop"))
    events = events_of(told + format.end(USAGE))

    [delta] = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [one["token"] for one in delta["logprobs"]] == ["Par", "is"]
    assert delta["logprobs"][0]["top_logprobs"][0]["logprob"] == -0.5
    part = events[-1]["response"]["output"][0]["content"][0]
    assert part["logprobs"] == delta["logprobs"]


def test_a_response_repeats_what_was_asked() -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": {}}]
    format = response_format(
        instructions="Be brief.", metadata={"a": "b"}, tools=tools, max_output_tokens=9, store=True
    )

    whole = json.loads(format.whole([Output(0, Delta("hi"))], None))

    assert whole["instructions"] == "Be brief."
    assert whole["metadata"] == {"a": "b"}
    assert whole["tools"] == tools
    assert whole["max_output_tokens"] == 9
    assert whole["store"] is False
    assert whole["usage"] is None


def test_a_response_tells_the_times_of_the_clock_that_it_is_given() -> None:
    at = 1000.0
    format = ResponseFormat(b'{"model":"tiny"}', "1", now=lambda: at)
    format.output(0).piece(Output(0, Delta("Hi"), None, "stop"))
    at = 1005.9

    end = format.end(None)

    assert b'"created_at":1000,"completed_at":1005' in end
