"""`/v1/responses`, as an interface of a front end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from dynbus import DynbusError
from dynbus.llm.openai.api import KEEP_ALIVE, Asked
from dynbus.llm.openai.errors import ErrorAnswer, answer_of, by_own_names
from dynbus.llm.openai.requests import chat_of, encode_body

from .answer import ResponseFormat, repeated_fields
from .requests import chat_body, read_responses

_NAMES: Final[Mapping[str, str]] = {"messages": "input", "response_format": "text.format"}


class ResponsesApi:
    """OpenAI's interface for responses; see `Api`."""

    keep_alive: bytes = KEEP_ALIVE

    def read(self, data: bytes) -> Asked:
        """The request that a body holds."""
        request = read_responses(data)
        body = chat_body(request)
        repeated = encode_body(repeated_fields(request))
        return Asked(
            chat_of(body),
            encode_body(body),
            partial(ResponseFormat, repeated),
        )

    def refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        """An error as OpenAI's clients expect it."""
        return answer_of(by_own_names(error, _NAMES), request_id)
