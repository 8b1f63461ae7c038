"""What a request and its answer say, for the log and the trace of whoever asks for it.

The messages have the form of OpenTelemetry's `gen_ai.input.messages` and `gen_ai.output.messages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from dynbus.bus.errors import DynbusError
from dynbus.llm.openai.requests import ChatRequest, CompletionRequest
from dynbus.llm.pipeline.serving import Sink

MAX_CONTENT: Final = 4096
"""Characters that are kept of all messages of a request, and of all its outputs: of the former the
last ones, of the latter the first."""


class _Text(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    delta: _Text | None = None
    message: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    """A chunk of a streamed answer, or a whole one."""

    choices: list[_Choice] = []


_decode: Final = msgspec.json.Decoder(_Chunk).decode


class _Output:
    def __init__(self) -> None:
        self.text = ""
        self.finish_reason = ""


class Content:
    """Keeps the first and the last of what is said."""

    def __init__(self, request: ChatRequest | CompletionRequest) -> None:
        self._asked = _last(_messages(request))
        self._outputs: dict[int, _Output] = {}
        self._room = MAX_CONTENT

    def answered(self, data: bytes) -> None:
        """A chunk of the answer, or the whole of it, was written."""
        try:
            chunk = _decode(data.removeprefix(b"data: "))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        for choice in chunk.choices:
            output = self._outputs.setdefault(choice.index, _Output())
            said = choice.delta or choice.message
            text = (said.content if said is not None else choice.text) or ""
            kept = text[: self._room]
            self._room -= len(kept)
            output.text += kept
            output.finish_reason = choice.finish_reason or output.finish_reason

    @property
    def input_messages(self) -> str:
        """What was asked, as JSON."""
        return _json([_message(role, text) for role, text in self._asked])

    @property
    def output_messages(self) -> str:
        """What was answered, as JSON."""
        return _json(
            [
                # Whatever did not end by itself was ended by an error.
                {
                    **_message("assistant", output.text),
                    "finish_reason": output.finish_reason or "error",
                }
                for _, output in sorted(self._outputs.items())
            ]
        )


class ContentSink:
    """Passes an answer on, and keeps what it says."""

    def __init__(self, sink: Sink, content: Content) -> None:
        self._sink = sink
        self._content = content

    def write(self, chunks: Sequence[bytes]) -> bool:
        """Take the next chunks, or a whole answer."""
        for chunk in chunks:
            self._content.answered(chunk)
        return self._sink.write(chunks)

    def end(self, error: DynbusError | None) -> None:
        """There is no more."""
        self._sink.end(error)


def _messages(request: ChatRequest | CompletionRequest) -> list[tuple[str, str]]:
    """Roles, and what they say."""
    if isinstance(request, ChatRequest):
        return [
            (str(message.get("role")), _text(message.get("content")))
            for message in request.messages
        ]
    given = request.prompt
    prompts: list[Any] = [*given] if isinstance(given, list) else [given]
    texts = [one for one in prompts if isinstance(one, str)]
    return [("user", text) for text in texts] or [("user", "[token ids]")]


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = cast("list[object]", content) if isinstance(content, list) else []
    texts = [
        cast("Mapping[str, object]", part).get("text") for part in parts if isinstance(part, dict)
    ]
    return "\n".join(text for text in texts if isinstance(text, str))


def _last(messages: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The last messages, cut to what may be kept."""
    room = MAX_CONTENT
    kept: list[tuple[str, str]] = []
    for role, text in reversed(messages):
        if room <= 0:
            break
        kept.append((role, text[-room:]))
        room -= len(text)
    return kept[::-1]


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _json(messages: Sequence[Mapping[str, Any]]) -> str:
    return msgspec.json.encode(messages).decode()
