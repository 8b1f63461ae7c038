"""Errors as OpenAI's clients expect them: a status, and a body that says what is wrong."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from dynbus import (
    Draining,
    DynbusError,
    HandlerError,
    InvalidRequest,
    NoInstances,
    Overloaded,
    StreamLost,
    UnknownOutcome,
)

logger = logging.getLogger(__name__)

_FIELD: Final = re.compile(r"\w+")


class BadRequest(InvalidRequest):
    """Raised when a request is not usable.

    Attributes:
        param: the field that is wrong; empty for none.
        reason: OpenAI's name of the condition, such as `context_length_exceeded`; or empty.
        status: of HTTP.
        is_own: whether it names places of the request as its client wrote it, also where that
            becomes a chat.
    """

    param: str = ""
    reason: str = ""
    status: int = 400
    is_own: bool = False

    def __init__(
        self, message: str = "", *, param: str = "", reason: str = "", status: int = 400
    ) -> None:
        super().__init__(message, started=False)
        self.param = param
        self.reason = reason
        self.status = status


def unsupported(param: str, why: str) -> BadRequest:
    """A field asks for what is not done here."""
    return BadRequest(f"{param}: {why}", param=param, reason="unsupported_value")


def misfit(param: str, why: str) -> BadRequest:
    """A field is not what it must be."""
    return BadRequest(f"{param}: {why}", param=param)


def by_own_names(error: DynbusError, names: Mapping[str, str]) -> DynbusError:
    """A refusal of a chat, for the client of another interface whose request became that chat.

    Args:
        names: what the request calls fields of the chat. What a refusal says of a place within one
            is left out: the request may have other places.
    """
    if not isinstance(error, BadRequest) or error.is_own:
        return error
    field = _FIELD.match(error.param)
    name = names.get(field[0]) if field is not None else None
    if field is None or name is None:
        return error
    named = re.compile(rf"(?<![\w'-]){field[0]}(?:\[\d+\]|\.\w+)*(?![\w'-])")
    message = named.sub(lambda _: name, error.message)
    return BadRequest(message, param=name, reason=error.reason, status=error.status)


class EngineMismatch(DynbusError):
    """Raised when an engine does not take what is made of a request here, whatever it asks for."""

    code = "EngineMismatch"


def mismatch_of(error: DynbusError) -> DynbusError:
    """An error of a call whose request was made here: that its handler did not even begin, since
    the request is none of its own, is nobody's fault who sent something. Any other as it is."""
    if type(error) is not InvalidRequest or error.started:
        return error
    logger.error("the engine takes no such request: %s", error)
    return EngineMismatch(
        "the engine does not take what is made of the request here: they are of versions that do "
        "not fit together; the log says where",
        request_id=error.request_id,
        hop=error.hop,
        started=False,
    )


class ModelNotFound(DynbusError):
    """Raised when no model of that name is served."""

    code = "ModelNotFound"


class RateLimited(Overloaded):
    """Raised when a tenant has used up one of its limits.

    Attributes:
        limit: its name; empty where that is not known.
        is_budget: whether it is one that no short wait helps with.
        is_final: whether no wait at all helps, since the request takes more than the limit.
        headers: that say of what there is how much.
    """

    code = "RateLimited"
    limit: str = ""
    is_budget: bool = False
    is_final: bool = False
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        message: str = "",
        *,
        retry_after: float = 0.0,
        limit: str = "",
        is_budget: bool = False,
        is_final: bool = False,
    ) -> None:
        super().__init__(message, retry_after=retry_after, started=False)
        self.limit = limit
        self.is_budget, self.is_final = is_budget, is_final


class Unauthorized(DynbusError):
    """Raised when a request has no key, or one that is not known or has expired.

    Attributes:
        is_given: whether it has one.
    """

    code = "Unauthorized"
    is_given: bool = False

    def __init__(self, message: str = "", *, is_given: bool = False) -> None:
        super().__init__(message, started=False)
        self.is_given = is_given


class ForeignSite(DynbusError):
    """Raised when a page of another site has a browser ask, or by a name that is not expected."""

    code = "ForeignSite"


class StreamNotFound(DynbusError):
    """Raised when there never was a stream of that name, or not for this key."""

    code = "StreamNotFound"


class StreamGone(DynbusError):
    """Raised when a stream can no longer be resumed."""

    code = "StreamGone"


class UnknownEncoding(DynbusError):
    """Raised when the body of a request is encoded in a way that is not understood."""

    code = "UnknownEncoding"


class BodyTimeout(DynbusError):
    """Raised when the body of a request does not arrive in time."""

    code = "BodyTimeout"


class IdempotencyConflict(DynbusError):
    """Raised when the first request with an idempotency key is still being answered."""

    code = "IdempotencyConflict"


_STATUSES: Final[Mapping[str, int]] = {
    IdempotencyConflict.code: 409,
    RateLimited.code: 429,
    Unauthorized.code: 401,
    ForeignSite.code: 403,
    ModelNotFound.code: 404,
    BodyTimeout.code: 408,
    UnknownEncoding.code: 415,
    StreamNotFound.code: 404,
    StreamGone.code: 410,
    # The instance is gone: another one answers who asks again.
    StreamLost.code: 503,
    UnknownOutcome.code: 503,
}

_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    410: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled",
    503: "service_unavailable",
    504: "timeout",
}

_REASONS: Final[Mapping[str, str]] = {
    ModelNotFound.code: "model_not_found",
    Unauthorized.code: "invalid_api_key",
    RateLimited.code: "rate_limit_exceeded",
    ForeignSite.code: "foreign_site",
    StreamNotFound.code: "stream_not_found",
    StreamGone.code: "stream_gone",
    IdempotencyConflict.code: "idempotency_conflict",
    UnknownEncoding.code: "unsupported_encoding",
    "Overloaded": "overloaded",
    "PayloadTooLarge": "request_too_large",
    # No instance was left to go to.
    "Migrate": "Unavailable",
}

QUOTA: Final = "insufficient_quota"
"""OpenAI's type and name of a budget that is used up."""

AWAY_RETRY: Final = "5"
"""Seconds after which a client may ask again where no engine is there: one that is started again
takes longer than a client's own pauses."""

HIDDEN: Final = "the server failed to answer the request; its log says why"
"""The text for an exception in a handler, whose own text may hold anything."""


class ErrorAnswer(NamedTuple):
    """An error as it is answered.

    Attributes:
        body: a JSON object with `error`.
        headers: beside those of the content.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]


def status_of(error: DynbusError) -> int:
    """The status of HTTP that an error is answered with."""
    if isinstance(error, BadRequest):
        return error.status
    return _STATUSES.get(error.code, error.http_status)


def answer_of(error: DynbusError, request_id: str = "") -> ErrorAnswer:
    """The answer for an error before anything else was answered.

    Args:
        request_id: of the request; the error's own unless given.
    """
    status = status_of(error)
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
        if isinstance(error, RateLimited):
            headers.update(error.headers)
            if error.is_final:
                del headers["Retry-After"]
            if error.is_budget or error.is_final:
                headers["x-should-retry"] = "false"
    elif isinstance(error, NoInstances):
        headers["Retry-After"] = AWAY_RETRY
    elif isinstance(error, IdempotencyConflict | Draining):
        # OpenAI's clients do that by themselves, and another one answers where this one stops.
        headers["Retry-After"] = "1"
    elif isinstance(error, HandlerError):
        # OpenAI's clients send a 500 again, which may have broken an engine.
        headers["x-should-retry"] = "false"
    elif isinstance(error, Unauthorized):
        # By RFC 6750 who sends none is told of no error.
        headers["WWW-Authenticate"] = "Bearer" + ' error="invalid_token"' * error.is_given
    return ErrorAnswer(status, error_body(error, request_id), headers)


def error_fields(error: DynbusError, request_id: str = "") -> dict[str, Any]:
    """The fields of an error: `message`, `type`, `param`, `code` and `request_id`."""
    status = status_of(error)
    bad = error if isinstance(error, BadRequest) else None
    reason = (bad.reason if bad is not None else _REASONS.get(error.code)) or None
    is_budget = isinstance(error, RateLimited) and error.is_budget
    if is_budget:
        reason = QUOTA
    return {
        "message": HIDDEN if isinstance(error, HandlerError) else error.message or error.code,
        "type": QUOTA if is_budget else _TYPES.get(status, "server_error"),
        "param": (bad.param or None) if bad is not None else None,
        "code": reason if status < 500 else reason or error.code,
        "request_id": request_id or error.request_id or None,
    }


def error_body(error: DynbusError, request_id: str = "") -> bytes:
    """An error as a JSON object with `error`, as in a stream that has begun."""
    return msgspec.json.encode({"error": error_fields(error, request_id)})
