"""One answer from the chunks of a stream, and a chunk from a whole answer: engines of text give
the one or the other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from dynbus import InvalidResponse

from .fields import fields_of

_WHOLE: Final = "chat.completion"
"""The name of a whole answer of a chat; that of a completion is its only chunk too."""

_MAY_BE_WHOLE: Final = re.compile(rb'"object"\s*:\s*"chat\.completion"|"message"\s*:')


def as_chunk(item: bytes) -> bytes:
    """A chunk of a stream as it is, and a whole answer of a chat as a chunk.

    Raises:
        InvalidResponse: it calls itself a chunk, and has a whole message.
    """
    # Most items are chunks, which are not decoded.
    if _MAY_BE_WHOLE.search(item) is None:
        return item
    try:
        answer: Any = msgspec.json.decode(item)
        if not _is_whole(answer):
            return item
        answer["object"] = f"{_WHOLE}.chunk"
        choices: list[dict[str, Any]] = answer.get("choices") or []
        for choice in choices:
            choice["delta"] = choice.pop("message", {})
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise InvalidResponse(f"an item is no chunk of a completion: {error}") from None
    return msgspec.json.encode(answer)


class MergedAnswer:
    """The answer that chunks come to. A whole answer among them is taken as it is."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: Any = None
        self._whole: dict[str, Any] | None = None

    def add(self, item: bytes) -> None:
        """Take the next item.

        Raises:
            InvalidResponse: it is no chunk.
        """
        try:
            chunk: Any = msgspec.json.decode(item)
            if not isinstance(chunk, dict):
                raise TypeError("it is no object")
            self._add_chunk(cast("dict[str, Any]", chunk))
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError, KeyError) as error:
            raise InvalidResponse(f"an item is no chunk of a completion: {error}") from None

    @property
    def usage(self) -> object:
        """The tokens that the engine says it used, as it says it; None where it does not."""
        return self._usage if self._whole is None else self._whole.get("usage")

    def encode(self) -> bytes:
        """The answer as JSON."""
        if self._whole is not None:
            return msgspec.json.encode(self._whole)
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            _drop_indices(choice.get("message", {}).get("tool_calls") or [])
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self._usage})

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        kind = chunk.get("object") or ""
        if _is_whole(chunk):
            self._whole = {**chunk, "object": _WHOLE}
            return
        if not self._head:
            self._head = {name: chunk[name] for name in ("id", "created", "model") if name in chunk}
            self._head["object"] = str(kind).removesuffix(".chunk") or _kind_of(chunk)
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        choices: list[dict[str, Any]] = chunk.get("choices") or []
        for choice in choices:
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        index = int(choice.get("index", 0))
        known = self._choices.setdefault(
            index, {"index": index, "logprobs": None, "finish_reason": None}
        )
        if choice.get("finish_reason") is not None:
            known["finish_reason"] = choice["finish_reason"]
        if choice.get("logprobs") is not None:
            known["logprobs"] = _joined(known["logprobs"], choice["logprobs"])
        if "text" in choice:
            known["text"] = known.get("text", "") + choice["text"]
            return
        message = known.setdefault("message", {"role": "assistant", "content": ""})
        delta: dict[str, Any] = choice.get("delta") or {}
        for name, value in delta.items():
            if name == "tool_calls" and isinstance(value, list):
                _join_calls(message.setdefault(name, []), cast("list[dict[str, Any]]", value))
            elif name == "content" or (name != "role" and isinstance(message.get(name), str)):
                message[name] = (message.get(name) or "") + (value or "")
            elif isinstance(value, list) and isinstance(message.get(name), list):
                message[name] += value
            elif value is not None:
                message[name] = value


def _is_whole(answer: dict[str, Any]) -> bool:
    """True if an item is the whole answer of a chat: it says so, or it does not say what it is and
    has a message in place of a delta.

    Raises:
        InvalidResponse: it calls itself something else, and has a message.
    """
    kind = answer.get("object")
    if kind == _WHOLE:
        return True
    choices: list[dict[str, Any]] = answer.get("choices") or []
    if not any("message" in choice and "delta" not in choice for choice in choices):
        return False
    if kind:
        raise InvalidResponse(
            f"an item with object={kind!r:.80} has `message` in choices, which would be read as "
            f"nothing: have it say object={_WHOLE!r}, or give pieces as `delta`"
        )
    return True


def _join_calls(known: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    """Join pieces of tool calls, which come with the index of their call, to what has come."""
    for piece in pieces:
        index = piece.get("index", len(known))
        call = next((one for one in known if one.get("index") == index), None)
        if call is None:
            known.append({**piece, "index": index})
            continue
        function: dict[str, Any] = call.setdefault("function", {})
        for name, value in fields_of(piece.get("function")).items():
            function[name] = (function.get(name) or "") + (value or "")
        for name in ("id", "type"):
            if piece.get(name):
                call[name] = piece[name]


def _drop_indices(calls: list[dict[str, Any]]) -> None:
    """A whole answer has its tool calls in order, without their indices."""
    calls.sort(key=lambda call: call["index"])
    for call in calls:
        del call["index"]


def _kind_of(chunk: dict[str, Any]) -> str:
    """The kind of an answer, by its chunks, for those that do not name it."""
    choices: list[dict[str, Any]] = chunk.get("choices") or []
    return "text_completion" if any("text" in choice for choice in choices) else _WHOLE


def _joined(before: Any, after: Any) -> Any:
    """Log-probabilities of both; their lists are joined."""
    if not isinstance(before, dict) or not isinstance(after, Mapping):
        return after
    joined = cast("dict[str, Any]", before)
    for name, value in cast("Mapping[str, Any]", after).items():
        if isinstance(value, list) and isinstance(joined.get(name), list):
            joined[name] += value
        else:
            joined[name] = value
    return joined
