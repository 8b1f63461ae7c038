"""Requests to a proxied server for the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from dynbus import InvalidRequest

_OF_CHAT: Final = (
    "model",
    "messages",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)
_OF_COMPLETION: Final = ("model", "prompt", "add_special_tokens")


def chat_fields(chat: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request to `/tokenize` for the prompt of a chat."""
    fields = {name: chat[name] for name in _OF_CHAT if name in chat}
    if chat.get("tool_choice") == "none":
        fields.pop("tools", None)
    return fields


def tokenize_request(body: bytes) -> dict[str, Any]:
    """The body of a request to `/tokenize` for the prompt of a chat or a completion.

    Raises:
        InvalidRequest: it is neither.
    """
    try:
        asked = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request is no JSON object: {error}") from None
    if "messages" in asked:
        return chat_fields(asked)
    fields: dict[str, Any] = {name: asked[name] for name in _OF_COMPLETION if name in asked}
    prompt: object = asked.get("prompt")
    if isinstance(prompt, list) and prompt:
        prompt = cast("list[object]", prompt)[0]
    if not isinstance(prompt, str):
        raise InvalidRequest("the request has neither messages nor a prompt of text")
    return {**fields, "prompt": prompt}
