"""Every error that a caller can see.

DynbusError
├── InvalidRequest      the request does not fit the handler            (the caller's fault)
├── InvalidResponse     the handler's result does not fit its signature (the handler's fault)
├── ConfigError         something was declared or configured wrongly    (the user's fault)
├── PermissionDenied    the server refused a subject
├── NoInstances         no instance serves the endpoint                 (retryable)
├── Unavailable         the bus or the instance cannot be reached       (retryable)
├── Overloaded          the queue is full; see `retry_after`            (retryable)
├── Draining            the instance is going away                      (retryable)
├── Migrate             the handler asks for another instance           (retryable)
├── DeadlineExceeded    the time is over
├── Cancelled           the caller, or someone for it, cancelled the call
├── HandlerError        the handler raised
├── PayloadTooLarge     over a size limit; nothing was sent
├── StreamLost          the stream cannot be completed
├── ReaderStalled       the reader took nothing for too long
├── ResumeMismatch      a continued stream does not fit what was already delivered
└── UnknownOutcome      the call may or may not have been carried out

An error crosses the wire as its code, message and the few fields below. A code that this
version does not know becomes a plain `DynbusError`: always an error, never success.
"""

from __future__ import annotations


def safe_text(value: object) -> str:
    """`str(value)`, whatever `value` does when asked for it."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - code of users runs here
        return f"<{type(value).__name__} whose str() raises {type(error).__name__}>"


class DynbusError(Exception):
    """Any failure of a call.

    Attributes:
        code: the name of the condition, as it crosses the wire.
        retryable: whether the same call may succeed elsewhere or later.
        hop: `namespace.component.endpoint@instance` where it arose; empty on this side.
        request_id: the request it belongs to; empty outside of one.
        started: False when the handler provably did not run.
    """

    code: str = "DynbusError"
    retryable: bool = False
    # Defaults for subclasses of users that do not call this constructor.
    message: str = ""
    hop: str = ""
    request_id: str = ""
    started: bool = True

    def __init__(
        self,
        message: str = "",
        *,
        hop: str = "",
        request_id: str = "",
        started: bool = True,
    ) -> None:
        super().__init__(message)
        # Not everyone runs a type checker, and this is about to be sent.
        self.message = safe_text(message)
        self.hop = hop
        self.request_id = request_id
        self.started = started

    def __str__(self) -> str:
        where = f" (at {self.hop})" if self.hop else ""
        return f"{self.message or self.code}{where}"


class InvalidRequest(DynbusError):
    """Raised when a request does not fit the handler's signature."""

    code = "InvalidRequest"


class InvalidResponse(DynbusError):
    """Raised when a handler returns or yields something that does not fit its signature."""

    code = "InvalidResponse"


class ConfigError(DynbusError, ValueError):
    """Raised when a name, an option, a file or an actor class is not usable as given."""

    code = "ConfigError"


class PermissionDenied(DynbusError):
    """Raised when the server does not allow this credential to use a subject."""

    code = "PermissionDenied"


class NoInstances(DynbusError):
    """Raised when no instance serves the endpoint, at once or after the wait asked for."""

    code = "NoInstances"
    retryable = True


class Unavailable(DynbusError):
    """Raised when the bus, or the instance named by the caller, cannot be reached."""

    code = "Unavailable"
    retryable = True


class Overloaded(DynbusError):
    """Raised when an instance has no room for the call.

    Attributes:
        retry_after: seconds after which a retry has a chance; 0 when unknown.
    """

    code = "Overloaded"
    retryable = True
    retry_after: float = 0.0

    def __init__(
        self,
        message: str = "",
        *,
        retry_after: float = 0.0,
        hop: str = "",
        request_id: str = "",
        started: bool = True,
    ) -> None:
        super().__init__(message, hop=hop, request_id=request_id, started=started)
        self.retry_after = retry_after


class Draining(DynbusError):
    """Raised when an instance that is going away ends or refuses a call."""

    code = "Draining"
    retryable = True


class Migrate(DynbusError):
    """Raised by a handler that wants the call continued on another instance."""

    code = "Migrate"
    retryable = True


class DeadlineExceeded(DynbusError, TimeoutError):
    """Raised when a call's time is over; `hop` tells where it was noticed."""

    code = "DeadlineExceeded"


class Cancelled(DynbusError):
    """Raised when a call was cancelled by somebody other than the task that awaits it."""

    code = "Cancelled"


class HandlerError(DynbusError):
    """Raised when a handler raised an exception that is not a `DynbusError`.

    Attributes:
        remote_traceback: the handler's traceback when the instance runs with debugging on.
    """

    code = "HandlerError"
    remote_traceback: str = ""


class PayloadTooLarge(DynbusError):
    """Raised before sending when a request or an item is over its limit."""

    code = "PayloadTooLarge"


class StreamLost(DynbusError):
    """Raised when a stream broke and continuing it is not defined or not possible."""

    code = "StreamLost"


class ReaderStalled(DynbusError):
    """Raised when a stream's reader granted no credit for too long."""

    code = "ReaderStalled"


class ResumeMismatch(DynbusError):
    """Raised when a continued stream contradicts what the reader already has.

    Nothing continues streams yet, so nothing raises it.
    """

    code = "ResumeMismatch"


class UnknownOutcome(DynbusError):
    """Raised when an instance died during a call that may or may not have had its effect."""

    code = "UnknownOutcome"


ERRORS: dict[str, type[DynbusError]] = {
    kind.code: kind
    for kind in (
        DynbusError,
        InvalidRequest,
        InvalidResponse,
        ConfigError,
        PermissionDenied,
        NoInstances,
        Unavailable,
        Overloaded,
        Draining,
        Migrate,
        DeadlineExceeded,
        Cancelled,
        HandlerError,
        PayloadTooLarge,
        StreamLost,
        ReaderStalled,
        ResumeMismatch,
        UnknownOutcome,
    )
}

STATUS_CODES: dict[str, int] = {
    "InvalidRequest": 400,
    "PermissionDenied": 403,
    "PayloadTooLarge": 413,
    "Overloaded": 429,
    "Cancelled": 499,
    "Unavailable": 503,
    "Draining": 503,
    "NoInstances": 503,
    "Migrate": 503,
    "DeadlineExceeded": 504,
}
"""`Nats-Service-Error-Code` by error code; every other error is 500."""
