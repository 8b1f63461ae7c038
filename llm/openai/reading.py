"""Answers of engines that speak OpenAI's format, read so that they can be told in another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from dynbus import InvalidResponse
from dynbus.llm.answers import Output, TokenText, Usage
from dynbus.llm.parsing.delta import Delta, ToolCallDelta


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


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _CompletionDetails | None = None
    sampler_restarted: bool = False


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Told(msgspec.Struct, frozen=True):
    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None


_decode: Final = msgspec.json.Decoder(_Answer).decode
_decode_told: Final = msgspec.json.Decoder(_Told).decode


def read_answer(item: bytes) -> ReadAnswer:
    """The contents of a chunk of a stream, or of a whole answer.

    Raises:
        InvalidResponse: it is neither.
    """
    try:
        answer = _decode(item)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidResponse(f"an item is no chunk of a completion: {error}") from None
    return ReadAnswer([_output(choice) for choice in answer.choices], _usage(answer.usage))


def read_usage(item: bytes) -> tuple[Usage | None, bool]:
    """The usage that a chunk or an answer tells, which passes as it is, and whether that is all
    that it has; None where it tells none that can be read."""
    try:
        told = _decode_told(item)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None, False
    return _usage(told.usage), not told.choices


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


def _usage(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    details, made = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        details.cached_tokens if details is not None else None,
        made.reasoning_tokens if made is not None else None,
        usage.sampler_restarted,
    )
