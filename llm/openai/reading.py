"""Answers of engines that speak OpenAI's format, read so that they can be told in another one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from dynbus import InvalidResponse
from dynbus.llm.answers import Output, TokenText, Usage
from dynbus.llm.parsing.delta import Delta, ToolCallDelta

from .fields import UNREADABLE, fields_of

MOST_TOKENS: Final = 2**40
"""Tokens beyond which a number that an engine tells is none of tokens."""


class ReadAnswer(NamedTuple):
    """The contents of a chunk, or of a whole answer.

    Attributes:
        outputs: whose `said` is what this chunk brings.
    """

    outputs: Sequence[Output]
    usage: Usage | None


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, frozen=True):
    index: int | None = None
    id: str | None = None
    function: _Function = _Function()


class _Said(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    # What newer servers call it.
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Token(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[_Token] = []


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    delta: _Said | None = None
    message: _Said | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    # Of vLLM: the stop string, or the id of a stop token.
    stop_reason: str | int | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: Any = None


class _Told(msgspec.Struct, frozen=True):
    choices: Any = None
    usage: Any = None


_MAY_TELL_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')

_decode: Final = msgspec.json.Decoder(_Answer).decode
_decode_told: Final = msgspec.json.Decoder(_Told).decode


def read_answer(item: bytes) -> ReadAnswer:
    """The contents of a chunk of a stream, or of a whole answer.

    Raises:
        InvalidResponse: it is neither.
    """
    try:
        answer = _decode(item)
    except UNREADABLE as error:
        raise InvalidResponse(f"an item is no chunk of a completion: {error}") from None
    return ReadAnswer([_output(choice) for choice in answer.choices], read_usage(answer.usage))


def usage_in(item: bytes) -> tuple[Usage | None, bool]:
    """The tokens that an item of an engine says were used, None where it does not say it; and
    whether that is all it says."""
    # Most chunks do not, and are not decoded.
    if _MAY_TELL_USAGE.search(item) is None:
        return None, False
    try:
        report = _decode_told(item)
    except UNREADABLE:
        # It is passed on as it is: its reader is told of it.
        return None, False
    return read_usage(report.usage), not report.choices


def read_usage(report: object) -> Usage | None:
    """The tokens that an engine says were used; None where it does not say how many the prompt has.

    What is no number of tokens is taken for not said: an answer is none the worse for it.
    """
    fields = fields_of(report)
    prompt, completion = _count(fields, "prompt_tokens"), _count(fields, "completion_tokens")
    if prompt is None:
        return None
    return Usage(
        prompt,
        completion or 0,
        _count(fields_of(fields.get("prompt_tokens_details")), "cached_tokens"),
        _count(fields_of(fields.get("completion_tokens_details")), "reasoning_tokens"),
        fields.get("sampler_restarted") is True,
    )


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS
    return value if is_count else None


def _output(choice: _Choice) -> Output:
    said = choice.delta or choice.message or _Said(content=choice.text)
    delta = Delta(
        said.content or said.refusal or "",
        said.reasoning_content or said.reasoning or "",
        tuple(
            ToolCallDelta(
                place if call.index is None else call.index,
                call.id or "",
                call.function.name or "",
                call.function.arguments or "",
            )
            for place, call in enumerate(said.tool_calls or ())
        ),
    )
    tokens = choice.logprobs.content if choice.logprobs is not None else None
    return Output(
        choice.index,
        delta,
        None if tokens is None else [_token(token) for token in tokens],
        choice.finish_reason,
        choice.stop_reason if isinstance(choice.stop_reason, str) else None,
    )


def _token(token: _Token) -> TokenText:
    return TokenText(
        _bytes(token), token.logprob, [(_bytes(one), one.logprob) for one in token.top_logprobs]
    )


def _bytes(token: _Token) -> bytes:
    # Whatever is no byte is written as it is told.
    try:
        return token.token.encode() if token.bytes is None else bytes(token.bytes)
    except ValueError:
        return token.token.encode(errors="replace")
