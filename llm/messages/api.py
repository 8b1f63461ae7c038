"""`/v1/messages`, as an interface of a front end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from dynbus import DynbusError
from dynbus.llm.openai.api import Asked
from dynbus.llm.openai.errors import BadRequest, ErrorAnswer, by_own_names
from dynbus.llm.openai.places import places_of
from dynbus.llm.openai.requests import chat_of, encode_body

from .answer import MessageFormat
from .errors import message_error
from .requests import chat_body, read_messages

_NAMES: Final[Mapping[str, str]] = {
    "messages": "messages",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
}


PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'
"""The event that Anthropic's own servers send, and its clients skip."""


class MessagesApi:
    """Anthropic's interface for messages; see `Api`."""

    keep_alive: bytes = PING

    def read(self, data: bytes) -> Asked:
        """The request that a body holds."""
        try:
            request = read_messages(data)
            body = chat_body(request)
        except BadRequest as error:
            error.is_own = True
            raise
        return Asked(
            chat_of(body),
            encode_body(body),
            partial(MessageFormat, request.model),
            # Clients have to give a limit, and give that of Anthropic's models.
            shortens=True,
            places=places_of(body["messages"]),
        )

    def refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        """An error as Anthropic's clients expect it."""
        return message_error(by_own_names(error, _NAMES), request_id)
