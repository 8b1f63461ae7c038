"""The digests of images and sounds in a request, for servers that know no `uuid`."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dynbus.llm.openai.fields import UNREADABLE, fields_of, items_of

UUID: Final = b'"uuid"'


class _Chat(msgspec.Struct):
    messages: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


def without_uuids(body: bytes) -> bytes:
    """The body of a request without the `uuid` of its parts; as it is where it is no chat. Takes a
    while where it has images."""
    try:
        chat = msgspec.json.decode(body, type=_Chat)
    except UNREADABLE:
        # Its server says so.
        return body
    if chat.messages is msgspec.UNSET:
        return body
    for message in chat.messages:
        for part in items_of(message.get("content")):
            fields_of(part).pop("uuid", None)
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "messages": chat.messages})
