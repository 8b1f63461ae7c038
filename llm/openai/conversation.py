"""The messages of a chat as templates expect them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from .errors import misfit, unsupported
from .fields import fields_of, is_array, is_object, items_of
from .json_values import JsonSize

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
"""The roles of messages. Templates write roles out, so that any other text could be anything."""


def content_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a chat's message that has some parts: a text where they are nothing else."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def messages_for_template(
    messages: Sequence[dict[str, Any]], *, text_arguments: bool = False
) -> list[dict[str, Any]]:
    """A conversation with the parts of each content joined, and the arguments of each tool call as
    an object.

    Args:
        text_arguments: have arguments as the JSON text that they are in a request.

    Raises:
        BadRequest: a message has no known role, a content that is no text, or tool calls that are
            none, or answers no call.
    """
    # Arguments are JSON within a string, which nobody has counted.
    size = None if text_arguments else JsonSize()
    prepared: list[dict[str, Any]] = []
    # The ids of the calls that the next messages may answer.
    open_calls: set[str | None] = set()
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        checked = _message(message, where, size)
        if message["role"] != "tool":
            open_calls = {
                _id_of(fields_of(call), "id", f"{where}.tool_calls[{at}]")
                for at, call in enumerate(items_of(checked.get("tool_calls")))
            }
        elif _id_of(message, "tool_call_id", where) not in open_calls:
            raise misfit(
                f"{where}.tool_call_id",
                "it is the id of no call in tool_calls of the assistant's message before; an "
                "answer of a tool follows its call",
            )
        prepared.append(checked)
    return prepared


def _id_of(fields: Mapping[str, Any], name: str, where: str) -> str | None:
    """The id of a call; None where there is none."""
    value: object = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise misfit(f"{where}.{name}", "give a string")
    return value


def _message(message: dict[str, Any], where: str, size: JsonSize | None) -> dict[str, Any]:
    role: object = message.get("role")
    if role not in ROLES:
        raise misfit(f"{where}.role", f"give one of {', '.join(ROLES)}")
    content: object = message.get("content")
    if is_array(content):
        parts = enumerate(content)
        texts = [_part(part, f"{where}.content[{at}]") for at, part in parts]
        message = {**message, "content": "\n".join(texts)}
    elif content is None and role != "assistant":
        raise misfit(f"{where}.content", "give a string or a list of parts")
    elif content is None:
        # Templates would write out "None", or fail.
        message = {**message, "content": ""}
    elif not isinstance(content, str):
        raise misfit(f"{where}.content", "give a string or a list of parts")
    calls: object = message.get("tool_calls")
    if calls is None:
        return message
    if not is_array(calls):
        raise misfit(f"{where}.tool_calls", "give a list of calls")
    called = [_call(call, f"{where}.tool_calls[{at}]", size) for at, call in enumerate(calls)]
    return {**message, "tool_calls": called}


def _part(part: object, where: str) -> str:
    fields = fields_of(part)
    kind = fields.get("type")
    text = fields.get("refusal" if kind == "refusal" else "text")
    if kind in ("text", "refusal") and isinstance(text, str):
        return text
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise unsupported(where, f"parts of the type {kind[:40]!r} are not supported, only text")
    raise misfit(where, "give {'type': 'text', 'text': '...'}")


def _call(call: object, where: str, size: JsonSize | None) -> dict[str, Any]:
    """A tool call, with its arguments as an object; as a text without a `size` to count them."""
    fields = fields_of(call)
    function = fields_of(fields.get("function"))
    arguments: object = function.get("arguments", "")
    if isinstance(function.get("name"), str) and (
        isinstance(arguments, str) or is_object(arguments)
    ):
        read = _as_text(arguments) if size is None else _as_object(arguments, where, size)
        return {**fields, "function": {**function, "arguments": read}}
    raise misfit(
        where, "give {'id': '...', 'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
    )


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _as_object(arguments: object, where: str, size: JsonSize) -> object:
    """The object that arguments are as JSON. What a model broke off stays as it is: the turns after
    it shall not fail."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        data = arguments.encode()
        too_much = size.add(data)
        if too_much:
            raise misfit(f"{where}.function.arguments", f"with those before {too_much}")
        value: object = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return arguments
    return value if is_object(value) else arguments
