"""A response as items, and as the events of a stream.

The events of one item: it is added, its part is added, deltas, the text is done, the part is done,
the item is done. A tool call has no parts. Each event is numbered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from dynbus import DynbusError
from dynbus.llm.answers import Output, Usage
from dynbus.llm.openai.answers import chat_logprobs
from dynbus.llm.openai.blocks import Block, Blocks, Step
from dynbus.llm.openai.errors import error_fields
from dynbus.llm.parsing.delta import Delta

from .requests import ResponsesRequest
from .stored import Pending, StoredResponse

_encode: Final = msgspec.json.Encoder().encode

_ITEM_PREFIX: Final = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseFormat:
    """The format of one response; see `AnswerFormat`.

    Args:
        repeated: `repeated_fields` as JSON.
        answer_id: random; the ids of the response and of its items are made of it.
        pending: what is kept with the response; None where it is not kept.
        now: Unix seconds.

    Attributes:
        made: the response as it is to be kept, once it is whole; None where it is not kept.
    """

    frame = None
    continuous_usage = False

    def __init__(
        self,
        repeated: bytes,
        answer_id: str,
        *,
        pending: Pending | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.pending = pending
        self.made: StoredResponse | None = None
        self._is_kept = pending is not None
        # What the last bytes of the answer were made of: how they are told, status, items, usage.
        self._ended: (
            tuple[Callable[[msgspec.Raw], bytes], str, Sequence[Mapping[str, Any]], Usage | None]
            | None
        ) = None
        self._now = now
        self.id = f"resp_{answer_id}"
        self._answer_id = answer_id
        self._created = int(now())
        self._repeated = repeated
        self._output = _Events(answer_id)

    def start(self, usage: Usage | None) -> bytes:
        """The events before the first item."""
        begun = self._response("in_progress", [], None)
        return _event("response.created", 0, response=begun) + _event(
            "response.in_progress", 1, response=begun
        )

    def output(self, index: int) -> _Events:
        """The format of its only output."""
        return self._output

    def end(self, usage: Usage | None) -> bytes:
        """The last events."""
        output = self._output
        ended = output.close()
        status = _status(output.finish_reason)
        items = output.items(status)
        kind, number = f"response.{status}", output.next_number()
        return self._last(
            lambda response: ended + _event(kind, number, response=response), status, items, usage
        )

    def error(self, error: DynbusError, request_id: str) -> bytes:
        """The events that end a stream that fails."""
        fields = error_fields(error, request_id)
        items = self._output.items("incomplete")
        self._is_kept = False
        failed = self._response("failed", items, None, error=fields["message"])
        return self._output.event(
            "error", code=fields["code"], message=fields["message"], param=fields["param"]
        ) + self._output.event("response.failed", response=failed)

    def whole(self, outputs: Sequence[Output], usage: Usage | None) -> bytes:
        """The response where nothing is streamed."""
        [only] = outputs
        output = _Events(self._answer_id)
        output.piece(only)
        output.close()
        status = _status(output.finish_reason)
        return self._last(bytes, status, output.items(status), usage)

    def unkept(self) -> bytes:
        """The last bytes of the answer, which say that it could not be kept."""
        self._is_kept = False
        if self._ended is None:
            return b""
        tell, status, items, usage = self._ended
        return tell(self._response(status, items, usage))

    def _last(
        self,
        tell: Callable[[msgspec.Raw], bytes],
        status: str,
        items: Sequence[Mapping[str, Any]],
        usage: Usage | None,
    ) -> bytes:
        """The last bytes of the answer."""
        response = self._response(status, items, usage)
        if self.pending is not None:
            self.made = self.pending.with_response(bytes(response))
            self._ended = tell, status, items, usage
        return tell(response)

    def _response(
        self,
        status: str,
        items: Sequence[Mapping[str, Any]],
        usage: Usage | None,
        *,
        error: str | None = None,
    ) -> msgspec.Raw:
        is_cut = status == "incomplete"
        fields = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(self._now()) if status == "completed" else None,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": None if usage is None else _usage(usage),
            "store": self._is_kept,
        }
        return msgspec.Raw(_encode(fields)[:-1] + b"," + self._repeated[1:])


class _Events:
    """The one output of a response."""

    def __init__(self, answer_id: str) -> None:
        self._answer_id = answer_id
        self._blocks = Blocks()
        # The first events are those before the first item.
        self._sequence = 2
        # Log-probabilities by block, and those whose text is held back.
        self._logprobs: dict[int, list[Any]] = {}
        self._untold: list[Any] = []
        # Of the open block of text: nearly every event is a piece of one.
        self._text_event = b""
        self.finish_reason = ""

    def text(self, text: str) -> bytes:
        """A piece that is nothing but content, before the end."""
        if not self._blocks.is_text:
            return self.piece(Output(0, Delta(text)))
        self._blocks.all[-1].pieces.append(text)
        return self._delta(_encode(text), b"[]")

    def piece(self, piece: Output, usage: Usage | None = None) -> bytes:
        """A piece of any kind."""
        if piece.logprobs:
            self._untold += chat_logprobs(piece.logprobs)["content"]
        events: list[bytes] = []
        for step in self._blocks.add(piece.said):
            if step.block.kind == "text" and step.what == "piece":
                logprobs, self._untold = self._untold, []
                self._logprobs.setdefault(step.block.place, []).extend(logprobs)
                events.append(self._delta(_encode(step.piece), _encode(logprobs)))
            else:
                events.append(self._step(step))
        self.finish_reason = piece.finish_reason or self.finish_reason
        return b"".join(events)

    def close(self) -> bytes:
        """The events that end the last item."""
        return b"".join([self._step(step) for step in self._blocks.close()])

    def event(self, kind: str, **fields: Any) -> bytes:
        """An event with the next number."""
        return _event(kind, self.next_number(), **fields)

    def next_number(self) -> int:
        """The number of the next event."""
        number, self._sequence = self._sequence, self._sequence + 1
        return number

    def items(self, status: str) -> list[dict[str, Any]]:
        """All items; the last one has the status of the response."""
        blocks = self._blocks.all
        return [
            self._item(block, status if block is blocks[-1] else "completed") for block in blocks
        ]

    def _step(self, step: Step) -> bytes:
        block, place = step.block, {"output_index": step.block.place}
        if step.what == "piece":
            at = {"item_id": self._item_id(block), **place}
            if block.kind == "call":
                return self.event("response.function_call_arguments.delta", **at, delta=step.piece)
            return self.event(
                f"response.{_PARTS[block.kind]}.delta", **at, content_index=0, delta=step.piece
            )
        if step.what == "open":
            added = self.event(
                "response.output_item.added", **place, item=self._item(block, "in_progress")
            )
            return added + self._part_added(block)
        item = self._item(block, _status(self.finish_reason))
        return self._part_done(block) + self.event("response.output_item.done", **place, item=item)

    def _part_added(self, block: Block) -> bytes:
        if block.kind == "call":
            return b""
        at = {"item_id": self._item_id(block), "output_index": block.place, "content_index": 0}
        if block.kind == "text":
            # The number follows.
            self._text_event = (
                b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
                + _encode(at)[1:-1]
            )
        return self.event("response.content_part.added", **at, part=self._part(block))

    def _part_done(self, block: Block) -> bytes:
        at = {"item_id": self._item_id(block), "output_index": block.place}
        if block.kind == "call":
            return self.event(
                "response.function_call_arguments.done",
                **at,
                name=block.name,
                arguments=block.text,
            )
        at["content_index"] = 0
        part = self._part(block)
        extra = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
        done = self.event(f"response.{_PARTS[block.kind]}.done", **at, text=part["text"], **extra)
        return done + self.event("response.content_part.done", **at, part=part)

    def _delta(self, text: bytes, logprobs: bytes) -> bytes:
        return b'%b,"sequence_number":%d,"delta":%b,"logprobs":%b}\n\n' % (
            self._text_event,
            self.next_number(),
            text,
            logprobs,
        )

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head: dict[str, Any] = {"id": self._item_id(block), "status": status}
        parts = [] if status == "in_progress" else [self._part(block)]
        if block.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": parts}
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": parts}
        return {
            **head,
            "type": "function_call",
            "call_id": block.id,
            "name": block.name,
            "arguments": block.text,
        }

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs.get(block.place, [])
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": logprobs,
        }

    def _item_id(self, block: Block) -> str:
        return f"{_ITEM_PREFIX[block.kind]}_{self._answer_id}_{block.place}"


def _event(kind: str, number: int, **fields: Any) -> bytes:
    data = _encode({"type": kind, "sequence_number": number, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


_PARTS: Final = {"text": "output_text", "reasoning": "reasoning_text"}


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.prompt + usage.completion,
        **({"sampler_restarted": True} if usage.sampler_restarted else {}),
    }


def repeated_fields(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of its request that a response repeats."""
    reasoning, text = request.reasoning or {}, request.text or {}
    return {
        "model": request.model,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": reasoning.get("effort"),
            "summary": reasoning.get("summary"),
        },
        "service_tier": "default",
        "background": False,
        "temperature": request.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
