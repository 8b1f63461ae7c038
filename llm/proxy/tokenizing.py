"""Requests to a proxied server for the tokens of a prompt."""

from __future__ import annotations

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


def tokenize_request(body: bytes) -> dict[str, Any]:
    """The body of a request to `/tokenize` for the prompt of a chat or a completion.

    Raises:
        InvalidRequest: it is neither.
    """
    try:
        asked = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request is no JSON object: {error}") from None
    is_chat = "messages" in asked
    names = _OF_CHAT if is_chat else _OF_COMPLETION
    fields: dict[str, Any] = {name: asked[name] for name in names if name in asked}
    if is_chat:
        if asked.get("tool_choice") == "none":
            fields.pop("tools", None)
        return fields
    prompt: object = asked.get("prompt")
    if isinstance(prompt, list) and prompt:
        prompt = cast("list[object]", prompt)[0]
    if not isinstance(prompt, str):
        raise InvalidRequest("the request has neither messages nor a prompt of text")
    return {**fields, "prompt": prompt}
