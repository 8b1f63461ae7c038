"""`/v1/responses`, as an interface of a front end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from dynbus import DynbusError
from dynbus.llm.openai.api import KEEP_ALIVE, Asked
from dynbus.llm.openai.errors import ErrorAnswer, answer_of, by_own_names
from dynbus.llm.openai.places import places_of
from dynbus.llm.openai.requests import chat_of, encode_body

from .answer import ResponseFormat, repeated_fields
from .requests import chat_body, items_given, read_responses
from .stored import Earlier, Pending

_NAMES: Final[Mapping[str, str]] = {"messages": "input", "response_format": "text.format"}


class ResponsesApi:
    """OpenAI's interface for responses; see `Api`.

    Args:
        earlier: what the request names of kept responses; None where none are kept.
        keeps: whether its own is kept.
    """

    keep_alive: bytes = KEEP_ALIVE

    def __init__(self, earlier: Earlier | None = None, *, keeps: bool = False) -> None:
        self._earlier = earlier
        self._keeps = keeps

    @property
    def goes_on(self) -> bool:
        """True if a request goes on from what is kept, which may be long where its body is not."""
        return self._earlier is not None and bool(self._earlier.items or self._earlier.referred)

    def read(self, data: bytes) -> Asked:
        """The request that a body holds."""
        earlier = self._earlier or Earlier()
        request = read_responses(data, keeps=self._earlier is not None)
        given = items_given(request, earlier.referred)
        body = chat_body(request, [*earlier.items, *given], first=len(earlier.items))
        repeated = encode_body(repeated_fields(request))
        pending = Pending(given, earlier) if self._keeps else None
        return Asked(
            chat_of(body),
            encode_body(body),
            partial(ResponseFormat, repeated, pending=pending),
            has_own_id=pending is not None,
            session=earlier.first,
            after=request.previous_response_id or "",
            places=places_of(body["messages"]),
        )

    def refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        """An error as OpenAI's clients expect it."""
        return answer_of(by_own_names(error, _NAMES), request_id)
