"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from dynbus.bus.errors import DynbusError
from dynbus.llm.openai.errors import ErrorAnswer, answer_of, error_fields, status_of

_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_error(error: DynbusError, request_id: str = "") -> ErrorAnswer:
    """How an error is answered before anything else was.

    Args:
        request_id: of the request; the error's own unless given.
    """
    answer = answer_of(error, request_id)
    return answer._replace(status=_status(error), body=message_error_body(error, request_id))


def message_error_body(error: DynbusError, request_id: str = "") -> bytes:
    """An error as a JSON object, as in a stream that has begun."""
    fields = error_fields(error, request_id)
    told = {"type": _TYPES.get(_status(error), "api_error"), "message": fields["message"]}
    return msgspec.json.encode({"type": "error", "error": told, "request_id": fields["request_id"]})


def _status(error: DynbusError) -> int:
    # Anthropic tells a field that does not fit like all else that is not usable.
    status = status_of(error)
    return 400 if status == 422 else status
