"""A message as blocks, and as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from dynbus import DynbusError
from dynbus.llm.answers import Output, Usage
from dynbus.llm.openai.blocks import Block, Blocks, Step
from dynbus.llm.parsing.delta import Delta

from .errors import message_error_body

_encode: Final = msgspec.json.Encoder().encode


class MessageFormat:
    """The format of one message; see `AnswerFormat`.

    Args:
        answer_id: random; the id of the message is made of it.
        now: not told: a message does not say when it was made.
    """

    frame = None
    continuous_usage = False

    def __init__(self, model: str, answer_id: str, *, now: Callable[[], float] = time.time) -> None:
        self.id = f"msg_{answer_id}"
        self._model = model
        self._output = _Events()

    def start(self, usage: Usage | None) -> bytes:
        """The event before the first block."""
        return _event("message_start", message=self._message([], usage))

    def output(self, index: int) -> _Events:
        """The format of its only output."""
        return self._output

    def end(self, usage: Usage | None) -> bytes:
        """The last events."""
        output = self._output
        return b"".join(
            (
                output.close(),
                _event("message_delta", delta=output.stop, usage=_usage(usage)),
                _event("message_stop"),
            )
        )

    def error(self, error: DynbusError, request_id: str) -> bytes:
        """The event that ends a stream that fails."""
        return b"event: error\ndata: " + message_error_body(error, request_id) + b"\n\n"

    def whole(self, outputs: Sequence[Output], usage: Usage | None) -> bytes:
        """The message where nothing is streamed."""
        [only] = outputs
        output = _Events()
        output.piece(only)
        output.close()
        return _encode({**self._message(output.content(), usage), **output.stop})

    def _message(self, content: Sequence[Any], usage: Usage | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


class _Events:
    """The one output of a message."""

    def __init__(self) -> None:
        self._blocks = Blocks()
        self._text_event = b""
        self._finish_reason = ""
        self._stop_string: str | None = None

    @property
    def stop(self) -> dict[str, Any]:
        """The reason of the stop."""
        reason = "end_turn"
        if self._finish_reason == "length":
            reason = "max_tokens"
        elif self._stop_string is not None:
            reason = "stop_sequence"
        elif any(block.kind == "call" for block in self._blocks.all):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": self._stop_string}

    def text(self, text: str) -> bytes:
        """A piece that is nothing but content, before the end."""
        if not self._blocks.is_text:
            return self.piece(Output(0, Delta(text)))
        self._blocks.all[-1].pieces.append(text)
        return self._text_event + _encode(text) + _END

    def piece(self, piece: Output, usage: Usage | None = None) -> bytes:
        """A piece of any kind."""
        self._finish_reason = piece.finish_reason or self._finish_reason
        self._stop_string = piece.stop_string or self._stop_string
        return b"".join([self._step(step) for step in self._blocks.add(piece.said)])

    def close(self) -> bytes:
        """The events that end the last block."""
        return b"".join([self._step(step) for step in self._blocks.close()])

    def content(self) -> list[dict[str, Any]]:
        """All blocks, whole."""
        return [_whole(block) for block in self._blocks.all]

    def _step(self, step: Step) -> bytes:
        block = step.block
        if step.what == "open":
            if block.kind == "text":
                self._text_event = (
                    b'event: content_block_delta\ndata: {"type":"content_block_delta",'
                    b'"index":%d,"delta":{"type":"text_delta","text":' % block.place
                )
            return _event("content_block_start", index=block.place, content_block=_empty(block))
        if step.what == "close":
            stopped = _event("content_block_stop", index=block.place)
            if block.kind != "reasoning":
                return stopped
            return _delta(block, {"type": "signature_delta", "signature": ""}) + stopped
        if block.kind == "text":
            return self._text_event + _encode(step.piece) + _END
        if block.kind == "reasoning":
            return _delta(block, {"type": "thinking_delta", "thinking": step.piece})
        return _delta(block, {"type": "input_json_delta", "partial_json": step.piece})


_END: Final = b"}}\n\n"


def _event(kind: str, **fields: Any) -> bytes:
    data = _encode({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _delta(block: Block, delta: dict[str, Any]) -> bytes:
    return _event("content_block_delta", index=block.place, delta=delta)


def _empty(block: Block) -> dict[str, Any]:
    """A block as it begins."""
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _whole(block: Block) -> dict[str, Any]:
    """A block with all that came of it."""
    if block.kind == "text":
        return {**_empty(block), "text": block.text}
    if block.kind == "reasoning":
        return {**_empty(block), "thinking": block.text}
    return {**_empty(block), "input": _arguments(block.text)}


def _arguments(text: str) -> Any:
    """The input of a tool; of arguments that were cut off, or are no object, what there is."""
    try:
        decoded: Any = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": text}
    # As it is: what can be decoded may be nested too deeply to be encoded within a message.
    raw = msgspec.Raw(text.encode() or b"{}")
    return raw if isinstance(decoded, dict) else {"arguments": raw}


def _usage(usage: Usage | None) -> dict[str, Any]:
    counted = usage or Usage(0, 0)
    cached = counted.cached or 0
    return {
        "input_tokens": max(0, counted.prompt - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted.completion,
        **(
            {"output_tokens_details": {"thinking_tokens": counted.reasoning}}
            if counted.reasoning
            else {}
        ),
        **({"sampler_restarted": True} if counted.sampler_restarted else {}),
    }
