"""Durable handlers: each call is a stored job. Their options, and the types of their clients."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from datetime import datetime
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar, overload

from dynbus.bus.errors import ConfigError
from dynbus.bus.work_queue import TryFailure, WorkQueueConfig

DEFAULT_JOBS: Final = 16
"""Jobs of a durable handler that an instance runs at a time."""
MIN_RESULT_AGE: Final = 120.0
MAX_RESULT_AGE: Final = 365 * 24 * 3600.0

A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)
R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DurableOptions(NamedTuple):
    """How the jobs of a durable handler are kept and tried; see `handler`."""

    tries: int = 5
    backoff: float = 0.5
    ack_wait: float = 30.0
    max_age: float | None = None
    result_age: float = 24 * 3600.0

    @property
    def queue(self) -> WorkQueueConfig:
        """The queue that keeps them."""
        return WorkQueueConfig(
            ack_wait=self.ack_wait,
            tries=self.tries,
            retry_delay=self.backoff,
            max_age=self.max_age,
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
        wanted = int if name == "tries" else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ConfigError(f"{label}: {name}={value!r} is no number")
    return DurableOptions(**options).check(label)


class JobState(NamedTuple):
    """Where a job is.

    Attributes:
        status: "waiting" in its queue (for a taker, for its time, or for its next try), "running",
            "done", "failed" or "cancelled".
        tries: how often it was handed out, as far as that is known; 0 before the first time.
        failures: its tries that failed and were followed by another, oldest first.
        error: the type and text of what it ended with; empty where it has not ended so.
    """

    status: str
    tries: int
    failures: tuple[TryFailure, ...] = ()
    error: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing becomes of it any more."""
        return self.status in ("done", "failed", "cancelled")


class JobHandle(Protocol[T_co]):
    """A job that was submitted, here or in another process.

    Attributes:
        id: names it in every process: `runtime.job(id)`.
    """

    @property
    def id(self) -> str: ...

    async def result(self, timeout: float | None = None) -> T_co:
        """Wait until the job has ended; its result.

        Args:
            timeout: seconds to wait; None waits for as long as the job takes.

        Raises:
            DeadlineExceeded: it has not ended in time, and goes on; or it was not begun by its
                deadline.
            HandlerError: its last try failed, and how. Other errors of dynbus come as they are.
            Cancelled: it was cancelled.
            NoJob: there is no such job, or none any more: its result was kept for `result_age`.
            Unavailable: the server does not answer.
        """
        ...

    async def state(self) -> JobState:
        """Where the job is.

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
        idempotency_key: str = ...,
        deadline: float | None = ...,
    ) -> Coroutine[Any, Any, JobHandle[T_co]]:
        """Have a job stored; on return the server has it, and it is done once or more.

        Args:
            delay: seconds before it may begin, by the server's clock.
            at: when it may begin, with a time zone, in place of `delay`.
            idempotency_key: names the job: one that was submitted under this key and has not ended,
                or whose result is still kept, is not stored again, and its handle is returned.
                1 to 128 printable ASCII characters without spaces.
            deadline: seconds by which it must have begun; it is dropped after them.

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
        idempotency_key: str = ...,
        deadline: float | None = ...,
    ) -> Coroutine[Any, Any, JobHandle[T_co]]: ...


class Durable(Generic[R, T]):
    """What `@handler(durable=True)` makes of a method, to type checkers."""

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
    """What `handler(durable=True, ...)` is."""

    @overload
    def __call__(self, function: TakesNothing[A, T], /) -> DurableWithoutRequest[T]: ...
    @overload
    def __call__(self, function: TakesRequest[A, R, T], /) -> Durable[R, T]: ...
