"""What tokens come to: text, chunks, finish reasons, usage."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.llm.text.tiny_tokenizer import tiny_tokenizer

from dynbus.bus.errors import InvalidResponse
from dynbus.llm.answers import Output, TokenText, Usage
from dynbus.llm.generation import Generated
from dynbus.llm.openai.answers import BARE, AnswerHead, ChatFormat
from dynbus.llm.openai.merging import MergedAnswer, as_chunk
from dynbus.llm.openai.reading import read_answer
from dynbus.llm.openai.tools import ToolUse
from dynbus.llm.parsing.delta import Delta, ToolCallDelta
from dynbus.llm.pipeline.reading import reading_of
from dynbus.llm.pipeline.transcript import TextRules, Transcript

HEAD = AnswerHead("chatcmpl-1", 1, "tiny", BARE)


def transcript(
    *, n: int = 1, prompts: int = 1, stop: tuple[str, ...] = (), streams: bool = True, most: int = 9
) -> Transcript:
    rules = TextRules(tiny_tokenizer(), stop, frozenset((2,)), False, most, streams)
    return Transcript(ChatFormat(HEAD), rules, [[5, 6]] * prompts, n)


def text_of(chunks: list[bytes]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        choice = json.loads(chunk)["choices"][0]
        text = choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


@given(st.text(max_size=40), st.integers(1, 5), st.booleans())
def test_chunks_joined_are_the_text_however_tokens_come(
    text: str, together: int, streams: bool
) -> None:
    ids = tiny_tokenizer().encode(text)
    told = transcript(streams=streams)
    chunks: list[bytes] = []

    for place in range(0, len(ids), together):
        told.add(0, Generated(ids[place : place + together]), chunks)
    told.add(0, Generated([2], finish_reason="stop"), chunks)

    expected = tiny_tokenizer().decode(ids)
    if streams:
        assert text_of(chunks) == {0: expected}
        merged = MergedAnswer()
        for chunk in chunks:
            merged.add(chunk)
        whole: Any = json.loads(merged.encode())
    else:
        assert chunks == []
        whole = json.loads(told.finish())
    assert whole["choices"][0]["message"]["content"] == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert told.open_outputs == 0
    assert told.tokens == len(ids) + 1


def test_outputs_of_several_prompts_and_continuations_are_told_apart() -> None:
    told = transcript(n=2, prompts=2)
    chunks: list[bytes] = []
    a, b = tiny_tokenizer().encode("a"), tiny_tokenizer().encode("b")

    told.add(1, Generated(a, index=1, finish_reason="length"), chunks)
    told.add(0, Generated(b, index=0, finish_reason="stop"), chunks)

    assert text_of(chunks) == {3: "a", 0: "b"}
    assert told.open_outputs == 2
    assert not told.is_prompt_finished(0)


def test_what_comes_after_a_stop_string_is_neither_text_nor_counted() -> None:
    told = transcript(stop=("stop",))
    chunks: list[bytes] = []
    encode = tiny_tokenizer().encode

    told.add(0, Generated(encode("a stop b")), chunks)
    count = told.tokens
    told.add(0, Generated(encode("more")), chunks)

    assert text_of(chunks) == {0: "a "}
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "stop"
    assert told.tokens == count


def test_an_engine_that_ends_without_a_reason_has_ended_all_the_same() -> None:
    short, full = transcript(most=9), transcript(most=2)

    for told in (short, full):
        told.add(0, Generated([5, 6]), [])
        told.end_prompt(0, [])

    assert short.finish_reasons == ["stop"]
    assert full.finish_reasons == ["length"]


def test_an_item_for_an_output_that_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(InvalidResponse, match="index 1"):
        transcript().add(0, Generated([5], index=1), [])


def test_what_the_engine_had_in_its_cache_is_told_with_the_usage() -> None:
    told = transcript(prompts=2)

    told.add(0, Generated([5], cached_tokens=1), [])
    told.add(1, Generated([5], cached_tokens=2), [])

    assert told.usage == Usage(4, 2, 3)


@given(st.integers(1, 9), st.booleans())
def test_tokens_of_reasoning_are_counted_however_they_come(together: int, streams: bool) -> None:
    ids = tiny_tokenizer().encode("<think>")
    thought = tiny_tokenizer().encode("so it is")
    said = tiny_tokenizer().encode("</think>\n\nYes.")
    reading = reading_of("", "qwen3", ToolUse(), "")
    rules = TextRules(tiny_tokenizer(), (), frozenset((2,)), False, None, streams, reading)
    told = Transcript(ChatFormat(HEAD), rules, [[5, 6]], 1)
    chunks: list[bytes] = []

    tokens = [*ids, *thought, *said]
    for place in range(0, len(tokens), together):
        told.add(0, Generated(tokens[place : place + together]), chunks)
    told.add(0, Generated([2], finish_reason="stop"), chunks)
    chunks.append(told.finish())

    # Which of them the mark of its beginning is counts with it.
    assert told.usage.reasoning == len(ids) + len(thought)
    if streams:
        merged = MergedAnswer()
        for chunk in filter(None, chunks):
            merged.add(chunk)
        answer = read_answer(merged.encode())
    else:
        answer = read_answer(chunks[-1])
    assert answer.outputs[0].said == Delta("Yes.", "so it is")


@pytest.mark.parametrize(
    ("choice", "kind"),
    [({"delta": {"content": "a"}}, "chat.completion"), ({"text": "a"}, "text_completion")],
)
def test_chunks_that_do_not_say_what_they_are_come_to_an_answer_that_does(
    choice: dict[str, Any], kind: str
) -> None:
    merged = MergedAnswer()

    merged.add(json.dumps({"choices": [{"index": 0, **choice}]}).encode())

    assert json.loads(merged.encode())["object"] == kind


WHOLE: dict[str, Any] = {"choices": [{"index": 0, "message": {"content": "Yes."}}]}


def test_a_whole_answer_that_does_not_say_what_it_is_is_read_by_its_message() -> None:
    item = json.dumps(WHOLE).encode()
    merged = MergedAnswer()

    merged.add(item)

    answer = json.loads(merged.encode())
    assert answer == {**WHOLE, "object": "chat.completion"}
    [choice] = json.loads(as_chunk(item))["choices"]
    assert choice == {"index": 0, "delta": {"content": "Yes."}}


@pytest.mark.parametrize("read", [as_chunk, MergedAnswer().add])
def test_a_message_in_what_calls_itself_a_chunk_is_refused_by_name(
    read: Callable[[bytes], object],
) -> None:
    item = json.dumps({**WHOLE, "object": "chat.completion.chunk"}).encode()

    with pytest.raises(InvalidResponse, match=r"`message`.*object='chat.completion'"):
        read(item)


def test_pieces_of_tool_calls_come_to_whole_calls() -> None:
    pieces: list[dict[str, Any]] = [
        {"index": 0, "id": "call_a", "type": "function", "function": {"name": "f"}},
        {"index": 0, "function": {"arguments": '{"a":'}},
        {"index": 1, "id": "call_b", "type": "function", "function": {"name": "g"}},
        {"index": 0, "function": {"arguments": "1}"}},
    ]
    merged = MergedAnswer()

    for piece in pieces:
        choice = {"index": 0, "delta": {"tool_calls": [piece]}}
        merged.add(json.dumps({"choices": [choice]}).encode())

    [output] = read_answer(merged.encode()).outputs
    assert output.said.tool_calls == (
        ToolCallDelta(0, "call_a", "f", '{"a":1}'),
        ToolCallDelta(1, "call_b", "g", ""),
    )


def test_what_an_answer_says_is_the_same_read_back_in_chunks_and_whole() -> None:
    head = AnswerHead("chatcmpl-1", 1, "tiny", BARE)
    said = Delta("text", "thought", (ToolCallDelta(0, "call_a", "f", "{}"),))
    tokens = [TokenText(b"text", -0.5, [(b"text", -0.5)])]

    output = Output(0, said, tokens, "tool_calls")

    chunk = ChatFormat(head).output(0).piece(output)
    whole = ChatFormat(head).whole([output], Usage(3, 2, 1, 1))

    assert read_answer(chunk).outputs == [output]
    assert read_answer(whole) == ([output], Usage(3, 2, 1, 1))


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers(), st.lists).map(repr))
def test_whatever_is_no_answer_is_an_error_that_says_so(item: bytes | str) -> None:
    data = item if isinstance(item, bytes) else item.encode()

    with contextlib.suppress(InvalidResponse):
        read_answer(data)


def test_what_an_engine_that_goes_on_has_in_its_cache_is_not_counted_again() -> None:
    told = transcript(prompts=2, streams=False)
    chunks: list[bytes] = []

    told.add(0, Generated([5], cached_tokens=2), chunks)
    told.add(1, Generated([5], cached_tokens=0), chunks)
    told.add(0, Generated([6], finish_reason="stop", cached_tokens=3), chunks)
    told.add(1, Generated([6], finish_reason="stop", sampler_restarted=True), chunks)

    usage = json.loads(told.finish())["usage"]
    assert usage == {
        "prompt_tokens": 4,
        "completion_tokens": 4,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
        "sampler_restarted": True,
    }
