"""`Reply`: where the items of a stream go that are not yielded, such as those of an engine."""

from __future__ import annotations

import inspect
import logging
import typing
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable
from typing import Any, Final, Generic, Protocol, TypeVar, overload

from dynbus.bus.errors import DynbusError, HandlerError, describe_exception
from dynbus.bus.protocol.reply_port import ReplyPort

logger = logging.getLogger(__name__)

PARAMETER: Final = "reply"
"""The name of a handler's parameter that takes a reply."""

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
F = TypeVar("F", bound=Callable[..., Any])


class Reply(Generic[T_contra]):
    """The stream of one call, for the maker of its items. To be used on the event loop.

    A handler that takes one beside its request sends its items by it in place of yielding them, or
    hands it to somebody who does. The call ends when the handler returns or raises, with the first
    `end` or `fail`, or when it is cancelled; nothing that comes later changes that.
    """

    __slots__ = ("_encode", "_port", "_push")

    def __init__(self, port: ReplyPort, encode: Callable[[Any], bytes]) -> None:
        self._port = port
        self._encode = encode
        self._push = port.push

    def __repr__(self) -> str:
        state = "ended" if self.has_ended else "paused" if self.is_paused else "open"
        return f"<Reply [{state}]>"

    @property
    def is_paused(self) -> bool:
        """True if the reader has no credit left for another item."""
        return self._port.paused

    @property
    def has_ended(self) -> bool:
        """True if the call has ended, so that nothing is sent any longer."""
        return self._port.ended

    def push(self, item: T_contra) -> bool:
        """Send an item.

        Returns:
            Whether another may follow at once. False does not refuse this item: its reader has no
            credit for more, so make none before `writable`. False as well when the call has ended.

        Raises:
            InvalidResponse: the item does not fit the handler's signature.
            PayloadTooLarge: it exceeds `max_item_bytes`.
        """
        return self._push(self._encode(item))

    async def writable(self) -> None:
        """Wait until another item may follow, or the call has ended.

        Raises:
            Unavailable: the reader is a plain NATS client, and the server takes nothing.
        """
        await self._port.writable()

    def when_writable(self, then: Callable[[], object]) -> None:
        """Have `then` called once, soon after another item may follow or the call has ended."""
        self._port.when_writable(then)

    def end(self) -> None:
        """End the stream well."""
        self._port.end()

    def fail(self, error: Exception) -> None:
        """End the stream with an error; as `HandlerError`, where it is none of dynbus."""
        if not isinstance(error, DynbusError):
            logger.error("%r failed", self, exc_info=error)
            error, raised = HandlerError(describe_exception(error)), error
            error.error_type = type(raised).__name__
        # The handler did run, whatever a sub-call said of itself.
        error.started = True
        self._port.fail(error)

    async def ended(self) -> None:
        """Wait until the call has ended."""
        await self._port.closed()


def push_each(pairs: Iterable[tuple[Reply[T], T]]) -> list[Reply[T]]:
    """Send items of many streams at once, such as those of an engine's step; no task is woken.

    All that goes to one client leaves in one message.

    Returns:
        The replies for which nothing more is to be made now: their reader has no credit for more,
        or the call has ended. The item was sent in the first case.

    An item that cannot be sent ends its stream with the reason, and no other.
    """
    paused: list[Reply[T]] = []
    for reply, item in pairs:
        try:
            if not reply._push(reply._encode(item)):  # pyright: ignore[reportPrivateUsage]
                paused.append(reply)
        except DynbusError as error:
            logger.error("%r: %s", reply, error)
            reply.fail(error)
            paused.append(reply)
    return paused


# What a handler with a reply is to its callers ----------------------------------------------

A_contra = TypeVar("A_contra", contravariant=True)
R_contra = TypeVar("R_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
R = TypeVar("R")


class RepliesTo(Protocol[A_contra, R_contra, T_co]):
    """A method with a request and a reply."""

    def __call__(
        self, actor: A_contra, request: R_contra, /, *, reply: Reply[T_co]
    ) -> Coroutine[Any, Any, None]: ...


class Replies(Protocol[A_contra, T_co]):
    """A method with a reply alone."""

    def __call__(self, actor: A_contra, /, *, reply: Reply[T_co]) -> Coroutine[Any, Any, None]: ...


class HandlerDecorator(Protocol):
    """The decorator that `handler(...)` returns with options: a method with a reply is a stream to
    callers."""

    @overload
    def __call__(
        self, function: RepliesTo[A, R, T], /
    ) -> Callable[[A, R], AsyncGenerator[T, None]]: ...
    @overload
    def __call__(self, function: Replies[A, T], /) -> Callable[[A], AsyncGenerator[T, None]]: ...
    @overload
    def __call__(self, function: F, /) -> F: ...


S = TypeVar("S", bound=Callable[..., AsyncIterable[Any]])


class StreamDecorator(Protocol):
    """The decorator that `handler(resume=...)` returns: only for handlers that stream."""

    @overload
    def __call__(
        self, function: RepliesTo[A, R, T], /
    ) -> Callable[[A, R], AsyncGenerator[T, None]]: ...
    @overload
    def __call__(self, function: Replies[A, T], /) -> Callable[[A], AsyncGenerator[T, None]]: ...
    @overload
    def __call__(self, function: S, /) -> S: ...


def takes_reply(signature: inspect.Signature) -> bool:
    """True if a handler sends its items by a reply."""
    return any(map(is_reply, signature.parameters.values()))


def is_reply(parameter: inspect.Parameter) -> bool:
    """True if a parameter of a handler is its reply; one of another type is its request."""
    return parameter.name == PARAMETER and is_typed_as_reply(parameter)


def is_typed_as_reply(parameter: inspect.Parameter) -> bool:
    """True if a parameter, whatever its name, is annotated as a reply."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2] == Reply.__name__
    return annotation is Reply or typing.get_origin(annotation) is Reply
