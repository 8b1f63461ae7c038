"""Every error that a caller can see.

DynbusError
├── InvalidRequest      the request does not fit the handler            (the caller's fault)
├── InvalidResponse     the handler's result does not fit its signature (the handler's fault)
├── ConfigError         something was declared or configured wrongly    (the user's fault)
├── PermissionDenied    the server refused a subject
├── NoInstances         no instance serves the endpoint                 (retryable)
├── Unavailable         the bus or the instance cannot be reached       (retryable)
├── Overloaded          no room, or no time; see `retry_after`          (retryable)
├── Draining            the instance is going away                      (retryable)
├── Migrate             the handler asks for another instance           (retryable)
├── DeadlineExceeded    the time is over
├── Cancelled           the caller, or an operator, cancelled the call
├── HandlerError        the handler raised
├── PayloadTooLarge     over a size limit; nothing was sent
├── StreamLost          the stream cannot be completed
├── ReaderStalled       the reader took nothing for too long
├── ResumeMismatch      a continued stream does not fit what was already delivered
└── UnknownOutcome      the call may or may not have been carried out

An error crosses the wire as its code, message and the few fields below. Where a class with that
code is defined, it arrives as one of that class, a user's own too. A code that the process does not
know becomes a plain `DynbusError`: always an error, never success. Nothing is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast
from weakref import WeakValueDictionary

MAX_LEAVES: Final = 5
"""Exceptions of a group that `describe_exception` tells."""


def safe_text(value: object) -> str:
    """`str(value)`, whatever `value` does when asked for it."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - code of users runs here
        return f"<{type(value).__name__} whose str() raises {type(error).__name__}>"


def only_cause(error: BaseException) -> BaseException:
    """The exception in a group of one, as task groups raise it; any other exception itself."""
    while len(inner := _within(error)) == 1:
        error = inner[0]
    return error


def describe_exception(error: BaseException) -> str:
    """The type and text of an exception on one line; of a group those of what is in it too."""
    text = safe_text(error)
    description = f"{type(error).__name__}: {text}" if text else type(error).__name__
    leaves = list(_leaves(error))
    if not leaves:
        return description
    inner = "; ".join(describe_exception(leaf) for leaf in leaves[:MAX_LEAVES])
    more = f"; and {len(leaves) - MAX_LEAVES} more" if len(leaves) > MAX_LEAVES else ""
    return f"{description}: {inner}{more}"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    for one in _within(error):
        if _within(one):
            yield from _leaves(one)
        else:
            yield one


def _within(error: BaseException) -> Sequence[BaseException]:
    """The exceptions of a group, which is never empty; none of any other exception."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).exceptions
    return ()


_defined: WeakValueDictionary[str, type[DynbusError]] = WeakValueDictionary()
"""The classes of this process by the code that each defines; the latest one of a code."""


class DynbusError(Exception):
    """Any failure of a call.

    A subclass with a `code` of its own arrives as itself where its class is defined, with the
    fields below; its own constructor is not called there.

    Attributes:
        code: the name of the condition, as it crosses the wire.
        retryable: whether the same call may succeed elsewhere or later.
        hop: `namespace.component.endpoint@instance` where it arose; empty on this side.
        request_id: the request it belongs to; empty outside of one.
        started: False when the handler provably did not run.
        is_loss: whether a stream that ends so was lost or given up by its instance, so that another
            one may go on with it.
    """

    code: str = "DynbusError"
    retryable: bool = False
    is_loss: bool = False
    # Defaults for subclasses of users that do not call this constructor.
    message: str = ""
    hop: str = ""
    request_id: str = ""
    started: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        code: Any = vars(cls).get("code")
        if isinstance(code, str):
            _defined[code] = cls

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

    @classmethod
    def of_code(
        cls,
        code: str,
        message: str,
        *,
        hop: str = "",
        request_id: str = "",
        started: bool = True,
    ) -> DynbusError:
        """The error of a code that came over the wire, of the class that has this code here.

        Args:
            hop, request_id, started: see `DynbusError`.
        """
        kind = ERRORS.get(code) or _defined.get(code) or DynbusError
        error: DynbusError
        try:
            # The constructor of a user's class takes what the user likes.
            error = kind.__new__(kind, message)
            DynbusError.__init__(error, message, hop=hop, request_id=request_id, started=started)
        except Exception:  # noqa: BLE001 - a class that cannot be made so: the base stands in
            error = DynbusError(message, hop=hop, request_id=request_id, started=started)
        error.code = code
        return error

    @property
    def http_status(self) -> int:
        """The status of HTTP for it, and the `Nats-Service-Error-Code` of an answer."""
        return STATUS_CODES.get(self.code, 500)


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
    """Raised when an instance has no room for the call, or the call would probably not be done by
    its deadline.

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
    is_loss = True


class Migrate(DynbusError):
    """Raised by a handler that wants the call continued on another instance."""

    code = "Migrate"
    retryable = True
    is_loss = True


class DeadlineExceeded(DynbusError, TimeoutError):
    """Raised when a call's time is over; `hop` tells where it was noticed."""

    code = "DeadlineExceeded"


class Cancelled(DynbusError):
    """Raised when a call was cancelled by somebody other than the task that awaits it."""

    code = "Cancelled"


class HandlerError(DynbusError):
    """Raised when a handler raised an exception that is not a `DynbusError`.

    Attributes:
        error_type: the name of the exception's class; empty when an instance of an earlier
            version answered.
        remote_traceback: the handler's traceback when the instance runs with debugging on.
    """

    code = "HandlerError"
    error_type: str = ""
    remote_traceback: str = ""


class PayloadTooLarge(DynbusError):
    """Raised before sending when a request or an item is over its limit."""

    code = "PayloadTooLarge"


class StreamLost(DynbusError):
    """Raised when a stream broke and continuing it is not defined or not possible."""

    code = "StreamLost"
    is_loss = True


class ReaderStalled(DynbusError):
    """Raised when a stream's reader granted no credit for too long."""

    code = "ReaderStalled"


class ResumeMismatch(DynbusError):
    """Raised when a stream that goes on at another instance contradicts what was delivered."""

    code = "ResumeMismatch"


class UnknownOutcome(DynbusError):
    """Raised when an instance died during a call that may or may not have had its effect."""

    code = "UnknownOutcome"


ERRORS: dict[str, type[DynbusError]] = {DynbusError.code: DynbusError, **_defined}
"""The classes above by their codes; a user's class takes the place of none of them."""


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
