"""Durable handlers: each call is a stored job. Their options, and the types of their clients."""

from __future__ import annotations

import enum
import inspect
import re
import typing
from collections.abc import Coroutine, Mapping
from datetime import datetime
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar, cast, overload
from uuid import UUID

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.work_queue import TryFailure, WorkQueueConfig

DEFAULT_JOBS: Final = 16
"""Jobs of a durable handler that an instance runs at a time."""
MIN_RESULT_AGE: Final = 120.0
MAX_RESULT_AGE: Final = 365 * 24 * 3600.0
KEY_TYPES: Final = (str, int, UUID)
_PATH: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)
R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class OrderDeclared(ConfigError):
    """Raised for a handler whose `ordered_by` is no key of its requests."""


class DurableOptions(NamedTuple):
    """The options by which jobs of a durable handler are kept and tried; see `handler`."""

    tries: int = 5
    backoff: float = 0.5
    ack_wait: float = 30.0
    max_age: float | None = None
    result_age: float = 24 * 3600.0
    ordered_by: str | None = None

    @property
    def queue(self) -> WorkQueueConfig:
        """The queue that keeps them."""
        return WorkQueueConfig(
            ack_wait=self.ack_wait,
            tries=self.tries,
            retry_delay=self.backoff,
            max_age=self.max_age,
            ordered=self.ordered_by is not None,
        )

    def check(self, label: str) -> Self:
        """Return the options when they are usable.

        Args:
            label: how the message names the handler.

        Raises:
            ConfigError: they are not.
        """
        try:
            self.queue.check()
        except ConfigError as error:
            text = str(error).replace("retry_delay", "backoff")
            raise ConfigError(f"{label}: {text}") from None
        if not MIN_RESULT_AGE <= self.result_age <= MAX_RESULT_AGE:
            raise ConfigError(
                f"{label}: result_age={self.result_age!r} is not usable: give "
                f"{MIN_RESULT_AGE:g} to {MAX_RESULT_AGE:g} seconds"
            )
        return self


DEFAULTS: Final = DurableOptions()


def durable_options(label: str, durable: bool, given: Mapping[str, Any]) -> DurableOptions | None:
    """The options of a durable handler; None for any other.

    Args:
        given: what the decorator was given; None for what was not.

    Raises:
        ConfigError: they are not usable, or the handler is not durable.
    """
    options = {name: value for name, value in given.items() if value is not None}
    if not durable:
        if options:
            raise ConfigError(
                f"{label}: {', '.join(options)} is for jobs: write @handler(durable=True, ...)"
            )
        return None
    for name, value in options.items():
        if name == "ordered_by":
            if not isinstance(value, str) or not _PATH.fullmatch(value):
                raise ConfigError(
                    f"{label}: ordered_by={value!r} names no field of the request: write "
                    '"customer", or "order.customer" for a field of a field'
                )
            continue
        wanted = int if name == "tries" else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ConfigError(f"{label}: {name}={value!r} is no number")
    return DurableOptions(**options).check(label)


# The order of jobs -----------------------------------------------------------------------------


def check_ordered_by(label: str, path: str, annotation: Any) -> None:
    """Check that each request has the field, and that it can be a key.

    Args:
        label: how the message names the handler.
        path: names of fields with dots between them.
        annotation: of the request.

    Raises:
        OrderDeclared: it has not, or it cannot.
    """
    current = annotation
    for name in path.split("."):
        fields = _fields_of(current)
        if fields is None:
            raise OrderDeclared(
                f"{label}: ordered_by={path!r} asks for {name!r} of {_spelled(current)}, which has "
                "no declared fields: give the path of a field of a model, a dataclass or a struct"
            )
        if name not in fields:
            raise OrderDeclared(
                f"{label}: ordered_by={path!r} names no field: {_spelled(current)} has no {name!r}"
                f"{suggestion(name, list(fields))}"
            )
        current = fields[name]
    if not _is_key(current):
        raise OrderDeclared(
            f"{label}: ordered_by={path!r} is {_spelled(current)}, which is no key: it is to be "
            "str, int, UUID, or an Enum or Literal of these, and never None"
        )


def order_key_of(path: str, request: Any) -> str:
    """The key of a request of a handler that was checked."""
    value: Any = request
    for name in path.split("."):
        if isinstance(value, Mapping):
            value = cast("Mapping[str, Any]", value)[name]
        else:
            value = getattr(cast("object", value), name)
    return str(value.value if isinstance(value, enum.Enum) else value)


def _fields_of(annotation: Any) -> dict[str, Any] | None:
    plain = _bare(annotation)
    if not inspect.isclass(plain) or issubclass(plain, (*KEY_TYPES, enum.Enum)):
        return None
    fields = typing.get_type_hints(plain)
    return fields or None


def _is_key(annotation: Any) -> bool:
    plain = _bare(annotation)
    if typing.get_origin(plain) is typing.Literal:
        return all(_is_key(type(value)) for value in typing.get_args(plain))
    if not inspect.isclass(plain) or issubclass(plain, bool):
        return False
    if issubclass(plain, enum.Enum):
        return all(_is_key(type(member.value)) for member in plain)
    return issubclass(plain, KEY_TYPES)


def _bare(annotation: Any) -> Any:
    """A type without what `Annotated` and `NewType` say beside it."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            return annotation


def _spelled(annotation: Any) -> str:
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)


# What clients have -----------------------------------------------------------------------------


class JobState(NamedTuple):
    """The state of a job.

    Attributes:
        status: "waiting" in its queue (for a taker, for its time, or for its next try), "running",
            "done", "failed" or "cancelled". A process whose user may not see what takers hold is
            given "waiting" for "running".
        tries: how often it was handed out, as far as that is known; 0 before the first time, and
            where it was cancelled before its first try had ended.
        failures: its tries that failed and were followed by another, oldest first.
        error: the type and text of what it ended with; empty where it has not ended so.
    """

    status: str
    tries: int
    failures: tuple[TryFailure, ...] = ()
    error: str = ""

    @property
    def has_ended(self) -> bool:
        """True if its state is final."""
        return self.status in ("done", "failed", "cancelled")


class JobHandle(Protocol[T_co]):
    """A job that was submitted, here or in another process.

    Attributes:
        id: names it in every process: `runtime.job(id)`.
    """

    @property
    def id(self) -> str: ...

    async def result(self, timeout: float | None = None) -> T_co:
        """Wait until the job has ended, over outages of the server too; its result.

        Args:
            timeout: seconds to wait; None waits for as long as the job takes.

        Raises:
            DeadlineExceeded: it has not ended in time, and goes on; or it was not begun by its
                deadline.
            HandlerError: its last try failed, and how. Other errors of dynbus come as they are.
            Cancelled: it was cancelled.
            NoJob: there is no such job, or none any more: its result was kept for `result_age`.
        """
        ...

    async def state(self) -> JobState:
        """The state of the job.

        Raises:
            NoJob: there is no such job, or none any more.
            Unavailable: the server does not answer.
        """
        ...

    async def cancel(self) -> bool:
        """Have the job end as cancelled: one that waits does not begin, one that runs is dropped,
        with its sub-calls. False where it has ended already.

        Raises:
            Unavailable: the server does not answer.
        """
        ...

    async def signal(self, name: str, value: Any = None, /) -> None:
        """Send the job a signal, which its handler takes with `signal(name)`; on return the server
        has it.

        Args:
            name: 1 to 63 letters, digits, `_` or `-`.
            value: what a handler can take: a model, or JSON.

        Raises:
            NoJob: there is no such job, or it has ended.
            ConfigError: the name is not usable.
            InvalidRequest: the value cannot be sent as JSON.
            Unavailable: the server does not answer; it may have the signal.
        """
        ...


class DurableMethod(Protocol[R_contra, T_co]):
    """A durable handler of a client, or of an actor."""

    def __call__(self, request: R_contra, /) -> Coroutine[Any, Any, T_co]:
        """Submit a job, and wait for its result."""
        ...

    def submit(
        self,
        request: R_contra,
        /,
        *,
        delay: float = ...,
        at: datetime | None = ...,
        idempotency_key: str | None = ...,
        deadline: float | None = ...,
        priority: int | None = ...,
    ) -> Coroutine[Any, Any, JobHandle[T_co]]:
        """Have a job stored; on return the server has it, and it is done once or more.

        Args:
            delay: seconds before it may begin, by the server's clock.
            at: when it may begin, with a time zone, in place of `delay`.
            idempotency_key: names the job: one that was submitted under this key and has not ended,
                or whose result is still kept, is not stored again, and its handle is returned.
                1 to 128 printable ASCII characters without spaces.
            deadline: seconds by which it must have begun; it is dropped after them.
            priority: jobs above 0 begin before those of 0, and these before those below it: all
                that wait, also for as long as such are submitted. That of the running call unless
                given. A handler with `ordered_by` has its order, and takes none.

        Raises:
            InvalidRequest: the request does not fit, or a time is past or no time.
            Overloaded: the queue is full; it says when to try again.
            PayloadTooLarge: it does not fit into a message.
            Unavailable: the server did not confirm it in time; it may be there. Submit it again
                under the same key.
        """
        ...


class DurableMethodWithoutRequest(Protocol[T_co]):
    """A durable handler that takes no request; see `DurableMethod`."""

    def __call__(self) -> Coroutine[Any, Any, T_co]: ...
    def submit(
        self,
        *,
        delay: float = ...,
        at: datetime | None = ...,
        idempotency_key: str | None = ...,
        deadline: float | None = ...,
        priority: int | None = ...,
    ) -> Coroutine[Any, Any, JobHandle[T_co]]: ...


class Durable(Generic[R, T]):
    """The type that `@handler(durable=True)` gives a method, for type checkers."""

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Durable[R, T]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> DurableMethod[R, T]: ...
    def __get__(self, instance: object, owner: type[Any]) -> Any:
        raise NotImplementedError("a durable handler is the method itself")


class DurableWithoutRequest(Generic[T]):
    """The same of a method without a request."""

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> DurableWithoutRequest[T]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> DurableMethodWithoutRequest[T]: ...
    def __get__(self, instance: object, owner: type[Any]) -> Any:
        raise NotImplementedError("a durable handler is the method itself")


class TakesRequest(Protocol[A_contra, R_contra, T_co]):
    """A method with a request."""

    def __call__(self, actor: A_contra, request: R_contra, /) -> Coroutine[Any, Any, T_co]: ...


class TakesNothing(Protocol[A_contra, T_co]):
    """A method without a request."""

    def __call__(self, actor: A_contra, /) -> Coroutine[Any, Any, T_co]: ...


class DurableDecorator(Protocol):
    """The decorator `handler(durable=True, ...)`."""

    @overload
    def __call__(self, function: TakesNothing[A, T], /) -> DurableWithoutRequest[T]: ...
    @overload
    def __call__(self, function: TakesRequest[A, R, T], /) -> Durable[R, T]: ...
