"""Answers to completions as JSON: chunks of a stream, and whole ones.

A stream's chunks differ in little, and there are very many of them: what stays is encoded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dynbus import DynbusError
from dynbus.llm.answers import Output, TokenText, Usage
from dynbus.llm.parsing.delta import Delta, ToolCallDelta

from .errors import error_body

_encode: Final = msgspec.json.Encoder().encode

SSE: Final = (b"data: ", b"\n\n")
"""The beginning and end of an event of a stream over HTTP."""

BARE: Final = (b"", b"")
"""The beginning and end of a chunk that is an item on the bus."""

DONE: Final = b"data: [DONE]\n\n"
"""The last event of a stream over HTTP."""


def usage_json(usage: Usage) -> dict[str, Any]:
    """The object that OpenAI calls `usage`."""
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }
    if usage.cached is not None:
        fields["prompt_tokens_details"] = {"cached_tokens": usage.cached}
    if usage.reasoning is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    if usage.sampler_restarted:
        fields["sampler_restarted"] = True
    return fields


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that all chunks of an answer have in common.

    Attributes:
        id: of the answer, with its prefix.
        created: Unix time.
        frame: what stands around each chunk.
        include_usage: whether the stream ends with the usage.
        continuous_usage: whether each chunk has it.
    """

    id: str
    created: int
    model: str
    frame: tuple[bytes, bytes] = SSE
    include_usage: bool = False
    continuous_usage: bool = False


class _OutputChunks:
    """The chunks of one output."""

    __slots__ = ("_begin", "_head")

    def __init__(self, head: AnswerHead, kind: str, index: int) -> None:
        fields = _encode(_head_fields(head, kind))[:-1]
        self._begin = head.frame[0] + fields + b',"choices":[{"index":%d,' % index
        self._head = head

    def _end(self, logprobs: Any, finish_reason: str | None, usage: Usage | None) -> bytes:
        end = b',"logprobs":' + _encode(logprobs) + b',"finish_reason":' + _encode(finish_reason)
        end += b"}]"
        if self._head.include_usage:
            known = usage if self._head.continuous_usage else None
            end += b',"usage":' + _encode(None if known is None else usage_json(known))
        return end + b"}" + self._head.frame[1]


class _ChatChunks(_OutputChunks):
    __slots__ = ("_before", "_first", "_plain_after")

    def __init__(self, head: AnswerHead, index: int) -> None:
        super().__init__(head, "chat.completion.chunk", index)
        self._first = self._begin + b'"delta":{"role":"assistant","content":'
        self._before = self._begin + b'"delta":{"content":'
        self._plain_after = b"}" + self._end(None, None, None)

    def text(self, text: str) -> bytes:
        """A chunk that is nothing but content."""
        before, self._first = self._first, self._before
        return before + _encode(text) + self._plain_after

    def piece(self, piece: Output, usage: Usage | None = None) -> bytes:
        """A chunk of any kind."""
        delta = piece.said
        is_first, self._first = self._first is not self._before, self._before
        said: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if delta.content or not (delta.reasoning or delta.tool_calls):
            said["content"] = delta.content
        elif is_first:
            said["content"] = None
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            said["tool_calls"] = [_call_chunk(call) for call in delta.tool_calls]
        logprobs = None if piece.logprobs is None else chat_logprobs(piece.logprobs)
        end = self._end(logprobs, piece.finish_reason, usage)
        return self._begin + b'"delta":' + _encode(said) + end


class _CompletionChunks(_OutputChunks):
    __slots__ = ("_before", "_offset", "_plain_after")

    def __init__(self, head: AnswerHead, index: int) -> None:
        super().__init__(head, "text_completion", index)
        self._before = self._begin + b'"text":'
        self._plain_after = self._end(None, None, None)
        self._offset = 0

    def text(self, text: str) -> bytes:
        """A chunk that is nothing but text."""
        return self._before + _encode(text) + self._plain_after

    def piece(self, piece: Output, usage: Usage | None = None) -> bytes:
        """A chunk of any kind."""
        text, offset = piece.said.content, self._offset
        self._offset += len(text)
        logprobs = None if piece.logprobs is None else _completion_logprobs(piece.logprobs, offset)
        return self._before + _encode(text) + self._end(logprobs, piece.finish_reason, usage)


class _CompletionsFormat(ABC):
    """The common part of both of OpenAI's formats for completions."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._head.id}>"

    @property
    def id(self) -> str:
        """Of the answer."""
        return self._head.id

    @property
    def frame(self) -> tuple[bytes, bytes] | None:
        """The bytes before and after a chunk."""
        return self._head.frame

    @property
    def continuous_usage(self) -> bool:
        """True if each chunk has the usage."""
        return self._head.continuous_usage

    def start(self, usage: Usage | None) -> bytes:
        """Nothing: a stream begins with a chunk."""
        return b""

    def end(self, usage: Usage | None) -> bytes:
        """The chunk with the usage, where one is wanted, and the end of the events."""
        head, last_chunk = self._head, b""
        if head.include_usage and usage is not None:
            fields: dict[str, Any] = {
                **_head_fields(head, self._chunk_kind),
                "choices": [],
                "usage": usage_json(usage),
            }
            last_chunk = head.frame[0] + _encode(fields) + head.frame[1]
        return last_chunk + DONE if head.frame == SSE else last_chunk

    def error(self, error: DynbusError, request_id: str) -> bytes:
        """The event that clients raise."""
        return b"event: error\ndata: " + error_body(error, request_id) + b"\n\n"

    def whole(self, outputs: Sequence[Output], usage: Usage | None) -> bytes:
        """An answer that is not streamed."""
        choices = [
            {
                "index": output.index,
                **self._content(output.said),
                "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
                "finish_reason": output.finish_reason,
            }
            for output in outputs
        ]
        used = None if usage is None else usage_json(usage)
        return _encode({**_head_fields(self._head, self._kind), "choices": choices, "usage": used})

    _kind: str
    _chunk_kind: str

    @abstractmethod
    def _content(self, said: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]: ...


class ChatFormat(_CompletionsFormat):
    """The format of an answer to a chat in OpenAI's API."""

    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"

    def output(self, index: int) -> _ChatChunks:
        """The chunks of one choice."""
        return _ChatChunks(self._head, index)

    def _content(self, said: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            # There is no content beside calls or reasoning unless the model says something.
            "content": said.content or (None if said.tool_calls else ""),
            "refusal": None,
        }
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.tool_calls
            ]
        return {"message": message}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        return chat_logprobs(tokens)


class CompletionFormat(_CompletionsFormat):
    """The format of an answer to a prompt in OpenAI's API."""

    _kind = _chunk_kind = "text_completion"

    def output(self, index: int) -> _CompletionChunks:
        """The chunks of one choice."""
        return _CompletionChunks(self._head, index)

    def _content(self, said: Delta) -> dict[str, Any]:
        return {"text": said.content}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        return _completion_logprobs(tokens, 0)


def _head_fields(head: AnswerHead, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _call_chunk(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if not call.name:
        return {"index": call.index, "function": function}
    function["name"] = call.name
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """The log-probabilities of a chat's tokens."""
    return {
        "content": [
            {
                **_chat_token(token.data, token.logprob),
                "top_logprobs": [_chat_token(data, logprob) for data, logprob in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _chat_token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(data), "logprob": logprob, "bytes": list(data)}


def _completion_logprobs(tokens: Sequence[TokenText], offset: int) -> dict[str, Any]:
    """The log-probabilities of a completion's tokens.

    Args:
        offset: of the first one in the text, in characters.
    """
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(_text(token.data))
    return {
        "tokens": [_text(token.data) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {_text(data): logprob for data, logprob in token.top} or None for token in tokens
        ],
        "text_offset": offsets,
    }


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
