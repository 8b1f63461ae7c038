"""Answers to completions as JSON: chunks of a stream, and whole ones.

A stream's chunks differ in little, and there are very many of them: what stays is encoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

_encode: Final = msgspec.json.Encoder().encode

SSE: Final = (b"data: ", b"\n\n")
"""What stands around an event of a stream over HTTP."""

BARE: Final = (b"", b"")
"""What stands around a chunk that is an item on the bus."""

DONE: Final = b"data: [DONE]\n\n"
"""The last event of a stream over HTTP."""


class Usage(NamedTuple):
    """How many tokens a request has used so far.

    Attributes:
        cached: of the prompt, found in a cache; None when the engine does not say.
    """

    prompt: int
    completion: int
    cached: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The object that OpenAI calls `usage`."""
        told: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if self.cached is not None:
            told["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return told


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of an answer have in common.

    Attributes:
        id: of the answer, with its prefix.
        created: Unix time.
        is_chat: whether it answers a chat.
        include_usage: whether the stream ends with the usage.
        continuous_usage: whether each chunk has it.
    """

    id: str
    created: int
    model: str
    is_chat: bool
    include_usage: bool = False
    continuous_usage: bool = False

    def fields(self, *, streaming: bool) -> dict[str, Any]:
        """The fields that begin an answer or a chunk."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if streaming and self.is_chat else kind,
            "created": self.created,
            "model": self.model,
        }


class ChunkEncoder:
    """The chunks of one choice.

    Args:
        around: what stands before and after each.
    """

    __slots__ = (
        "_after",
        "_before",
        "_continuous",
        "_first",
        "_has_usage",
        "_is_chat",
        "_plain_after",
    )

    def __init__(self, head: AnswerHead, index: int, around: tuple[bytes, bytes]) -> None:
        fields = _encode(head.fields(streaming=True))[:-1]
        begin = around[0] + fields + b',"choices":[{"index":%d,' % index
        self._is_chat = head.is_chat
        if head.is_chat:
            self._first = begin + b'"delta":{"role":"assistant","content":'
            self._before = begin + b'"delta":{"content":'
        else:
            self._first = self._before = begin + b'"text":'
        self._after = b"}" + around[1]
        self._has_usage = head.include_usage
        self._continuous = head.continuous_usage
        self._plain_after = self._end(None, None, None)

    def chunk(
        self,
        text: str,
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """The next chunk."""
        before, self._first = self._first, self._before
        if logprobs is None and finish_reason is None and not self._continuous:
            return before + _encode(text) + self._plain_after
        return before + _encode(text) + self._end(logprobs, finish_reason, usage)

    def _end(self, logprobs: Any, finish_reason: str | None, usage: Usage | None) -> bytes:
        end = b"}" if self._is_chat else b""
        end += b',"logprobs":' + _encode(logprobs) + b',"finish_reason":' + _encode(finish_reason)
        end += b"}]"
        if self._has_usage:
            told = usage.as_json() if usage is not None and self._continuous else None
            end += b',"usage":' + _encode(told)
        return end + self._after


def usage_chunk(head: AnswerHead, usage: Usage, around: tuple[bytes, bytes]) -> bytes:
    """The chunk at the end of a stream that tells the usage."""
    fields: dict[str, Any] = {
        **head.fields(streaming=True),
        "choices": [],
        "usage": usage.as_json(),
    }
    return around[0] + _encode(fields) + around[1]


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """One choice of a whole answer.

    Attributes:
        logprobs: as `chat_logprobs` or `CompletionLogprobs` make them; None for none.
    """

    index: int
    text: str
    logprobs: Any
    finish_reason: str | None


def whole_answer(head: AnswerHead, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
    """An answer that is not streamed."""
    told: list[dict[str, Any]] = []
    for choice in choices:
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            if head.is_chat
            else {"text": choice.text}
        )
        told.append(
            {
                "index": choice.index,
                **content,
                "logprobs": choice.logprobs,
                "finish_reason": choice.finish_reason,
            }
        )
    return _encode({**head.fields(streaming=False), "choices": told, "usage": usage.as_json()})


class TokenText(NamedTuple):
    """A token with its log-probability, as text.

    Attributes:
        data: the bytes that it stands for, which may be part of a character.
        top: the likeliest ones in its place, each with its log-probability.
    """

    data: bytes
    logprob: float
    top: Sequence[tuple[bytes, float]] = ()


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


def completion_logprobs(tokens: Sequence[TokenText], offset: int) -> dict[str, Any]:
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
