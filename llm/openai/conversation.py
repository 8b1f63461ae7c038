"""The messages of a chat as templates expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from .errors import misfit, unsupported


def messages_for_template(
    messages: Sequence[dict[str, Any]], *, text_arguments: bool = False
) -> list[dict[str, Any]]:
    """A conversation with the parts of each content joined, and the arguments of each tool call as
    an object.

    Args:
        text_arguments: have arguments as the JSON text that they are in a request.

    Raises:
        BadRequest: a message has no role, a content that is no text, or tool calls that are none.
    """
    return [
        _message(message, f"messages[{place}]", text_arguments=text_arguments)
        for place, message in enumerate(messages)
    ]


def _message(message: dict[str, Any], where: str, *, text_arguments: bool) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise misfit(f"{where}.role", "give a string, such as 'user'")
    content = message.get("content")
    if isinstance(content, list):
        parts = cast("list[object]", content)
        texts = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(parts)]
        message = {**message, "content": "\n".join(texts)}
    elif content is None:
        # Templates would write out "None", or fail.
        message = {**message, "content": ""}
    elif not isinstance(content, str):
        raise misfit(f"{where}.content", "give a string or a list of parts")
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise misfit(f"{where}.tool_calls", "give a list of calls")
    called = [
        _call(call, f"{where}.tool_calls[{at}]", text_arguments=text_arguments)
        for at, call in enumerate(cast("list[object]", calls))
    ]
    return {**message, "tool_calls": called}


def _part(part: object, where: str) -> str:
    if isinstance(part, dict):
        fields = cast("dict[str, Any]", part)
        kind = fields.get("type")
        text = fields.get("refusal" if kind == "refusal" else "text")
        if kind in ("text", "refusal") and isinstance(text, str):
            return text
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise unsupported(
                where, f"parts of the type {kind[:40]!r} are not supported, only text"
            )
    raise misfit(where, "give {'type': 'text', 'text': '...'}")


def _call(call: object, where: str, *, text_arguments: bool) -> dict[str, Any]:
    fields = cast("dict[str, Any]", call) if isinstance(call, dict) else {}
    function = fields.get("function")
    if isinstance(function, dict):
        told = cast("dict[str, Any]", function)
        arguments = told.get("arguments", "")
        if isinstance(told.get("name"), str) and isinstance(arguments, str | dict):
            if text_arguments:
                arguments = arguments if isinstance(arguments, str) else _text(arguments)
            elif isinstance(arguments, str):
                arguments = _object(arguments)
            return {**fields, "function": {**told, "arguments": arguments}}
    raise misfit(
        where, "give {'id': '...', 'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
    )


def _text(arguments: dict[str, Any]) -> str:
    return msgspec.json.encode(arguments).decode()


def _object(text: str) -> dict[str, Any] | str:
    """The object that arguments are as JSON. What a model broke off stays as it is: the turns after
    it shall not fail."""
    if not text.strip():
        return {}
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text
    return cast("dict[str, Any]", value) if isinstance(value, dict) else text
