"""The content of requests and answers in the log and in traces, for operators who ask for it.

The messages have the form of OpenTelemetry's `gen_ai.input.messages` and `gen_ai.output.messages`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from dynbus import DynbusError, InvalidResponse
from dynbus.llm.answers import AnswerFormat, Output, OutputFormat, Usage, joined
from dynbus.llm.openai.fields import fields_of, items_of
from dynbus.llm.openai.reading import read_answer
from dynbus.llm.openai.requests import ChatRequest, CompletionRequest
from dynbus.llm.parsing.delta import Delta, ToolCallDelta
from dynbus.llm.pipeline.serving import Sink

MAX_CONTENT: Final = 4096
"""Characters that are kept of all messages of a request, and of all its outputs: of the former the
last ones, of the latter the first."""


class _Said:
    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.finish_reason = ""


class Content:
    """Keeps the first and the last of what is said."""

    def __init__(self, request: ChatRequest | CompletionRequest) -> None:
        self._asked = _last(_messages(request))
        self._outputs: dict[int, _Said] = {}
        self._room = MAX_CONTENT

    def said(self, index: int, delta: Delta, finish_reason: str | None) -> None:
        """An output said more, or all that it says."""
        output = self._outputs.setdefault(index, _Said())
        output.finish_reason = finish_reason or output.finish_reason
        if self._room > 0:
            kept = Delta(
                self._kept(delta.content),
                self._kept(delta.reasoning),
                tuple(
                    ToolCallDelta(call.index, call.id, call.name, self._kept(call.arguments))
                    for call in delta.tool_calls
                ),
            )
            output.deltas.append(kept)

    def _kept(self, text: str) -> str:
        kept = text[: max(self._room, 0)]
        self._room -= len(kept)
        return kept

    @property
    def input_messages(self) -> str:
        """The messages of the request, as JSON."""
        return _json([{"role": role, "parts": parts} for role, parts in self._asked])

    @property
    def output_messages(self) -> str:
        """The messages of the answer, as JSON."""
        return _json(
            [
                {
                    "role": "assistant",
                    "parts": _parts_of(joined(output.deltas)),
                    # Whatever did not end by itself was ended by an error.
                    "finish_reason": output.finish_reason or "error",
                }
                for _, output in sorted(self._outputs.items())
            ]
        )


class RecordedFormat:
    """Tells an answer as another format does, and keeps what it says."""

    def __init__(self, format: AnswerFormat, content: Content) -> None:
        self._format = format
        self._content = content
        self.id: Final = format.id
        self.frame: Final = format.frame
        self.continuous_usage: Final = format.continuous_usage

    def start(self, usage: Usage | None) -> bytes:
        """The bytes before the first piece."""
        return self._format.start(usage)

    def output(self, index: int) -> OutputFormat:
        """The format of one of the outputs."""
        return _RecordedOutput(self._format.output(index), index, self._content)

    def end(self, usage: Usage | None) -> bytes:
        """The bytes after the last piece."""
        return self._format.end(usage)

    def error(self, error: DynbusError, request_id: str) -> bytes:
        """The bytes that end a stream that fails after its start."""
        return self._format.error(error, request_id)

    def whole(self, outputs: Sequence[Output], usage: Usage | None) -> bytes:
        """An answer that is not streamed."""
        for output in outputs:
            self._content.said(output.index, output.said, output.finish_reason)
        return self._format.whole(outputs, usage)


class _RecordedOutput:
    def __init__(self, format: OutputFormat, index: int, content: Content) -> None:
        self._format = format
        self._index = index
        self._content = content

    def text(self, text: str) -> bytes:
        """A piece that is nothing but content."""
        self._content.said(self._index, Delta(text), None)
        return self._format.text(text)

    def piece(self, piece: Output, usage: Usage | None = None) -> bytes:
        """A piece of any kind."""
        self._content.said(self._index, piece.said, piece.finish_reason)
        return self._format.piece(piece, usage)


class ContentSink:
    """Passes an answer on that is told as OpenAI's API does, and keeps what it says.

    An engine of text may have written it, so that no other format was asked to tell it.
    """

    def __init__(self, sink: Sink, content: Content) -> None:
        self._sink = sink
        self._content = content

    def write(self, chunks: Sequence[bytes]) -> bool:
        """Take the next chunks, or a whole answer."""
        for chunk in chunks:
            with contextlib.suppress(InvalidResponse):
                for output in read_answer(chunk.removeprefix(b"data: ")).outputs:
                    self._content.said(output.index, output.said, output.finish_reason)
        return self._sink.write(chunks)

    def end(self, error: DynbusError | None) -> None:
        """There is no more."""
        self._sink.end(error)


_TEXTS: Final = {
    "text": "content",
    "reasoning": "content",
    "tool_call": "arguments",
    "tool_call_response": "response",
}
"""Under which name each kind of part has its text."""

Part = dict[str, Any]


def _messages(request: ChatRequest | CompletionRequest) -> list[tuple[str, list[Part]]]:
    """Roles, and what they say."""
    if isinstance(request, ChatRequest):
        return [(str(message.get("role")), _parts(message)) for message in request.messages]
    given = request.prompt
    prompts: list[Any] = [*given] if isinstance(given, list) else [given]
    texts = [one for one in prompts if isinstance(one, str)]
    return [("user", [_part("text", text)]) for text in texts or ["[token ids]"]]


def _parts(message: Mapping[str, Any]) -> list[Part]:
    text = _text(message.get("content"))
    if message.get("role") == "tool":
        return [_part("tool_call_response", text, id=message.get("tool_call_id"))]
    called: list[Part] = []
    for call in items_of(message.get("tool_calls")):
        fields = fields_of(call)
        function = fields_of(fields.get("function"))
        arguments = _text(function.get("arguments"))
        called.append(_part("tool_call", arguments, id=fields.get("id"), name=function.get("name")))
    return [_part("text", text), *called] if text or not called else called


def _parts_of(delta: Delta) -> list[Part]:
    """The parts of an output."""
    parts = [_part("reasoning", delta.reasoning)] if delta.reasoning else []
    if delta.content or not (delta.reasoning or delta.tool_calls):
        parts.append(_part("text", delta.content))
    parts += [
        _part("tool_call", call.arguments, id=call.id, name=call.name) for call in delta.tool_calls
    ]
    return parts


def _part(kind: str, text: str, **fields: Any) -> Part:
    return {"type": kind, **fields, _TEXTS[kind]: text}


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    texts = [fields_of(part).get("text") for part in items_of(content)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _last(messages: Sequence[tuple[str, list[Part]]]) -> list[tuple[str, list[Part]]]:
    """The last messages, cut to what may be kept."""
    room = MAX_CONTENT
    kept: list[tuple[str, list[Part]]] = []
    for role, parts in reversed(messages):
        cut: list[Part] = []
        for part in reversed(parts):
            if room <= 0:
                break
            name = _TEXTS[part["type"]]
            text: str = part[name]
            cut.append({**part, name: text[-room:]})
            room -= len(text)
        if cut:
            kept.append((role, cut[::-1]))
    return kept[::-1]


def _json(messages: Sequence[Mapping[str, Any]]) -> str:
    return msgspec.json.encode(messages).decode()
