"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dynbus import DynbusError
from dynbus.llm.openai.errors import ErrorAnswer, answer_of, error_fields, status_of

from .requests import NO_THREADS

_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_error(error: DynbusError, request_id: str = "") -> ErrorAnswer:
    """The answer for an error before anything else was answered.

    Args:
        request_id: of the request; the error's own unless given.
    """
    answer = answer_of(error, request_id)
    return answer._replace(status=_status(error), body=message_error_body(error, request_id))


def message_error_body(error: DynbusError, request_id: str = "") -> bytes:
    """An error as a JSON object, as in a stream that has begun."""
    fields = error_fields(error, request_id)
    body = anthropics_error(_status(error), fields["message"], fields["request_id"])
    if fields["code"] == NO_THREADS:
        body["error"]["details"] = {"error_code": NO_THREADS, "unsupported": [fields["param"]]}
    return msgspec.json.encode(body)


def anthropics_error(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    """An error as a JSON object."""
    kind = _TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _status(error: DynbusError) -> int:
    # Anthropic has no other status for a request that is not usable.
    status = status_of(error)
    return 400 if status == 422 else status
